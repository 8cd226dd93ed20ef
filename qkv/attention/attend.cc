// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <limits>
#include <numbers>

#include "qkv/attention/attention.h"
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

#include "qkv/attention/panels-inl.h"
#if HWY_TARGET != HWY_SCALAR
#include "qkv/attention/i4_quads-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {
namespace {

// One page as an item sees it.
struct PageBlocks {
  CodecPair codecs;
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  int first_key = 0;
  int tokens = 0;
  int position_offset = 0;
  bool hide_first = false;
};

constexpr size_t kPagesAhead = 2;

class ItemRun {
 public:
  ItemRun(const AttentionPlan& plan, std::span<const PageRef> pages, int n_layers, int layer, const float* q, int item,
          std::byte* scratch)
      : plan_(plan),
        pages_(pages),
        geometry_{n_layers, plan.shape.n_kv_heads, plan.shape.head_dim},
        layer_(layer),
        item_(plan.ItemAt(item)),
        dim_(static_cast<size_t>(plan.shape.head_dim)),
        rows_(static_cast<size_t>(item_.n_queries * plan.group())),
        few_(plan.tile_rows() <= kFewRows),
        blocks_(rows_),
        q_(q),
        x_(plan, scratch) {
    PackQueries(0);
    std::fill_n(x_.outputs, rows_ * dim_, 0.0f);
    std::fill_n(x_.sums, rows_ * kMaxLanes, 0.0f);
    const size_t padded_rows = hwy::RoundUpTo(rows_, kMaxLanes);
    std::fill_n(x_.maxima, padded_rows, kNoMaximum);
    std::fill_n(x_.group_maxima, padded_rows, kNoMaximum);
    std::fill_n(x_.ones, padded_rows, 1.0f);
#if HWY_TARGET != HWY_SCALAR
    quads_ = CpuHasQuads() && hwy::DivCeil(rows_, blocks_.count) <= kMaxQuadRows;
#endif
  }

  void Run() {
    // Tokens before `all_see` are visible to every query of the tile, tokens from `none_sees` on to none.
    const int all_see = plan_.n_keys - plan_.n_queries + item_.first_query + 1;
    const int none_sees = all_see + item_.n_queries - 1;
    const int group_pages = few_ ? 1 : kGroupPages;

    PageCursor cursor{item_.first_page, item_.first_key, {}, PageLayout(geometry_, {})};
    PageBlocks queue[kGroupPages + kPagesAhead];
    int queued = 0;
    while (true) {
      while (queued < group_pages + static_cast<int>(kPagesAhead) && Next(cursor, none_sees, queue[queued])) ++queued;
      if (queued == 0) break;
      const int n = std::min(queued, group_pages);
      const std::span<const PageBlocks> pages(queue, static_cast<size_t>(queued));
      for (int i = 0; i < n; ++i) Scores(pages.subspan(static_cast<size_t>(i)), static_cast<size_t>(i));
      for (int i = 0; i < n; ++i) {
        if (queue[i].tokens < kPageTokens || queue[i].first_key + kPageTokens > all_see || queue[i].hide_first) {
          Mask(queue[i], static_cast<size_t>(i), all_see);
        }
      }
      SoftmaxStep(rows_, static_cast<size_t>(n * kPageTokens), x_);
      Values(pages, static_cast<size_t>(n));
      queued -= n;
      std::copy_n(queue + n, queued, queue);
    }
  }

