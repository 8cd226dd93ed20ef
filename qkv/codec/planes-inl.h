// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Planes of 3 to 7 bits, and of two bands (codec/blocks.h), to the bytes of an i8 block and back, for codec/simd.cc and
// qkv/attention: once expanded, a block of any width is an i8 block. Compiled once per SIMD target.

#if defined(QKV_CODEC_PLANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_CODEC_PLANES_INL_H_
#undef QKV_CODEC_PLANES_INL_H_
#else
#define QKV_CODEC_PLANES_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "qkv/codec/blocks.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::planes {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A plane of a width: its bits per code, how many bits of the code are below it, and where it starts, in 64ths of the
// number of codes.
struct Plane {
  int bits;
  int below;
  size_t start;
};
constexpr Plane kNoPlane{0, 0, 0};
constexpr Plane First(int width) {
  const int bits = blocks::FirstPlaneBits(width);
  return {bits, width - bits, 0};
}
constexpr Plane After(Plane plane) {
  if (plane.below == 0) return kNoPlane;
  const int bits = plane.below >= 2 ? 2 : 1;
  return {bits, plane.below - bits, plane.start + 8 * blocks::Size(plane.bits)};
}

#if HWY_TARGET == HWY_SCALAR

HWY_MAYBE_UNUSED static void ExpandPlanes(int width, const uint8_t* block, size_t n_codes, int8_t* out) {
  for (size_t i = 0; i < n_codes; ++i) {
    int w = 0;
    for (Plane plane = First(width); plane.bits != 0; plane = After(plane)) {
      const uint8_t byte = block[plane.start * n_codes / 64 + blocks::PlaneOffset(plane.bits, i)];
      w = w << plane.bits | (byte >> blocks::PlaneShift(plane.bits, i) & ((1 << plane.bits) - 1));
    }
    out[i] = static_cast<int8_t>(2 * w + 1 - (1 << width));
  }
}

HWY_MAYBE_UNUSED static void ExpandBands(const uint8_t* block, int head_dim, int8_t* out) {
  const size_t n_codes = 32 * blocks::Size(head_dim), half = n_codes / 2;
  const auto bits_at = [&](int bits, size_t start, size_t i) {
    return block[start + blocks::PlaneOffset(bits, i)] >> blocks::PlaneShift(bits, i) & ((1 << bits) - 1);
  };
  for (size_t i = 0; i < n_codes; ++i) {
    const int lowest = bits_at(1, blocks::BandsLowestOffset(head_dim), i);
    const int upper = i < half ? bits_at(4, 0, i) : bits_at(2, blocks::BandsUpper3Offset(head_dim), i - half);
    const int w = 2 * upper + lowest;
    out[i] = static_cast<int8_t>(i < half ? 2 * w - 31 : 4 * (2 * w - 7));
  }
}

#else

using Bytes = hn::CappedTag<uint8_t, 64>;

// The kBits bits from bit kFrom on of every byte, at bit kTo; all others 0.
template <int kBits, int kFrom, int kTo>
HWY_INLINE hn::Vec<Bytes> Field(hn::Vec<Bytes> bytes) {
  const Bytes d;
  const hn::Repartition<uint16_t, Bytes> d16;
  const auto mask = hn::Set(d, static_cast<uint8_t>(((1 << kBits) - 1) << kTo));
  const auto words = hn::BitCast(d16, bytes);  // what crosses into the neighbour's byte is masked away
  if constexpr (kFrom > kTo) {
    return hn::And(hn::BitCast(d, hn::ShiftRight<kFrom - kTo>(words)), mask);
  } else if constexpr (kFrom < kTo) {
    return hn::And(hn::BitCast(d, hn::ShiftLeft<kTo - kFrom>(words)), mask);
  } else {
    return hn::And(bytes, mask);
  }
}

