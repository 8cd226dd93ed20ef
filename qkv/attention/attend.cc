// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <numbers>

#include "qkv/attention/attention.h"
#include "qkv/attention/page_walk.h"
#include "qkv/attention/scratch.h"
#include "qkv/codec/blocks.h"
#include "qkv/codec/half.h"

// AVX2, AVX-512 with VNNI and NEON; older CPUs run the scalar code (the first AVX-512 ones AVX2), as every further target
// costs build time. SVE's vectors have no fixed size, which register tiles need; such CPUs have NEON.
#define HWY_WANT_AVX3_DL 1
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "qkv/attention/attend.cc"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"

#include "qkv/attention/merge-inl.h"
#include "qkv/attention/panels-inl.h"
#include "qkv/attention/queries-inl.h"
#include "qkv/attention/refiner-inl.h"
#if HWY_TARGET != HWY_SCALAR
#include "qkv/attention/bytes-inl.h"
#include "qkv/codec/planes-inl.h"
#include "qkv/codec/pq-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {
namespace {

constexpr size_t kPagesAhead = 1;

class ItemRun {
 public:
  ItemRun(const AttentionPlan& plan, std::span<const PageRef> pages, int n_layers, int layer, const float* q, int item,
          std::byte* scratch)
      : plan_(plan),
        pages_(pages),
        item_(plan.ItemAt(item)),
        walk_(pages, {n_layers, plan.shape.n_kv_heads, plan.shape.head_dim}, layer, item_),
        dim_(static_cast<size_t>(plan.shape.head_dim)),
        rows_(static_cast<size_t>(item_.n_queries * plan.group())),
        few_(plan.tile_rows() <= kFewRows),
        blocks_(rows_),
        quads_(HasQuads()),
        x_(plan, scratch),
        queries_(plan, item_, q, quads_, x_),
        refiner_(plan, rows_, x_, queries_),
        scores_(x_.scores) {
    std::fill_n(x_.outputs, rows_ * dim_, 0.0f);
    std::fill_n(x_.sums, rows_ * kMaxLanes, 0.0f);
    const size_t padded_rows = hwy::RoundUpTo(rows_, kMaxLanes);
    std::fill_n(x_.maxima, padded_rows, kNoMaximum);
    std::fill_n(x_.group_maxima, padded_rows, kNoMaximum);
    std::fill_n(x_.ones, padded_rows, 1.0f);
    std::fill_n(x_.zeros, padded_rows, 0.0f);
  }

  void Run(KeyCounts* counts) {
    // Tokens before `all_see` are visible to every query of the tile, tokens from `none_sees` on to none.
    const int all_see = plan_.n_keys - plan_.n_queries + item_.first_query + 1;
    const int none_sees = all_see + item_.n_queries - 1;
    refines_ = Refines();
    if (refines_) Peek(all_see);

    PageBlocks queue[2 * kGroupPages + kPagesAhead];
    const size_t capacity = static_cast<size_t>(plan_.step_pages) * (refines_ ? 2 : 1) + kPagesAhead;
    size_t queued = 0;
    const auto fill = [&] {
      while (queued < capacity && walk_.Next(none_sees, queue[queued])) ++queued;
      return std::span<const PageBlocks>(queue, queued);
    };
    if (refines_) refiner_.Begin();
    size_t n = ScoreStep(fill(), all_see);
    while (n > 0) {
      const std::span<const PageBlocks> pages = fill(), step = pages.first(n);
      if (refines_) {
        refiner_.Choose(step, scores_);
        RefineScores(step);
      }
      SoftmaxStep(rows_, n * kPageTokens, scores_, x_);
      size_t next = 0;
      if (refines_) {
        next = ValuesAndNextScores(pages, n, all_see);
        RefineValues(step);
        if (counts != nullptr) Count(step, none_sees, *counts);
        SwapScores();
      } else {
        Values(pages, 0, n, x_.keep);
      }
      queued -= n;
      std::copy_n(queue + n, queued, queue);
      n = refines_ ? next : ScoreStep(fill(), all_see);
    }
    UseOutputFrame(plan_.n_chunks > 1 && plan_.partials_rotated);
  }