  void WriteOutputs(float* out) const {
    const DF d;
    for (size_t row = 0; row < rows_; ++row) {
      const VF inverse = hn::Set(d, 1.0f / Sum(row));
      float* to = out + Position(row) * dim_;
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
  struct PageCursor {
    int page;
    int first_key;
    CodecPair codecs;  // of `layout`
    PageLayout layout;
  };

  // The next page of the chunk that some query of the tile sees.
  bool Next(PageCursor& cursor, int none_sees, PageBlocks& result) const {
    if (cursor.page == item_.first_page + item_.n_pages || cursor.first_key >= none_sees) return false;
    const PageRef& page = pages_[static_cast<size_t>(cursor.page)];
    if (page.codecs != cursor.codecs) {
      cursor.codecs = page.codecs;
      cursor.layout = PageLayout(geometry_, page.codecs);
    }
    result = {page.codecs,
              page.data + cursor.layout.BlockOffset(Side::kK, layer_, item_.kv_head),
              page.data + cursor.layout.BlockOffset(Side::kV, layer_, item_.kv_head),
              cursor.first_key,
              page.tokens,
              page.position_offset,
              page.hide_first};
    cursor.first_key += page.tokens;
    ++cursor.page;
    return true;
  }

  // Index of a row's vector in q and out.
  size_t Position(size_t row) const {
    const size_t group = static_cast<size_t>(plan_.group());
    return (static_cast<size_t>(item_.first_query) + row / group) * static_cast<size_t>(plan_.shape.n_heads) +
           static_cast<size_t>(item_.kv_head) * group + row % group;
  }

  float Sum(size_t row) const {
    const DF d;
    return hn::GetLane(hn::SumOfLanes(d, hn::LoadU(d, x_.sums + row * kMaxLanes)));
  }

  // The softmax works in powers of two; its factor goes into the queries.
  void PackQueries(int position_offset) {
    const float factor = plan_.shape.scale * std::numbers::log2e_v<float>;
    for (size_t row = 0; row < rows_; ++row) {
      const float* from = q_ + Position(row) * dim_;
      float* to = x_.q_rows + row * dim_;
      for (size_t c = 0; c < dim_; ++c) to[c] = from[c] * factor;
      if (position_offset != 0) TurnBack(plan_.TurnOf(position_offset), to);
    }
    position_offset_ = position_offset;
    q_panel_ready_ = q_i8_ready_ = q_i4_ready_ = false;
  }

  // The order in which panels want them.
  void TransposeQueries() {
    for (size_t block = 0; block < blocks_.count; ++block) {
      const size_t first = blocks_.First(block), count = blocks_.Count(block);
      for (size_t r = 0; r < count; ++r) {
        const float* from = x_.q_rows + (first + r) * dim_;
        float* to = x_.q + first * dim_ + r;
        for (size_t c = 0; c < dim_; ++c) to[c * count] = from[c];
      }
    }
    q_panel_ready_ = true;
  }

  void TurnBack(const AttentionPlan::Turn& turn, float* q) const {
    const size_t n = turn.cosines.size();
    const bool halves = plan_.pairs == Rope::Pairs::kHalves;
    for (size_t i = 0; i < n; ++i) {
      float& x = q[halves ? i : 2 * i];
      float& y = q[halves ? i + n : 2 * i + 1];
      const float turned = x * turn.cosines[i] - y * turn.sines[i];
      y = x * turn.sines[i] + y * turn.cosines[i];
      x = turned;
    }
  }

  void Mask(const PageBlocks& page, size_t slot, int all_see) const {
    const size_t group = static_cast<size_t>(plan_.group());
    for (size_t row = 0; row < rows_; ++row) {
      const int visible = std::clamp(all_see + static_cast<int>(row / group) - page.first_key, 0, page.tokens);
      float* scores = x_.scores + row * kScoreStride + slot * kPageTokens;
      std::fill(scores + visible, scores + kPageTokens, -std::numeric_limits<float>::infinity());
      if (page.hide_first) scores[0] = -std::numeric_limits<float>::infinity();
    }
  }

  // Below, `pages` begins with the page to work on; the ones behind it are the next ones. `slot` is its place in the step.

  template <class T>
  void PanelScores(const T* k, Ahead ahead, size_t slot) {
    if (!q_panel_ready_) TransposeQueries();
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

  float* ScoresAt(size_t row, size_t slot) const {
    return x_.scores + row * kScoreStride + slot * kPageTokens;
  }

  void Scores(std::span<const PageBlocks> pages, size_t slot) {
    const PageBlocks& page = pages.front();
    if (page.position_offset != position_offset_) PackQueries(page.position_offset);
    if (RunsOnCodes(page.codecs.k)) {
      ScoresOfCodes(pages, slot);
      return PrefetchScales(Side::kK, pages);
    }
    CodecOf(page.codecs.k).unpack(Side::kK, page.k, plan_.shape.head_dim, x_.k_panel);
    PanelScores(x_.k_panel, Ahead(), slot);
  }

  void Values(std::span<const PageBlocks> pages, size_t n) {
    const float* keep = x_.keep;  // the step's first kernel brings earlier outputs onto the new maximum
    for (size_t slot = 0; slot < n; keep = x_.ones) {
      if (RunsOnCodes(pages[slot].codecs.v)) {
        ValuesOfCodes(pages.subspan(slot), slot, keep);
        PrefetchScales(Side::kV, pages.subspan(slot));
        ++slot;
        continue;
      }
      const size_t first = slot;
      for (; slot < n && !RunsOnCodes(pages[slot].codecs.v); ++slot) {
        CodecOf(pages[slot].codecs.v)
            .unpack(Side::kV, pages[slot].v, plan_.shape.head_dim, x_.v_panel + (slot - first) * kPageTokens * dim_);
      }
      PanelValues(x_.v_panel, Ahead(), first, (slot - first) * kPageTokens, keep);
    }
  }

#if HWY_TARGET == HWY_SCALAR
  bool RunsOnCodes(CodecId) const {
    return false;
  }
  void ScoresOfCodes(std::span<const PageBlocks>, size_t) {}
  void ValuesOfCodes(std::span<const PageBlocks>, size_t, const float*) {}
  void PrefetchScales(Side, std::span<const PageBlocks>) const {}
#else
  // Else pages of that codec are unpacked.
  bool RunsOnCodes(CodecId codec) const {
    switch (codec) {
      case CodecId::kF16:
      case CodecId::kI8Channel: return few_;  // queries change with every page's scales
      case CodecId::kI8:
      case CodecId::kI8Tensor: return true;
      case CodecId::kI4:
      case CodecId::kI4Z: return dim_ % 64 == 0;
      default: return false;
    }
  }

  // Where the kernels prefetch; without further pages in the block itself, which is in the cache already.
  static Ahead AheadOf(std::span<const PageBlocks> pages, Side side) {
    const auto block = [&](size_t i) {
      const PageBlocks& at = i < pages.size() ? pages[i] : pages.front();
      return reinterpret_cast<uintptr_t>(side == Side::kK ? at.k : at.v);
    };
    return {block(1), block(2)};
  }
  // The scales behind the codes, which the kernels leave out. To be called after a kernel, when the page's address
  // translation has arrived: a prefetch that has to wait for it holds up everything.
  void PrefetchScales(Side side, std::span<const PageBlocks> pages) const {
    if (pages.size() <= kPagesAhead) return;
    const PageBlocks& at = pages[kPagesAhead];
    const CodecId codec = side == Side::kK ? at.codecs.k : at.codecs.v;
    const std::byte* start = side == Side::kK ? at.k : at.v;
    const size_t end = blocks::BlockBytes(codec, plan_.shape.head_dim);
    for (size_t i = ScaleOffset(codec); i < end; i += 64) __builtin_prefetch(start + i, 0, 2);
  }
  size_t ScaleOffset(CodecId codec) const {
    switch (codec) {
      case CodecId::kF16: return blocks::F16Bytes(plan_.shape.head_dim);
      case CodecId::kI8:
      case CodecId::kI8Channel:
      case CodecId::kI8Tensor: return blocks::I8ScaleOffset(plan_.shape.head_dim);
      case CodecId::kI4:
      case CodecId::kI4Z: return blocks::I4ScaleOffset(plan_.shape.head_dim);
      default: return 0;
    }
  }

  // Quantizes the queries, times channel_scale if there is one, to 16 bits and returns the step of each row.
  template <class Place>
  void QuantizeQueries(const float* channel_scale, float full_scale, float* scale, const Place& place) const {
    for (size_t block = 0; block < blocks_.count; ++block) {
      const size_t first = blocks_.First(block), count = blocks_.Count(block);
      for (size_t row = first; row < first + count; ++row) {
        const float* values = x_.q_rows + row * dim_;
        const float magnitude = Magnitude(values, channel_scale, dim_);
        scale[row] = magnitude / full_scale;
        QuantizeProduct(values, channel_scale, magnitude > 0 ? full_scale / magnitude : 0, dim_, x_.q_line);
        place(row, count, first * dim_ / 2 + row - first);
      }
    }
  }

  int32_t Pair(size_t channel, size_t distance) const {
    const int16_t pair[2] = {x_.q_line[channel], x_.q_line[channel + distance]};
    return ValuesOfI8::PairAt(pair);
  }

  void QuantizeForI8(const float* channel_scale, int32_t* to, float* scale) const {
    QuantizeQueries(channel_scale, kFullScale, scale, [&](size_t, size_t count, size_t at) {
      for (size_t c = 0; c < dim_; c += 2) to[at + c / 2 * count] = Pair(c, 1);
    });
  }

  void QuantizeForI4() const {
    std::fill_n(x_.channel_scale, dim_, 1.0f);
    const float full_scale = quads_ ? kQuadFullScale : kFullScale;
    QuantizeQueries(x_.channel_scale, full_scale, x_.q_i4_scale, [&](size_t row, size_t count, size_t at) {
      for (size_t c = 0; c < dim_ / 2; c += 4) {
        if (quads_) {
          int32_t* quads = x_.q_i4_quads + at + c * count;
          SplitQuad(x_.q_line + c, quads, quads + count);
          SplitQuad(x_.q_line + dim_ / 2 + c, quads + 2 * count, quads + 3 * count);
        } else {
          int32_t* pairs = x_.q_i4 + at + c * count;
          pairs[0] = Pair(c, 2);
          pairs[count] = Pair(dim_ / 2 + c, 2);
          pairs[2 * count] = Pair(c + 1, 2);
          pairs[3 * count] = Pair(dim_ / 2 + c + 1, 2);
        }
      }
      for (size_t g = 0; g < dim_ / 32; ++g) {
        int sum = 0;
        for (size_t c = 0; c < 32; ++c) sum += x_.q_line[32 * g + c];
        x_.q_i4_sums[row * kMaxI4Groups + g] = static_cast<float>(sum);
      }
    });
  }

  static void LoadHalves(const std::byte* from, size_t n, float* to) {
    const auto* halves = reinterpret_cast<const hwy::float16_t*>(from);
    for (size_t i = 0; i < n; i += kLanes) hn::StoreU(LoadOperand(halves + i), DF(), to + i);
  }
  static void LoadHalf(const std::byte* from, size_t n, float* to) {
    uint16_t half;
    std::memcpy(&half, from, sizeof half);
    std::fill_n(to, n, FloatFromHalf(half));
  }

  void ScoresOfCodes(std::span<const PageBlocks> pages, size_t slot) {
    const PageBlocks& page = pages.front();
    const CodecId codec = page.codecs.k;
    const int head_dim = plan_.shape.head_dim;
    const Ahead ahead = AheadOf(pages, Side::kK);
    switch (codec) {
      case CodecId::kF16: return PanelScores(reinterpret_cast<const hwy::float16_t*>(page.k), ahead, slot);
      case CodecId::kI8:
      case CodecId::kI8Channel:
      case CodecId::kI8Tensor: {
        const std::byte* scales = page.k + blocks::I8ScaleOffset(head_dim);
        const int32_t* q = x_.q_i8;
        const float* q_scale = x_.q_i8_scale;
        if (codec == CodecId::kI8Channel) {
          LoadHalves(scales, dim_, x_.channel_scale);
          QuantizeForI8(x_.channel_scale, x_.q_channel, x_.q_channel_scale);
          std::fill_n(x_.token_scale, kPageTokens, 1.0f);
          q = x_.q_channel;
          q_scale = x_.q_channel_scale;
        } else {
          if (!q_i8_ready_) {
            std::fill_n(x_.channel_scale, dim_, 1.0f);
            QuantizeForI8(x_.channel_scale, x_.q_i8, x_.q_i8_scale);
            q_i8_ready_ = true;
          }
          codec == CodecId::kI8 ? LoadHalves(scales, kPageTokens, x_.token_scale)
                                : LoadHalf(scales, kPageTokens, x_.token_scale);
        }
        for (size_t block = 0; block < blocks_.count; ++block) {
          const size_t first = blocks_.First(block);
          RunWithRows<ScoresOfI8>(blocks_.Count(block), q + first * dim_ / 2, reinterpret_cast<const int8_t*>(page.k),
                                  ahead, dim_, q_scale + first, x_.token_scale, ScoresAt(first, slot));
        }
        return;
      }
      case CodecId::kI4:
      case CodecId::kI4Z: {
        if (!q_i4_ready_) {
          QuantizeForI4();
          q_i4_ready_ = true;
        }
        const auto* scales = reinterpret_cast<const hwy::float16_t*>(page.k + blocks::I4ScaleOffset(head_dim));
        for (size_t block = 0; block < blocks_.count; ++block) {
          const size_t first = blocks_.First(block);
          const auto run = [&]<class Kernel>(Kernel, const int32_t* q) {
            RunWithRows<Kernel>(blocks_.Count(block), q, page.k, ahead, dim_, codec == CodecId::kI4Z,
                                x_.q_i4_scale + first, x_.q_i4_sums + first * kMaxI4Groups, scales,
                                ScoresAt(first, slot));
          };
          quads_ ? run(ScoresOfI4Quads(), x_.q_i4_quads + first * dim_ / 2)
                 : run(ScoresOfI4(), x_.q_i4 + first * dim_ / 2);
        }
        return;
      }
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
    const int head_dim = plan_.shape.head_dim;
    const Ahead ahead = AheadOf(pages, Side::kV);
    switch (codec) {
      case CodecId::kF16:
        return PanelValues(reinterpret_cast<const hwy::float16_t*>(page.v), ahead, slot, kPageTokens, keep);
      case CodecId::kI8:
      case CodecId::kI8Channel:
      case CodecId::kI8Tensor: {
        const std::byte* scales = page.v + blocks::I8ScaleOffset(head_dim);
        if (codec == CodecId::kI8) LoadHalves(scales, kPageTokens, x_.token_scale);
        if (codec == CodecId::kI8Tensor) LoadHalf(scales, kPageTokens, x_.token_scale);
        if (codec == CodecId::kI8Channel) std::fill_n(x_.token_scale, kPageTokens, 1.0f);
        const auto* channel_scale =
            codec == CodecId::kI8Channel ? reinterpret_cast<const hwy::float16_t*>(scales) : nullptr;
        QuantizeWeights(slot);
        for (size_t block = 0; block < blocks_.count; ++block) {
          const size_t first = blocks_.First(block);
          RunWithRows<ValuesOfI8>(blocks_.Count(block), x_.weights + first * kPageTokens,
                                  reinterpret_cast<const int8_t*>(page.v), ahead, dim_, keep + first,
                                  x_.weight_scale + first, channel_scale, x_.outputs + first * dim_);
        }
        return;
      }
      case CodecId::kI4:
      case CodecId::kI4Z:
        for (size_t g = 0; g < dim_ / 32; ++g) {
          LoadHalves(page.v + blocks::I4ScaleOffset(head_dim) + g * 64, kPageTokens, x_.token_scale);
          const std::byte* minima = codec == CodecId::kI4Z ? page.v + blocks::I4MinOffset(head_dim) + g * 64 : nullptr;
          const std::byte* codes = page.v + g * 128;
          if (quads_) {
            QuantizeWeightQuads(slot, minima);
            for (size_t block = 0; block < blocks_.count; ++block) {
              const size_t first = blocks_.First(block);
              RunWithRows<ValuesOfI4Quads>(blocks_.Count(block), x_.weight_quads + first * kPageTokens / 2, codes,
                                           ahead + g * 128, dim_, keep + first, x_.weight_scale + first,
                                           x_.base + first, x_.outputs + first * dim_ + g * 32);
            }
            continue;
          }
          QuantizeWeights(slot);
          SumMinima(slot, minima);
          for (size_t block = 0; block < blocks_.count; ++block) {
            const size_t first = blocks_.First(block);
            RunWithRows<ValuesOfI4>(blocks_.Count(block), x_.weights + first * kPageTokens, codes, ahead + g * 128,
                                    dim_, static_cast<int16_t>(codec == CodecId::kI4 ? 8 : 0), keep + first,
                                    x_.weight_scale + first, x_.base + first, x_.outputs + first * dim_ + g * 32);
          }
        }
        return;
    }
  }

  // As QuantizeWeights with SumMinima, for ValuesOfI4Quads: in two digits of 7 bits, four tokens side by side.
  void QuantizeWeightQuads(size_t slot, const std::byte* minima) const {
    const float step = ScaleTokensTo(kQuadFullScale);
    for (size_t row = 0; row < rows_; ++row) {
      const float sum = WeightQuads(ScoresAt(row, slot), x_.token_scale, x_.weight_quads + row * kPageTokens / 2);
      x_.weight_scale[row] = x_.gain[row] * step;
      if (minima == nullptr) x_.base[row] = -8.0f * sum * x_.weight_scale[row];
    }
    if (minima != nullptr) SumMinima(slot, minima);
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

  bool quads_ = false;  // see QuadSum
#endif

  const AttentionPlan& plan_;
  std::span<const PageRef> pages_;
  Geometry geometry_;
  int layer_;
  AttentionPlan::Item item_;
  size_t dim_;
  size_t rows_;
  bool few_;
  RowBlocks blocks_;
  const float* q_;
  Scratch x_;
  int position_offset_ = 0;     // that the queries in x_ are turned back by
  bool q_panel_ready_ = false;  // whether they are there in that form as well
  bool q_i8_ready_ = false;
  bool q_i4_ready_ = false;
};

void AttendItem(const AttentionPlan& plan, std::span<const PageRef> pages, int n_layers, int layer, const float* q,
                int item, std::byte* scratch, float* partials, float* out) {
  ItemRun run(plan, pages, n_layers, layer, q, item, scratch);
  run.Run();
  if (plan.n_chunks == 1) {
    run.WriteOutputs(out);
  } else {
    run.WritePartials(partials + plan.item_partial_floats() * static_cast<size_t>(item));
  }
}

void MergeItem(const AttentionPlan& plan, const float* partials, int item, float* out) {
  const DF d;
  const size_t dim = static_cast<size_t>(plan.shape.head_dim);
  const size_t tile_rows = static_cast<size_t>(plan.tile_rows());
  const int kv_head = item % plan.shape.n_kv_heads;
  const int tile = item / plan.shape.n_kv_heads;
  const AttentionPlan::Item first = plan.ItemAt(plan.ItemIndex(kv_head, tile, 0));
  const auto chunk_partials = [&](int chunk) {
    return partials + plan.item_partial_floats() * static_cast<size_t>(plan.ItemIndex(kv_head, tile, chunk));
  };
  const size_t group = static_cast<size_t>(plan.group());
  const size_t rows = static_cast<size_t>(first.n_queries) * group;
  for (size_t row = 0; row < rows; ++row) {
    float maximum = kNoMaximum;
    for (int chunk = 0; chunk < plan.n_chunks; ++chunk) maximum = std::max(maximum, chunk_partials(chunk)[row]);
    float* to = out + ((static_cast<size_t>(first.first_query) + row / group) * plan.shape.n_heads + kv_head * group +
                       row % group) *
                          dim;
    std::fill_n(to, dim, 0.0f);
    float sum = 0;
    for (int chunk = 0; chunk < plan.n_chunks; ++chunk) {
      const float* p = chunk_partials(chunk);
      const VF weight = Exp2(hn::Set(d, p[row] - maximum));
      sum += hn::GetLane(weight) * p[tile_rows + row];
      const float* from = p + 2 * tile_rows + row * dim;
      for (size_t c = 0; c < dim; c += kLanes) {
        hn::StoreU(hn::MulAdd(weight, hn::LoadU(d, from + c), hn::LoadU(d, to + c)), d, to + c);
      }
    }
    const VF inverse = hn::Set(d, 1.0f / sum);
    for (size_t c = 0; c < dim; c += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, to + c), inverse), d, to + c);
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
            int item, std::byte* scratch, float* partials, float* out) {
  QKV_CHECK(static_cast<int>(pages.size()) == plan.n_pages && layer >= 0 && layer < n_layers);
  QKV_CHECK(item >= 0 && item < plan.n_attend_items());
  using namespace attention;  // HWY_DYNAMIC_DISPATCH takes an unqualified name
  HWY_DYNAMIC_DISPATCH(AttendItem)(plan, pages, n_layers, layer, q, item, scratch, partials, out);
}

void Merge(const AttentionPlan& plan, const float* partials, int item, float* out) {
  QKV_CHECK(item >= 0 && item < plan.n_merge_items());
  using namespace attention;
  HWY_DYNAMIC_DISPATCH(MergeItem)(plan, partials, item, out);
}

}  // namespace qkv
#endif  // HWY_ONCE
