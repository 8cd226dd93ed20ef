// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// What progressive pages need beside the kernels on their base plane: choosing tokens and reading them from a refinement
// plane (kRefine4 in codec/blocks.h); compiled once per Highway target; private to this room.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

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

using VI32 = hn::Vec<hn::Repartition<int32_t, DF>>;

// Largest of n scores, a multiple of 32, and `largest`.
HWY_INLINE float LargestScore(const float* scores, size_t n, float largest) {
  const DF d;
  VF maximum = hn::Set(d, largest);
  for (size_t t = 0; t < n; t += kLanes) maximum = hn::Max(maximum, hn::LoadU(d, scores + t));
  return hn::GetLane(hn::MaxOfLanes(d, maximum));
}

// Bit t: some row's score of token t comes within `threshold` of the row's limit. `scores`: of the first row.
HWY_INLINE uint32_t TokensAtLimits(const float* scores, const float* limits, float threshold, size_t rows) {
  const DF d;
  uint32_t tokens = 0;
  for (size_t t = 0; t < kPageTokens; t += kLanes) {
    auto reached = hn::Ge(hn::LoadU(d, scores + t), hn::Set(d, limits[0] - threshold));
    for (size_t row = 1; row < rows; ++row) {
      reached =
          hn::Or(reached, hn::Ge(hn::LoadU(d, scores + row * kScoreStride + t), hn::Set(d, limits[row] - threshold)));
    }
    uint8_t bits[8] = {};
    hn::StoreMaskBits(d, reached, bits);
    tokens |= static_cast<uint32_t>(bits[0] | bits[1] << 8) << t;
  }
  return tokens;
}

// The codes of a token, odd numbers, from its nibbles.
HWY_INLINE void LoadRefined(const uint8_t* row, size_t dim, float* HWY_RESTRICT codes) {
  const DF d;
  const hn::Repartition<int32_t, DF> di;
  const auto store = [&](hn::Vec<decltype(di)> nibbles, float* to) HWY_ATTR {
    hn::StoreU(hn::ConvertTo(d, hn::Sub(hn::Add(nibbles, nibbles), hn::Set(di, 15))), d, to);
  };
  for (size_t i = 0; i < dim / 2; i += kLanes) {
    const size_t j = std::min(i, dim / 2 - kLanes);  // half a head may be no multiple of a vector
    const auto x = hn::PromoteTo(di, hn::LoadU(hn::Rebind<uint8_t, decltype(di)>(), row + j));
    store(hn::And(x, hn::Set(di, 15)), codes + j);
    store(hn::ShiftRight<4>(x), codes + dim / 2 + j);
  }
}

// to += factor * codes
HWY_INLINE void AddRow(float factor, const float* HWY_RESTRICT codes, size_t dim, float* HWY_RESTRICT to) {
  const DF d;
  const VF factors = hn::Set(d, factor);
  for (size_t c = 0; c < dim; c += kLanes) {
    hn::StoreU(hn::MulAdd(factors, hn::LoadU(d, codes + c), hn::LoadU(d, to + c)), d, to + c);
  }
}

#if HWY_TARGET != HWY_SCALAR
template <class D>
HWY_INLINE void StoreFolded(D d, hn::Vec<D> v, float* to) {
  if constexpr (hn::MaxLanes(d) <= 4) {
    hn::StoreU(v, d, to);
  } else {
    const hn::Half<D> half;
    StoreFolded(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), to);
  }
}
#endif

// sums[i] = sum of the lanes of the i-th vector, i < 4.
HWY_INLINE void StoreSums(const VF* v, float* HWY_RESTRICT sums) {
#if HWY_TARGET == HWY_SCALAR
  for (size_t i = 0; i < 4; ++i) sums[i] = hn::GetLane(v[i]);
#else
  const DF d;
  const hn::Repartition<uint64_t, DF> d64;
  const auto a = hn::BitCast(d64, hn::Add(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1])));
  const auto b = hn::BitCast(d64, hn::Add(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3])));
  StoreFolded(
      d, hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, a, b)), hn::BitCast(d, hn::InterleaveUpper(d64, a, b))), sums);
#endif
}

