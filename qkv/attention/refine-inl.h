// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// What progressive pages need beside the kernels on their base plane: choosing tokens and reading them from a refinement
// plane (kRefine4 in codec/blocks.h); compiled once per Highway target; private to this room.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "qkv/attention/scratch.h"
#include "qkv/codec/blocks.h"
#include "qkv/codec/half.h"

#if defined(QKV_ATTENTION_REFINE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_ATTENTION_REFINE_INL_H_
#undef QKV_ATTENTION_REFINE_INL_H_
#else
#define QKV_ATTENTION_REFINE_INL_H_
#endif

#include "hwy/highway.h"
#include "qkv/attention/panels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {

// Largest of n scores, a multiple of 32, and `largest`.
HWY_INLINE float LargestScore(const float* scores, size_t n, float largest) {
  const DF d;
  VF maximum = hn::Set(d, largest);
  for (size_t t = 0; t < n; t += kLanes) maximum = hn::Max(maximum, hn::LoadU(d, scores + t));
  return hn::GetLane(hn::MaxOfLanes(d, maximum));
}

// Bit t: some row's score of token t reaches the row's limit. `scores`: of the first row.
HWY_INLINE uint32_t TokensAtLimits(const float* scores, const float* limits, size_t rows) {
  const DF d;
  uint32_t tokens = 0;
  for (size_t t = 0; t < kPageTokens; t += kLanes) {
    auto reached = hn::Ge(hn::LoadU(d, scores + t), hn::Set(d, limits[0]));
    for (size_t row = 1; row < rows; ++row) {
      reached = hn::Or(reached, hn::Ge(hn::LoadU(d, scores + row * kScoreStride + t), hn::Set(d, limits[row])));
    }
    uint8_t bits[8] = {};
    hn::StoreMaskBits(d, reached, bits);
    tokens |= static_cast<uint32_t>(bits[0] | bits[1] << 8) << t;
  }
  return tokens;
}

inline float RefinedScale(const std::byte* block, size_t dim, size_t t) {
  uint16_t half;
  std::memcpy(&half, block + blocks::RotatedScaleOffset(4, static_cast<int>(dim)) + 2 * t, sizeof half);
  return FloatFromHalf(half);
}

// The codes of token t, odd numbers.
HWY_INLINE void LoadRefined(const std::byte* block, size_t dim, size_t t, float* HWY_RESTRICT codes) {
#if HWY_TARGET == HWY_SCALAR
  for (size_t c = 0; c < dim; ++c) {
    const auto byte = static_cast<int>(block[t * dim / 2 + c % (dim / 2)]);
    codes[c] = static_cast<float>(2 * (c < dim / 2 ? byte & 15 : byte >> 4) - 15);
  }
#else
  const DF d;
  const hn::Repartition<int32_t, DF> di;
  const auto* row = reinterpret_cast<const uint8_t*>(block) + t * dim / 2;
  const auto store = [&](hn::Vec<decltype(di)> nibbles, float* to) HWY_ATTR {
    hn::StoreU(hn::ConvertTo(d, hn::Sub(hn::Add(nibbles, nibbles), hn::Set(di, 15))), d, to);
  };
  for (size_t i = 0; i < dim / 2; i += kLanes) {
    const size_t j = std::min(i, dim / 2 - kLanes);  // half a head may be no multiple of a vector
    const auto x = hn::PromoteTo(di, hn::LoadU(hn::Rebind<uint8_t, decltype(di)>(), row + j));
    store(hn::And(x, hn::Set(di, 15)), codes + j);
    store(hn::ShiftRight<4>(x), codes + dim / 2 + j);
  }
#endif
}

// to += factor * codes
HWY_INLINE void AddRow(float factor, const float* HWY_RESTRICT codes, size_t dim, float* HWY_RESTRICT to) {
  const DF d;
  const VF factors = hn::Set(d, factor);
  for (size_t c = 0; c < dim; c += kLanes) {
    hn::StoreU(hn::MulAdd(factors, hn::LoadU(d, codes + c), hn::LoadU(d, to + c)), d, to + c);
  }
}

// As LoadRefined, a byte per code.
inline void LoadRefinedBytes(const std::byte* block, size_t dim, size_t t, int8_t* HWY_RESTRICT codes) {
  const auto* row = reinterpret_cast<const uint8_t*>(block) + t * dim / 2;
  for (size_t j = 0; j < dim / 2; ++j) {
    codes[j] = static_cast<int8_t>(2 * (row[j] & 15) - 15);
    codes[dim / 2 + j] = static_cast<int8_t>(2 * (row[j] >> 4) - 15);
  }
}

// Rows [32][dim] of which the first n count, to the order of i8. What is left of the block stays as it is.
inline void ArrangeRefinedK(const int8_t* HWY_RESTRICT rows, size_t n, size_t dim, int8_t* HWY_RESTRICT block) {
  for (size_t t = 0; t < n; ++t, rows += dim) {
    for (size_t c = 0; c < dim; c += 2) std::memcpy(block + c * kPageTokens + 2 * t, rows + c, 2);
  }
}
inline void ArrangeRefinedV(const int8_t* HWY_RESTRICT rows, size_t n, size_t dim, int8_t* HWY_RESTRICT block) {
  for (size_t t = 0; t < n; t += 2, rows += 2 * dim, block += 2 * dim) {
    for (size_t c = 0; c < dim; ++c) {
      block[2 * c] = rows[c];
      block[2 * c + 1] = rows[dim + c];
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
