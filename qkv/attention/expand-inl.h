// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// From the planes of the codecs 3 to 7 (codec/blocks.h) to one byte per code in the order of i8, which all kernels on bytes
// share; compiled once per Highway target; private to this room. A block is expanded right before it is used and stays in
// L1.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "qkv/attention/scratch.h"

#if defined(QKV_ATTENTION_EXPAND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_ATTENTION_EXPAND_INL_H_
#undef QKV_ATTENTION_EXPAND_INL_H_
#else
#define QKV_ATTENTION_EXPAND_INL_H_
#endif

#include "hwy/highway.h"
#include "qkv/attention/panels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {

using DB = hn::Repartition<uint8_t, DF>;
using VB = hn::Vec<DB>;

// Bits kFrom.. of every byte to bits kTo..; the others of the result are any.
template <int kFrom, int kTo>
HWY_INLINE VB MoveBits(VB x) {
  const hn::Repartition<uint16_t, DF> d16;
  if constexpr (kFrom > kTo) return hn::BitCast(DB(), hn::ShiftRight<kFrom - kTo>(hn::BitCast(d16, x)));
  if constexpr (kFrom < kTo) return hn::BitCast(DB(), hn::ShiftLeft<kTo - kFrom>(hn::BitCast(d16, x)));
  return x;
}
HWY_INLINE VB Masked(VB x, int mask) {
  return hn::And(x, hn::Set(DB(), static_cast<uint8_t>(mask)));
}

template <int kBits>
class Expansion {
 public:
  // n_codes: a multiple of 512. Writes the codes, odd and signed, plus `bias`, modulo 256.
  static HWY_NOINLINE void Run(const uint8_t* HWY_RESTRICT planes, size_t n_codes, Ahead ahead, int bias,
                               uint8_t* HWY_RESTRICT out) {
    constexpr size_t kFirst = kBits == 3 ? 2 : 4;
    const size_t two_plane = kBits == 3 ? 0 : n_codes * kFirst / 8;
    const size_t one_plane = n_codes * (kBits - 1) / 8;
    const Expansion expansion(bias);
    for (size_t i = 0; i < n_codes; i += 512, out += 512) {
      if constexpr (kFirst == 4) Prefetch<256>(ahead + i / 2);
      if constexpr (kTwo) Prefetch<128>(ahead + (two_plane + i / 4));
      if constexpr (kOne) Prefetch<64>(ahead + (one_plane + i / 8));
      for (size_t b = 0; b < 64; b += hn::MaxLanes(DB())) {
        VB four[4], two[2], one;
        one = hn::Zero(DB());
        if constexpr (kOne) one = hn::LoadU(DB(), planes + one_plane + i / 8 + b);
        for (size_t g = 0; g < 2; ++g) {
          two[g] = kTwo ? hn::LoadU(DB(), planes + two_plane + i / 4 + 64 * g + b) : one;
        }
        for (size_t g = 0; g < 4; ++g) {
          four[g] = kFirst == 4 ? hn::LoadU(DB(), planes + i / 2 + 64 * g + b) : one;
        }
        expansion.StoreLines(four, two, one, out + b, std::make_index_sequence<8>());
      }
    }
  }

 private:
  static constexpr bool kTwo = kBits == 3 || kBits >= 6, kOne = kBits % 2 == 1;

  HWY_INLINE explicit Expansion(int bias) {
    // A nibble n stands for the upper 4 bits of w: its share of 2w + 1 - 2^bits.
    alignas(16) uint8_t table[16];
    for (int n = 0; n < 16; ++n) {
      const int share = kBits == 3 ? 0 : n << (kBits - 3);
      table[n] = static_cast<uint8_t>(share + 1 - (1 << kBits) + bias);
    }
    table_ = hn::LoadDup128(DB(), table);
  }

  template <size_t... I>
  HWY_INLINE void StoreLines(const VB* four, const VB* two, VB one, uint8_t* HWY_RESTRICT out,
                             std::index_sequence<I...>) const {
    (hn::StoreU(Line<I>(four[I / 2], two[I / 4], one), DB(), out + 64 * I), ...);
  }

  // The kLine-th 64 of 512 codes.
  template <int kLine>
  HWY_INLINE VB Line(VB four, VB two, VB one) const {
    VB code = kBits == 3 ? table_ : hn::TableLookupBytes(table_, Masked(MoveBits<kLine % 2 * 4, 0>(four), 15));
    constexpr int kTwoTo = kOne ? 2 : 1;
    if constexpr (kTwo) code = hn::Add(code, Masked(MoveBits<kLine % 4 * 2, kTwoTo>(two), 3 << kTwoTo));
    if constexpr (kOne) code = hn::Add(code, Masked(MoveBits<kLine, 1>(one), 2));
    return code;
  }

  VB table_;
};

HWY_INLINE void Expand(int bits, const std::byte* block, size_t n_codes, Ahead ahead, int bias, uint8_t* out) {
  const auto* planes = reinterpret_cast<const uint8_t*>(block);
  switch (bits) {
    case 3: return Expansion<3>::Run(planes, n_codes, ahead, bias, out);
    case 4: return Expansion<4>::Run(planes, n_codes, ahead, bias, out);
    case 5: return Expansion<5>::Run(planes, n_codes, ahead, bias, out);
    case 6: return Expansion<6>::Run(planes, n_codes, ahead, bias, out);
    default: return Expansion<7>::Run(planes, n_codes, ahead, bias, out);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
