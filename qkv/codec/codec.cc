// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/codec.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "qkv/codec/blocks.h"
#include "qkv/codec/simd.h"

namespace qkv {
namespace {

template <CodecId kId>
size_t BlockBytes(int head_dim) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  return blocks::BlockBytes(kId, head_dim);
}

template <CodecId kId>
void Encode(Side side, const float* rows, int tokens, int head_dim, std::byte* block) {
  QKV_CHECK(blocks::IsHeadDim(head_dim) && tokens >= 1 && tokens <= kPageTokens);
  simd::Encode(kId, side, rows, tokens, head_dim, block);
}

template <CodecId kId>
void Unpack(Side side, const std::byte* block, int head_dim, float* panel) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  simd::Unpack(kId, side, block, head_dim, panel);
}

template <CodecId kId>
void Decode(Side side, const std::byte* block, int tokens, int head_dim, float* rows) {
  QKV_CHECK(blocks::IsHeadDim(head_dim) && tokens >= 1 && tokens <= kPageTokens);
  alignas(64) float panel[kPageTokens * kMaxHeadDim];
  simd::Unpack(kId, side, block, head_dim, panel);
  if (side == Side::kV) {
    std::memcpy(rows, panel, sizeof(float) * blocks::Size(tokens) * blocks::Size(head_dim));
    return;
  }
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < head_dim; ++c) rows[t * head_dim + c] = panel[c * kPageTokens + t];
  }
}

template <CodecId kId>
constexpr Codec Row(std::string_view name, std::string_view description) {
  return {kId, name, description, BlockBytes<kId>, Encode<kId>, Decode<kId>, Unpack<kId>};
}

constexpr std::array kCodecs = {
    Row<CodecId::kF16>("f16", "IEEE half precision"),
    Row<CodecId::kI8>("i8", "8 bits, one scale per token"),
    Row<CodecId::kI8Channel>("i8-channel", "8 bits, one scale per channel of a page's head"),
    Row<CodecId::kI8Tensor>("i8-tensor", "8 bits, one scale per page's head"),
    Row<CodecId::kI4>("i4", "4 bits, one scale per token and group of channels"),
    Row<CodecId::kI4Z>("i4z", "4 bits, one scale and one minimum per token and group of channels"),
};

// For messages: one line, not too long.
std::string Shown(std::string_view text) {
  constexpr size_t kMost = 60;
  std::string shown;
  for (const char c : text.substr(0, kMost)) shown += c >= 0x20 && c < 0x7f ? c : '?';
  return shown + (text.size() > kMost ? "…" : "");
}

Result<CodecId> ParseCodec(std::string_view name) {
  if (const Codec* codec = FindCodec(name)) return codec->id;
  std::string known;
  for (const Codec& codec : kCodecs) known.append(known.empty() ? "" : ", ").append(codec.name);
  return Err(Code::kInvalidArgument, "unknown codec '{}', expected one of {}", Shown(name), known);
}

}  // namespace

std::span<const Codec> Codecs() {
  return kCodecs;
}

const Codec* FindCodec(uint8_t id) {
  const auto it = std::ranges::find(kCodecs, static_cast<CodecId>(id), &Codec::id);
  return it == kCodecs.end() ? nullptr : &*it;
}

const Codec* FindCodec(std::string_view name) {
  const auto it = std::ranges::find(kCodecs, name, &Codec::name);
  return it == kCodecs.end() ? nullptr : &*it;
}

const Codec& CodecOf(CodecId id) {
  const Codec* codec = FindCodec(static_cast<uint8_t>(id));
  QKV_CHECK(codec != nullptr);
  return *codec;
}

double BitsPerValue(const Codec& codec, int head_dim) {
  return 8.0 * static_cast<double>(codec.block_bytes(head_dim)) / (kPageTokens * head_dim);
}

Result<CodecPair> ParseCodecPair(std::string_view text) {
  if (text.find('=') == std::string_view::npos) {
    QKV_ASSIGN_OR_RETURN(const CodecId both, ParseCodec(text));
    return CodecPair{both, both};
  }
  const size_t comma = text.find(',');
  std::optional<CodecId> k, v;
  for (std::string_view part : {text.substr(0, comma), comma == text.npos ? "" : text.substr(comma + 1)}) {
    const bool is_k = part.starts_with("k=");
    std::optional<CodecId>& side = is_k ? k : v;
    if ((!is_k && !part.starts_with("v=")) || side.has_value()) {
      return Err(Code::kInvalidArgument, "codec pair '{}', expected a name for both sides or k=<name>,v=<name>",
                 Shown(text));
    }
    QKV_ASSIGN_OR_RETURN(side, ParseCodec(part.substr(2)));
  }
  return CodecPair{*k, *v};
}

std::string ToString(CodecPair pair) {
  const std::string_view k = CodecOf(pair.k).name;
  const std::string_view v = CodecOf(pair.v).name;
  return k == v ? std::string(k) : fmt::format("k={},v={}", k, v);
}

}  // namespace qkv