// Code k (of 0..7) of 64 each, doubled, of the planes from kPlane on; `codes` and `lane` are where the eight start.
template <int kWidth, int kBits, int kBelow, size_t kStart, int kCode>
HWY_INLINE hn::Vec<Bytes> Doubled(const uint8_t* block, size_t n_codes, size_t codes, size_t lane) {
  const Bytes d;
  constexpr int kPlace = kCode % (8 / kBits) * kBits;
  const size_t group = (codes / 512) * blocks::Size(kBits) + blocks::Size(kCode / (8 / kBits));
  const auto field = Field<kBits, kPlace, kBelow + 1>(hn::LoadU(d, block + kStart * n_codes / 64 + group * 64 + lane));
  constexpr Plane kNext = After(Plane{kBits, kBelow, kStart});
  if constexpr (kNext.bits == 0) {
    return field;
  } else {
    return hn::Or(field, Doubled<kWidth, kNext.bits, kNext.below, kNext.start, kCode>(block, n_codes, codes, lane));
  }
}

template <int kWidth>
HWY_INLINE void ExpandWidth(const uint8_t* block, size_t n_codes, int8_t* out) {
  const Bytes d;
  constexpr Plane kFirst = First(kWidth);
  const auto lowest = hn::Set(d, static_cast<uint8_t>(1 - (1 << kWidth)));
  for (size_t codes = 0; codes < n_codes; codes += 512) {
    for (size_t lane = 0; lane < 64; lane += hn::Lanes(d)) {
      const auto expand = [&]<int kCode>(std::integral_constant<int, kCode>) HWY_ATTR {
        const auto doubled =
            Doubled<kWidth, kFirst.bits, kFirst.below, kFirst.start, kCode>(block, n_codes, codes, lane);
        hn::StoreU(hn::Add(doubled, lowest), d, reinterpret_cast<uint8_t*>(out) + codes + 64 * kCode + lane);
      };
      expand(std::integral_constant<int, 0>());
      expand(std::integral_constant<int, 1>());
      expand(std::integral_constant<int, 2>());
      expand(std::integral_constant<int, 3>());
      expand(std::integral_constant<int, 4>());
      expand(std::integral_constant<int, 5>());
      expand(std::integral_constant<int, 6>());
      expand(std::integral_constant<int, 7>());
    }
  }
}

// Codes of `width` 3 to 7 bits as odd signed bytes, in the order of an i8 block. n_codes: a multiple of 512. Reads
// n_codes * width / 8 bytes of the block; no alignment is needed.
HWY_MAYBE_UNUSED static void ExpandPlanes(int width, const uint8_t* block, size_t n_codes, int8_t* out) {
  switch (width) {
    case 3: return ExpandWidth<3>(block, n_codes, out);
    case 4: return ExpandWidth<4>(block, n_codes, out);
    case 5: return ExpandWidth<5>(block, n_codes, out);
    case 6: return ExpandWidth<6>(block, n_codes, out);
    default: return ExpandWidth<7>(block, n_codes, out);
  }
}

// The codes of one band. upper: its plane of the kBits bits above the lowest one; kLowest: the place of that one in the
// byte, where the code w counts 2^kLowest. The band begins with code `first` of the block.
template <int kBits, int kLowest>
HWY_INLINE void ExpandBand(const uint8_t* upper, const uint8_t* lowest, size_t first, size_t n_codes, int8_t* out) {
  const Bytes d;
  const hn::Repartition<uint16_t, Bytes> d16;
  constexpr int kPerByte = 8 / kBits;
  const auto smallest = hn::Set(d, static_cast<uint8_t>((1 - (2 << kBits)) * (1 << (kLowest - 1))));
  for (size_t code = first; code < first + n_codes; code += 256, upper += 32 * kBits) {
    for (size_t lane = 0; lane < 64; lane += hn::Lanes(d)) {
      const auto eight = hn::BitCast(d16, hn::LoadU(d, lowest + code / 512 * 64 + lane));
      const auto four = hn::BitCast(d, hn::ShiftRightSame(eight, static_cast<int>(code / 256 % 2) * 4));
      const auto expand = [&]<int kCode>(std::integral_constant<int, kCode>) HWY_ATTR {
        const auto above = Field<kBits, kCode % kPerByte * kBits, kLowest + 1>(
            hn::LoadU(d, upper + blocks::Size(kCode / kPerByte) * 64 + lane));
        const auto w = hn::Or(above, Field<1, kCode, kLowest>(four));
        hn::StoreU(hn::Add(w, smallest), d, reinterpret_cast<uint8_t*>(out) + code + 64 * kCode + lane);
      };
      expand(std::integral_constant<int, 0>());
      expand(std::integral_constant<int, 1>());
      expand(std::integral_constant<int, 2>());
      expand(std::integral_constant<int, 3>());
    }
  }
}

