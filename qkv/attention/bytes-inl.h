// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// As i8-inl.h, for few rows and CPUs that multiply four pairs of bytes per 32-bit lane (see QuadSum): kernels on signed
// bytes in the order of i8, to which planes of other widths are expanded, and on the plane of 4 bits.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "qkv/attention/scratch.h"

#if defined(QKV_ATTENTION_BYTES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_ATTENTION_BYTES_INL_H_
#undef QKV_ATTENTION_BYTES_INL_H_
#else
#define QKV_ATTENTION_BYTES_INL_H_
#endif

#include "hwy/highway.h"
#include "qkv/attention/i4_quads-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {

// VNNI takes codes as unsigned bytes, 128 larger; Arm's dot product as signed ones. Bound: 255 * 16319 * head_dim <= 2^30.
inline constexpr int kCodeBias = HWY_TARGET == HWY_AVX3_DL ? 128 : 0;
using VU16 = hn::Vec<hn::RebindToUnsigned<DS>>;

HWY_INLINE VU16 LoadCodes(const uint8_t* p) {
  return hn::BitCast(hn::RebindToUnsigned<DS>(), hn::LoadU(hn::Repartition<uint8_t, DF>(), p));
}

HWY_INLINE VU16 LoadBytes(const uint8_t* p) {
  const VU16 codes = LoadCodes(p);
  return kCodeBias == 0 ? codes : hn::Xor(codes, hn::Set(hn::RebindToUnsigned<DS>(), 0x8080));
}

// Pairs of bytes of `a` and `b` side by side: the first half of the pairs, then the second one.
struct PairLines {
#if HWY_TARGET == HWY_AVX3_DL
  HWY_INLINE PairLines() {
    alignas(64) uint16_t order[32];
    for (size_t i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    lower = hn::Load(hn::RebindToUnsigned<DS>(), order);
    upper = hn::Add(lower, hn::Set(hn::RebindToUnsigned<DS>(), 16));
  }
  HWY_INLINE VU16 Lower(VU16 a, VU16 b) const {
    return VU16{_mm512_permutex2var_epi16(a.raw, lower.raw, b.raw)};
  }
  HWY_INLINE VU16 Upper(VU16 a, VU16 b) const {
    return VU16{_mm512_permutex2var_epi16(a.raw, upper.raw, b.raw)};
  }
  VU16 lower, upper;
#else
  HWY_INLINE VU16 Lower(VU16 a, VU16 b) const {
    return hn::InterleaveLower(a, b);
  }
  HWY_INLINE VU16 Upper(VU16 a, VU16 b) const {
    return hn::InterleaveUpper(hn::RebindToUnsigned<DS>(), a, b);
  }
#endif
};
inline constexpr size_t kLineVectorBytes = 4 * kLanes;
inline constexpr size_t kPairTokens = 2 * kLanes;  // or channels, of one vector of codes

// How kernels see codes: four bytes per lane, and the sum of codes times factors, of which `factor_sum` is the sum.
// Bytes in the order of i8:
struct ByteCodes {
  static constexpr size_t kBytesPerLine = 64;
  static HWY_INLINE void LoadLines(const uint8_t* p, VU16& first, VU16& second) {
    first = LoadBytes(p), second = LoadBytes(p + kBytesPerLine);
  }
  static HWY_INLINE VF Total(const QuadSum& sum, int32_t factor_sum) { return sum.Total(kCodeBias * factor_sum); }
};
// A plane of 4 bits as it is (codec/blocks.h), codes 2w - 15: lower nibbles hold a line of i8, upper ones the next line.
struct NibbleCodes {
  static constexpr size_t kBytesPerLine = 32;
  static HWY_INLINE void LoadLines(const uint8_t* p, VU16& first, VU16& second) {
    const VU16 x = LoadCodes(p);
    first = NibbleQuads<0>(x), second = NibbleQuads<1>(x);
  }
  static HWY_INLINE VF Total(const QuadSum& sum, int32_t factor_sum) {
    return hn::ConvertTo(DF(), hn::Sub(hn::ShiftLeft<1>(sum.Integer()), hn::Set(DI(), 15 * factor_sum)));
  }
};

// Codes [dim / 2][32 tokens][2], a line each; q [dim / 4][2 digits][R], four channels side by side;
// scores = sum * q_scale[row] * token_scale[t] + mean[row].
template <class Codes>
struct ScoresOfQuads {
  template <size_t R, size_t... I>
  static HWY_INLINE void Tile(const int32_t* HWY_RESTRICT q, const uint8_t* HWY_RESTRICT k, size_t dim,
                              const float* HWY_RESTRICT q_scale, const int32_t* HWY_RESTRICT q_sum,
                              const float* HWY_RESTRICT mean, const float* HWY_RESTRICT token_scale,
                              float* HWY_RESTRICT scores, std::index_sequence<I...>) {
    const DF d;
    const PairLines lines;
    QuadSum sum[] = {((void)I, QuadSum())...};
    for (size_t c = 0; c < dim; c += 4, q += 2 * R, k += 2 * Codes::kBytesPerLine) {
      VU16 first, second;
      Codes::LoadLines(k, first, second);
      const VU16 codes[2] = {lines.Lower(first, second), lines.Upper(first, second)};
      (sum[I].Add(codes[I % 2], q[I / 2], q[R + I / 2]), ...);
    }
    (hn::StoreU(hn::MulAdd(Codes::Total(sum[I], q_sum[I / 2]),
                           hn::Mul(hn::Set(d, q_scale[I / 2]), hn::LoadU(d, token_scale + I % 2 * kLanes)),
                           hn::Set(d, mean[I / 2])),
                d, scores + I / 2 * kScoreStride + I % 2 * kLanes),
     ...);
  }

