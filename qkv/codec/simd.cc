// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/simd.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "qkv/codec/blocks.h"
#include "qkv/codec/half.h"
#include "qkv/codec/reference.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "qkv/codec/simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "qkv/codec/rotated-inl.h"

// This part is compiled once per target. Encoding runs in stages over a scratch of codes, row by row: extremes under
// each scale, scales, codes, and last the shuffle into the block's order.
HWY_BEFORE_NAMESPACE();
namespace qkv::simd {
namespace HWY_NAMESPACE {

#if !QKV_CODEC_HAS_SIMD

void EncodeBlock(CodecId id, Side side, const float* rows, int tokens, int head_dim, std::byte* block) {
  reference::Encode(id, side, rows, tokens, head_dim, block);
}
void UnpackBlock(CodecId id, Side side, const std::byte* block, int head_dim, float* panel) {
  reference::Unpack(id, side, block, head_dim, panel);
}

#else

// ---- shuffles: rows of small elements to the block's order ----

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
  if (side == Side::kK) Transpose16(scratch, Size(head_dim), kPageTokens, head_dim, reinterpret_cast<uint16_t*>(block));
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
    Transpose16(reinterpret_cast<const uint16_t*>(codes), kScratchStride / 2, kPageTokens, head_dim / 2,
                reinterpret_cast<uint16_t*>(block));
  } else {
    InterleavePairs(reinterpret_cast<const uint8_t*>(codes), kScratchStride, head_dim, block);
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

// ---- i4, i4z, i4-channel: value = scale*u + base, with base = -8*scale for i4 ----

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

void EncodeI4(CodecId id, Side side, const float* rows, int tokens, int head_dim, uint8_t* block) {
  const Wide d;
  const bool per_channel = id == CodecId::kI4Channel;
  const int groups = blocks::I4Groups(head_dim);
  const int group = blocks::I4GroupChannels(head_dim);
  // [groups][32 tokens] or [head_dim], as the block has it. The two become base and one over the scale.
  alignas(64) float lows[blocks::kMaxI4Scales], highs[blocks::kMaxI4Scales];
  for (int g = 0; g < groups && !per_channel; ++g) {
    for (int t = 0; t < tokens; ++t) {
      const int i = g * kPageTokens + t;
      MinMax(rows + t * head_dim + g * group, group, &lows[i], &highs[i]);
    }
    std::fill(lows + g * kPageTokens + tokens, lows + (g + 1) * kPageTokens, 0.0f);
    std::fill(highs + g * kPageTokens + tokens, highs + (g + 1) * kPageTokens, 0.0f);
  }
  for (int c = 0; c < head_dim && per_channel; c += static_cast<int>(hn::Lanes(d))) {
    auto low = LoadSanitized(d, rows + c), high = low;
    for (int t = 1; t < tokens; ++t) {
      const auto x = LoadSanitized(d, rows + t * head_dim + c);
      low = hn::Min(low, x);
      high = hn::Max(high, x);
    }
    hn::Store(low, d, lows + c);
    hn::Store(high, d, highs + c);
  }

  uint8_t* scales = block + blocks::I4ScaleOffset(head_dim);
  uint8_t* minima = block + blocks::I4MinOffset(head_dim, id);
  for (size_t i = 0; i < Size(blocks::I4ScaleCount(id, head_dim)); i += hn::Lanes(d)) {
    const auto low = hn::Load(d, lows + i), high = hn::Load(d, highs + i);
    auto scale = hn::Zero(d), base = hn::Zero(d);
    if (id != CodecId::kI4) {
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
      auto base = hn::Set(dn, lows[g * kPageTokens + t]);
      auto inverse = hn::Set(dn, highs[g * kPageTokens + t]);
      for (int c = g * group; c < (g + 1) * group; c += static_cast<int>(hn::Lanes(dn))) {
        if (per_channel) {
          base = hn::LoadU(dn, lows + c);
          inverse = hn::LoadU(dn, highs + c);
        }
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

template <bool kPerChannel>
void UnpackI4K(const uint8_t* block, int head_dim, const float* scales, const float* bases, float* panel) {
  const Narrow d;
  const hn::Rebind<uint32_t, Narrow> d32;
  const int group = blocks::I4GroupChannels(head_dim);
  // Of channel c, from token t on.
  const auto grid = [&](const float* of, int c, int t) HWY_ATTR {
    if constexpr (kPerChannel) return hn::Set(d, of[c]);
    return hn::LoadU(d, of + c / group * kPageTokens + t);
  };
  for (int c = 0; c < head_dim / 2; c += 4) {  // and c + head_dim / 2; four channels are always of one group
    for (int t = 0; t < kPageTokens; t += static_cast<int>(hn::Lanes(d))) {
      const auto x = hn::LoadU(d32, reinterpret_cast<const uint32_t*>(block + c / 4 * 128 + t * 4));
      const auto store = [&]<int kShift>(std::integral_constant<int, kShift>, int channel) HWY_ATTR {
        const auto values = Nibble<kShift>(x, grid(scales, channel, t), grid(bases, channel, t));
        hn::StoreU(values, d, panel + channel * kPageTokens + t);
      };
      const int high = c + head_dim / 2;
      store(std::integral_constant<int, 0>(), c);
      store(std::integral_constant<int, 8>(), c + 1);
      store(std::integral_constant<int, 16>(), c + 2);
      store(std::integral_constant<int, 24>(), c + 3);
      store(std::integral_constant<int, 4>(), high);
      store(std::integral_constant<int, 12>(), high + 1);
      store(std::integral_constant<int, 20>(), high + 2);
      store(std::integral_constant<int, 28>(), high + 3);
    }
  }
}

template <bool kPerChannel>
void UnpackI4V(const uint8_t* block, int head_dim, const float* scales, const float* bases, float* panel) {
  const Narrow d;
  const hn::Rebind<uint32_t, Narrow> d32;
  const int group = blocks::I4GroupChannels(head_dim);
  // Of token t, from channel c on.
  const auto grid = [&](const float* of, int c, int t) HWY_ATTR {
    if constexpr (kPerChannel) return hn::LoadU(d, of + c);
    return hn::Set(d, of[c / group * kPageTokens + t]);
  };
  for (int t = 0; t < kPageTokens; t += 8) {
    for (int c = 0; c < head_dim; c += static_cast<int>(hn::Lanes(d))) {
      const auto x = hn::LoadU(d32, reinterpret_cast<const uint32_t*>(block + (t / 8 * head_dim + c) * 4));
      const auto store = [&]<int kShift>(std::integral_constant<int, kShift>, int token) HWY_ATTR {
        const auto values = Nibble<kShift>(x, grid(scales, c, token), grid(bases, c, token));
        hn::StoreU(values, d, panel + token * head_dim + c);
      };
      store(std::integral_constant<int, 0>(), t);
      store(std::integral_constant<int, 16>(), t + 1);
      store(std::integral_constant<int, 4>(), t + 2);
      store(std::integral_constant<int, 20>(), t + 3);
      store(std::integral_constant<int, 8>(), t + 4);
      store(std::integral_constant<int, 24>(), t + 5);
      store(std::integral_constant<int, 12>(), t + 6);
      store(std::integral_constant<int, 28>(), t + 7);
    }
  }
}

void UnpackI4(CodecId id, Side side, const uint8_t* block, int head_dim, float* panel) {
  const Wide d;
  alignas(64) float scales[blocks::kMaxI4Scales], bases[blocks::kMaxI4Scales];
  for (size_t i = 0; i < Size(blocks::I4ScaleCount(id, head_dim)); i += hn::Lanes(d)) {
    const auto scale = LoadHalves(d, block + blocks::I4ScaleOffset(head_dim) + 2 * i);
    hn::Store(scale, d, scales + i);
    if (id == CodecId::kI4) {
      hn::Store(hn::Mul(scale, hn::Set(d, -8.0f)), d, bases + i);
    } else {
      hn::Store(LoadHalves(d, block + blocks::I4MinOffset(head_dim, id) + 2 * i), d, bases + i);
    }
  }
  if (id == CodecId::kI4Channel) {
    (side == Side::kK ? UnpackI4K<true> : UnpackI4V<true>)(block, head_dim, scales, bases, panel);
  } else {
    (side == Side::kK ? UnpackI4K<false> : UnpackI4V<false>)(block, head_dim, scales, bases, panel);
  }
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
    case CodecId::kI4Z:
    case CodecId::kI4Channel: EncodeI4(id, side, rows, tokens, head_dim, to); break;
    case CodecId::k3:
    case CodecId::k4:
    case CodecId::k5:
    case CodecId::k6:
    case CodecId::k7:
    case CodecId::kBands:
    case CodecId::kRefine4: EncodeRotated(id, side, rows, tokens, head_dim, to); break;
    case CodecId::kPq4:
    case CodecId::kPq2: break;  // codec/pq.h
    case CodecId::kLayers: break;
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
    case CodecId::kI4Z:
    case CodecId::kI4Channel: UnpackI4(id, side, from, head_dim, panel); break;
    case CodecId::k3:
    case CodecId::k4:
    case CodecId::k5:
    case CodecId::k6:
    case CodecId::k7:
    case CodecId::kBands:
    case CodecId::kRefine4: UnpackRotated(id, side, from, head_dim, panel); break;
    case CodecId::kPq4:
    case CodecId::kPq2: break;
    case CodecId::kLayers: break;
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
