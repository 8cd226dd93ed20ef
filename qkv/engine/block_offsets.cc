// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/block_offsets.h"

#include <algorithm>
#include <utility>

// As qkv/attention/attend.cc.
#define HWY_WANT_AVX3_DL 1
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "qkv/engine/block_offsets.cc"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace qkv {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using DF = hn::CappedTag<float, 8>;  // n_out is a multiple of 8
using VF = hn::Vec<DF>;

constexpr size_t kTokens = 4;       // that share a load of offsets
constexpr size_t kMaxBlocks = 256;  // whose sums are kept at once

// sums [n_blocks][T] of T tokens.
template <size_t T>
HWY_INLINE void SumBlocks(const float* x, size_t n_in, size_t n_blocks, float* sums) {
  const DF d;
  for (size_t t = 0; t < T; ++t, x += n_in) {
    for (size_t b = 0; b < n_blocks; ++b) {
      VF sum = hn::Zero(d);
      for (size_t i = 0; i < kOffsetBlock; i += hn::Lanes(d))
        sum = hn::Add(sum, hn::LoadU(d, x + kOffsetBlock * b + i));
      sums[b * T + t] = hn::GetLane(hn::SumOfLanes(d, sum));
    }
  }
}

// V vectors of outputs of T tokens; y's stride is n_out.
template <size_t T, size_t V, size_t... I>
HWY_INLINE void Tile(const uint16_t* HWY_RESTRICT values, size_t n_out, size_t n_blocks, const float* HWY_RESTRICT sums,
                     float* HWY_RESTRICT y, std::index_sequence<I...>) {
  const DF d;
  const hn::Rebind<hwy::float16_t, DF> dh;
  const size_t lanes = hn::Lanes(d);
  VF total[T * V] = {hn::LoadU(d, y + I / V * n_out + I % V * lanes)...};
  for (size_t b = 0; b < n_blocks; ++b, values += n_out, sums += T) {
    const auto* halves = reinterpret_cast<const hwy::float16_t*>(values);
    VF offset[V];
    offset[0] = hn::PromoteTo(d, hn::LoadU(dh, halves));
    if constexpr (V > 1) offset[1] = hn::PromoteTo(d, hn::LoadU(dh, halves + lanes));
    ((total[I] = hn::MulAdd(hn::Set(d, sums[I / V]), offset[I % V], total[I])), ...);
  }
  (hn::StoreU(total[I], d, y + I / V * n_out + I % V * lanes), ...);
}

template <size_t T>
HWY_NOINLINE void AddTokens(const BlockOffsets& offsets, const float* x, float* y, size_t first, size_t end) {
  const size_t n_in = static_cast<size_t>(offsets.n_in), n_out = static_cast<size_t>(offsets.n_out);
  const size_t lanes = hn::Lanes(DF());
  alignas(64) float sums[kMaxBlocks * T];
  for (size_t block = 0; block < n_in / kOffsetBlock; block += kMaxBlocks) {
    const size_t n_blocks = std::min(n_in / kOffsetBlock - block, kMaxBlocks);
    SumBlocks<T>(x + block * kOffsetBlock, n_in, n_blocks, sums);
    const uint16_t* values = offsets.values + block * n_out;
    size_t o = first;
    for (; o + 2 * lanes <= end; o += 2 * lanes) {
      Tile<T, 2>(values + o, n_out, n_blocks, sums, y + o, std::make_index_sequence<2 * T>());
    }
    for (; o < end; o += lanes) Tile<T, 1>(values + o, n_out, n_blocks, sums, y + o, std::make_index_sequence<T>());
  }
}

void Add(const BlockOffsets& offsets, const float* x, int n_tokens, float* y, int ith, int nth) {
  const size_t groups = static_cast<size_t>(offsets.n_out) / 8;
  const size_t first = groups * static_cast<size_t>(ith) / static_cast<size_t>(nth) * 8;
  const size_t end = groups * static_cast<size_t>(ith + 1) / static_cast<size_t>(nth) * 8;
  const size_t n = static_cast<size_t>(n_tokens);
  const auto row = [&](size_t t) { return std::pair(x + t * offsets.n_in, y + t * offsets.n_out); };
  size_t t = 0;
  for (; t + kTokens <= n; t += kTokens) AddTokens<kTokens>(offsets, row(t).first, row(t).second, first, end);
  for (; t < n; ++t) AddTokens<1>(offsets, row(t).first, row(t).second, first, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace qkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv {
HWY_EXPORT(Add);

void AddBlockOffsets(const BlockOffsets& offsets, const float* x, int n_tokens, float* y, int ith, int nth) {
  HWY_DYNAMIC_DISPATCH(Add)(offsets, x, n_tokens, y, ith, nth);
}

}  // namespace qkv
#endif  // HWY_ONCE