// A block of kBands as signed bytes in the order of an i8 block's K: ±1 to ±31, then ±4 to ±28. No alignment is needed.
HWY_MAYBE_UNUSED static void ExpandBands(const uint8_t* block, int head_dim, int8_t* out) {
  const size_t half = 16 * blocks::Size(head_dim);
  const uint8_t* lowest = block + blocks::BandsLowestOffset(head_dim);
  ExpandBand<4, 1>(block, lowest, 0, half, out);
  ExpandBand<2, 3>(block + blocks::BandsUpper3Offset(head_dim), lowest, half, half, out);
}

template <int kBits, int kBelow, int kCode>
HWY_INLINE hn::Vec<Bytes> Gathered(const uint8_t* codes) {
  const Bytes d;
  const auto field = Field<kBits, kBelow, kBits * kCode>(hn::LoadU(d, codes + 64 * kCode));
  if constexpr (kCode + 1 == 8 / kBits) {
    return field;
  } else {
    return hn::Or(field, Gathered<kBits, kBelow, kCode + 1>(codes));
  }
}

template <int kBits, int kBelow>
HWY_INLINE void PackPlane(const uint8_t* codes, size_t n_codes, uint8_t* to) {
  const Bytes d;
  for (size_t i = 0; i < n_codes; i += 512 / kBits, to += 64) {
    for (size_t lane = 0; lane < 64; lane += hn::Lanes(d)) {
      hn::StoreU(Gathered<kBits, kBelow, 0>(codes + i + lane), d, to + lane);
    }
  }
}

template <int kBits, int kBelow, size_t kStart>
HWY_INLINE void PackFrom(const uint8_t* codes, size_t n_codes, uint8_t* block) {
  PackPlane<kBits, kBelow>(codes, n_codes, block + kStart * n_codes / 64);
  constexpr Plane kNext = After(Plane{kBits, kBelow, kStart});
  if constexpr (kNext.bits != 0) PackFrom<kNext.bits, kNext.below, kNext.start>(codes, n_codes, block);
}

// The inverse, from codes w of 0 to 2^width - 1 as bytes.
HWY_MAYBE_UNUSED static void PackPlanes(int width, const uint8_t* codes, size_t n_codes, uint8_t* block) {
  switch (width) {
    case 3: return PackFrom<2, 1, 0>(codes, n_codes, block);
    case 4: return PackFrom<4, 0, 0>(codes, n_codes, block);
    case 5: return PackFrom<4, 1, 0>(codes, n_codes, block);
    case 6: return PackFrom<4, 2, 0>(codes, n_codes, block);
    default: return PackFrom<4, 3, 0>(codes, n_codes, block);
  }
}

// The inverse of ExpandBands, from codes w.
HWY_MAYBE_UNUSED static void PackBands(const uint8_t* codes, int head_dim, uint8_t* block) {
  const size_t half = 16 * blocks::Size(head_dim);
  PackPlane<4, 1>(codes, half, block);
  PackPlane<2, 1>(codes + half, half, block + blocks::BandsUpper3Offset(head_dim));
  PackPlane<1, 0>(codes, 2 * half, block + blocks::BandsLowestOffset(head_dim));
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace qkv::planes
HWY_AFTER_NAMESPACE();

#endif  // QKV_CODEC_PLANES_INL_H_
