// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Micro-kernels for few rows that run on the codes of a block (codec/blocks.h), compiled once per Highway target; private
// to this room. Queries and weights are quantized to 15 bits and a sign, codes widened to 16 bits, pairs multiplied and
// added to 32-bit sums: exact from there, no sum over lanes. Pairs are two channels of one token (K) or two tokens of
// one channel (V), as the codes lie in the block. Bound: 127 * 32767 * head_dim <= 2^30.1.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "qkv/attention/scratch.h"

#if defined(QKV_ATTENTION_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_ATTENTION_CODES_INL_H_
#undef QKV_ATTENTION_CODES_INL_H_
#else
#define QKV_ATTENTION_CODES_INL_H_
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
// NEON keeps two 32-bit sums per vector of pairs (ReorderWidenMulAccumulate), x86 one.
inline constexpr size_t kIntAccumulators = HWY_ARCH_ARM ? kAccumulators / 2 : kAccumulators;
inline constexpr float kFullScale = 32767.0f;

// Sums of pair products; `odd` is dead weight that the compiler drops where the CPU adds pairs itself.
struct PairSum {
  VI even, odd;
  HWY_INLINE PairSum() : even(hn::Zero(DI())), odd(hn::Zero(DI())) {}  // a default one would lack the target's attributes
  HWY_INLINE void Add(VS codes, int32_t pair) {
    even = hn::ReorderWidenMulAccumulate(DI(), codes, hn::BitCast(DS(), hn::Set(DI(), pair)), even, odd);
  }
  HWY_INLINE VF Total() const { return hn::ConvertTo(DF(), hn::RearrangeToOddPlusEven(even, odd)); }
};

HWY_INLINE VS LoadPairs(const int8_t* p) { return hn::PromoteTo(DS(), hn::LoadU(hn::Rebind<int8_t, DS>(), p)); }
inline constexpr size_t kPairBytes = 2 * kLanes;  // one vector of s8 pairs

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

// i8: codes [dim / 2][32 tokens][2 channels]; scores = integer sum * q_scale[row] * token_scale[t].
struct ScoresOfI8 {
  template <size_t R, size_t V, size_t... I>
  static HWY_INLINE void Tile(const int32_t* HWY_RESTRICT q, const int8_t* HWY_RESTRICT k, const std::byte* ahead,
                              size_t dim, const float* HWY_RESTRICT q_scale, const float* HWY_RESTRICT token_scale,
                              float* HWY_RESTRICT scores, std::index_sequence<I...>) {
    const DF d;
    PairSum sum[R * V];
    for (size_t c = 0; c < dim; c += 2, q += R, k += 2 * kPageTokens, ahead += 2 * kPageTokens) {
      Prefetch<V * kPairBytes>(ahead);
      VS codes[4];
      codes[0] = LoadPairs(k);
      if constexpr (V > 1) codes[1] = LoadPairs(k + kPairBytes);
      if constexpr (V > 2) codes[2] = LoadPairs(k + 2 * kPairBytes);
      if constexpr (V > 2) codes[3] = LoadPairs(k + 3 * kPairBytes);
      (sum[I].Add(codes[I % V], q[I / V]), ...);
    }
    (hn::StoreU(hn::Mul(sum[I].Total(),
                        hn::Mul(hn::Set(d, q_scale[I / V]), hn::LoadU(d, token_scale + I % V * kLanes))),
                d, scores + I / V * kScoreStride + I % V * kLanes),
     ...);
  }

  template <size_t R>
  static HWY_NOINLINE void Run(const int32_t* q, const int8_t* k, const std::byte* ahead, size_t dim,
                               const float* q_scale, const float* token_scale, float* scores) {
    constexpr size_t V = std::min(TileVectors(R, kIntAccumulators), kPageTokens / kLanes);
    for (size_t t = 0; t < kPageTokens; t += V * kLanes) {
      Tile<R, V>(q, k + 2 * t, ahead + 2 * t, dim, q_scale, token_scale + t, scores + t, std::make_index_sequence<R * V>());
    }
  }
};

