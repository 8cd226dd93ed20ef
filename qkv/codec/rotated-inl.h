// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// The codecs 3 to 7, +4 and 5/3 with SIMD; only codec/simd.cc includes it. The lanes of a vector are tokens: the sums of
// a token then run over channels one after the other, as in the reference, whatever the vector's length.

#if defined(QKV_CODEC_ROTATED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_CODEC_ROTATED_INL_H_
#undef QKV_CODEC_ROTATED_INL_H_
#else
#define QKV_CODEC_ROTATED_INL_H_
#endif

#include <array>
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "qkv/codec/planes-inl.h"
#include "qkv/codec/vectors-inl.h"

#if QKV_CODEC_HAS_SIMD

HWY_BEFORE_NAMESPACE();
namespace qkv::simd {
namespace HWY_NAMESPACE {

template <class D>
hn::Vec<D> RoundedToHalf(D d, hn::Vec<D> values) {
  const hn::Rebind<hwy::float16_t, D> dhalf;
  return hn::PromoteTo(d, hn::DemoteTo(dhalf, values));
}

// One vector's tokens of a panel, values in units of their bands: their best scales go to `scales` (halves), and the codes w
// to codes [head_dim][32].
void EncodeTokens(const float* panel, const std::array<blocks::Band, 2>& bands, uint8_t* scales, uint8_t* codes) {
  const Wide d;
  const hn::Rebind<int32_t, Wide> d32;
  const hn::Rebind<uint8_t, Wide> d8;
  const auto zero = hn::Zero(d), one = hn::Set(d, 1.0f);
  const auto largest_of = [&](const blocks::Band& band) HWY_ATTR {
    auto largest = zero;
    for (int c = band.first; c < band.end; ++c) {
      largest = hn::Max(largest, hn::Abs(hn::Load(d, panel + c * kPageTokens)));
    }
    return largest;
  };
  const auto largest0 = largest_of(bands[0]), largest1 = largest_of(bands[1]);

  const auto step_of = [&](float clip) HWY_ATTR {
    const auto of_band = [&](auto largest, const blocks::Band& band) HWY_ATTR {
      return hn::Div(hn::Mul(hn::Set(d, clip), largest), hn::Set(d, static_cast<float>((1 << band.bits) - 1)));
    };
    return RoundedToHalf(d, hn::Max(of_band(largest0, bands[0]), of_band(largest1, bands[1])));
  };
  const auto inverse_of = [&](auto step) HWY_ATTR {
    return hn::IfThenZeroElse(hn::Eq(step, zero), hn::Div(hn::Set(d, 0.5f), step));
  };
  const auto cell = [&](auto value, auto inverse, auto half_range) HWY_ATTR {
    return hn::Min(hn::Max(hn::Floor(hn::Mul(value, inverse)), hn::Neg(half_range)), hn::Sub(half_range, one));
  };
  const auto half_range_of = [&](const blocks::Band& band)
                                 HWY_ATTR { return hn::Set(d, static_cast<float>(1 << (band.bits - 1))); };

  auto best_gain = zero, best_inverse = zero, best_scale = zero;
  // Without a step the inverse is 0, and so the gain shall be.
  const auto consider = [&](auto inverse, auto products, auto squares) HWY_ATTR {
    const auto fitted = RoundedToHalf(d, hn::Div(products, squares));
    const auto scale = hn::IfThenZeroElse(hn::Eq(inverse, zero), fitted);
    const auto gain = hn::Mul(scale, hn::Sub(hn::Add(products, products), hn::Mul(scale, squares)));
    const auto better = hn::Gt(gain, best_gain);
    best_gain = hn::IfThenElse(better, gain, best_gain);
    best_inverse = hn::IfThenElse(better, inverse, best_inverse);
    best_scale = hn::IfThenElse(better, scale, best_scale);
  };
  const auto add = [&](auto value, auto inverse, auto half_range, auto& products, auto& squares) HWY_ATTR {
    const auto u = cell(value, inverse, half_range);
    const auto code = hn::Add(hn::Add(u, u), one);
    products = hn::Add(products, hn::Mul(value, code));
    squares = hn::Add(squares, hn::Mul(code, code));
  };

  // All factors in one pass would be more than most targets have registers.
  static_assert(std::size(blocks::kClipFactors) == 5);
  {
    const auto i0 = inverse_of(step_of(blocks::kClipFactors[0])), i1 = inverse_of(step_of(blocks::kClipFactors[1])),
               i2 = inverse_of(step_of(blocks::kClipFactors[2]));
    auto p0 = zero, p1 = zero, p2 = zero, s0 = zero, s1 = zero, s2 = zero;
    for (const blocks::Band& band : bands) {
      const auto half_range = half_range_of(band);
      for (int c = band.first; c < band.end; ++c) {
        const auto value = hn::Load(d, panel + c * kPageTokens);
        add(value, i0, half_range, p0, s0);
        add(value, i1, half_range, p1, s1);
        add(value, i2, half_range, p2, s2);
      }
    }
    consider(i0, p0, s0);
    consider(i1, p1, s1);
    consider(i2, p2, s2);
  }
  {
    const auto i3 = inverse_of(step_of(blocks::kClipFactors[3])), i4 = inverse_of(step_of(blocks::kClipFactors[4]));
    auto p3 = zero, p4 = zero, s3 = zero, s4 = zero;
    for (const blocks::Band& band : bands) {
      const auto half_range = half_range_of(band);
      for (int c = band.first; c < band.end; ++c) {
        const auto value = hn::Load(d, panel + c * kPageTokens);
        add(value, i3, half_range, p3, s3);
        add(value, i4, half_range, p4, s4);
      }
    }
    consider(i3, p3, s3);
    consider(i4, p4, s4);
  }

  StoreHalves(d, best_scale, scales);
  const auto without_scale = hn::Eq(best_scale, zero);
  for (const blocks::Band& band : bands) {
    const auto half_range = half_range_of(band);
    for (int c = band.first; c < band.end; ++c) {
      const auto u = cell(hn::Load(d, panel + c * kPageTokens), best_inverse, half_range);
      const auto w = hn::IfThenZeroElse(without_scale, hn::Add(u, half_range));
      hn::StoreU(hn::DemoteTo(d8, hn::ConvertTo(d32, w)), d8, codes + c * kPageTokens);
    }
  }
}

// Codes [head_dim][32 tokens] of bytes to the order of an i8 block's K: pairs of channels side by side.
void InterleaveChannels(const uint8_t* codes, int head_dim, uint8_t* to) {
  const Fixed128<uint8_t> d;
  for (int c = 0; c < head_dim; c += 2, codes += 2 * kPageTokens, to += 64) {
    for (int t = 0; t < kPageTokens; t += 16) {
      const auto even = hn::Load(d, codes + t), odd = hn::Load(d, codes + kPageTokens + t);
      hn::StoreU(hn::InterleaveLower(d, even, odd), d, to + 2 * t);
      hn::StoreU(hn::InterleaveUpper(d, even, odd), d, to + 2 * t + 16);
    }
  }
}

// Codes in the order of an i8 block's V, [16 token pairs][head_dim][2], to the refinement plane.
void PackRefinement(const uint8_t* codes, int head_dim, uint8_t* to) {
  const Fixed128<uint16_t> d16;
  const hn::Rebind<uint8_t, Fixed128<uint16_t> > d8;
  const hn::RebindToSigned<Fixed128<uint16_t> > di16;
  const int half = head_dim / 2;
  for (int t = 0; t < kPageTokens; t += 2, codes += 2 * head_dim, to += head_dim) {
    const auto* pairs = reinterpret_cast<const uint16_t*>(codes);
    for (int j = 0; j < half; j += 8) {
      const auto both = hn::Or(hn::LoadU(d16, pairs + j), hn::ShiftLeft<4>(hn::LoadU(d16, pairs + half + j)));
      const auto first = hn::BitCast(di16, hn::And(both, hn::Set(d16, uint16_t{0xff})));
      const auto second = hn::BitCast(di16, hn::ShiftRight<8>(both));
      hn::StoreU(hn::DemoteTo(d8, first), d8, to + j);
      hn::StoreU(hn::DemoteTo(d8, second), d8, to + half + j);
    }
  }
}

HWY_MAYBE_UNUSED void EncodeRotated(CodecId id, Side side, const float* rows, int tokens, int head_dim,
                                    uint8_t* block) {
  const int bits = blocks::RotatedBits(id);
  alignas(64) float panel[kMaxHeadDim * kPageTokens];
  alignas(64) uint8_t codes[kMaxHeadDim * kPageTokens];
  alignas(64) uint8_t ordered[kMaxHeadDim * kPageTokens];
  TransposeRows<true>(rows, tokens, head_dim, panel);
  const auto bands = blocks::BandsOf(id, head_dim);
  for (size_t i = Size(bands[1].first * kPageTokens); i < Size(bands[1].end * kPageTokens); i += hn::Lanes(Wide())) {
    const auto unit = hn::Set(Wide(), 1.0f / static_cast<float>(bands[1].unit));
    hn::Store(hn::Mul(hn::Load(Wide(), panel + i), unit), Wide(), panel + i);
  }
  uint8_t* scales = block + blocks::RotatedScaleOffset(bits, head_dim);
  for (size_t t = 0; t < kPageTokens; t += hn::Lanes(Wide())) {
    EncodeTokens(panel + t, bands, scales + 2 * t, codes + t);
  }
  if (side == Side::kK && id != CodecId::kRefine4) {
    InterleaveChannels(codes, head_dim, ordered);
  } else {
    Transpose16(reinterpret_cast<const uint16_t*>(codes), kPageTokens / 2, Size(head_dim), kPageTokens / 2,
                reinterpret_cast<uint16_t*>(ordered));
  }
  if (id == CodecId::kRefine4) {
    PackRefinement(ordered, head_dim, block);
  } else if (id == CodecId::kBands) {
    planes::HWY_NAMESPACE::PackBands(ordered, head_dim, block);
  } else {
    planes::HWY_NAMESPACE::PackPlanes(bits, ordered, Size(kPageTokens * head_dim), block);
  }
}

void UnpackRefinement(Side side, const uint8_t* block, int head_dim, float* panel) {
  const Narrow d;
  const hn::Rebind<uint8_t, Narrow> d8;
  const hn::Rebind<int32_t, Narrow> d32;
  const auto low_bits = hn::Set(d32, 15), fifteen = hn::Set(d32, 15);
  alignas(64) float scratch[kPageTokens * kMaxHeadDim];
  float* rows = side == Side::kV ? panel : scratch;
  const int half = head_dim / 2;
  for (int t = 0; t < kPageTokens; ++t) {
    uint16_t stored;
    std::memcpy(&stored, block + blocks::RotatedScaleOffset(4, head_dim) + 2 * t, sizeof stored);
    const auto scale = hn::Set(d, FloatFromHalf(stored));
    const auto value = [&](auto w) HWY_ATTR {
      const auto code = hn::ConvertTo(d, hn::Sub(hn::Add(w, w), fifteen));
      return hn::Add(hn::Mul(scale, code), hn::Zero(d));  // not -0 where the scale is 0
    };
    float* row = rows + t * head_dim;
    for (int j = 0; j < half; j += static_cast<int>(hn::Lanes(d))) {
      const auto bytes = hn::PromoteTo(d32, hn::LoadU(d8, block + t * half + j));
      hn::StoreU(value(hn::And(bytes, low_bits)), d, row + j);
      hn::StoreU(value(hn::ShiftRight<4>(bytes)), d, row + half + j);
    }
  }
  if (side == Side::kK) TransposeRows<false>(rows, kPageTokens, head_dim, panel);
}

HWY_MAYBE_UNUSED void UnpackRotated(CodecId id, Side side, const uint8_t* block, int head_dim, float* panel) {
  if (id == CodecId::kRefine4) return UnpackRefinement(side, block, head_dim, panel);
  const Wide d;
  const int bits = blocks::RotatedBits(id);
  alignas(64) int8_t codes[kPageTokens * kMaxHeadDim];
  alignas(64) float scales[kPageTokens];
  if (id == CodecId::kBands) {
    planes::HWY_NAMESPACE::ExpandBands(block, head_dim, codes);
  } else {
    planes::HWY_NAMESPACE::ExpandPlanes(bits, block, Size(kPageTokens * head_dim), codes);
  }
  for (size_t t = 0; t < kPageTokens; t += hn::Lanes(d)) {
    hn::Store(LoadHalves(d, block + blocks::RotatedScaleOffset(bits, head_dim) + 2 * t), d, scales + t);
  }
  const auto* pairs = reinterpret_cast<const uint8_t*>(codes);
  if (side == Side::kK) {
    UnpackPairs<false, true>(pairs, head_dim / 2, kPageTokens, scales, panel);
  } else {
    UnpackPairs<true, true>(pairs, kPageTokens / 2, head_dim, scales, panel);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::simd
HWY_AFTER_NAMESPACE();

#endif  // QKV_CODEC_HAS_SIMD
#endif  // QKV_CODEC_ROTATED_INL_H_
