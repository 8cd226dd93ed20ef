// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/preset.h"

#include <algorithm>
#include <array>

namespace qkv {
namespace {

constexpr std::array kMeasured = {
    CodecPair{CodecId::kF16, CodecId::kF16}, CodecPair{CodecId::k8, CodecId::k8}, CodecPair{CodecId::k6, CodecId::k5},
    CodecPair{CodecId::k6, CodecId::k4},     CodecPair{CodecId::k5, CodecId::k4}, CodecPair{CodecId::k4, CodecId::k4},
    CodecPair{CodecId::k4, CodecId::k3},
};

}  // namespace

std::span<const CodecPair> MeasuredPairs() {
  return kMeasured;
}

double BitsPerValue(CodecPair codecs, int head_dim) {
  const double base = BitsPerValue(CodecOf(codecs.k), head_dim) + BitsPerValue(CodecOf(codecs.v), head_dim);
  return base / 2 + (codecs.refine ? BitsPerValue(CodecOf(CodecId::kRefine4), head_dim) : 0);
}

double BitsPerValue(const LayerCodecs& layers) {
  const Geometry& g = layers.geometry();
  return 8.0 * static_cast<double>(layers.block_bytes()) / (2.0 * kPageTokens * g.n_layers * g.n_kv_heads * g.head_dim);
}

Result<CodecPair> BestWithinBits(double bits, int head_dim) {
  const auto best =
      std::ranges::find_if(kMeasured, [&](CodecPair pair) { return BitsPerValue(pair, head_dim) <= bits; });
  if (best != kMeasured.end()) return *best;
  return Err(Code::kInvalidArgument, "{} bits per value, expected at least {} (codecs {} of this model)", bits,
             BitsPerValue(kMeasured.back(), head_dim), ToString(kMeasured.back()));
}

Result<CodecPair> BestWithinBytes(uint64_t max_bytes, int n_tokens, const Geometry& geometry) {
  const auto n_pages = static_cast<uint64_t>((n_tokens + kPageTokens - 1) / kPageTokens);
  const auto bytes = [&](CodecPair codecs) { return n_pages * PageLayout(geometry, codecs).bytes; };
  const auto best = std::ranges::find_if(kMeasured, [&](CodecPair pair) { return bytes(pair) <= max_bytes; });
  if (best != kMeasured.end()) return *best;
  return Err(Code::kExhausted, Reason::kPoolFull,
             "a context of {} tokens takes {} bytes at least (codecs {}), limit {}", n_tokens, bytes(kMeasured.back()),
             ToString(kMeasured.back()), max_bytes);
}

}  // namespace qkv