  template <size_t R>
  static HWY_NOINLINE void Run(const int32_t* q, const uint8_t* k, size_t dim, const float* q_scale,
                               const int32_t* q_sum, const float* mean, const float* token_scale, float* scores) {
    if constexpr (kHasQuads && R <= kMaxQuadRows) {
      for (size_t t = 0; t < kPageTokens; t += kPairTokens) {
        Tile<R>(q, k + 2 * t, dim, q_scale, q_sum, mean, token_scale + t, scores + t,
                std::make_index_sequence<2 * R>());
      }
    } else {
      (void)q, (void)k, (void)dim, (void)q_scale, (void)q_sum, (void)mean, (void)token_scale, (void)scores;
    }
  }
};

// Codes [16 pairs of tokens][dim][2]; weights [R][8][2 digits], four tokens side by side;
// outputs = outputs * keep + (integer sum - kCodeBias * weight_sum[row]) * weight_scale[row].
// Reads up to 64 bytes behind the codes.
struct ValuesOfBytes {
  template <size_t R, size_t V, size_t... I>
  static HWY_INLINE void Tile(const int32_t* HWY_RESTRICT weights, const uint8_t* HWY_RESTRICT v, size_t dim,
                              const float* HWY_RESTRICT keep, const float* HWY_RESTRICT weight_scale,
                              const int32_t* HWY_RESTRICT weight_sum, float* HWY_RESTRICT outputs,
                              std::index_sequence<I...>) {
    const DF d;
    const PairLines lines;
    QuadSum sum[] = {((void)I, QuadSum())...};
    for (size_t t = 0; t < kPageTokens; t += 4, v += 4 * dim, weights += 2) {
      const VU16 first = LoadBytes(v), second = LoadBytes(v + 2 * dim);
      VU16 codes[2];
      codes[0] = lines.Lower(first, second);
      if constexpr (V > 1) codes[1] = lines.Upper(first, second);
      (sum[I].Add(codes[I % V], weights[I / V * 16], weights[I / V * 16 + 1]), ...);
    }
    (hn::StoreU(hn::MulAdd(hn::LoadU(d, outputs + I / V * dim + I % V * kLanes), hn::Set(d, keep[I / V]),
                           hn::Mul(ByteCodes::Total(sum[I], weight_sum[I / V]), hn::Set(d, weight_scale[I / V]))),
                d, outputs + I / V * dim + I % V * kLanes),
     ...);
  }

