// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Which tokens an item reads again from refinement planes, and reading them; compiled once per Highway target; private to
// this room.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>

#include "qkv/attention/scratch.h"
#include "qkv/codec/blocks.h"

#if defined(QKV_ATTENTION_REFINER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_ATTENTION_REFINER_INL_H_
#undef QKV_ATTENTION_REFINER_INL_H_
#else
#define QKV_ATTENTION_REFINER_INL_H_
#endif

#include "hwy/highway.h"
#include "qkv/attention/queries-inl.h"
#include "qkv/attention/refine-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {

// Tokens are numbered within a step: 32 * slot + token, as their scores lie.
class Refiner {
 public:
  Refiner(const AttentionPlan& plan, size_t rows, const Scratch& x, Queries& queries)
      : threshold_(plan.refine_threshold * std::numbers::log2e_v<float>),
        head_dim_(plan.shape.head_dim),
        dim_(static_cast<size_t>(head_dim_)),
        rows_(rows),
        x_(x),
        queries_(queries),
        chosen_(x.refined) {}

  // A step begins.
  void Begin() { std::copy_n(x_.maxima, rows_, x_.limits); }

  // With the scores of one page more, as if they were the step's last: begins to fetch what may be chosen.
  void See(const PageBlocks& page, size_t slot, const float* scores) {
    scores += slot * kPageTokens;
    for (size_t row = 0; row < rows_; ++row) {
      x_.limits[row] = LargestScore(scores + row * kScoreStride, kPageTokens, x_.limits[row]);
    }
    const std::byte* const blocks[] = {page.k_refinement, page.v_refinement};
    if (blocks[0] == nullptr) return;
    uint32_t tokens = TokensAtLimits(scores, x_.limits, threshold_, rows_);
    if (tokens == 0) return;
    for (const std::byte* block : blocks) __builtin_prefetch(block + ScaleOffset(), 0, 2);
    for (; tokens != 0; tokens &= tokens - 1) {
      const size_t t = static_cast<size_t>(std::countr_zero(tokens));
      for (const std::byte* block : blocks) {
        for (size_t i = 0; i < dim_ / 2; i += 64) __builtin_prefetch(block + t * dim_ / 2 + i, 0, 2);
      }
    }
  }

  // Chooses tokens by the rule of AttentionPlan, when all of the step's pages have been seen.
  void Choose(std::span<const PageBlocks> step, const float* scores) {
    n_chosen_ = 0;
    for (size_t slot = 0; slot < step.size(); ++slot) {
      if (step[slot].k_refinement == nullptr) continue;
      uint32_t tokens = TokensAtLimits(scores + slot * kPageTokens, x_.limits, threshold_, rows_);
      for (; tokens != 0; tokens &= tokens - 1) {
        const size_t t = static_cast<size_t>(std::countr_zero(tokens));
        chosen_[n_chosen_++] = static_cast<uint8_t>(slot * kPageTokens + t);
      }
    }
  }

  std::span<const uint8_t> tokens() const { return {chosen_, n_chosen_}; }

  // For few rows, token by token: what refinement adds to scores, and to outputs, which are in the rotated frame.
  void AddScores(std::span<const PageBlocks> step, float* scores) {
    LoadScales(step, Side::kK);
    for (size_t first = 0; first < n_chosen_;) {
      const KeyFrame frame = FrameOf(step[chosen_[first] / kPageTokens]);
      queries_.Use(frame);
      queries_.MakeSums();
      const uint8_t* rows[kRefinedTokens] = {};
      size_t count = 0;
      while (count < kRefinedTokens && first + count < n_chosen_ &&
             FrameOf(step[chosen_[first + count] / kPageTokens]) == frame) {
        rows[count] = Nibbles(step, Side::kK, first + count);
        ++count;
      }
      std::fill(rows + count, rows + kRefinedTokens, rows[0]);
      for (size_t row = 0; row < rows_; row += kRefinedRows) {
        float dots[kRefinedRows * kRefinedTokens];
        const size_t n_rows = std::min(kRefinedRows, rows_ - row);
        if (FitsVectors()) {
          RunWithRows<DotsOfRefined, kRefinedRows>(n_rows, queries_.Row(row), rows, dim_, dots);
        } else {
          DotsOneByOne(row, n_rows, rows, dots);
        }
        for (size_t r = 0; r < n_rows; ++r) {
          float* to = scores + (row + r) * kScoreStride;
          for (size_t i = 0; i < count; ++i) {
            const uint8_t token = chosen_[first + i];
            to[token] += x_.refined_scale[token] * (2 * dots[r * kRefinedTokens + i] - 15 * x_.q_sums[row + r]);
          }
        }
      }
      first += count;
    }
  }

