// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/attention/weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "hwy/aligned_allocator.h"

namespace qkv {
namespace {

constexpr CodecPair kF16 = {CodecId::kF16, CodecId::kF16};

// Against double precision over the same halves, for every number of query heads per KV head that fills a block of rows
// otherwise, and with more queries than a tile has.
TEST(AddWeights, IsTheSoftmaxOfEveryRow) {
  constexpr int kLayers = 2, kKvHeads = 2, kDim = 48, kKeys = 70, kLayer = 1, kHead = 1;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  const Geometry geometry{kLayers, kKvHeads, kDim};
  const PageLayout layout(geometry, kF16);
  const size_t n_pages = (kKeys + kPageTokens - 1) / kPageTokens;
  const auto data = hwy::AllocateAligned<std::byte>(layout.bytes * n_pages);
  std::fill_n(data.get(), layout.bytes * n_pages, std::byte{0});
  std::vector<float> keys(static_cast<size_t>(kKeys) * kDim);  // as the halves have them
  std::vector<PageRef> pages;
  for (size_t page = 0; page < n_pages; ++page) {
    const int tokens = std::min<int>(kPageTokens, kKeys - static_cast<int>(page) * kPageTokens);
    std::byte* const at = data.get() + page * layout.bytes;
    std::vector<float> rows(static_cast<size_t>(tokens) * kDim);
    for (float& x : rows) x = normal(random);
    std::byte* const block = at + layout.BlockOffset(Side::kK, kLayer, kHead);
    CodecOf(CodecId::kF16).encode(Side::kK, rows.data(), tokens, kDim, block);
    CodecOf(CodecId::kF16).decode(Side::kK, block, tokens, kDim, &keys[page * kPageTokens * kDim]);
    pages.push_back({.data = at, .codecs = kF16, .tokens = tokens});
  }
  for (const int group : {1, 3, 7, 16}) {
    const AttentionShape shape{kKvHeads * group, kKvHeads, kDim, 0.2f};
    std::vector<int> visible;
    for (int n = 1; n <= kKeys; n += 3) visible.push_back(n);
    visible.insert(visible.end(), {32, 33, 64, 65, kKeys});
    const size_t row_floats = static_cast<size_t>(group) * kDim;
    std::vector<float> q(visible.size() * row_floats);
    for (float& x : q) x = 2 * normal(random);
    std::vector<WeighingQuery> queries;
    std::vector<double> expected(kKeys, 0.5);
    for (size_t i = 0; i < visible.size(); ++i) {
      queries.push_back({&q[i * row_floats], visible[i]});
      for (int head = 0; head < group; ++head) {
        std::vector<double> weights(visible[i]);
        double sum = 0;
        for (int t = 0; t < visible[i]; ++t) {
          double score = 0;
          for (int c = 0; c < kDim; ++c) {
            score += double{q[i * row_floats + static_cast<size_t>(head) * kDim + c]} *
                     keys[static_cast<size_t>(t) * kDim + c];
          }
          sum += weights[t] = std::exp(score * 0.2);
        }
        for (int t = 0; t < visible[i]; ++t) expected[t] += weights[t] / sum;
      }
    }
    const auto scratch = hwy::AllocateAligned<std::byte>(WeighingScratchBytes(shape, kKeys));
    std::vector<float> mass(kKeys + 1, 0.5f);
    AddWeights(shape, pages, kLayers, kLayer, kHead, queries, scratch.get(), mass.data());
    for (int t = 0; t < kKeys; ++t) EXPECT_NEAR(mass[t], expected[t], 1e-5 * expected[t]) << group << ", key " << t;
    EXPECT_EQ(mass[kKeys], 0.5f);
  }
}

}  // namespace
}  // namespace qkv
