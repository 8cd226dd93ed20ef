// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/simd.h"

#include <algorithm>
#include <cstring>

#include "qkv/codec/blocks.h"
#include "qkv/codec/half.h"
#include "qkv/codec/reference.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "qkv/codec/simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// This part is compiled once per target. Encoding runs in stages over a scratch of codes, row by row: extremes under
// each scale, scales, codes, and last the shuffle into the block's order.
HWY_BEFORE_NAMESPACE();
namespace qkv::simd {
namespace HWY_NAMESPACE {

// Without half conversion and byte shuffles in hardware (scalar targets, x86 before AVX2) the reference does the work.
#if HWY_TARGET >= HWY_EMU128 || (HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2)

void EncodeBlock(CodecId id, Side side, const float* rows, int tokens, int head_dim, std::byte* block) {
  reference::Encode(id, side, rows, tokens, head_dim, block);
}
void UnpackBlock(CodecId id, Side side, const std::byte* block, int head_dim, float* panel) {
  reference::Unpack(id, side, block, head_dim, panel);
}

#else

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

// ---- shuffles: rows of small elements to the block's order ----

// [32 rows][columns] to [columns][32 rows]; columns a multiple of 8; stride in elements.
void Transpose16(const uint16_t* from, size_t stride, int columns, uint16_t* to) {
  const Fixed128<uint16_t> d16;
  const Fixed128<uint32_t> d32;
  const Fixed128<uint64_t> d64;
  for (int c = 0; c < columns; c += 8) {
    for (size_t r = 0; r < kPageTokens; r += 8) {
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
      uint16_t* out = to + Size(c) * kPageTokens + r;
      const auto store = [&](int column, auto four0, auto four1) HWY_ATTR {
        const auto x = hn::BitCast(d64, four0), y = hn::BitCast(d64, four1);
        hn::StoreU(hn::BitCast(d16, hn::InterleaveLower(d64, x, y)), d16, out + column * kPageTokens);
        hn::StoreU(hn::BitCast(d16, hn::InterleaveUpper(d64, x, y)), d16, out + (column + 1) * kPageTokens);
      };
      store(0, hn::InterleaveLower(d32, l01, l23), hn::InterleaveLower(d32, l45, l67));
      store(2, hn::InterleaveUpper(d32, l01, l23), hn::InterleaveUpper(d32, l45, l67));
      store(4, hn::InterleaveLower(d32, h01, h23), hn::InterleaveLower(d32, h45, h67));
      store(6, hn::InterleaveUpper(d32, h01, h23), hn::InterleaveUpper(d32, h45, h67));
    }
  }
}

// [32 rows][columns] to [16][columns][2 rows] of bytes.
void InterleavePairs(const uint8_t* from, size_t stride, int columns, uint8_t* to) {
  const Fixed128<uint8_t> d;
  for (int r = 0; r < kPageTokens; r += 2, from += 2 * stride) {
    for (int c = 0; c < columns; c += 16, to += 32) {
      const auto even = hn::LoadU(d, from + c), odd = hn::LoadU(d, from + stride + c);
      hn::StoreU(hn::InterleaveLower(d, even, odd), d, to);
      hn::StoreU(hn::InterleaveUpper(d, even, odd), d, to + 16);
    }
  }
}

// Codes 0..15 as bytes, [32 tokens][head_dim], to i4's K.
void PackNibblesK(const uint8_t* from, int head_dim, uint8_t* to) {
  const Fixed128<uint8_t> d8;
  const Fixed128<uint32_t> d32;
  const Fixed128<uint64_t> d64;
  const int half = head_dim / 2;
  for (int c = 0; c < half; c += 16) {
    for (int t = 0; t < kPageTokens; t += 4) {
      const auto pack = [&](int row) HWY_ATTR {
        const uint8_t* codes = from + Size(t + row) * kScratchStride + c;
        return hn::BitCast(d32, hn::Or(hn::LoadU(d8, codes), hn::ShiftLeft<4>(hn::LoadU(d8, codes + half))));
      };
      const auto a0 = pack(0), a1 = pack(1), a2 = pack(2), a3 = pack(3);
      uint8_t* out = to + c / 4 * 128 + t * 4;
      const auto store = [&](int p, auto x01, auto x23) HWY_ATTR {
        const auto x = hn::BitCast(d64, x01), y = hn::BitCast(d64, x23);
        hn::StoreU(hn::BitCast(d8, hn::InterleaveLower(d64, x, y)), d8, out + p * 128);
        hn::StoreU(hn::BitCast(d8, hn::InterleaveUpper(d64, x, y)), d8, out + (p + 1) * 128);
      };
      store(0, hn::InterleaveLower(d32, a0, a1), hn::InterleaveLower(d32, a2, a3));
      if (c + 8 < half) store(2, hn::InterleaveUpper(d32, a0, a1), hn::InterleaveUpper(d32, a2, a3));
    }
  }
}

// The same to i4's V.
void PackNibblesV(const uint8_t* from, int head_dim, uint8_t* to) {
  const Fixed128<uint8_t> d8;
  const Fixed128<uint16_t> d16;
  for (int t = 0; t < kPageTokens; t += 8) {
    for (int c = 0; c < head_dim; c += 16, to += 64) {
      const auto pack = [&](int low, int high) HWY_ATTR {
        return hn::Or(hn::LoadU(d8, from + Size(t + low) * kScratchStride + c),
                      hn::ShiftLeft<4>(hn::LoadU(d8, from + Size(t + high) * kScratchStride + c)));
      };
      const auto b0 = pack(0, 2), b1 = pack(4, 6), b2 = pack(1, 3), b3 = pack(5, 7);
      const auto store = [&](int first, auto even, auto odd) HWY_ATTR {
        const auto x = hn::BitCast(d16, even), y = hn::BitCast(d16, odd);
        hn::StoreU(hn::BitCast(d8, hn::InterleaveLower(d16, x, y)), d8, to + first * 4);
        hn::StoreU(hn::BitCast(d8, hn::InterleaveUpper(d16, x, y)), d8, to + (first + 4) * 4);
      };
      store(0, hn::InterleaveLower(d8, b0, b1), hn::InterleaveLower(d8, b2, b3));
      store(8, hn::InterleaveUpper(d8, b0, b1), hn::InterleaveUpper(d8, b2, b3));
    }
  }
}

// ---- f16 ----

void EncodeF16(Side side, const float* rows, int tokens, int head_dim, uint8_t* block) {
  const Wide d;
  const hn::Rebind<uint16_t, Wide> d16;
  const hn::Rebind<hwy::float16_t, Wide> dhalf;
  alignas(64) uint16_t scratch[kPageTokens * kMaxHeadDim];
  uint16_t* halves = side == Side::kK ? scratch : reinterpret_cast<uint16_t*>(block);
  const int values = tokens * head_dim;
  for (int i = 0; i < values; i += static_cast<int>(hn::Lanes(d))) {
    hn::StoreU(hn::BitCast(d16, hn::DemoteTo(dhalf, LoadSanitized(d, rows + i))), d16, halves + i);
  }
  std::memset(halves + values, 0, 2 * Size(kPageTokens * head_dim - values));
  if (side == Side::kK) Transpose16(scratch, Size(head_dim), head_dim, reinterpret_cast<uint16_t*>(block));
}

void UnpackF16(const uint8_t* block, int head_dim, float* panel) {
  const Wide d;
  for (size_t i = 0; i < Size(kPageTokens * head_dim); i += hn::Lanes(d)) {
    hn::StoreU(LoadHalves(d, block + 2 * i), d, panel + i);
  }
}

// ---- i8, i8-channel, i8-tensor ----

float LargestMagnitude(const float* values, int n) {
  const Wide d;
  auto largest = hn::Zero(d);
  for (int i = 0; i < n; i += static_cast<int>(hn::Lanes(d))) {
    largest = hn::Max(largest, hn::Abs(LoadSanitized(d, values + i)));
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// `inverses`: one per channel, or one for all.
template <bool kPerChannel>
void QuantizeRow8(const float* row, int head_dim, const float* inverses, int8_t* codes) {
  const Wide d;
  const hn::Rebind<int32_t, Wide> d32;
  const hn::Rebind<int8_t, Wide> d8;
  const auto lowest = hn::Set(d32, -127);
  auto inverse = hn::Set(d, inverses[0]);
  for (int c = 0; c < head_dim; c += static_cast<int>(hn::Lanes(d))) {
    if constexpr (kPerChannel) inverse = hn::LoadU(d, inverses + c);
    const auto code = hn::NearestInt(hn::Mul(LoadSanitized(d, row + c), inverse));
    hn::StoreU(hn::DemoteTo(d8, hn::Max(code, lowest)), d8, codes + c);  // saturates at 127
  }
}

void EncodeI8(CodecId id, Side side, const float* rows, int tokens, int head_dim, uint8_t* block) {
  const Wide d;
  const size_t lanes = hn::Lanes(d);
  alignas(64) float extremes[kMaxHeadDim] = {};  // under each scale; later one over the scale
  if (id == CodecId::kI8 || id == CodecId::k8) {
    for (int t = 0; t < tokens; ++t) extremes[t] = LargestMagnitude(rows + t * head_dim, head_dim);
  } else if (id == CodecId::kI8Tensor) {
    extremes[0] = LargestMagnitude(rows, tokens * head_dim);
  } else {
    for (size_t c = 0; c < Size(head_dim); c += lanes) {
      auto largest = hn::Zero(d);
      for (int t = 0; t < tokens; ++t) {
        largest = hn::Max(largest, hn::Abs(LoadSanitized(d, rows + Size(t * head_dim) + c)));
      }
      hn::Store(largest, d, extremes + c);
    }
  }

  // As many as fit: beyond the last scale the extremes are 0, and so are the padding bytes.
  uint8_t* scales = block + blocks::I8ScaleOffset(head_dim);
  const size_t n_scales = (blocks::I8Bytes(id, head_dim) - blocks::I8ScaleOffset(head_dim)) / 2;
  for (size_t i = 0; i < n_scales; i += lanes) {
    const auto scale = hn::Div(hn::Load(d, extremes + i), hn::Set(d, 127.0f));
    hn::Store(Inverse(d, StoreHalves(d, scale, scales + 2 * i)), d, extremes + i);
  }

  alignas(64) int8_t codes[kPageTokens * kScratchStride];
  for (int t = 0; t < tokens; ++t) {
    const float* row = rows + t * head_dim;
    int8_t* to = codes + Size(t) * kScratchStride;
    if (id == CodecId::kI8Channel) {
      QuantizeRow8<true>(row, head_dim, extremes, to);
    } else {
      QuantizeRow8<false>(row, head_dim, extremes + (id == CodecId::kI8Tensor ? 0 : t), to);
    }
  }
  std::memset(codes + Size(tokens) * kScratchStride, 0, Size(kPageTokens - tokens) * kScratchStride);

  if (side == Side::kK) {
    Transpose16(reinterpret_cast<const uint16_t*>(codes), kScratchStride / 2, head_dim / 2,
                reinterpret_cast<uint16_t*>(block));
  } else {
    InterleavePairs(reinterpret_cast<const uint8_t*>(codes), kScratchStride, head_dim, block);
  }
}

// Codes [row_pairs][lanes][2 rows] to [2 * row_pairs][lanes]: K and V alike, with channels and tokens as the rows.
// Scales: one per row, or one per lane.
template <bool kPerRow>
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
      float* to = panel + 2 * r * row_lanes + i;
      hn::StoreU(hn::Mul(even, even_scale), d, to);
      hn::StoreU(hn::Mul(odd, odd_scale), d, to + row_lanes);
    }
  }
}

void UnpackI8(CodecId id, Side side, const uint8_t* block, int head_dim, float* panel) {
  const Wide d;
  const bool is_k = side == Side::kK;
  const int rows = is_k ? head_dim : kPageTokens;
  const int row_lanes = is_k ? kPageTokens : head_dim;
  const uint8_t* stored = block + blocks::I8ScaleOffset(head_dim);
  alignas(64) float scales[kMaxHeadDim];
  if (id == CodecId::kI8Tensor) {
    uint16_t half;
    std::memcpy(&half, stored, sizeof half);
    std::fill_n(scales, rows, FloatFromHalf(half));
  } else {
    for (size_t i = 0; i < Size(blocks::I8ScaleCount(id, head_dim)); i += hn::Lanes(d)) {
      hn::Store(LoadHalves(d, stored + 2 * i), d, scales + i);
    }
  }
  const bool per_row = id == CodecId::kI8Tensor || is_k == (id == CodecId::kI8Channel);
  (per_row ? UnpackPairs<true> : UnpackPairs<false>)(block, rows / 2, row_lanes, scales, panel);
}

// ---- i4, i4z: value = scale*u + base, with base = -8*scale for i4 ----

// Of n values, a multiple of 8.
void MinMax(const float* values, int n, float* low, float* high) {
  const Narrow d;
  auto lows = LoadSanitized(d, values), highs = lows;
  for (int i = static_cast<int>(hn::Lanes(d)); i < n; i += static_cast<int>(hn::Lanes(d))) {
    const auto x = LoadSanitized(d, values + i);
    lows = hn::Min(lows, x);
    highs = hn::Max(highs, x);
  }
  *low = hn::GetLane(hn::MinOfLanes(d, lows));
  *high = hn::GetLane(hn::MaxOfLanes(d, highs));
}

constexpr int kMaxGrids = kMaxHeadDim / 32 * kPageTokens;

void EncodeI4(CodecId id, Side side, const float* rows, int tokens, int head_dim, uint8_t* block) {
  const Wide d;
  const int groups = blocks::I4Groups(head_dim);
  const int group = blocks::I4GroupChannels(head_dim);
  // [groups][32 tokens], as the block has it. The two become base and one over the scale.
  alignas(64) float lows[kMaxGrids], highs[kMaxGrids];
  for (int g = 0; g < groups; ++g) {
    for (int t = 0; t < tokens; ++t) {
      const int i = g * kPageTokens + t;
      MinMax(rows + t * head_dim + g * group, group, &lows[i], &highs[i]);
    }
    std::fill(lows + g * kPageTokens + tokens, lows + (g + 1) * kPageTokens, 0.0f);
    std::fill(highs + g * kPageTokens + tokens, highs + (g + 1) * kPageTokens, 0.0f);
  }

  uint8_t* scales = block + blocks::I4ScaleOffset(head_dim);
  uint8_t* minima = block + blocks::I4MinOffset(head_dim);
  for (size_t i = 0; i < Size(groups * kPageTokens); i += hn::Lanes(d)) {
    const auto low = hn::Load(d, lows + i), high = hn::Load(d, highs + i);
    auto scale = hn::Zero(d), base = hn::Zero(d);
    if (id == CodecId::kI4Z) {
      base = StoreHalves(d, low, minima + 2 * i);
      scale = hn::Div(hn::Max(hn::Sub(high, base), hn::Zero(d)), hn::Set(d, 15.0f));
      scale = StoreHalves(d, scale, scales + 2 * i);
    } else {
      const auto extreme = hn::IfThenElse(hn::Ge(hn::Neg(low), high), low, high);
      scale = StoreHalves(d, hn::Mul(extreme, hn::Set(d, -0.125f)), scales + 2 * i);
      base = hn::Mul(scale, hn::Set(d, -8.0f));
    }
    hn::Store(base, d, lows + i);
    hn::Store(Inverse(d, scale), d, highs + i);
  }

  alignas(64) uint8_t codes[kPageTokens * kScratchStride];
  const Narrow dn;
  const hn::Rebind<int32_t, Narrow> d32;
  const hn::Rebind<uint8_t, Narrow> d8;
  const auto zero = hn::Zero(d32), last = hn::Set(d32, 15);
  for (int t = 0; t < tokens; ++t) {
    for (int g = 0; g < groups; ++g) {
      const auto base = hn::Set(dn, lows[g * kPageTokens + t]);
      const auto inverse = hn::Set(dn, highs[g * kPageTokens + t]);
      for (int c = g * group; c < (g + 1) * group; c += static_cast<int>(hn::Lanes(dn))) {
        const auto x = LoadSanitized(dn, rows + t * head_dim + c);
        const auto u = hn::NearestInt(hn::Mul(hn::Sub(x, base), inverse));
        hn::StoreU(hn::DemoteTo(d8, hn::Min(hn::Max(u, zero), last)), d8, codes + Size(t) * kScratchStride + c);
      }
    }
  }
  std::memset(codes + Size(tokens) * kScratchStride, 0, Size(kPageTokens - tokens) * kScratchStride);
  (side == Side::kK ? PackNibblesK : PackNibblesV)(codes, head_dim, block);
}

// The nibble at bit kShift of each lane, as a value.
template <int kShift>
hn::Vec<Narrow> Nibble(hn::Vec<hn::Rebind<uint32_t, Narrow> > x, hn::Vec<Narrow> scale, hn::Vec<Narrow> base) {
  const Narrow d;
  const hn::Rebind<uint32_t, Narrow> du32;
  const hn::Rebind<int32_t, Narrow> di32;
  const auto u = hn::And(hn::ShiftRight<kShift>(x), hn::Set(du32, 15u));
  return hn::Add(hn::Mul(hn::ConvertTo(d, hn::BitCast(di32, u)), scale), base);
}

void UnpackI4K(const uint8_t* block, int head_dim, const float* scales, const float* bases, float* panel) {
  const Narrow d;
  const hn::Rebind<uint32_t, Narrow> d32;
  const int group = blocks::I4GroupChannels(head_dim);
  for (int c = 0; c < head_dim / 2; c += 4) {  // and c + head_dim / 2; four channels are always of one group
    const int low_grid = c / group * kPageTokens;
    const int high_grid = (c + head_dim / 2) / group * kPageTokens;
    float* low_row = panel + c * kPageTokens;
    float* high_row = low_row + head_dim / 2 * kPageTokens;
    for (int t = 0; t < kPageTokens; t += static_cast<int>(hn::Lanes(d))) {
      const auto x = hn::LoadU(d32, reinterpret_cast<const uint32_t*>(block + c / 4 * 128 + t * 4));
      const auto low_scale = hn::Load(d, scales + low_grid + t), low_base = hn::Load(d, bases + low_grid + t);
      const auto high_scale = hn::Load(d, scales + high_grid + t), high_base = hn::Load(d, bases + high_grid + t);
      hn::StoreU(Nibble<0>(x, low_scale, low_base), d, low_row + t);
      hn::StoreU(Nibble<8>(x, low_scale, low_base), d, low_row + kPageTokens + t);
      hn::StoreU(Nibble<16>(x, low_scale, low_base), d, low_row + 2 * kPageTokens + t);
      hn::StoreU(Nibble<24>(x, low_scale, low_base), d, low_row + 3 * kPageTokens + t);
      hn::StoreU(Nibble<4>(x, high_scale, high_base), d, high_row + t);
      hn::StoreU(Nibble<12>(x, high_scale, high_base), d, high_row + kPageTokens + t);
      hn::StoreU(Nibble<20>(x, high_scale, high_base), d, high_row + 2 * kPageTokens + t);
      hn::StoreU(Nibble<28>(x, high_scale, high_base), d, high_row + 3 * kPageTokens + t);
    }
  }
}

void UnpackI4V(const uint8_t* block, int head_dim, const float* scales, const float* bases, float* panel) {
  const Narrow d;
  const hn::Rebind<uint32_t, Narrow> d32;
  const int group = blocks::I4GroupChannels(head_dim);
  const size_t row = Size(head_dim);
  for (int t = 0; t < kPageTokens; t += 8) {
    for (int first = 0; first < head_dim; first += group) {
      const float* scale = scales + blocks::I4ScaleIndex(t, first, head_dim);
      const float* base = bases + blocks::I4ScaleIndex(t, first, head_dim);
      for (int c = first; c < first + group; c += static_cast<int>(hn::Lanes(d))) {
        const auto x = hn::LoadU(d32, reinterpret_cast<const uint32_t*>(block + (t / 8 * head_dim + c) * 4));
        float* to = panel + Size(t) * row + Size(c);
        hn::StoreU(Nibble<0>(x, hn::Set(d, scale[0]), hn::Set(d, base[0])), d, to);
        hn::StoreU(Nibble<16>(x, hn::Set(d, scale[1]), hn::Set(d, base[1])), d, to + row);
        hn::StoreU(Nibble<4>(x, hn::Set(d, scale[2]), hn::Set(d, base[2])), d, to + 2 * row);
        hn::StoreU(Nibble<20>(x, hn::Set(d, scale[3]), hn::Set(d, base[3])), d, to + 3 * row);
        hn::StoreU(Nibble<8>(x, hn::Set(d, scale[4]), hn::Set(d, base[4])), d, to + 4 * row);
        hn::StoreU(Nibble<24>(x, hn::Set(d, scale[5]), hn::Set(d, base[5])), d, to + 5 * row);
        hn::StoreU(Nibble<12>(x, hn::Set(d, scale[6]), hn::Set(d, base[6])), d, to + 6 * row);
        hn::StoreU(Nibble<28>(x, hn::Set(d, scale[7]), hn::Set(d, base[7])), d, to + 7 * row);
      }
    }
  }
}

void UnpackI4(CodecId id, Side side, const uint8_t* block, int head_dim, float* panel) {
  const Wide d;
  alignas(64) float scales[kMaxGrids], bases[kMaxGrids];
  for (size_t i = 0; i < Size(blocks::I4Groups(head_dim) * kPageTokens); i += hn::Lanes(d)) {
    const auto scale = LoadHalves(d, block + blocks::I4ScaleOffset(head_dim) + 2 * i);
    hn::Store(scale, d, scales + i);
    if (id == CodecId::kI4Z) {
      hn::Store(LoadHalves(d, block + blocks::I4MinOffset(head_dim) + 2 * i), d, bases + i);
    } else {
      hn::Store(hn::Mul(scale, hn::Set(d, -8.0f)), d, bases + i);
    }
  }
  (side == Side::kK ? UnpackI4K : UnpackI4V)(block, head_dim, scales, bases, panel);
}

void EncodeBlock(CodecId id, Side side, const float* rows, int tokens, int head_dim, std::byte* block) {
  uint8_t* to = reinterpret_cast<uint8_t*>(block);
  switch (id) {
    case CodecId::kF16: EncodeF16(side, rows, tokens, head_dim, to); break;
    case CodecId::kI8:
    case CodecId::kI8Channel:
    case CodecId::kI8Tensor:
    case CodecId::k8: EncodeI8(id, side, rows, tokens, head_dim, to); break;
    case CodecId::kI4:
    case CodecId::kI4Z: EncodeI4(id, side, rows, tokens, head_dim, to); break;
    case CodecId::k3:
    case CodecId::k4:
    case CodecId::k5:
    case CodecId::k6:
    case CodecId::k7:
    case CodecId::kRefine4: reference::Encode(id, side, rows, tokens, head_dim, block); break;
  }
}

void UnpackBlock(CodecId id, Side side, const std::byte* block, int head_dim, float* panel) {
  const uint8_t* from = reinterpret_cast<const uint8_t*>(block);
  switch (id) {
    case CodecId::kF16: UnpackF16(from, head_dim, panel); break;
    case CodecId::kI8:
    case CodecId::kI8Channel:
    case CodecId::kI8Tensor:
    case CodecId::k8: UnpackI8(id, side, from, head_dim, panel); break;
    case CodecId::kI4:
    case CodecId::kI4Z: UnpackI4(id, side, from, head_dim, panel); break;
    case CodecId::k3:
    case CodecId::k4:
    case CodecId::k5:
    case CodecId::k6:
    case CodecId::k7:
    case CodecId::kRefine4: reference::Unpack(id, side, block, head_dim, panel); break;
  }
}

#endif

const char* Name() {
  return hwy::TargetName(HWY_TARGET);
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv::simd {

HWY_EXPORT(EncodeBlock);
HWY_EXPORT(UnpackBlock);
HWY_EXPORT(Name);

void Encode(CodecId id, Side side, const float* rows, int tokens, int head_dim, std::byte* block) {
  HWY_DYNAMIC_DISPATCH(EncodeBlock)(id, side, rows, tokens, head_dim, block);
}

void Unpack(CodecId id, Side side, const std::byte* block, int head_dim, float* panel) {
  HWY_DYNAMIC_DISPATCH(UnpackBlock)(id, side, block, head_dim, panel);
}

std::string_view TargetName() {
  return HWY_DYNAMIC_DISPATCH(Name)();
}

}  // namespace qkv::simd
#endif  // HWY_ONCE
