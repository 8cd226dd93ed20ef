// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// What the codecs' SIMD code shares: loading and rounding of values and scales, transposing, and the way from pairs of
// signed bytes to panels. Compiled once per target; only codec/simd.cc and codec/rotated-inl.h include it.

#if defined(QKV_CODEC_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_CODEC_VECTORS_INL_H_
#undef QKV_CODEC_VECTORS_INL_H_
#else
#define QKV_CODEC_VECTORS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "qkv/codec/blocks.h"
#include "qkv/codec/half.h"

// Without half conversion and byte shuffles in hardware (scalar targets, x86 before AVX2) the reference does the work.
#undef QKV_CODEC_HAS_SIMD
#if HWY_TARGET >= HWY_EMU128 || (HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2)
#define QKV_CODEC_HAS_SIMD 0
#else
#define QKV_CODEC_HAS_SIMD 1

HWY_BEFORE_NAMESPACE();
namespace qkv::simd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using blocks::Size;

// Head dims are multiples of 16 and groups of channels multiples of 8, so that no loop has a remainder.
using Wide = hn::CappedTag<float, 16>;
using Narrow = hn::CappedTag<float, 8>;
template <class T>
using Fixed128 = hn::CappedTag<T, 16 / sizeof(T)>;

// Scratch rows are longer than the longest head, so that the shuffles may read a whole vector past a row's end.
constexpr size_t kScratchStride = kMaxHeadDim + 64;

template <class D>
hn::Vec<D> LoadSanitized(D d, const float* from) {
  const auto x = hn::LoadU(d, from);
  const auto number = hn::IfThenElseZero(hn::Eq(x, x), x);
  return hn::Min(hn::Max(number, hn::Set(d, -kHalfMax)), hn::Set(d, kHalfMax));
}

template <class D>
hn::Vec<D> LoadHalves(D d, const void* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<hwy::float16_t, D> dhalf;
  return hn::PromoteTo(d, hn::BitCast(dhalf, hn::LoadU(d16, static_cast<const uint16_t*>(from))));
}

// Returns the values as they are stored.
template <class D>
hn::Vec<D> StoreHalves(D d, hn::Vec<D> values, void* to) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<hwy::float16_t, D> dhalf;
  const auto half = hn::BitCast(d16, hn::DemoteTo(dhalf, values));
  const auto no_minus_zero = hn::IfThenZeroElse(hn::Eq(half, hn::Set(d16, uint16_t{0x8000})), half);
  hn::StoreU(no_minus_zero, d16, static_cast<uint16_t*>(to));
  return hn::PromoteTo(d, hn::BitCast(dhalf, no_minus_zero));
}

template <class D>
hn::Vec<D> Inverse(D d, hn::Vec<D> scale) {
  const auto zero = hn::Zero(d);
  return hn::IfThenZeroElse(hn::Eq(scale, zero), hn::Div(hn::Set(d, 1.0f), scale));
}

// [rows][columns] to [columns][rows]; both multiples of 8; stride in elements.
HWY_MAYBE_UNUSED void Transpose16(const uint16_t* from, size_t stride, size_t rows, int columns, uint16_t* to) {
  const Fixed128<uint16_t> d16;
  const Fixed128<uint32_t> d32;
  const Fixed128<uint64_t> d64;
  for (int c = 0; c < columns; c += 8) {
    for (size_t r = 0; r < rows; r += 8) {
      const uint16_t* in = from + r * stride + Size(c);
      const auto a0 = hn::LoadU(d16, in), a1 = hn::LoadU(d16, in + stride);
      const auto a2 = hn::LoadU(d16, in + 2 * stride), a3 = hn::LoadU(d16, in + 3 * stride);
      const auto a4 = hn::LoadU(d16, in + 4 * stride), a5 = hn::LoadU(d16, in + 5 * stride);
      const auto a6 = hn::LoadU(d16, in + 6 * stride), a7 = hn::LoadU(d16, in + 7 * stride);
      // Pairs of rows, then fours, then all eight; L and H: columns 0..3 and 4..7.
      const auto l01 = hn::BitCast(d32, hn::InterleaveLower(d16, a0, a1));
      const auto l23 = hn::BitCast(d32, hn::InterleaveLower(d16, a2, a3));
      const auto l45 = hn::BitCast(d32, hn::InterleaveLower(d16, a4, a5));
      const auto l67 = hn::BitCast(d32, hn::InterleaveLower(d16, a6, a7));
      const auto h01 = hn::BitCast(d32, hn::InterleaveUpper(d16, a0, a1));
      const auto h23 = hn::BitCast(d32, hn::InterleaveUpper(d16, a2, a3));
      const auto h45 = hn::BitCast(d32, hn::InterleaveUpper(d16, a4, a5));
      const auto h67 = hn::BitCast(d32, hn::InterleaveUpper(d16, a6, a7));
      uint16_t* out = to + Size(c) * rows + r;
      const auto store = [&](size_t column, auto four0, auto four1) HWY_ATTR {
        const auto x = hn::BitCast(d64, four0), y = hn::BitCast(d64, four1);
        hn::StoreU(hn::BitCast(d16, hn::InterleaveLower(d64, x, y)), d16, out + column * rows);
        hn::StoreU(hn::BitCast(d16, hn::InterleaveUpper(d64, x, y)), d16, out + (column + 1) * rows);
      };
      store(0, hn::InterleaveLower(d32, l01, l23), hn::InterleaveLower(d32, l45, l67));
      store(2, hn::InterleaveUpper(d32, l01, l23), hn::InterleaveUpper(d32, l45, l67));
      store(4, hn::InterleaveLower(d32, h01, h23), hn::InterleaveLower(d32, h45, h67));
      store(6, hn::InterleaveUpper(d32, h01, h23), hn::InterleaveUpper(d32, h45, h67));
    }
  }
}

