// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/preset.h"

#include <algorithm>
#include <array>

namespace qkv {
namespace {

constexpr std::array kMeasured = {
    MeasuredPair{{CodecId::kF16, CodecId::kF16}, 0},  MeasuredPair{{CodecId::k8, CodecId::k8}, 1.4e-5},
    MeasuredPair{{CodecId::k6, CodecId::k5}, 2.8e-4}, MeasuredPair{{CodecId::k6, CodecId::k4}, 7.2e-4},
    MeasuredPair{{CodecId::k5, CodecId::k4}, 2.4e-3}, MeasuredPair{{CodecId::k4, CodecId::k4}, 3.5e-3},
    MeasuredPair{{CodecId::k4, CodecId::k3}, 5.9e-3},
};

}  // namespace

std::span<const MeasuredPair> MeasuredPairs() {
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
  const auto best = std::ranges::find_if(
      kMeasured, [&](const MeasuredPair& pair) { return BitsPerValue(pair.codecs, head_dim) <= bits; });
  if (best != kMeasured.end()) return best->codecs;
  return Err(Code::kInvalidArgument, "{} bits per value, expected at least {} (codecs {} of this model)", bits,
             BitsPerValue(kMeasured.back().codecs, head_dim), ToString(kMeasured.back().codecs));
}

Result<CodecPair> BestWithinBytes(uint64_t max_bytes, int n_tokens, const Geometry& geometry) {
  const auto n_pages = static_cast<uint64_t>((n_tokens + kPageTokens - 1) / kPageTokens);
  const auto bytes = [&](CodecPair codecs) { return n_pages * PageLayout(geometry, codecs).bytes; };
  const auto best =
      std::ranges::find_if(kMeasured, [&](const MeasuredPair& pair) { return bytes(pair.codecs) <= max_bytes; });
  if (best != kMeasured.end()) return best->codecs;
  return Err(Code::kExhausted, Reason::kPoolFull,
             "a context of {} tokens takes {} bytes at least (codecs {}), limit {}", n_tokens,
             bytes(kMeasured.back().codecs), ToString(kMeasured.back().codecs), max_bytes);
}

}  // namespace qkv
