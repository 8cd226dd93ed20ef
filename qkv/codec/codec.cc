// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/codec.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "qkv/codec/blocks.h"
#include "qkv/codec/pq.h"
#include "qkv/codec/simd.h"

namespace qkv {
namespace {

template <CodecId kId>
size_t BlockBytes(int head_dim) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  return blocks::BlockBytes(kId, head_dim);
}

template <CodecId kId>
constexpr Codec Row(std::string_view name, std::string_view description) {
  return {kId, name, description, blocks::IsRotated(kId), blocks::IsPq(kId), kId == CodecId::kBands, BlockBytes<kId>};
}

constexpr std::array kCodecs = {
    Row<CodecId::kF16>("f16", "IEEE half precision"),
    Row<CodecId::kI8>("i8", "8 bits, one scale per token"),
    Row<CodecId::kI8Channel>("i8-channel", "8 bits, one scale per channel of a page's head"),
    Row<CodecId::kI8Tensor>("i8-tensor", "8 bits, one scale per page's head"),
    Row<CodecId::kI4>("i4", "4 bits, one scale per token and group of channels"),
    Row<CodecId::kI4Z>("i4z", "4 bits, one scale and one minimum per token and group of channels"),
    Row<CodecId::k3>("3", "3 bits, rotated, one scale per token"),
    Row<CodecId::k4>("4", "4 bits, rotated, one scale per token"),
    Row<CodecId::k5>("5", "5 bits, rotated, one scale per token"),
    Row<CodecId::k6>("6", "6 bits, rotated, one scale per token"),
    Row<CodecId::k7>("7", "7 bits, rotated, one scale per token"),
    Row<CodecId::k8>("8", "8 bits, rotated, one scale per token"),
    Row<CodecId::kPq4>("pq4", "4 bits, rotated, pairs of channels by a learned codebook, one scale per token"),
    Row<CodecId::kBands>("5/3", "keys behind a calibration (--bal) only: 5 and 3 bits, rotated, one scale per token"),
    Row<CodecId::kI4Channel>("i4-channel", "4 bits, one scale and one minimum per channel of a page's head"),
    Row<CodecId::kPq2>("pq2", "as pq4, 2 bits"),
};
constexpr Codec kRefinement = Row<CodecId::kRefine4>("+4", "4 bits of what a rotated page left over");

constexpr std::array kPresets = {
    Preset{"exact", "8 bits: the text of f16 but for rare near ties", {CodecId::k8, CodecId::k8}},
    Preset{"safe", "keys 6 bits, values 5", {CodecId::k6, CodecId::k5}},
    Preset{"balanced", "keys 5 bits, values 4", {CodecId::k5, CodecId::k4}},
    Preset{"small", "4 bits", {CodecId::k4, CodecId::k4}},
    Preset{"tiny", "keys 4 bits, values 3", {CodecId::k4, CodecId::k3}},
};
constexpr std::string_view kRefinementMark = "+4";

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

// A name for both sides, of a codec or a preset.
Result<CodecPair> ParseName(std::string_view name) {
  const auto preset = std::ranges::find(kPresets, name, &Preset::name);
  if (preset != kPresets.end()) return preset->codecs;
  if (const Codec* codec = FindCodec(name)) return CodecPair{codec->id, codec->id};
  std::string presets;
  for (const Preset& known : kPresets) presets.append(presets.empty() ? "" : ", ").append(known.name);
  Error error = ParseCodec(name).error();
  error.message += fmt::format("; or one of {}", presets);
  return tl::unexpected(std::move(error));
}

Result<CodecPair> ParseSides(std::string_view text) {
  CodecPair pair;
  bool has_k = false, has_v = false;
  for (std::string_view rest = text;;) {
    const size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    const bool is_k = part.starts_with("k="), is_v = part.starts_with("v=");
    if (part == kRefinementMark && !pair.refine) {
      pair.refine = true;
    } else if ((is_k && !has_k) || (is_v && !has_v)) {
      (is_k ? has_k : has_v) = true;
      QKV_ASSIGN_OR_RETURN((is_k ? pair.k : pair.v), ParseCodec(part.substr(2)));
    } else {
      has_k = has_v = false;
      break;
    }
    if (comma == rest.npos) break;
    rest.remove_prefix(comma + 1);
  }
  if (has_k && has_v) return pair;
  return Err(
      Code::kInvalidArgument,
      "codec pair '{}', expected a name for both sides or k=<name>,v=<name>, with a refinement plane <name>+4 or "
      "k=<name>,v=<name>,+4",
      Shown(text));
}

}  // namespace