  void AddValues(std::span<const PageBlocks> step, const float* weights) const {
    if (n_chosen_ == 0) return;
    LoadScales(step, Side::kV);
    const uint8_t* rows[kScoreStride];
    for (size_t i = 0; i < n_chosen_; ++i) rows[i] = Nibbles(step, Side::kV, i);
    for (size_t row = 0; row < rows_; row += kRefinedRows) {
      const size_t n_rows = std::min(kRefinedRows, rows_ - row);
      float factors[kRefinedRows * kScoreStride], base[kRefinedRows];
      for (size_t r = 0; r < n_rows; ++r) {
        const float* from = weights + (row + r) * kScoreStride;
        float sum = 0;
        for (size_t i = 0; i < n_chosen_; ++i) {
          const float factor = from[chosen_[i]] * x_.refined_scale[chosen_[i]] * x_.gain[row + r];
          factors[r * kScoreStride + i] = 2 * factor;
          sum += factor;
        }
        base[r] = -15 * sum;
      }
      float* outputs = x_.outputs + row * dim_;
      if (FitsVectors()) {
        RunWithRows<ValuesOfRefined, kRefinedRows>(n_rows, factors, base, rows, n_chosen_, dim_, outputs);
      } else {
        for (size_t i = 0; i < n_chosen_; ++i) {
          LoadRefined(rows[i], dim_, x_.line);
          for (size_t r = 0; r < n_rows; ++r) {
            AddRow(factors[r * kScoreStride + i] / 2, x_.line, dim_, outputs + r * dim_);
          }
        }
      }
    }
  }

  // For many rows: up to 32 tokens from the first-th on, all of one frame of keys, as a block of i8 in x.expanded, with
  // their scales in x.token_scale. Returns how many.
  size_t Gather(std::span<const PageBlocks> step, Side side, size_t first) const {
    LoadScales(step, side);
    std::fill_n(x_.token_scale, kPageTokens, 0.0f);
    const KeyFrame frame = FrameOf(step[chosen_[first] / kPageTokens]);
    size_t n = 0;
    for (; n < kPageTokens && first + n < n_chosen_; ++n) {
      const uint8_t token = chosen_[first + n];
      if (side == Side::kK && FrameOf(step[token / kPageTokens]) != frame) break;
      LoadRefinedBytes(Nibbles(step, side, first + n), dim_, x_.refined_rows + n * dim_);
      x_.token_scale[n] = x_.refined_scale[token];
    }
    int8_t* block = x_.expanded;
    side == Side::kK ? ArrangeRefinedK(x_.refined_rows, n, dim_, block)
                     : ArrangeRefinedV(x_.refined_rows, n, dim_, block);
    return n;
  }

 private:
  bool FitsVectors() const { return dim_ / 2 % kLanes == 0; }
  size_t ScaleOffset() const { return blocks::RotatedScaleOffset(4, head_dim_); }

  const uint8_t* Nibbles(std::span<const PageBlocks> step, Side side, size_t i) const {
    const PageBlocks& page = step[chosen_[i] / kPageTokens];
    const std::byte* block = side == Side::kK ? page.k_refinement : page.v_refinement;
    return reinterpret_cast<const uint8_t*>(block) + chosen_[i] % kPageTokens * dim_ / 2;
  }

  // Those of the pages that tokens were chosen of, to x.refined_scale.
  void LoadScales(std::span<const PageBlocks> step, Side side) const {
    size_t loaded = step.size();
    for (size_t i = 0; i < n_chosen_; ++i) {
      const size_t slot = chosen_[i] / kPageTokens;
      if (slot == loaded) continue;
      loaded = slot;
      const std::byte* block = side == Side::kK ? step[slot].k_refinement : step[slot].v_refinement;
      LoadHalves(block + ScaleOffset(), kPageTokens, x_.refined_scale + slot * kPageTokens);
    }
  }

  void DotsOneByOne(size_t row, size_t n_rows, const uint8_t* const* rows, float* dots) const {
    for (size_t i = 0; i < kRefinedTokens; ++i) {
      LoadRefined(rows[i], dim_, x_.line);
      for (size_t r = 0; r < n_rows; ++r) {
        const float dot = Dot(queries_.Row(row + r), x_.line, dim_);
        dots[r * kRefinedTokens + i] = (dot + 15 * x_.q_sums[row + r]) / 2;  // of w, as DotsOfRefined
      }
    }
  }

  const float threshold_;  // in powers of two
  const int head_dim_;
  const size_t dim_;
  const size_t rows_;
  const Scratch& x_;
  Queries& queries_;
  uint8_t* chosen_;
  size_t n_chosen_ = 0;
};

}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
