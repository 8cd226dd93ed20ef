// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// The queries of an item in every form that a kernel wants, compiled once per Highway target; private to this room.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numbers>

#include "qkv/attention/page_walk.h"
#include "qkv/attention/scratch.h"
#include "qkv/codec/frame.h"

#if defined(QKV_ATTENTION_QUERIES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_ATTENTION_QUERIES_INL_H_
#undef QKV_ATTENTION_QUERIES_INL_H_
#else
#define QKV_ATTENTION_QUERIES_INL_H_
#endif

#include "hwy/highway.h"
#include "qkv/attention/panels-inl.h"
#if HWY_TARGET != HWY_SCALAR
#include "qkv/attention/bytes-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {

// n halves, a multiple of 16.
HWY_INLINE void LoadHalves(const std::byte* from, size_t n, float* to) {
  const auto* halves = reinterpret_cast<const hwy::float16_t*>(from);
  for (size_t i = 0; i < n; i += kLanes) hn::StoreU(LoadOperand(halves + i), DF(), to + i);
}

[[maybe_unused]] HWY_INLINE float Dot(const float* a, const float* b, size_t n) {
  const DF d;
  VF sum = hn::Zero(d);
  for (size_t i = 0; i < n; i += kLanes) sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

class Queries {
 public:
  Queries(const AttentionPlan& plan, const AttentionPlan::Item& item, const float* q, bool quads, const Scratch& x)
      : plan_(plan),
        item_(item),
        dim_(static_cast<size_t>(plan.shape.head_dim)),
        rows_(static_cast<size_t>(item.n_queries * plan.group())),
        blocks_(rows_),
        q_(q),
        quads_(quads),
        x_(x) {
    Pack();
  }

  void Use(const KeyFrame& frame) {
    if (frame == frame_) return;
    frame_ = frame;
    Pack();
  }

  // Index of a row's vector in q and out.
  size_t Position(size_t row) const {
    const size_t group = static_cast<size_t>(plan_.group());
    return (static_cast<size_t>(item_.first_query) + row / group) * static_cast<size_t>(plan_.shape.n_heads) +
           static_cast<size_t>(item_.kv_head) * group + row % group;
  }

  // Turned into a key's frame and times the shape's scale and log2(e).
  const float* Row(size_t row) const { return x_.q_rows + row * dim_; }

  // Each makes the form in x that it is named after, unless it is there.
  void MakeSums() {
    if (sums_ready_) return;
    sums_ready_ = true;
    for (size_t row = 0; row < rows_; ++row) {
      x_.q_sums[row] = 0;
      for (size_t c = 0; c < dim_; ++c) x_.q_sums[row] += Row(row)[c];
    }
  }

  void MakePanel() {
    if (panel_ready_) return;
    panel_ready_ = true;
    for (size_t block = 0; block < blocks_.count; ++block) {
      const size_t first = blocks_.First(block), count = blocks_.Count(block);
      for (size_t r = 0; r < count; ++r) {
        const float* from = x_.q_rows + (first + r) * dim_;
        float* to = x_.q + first * dim_ + r;
        for (size_t c = 0; c < dim_; ++c) to[c * count] = from[c];
      }
    }
  }

#if HWY_TARGET != HWY_SCALAR
  void MakeI8() {
    if (i8_ready_) return;
    i8_ready_ = true;
    std::fill_n(x_.channel_scale, dim_, 1.0f);
    QuantizeForI8(x_.q_i8, x_.q_i8_scale);
  }

  // With the current block's channel scales, in x.channel_scale, folded in; anew each time.
  void MakeChannel() const {
    QuantizeForI8(x_.q_channel, x_.q_channel_scale);
  }

  // For ScoresOfQuads.
  void MakeBytes() {
    if (bytes_ready_) return;
    bytes_ready_ = true;
    std::fill_n(x_.channel_scale, dim_, 1.0f);
    alignas(64) int8_t high[kMaxHeadDim], low[kMaxHeadDim];
    Quantize(kQuadFullScale, x_.q_bytes_scale, [&](size_t row, size_t count, size_t at) HWY_ATTR {
      const hn::CappedTag<int16_t, 16> d16;  // head dims are multiples of 16
      const hn::Rebind<int8_t, decltype(d16)> d8;
      for (size_t c = 0; c < dim_; c += hn::MaxLanes(d16)) {
        const auto values = hn::LoadU(d16, x_.q_line + c);
        const auto digit = hn::ShiftRight<7>(hn::Add(values, hn::Set(d16, 64)));
        hn::StoreU(hn::DemoteTo(d8, digit), d8, high + c);
        hn::StoreU(hn::DemoteTo(d8, hn::Sub(values, hn::ShiftLeft<7>(digit))), d8, low + c);
      }
      int sum = 0;
      for (size_t c = 0; c < dim_; ++c) sum += x_.q_line[c];
      x_.q_bytes_sum[row] = sum;
      for (size_t c = 0; c < dim_; c += 4) {
        int32_t* quads = x_.q_bytes + at + c / 2 * count;
        std::memcpy(quads, high + c, 4);
        std::memcpy(quads + count, low + c, 4);
      }
    });
  }

  void MakeI4() {
    if (i4_ready_) return;
    i4_ready_ = true;
    std::fill_n(x_.channel_scale, dim_, 1.0f);
    const float full_scale = quads_ ? kQuadFullScale : kFullScale;
    Quantize(full_scale, x_.q_i4_scale, [&](size_t row, size_t count, size_t at) {
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
#endif

 private:
  // The softmax works in powers of two; its factor goes into the queries.
  void Pack() {
    const float factor = plan_.shape.scale * std::numbers::log2e_v<float>;
    for (size_t row = 0; row < rows_; ++row) {
      const float* from = q_ + Position(row) * dim_;
      float* to = x_.q_rows + row * dim_;
      for (size_t c = 0; c < dim_; ++c) to[c] = from[c] * factor;
      if (frame_.position_offset != 0) TurnBack(plan_.TurnOf(frame_.position_offset), to);
    }
    if (frame_.rotated) {
      if (frame_.mean != nullptr) LoadHalves(frame_.mean, dim_, x_.line);
      for (size_t row = 0; row < rows_; ++row) {
        float* q = x_.q_rows + row * dim_;
        x_.q_mean[row] = frame_.mean == nullptr ? 0 : Dot(q, x_.line, dim_);
        Rotate(q, plan_.shape.head_dim, frame_.bands);
      }
    } else {
      std::fill_n(x_.q_mean, rows_, 0.0f);
    }
    sums_ready_ = panel_ready_ = i8_ready_ = bytes_ready_ = i4_ready_ = false;
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

#if HWY_TARGET != HWY_SCALAR
  // Quantizes the queries, times x.channel_scale, to 16 bits in x.q_line, sets the step of each row, and calls
  // place(row, rows of its block, where its block starts in a form of one element per two channels).
  template <class Place>
  void Quantize(float full_scale, float* scale, const Place& place) const {
    for (size_t block = 0; block < blocks_.count; ++block) {
      const size_t first = blocks_.First(block), count = blocks_.Count(block);
      for (size_t row = first; row < first + count; ++row) {
        const float* values = x_.q_rows + row * dim_;
        const float magnitude = Magnitude(values, x_.channel_scale, dim_);
        scale[row] = magnitude / full_scale;
        QuantizeProduct(values, x_.channel_scale, magnitude > 0 ? full_scale / magnitude : 0, dim_, x_.q_line);
        place(row, count, first * dim_ / 2 + row - first);
      }
    }
  }

  void QuantizeForI8(int32_t* to, float* scale) const {
    Quantize(kFullScale, scale, [&](size_t, size_t count, size_t at) {
      for (size_t c = 0; c < dim_; c += 2) to[at + c / 2 * count] = Pair(c, 1);
    });
  }

  int32_t Pair(size_t channel, size_t distance) const {
    const int16_t pair[2] = {x_.q_line[channel], x_.q_line[channel + distance]};
    return ValuesOfI8::PairAt(pair);
  }
#endif

  const AttentionPlan& plan_;
  const AttentionPlan::Item item_;
  const size_t dim_;
  const size_t rows_;
  const RowBlocks blocks_;
  const float* const q_;
  const bool quads_;  // see QuadSum
  const Scratch& x_;
  KeyFrame frame_;
  bool sums_ready_ = false;
  bool panel_ready_ = false;
  bool i8_ready_ = false;
  bool bytes_ready_ = false;
  bool i4_ready_ = false;
};

}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
