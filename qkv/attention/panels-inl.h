// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Register-blocked fp32 micro-kernels and the softmax, compiled once per Highway target; private to this room.
//
// A tile of R rows x V vectors lives in registers. Its accumulators are indexed by pack expansion, never by a loop
// variable: GCC 12 otherwise keeps the array in memory, and one accumulator in memory halves the speed.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "qkv/attention/scratch.h"

#if defined(QKV_ATTENTION_PANELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_ATTENTION_PANELS_INL_H_
#undef QKV_ATTENTION_PANELS_INL_H_
#else
#define QKV_ATTENTION_PANELS_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
inline constexpr size_t kLanes = hn::MaxLanes(DF());

// Accumulators that fit in registers beside the operands, and how many rows a micro-kernel takes at once.
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
inline constexpr size_t kAccumulators = 24, kMaxBlockRows = 12;
#elif HWY_TARGET == HWY_NEON && HWY_ARCH_ARM_A64
inline constexpr size_t kAccumulators = 24, kMaxBlockRows = 6;
#else
inline constexpr size_t kAccumulators = 12, kMaxBlockRows = 6;
#endif

// Vectors per row of a tile: 4, 2 or 1.
constexpr size_t TileVectors(size_t rows, size_t accumulators) {
  return rows * 4 <= accumulators ? 4 : rows * 2 <= accumulators ? 2 : 1;
}

// Rows [first, first + count) of each block of rows, all of nearly the same size.
struct RowBlocks {
  explicit RowBlocks(size_t rows) : rows(rows), count((rows + kMaxBlockRows - 1) / kMaxBlockRows) {}
  size_t First(size_t block) const { return rows * block / count; }
  size_t Count(size_t block) const { return First(block + 1) - First(block); }
  size_t rows;
  size_t count;
};

// Kernel::Run<rows>(args…), rows 1..kMaxBlockRows.
template <class Kernel, size_t R = kMaxBlockRows, class... Args>
HWY_INLINE void RunWithRows(size_t rows, Args... args) {
  if constexpr (R > 1) {
    if (rows < R) return RunWithRows<Kernel, R - 1>(rows, args...);
  }
  Kernel::template Run<R>(args...);
}

template <class T>
inline constexpr bool kIsPage = !std::is_same_v<T, float>;  // read from a page as it is, not from an unpacked panel
HWY_INLINE VF LoadOperand(const float* p) {
  return hn::LoadU(DF(), p);
}
HWY_INLINE VF LoadOperand(const hwy::float16_t* p) {
  return hn::PromoteTo(DF(), hn::LoadU(hn::Rebind<hwy::float16_t, DF>(), p));
}

// The hardware prefetchers lose a stream that jumps from block to block. So most kernels that read a page's bytes
// fetch, along with their own, those at the same offsets in the same block of the next page: into L2 only, which has
// room for enough outstanding misses. An integer, because a next page of another codec may end before this address
// does; prefetching never faults.
using Ahead = uintptr_t;
// Always inlined: GCC drops calls of functions that do nothing but prefetch.
template <size_t kBytes>
HWY_INLINE void Prefetch(Ahead ahead) {
  for (size_t i = 0; i < kBytes; i += 64) __builtin_prefetch(reinterpret_cast<const void*>(ahead + i), 0, 2);
}

// scores = q . k over columns of 32 tokens; k is [dim][32] of fp32 or halves, q [dim][R].
struct ScoresOfPanel {
  template <size_t R, size_t V, class T, size_t... I>
  static HWY_INLINE void Tile(const float* HWY_RESTRICT q, const T* HWY_RESTRICT k, Ahead ahead, size_t dim,
                              float* HWY_RESTRICT scores, std::index_sequence<I...>) {
    const DF d;
    VF sum[R * V] = {((void)I, hn::Zero(d))...};
    for (size_t c = 0; c < dim; ++c, q += R, k += kPageTokens, ahead = ahead + kPageTokens * sizeof(T)) {
      if constexpr (kIsPage<T>) Prefetch<V * kLanes * sizeof(T)>(ahead);
      VF column[4];
      column[0] = LoadOperand(k);
      if constexpr (V > 1) column[1] = LoadOperand(k + kLanes);
      if constexpr (V > 2) column[2] = LoadOperand(k + 2 * kLanes);
      if constexpr (V > 2) column[3] = LoadOperand(k + 3 * kLanes);
      ((sum[I] = hn::MulAdd(hn::Set(d, q[I / V]), column[I % V], sum[I])), ...);
    }
    (hn::StoreU(sum[I], d, scores + I / V * kScoreStride + I % V * kLanes), ...);
  }

  template <size_t R, class T>
  static HWY_NOINLINE void Run(const float* q, const T* k, Ahead ahead, size_t dim, float* scores) {
    constexpr size_t V = std::min(TileVectors(R, kAccumulators), kPageTokens / kLanes);
    for (size_t t = 0; t < kPageTokens; t += V * kLanes) {
      Tile<R, V>(q, k + t, ahead + t * sizeof(T), dim, scores + t, std::make_index_sequence<R * V>());
    }
  }
};