// Codes [row_pairs][lanes][2 rows] to [2 * row_pairs][lanes]: K and V alike, with channels and tokens as the rows.
// Scales: one per row, or one per lane. kNoMinusZero: codes are not 0 where a scale is, but values shall be +0.
template <bool kPerRow, bool kNoMinusZero = false>
void UnpackPairs(const uint8_t* codes, int row_pairs, int row_lanes, const float* scales, float* panel) {
  const Wide d;
  const hn::Rebind<int32_t, Wide> d32;
  const hn::Rebind<int16_t, Wide> d16;
  const int16_t* pairs = reinterpret_cast<const int16_t*>(codes);
  for (int r = 0; r < row_pairs; ++r) {
    auto even_scale = hn::Set(d, scales[kPerRow ? 2 * r : 0]);
    auto odd_scale = hn::Set(d, scales[kPerRow ? 2 * r + 1 : 0]);
    for (int i = 0; i < row_lanes; i += static_cast<int>(hn::Lanes(d))) {
      const auto pair = hn::PromoteTo(d32, hn::LoadU(d16, pairs + r * row_lanes + i));
      const auto even = hn::ConvertTo(d, hn::ShiftRight<24>(hn::ShiftLeft<24>(pair)));
      const auto odd = hn::ConvertTo(d, hn::ShiftRight<8>(pair));
      if constexpr (!kPerRow) even_scale = odd_scale = hn::LoadU(d, scales + i);
      const auto plus_zero = [&](auto value) HWY_ATTR {
        if constexpr (kNoMinusZero) return hn::Add(value, hn::Zero(d));
        return value;
      };
      float* to = panel + 2 * r * row_lanes + i;
      hn::StoreU(plus_zero(hn::Mul(even, even_scale)), d, to);
      hn::StoreU(plus_zero(hn::Mul(odd, odd_scale)), d, to + row_lanes);
    }
  }
}

// Rows [tokens][head_dim], sanitized where they are an encoder's, to a panel [head_dim][32 tokens]; absent tokens: 0.
template <bool kSanitize>
void TransposeRows(const float* rows, int tokens, int head_dim, float* panel) {
  static constexpr float kZeros[kMaxHeadDim] = {};
  const Fixed128<float> d;
  const Fixed128<double> d64;
  for (int t = 0; t < kPageTokens; t += 4) {
    const auto row = [&](int i) { return t + i < tokens ? rows + (t + i) * head_dim : kZeros; };
    const float *r0 = row(0), *r1 = row(1), *r2 = row(2), *r3 = row(3);
    const auto load = [&](const float* from) HWY_ATTR {
      if constexpr (kSanitize) return LoadSanitized(d, from);
      return hn::LoadU(d, from);
    };
    for (int c = 0; c < head_dim; c += 4) {
      const auto a = load(r0 + c), b = load(r1 + c), e = load(r2 + c), f = load(r3 + c);
      const auto ab_low = hn::BitCast(d64, hn::InterleaveLower(d, a, b));
      const auto ef_low = hn::BitCast(d64, hn::InterleaveLower(d, e, f));
      const auto ab_high = hn::BitCast(d64, hn::InterleaveUpper(d, a, b));
      const auto ef_high = hn::BitCast(d64, hn::InterleaveUpper(d, e, f));
      float* to = panel + c * kPageTokens + t;
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, ab_low, ef_low)), d, to);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, ab_low, ef_low)), d, to + kPageTokens);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, ab_high, ef_high)), d, to + 2 * kPageTokens);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, ab_high, ef_high)), d, to + 3 * kPageTokens);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::simd
HWY_AFTER_NAMESPACE();

#endif  // QKV_CODEC_HAS_SIMD
#endif  // QKV_CODEC_VECTORS_INL_H_
