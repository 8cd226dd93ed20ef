// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Numbers of centroids (codec/pq.h) to the bytes of an i8 block, for codec/pq.cc and qkv/attention. Compiled once per SIMD
// target.

#if defined(QKV_CODEC_PQ_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_CODEC_PQ_INL_H_
#undef QKV_CODEC_PQ_INL_H_
#else
#define QKV_CODEC_PQ_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "qkv/codec/blocks.h"
#include "qkv/codec/pq.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::pq {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR

HWY_MAYBE_UNUSED static void ExpandPq(const PqBook& book, Side side, const uint8_t* block, size_t dim, int8_t* out) {
  const size_t run = side == Side::kK ? blocks::PqCodes(static_cast<int>(dim)) : dim;
  for (size_t i = 0; i < 16 * dim; ++i) {
    const int code =
        book.n_centroids == 256 ? block[i] : block[blocks::PlaneOffset(4, i)] >> blocks::PlaneShift(4, i) & 15;
    int8_t* to = out + i / run * 2 * run + i % run;
    to[0] = book.first[code];
    to[run] = book.second[code];
  }
}

#else

using CodeBytes = hn::CappedTag<uint8_t, 64>;

// A table of 16 bytes, for codes 0 to 15.
class Lookup16 {
 public:
  explicit Lookup16(const int8_t* table) : table_(reinterpret_cast<const uint8_t*>(table)) {}
  HWY_INLINE hn::Vec<CodeBytes> operator()(hn::Vec<CodeBytes> codes) const {
    return hn::TableLookupBytes(hn::LoadDup128(CodeBytes(), table_), codes);
  }

 private:
  const uint8_t* table_;
};

// A table of 256 bytes.
class Lookup256 {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL
 public:
  explicit Lookup256(const int8_t* table) {
    for (int i = 0; i < 4; ++i) quarters_[i] = _mm512_loadu_si512(table + 64 * i);
  }
  HWY_INLINE hn::Vec<CodeBytes> operator()(hn::Vec<CodeBytes> codes) const {
    // Either takes the lower seven bits.
    const __m512i low = _mm512_permutex2var_epi8(quarters_[0], codes.raw, quarters_[1]);
    const __m512i high = _mm512_permutex2var_epi8(quarters_[2], codes.raw, quarters_[3]);
    return hn::Vec<CodeBytes>{_mm512_mask_blend_epi8(_mm512_movepi8_mask(codes.raw), low, high)};
  }

 private:
  __m512i quarters_[4];
#else
 public:
  explicit Lookup256(const int8_t* table) : table_(reinterpret_cast<const uint8_t*>(table)) {}
  HWY_INLINE hn::Vec<CodeBytes> operator()(hn::Vec<CodeBytes> codes) const {
    const CodeBytes d;
    auto found = hn::Zero(d);
    for (int row = 0; row < 16; ++row) {
      // Codes of this row of the table as 0 to 15, all others with their highest bit set, which looks up 0.
      const auto index = hn::Sub(codes, hn::Set(d, static_cast<uint8_t>(16 * row)));
      const auto marked = hn::And(hn::SaturatedAdd(index, hn::Set(d, uint8_t{0x70})), hn::Set(d, uint8_t{0x8f}));
      found = hn::Or(found, hn::TableLookupBytesOr0(hn::LoadDup128(d, table_ + 16 * row), marked));
    }
    return found;
  }

 private:
  const uint8_t* table_;
#endif
};

// Runs of `run` codes to 2 * run bytes each: the first coordinates, then the second ones. Reads and writes up to a vector
// beyond the end.
template <class Lookup>
HWY_INLINE void LookUpRuns(const Lookup& first, const Lookup& second, const uint8_t* codes, size_t n_codes, size_t run,
                           uint8_t* out) {
  const CodeBytes d;
  for (size_t start = 0; start < n_codes; start += run, out += 2 * run) {
    // What a vector writes too much is written again by what comes next.
    for (size_t i = 0; i < run; i += hn::Lanes(d)) hn::StoreU(first(hn::LoadU(d, codes + start + i)), d, out + i);
    for (size_t i = 0; i < run; i += hn::Lanes(d)) {
      hn::StoreU(second(hn::LoadU(d, codes + start + i)), d, out + run + i);
    }
  }
}

// A block's codes as its centroids' bytes in the order of i8. Reads no more than the block, scales included; writes
// 32 * dim bytes of `out`, and up to 64 more.
HWY_MAYBE_UNUSED static void ExpandPq(const PqBook& book, Side side, const uint8_t* block, size_t dim, int8_t* out) {
  const size_t n_codes = 16 * dim, run = side == Side::kK ? n_codes : dim;
  auto* bytes = reinterpret_cast<uint8_t*>(out);
  if (book.n_centroids == 256) {
    return LookUpRuns(Lookup256(book.first), Lookup256(book.second), block, n_codes, run, bytes);
  }
  const CodeBytes d;
  alignas(64) uint8_t codes[16 * kMaxHeadDim + 64];
  for (size_t i = 0; i < n_codes; i += 128) {
    for (size_t lane = 0; lane < 64; lane += hn::Lanes(d)) {
      const auto pairs = hn::LoadU(d, block + i / 2 + lane);
      hn::StoreU(hn::And(pairs, hn::Set(d, uint8_t{15})), d, codes + i + lane);
      hn::StoreU(hn::ShiftRight<4>(pairs), d, codes + i + 64 + lane);
    }
  }
  std::memset(codes + n_codes, 0, 64);
  LookUpRuns(Lookup16(book.first), Lookup16(book.second), codes, n_codes, run, bytes);
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace qkv::pq
HWY_AFTER_NAMESPACE();

#endif  // QKV_CODEC_PQ_INL_H_