// i8: codes [16 pairs of tokens][dim][2]; outputs = outputs * keep + integer sum * weight_scale[row] * channel_scale[c].
struct ValuesOfI8 {
  template <size_t R, size_t V, size_t... I>
  static HWY_INLINE void Tile(const int16_t* HWY_RESTRICT weights, const int8_t* HWY_RESTRICT v, const std::byte* ahead,
                              size_t dim, const float* HWY_RESTRICT keep, const float* HWY_RESTRICT weight_scale,
                              const hwy::float16_t* HWY_RESTRICT channel_scale, float* HWY_RESTRICT outputs,
                              std::index_sequence<I...>) {
    const DF d;
    PairSum sum[R * V];
    for (size_t t = 0; t < kPageTokens; t += 2, v += 2 * dim, ahead += 2 * dim) {
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
  static HWY_INLINE void Columns(size_t c, const int16_t* weights, const int8_t* v, const std::byte* ahead, size_t dim,
                                 const float* keep, const float* weight_scale, const hwy::float16_t* channel_scale, float* outputs) {
    for (; c + V * kLanes <= dim; c += V * kLanes) {
      Tile<R, V>(weights, v + 2 * c, ahead + 2 * c, dim, keep, weight_scale, channel_scale == nullptr ? nullptr : channel_scale + c,
                 outputs + c, std::make_index_sequence<R * V>());
    }
    if constexpr (V > 1) {
      if (c < dim) Columns<R, V / 2>(c, weights, v, ahead, dim, keep, weight_scale, channel_scale, outputs);
    }
  }

  template <size_t R>
  static HWY_NOINLINE void Run(const int16_t* weights, const int8_t* v, const std::byte* ahead, size_t dim,
                               const float* keep, const float* weight_scale, const hwy::float16_t* channel_scale, float* outputs) {
    Columns<R, TileVectors(R, kIntAccumulators)>(0, weights, v, ahead, dim, keep, weight_scale, channel_scale, outputs);
  }
};

// One pair of 32-channel groups, `low` and `high` nibbles, of i4 or i4z (head dims that are multiples of 64 only):
// codes [8][32 tokens][4 bytes]. Adds to scores (or sets them, `first`) for each of the two groups
//   q_scale[row] * (scale[t] * (integer sum - 8 * q_sum) + minimum[t] * q_sum),   i4 without the minimum, i4z without the 8.
struct ScoresOfI4 {
  template <size_t R, size_t V, bool kMinimum, size_t... I>
  static HWY_INLINE void Tile(const int32_t* HWY_RESTRICT q, const std::byte* HWY_RESTRICT k, const std::byte* ahead,
                              const float* HWY_RESTRICT q_scale, const float* HWY_RESTRICT low_sum,
                              const float* HWY_RESTRICT high_sum, const hwy::float16_t* HWY_RESTRICT low_scale,
                              const hwy::float16_t* HWY_RESTRICT high_scale, size_t minimum_offset, bool first,
                              float* HWY_RESTRICT scores, std::index_sequence<I...>) {
    const DF d;
    PairSum low[R * V], high[R * V];
    for (size_t p = 0; p < 8; ++p, q += 4 * R, k += 4 * kPageTokens, ahead += 4 * kPageTokens) {
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
      ((total[I] = hn::Add(
            hn::MulAdd(LoadOperand(low_scale + I % V * kLanes), low[I].Total(),
                       hn::Mul(LoadOperand(low_scale + minimum_offset + I % V * kLanes), Broadcast(low_sum, I / V))),
            hn::MulAdd(LoadOperand(high_scale + I % V * kLanes), high[I].Total(),
                       hn::Mul(LoadOperand(high_scale + minimum_offset + I % V * kLanes), Broadcast(high_sum, I / V))))),
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
  static HWY_NOINLINE void Run(const int32_t* q, const std::byte* k, const std::byte* ahead, size_t dim,
                               bool has_minimum, const float* q_scale, const float* q_sums, const hwy::float16_t* scale, float* scores) {
    constexpr size_t V = R * 4 <= kIntAccumulators ? 2 : 1;
    const size_t half_groups = dim / 64;
    const size_t minimum_offset = 2 * half_groups * kPageTokens;
    for (size_t g = 0; g < half_groups; ++g) {
      for (size_t t = 0; t < kPageTokens; t += V * kLanes) {
        const std::make_index_sequence<R * V> indices;
        const int32_t* group_q = q + g * 32 * R;
        const size_t offset = g * 8 * 4 * kPageTokens + 4 * t;
        const hwy::float16_t* low = scale + g * kPageTokens + t;
        const hwy::float16_t* high = low + half_groups * kPageTokens;
        if (has_minimum) {
          Tile<R, V, true>(group_q, k + offset, ahead + offset, q_scale, q_sums + g, q_sums + half_groups + g, low, high, minimum_offset,
                           g == 0, scores + t, indices);
        } else {
          Tile<R, V, false>(group_q, k + offset, ahead + offset, q_scale, q_sums + g, q_sums + half_groups + g, low, high, minimum_offset,
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
  static HWY_INLINE void Tile(const int16_t* HWY_RESTRICT weights, const std::byte* HWY_RESTRICT v, const std::byte* ahead,
                              size_t dim, int16_t offset, const float* HWY_RESTRICT keep, const float* HWY_RESTRICT weight_scale,
                              const float* HWY_RESTRICT base, float* HWY_RESTRICT outputs, std::index_sequence<I...>) {
    const DF d;
    const VS minus = hn::Set(DS(), offset);
    PairSum sum[R * V];
    for (size_t t = 0; t < kPageTokens; t += 8, v += 4 * dim, ahead += 4 * dim) {
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
  static HWY_NOINLINE void Run(const int16_t* weights, const std::byte* v, const std::byte* ahead, size_t dim,
                               int16_t offset, const float* keep, const float* weight_scale, const float* base, float* outputs) {
    constexpr size_t V = std::min(TileVectors(R, kIntAccumulators), 32 / kLanes);
    for (size_t c = 0; c < 32; c += V * kLanes) {
      Tile<R, V>(weights, v + 4 * c, ahead + 4 * c, dim, offset, keep, weight_scale, base, outputs + c,
                 std::make_index_sequence<R * V>());
    }
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

// out = round(a * b * factor), saturated to 16 bits; n a multiple of 16.
HWY_INLINE void QuantizeProduct(const float* a, const float* b, float factor, size_t n, int16_t* out) {
  const DF d;
  const hn::Rebind<int16_t, DF> d16;
  for (size_t i = 0; i < n; i += kLanes) {
    const VF product = hn::Mul(hn::Mul(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), hn::Set(d, factor));
    hn::StoreU(hn::DemoteTo(d16, hn::NearestInt(product)), d16, out + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
