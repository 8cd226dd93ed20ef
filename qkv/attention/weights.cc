// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/attention/weights.h"

#include <algorithm>
#include <array>
#include <numbers>

#include "qkv/attention/scratch.h"

#define HWY_WANT_AVX3_DL 1  // the targets of attend.cc
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "qkv/attention/weights.cc"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"

#include "qkv/attention/panels-inl.h"

#ifndef QKV_ATTENTION_WEIGHTS_ONCE
#define QKV_ATTENTION_WEIGHTS_ONCE
namespace qkv::attention {

// Rows, queries times heads, whose scores of some thousand keys still stay in L2.
inline constexpr int kWeighingRows = 24;
inline int WeighingQueries(int group) {
  return std::max(1, kWeighingRows / group);
}

// The caller's buffer.
struct WeighingScratch {
  WeighingScratch(const AttentionShape& shape, int n_keys, std::byte* buffer) {
    const int group = shape.n_heads / shape.n_kv_heads;
    const auto rows = static_cast<size_t>(WeighingQueries(group) * group);
    stride = static_cast<size_t>((n_keys + kPageTokens - 1) / kPageTokens) * kPageTokens;
    size_t floats = 0;
    const auto carve = [&](float*& pointer, size_t count) {
      pointer = buffer == nullptr ? nullptr : reinterpret_cast<float*>(buffer) + floats;
      floats += (count + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
    };
    carve(q, rows * static_cast<size_t>(shape.head_dim));
    carve(page, rows * kScoreStride);
    carve(scores, rows * stride);
    bytes = floats * sizeof(float);
  }

  float* q = nullptr;       // times the shape's scale and log2(e): [head_dim][rows of the block] per block
  float* page = nullptr;    // [rows of a block][kScoreStride], scores of one page
  float* scores = nullptr;  // [rows][stride]
  size_t stride = 0;
  size_t bytes = 0;
};

}  // namespace qkv::attention
#endif

HWY_BEFORE_NAMESPACE();
namespace qkv::attention {
namespace HWY_NAMESPACE {
namespace {

// Of one row that sees n_keys: scores become weights, which are added up.
void AddRow(float* scores, size_t n_keys, float* mass) {
  const DF d;
  const size_t padded = (n_keys + kPageTokens - 1) / kPageTokens * kPageTokens;
  std::fill(scores + n_keys, scores + padded, kNoMaximum);
  VF maximum = hn::Set(d, kNoMaximum);
  for (size_t t = 0; t < padded; t += kLanes) maximum = hn::Max(maximum, hn::LoadU(d, scores + t));
  maximum = hn::Set(d, hn::GetLane(hn::MaxOfLanes(d, maximum)));
  VF sum = hn::Zero(d);
  for (size_t t = 0; t < padded; t += kLanes) {
    const VF weight = Exp2(hn::Sub(hn::LoadU(d, scores + t), maximum));
    hn::StoreU(weight, d, scores + t);
    sum = hn::Add(sum, weight);
  }
  const float gain = 1 / hn::GetLane(hn::SumOfLanes(d, sum));
  size_t t = 0;
  for (; t + kLanes <= n_keys; t += kLanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, scores + t), hn::Set(d, gain), hn::LoadU(d, mass + t)), d, mass + t);
  }
  for (; t < n_keys; ++t) mass[t] += gain * scores[t];
}

// So many queries that their rows fit the scratch.
void AddTile(const AttentionShape& shape, std::span<const std::byte* const> k_blocks,
             std::span<const WeighingQuery> queries, const WeighingScratch& x, float* mass) {
  const auto group = static_cast<size_t>(shape.n_heads / shape.n_kv_heads);
  const auto dim = static_cast<size_t>(shape.head_dim);
  const RowBlocks blocks(queries.size() * group);
  const float scale = shape.scale * std::numbers::log2e_v<float>;
  size_t n_keys = 0;
  for (const WeighingQuery& query : queries) n_keys = std::max(n_keys, static_cast<size_t>(query.n_keys));
  for (size_t block = 0; block < blocks.count; ++block) {
    const size_t first = blocks.First(block), count = blocks.Count(block);
    float* packed = x.q + first * dim;
    for (size_t r = 0; r < count; ++r) {
      const float* q = queries[(first + r) / group].q + (first + r) % group * dim;
      for (size_t c = 0; c < dim; ++c) packed[c * count + r] = q[c] * scale;
    }
  }
  const size_t n_pages = (n_keys + kPageTokens - 1) / kPageTokens;
  const auto address = [&](size_t page) {
    return reinterpret_cast<uintptr_t>(k_blocks[std::min(page, k_blocks.size() - 1)]);
  };
  for (size_t page = 0; page < n_pages; ++page) {
    const auto* k = reinterpret_cast<const hwy::float16_t*>(k_blocks[page]);
    const Ahead ahead = address(page + 1);
    for (size_t block = 0; block < blocks.count; ++block) {
      const size_t first = blocks.First(block), count = blocks.Count(block);
      RunWithRows<ScoresOfPanel>(count, static_cast<const float*>(x.q + first * dim), k, ahead, dim, x.page);
      for (size_t r = 0; r < count; ++r) {
        std::copy_n(x.page + r * kScoreStride, kPageTokens, x.scores + (first + r) * x.stride + page * kPageTokens);
      }
    }
  }
  for (size_t row = 0; row < blocks.rows; ++row) {
    AddRow(x.scores + row * x.stride, static_cast<size_t>(queries[row / group].n_keys), mass);
  }
}

void AddWeightsOfTiles(const AttentionShape& shape, std::span<const std::byte* const> k_blocks, int n_keys,
                       std::span<const WeighingQuery> queries, std::byte* scratch, float* mass) {
  const WeighingScratch x(shape, n_keys, scratch);
  const auto tile = static_cast<size_t>(WeighingQueries(shape.n_heads / shape.n_kv_heads));
  for (size_t at = 0; at < queries.size(); at += tile) {
    AddTile(shape, k_blocks, queries.subspan(at, std::min(tile, queries.size() - at)), x, mass);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace qkv::attention
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv {
namespace attention {
HWY_EXPORT(AddWeightsOfTiles);
}  // namespace attention

size_t WeighingScratchBytes(const AttentionShape& shape, int n_keys) {
  return attention::WeighingScratch(shape, n_keys, nullptr).bytes;
}

void AddWeights(const AttentionShape& shape, std::span<const PageRef> pages, int n_layers, int layer, int kv_head,
                std::span<const WeighingQuery> queries, std::byte* scratch, float* mass) {
  const PageLayout layout({n_layers, shape.n_kv_heads, shape.head_dim}, {CodecId::kF16, CodecId::kF16});
  std::vector<const std::byte*> k_blocks;
  int n_keys = 0;
  for (const PageRef& page : pages) {
    QKV_CHECK(page.codecs.k == CodecId::kF16 && page.codecs.v == CodecId::kF16 && page.position_offset == 0 &&
              !page.hide_first && n_keys % kPageTokens == 0);
    k_blocks.push_back(page.data + layout.BlockOffset(Side::kK, layer, kv_head));
    n_keys += page.tokens;
  }
  for (const WeighingQuery& query : queries) QKV_CHECK(query.n_keys >= 1 && query.n_keys <= n_keys);
  using namespace attention;  // HWY_DYNAMIC_DISPATCH takes an unqualified name
  HWY_DYNAMIC_DISPATCH(AddWeightsOfTiles)(shape, k_blocks, n_keys, queries, scratch, mass);
}

}  // namespace qkv
#endif  // HWY_ONCE
