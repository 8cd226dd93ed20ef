// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// As i8-inl.h, for i4 and i4z, of head dims that are multiples of 64. A 32-bit lane holds the eight codes of one token
// (K) or one channel (V); shift and mask give them as pairs of 16 bits, in the order that codec/blocks.h lays down.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "qkv/attention/scratch.h"

#if defined(QKV_ATTENTION_I4_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_ATTENTION_I4_INL_H_
#undef QKV_ATTENTION_I4_INL_H_
#else
#define QKV_ATTENTION_I4_INL_H_
#endif

#include "hwy/highway.h"
#include "qkv/attention/i8-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {

// Nibble n of every 16 bits, as a pair per 32 bits.
template <size_t kNibble>
HWY_INLINE VS NibblePairs(hn::Vec<hn::RebindToUnsigned<DS>> x) {
  const hn::RebindToUnsigned<DS> du;
  if constexpr (kNibble == 3) return hn::BitCast(DS(), hn::ShiftRight<12>(x));
  return hn::BitCast(DS(), hn::And(hn::ShiftRight<4 * kNibble>(x), hn::Set(du, 15)));
}
HWY_INLINE hn::Vec<hn::RebindToUnsigned<DS>> LoadNibbles(const std::byte* p) {
  const hn::RebindToUnsigned<DS> du;
  return hn::BitCast(du, hn::LoadU(hn::Repartition<uint8_t, DF>(), reinterpret_cast<const uint8_t*>(p)));
}
inline constexpr size_t kNibbleBytes = 4 * kLanes;  // one vector: 8 codes per lane

// Codes [8][32 tokens][4 bytes] of two groups of 32 channels, in the `low` and the `high` nibbles. Adds to scores (or
// sets them, `first`) for each of the two groups
//   i4   q_scale[row] * scale[t] * (integer sum - 8 * q_sum)
//   i4z  q_scale[row] * (scale[t] * integer sum + minimum[t] * q_sum)
struct ScoresOfI4 {
  template <size_t R, size_t V, bool kMinimum, size_t... I>
  static HWY_INLINE void Tile(const int32_t* HWY_RESTRICT q, const std::byte* HWY_RESTRICT k, Ahead ahead,
                              const float* HWY_RESTRICT q_scale, const float* HWY_RESTRICT low_sum,
                              const float* HWY_RESTRICT high_sum, const hwy::float16_t* HWY_RESTRICT low_scale,
                              const hwy::float16_t* HWY_RESTRICT high_scale, size_t minimum_offset, bool first,
                              float* HWY_RESTRICT scores, std::index_sequence<I...>) {
    const DF d;
    PairSum low[] = {((void)I, PairSum())...};
    PairSum high[] = {((void)I, PairSum())...};
    for (size_t p = 0; p < 8; ++p, q += 4 * R, k += 4 * kPageTokens, ahead = ahead + 4 * kPageTokens) {
      Prefetch<V * kNibbleBytes>(ahead);
      hn::Vec<hn::RebindToUnsigned<DS>> x[2];
      x[0] = LoadNibbles(k);
      if constexpr (V > 1) x[1] = LoadNibbles(k + kNibbleBytes);
      (low[I].Add(NibblePairs<0>(x[I % V]), q[I / V]), ...);
      (high[I].Add(NibblePairs<1>(x[I % V]), q[R + I / V]), ...);
      (low[I].Add(NibblePairs<2>(x[I % V]), q[2 * R + I / V]), ...);
      (high[I].Add(NibblePairs<3>(x[I % V]), q[3 * R + I / V]), ...);
    }
    VF total[R * V];
    if constexpr (kMinimum) {
      const hwy::float16_t* low_minimum = low_scale + minimum_offset;
      const hwy::float16_t* high_minimum = high_scale + minimum_offset;
      ((total[I] =
            hn::Add(hn::MulAdd(LoadOperand(low_scale + I % V * kLanes), low[I].Total(),
                               hn::Mul(LoadOperand(low_minimum + I % V * kLanes), Broadcast(low_sum, I / V))),
                    hn::MulAdd(LoadOperand(high_scale + I % V * kLanes), high[I].Total(),
                               hn::Mul(LoadOperand(high_minimum + I % V * kLanes), Broadcast(high_sum, I / V))))),
       ...);
    } else {
      const VF eight = hn::Set(d, 8.0f);
      ((total[I] = hn::MulAdd(LoadOperand(low_scale + I % V * kLanes),
                              hn::NegMulAdd(eight, Broadcast(low_sum, I / V), low[I].Total()),
                              hn::Mul(LoadOperand(high_scale + I % V * kLanes),
                                      hn::NegMulAdd(eight, Broadcast(high_sum, I / V), high[I].Total())))),
       ...);
    }
    ((total[I] = hn::Mul(total[I], hn::Set(d, q_scale[I / V]))), ...);
    if (!first) {
      ((total[I] = hn::Add(total[I], hn::LoadU(d, scores + I / V * kScoreStride + I % V * kLanes))), ...);
    }
    (hn::StoreU(total[I], d, scores + I / V * kScoreStride + I % V * kLanes), ...);
  }