  template <size_t R>
  static HWY_NOINLINE void Run(const int32_t* weights, const uint8_t* v, size_t dim, const float* keep,
                               const float* weight_scale, const int32_t* weight_sum, float* outputs) {
    if constexpr (kHasQuads && R <= kMaxQuadRows) {
      size_t c = 0;
      for (; c + kPairTokens <= dim; c += kPairTokens) {
        Tile<R, 2>(weights, v + 2 * c, dim, keep, weight_scale, weight_sum, outputs + c,
                   std::make_index_sequence<2 * R>());
      }
      if (c < dim) {
        Tile<R, 1>(weights, v + 2 * c, dim, keep, weight_scale, weight_sum, outputs + c, std::make_index_sequence<R>());
      }
    } else {
      (void)weights, (void)v, (void)dim, (void)keep, (void)weight_scale, (void)weight_sum, (void)outputs;
    }
  }
};

// As ValuesOfBytes over a plane of 4 bits, of heads that are multiples of 64. Of 64 channels the lower nibbles hold the
// first 32.
struct ValuesOfNibbles {
  template <size_t kNibble>
  static HWY_INLINE void Codes(const PairLines& lines, VU16 a, VU16 b, VU16* codes) {
    const VU16 first = NibbleQuads<kNibble>(a), second = NibbleQuads<kNibble>(b);
    codes[0] = lines.Lower(first, second);
    codes[1] = lines.Upper(first, second);
  }

  // V: 4 vectors, of both nibbles, or 2, of kNibble.
  template <size_t R, size_t V, size_t kNibble, size_t... I>
  static HWY_INLINE void Tile(const int32_t* HWY_RESTRICT weights, const uint8_t* HWY_RESTRICT v, size_t dim,
                              const float* HWY_RESTRICT keep, const float* HWY_RESTRICT weight_scale,
                              const int32_t* HWY_RESTRICT weight_sum, float* HWY_RESTRICT outputs,
                              std::index_sequence<I...>) {
    const DF d;
    const PairLines lines;
    QuadSum sum[] = {((void)I, QuadSum())...};
    for (size_t t = 0; t < kPageTokens; t += 4, v += 2 * dim, weights += 2) {
      const VU16 a = LoadCodes(v), b = LoadCodes(v + dim);
      VU16 codes[V];
      Codes<kNibble>(lines, a, b, codes);
      if constexpr (V > 2) Codes<1>(lines, a, b, codes + 2);
      (sum[I].Add(codes[I % V], weights[I / V * 16], weights[I / V * 16 + 1]), ...);
    }
    constexpr size_t kAt[4] = {0, kLanes, 32, 32 + kLanes};
    (hn::StoreU(hn::MulAdd(hn::LoadU(d, outputs + I / V * dim + kAt[I % V]), hn::Set(d, keep[I / V]),
                           hn::Mul(NibbleCodes::Total(sum[I], weight_sum[I / V]), hn::Set(d, weight_scale[I / V]))),
                d, outputs + I / V * dim + kAt[I % V]),
     ...);
  }

  template <size_t R>
  static HWY_NOINLINE void Run(const int32_t* weights, const uint8_t* v, size_t dim, const float* keep,
                               const float* weight_scale, const int32_t* weight_sum, float* outputs) {
    if constexpr (kHasQuads && R <= kMaxQuadRows) {
      for (size_t c = 0; c < dim; c += 64) {
        for (size_t lane = 0; lane < 64; lane += kLineVectorBytes) {
          const uint8_t* codes = v + c + lane;
          float* to = outputs + c + lane / 2;
          if constexpr (R * 8 <= 24) {
            Tile<R, 4, 0>(weights, codes, dim, keep, weight_scale, weight_sum, to, std::make_index_sequence<4 * R>());
          } else {
            const std::make_index_sequence<2 * R> indices;
            Tile<R, 2, 0>(weights, codes, dim, keep, weight_scale, weight_sum, to, indices);
            Tile<R, 2, 1>(weights, codes, dim, keep, weight_scale, weight_sum, to + 32, indices);
          }
        }
      }
    } else {
      (void)weights, (void)v, (void)dim, (void)keep, (void)weight_scale, (void)weight_sum, (void)outputs;
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