  void WriteOutputs(float* out) const {
    const DF d;
    for (size_t row = 0; row < rows_; ++row) {
      const VF inverse = hn::Set(d, 1.0f / Sum(row));
      float* to = out + queries_.Position(row) * dim_;
      for (size_t c = 0; c < dim_; c += kLanes) {
        hn::StoreU(hn::Mul(hn::LoadU(d, x_.outputs + row * dim_ + c), inverse), d, to + c);
      }
    }
  }

  void WritePartials(float* partials) const {
    const size_t tile_rows = static_cast<size_t>(plan_.tile_rows());
    std::memcpy(partials, x_.maxima, rows_ * sizeof(float));
    for (size_t row = 0; row < rows_; ++row) partials[tile_rows + row] = Sum(row);
    std::memcpy(partials + 2 * tile_rows, x_.outputs, rows_ * dim_ * sizeof(float));
  }

 private:
  float Sum(size_t row) const {
    const DF d;
    return hn::GetLane(hn::SumOfLanes(d, hn::LoadU(d, x_.sums + row * kMaxLanes)));
  }

  // all_alike: every row sees what the first one does.
  void Mask(const PageBlocks& page, size_t slot, int all_see, bool all_alike = false) const {
    const size_t group = static_cast<size_t>(plan_.group());
    for (size_t row = 0; row < rows_; ++row) {
      const int more = all_alike ? 0 : static_cast<int>(row / group);
      const int visible = std::clamp(all_see + more - page.first_key, 0, page.tokens);
      float* scores = ScoresAt(row, slot);
      std::fill(scores + visible, scores + kPageTokens, -std::numeric_limits<float>::infinity());
      if (page.hide_first) scores[0] = -std::numeric_limits<float>::infinity();
    }
  }

  // Below, `pages` begins with the page to work on; the ones behind it are the next ones. `slot` is its place in the step.

  template <class T>
  void PanelScores(const T* k, Ahead ahead, size_t slot) {
    queries_.MakePanel();
    for (size_t block = 0; block < blocks_.count; ++block) {
      const size_t first = blocks_.First(block);
      RunWithRows<ScoresOfPanel>(blocks_.Count(block), x_.q + first * dim_, k, ahead, dim_, ScoresAt(first, slot));
    }
  }

  template <class T>
  void PanelValues(const T* v, Ahead ahead, size_t slot, size_t n_tokens, const float* keep) const {
    for (size_t block = 0; block < blocks_.count; ++block) {
      const size_t first = blocks_.First(block);
      RunWithRows<ValuesOfPanel>(blocks_.Count(block), ScoresAt(first, slot), v, ahead, n_tokens, dim_, keep + first,
                                 x_.gain + first, x_.outputs + first * dim_);
    }
  }

  float* ScoresAt(size_t row, size_t slot) const { return scores_ + row * kScoreStride + slot * kPageTokens; }

  void Scores(std::span<const PageBlocks> pages, size_t slot) {
    const PageBlocks& page = pages.front();
    queries_.Use(FrameOf(page));
    if (RunsOnCodes(page.codecs.k)) {
      ScoresOfCodes(pages, slot);
      if (!RunsOnNibbles(page.codecs.k)) PrefetchBlock(pages, Side::kK);
    } else {
      CodecOf(page.codecs.k).unpack(Side::kK, page.k, plan_.shape.head_dim, x_.k_panel, &page.k_book);
      PanelScores(x_.k_panel, Ahead(), slot);
      if (blocks::IsRotated(page.codecs.k)) AddMeans(slot);
    }
    if (!blocks::IsRotated(page.codecs.k)) return;
    if (!page.exact_first) return;
    LoadConstant(page, Constant::kFirstK);
    for (size_t row = 0; row < rows_; ++row) ScoresAt(row, slot)[0] = Dot(queries_.Row(row), x_.line, dim_);
  }

  void AddMeans(size_t slot) const {
    const DF d;
    for (size_t row = 0; row < rows_; ++row) {
      float* scores = ScoresAt(row, slot);
      for (size_t t = 0; t < kPageTokens; t += kLanes) {
        hn::StoreU(hn::Add(hn::LoadU(d, scores + t), hn::Set(d, x_.q_mean[row])), d, scores + t);
      }
    }
  }