  static HWY_INLINE VF Broadcast(const float* sums, size_t row) { return hn::Set(DF(), sums[row * kMaxI4Groups]); }

  // codes of all groups; scale and, behind it, minimum: [groups][32].
  template <size_t R>
  static HWY_NOINLINE void Run(const int32_t* q, const std::byte* k, Ahead ahead, size_t dim, bool has_minimum,
                               const float* q_scale, const float* q_sums, const hwy::float16_t* scale, float* scores) {
    constexpr size_t V = 2 * R * 2 < kIntAccumulators ? 2 : 1;
    const size_t half_groups = dim / 64;
    const size_t minimum_offset = 2 * half_groups * kPageTokens;
    for (size_t g = 0; g < half_groups; ++g) {
      for (size_t t = 0; t < kPageTokens; t += V * kLanes) {
        const std::make_index_sequence<R * V> indices;
        const int32_t* group_q = q + g * 32 * R;
        const size_t offset = g * 8 * 4 * kPageTokens + 4 * t;
        const float* low_sum = q_sums + g;
        const float* high_sum = q_sums + half_groups + g;
        const hwy::float16_t* low = scale + g * kPageTokens + t;
        const hwy::float16_t* high = low + half_groups * kPageTokens;
        if (has_minimum) {
          Tile<R, V, true>(group_q, k + offset, ahead + offset, q_scale, low_sum, high_sum, low, high, minimum_offset,
                           g == 0, scores + t, indices);
        } else {
          Tile<R, V, false>(group_q, k + offset, ahead + offset, q_scale, low_sum, high_sum, low, high, minimum_offset,
                            g == 0, scores + t, indices);
        }
      }
    }
  }
};

// One group of 32 channels of i4 or i4z: codes [4][dim][4 bytes];
// outputs = outputs * keep + (integer sum of weight * (code - offset)) * weight_scale[row] + base[row].
struct ValuesOfI4 {
  template <size_t R, size_t V, size_t... I>
  static HWY_INLINE void Tile(const int16_t* HWY_RESTRICT weights, const std::byte* HWY_RESTRICT v, Ahead ahead,
                              size_t dim, int16_t offset, const float* HWY_RESTRICT keep,
                              const float* HWY_RESTRICT weight_scale, const float* HWY_RESTRICT base,
                              float* HWY_RESTRICT outputs, std::index_sequence<I...>) {
    const DF d;
    const VS minus = hn::Set(DS(), offset);
    PairSum sum[] = {((void)I, PairSum())...};
    for (size_t t = 0; t < kPageTokens; t += 8, v += 4 * dim, ahead = ahead + 4 * dim) {
      Prefetch<V * kNibbleBytes>(ahead);
      hn::Vec<hn::RebindToUnsigned<DS>> x[4];
      x[0] = LoadNibbles(v);
      if constexpr (V > 1) x[1] = LoadNibbles(v + kNibbleBytes);
      if constexpr (V > 2) x[2] = LoadNibbles(v + 2 * kNibbleBytes);
      if constexpr (V > 2) x[3] = LoadNibbles(v + 3 * kNibbleBytes);
      const int16_t* w = weights + t;
      (sum[I].Add(hn::Sub(NibblePairs<0>(x[I % V]), minus), ValuesOfI8::PairAt(w + I / V * kPageTokens)), ...);
      (sum[I].Add(hn::Sub(NibblePairs<1>(x[I % V]), minus), ValuesOfI8::PairAt(w + I / V * kPageTokens + 2)), ...);
      (sum[I].Add(hn::Sub(NibblePairs<2>(x[I % V]), minus), ValuesOfI8::PairAt(w + I / V * kPageTokens + 4)), ...);
      (sum[I].Add(hn::Sub(NibblePairs<3>(x[I % V]), minus), ValuesOfI8::PairAt(w + I / V * kPageTokens + 6)), ...);
    }
    VF total[R * V] = {hn::MulAdd(sum[I].Total(), hn::Set(d, weight_scale[I / V]), hn::Set(d, base[I / V]))...};
    (hn::StoreU(hn::MulAdd(hn::LoadU(d, outputs + I / V * dim + I % V * kLanes), hn::Set(d, keep[I / V]), total[I]), d,
                outputs + I / V * dim + I % V * kLanes),
     ...);
  }

  template <size_t R>
  static HWY_NOINLINE void Run(const int16_t* weights, const std::byte* v, Ahead ahead, size_t dim, int16_t offset,
                               const float* keep, const float* weight_scale, const float* base, float* outputs) {
    constexpr size_t V = std::min(TileVectors(R, kIntAccumulators - 4), 32 / kLanes);
    for (size_t c = 0; c < 32; c += V * kLanes) {
      Tile<R, V>(weights, v + 4 * c, ahead + 4 * c, dim, offset, keep, weight_scale, base, outputs + c,
                 std::make_index_sequence<R * V>());
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
