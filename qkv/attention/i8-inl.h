// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Micro-kernels for few rows that run on the 8-bit codes of a block (codec/blocks.h), compiled once per Highway target;
// private to this room. Queries and weights are quantized to 15 bits and a sign, codes widened to 16 bits, pairs
// multiplied and added to 32-bit sums: exact from there, no sum over lanes. Pairs are two channels of one token (K) or
// two tokens of one channel (V), as the codes lie in the block. Bound: 127 * 32767 * head_dim <= 2^30.1.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "qkv/attention/scratch.h"

#if defined(QKV_ATTENTION_I8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_ATTENTION_I8_INL_H_
#undef QKV_ATTENTION_I8_INL_H_
#else
#define QKV_ATTENTION_I8_INL_H_
#endif

#include "hwy/highway.h"
#include "qkv/attention/panels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {

using DI = hn::Repartition<int32_t, DF>;
using DS = hn::Repartition<int16_t, DF>;
using VI = hn::Vec<DI>;
using VS = hn::Vec<DS>;
// Sums that fit in registers beside codes, query pairs and products. NEON keeps two registers per sum.
inline constexpr size_t kIntAccumulators = HWY_ARCH_ARM ? kAccumulators / 2 : std::min<size_t>(kAccumulators, 16);
inline constexpr float kFullScale = 32767.0f;

// Sums of pair products (ReorderWidenMulAccumulate; `odd` is dead weight that the compiler drops on x86).
struct PairSum {
  VI even, odd;
  // Written out, because an implicit one would lack the target's attributes.
  HWY_INLINE PairSum() : even(hn::Zero(DI())), odd(hn::Zero(DI())) {}
  HWY_INLINE void Add(VS codes, int32_t pair) {
#if HWY_TARGET == HWY_AVX3_DL
    // Highway 1.0 has no name for it, and its attributes for this target do not let the intrinsic in.
    asm("vpdpwssd %[pairs], %[codes], %[sum]"
        : [sum] "+v"(even.raw)
        : [codes] "v"(codes.raw), [pairs] "v"(hn::Set(DI(), pair).raw));
#else
    even = hn::ReorderWidenMulAccumulate(DI(), codes, hn::BitCast(DS(), hn::Set(DI(), pair)), even, odd);
#if HWY_ARCH_X86 && HWY_COMPILER_GCC
    // GCC 12 else computes all of a loop body's products before the first sum, and spills.
    asm volatile("" : "+v"(even.raw));
#endif
#endif
  }
  HWY_INLINE VF Total() const {
    return hn::ConvertTo(DF(), hn::RearrangeToOddPlusEven(even, odd));
  }
};

HWY_INLINE VS LoadPairs(const int8_t* p) {
  return hn::PromoteTo(DS(), hn::LoadU(hn::Rebind<int8_t, DS>(), p));
}
inline constexpr size_t kPairBytes = 2 * kLanes;  // one vector of s8 pairs

// i8: codes [dim / 2][32 tokens][2 channels]; scores = integer sum * q_scale[row] * token_scale[t] + mean[row].
struct ScoresOfI8 {
  template <size_t R, size_t V, size_t... I>
  static HWY_INLINE void Tile(const int32_t* HWY_RESTRICT q, const int8_t* HWY_RESTRICT k, Ahead ahead, size_t dim,
                              const float* HWY_RESTRICT q_scale, const float* HWY_RESTRICT mean,
                              const float* HWY_RESTRICT token_scale, float* HWY_RESTRICT scores,
                              std::index_sequence<I...>) {
    const DF d;
    PairSum sum[] = {((void)I, PairSum())...};
    for (size_t c = 0; c < dim; c += 2, q += R, k += 2 * kPageTokens, ahead = ahead + 2 * kPageTokens) {
      Prefetch<V * kPairBytes>(ahead);
      VS codes[4];
      codes[0] = LoadPairs(k);
      if constexpr (V > 1) codes[1] = LoadPairs(k + kPairBytes);
      if constexpr (V > 2) codes[2] = LoadPairs(k + 2 * kPairBytes);
      if constexpr (V > 2) codes[3] = LoadPairs(k + 3 * kPairBytes);
      (sum[I].Add(codes[I % V], q[I / V]), ...);
    }
    (hn::StoreU(
         hn::MulAdd(sum[I].Total(), hn::Mul(hn::Set(d, q_scale[I / V]), hn::LoadU(d, token_scale + I % V * kLanes)),
                    hn::Set(d, mean[I / V])),
         d, scores + I / V * kScoreStride + I % V * kLanes),
     ...);
  }