  // To x.line, in the frame of its side of the page.
  void LoadConstant(const PageBlocks& page, Constant which) const {
    LoadHalves(page.constants + static_cast<size_t>(which) * 2 * dim_, dim_, x_.line);
    Rotate(x_.line, plan_.shape.head_dim, which != Constant::kFirstV && FrameOf(page).bands);
  }

  // Of the step's pages in slots [slot, end). `keep`: the step's first kernel brings earlier outputs onto the new maximum.
  void Values(std::span<const PageBlocks> pages, size_t slot, size_t end, const float* keep) {
    for (; slot < end; keep = x_.ones) {
      const bool rotated = blocks::IsRotated(pages[slot].codecs.v);
      UseOutputFrame(rotated);
      outputs_empty_ = false;
      if (RunsOnCodes(pages[slot].codecs.v)) {
        ValuesOfCodes(pages.subspan(slot), slot, keep);
        if (!RunsOnNibbles(pages[slot].codecs.v)) PrefetchBlock(pages.subspan(slot), Side::kV);
        if (rotated && pages[slot].exact_first) AddFirstValue(pages[slot], slot);
        ++slot;
        continue;
      }
      const size_t first = slot;
      for (; slot < end && !RunsOnCodes(pages[slot].codecs.v) && blocks::IsRotated(pages[slot].codecs.v) == rotated;
           ++slot) {
        CodecOf(pages[slot].codecs.v)
            .unpack(Side::kV, pages[slot].v, plan_.shape.head_dim, x_.v_panel + (slot - first) * kPageTokens * dim_,
                    &pages[slot].v_book);
      }
      PanelValues(x_.v_panel, Ahead(), first, (slot - first) * kPageTokens, keep);
      for (size_t i = first; i < slot && rotated; ++i) {
        if (pages[i].exact_first) AddFirstValue(pages[i], i);
      }
    }
  }

  void AddFirstValue(const PageBlocks& page, size_t slot) const {
    LoadConstant(page, Constant::kFirstV);
    for (size_t row = 0; row < rows_; ++row) {
      AddRow(ScoresAt(row, slot)[0] * x_.gain[row], x_.line, dim_, x_.outputs + row * dim_);
    }
  }

  void UseOutputFrame(bool rotated) {
    if (rotated == outputs_rotated_) return;
    outputs_rotated_ = rotated;
    for (size_t row = 0; row < rows_ && !outputs_empty_; ++row) {
      float* output = x_.outputs + row * dim_;
      rotated ? Rotate(output, plan_.shape.head_dim) : RotateBack(output, plan_.shape.head_dim);
    }
  }

  // Of the page that `pages` begins with.
  void ScorePage(std::span<const PageBlocks> pages, size_t slot, int all_see) {
    const PageBlocks& page = pages.front();
    Scores(pages, slot);
    if (page.tokens < kPageTokens || page.first_key + kPageTokens > all_see || page.hide_first) {
      Mask(page, slot, all_see);
    }
    if (refines_) refiner_.See(page, slot, scores_);
  }

  // Scores of the step that `pages` begins with; returns how many pages it has.
  size_t ScoreStep(std::span<const PageBlocks> pages, int all_see) {
    const size_t n = std::min(pages.size(), static_cast<size_t>(plan_.step_pages));
    for (size_t i = 0; i < n; ++i) ScorePage(pages.subspan(i), i, all_see);
    return n;
  }

  // Values of the step of n pages that `pages` begins with and, page by page in turn, scores of the next step, of which
  // it returns the number of pages: by the time that tokens are refined, their bytes are here.
  size_t ValuesAndNextScores(std::span<const PageBlocks> pages, size_t n, int all_see) {
    const size_t next = std::min(pages.size() - n, static_cast<size_t>(plan_.step_pages));
    refiner_.Begin();
    for (size_t i = 0; i < std::max(n, next); ++i) {
      if (i < next) {
        SwapScores();
        ScorePage(pages.subspan(n + i), i, all_see);
        SwapScores();
      }
      if (i < n) Values(pages, i, i + 1, i == 0 ? x_.keep : x_.ones);
    }
    return next;
  }

  // Between those of a step and those of the next one.
  void SwapScores() { scores_ = scores_ == x_.scores ? x_.scores + rows_ * kScoreStride : x_.scores; }