// outputs = outputs * keep + gain * (weights . v); v is [n_tokens][dim] of fp32 or halves.
struct ValuesOfPanel {
  template <size_t R, size_t V, class T, size_t... I>
  static HWY_INLINE void Tile(const float* HWY_RESTRICT weights, const T* HWY_RESTRICT v, Ahead ahead, size_t n_tokens,
                              size_t dim, const float* HWY_RESTRICT keep, const float* HWY_RESTRICT gain,
                              float* HWY_RESTRICT outputs, std::index_sequence<I...>) {
    const DF d;
    VF sum[R * V] = {((void)I, hn::Zero(d))...};
    for (size_t t = 0; t < n_tokens; ++t, v += dim, ahead = ahead + dim * sizeof(T)) {
      if constexpr (kIsPage<T>) Prefetch<V * kLanes * sizeof(T)>(ahead);
      VF row[4];
      row[0] = LoadOperand(v);
      if constexpr (V > 1) row[1] = LoadOperand(v + kLanes);
      if constexpr (V > 2) row[2] = LoadOperand(v + 2 * kLanes);
      if constexpr (V > 2) row[3] = LoadOperand(v + 3 * kLanes);
      ((sum[I] = hn::MulAdd(hn::Set(d, weights[I / V * kScoreStride + t]), row[I % V], sum[I])), ...);
    }
    ((sum[I] = hn::Mul(sum[I], hn::Set(d, gain[I / V]))), ...);
    (hn::StoreU(hn::MulAdd(hn::LoadU(d, outputs + I / V * dim + I % V * kLanes), hn::Set(d, keep[I / V]), sum[I]), d,
                outputs + I / V * dim + I % V * kLanes),
     ...);
  }

  template <size_t R, size_t V, class T>
  static HWY_INLINE void Columns(size_t c, const float* weights, const T* v, Ahead ahead, size_t n_tokens, size_t dim,
                                 const float* keep, const float* gain, float* outputs) {
    for (; c + V * kLanes <= dim; c += V * kLanes) {
      Tile<R, V>(weights, v + c, ahead + c * sizeof(T), n_tokens, dim, keep, gain, outputs + c,
                 std::make_index_sequence<R * V>());
    }
    if constexpr (V > 1) {
      if (c < dim) Columns<R, V / 2>(c, weights, v, ahead, n_tokens, dim, keep, gain, outputs);
    }
  }

  template <size_t R, class T>
  static HWY_NOINLINE void Run(const float* weights, const T* v, Ahead ahead, size_t n_tokens, size_t dim,
                               const float* keep, const float* gain, float* outputs) {
    Columns<R, TileVectors(R, kAccumulators)>(0, weights, v, ahead, n_tokens, dim, keep, gain, outputs);
  }
};

// 2^x for x <= 0, relative error < 3e-7; exactly 0 below the smallest normal number and for NaN. The polynomial is the
// minimax one of degree 5 on [-1/2, 1/2].
HWY_INLINE VF Exp2(VF x) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  const VF lowest = hn::Set(d, -126.0f);
  const auto normal = hn::Ge(x, lowest);
  const auto whole = hn::NearestInt(hn::Max(x, lowest));
  const VF r = hn::Sub(hn::Max(x, lowest), hn::ConvertTo(d, whole));
  VF y = hn::Set(d, 0.0013276472f);
  y = hn::MulAdd(y, r, hn::Set(d, 0.00967554133f));
  y = hn::MulAdd(y, r, hn::Set(d, 0.0555071327f));
  y = hn::MulAdd(y, r, hn::Set(d, 0.240221197f));
  y = hn::MulAdd(y, r, hn::Set(d, 0.693146967f));
  y = hn::MulAdd(y, r, hn::Set(d, 1.00000007f));
  const VF power = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(whole, hn::Set(di, 127))));
  return hn::IfThenElseZero(normal, hn::Mul(y, power));
}

// A finite stand-in for minus infinity, so that a row that sees nothing subtracts no infinities.
inline constexpr float kNoMaximum = -1e30f;

// One step of the online softmax over n_tokens (a multiple of 32) scores per row, [rows][kScoreStride]: scores become
// weights relative to the step's own maximum, in [0, 1], which keeps them well scaled for quantization; keep and gain
// bring earlier outputs and this step's onto the running maximum.
inline HWY_NOINLINE void SoftmaxStep(size_t rows, size_t n_tokens, float* step_scores, const Scratch& x) {
  const DF d;
  for (size_t row = 0; row < rows; ++row) {
    const float* scores = step_scores + row * kScoreStride;
    VF maximum = hn::Set(d, kNoMaximum);
    for (size_t t = 0; t < n_tokens; t += kLanes) maximum = hn::Max(maximum, hn::LoadU(d, scores + t));
    x.group_maxima[row] = hn::GetLane(hn::MaxOfLanes(d, maximum));
  }
  for (size_t row = 0; row < rows; row += kLanes) {
    const VF before = hn::LoadU(d, x.maxima + row);
    const VF group = hn::LoadU(d, x.group_maxima + row);
    const VF now = hn::Max(before, group);
    hn::StoreU(now, d, x.maxima + row);
    hn::StoreU(Exp2(hn::Sub(before, now)), d, x.keep + row);
    hn::StoreU(Exp2(hn::Sub(group, now)), d, x.gain + row);
  }
  for (size_t row = 0; row < rows; ++row) {
    float* scores = step_scores + row * kScoreStride;
    const VF maximum = hn::Set(d, x.group_maxima[row]);
    VF sum = hn::Zero(d);
    for (size_t t = 0; t < n_tokens; t += kLanes) {
      const VF weight = Exp2(hn::Sub(hn::LoadU(d, scores + t), maximum));
      hn::StoreU(weight, d, scores + t);
      sum = hn::Add(sum, weight);
    }
    float* sums = x.sums + row * kMaxLanes;
    sum = hn::MulAdd(hn::LoadU(d, sums), hn::Set(d, x.keep[row]), hn::Mul(sum, hn::Set(d, x.gain[row])));
    hn::StoreU(sum, d, sums);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
