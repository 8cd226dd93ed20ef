// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/importance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "qkv/engine/test_support.h"

namespace qkv {
namespace {

// One layer, two query heads on one KV head of one channel: weights can be worked out by hand.
TEST(AttentionMass, IsTheMeanWeightThatQueriesGaveWhichSawTheToken) {
  AttentionMass mass({.n_heads = 2, .n_kv_heads = 1, .head_dim = 1, .scale = 1}, 1);
  const float l2 = std::log(2.0f);
  const std::vector<float> keys = {0, l2}, queries = {5, 5, 1, 0};  // token 0's heads, then token 1's
  mass.Take(RowKind::kK, 0, 2, keys);
  mass.Take(RowKind::kV, 0, 2, keys);
  mass.Take(RowKind::kQ, 0, 2, queries);
  // Token 0 sees itself with weight 1 in both heads. Token 1's first head weighs 1 : 2, its second head 1 : 1.
  const auto importance = mass.importance();
  ASSERT_EQ(importance.size(), 2u);
  EXPECT_NEAR(importance[0], (1 + 1 + 1.0 / 3 + 1.0 / 2) / (2 * 2), 1e-6);
  EXPECT_NEAR(importance[1], (2.0 / 3 + 1.0 / 2) / 2, 1e-6);
}

TEST(AttentionMass, BatchesAddUpToTheWhole) {
  const AttentionShape shape{.n_heads = 4, .n_kv_heads = 2, .head_dim = 8, .scale = 0.3f};
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> keys(10 * 16), queries(10 * 32);
  for (float& x : keys) x = normal(random);
  for (float& x : queries) x = normal(random);
  AttentionMass whole(shape, 1), parts(shape, 1);
  whole.Take(RowKind::kK, 0, 10, keys);
  whole.Take(RowKind::kQ, 0, 10, queries);
  for (const auto& [first, n] : {std::pair<size_t, size_t>{0, 3}, {3, 7}}) {
    parts.Take(RowKind::kK, 0, static_cast<int>(n), std::span(keys).subspan(first * 16, n * 16));
    parts.Take(RowKind::kQ, 0, static_cast<int>(n), std::span(queries).subspan(first * 32, n * 32));
  }
  const auto a = whole.importance(), b = parts.importance();
  for (size_t t = 0; t < 10; ++t) EXPECT_NEAR(a[t], b[t], 1e-6);
  double mass = 0;  // every query and head gives away 1 in all
  for (size_t t = 0; t < 10; ++t) mass += a[t] * static_cast<double>(10 - t);
  EXPECT_NEAR(mass, 10, 1e-4);
}

TEST(AttentionMass, SeesWhatASequenceReads) {
  const HyperParams& p = testing::TestModel()->params();
  AttentionMass mass({p.n_heads, p.n_kv_heads, p.head_dim, 1 / std::sqrt(static_cast<float>(p.head_dim))}, p.n_layers);
  SequenceOptions options{.n_batch = 32};
  options.on_rows = [&](RowKind kind, int layer, int n, std::span<const float> rows) {
    mass.Take(kind, layer, n, rows);
  };
  auto sequence = Sequence::Create(testing::TestModel(), options);
  ASSERT_TRUE(sequence);
  ASSERT_TRUE((*sequence)->Forward(testing::SourceTokens(0, 60)));
  const auto importance = mass.importance();
  ASSERT_EQ(importance.size(), 60u);
  // The first token is where attention rests that finds nothing better.
  EXPECT_GT(importance[0], 0.2);
  EXPECT_EQ(std::max_element(importance.begin(), importance.end()), importance.begin());
}

TEST(TokenGroups, AreReadFromText) {
  const auto groups = ParseTokenGroups("attention/20/i8/k=4,v=3");
  ASSERT_TRUE(groups) << groups.error().message;
  EXPECT_EQ(groups->by, TokenGroups::By::kAttention);
  EXPECT_EQ(groups->share, 0.2);
  EXPECT_EQ(ToString(groups->high), "i8");
  EXPECT_EQ(ToString(groups->low.value()), "k=4,v=3");
  EXPECT_EQ(ParseTokenGroups("random/0/8/drop")->by, TokenGroups::By::kRandom);
  EXPECT_FALSE(ParseTokenGroups("random/0/8/drop")->low);
  for (const char* bad : {"", "attention", "luck/20/8/4", "attention/101/8/4", "attention/-1/8/4", "attention/20/9/4",
                          "attention/20/8", "attention/20/8/4/3", "attention/x/8/4", "attention/20/drop/8"}) {
    EXPECT_FALSE(ParseTokenGroups(bad)) << bad;
  }
}

TEST(TokenGroups, BitsAreThoseOfBothGroups) {
  // Of 100 tokens 21 at 8.25 bits, 79 at 4.25 or none.
  EXPECT_DOUBLE_EQ(BitsPerValue(*ParseTokenGroups("attention/20/8/4"), 100, 64), (21 * 8.25 + 79 * 4.25) / 100);
  EXPECT_DOUBLE_EQ(BitsPerValue(*ParseTokenGroups("random/20/8/drop"), 100, 64), 21 * 8.25 / 100);
}

}  // namespace
}  // namespace qkv