  bool Refines() const {
    const auto pages = pages_.subspan(static_cast<size_t>(item_.first_page), static_cast<size_t>(item_.n_pages));
    return plan_.refine_threshold >= 0 &&
           std::ranges::any_of(pages, [](const PageRef& page) { return page.refinement != nullptr; });
  }

  void Count(std::span<const PageBlocks> step, int none_sees, KeyCounts& counts) const {
    counts.refined += refiner_.tokens().size();
    for (const PageBlocks& page : step) {
      if (page.k_refinement != nullptr) {
        counts.seen += static_cast<uint64_t>(std::min(page.tokens, none_sees - page.first_key));
      }
    }
  }

  // Puts into maxima the largest scores among the newest page that all queries see and an exact first token: a maximum
  // that is high from the start keeps tokens from being refined in vain. As a running maximum any number will do.
  void Peek(int all_see) {
    size_t newest = pages_.size() - 1;
    int first_key = plan_.n_keys - pages_[newest].tokens;
    while (first_key >= all_see) first_key -= pages_[--newest].tokens;
    const PageBlocks page = walk_.At(newest, first_key);
    Scores({&page, 1}, 0);
    Mask(page, 0, all_see, /*all_alike=*/true);
    for (size_t row = 0; row < rows_; ++row) {
      x_.maxima[row] = LargestScore(ScoresAt(row, 0), kPageTokens, x_.maxima[row]);
    }
    if (!pages_[0].exact_first || !blocks::IsRotated(pages_[0].codecs.k) || pages_[0].hide_first) return;
    const PageBlocks first = walk_.At(0, 0);
    queries_.Use(FrameOf(first));
    LoadConstant(first, Constant::kFirstK);
    for (size_t row = 0; row < rows_; ++row) {
      x_.maxima[row] = std::max(x_.maxima[row], Dot(queries_.Row(row), x_.line, dim_));
    }
  }

#if HWY_TARGET == HWY_SCALAR
  bool RunsOnCodes(CodecId) const {
    return false;
  }
  bool RunsOnNibbles(CodecId) const {
    return false;
  }
  bool HasQuads() const {
    return false;
  }
  void ScoresOfCodes(std::span<const PageBlocks>, size_t) {}
  void ValuesOfCodes(std::span<const PageBlocks>, size_t, const float*) {}
  void PrefetchBlock(std::span<const PageBlocks>, Side) const {}
  void RefineScores(std::span<const PageBlocks> step) {
    refiner_.AddScores(step, scores_);
  }
  void RefineValues(std::span<const PageBlocks> step) {
    if (!refiner_.tokens().empty()) UseOutputFrame(true);
    refiner_.AddValues(step, scores_);
  }
#else
  bool HasQuads() const {
    return CpuHasQuads() && hwy::DivCeil(rows_, blocks_.count) <= kMaxQuadRows;
  }

  // Else pages of that codec are unpacked.
  bool RunsOnCodes(CodecId codec) const {
    switch (codec) {
      case CodecId::kF16:
      case CodecId::kI8Channel: return few_;  // queries change with every page's scales
      case CodecId::kI8:
      case CodecId::kI8Tensor: return true;
      case CodecId::kI4:
      case CodecId::kI4Z: return dim_ % 64 == 0;
      default: return blocks::IsRotated(codec);
    }
  }

  // Where the kernels prefetch; without further pages in the block itself, which is in the cache already.
  static Ahead AheadOf(std::span<const PageBlocks> pages, Side side) {
    return reinterpret_cast<Ahead>(pages[pages.size() > 1 ? 1 : 0].block(side));
  }
  // All of the next page's block, in one burst. For nibbles before the kernel, which has no time for it; for others after
  // it: the scales, which kernels leave out, and the codes, for those kernels that fetched them in between once more, as not
  // every prefetch seems to be heeded (docs/PERFORMANCE.md).
  HWY_INLINE void PrefetchBlock(std::span<const PageBlocks> pages, Side side) const {
    if (pages.size() < 2) return;
    const Ahead ahead = AheadOf(pages, side);
    const size_t end = blocks::BlockBytes(pages[1].codec(side), plan_.shape.head_dim);
    for (size_t i = 0; i < end; i += 64) Prefetch<64>(ahead + i);
  }
  size_t ScaleOffset(CodecId codec) const {
    switch (codec) {
      case CodecId::kF16: return blocks::F16Bytes(plan_.shape.head_dim);
      case CodecId::kI8:
      case CodecId::kI8Channel:
      case CodecId::kI8Tensor: return blocks::I8ScaleOffset(plan_.shape.head_dim);
      case CodecId::kI4:
      case CodecId::kI4Z: return blocks::I4ScaleOffset(plan_.shape.head_dim);
      case CodecId::kPq4:
      case CodecId::kPq2: return blocks::PqScaleOffset(blocks::PqCentroids(codec), plan_.shape.head_dim);
      default: return blocks::RotatedScaleOffset(blocks::RotatedBits(codec), plan_.shape.head_dim);
    }
  }