// For heads of which a half is a multiple of a vector: kernels that take the nibbles of several tokens as they are, w =
// 0..15 for 2w - 15, in registers. rows: where each token's nibbles are.
inline constexpr size_t kRefinedRows = 3, kRefinedTokens = 4;
HWY_INLINE VI32 LoadRefinedNibbles(const uint8_t* p) {
  const hn::Repartition<int32_t, DF> di;
  return hn::PromoteTo(di, hn::LoadU(hn::Rebind<uint8_t, decltype(di)>(), p));
}
HWY_INLINE VF LowNibbles(VI32 x) {
  return hn::ConvertTo(DF(), hn::And(x, hn::Set(hn::Repartition<int32_t, DF>(), 15)));
}
HWY_INLINE VF HighNibbles(VI32 x) {
  return hn::ConvertTo(DF(), hn::ShiftRight<4>(x));
}

// dots [R][4]: q . w of four tokens; q [R][dim].
struct DotsOfRefined {
  template <size_t... I>
  static HWY_INLINE void Tile(const float* HWY_RESTRICT q, const uint8_t* const* rows, size_t dim,
                              float* HWY_RESTRICT dots, std::index_sequence<I...>) {
    const DF d;
    VF sum[] = {((void)I, hn::Zero(d))...};
    for (size_t j = 0; j < dim / 2; j += kLanes, q += kLanes) {
      const VI32 x[4] = {LoadRefinedNibbles(rows[0] + j), LoadRefinedNibbles(rows[1] + j),
                         LoadRefinedNibbles(rows[2] + j), LoadRefinedNibbles(rows[3] + j)};
      VF codes[4] = {LowNibbles(x[0]), LowNibbles(x[1]), LowNibbles(x[2]), LowNibbles(x[3])};
      ((sum[I] = hn::MulAdd(hn::LoadU(d, q + I / 4 * dim), codes[I % 4], sum[I])), ...);
      codes[0] = HighNibbles(x[0]), codes[1] = HighNibbles(x[1]);
      codes[2] = HighNibbles(x[2]), codes[3] = HighNibbles(x[3]);
      ((sum[I] = hn::MulAdd(hn::LoadU(d, q + I / 4 * dim + dim / 2), codes[I % 4], sum[I])), ...);
    }
    for (size_t row = 0; row < sizeof...(I) / 4; ++row) StoreSums(sum + 4 * row, dots + 4 * row);
  }
  template <size_t R>
  static HWY_NOINLINE void Run(const float* q, const uint8_t* const* rows, size_t dim, float* dots) {
    Tile(q, rows, dim, dots, std::make_index_sequence<4 * R>());
  }
};

// outputs [R][dim] += base[row] + sum over n tokens of factors [row][token] * w; factors' stride is kScoreStride.
struct ValuesOfRefined {
  template <size_t... I>
  static HWY_INLINE void Tile(const float* HWY_RESTRICT factors, const float* HWY_RESTRICT base,
                              const uint8_t* const* rows, size_t n, size_t dim, float* HWY_RESTRICT outputs,
                              std::index_sequence<I...>) {
    const DF d;
    for (size_t j = 0; j < dim / 2; j += kLanes, outputs += kLanes) {
      VF sum[] = {hn::Set(d, base[I / 2])...};
      for (size_t i = 0; i < n; ++i) {
        const VI32 x = LoadRefinedNibbles(rows[i] + j);
        const VF codes[2] = {LowNibbles(x), HighNibbles(x)};
        ((sum[I] = hn::MulAdd(hn::Set(d, factors[I / 2 * kScoreStride + i]), codes[I % 2], sum[I])), ...);
      }
      (hn::StoreU(hn::Add(hn::LoadU(d, outputs + I / 2 * dim + I % 2 * dim / 2), sum[I]), d,
                  outputs + I / 2 * dim + I % 2 * dim / 2),
       ...);
    }
  }
  template <size_t R>
  static HWY_NOINLINE void Run(const float* factors, const float* base, const uint8_t* const* rows, size_t n,
                               size_t dim, float* outputs) {
    Tile(factors, base, rows, n, dim, outputs, std::make_index_sequence<2 * R>());
  }
};

// As LoadRefined, a byte per code.
inline void LoadRefinedBytes(const uint8_t* row, size_t dim, int8_t* HWY_RESTRICT codes) {
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
