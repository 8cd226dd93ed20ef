// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// The partial results of a row's chunks as one; compiled once per Highway target; private to this room.

#include <algorithm>
#include <cstddef>

#include "qkv/attention/attention.h"
#include "qkv/codec/frame.h"

#if defined(QKV_ATTENTION_MERGE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_ATTENTION_MERGE_INL_H_
#undef QKV_ATTENTION_MERGE_INL_H_
#else
#define QKV_ATTENTION_MERGE_INL_H_
#endif

#include "hwy/highway.h"
#include "qkv/attention/panels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {

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
    if (plan.partials_rotated) RotateBack(to, plan.shape.head_dim);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