  static void LoadHalf(const std::byte* from, size_t n, float* to) {
    uint16_t half;
    std::memcpy(&half, from, sizeof half);
    std::fill_n(to, n, FloatFromHalf(half));
  }

  // Whether the kernels for bytes take a side of a page.
  bool RunsOnBytes(CodecId codec) const {
    return quads_ && blocks::IsRotated(codec) && codec != CodecId::k8;
  }

  // Of these, whether there is one for its codes as they are.
  bool RunsOnNibbles(CodecId codec) const {
    return RunsOnBytes(codec) && codec == CodecId::k4 && dim_ % 64 == 0;
  }

  // A block's codes in the order of i8, and where the kernel on them is to prefetch.
  struct Codes {
    const std::byte* at;
    Ahead ahead;
  };
  Codes ExpandedCodes() const {
    const auto at = reinterpret_cast<uintptr_t>(x_.expanded);
    return {reinterpret_cast<const std::byte*>(x_.expanded), at};
  }
  HWY_NOINLINE void ExpandBlock(const PageBlocks& page, Side side) const {
    const CodecId codec = page.codec(side);
    const auto* codes = reinterpret_cast<const uint8_t*>(page.block(side));
    if (blocks::IsPq(codec)) return pq::HWY_NAMESPACE::ExpandPq(page.book(side), side, codes, dim_, x_.expanded);
    if (codec == CodecId::kBands) return planes::HWY_NAMESPACE::ExpandBands(codes, plan_.shape.head_dim, x_.expanded);
    planes::HWY_NAMESPACE::ExpandPlanes(blocks::RotatedBits(codec), codes, kPageTokens * dim_, x_.expanded);
  }
  Codes CodesOf(std::span<const PageBlocks> pages, Side side) const {
    const PageBlocks& page = pages.front();
    const CodecId codec = page.codec(side);
    const Ahead ahead = AheadOf(pages, side);
    if (!blocks::IsRotated(codec) || codec == CodecId::k8) return {page.block(side), ahead};
    ExpandBlock(page, side);
    return ExpandedCodes();
  }

  void ScoresOfCodes(std::span<const PageBlocks> pages, size_t slot) {
    const PageBlocks& page = pages.front();
    const CodecId codec = page.codecs.k;
    const std::byte* scales = page.k + ScaleOffset(codec);
    switch (codec) {
      case CodecId::kF16:
        return PanelScores(reinterpret_cast<const hwy::float16_t*>(page.k), AheadOf(pages, Side::kK), slot);
      case CodecId::kI8Channel:
        LoadHalves(scales, dim_, x_.channel_scale);
        queries_.MakeChannel();
        std::fill_n(x_.token_scale, kPageTokens, 1.0f);
        return ScoresOfBlock(CodesOf(pages, Side::kK), x_.q_channel, x_.q_channel_scale, x_.q_mean, slot);
      case CodecId::kI8Tensor:
        queries_.MakeI8();
        LoadHalf(scales, kPageTokens, x_.token_scale);
        return ScoresOfBlock(CodesOf(pages, Side::kK), x_.q_i8, x_.q_i8_scale, x_.q_mean, slot);
      case CodecId::kI4:
      case CodecId::kI4Z: {
        queries_.MakeI4();
        const Ahead ahead = AheadOf(pages, Side::kK);
        for (size_t block = 0; block < blocks_.count; ++block) {
          const size_t first = blocks_.First(block);
          const auto run = [&]<class Kernel>(Kernel, const int32_t* q) {
            RunWithRows<Kernel>(blocks_.Count(block), q, page.k, ahead, dim_, codec == CodecId::kI4Z,
                                x_.q_i4_scale + first, x_.q_i4_sums + first * kMaxI4Groups,
                                reinterpret_cast<const hwy::float16_t*>(scales), ScoresAt(first, slot));
          };
          quads_ ? run(ScoresOfI4Quads(), x_.q_i4_quads + first * dim_ / 2)
                 : run(ScoresOfI4(), x_.q_i4 + first * dim_ / 2);
        }
        return;
      }
      default: break;
    }
    LoadHalves(scales, kPageTokens, x_.token_scale);
    if (!RunsOnBytes(codec)) {
      queries_.MakeI8();
      return ScoresOfBlock(CodesOf(pages, Side::kK), x_.q_i8, x_.q_i8_scale, x_.q_mean, slot);
    }
    queries_.MakeBytes();
    const auto run = [&]<class Kernel>(Kernel, const std::byte* codes) {
      for (size_t block = 0; block < blocks_.count; ++block) {
        const size_t first = blocks_.First(block);
        RunWithRows<Kernel>(blocks_.Count(block), x_.q_bytes + first * dim_ / 2,
                            reinterpret_cast<const uint8_t*>(codes), dim_, x_.q_bytes_scale + first,
                            x_.q_bytes_sum + first, x_.q_mean + first, x_.token_scale, ScoresAt(first, slot));
      }
    };
    if (!RunsOnNibbles(codec)) return run(ScoresOfQuads<ByteCodes>(), CodesOf(pages, Side::kK).at);
    PrefetchBlock(pages, Side::kK);
    run(ScoresOfQuads<NibbleCodes>(), page.k);
  }

