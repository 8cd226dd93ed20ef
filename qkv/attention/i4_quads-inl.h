// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// As i4-inl.h, for few rows and CPUs that multiply four pairs of bytes per 32-bit lane.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "qkv/attention/scratch.h"
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#if defined(QKV_ATTENTION_I4_QUADS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_ATTENTION_I4_QUADS_INL_H_
#undef QKV_ATTENTION_I4_QUADS_INL_H_
#else
#define QKV_ATTENTION_I4_QUADS_INL_H_
#endif

#include "hwy/highway.h"
#include "qkv/attention/i4-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {

// With VNNI or Arm's dot product, for few rows: four codes of 4 bits times four signed bytes per 32-bit lane in one
// instruction, which spares most of the unpacking. Queries and weights of 15 bits are two digits of 8 and 7: value =
// 128 * high + low, |low| <= 64.
inline constexpr bool kHasQuads = HWY_TARGET == HWY_AVX3_DL || (HWY_TARGET == HWY_NEON && HWY_ARCH_ARM_A64);
// Dot product is optional on Arm until v8.4, and not part of Highway's target.
HWY_INLINE bool CpuHasQuads() {
#if HWY_TARGET == HWY_NEON && HWY_ARCH_ARM_A64
  static const bool has = (::getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
  return has;
#else
  return kHasQuads;
#endif
}
inline constexpr size_t kMaxQuadRows = 6;
inline constexpr float kQuadFullScale = 127.0f * 128 + 63;

struct QuadSum {
  VI high, low;
  HWY_INLINE QuadSum() : high(hn::Zero(DI())), low(hn::Zero(DI())) {}
  HWY_INLINE void Add(hn::Vec<hn::RebindToUnsigned<DS>> codes, int32_t high_digits, int32_t low_digits) {
#if HWY_TARGET == HWY_AVX3_DL
    asm("vpdpbusd %[digits], %[codes], %[sum]"
        : [sum] "+v"(high.raw)
        : [codes] "v"(codes.raw), [digits] "v"(hn::Set(DI(), high_digits).raw));
    asm("vpdpbusd %[digits], %[codes], %[sum]"
        : [sum] "+v"(low.raw)
        : [codes] "v"(codes.raw), [digits] "v"(hn::Set(DI(), low_digits).raw));
#elif HWY_TARGET == HWY_NEON && HWY_ARCH_ARM_A64
    asm(".arch armv8.2-a+dotprod\n\tsdot %[sum].4s, %[codes].16b, %[digits].16b"
        : [sum] "+w"(high.raw)
        : [codes] "w"(codes.raw), [digits] "w"(hn::Set(DI(), high_digits).raw));
    asm(".arch armv8.2-a+dotprod\n\tsdot %[sum].4s, %[codes].16b, %[digits].16b"
        : [sum] "+w"(low.raw)
        : [codes] "w"(codes.raw), [digits] "w"(hn::Set(DI(), low_digits).raw));
#else
    (void)codes, (void)high_digits, (void)low_digits;
#endif
  }
  HWY_INLINE VI Integer() const {
    return hn::Add(hn::ShiftLeft<7>(high), low);
  }
  HWY_INLINE VF Total() const {
    return hn::ConvertTo(DF(), Integer());
  }
  HWY_INLINE VF Total(int32_t bias) const {
    return hn::ConvertTo(DF(), hn::Sub(Integer(), hn::Set(DI(), bias)));
  }
};

// Nibble 0 or 1 of every byte.
template <size_t kNibble>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<DS>> NibbleQuads(hn::Vec<hn::RebindToUnsigned<DS>> x) {
  const hn::RebindToUnsigned<DS> du;
  return hn::And(kNibble == 0 ? x : hn::ShiftRight<4>(x), hn::Set(du, 0x0f0f));
}

// The digits of four values, each as a byte.
HWY_INLINE void SplitQuad(const int16_t* values, int32_t* high_digits, int32_t* low_digits) {
  uint32_t high = 0, low = 0;
  for (size_t i = 0; i < 4; ++i) {
    const int digit = (values[i] + 64) >> 7;
    high |= static_cast<uint32_t>(digit & 255) << 8 * i;
    low |= static_cast<uint32_t>((values[i] - 128 * digit) & 255) << 8 * i;
  }
  *high_digits = static_cast<int32_t>(high);
  *low_digits = static_cast<int32_t>(low);
}

// Digits of a page's weights, round(weights * scale), in the order of ValuesOfI4Quads, or of ValuesOfBytes; returns the sum
// of the weights.
template <bool kBytes>
HWY_INLINE int WeightQuads(const float* weights, const float* scale, int32_t* quads) {
#if HWY_TARGET == HWY_AVX3_DL
  // From two bytes per token (low digit, high digit) in QuantizeWeightRow's order. A byte of i4 holds tokens t and t + 2
  // of 8, and four bytes the tokens 0, 4, 1, 5 (low nibbles) and 2, 6, 3, 7 (high nibbles).
  struct Order {
    constexpr Order() {
      constexpr int kTokens[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};
      for (int i = 0; i < 64; ++i) {
        const int token = kBytes ? i / 8 * 4 + i % 4 : i / 16 * 8 + kTokens[i / 8 % 2][i % 4];
        const int lane = token % 16 / 4 * 8 + token / 16 * 4 + token % 4;
        bytes[i] = static_cast<uint8_t>(2 * lane + (i / 4 % 2 == 0 ? 1 : 0));
      }
    }
    alignas(64) uint8_t bytes[64] = {};
  };
  static constexpr Order kOrder;
  const DS ds;
  const VS values = QuantizeWeightRow(weights, scale);
  const VS digit = hn::ShiftRight<7>(hn::Add(values, hn::Set(ds, 64)));
  const VS low = hn::And(hn::Sub(values, hn::ShiftLeft<7>(digit)), hn::Set(ds, 255));
  VS both = hn::Or(hn::ShiftLeft<8>(digit), low);
  const auto order = hn::Load(hn::Repartition<uint8_t, DF>(), kOrder.bytes);
  asm("vpermb %[both], %[order], %[both]" : [both] "+v"(both.raw) : [order] "v"(order.raw));
  hn::StoreU(hn::BitCast(DI(), both), DI(), quads);
  VI unused = hn::Zero(DI());
  return hn::GetLane(
      hn::SumOfLanes(DI(), hn::ReorderWidenMulAccumulate(DI(), values, hn::Set(ds, 1), hn::Zero(DI()), unused)));
#else
  int16_t values[kPageTokens];
  QuantizeWeightRow(weights, scale, values);
  int sum = 0;
  for (size_t t = 0; t < kPageTokens; t += 8, quads += 4) {
    const int16_t* v = values + t;
    const int16_t low[] = {v[0], v[4], v[1], v[5]}, high[] = {v[2], v[6], v[3], v[7]};
    SplitQuad(kBytes ? v : low, quads, quads + 1);
    SplitQuad(kBytes ? v + 4 : high, quads + 2, quads + 3);
    for (size_t i = 0; i < 8; ++i) sum += v[i];
  }
  return sum;
#endif
}

// As ScoresOfI4; q_scale and q_sums are of queries to kQuadFullScale.
struct ScoresOfI4Quads {
  template <size_t R, size_t V, size_t... I>
  static HWY_INLINE void Tile(const int32_t* HWY_RESTRICT q, const std::byte* HWY_RESTRICT k, Ahead ahead,
                              const float* HWY_RESTRICT q_scale, const float* HWY_RESTRICT low_sum,
                              const float* HWY_RESTRICT high_sum, const hwy::float16_t* HWY_RESTRICT low_scale,
                              const hwy::float16_t* HWY_RESTRICT high_scale, size_t minimum_offset, bool has_minimum,
                              bool first, float* HWY_RESTRICT scores, std::index_sequence<I...>) {
    const DF d;
    QuadSum low[] = {((void)I, QuadSum())...};
    QuadSum high[] = {((void)I, QuadSum())...};
    for (size_t p = 0; p < 8; ++p, q += 4 * R, k += 4 * kPageTokens, ahead = ahead + 4 * kPageTokens) {
      Prefetch<V * kNibbleBytes>(ahead);
      hn::Vec<hn::RebindToUnsigned<DS>> x[2];
      x[0] = LoadNibbles(k);
      if constexpr (V > 1) x[1] = LoadNibbles(k + kNibbleBytes);
      (low[I].Add(NibbleQuads<0>(x[I % V]), q[I / V], q[R + I / V]), ...);
      (high[I].Add(NibbleQuads<1>(x[I % V]), q[2 * R + I / V], q[3 * R + I / V]), ...);
    }
    VF total[R * V];
    // The minimum of i4 is -8 * scale.
    const auto group = [&](size_t i, VF sum, const hwy::float16_t* scale, const float* q_sum) {
      const VF scales = LoadOperand(scale + i % V * kLanes);
      const VF q_sums = ScoresOfI4::Broadcast(q_sum, i / V);
      if (has_minimum) {
        return hn::MulAdd(scales, sum, hn::Mul(LoadOperand(scale + minimum_offset + i % V * kLanes), q_sums));
      }
      return hn::Mul(scales, hn::NegMulAdd(hn::Set(d, 8.0f), q_sums, sum));
    };
    ((total[I] =
          hn::Add(group(I, low[I].Total(), low_scale, low_sum), group(I, high[I].Total(), high_scale, high_sum))),
     ...);
    ((total[I] = hn::Mul(total[I], hn::Set(d, q_scale[I / V]))), ...);
    if (!first) {
      ((total[I] = hn::Add(total[I], hn::LoadU(d, scores + I / V * kScoreStride + I % V * kLanes))), ...);
    }
    (hn::StoreU(total[I], d, scores + I / V * kScoreStride + I % V * kLanes), ...);
  }

  template <size_t R>
  static HWY_NOINLINE void Run(const int32_t* q, const std::byte* k, Ahead ahead, size_t dim, bool has_minimum,
                               const float* q_scale, const float* q_sums, const hwy::float16_t* scale, float* scores) {
    if constexpr (kHasQuads && R <= kMaxQuadRows) {
      constexpr size_t V = R * 8 <= 24 ? 2 : 1;
      const size_t half_groups = dim / 64;
      for (size_t g = 0; g < half_groups; ++g) {
        for (size_t t = 0; t < kPageTokens; t += V * kLanes) {
          const size_t offset = g * 8 * 4 * kPageTokens + 4 * t;
          const hwy::float16_t* low = scale + g * kPageTokens + t;
          Tile<R, V>(q + g * 32 * R, k + offset, ahead + offset, q_scale, q_sums + g, q_sums + half_groups + g, low,
                     low + half_groups * kPageTokens, 2 * half_groups * kPageTokens, has_minimum, g == 0, scores + t,
                     std::make_index_sequence<R * V>());
        }
      }
    } else {
      (void)q, (void)k, (void)ahead, (void)dim, (void)has_minimum, (void)q_scale, (void)q_sums, (void)scale;
      (void)scores;
    }
  }
};

// As ValuesOfI4, with the codes' offset in `base`; weights [4 groups of 8 tokens][2 nibbles][2 digits].
struct ValuesOfI4Quads {
  template <size_t R, size_t V, size_t... I>
  static HWY_INLINE void Tile(const int32_t* HWY_RESTRICT weights, const std::byte* HWY_RESTRICT v, Ahead ahead,
                              size_t dim, const float* HWY_RESTRICT keep, const float* HWY_RESTRICT weight_scale,
                              const float* HWY_RESTRICT base, float* HWY_RESTRICT outputs, std::index_sequence<I...>) {
    const DF d;
    QuadSum sum[] = {((void)I, QuadSum())...};
    for (size_t t = 0; t < 4; ++t, v += 4 * dim, weights += 4, ahead = ahead + 4 * dim) {
      Prefetch<V * kNibbleBytes>(ahead);
      hn::Vec<hn::RebindToUnsigned<DS>> x[2];
      x[0] = LoadNibbles(v);
      if constexpr (V > 1) x[1] = LoadNibbles(v + kNibbleBytes);
      (sum[I].Add(NibbleQuads<0>(x[I % V]), weights[I / V * 16], weights[I / V * 16 + 1]), ...);
      (sum[I].Add(NibbleQuads<1>(x[I % V]), weights[I / V * 16 + 2], weights[I / V * 16 + 3]), ...);
    }
    VF total[R * V] = {hn::MulAdd(sum[I].Total(), hn::Set(d, weight_scale[I / V]), hn::Set(d, base[I / V]))...};
    (hn::StoreU(hn::MulAdd(hn::LoadU(d, outputs + I / V * dim + I % V * kLanes), hn::Set(d, keep[I / V]), total[I]), d,
                outputs + I / V * dim + I % V * kLanes),
     ...);
  }

  template <size_t R>
  static HWY_NOINLINE void Run(const int32_t* weights, const std::byte* v, Ahead ahead, size_t dim, const float* keep,
                               const float* weight_scale, const float* base, float* outputs) {
    if constexpr (kHasQuads && R <= kMaxQuadRows) {
      constexpr size_t V = 2;
      for (size_t c = 0; c < 32; c += V * kLanes) {
        Tile<R, V>(weights, v + 4 * c, ahead + 4 * c, dim, keep, weight_scale, base, outputs + c,
                   std::make_index_sequence<R * V>());
      }
    } else {
      (void)weights, (void)v, (void)ahead, (void)dim, (void)keep, (void)weight_scale, (void)base, (void)outputs;
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