  template <size_t R>
  static HWY_NOINLINE void Run(const int32_t* q, const int8_t* k, Ahead ahead, size_t dim, const float* q_scale,
                               const float* mean, const float* token_scale, float* scores) {
    constexpr size_t V = std::min(TileVectors(R, kIntAccumulators), kPageTokens / kLanes);
    for (size_t t = 0; t < kPageTokens; t += V * kLanes) {
      Tile<R, V>(q, k + 2 * t, ahead + 2 * t, dim, q_scale, mean, token_scale + t, scores + t,
                 std::make_index_sequence<R * V>());
    }
  }
};

// i8: codes [16 pairs of tokens][dim][2];
// outputs = outputs * keep + integer sum * weight_scale[row] * channel_scale[c], without the latter if it is null.
struct ValuesOfI8 {
  template <size_t R, size_t V, size_t... I>
  static HWY_INLINE void Tile(const int16_t* HWY_RESTRICT weights, const int8_t* HWY_RESTRICT v, Ahead ahead,
                              size_t dim, const float* HWY_RESTRICT keep, const float* HWY_RESTRICT weight_scale,
                              const hwy::float16_t* HWY_RESTRICT channel_scale, float* HWY_RESTRICT outputs,
                              std::index_sequence<I...>) {
    const DF d;
    PairSum sum[] = {((void)I, PairSum())...};
    for (size_t t = 0; t < kPageTokens; t += 2, v += 2 * dim, ahead = ahead + 2 * dim) {
      Prefetch<V * kPairBytes>(ahead);
      VS codes[4];
      codes[0] = LoadPairs(v);
      if constexpr (V > 1) codes[1] = LoadPairs(v + kPairBytes);
      if constexpr (V > 2) codes[2] = LoadPairs(v + 2 * kPairBytes);
      if constexpr (V > 2) codes[3] = LoadPairs(v + 3 * kPairBytes);
      (sum[I].Add(codes[I % V], PairAt(weights + I / V * kPageTokens + t)), ...);
    }
    VF total[R * V] = {hn::Mul(sum[I].Total(), hn::Set(d, weight_scale[I / V]))...};
    if (channel_scale != nullptr) {
      ((total[I] = hn::Mul(total[I], LoadOperand(channel_scale + I % V * kLanes))), ...);
    }
    (hn::StoreU(hn::MulAdd(hn::LoadU(d, outputs + I / V * dim + I % V * kLanes), hn::Set(d, keep[I / V]), total[I]), d,
                outputs + I / V * dim + I % V * kLanes),
     ...);
  }

  static HWY_INLINE int32_t PairAt(const int16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return pair;
  }

  template <size_t R, size_t V>
  static HWY_INLINE void Columns(size_t c, const int16_t* weights, const int8_t* v, Ahead ahead, size_t dim,
                                 const float* keep, const float* weight_scale, const hwy::float16_t* channel_scale,
                                 float* outputs) {
    for (; c + V * kLanes <= dim; c += V * kLanes) {
      Tile<R, V>(weights, v + 2 * c, ahead + 2 * c, dim, keep, weight_scale,
                 channel_scale == nullptr ? nullptr : channel_scale + c, outputs + c,
                 std::make_index_sequence<R * V>());
    }
    if constexpr (V > 1) {
      if (c < dim) Columns<R, V / 2>(c, weights, v, ahead, dim, keep, weight_scale, channel_scale, outputs);
    }
  }