  void ScoresOfBlock(const Codes& codes, const int32_t* q, const float* q_scale, const float* mean, size_t slot) const {
    for (size_t block = 0; block < blocks_.count; ++block) {
      const size_t first = blocks_.First(block);
      RunWithRows<ScoresOfI8>(blocks_.Count(block), q + first * dim_ / 2, reinterpret_cast<const int8_t*>(codes.at),
                              codes.ahead, dim_, q_scale + first, mean + first, x_.token_scale, ScoresAt(first, slot));
    }
  }

  // Scales token_scale so that the largest one times a weight of 1 is full_scale, and returns the step.
  float ScaleTokensTo(float full_scale) const {
    const float magnitude = Magnitude(x_.token_scale, kPageTokens);
    const VF factor = hn::Set(DF(), magnitude > 0 ? full_scale / magnitude : 0);
    for (size_t t = 0; t < kPageTokens; t += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(DF(), x_.token_scale + t), factor), DF(), x_.token_scale + t);
    }
    return magnitude / full_scale;
  }

  // Weights times the scales of their tokens, to 16 bits; the step of each row goes to weight_scale.
  void QuantizeWeights(size_t slot) const {
    const float step = ScaleTokensTo(kFullScale);
    for (size_t row = 0; row < rows_; ++row) {
      QuantizeWeightRow(ScoresAt(row, slot), x_.token_scale, x_.weights + row * kPageTokens);
      x_.weight_scale[row] = x_.gain[row] * step;
    }
  }

  void ValuesOfCodes(std::span<const PageBlocks> pages, size_t slot, const float* keep) {
    const PageBlocks& page = pages.front();
    const CodecId codec = page.codecs.v;
    const std::byte* scales = page.v + ScaleOffset(codec);
    switch (codec) {
      case CodecId::kF16:
        return PanelValues(reinterpret_cast<const hwy::float16_t*>(page.v), AheadOf(pages, Side::kV), slot, kPageTokens,
                           keep);
      case CodecId::kI8Channel:
        std::fill_n(x_.token_scale, kPageTokens, 1.0f);
        return ValuesOfBlock(CodesOf(pages, Side::kV), slot, keep, reinterpret_cast<const hwy::float16_t*>(scales));
      case CodecId::kI8Tensor:
        LoadHalf(scales, kPageTokens, x_.token_scale);
        return ValuesOfBlock(CodesOf(pages, Side::kV), slot, keep, nullptr);
      case CodecId::kI4:
      case CodecId::kI4Z: return ValuesOfI4Groups(pages, slot, keep);
      default: break;
    }
    LoadHalves(scales, kPageTokens, x_.token_scale);
    if (!RunsOnBytes(codec)) return ValuesOfBlock(CodesOf(pages, Side::kV), slot, keep, nullptr);
    QuantizeWeightQuads<true>(slot);
    const auto run = [&]<class Kernel>(Kernel, const std::byte* codes) {
      for (size_t block = 0; block < blocks_.count; ++block) {
        const size_t first = blocks_.First(block);
        RunWithRows<Kernel>(blocks_.Count(block), x_.weight_quads + first * kPageTokens / 2,
                            reinterpret_cast<const uint8_t*>(codes), dim_, keep + first, x_.weight_scale + first,
                            x_.weight_sum + first, x_.outputs + first * dim_);
      }
    };
    if (!RunsOnNibbles(codec)) return run(ValuesOfBytes(), CodesOf(pages, Side::kV).at);
    PrefetchBlock(pages, Side::kV);
    run(ValuesOfNibbles(), page.v);
  }

  void ValuesOfBlock(const Codes& codes, size_t slot, const float* keep, const hwy::float16_t* channel_scale) const {
    QuantizeWeights(slot);
    for (size_t block = 0; block < blocks_.count; ++block) {
      const size_t first = blocks_.First(block);
      RunWithRows<ValuesOfI8>(blocks_.Count(block), x_.weights + first * kPageTokens,
                              reinterpret_cast<const int8_t*>(codes.at), codes.ahead, dim_, keep + first,
                              x_.weight_scale + first, channel_scale, x_.outputs + first * dim_);
    }
  }

  void ValuesOfI4Groups(std::span<const PageBlocks> pages, size_t slot, const float* keep) const {
    const PageBlocks& page = pages.front();
    const int head_dim = plan_.shape.head_dim;
    const bool has_minimum = page.codecs.v == CodecId::kI4Z;
    const Ahead ahead = AheadOf(pages, Side::kV);
    for (size_t g = 0; g < dim_ / 32; ++g) {
      LoadHalves(page.v + blocks::I4ScaleOffset(head_dim) + g * 64, kPageTokens, x_.token_scale);
      const std::byte* minima = has_minimum ? page.v + blocks::I4MinOffset(head_dim) + g * 64 : nullptr;
      const std::byte* codes = page.v + g * 128;
      if (quads_) {
        QuantizeWeightQuads<false>(slot);
        for (size_t row = 0; row < rows_ && !has_minimum; ++row) {
          x_.base[row] = -8 * static_cast<float>(x_.weight_sum[row]) * x_.weight_scale[row];
        }
        if (has_minimum) SumMinima(slot, minima);
      } else {
        QuantizeWeights(slot);
        SumMinima(slot, minima);
      }
      for (size_t block = 0; block < blocks_.count; ++block) {
        const size_t first = blocks_.First(block);
        if (quads_) {
          RunWithRows<ValuesOfI4Quads>(blocks_.Count(block), x_.weight_quads + first * kPageTokens / 2, codes,
                                       ahead + g * 128, dim_, keep + first, x_.weight_scale + first, x_.base + first,
                                       x_.outputs + first * dim_ + g * 32);
        } else {
          RunWithRows<ValuesOfI4>(blocks_.Count(block), x_.weights + first * kPageTokens, codes, ahead + g * 128, dim_,
                                  static_cast<int16_t>(has_minimum ? 0 : 8), keep + first, x_.weight_scale + first,
                                  x_.base + first, x_.outputs + first * dim_ + g * 32);
        }
      }
    }
  }

  // As QuantizeWeights, for the kernels on quads of tokens: in two digits of 7 bits. Sets weight_sum as well.
  template <bool kBytes>
  void QuantizeWeightQuads(size_t slot) const {
    const float step = ScaleTokensTo(kQuadFullScale);
    for (size_t row = 0; row < rows_; ++row) {
      x_.weight_sum[row] =
          WeightQuads<kBytes>(ScoresAt(row, slot), x_.token_scale, x_.weight_quads + row * kPageTokens / 2);
      x_.weight_scale[row] = x_.gain[row] * step;
    }
  }

  // base = gain * sum of weight * minimum over a page's tokens, 0 without minima.
  void SumMinima(size_t slot, const std::byte* minima) const {
    if (minima == nullptr) {
      std::fill_n(x_.base, rows_, 0.0f);
      return;
    }
    const DF d;
    for (size_t row = 0; row < rows_; ++row) {
      VF sum = hn::Zero(d);
      for (size_t t = 0; t < kPageTokens; t += kLanes) {
        sum = hn::MulAdd(hn::LoadU(d, ScoresAt(row, slot) + t),
                         LoadOperand(reinterpret_cast<const hwy::float16_t*>(minima) + t), sum);
      }
      x_.base[row] = x_.gain[row] * hn::GetLane(hn::SumOfLanes(d, sum));
    }
  }

  void RefineScores(std::span<const PageBlocks> step) {
    if (few_) return refiner_.AddScores(step, scores_);
    const std::span<const uint8_t> tokens = refiner_.tokens();
    for (size_t first = 0; first < tokens.size();) {
      const size_t count = refiner_.Gather(step, Side::kK, first);
      queries_.Use(FrameOf(step[tokens[first] / kPageTokens]));
      queries_.MakeI8();
      ScoresOfBlock(ExpandedCodes(), x_.q_i8, x_.q_i8_scale, x_.zeros, kRefinedSlot);
      for (size_t row = 0; row < rows_; ++row) {
        float* scores = ScoresAt(row, 0);
        const float* more = ScoresAt(row, kRefinedSlot);
        for (size_t i = 0; i < count; ++i) scores[tokens[first + i]] += more[i];
      }
      first += count;
    }
  }

  void RefineValues(std::span<const PageBlocks> step) {
    const std::span<const uint8_t> tokens = refiner_.tokens();
    if (!tokens.empty()) UseOutputFrame(true);
    if (few_) return refiner_.AddValues(step, scores_);
    for (size_t first = 0; first < tokens.size();) {
      const size_t count = refiner_.Gather(step, Side::kV, first);
      for (size_t row = 0; row < rows_; ++row) {
        const float* weights = ScoresAt(row, 0);
        float* gathered = ScoresAt(row, kRefinedSlot);
        std::fill_n(gathered, kPageTokens, 0.0f);
        for (size_t i = 0; i < count; ++i) gathered[i] = weights[tokens[first + i]];
      }
      ValuesOfBlock(ExpandedCodes(), kRefinedSlot, x_.ones, nullptr);
      first += count;
    }
  }