void Codec::encode(Side side, const float* rows, int tokens, int head_dim, std::byte* block, const PqBook* book) const {
  QKV_CHECK(blocks::IsHeadDim(head_dim) && tokens >= 1 && tokens <= kPageTokens);
  QKV_CHECK(!keys_only || side == Side::kK);
  if (!needs_book) return simd::Encode(id, side, rows, tokens, head_dim, block);
  QKV_CHECK(book != nullptr);
  PqEncode(side, rows, tokens, head_dim, *book, block);
}

void Codec::unpack(Side side, const std::byte* block, int head_dim, float* panel, const PqBook* book) const {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  QKV_CHECK(!keys_only || side == Side::kK);
  if (!needs_book) return simd::Unpack(id, side, block, head_dim, panel);
  QKV_CHECK(book != nullptr);
  PqUnpack(side, block, head_dim, *book, panel);
}

void Codec::decode(Side side, const std::byte* block, int tokens, int head_dim, float* rows, const PqBook* book) const {
  QKV_CHECK(tokens >= 1 && tokens <= kPageTokens);
  alignas(64) float panel[kPageTokens * kMaxHeadDim];
  unpack(side, block, head_dim, panel, book);
  if (side == Side::kV) {
    std::memcpy(rows, panel, sizeof(float) * blocks::Size(tokens) * blocks::Size(head_dim));
    return;
  }
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < head_dim; ++c) rows[t * head_dim + c] = panel[c * kPageTokens + t];
  }
}

std::span<const Codec> Codecs() {
  return kCodecs;
}

const Codec* FindCodec(uint8_t id) {
  if (static_cast<CodecId>(id) == kRefinement.id) return &kRefinement;
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

bool TakesRefinement(CodecPair codecs) {
  return std::ranges::all_of(std::array{codecs.k, codecs.v}, [](CodecId id) {
    return (id >= CodecId::k3 && id <= CodecId::k8) || id == CodecId::kBands;
  });
}

bool NeedsBooks(CodecPair codecs) {
  return blocks::IsPq(codecs.k) || blocks::IsPq(codecs.v);
}

std::span<const Preset> Presets() {
  return kPresets;
}

Result<CodecPair> ParseCodecPair(std::string_view text) {
  CodecPair pair;
  if (text.find('=') != text.npos) {
    QKV_ASSIGN_OR_RETURN(pair, ParseSides(text));
  } else {
    const bool refine = text.ends_with(kRefinementMark);
    QKV_ASSIGN_OR_RETURN(pair, ParseName(refine ? text.substr(0, text.size() - kRefinementMark.size()) : text));
    pair.refine = refine;
  }
  if (const Codec& v = CodecOf(pair.v); v.keys_only) {
    return Err(Code::kInvalidArgument, "codec pair '{}': {} is for keys only, as in k={},v=4", Shown(text), v.name,
               v.name);
  }
  if (pair.refine && !TakesRefinement(pair)) {
    return Err(Code::kInvalidArgument, "codec pair '{}': a refinement plane goes with the codecs 3 to 8 and 5/3 only",
               Shown(text));
  }
  return pair;
}

std::string ToString(CodecPair pair) {
  if (pair == kLayersPair) return "layers";
  const std::string_view k = CodecOf(pair.k).name;
  const std::string_view v = CodecOf(pair.v).name;
  if (k == v) return fmt::format("{}{}", k, pair.refine ? kRefinementMark : "");
  return fmt::format("k={},v={}{}{}", k, v, pair.refine ? "," : "", pair.refine ? kRefinementMark : "");
}

}  // namespace qkv