  template <size_t R>
  static HWY_NOINLINE void Run(const int16_t* weights, const int8_t* v, Ahead ahead, size_t dim, const float* keep,
                               const float* weight_scale, const hwy::float16_t* channel_scale, float* outputs) {
    Columns<R, TileVectors(R, kIntAccumulators)>(0, weights, v, ahead, dim, keep, weight_scale, channel_scale, outputs);
  }
};

// Largest magnitude of n values, n a multiple of 16.
HWY_INLINE float Magnitude(const float* values, size_t n) {
  const DF d;
  VF magnitude = hn::Zero(d);
  for (size_t i = 0; i < n; i += kLanes) magnitude = hn::Max(magnitude, hn::Abs(hn::LoadU(d, values + i)));
  return hn::GetLane(hn::MaxOfLanes(d, magnitude));
}

// Of the products a * b.
HWY_INLINE float Magnitude(const float* a, const float* b, size_t n) {
  const DF d;
  VF magnitude = hn::Zero(d);
  for (size_t i = 0; i < n; i += kLanes) {
    magnitude = hn::Max(magnitude, hn::Abs(hn::Mul(hn::LoadU(d, a + i), hn::LoadU(d, b + i))));
  }
  return hn::GetLane(hn::MaxOfLanes(d, magnitude));
}

// To the nearest integer; of what no int32 can hold, anything.
HWY_INLINE VI RoundToInt(VF v) {
#if HWY_TARGET == HWY_AVX3_DL
  VI rounded;  // NearestInt() would also mend what is too large
  asm("vcvtps2dq %[v], %[rounded]" : [rounded] "=v"(rounded.raw) : [v] "v"(v.raw));
  return rounded;
#else
  return hn::NearestInt(v);
#endif
}

// out = round(a * b * factor), saturated to 16 bits; n a multiple of 16.
HWY_INLINE void QuantizeProduct(const float* a, const float* b, float factor, size_t n, int16_t* out) {
  const DF d;
  const hn::Rebind<int16_t, DF> d16;
  for (size_t i = 0; i < n; i += kLanes) {
    const VF product = hn::Mul(hn::Mul(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), hn::Set(d, factor));
    hn::StoreU(hn::DemoteTo(d16, RoundToInt(product)), d16, out + i);
  }
}

#if HWY_TARGET == HWY_AVX3_DL
// round(weights * scale) of 32 tokens as 16 bits, tokens 4k..4k+3 and 16+4k..16+4k+3 in the k-th 128 bits.
HWY_INLINE VS QuantizeWeightRow(const float* weights, const float* scale) {
  const DF d;
  return hn::ReorderDemote2To(DS(), RoundToInt(hn::Mul(hn::LoadU(d, weights), hn::LoadU(d, scale))),
                              RoundToInt(hn::Mul(hn::LoadU(d, weights + kLanes), hn::LoadU(d, scale + kLanes))));
}
#endif

// out = round(weights * scale) of the 32 tokens of a page, in their order.
HWY_INLINE void QuantizeWeightRow(const float* weights, const float* scale, int16_t* out) {
#if HWY_TARGET == HWY_AVX3_DL
  const hn::Repartition<int64_t, DF> d64;
  alignas(64) static constexpr int64_t kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  hn::StoreU(
      hn::TableLookupLanes(hn::BitCast(d64, QuantizeWeightRow(weights, scale)), hn::SetTableIndices(d64, kOrder)), d64,
      reinterpret_cast<int64_t*>(out));
#else
  const hn::Rebind<int16_t, DF> d16;
  for (size_t t = 0; t < kPageTokens; t += kLanes) {
    const VF product = hn::Mul(hn::LoadU(DF(), weights + t), hn::LoadU(DF(), scale + t));
    hn::StoreU(hn::DemoteTo(d16, RoundToInt(product)), d16, out + t);
  }
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