#endif

  const AttentionPlan& plan_;
  std::span<const PageRef> pages_;
  AttentionPlan::Item item_;
  PageWalk walk_;
  size_t dim_;
  size_t rows_;
  bool few_;
  RowBlocks blocks_;
  bool quads_;  // see QuadSum
  bool refines_ = false;
  Scratch x_;
  Queries queries_;
  Refiner refiner_;
  float* scores_;  // of the step at hand
  bool outputs_rotated_ = false;
  bool outputs_empty_ = true;
};

void AttendItem(const AttentionPlan& plan, std::span<const PageRef> pages, int n_layers, int layer, const float* q,
                int item, std::byte* scratch, float* partials, float* out, KeyCounts* counts) {
  ItemRun run(plan, pages, n_layers, layer, q, item, scratch);
  run.Run(counts);
  if (plan.n_chunks == 1) {
    run.WriteOutputs(out);
  } else {
    run.WritePartials(partials + plan.item_partial_floats() * static_cast<size_t>(item));
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv {
namespace attention {
HWY_EXPORT(AttendItem);
HWY_EXPORT(MergeItem);
}  // namespace attention

void Attend(const AttentionPlan& plan, std::span<const PageRef> pages, int n_layers, int layer, const float* q,
            int item, std::byte* scratch, float* partials, float* out, KeyCounts* counts) {
  QKV_CHECK(static_cast<int>(pages.size()) == plan.n_pages && layer >= 0 && layer < n_layers);
  QKV_CHECK(item >= 0 && item < plan.n_attend_items());
  using namespace attention;  // HWY_DYNAMIC_DISPATCH takes an unqualified name
  HWY_DYNAMIC_DISPATCH(AttendItem)(plan, pages, n_layers, layer, q, item, scratch, partials, out, counts);
}

void Merge(const AttentionPlan& plan, const float* partials, int item, float* out) {
  QKV_CHECK(item >= 0 && item < plan.n_merge_items());
  using namespace attention;
  HWY_DYNAMIC_DISPATCH(MergeItem)(plan, partials, item, out);
}

}  // namespace qkv
#endif  // HWY_ONCE
