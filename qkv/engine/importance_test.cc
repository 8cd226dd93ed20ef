// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/importance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>

#include "hwy/aligned_allocator.h"
#include "qkv/engine/sequence.h"
#include "qkv/engine/test_support.h"

namespace qkv {
namespace {

constexpr CodecPair kF16 = {CodecId::kF16, CodecId::kF16};
constexpr int kDim = 32;

// Keys and queries of a context, the same in every layer: [token][heads][kDim].
struct Rows {
  Rows(int n_layers, int n_tokens, int n_heads, int n_kv_heads, uint32_t seed)
      : shape{n_heads, n_kv_heads, kDim, 0.2f}, geometry{n_layers, n_kv_heads, kDim}, n_tokens(n_tokens) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    q.resize(static_cast<size_t>(n_tokens) * n_heads * kDim);
    k.resize(static_cast<size_t>(n_tokens) * n_kv_heads * kDim);
    for (float& x : q) x = 2 * normal(random);
    for (float& x : k) x = normal(random);
  }

  // As a tail has them after its first n tokens.
  std::vector<PageRef> Pages(int n) {
    const PageLayout layout(geometry, kF16);
    const size_t n_pages = static_cast<size_t>(n + kPageTokens - 1) / kPageTokens;
    data = hwy::AllocateAligned<std::byte>(layout.bytes * n_pages);
    std::fill_n(data.get(), layout.bytes * n_pages, std::byte{0});
    std::vector<PageRef> pages;
    for (size_t page = 0; page < n_pages; ++page) {
      const int first = static_cast<int>(page) * kPageTokens, tokens = std::min(kPageTokens, n - first);
      std::byte* const at = data.get() + page * layout.bytes;
      std::vector<float> rows(static_cast<size_t>(tokens) * kDim);
      for (int head = 0; head < geometry.n_kv_heads; ++head) {
        for (int t = 0; t < tokens; ++t) {
          const size_t row = static_cast<size_t>(first + t) * geometry.n_kv_heads + head;
          std::copy_n(&k[row * kDim], kDim, &rows[static_cast<size_t>(t) * kDim]);
        }
        for (int layer = 0; layer < geometry.n_layers; ++layer) {
          CodecOf(CodecId::kF16)
              .encode(Side::kK, rows.data(), tokens, kDim, at + layout.BlockOffset(Side::kK, layer, head));
        }
      }
      pages.push_back({.data = at, .codecs = kF16, .tokens = tokens});
    }
    return pages;
  }

  // What a sampler makes of it when it is read in steps of these sizes.
  std::vector<float> Sampled(int every, const std::vector<int>& steps) {
    AttentionSampler sampler(shape, geometry.n_layers, every);
    int read = 0;
    for (const int n : steps) {
      sampler.BeginStep(n, 2);
      const auto pages = Pages(read + n);
      for (int layer = 0; layer < geometry.n_layers; ++layer) {
        for (int head = 0; head < geometry.n_kv_heads; ++head) {
          sampler.Take(layer, head, pages, &q[static_cast<size_t>(read) * shape.n_heads * kDim], head % 2);
        }
      }
      read += n;
    }
    return sampler.importance();
  }

  // The definition, in double precision: the mean weight that queries gave the token which saw it.
  std::vector<double> Full() const {
    const int group = shape.n_heads / shape.n_kv_heads;
    std::vector<double> mean(n_tokens);
    for (int i = 0; i < n_tokens; ++i) {
      for (int head = 0; head < shape.n_heads; ++head) {
        std::vector<double> weights(i + 1);
        double sum = 0;
        for (int t = 0; t <= i; ++t) {
          double score = 0;
          for (int c = 0; c < kDim; ++c) {
            score += double{q[(static_cast<size_t>(i) * shape.n_heads + head) * kDim + c]} *
                     k[(static_cast<size_t>(t) * shape.n_kv_heads + head / group) * kDim + c];
          }
          sum += weights[t] = std::exp(score * double{shape.scale});
        }
        for (int t = 0; t <= i; ++t) mean[t] += weights[t] / sum;
      }
    }
    for (int t = 0; t < n_tokens; ++t) mean[t] /= static_cast<double>(shape.n_heads) * (n_tokens - t);
    return mean;
  }

  const AttentionShape shape;
  const Geometry geometry;
  const int n_tokens;
  std::vector<float> q, k;
  hwy::AlignedFreeUniquePtr<std::byte[]> data;
};

constexpr double kHalves = 2e-3;  // relative; keys are rounded to halves

TEST(AttentionSampler, OfAllQueriesIsTheMeanWeightThatQueriesGaveWhichSawTheToken) {
  Rows rows(1, 75, 4, 2, 1);
  const auto expected = rows.Full();
  const auto found = rows.Sampled(1, {75});
  ASSERT_EQ(found.size(), expected.size());
  for (size_t t = 0; t < found.size(); ++t) EXPECT_NEAR(found[t], expected[t], kHalves * expected[t]) << t;
}

// As many layers as there are places for a layer to begin at, all alike: so every query is in the sample once. What
// comes out is what all queries say, so no token is favoured for where it stands.
TEST(AttentionSampler, OverAllPhasesTheSampleSaysWhatAllQueriesSay) {
  Rows rows(AttentionSampler::kEvery, 101, 2, 1, 2);
  const AttentionSampler sampler(rows.shape, AttentionSampler::kEvery);
  std::vector<int> phases;
  for (int layer = 0; layer < AttentionSampler::kEvery; ++layer) phases.push_back(sampler.phase(layer));
  std::ranges::sort(phases);
  std::vector<int> each(AttentionSampler::kEvery);
  std::iota(each.begin(), each.end(), 0);
  EXPECT_EQ(phases, each);
  const auto expected = rows.Full();
  const auto found = rows.Sampled(AttentionSampler::kEvery, {101});
  for (size_t t = 0; t < found.size(); ++t) EXPECT_NEAR(found[t], expected[t], kHalves * expected[t]) << t;
}

// Queries that look at everything alike: what a token gets is the mean of 1 / (i + 1) over the queries i behind it.
TEST(AttentionSampler, NoPartOfAPromptIsFavoured) {
  constexpr int kTokens = 640;
  Rows rows(6, kTokens, 1, 1, 3);
  std::ranges::fill(rows.k, 0.0f);
  const auto found = rows.Sampled(AttentionSampler::kEvery, {kTokens});
  double behind = 0;
  std::vector<double> expected(kTokens);
  for (int t = kTokens - 1; t >= 0; --t) {
    behind += 1.0 / (t + 1);
    expected[t] = behind / (kTokens - t);
  }
  // Six layers see the very first queries, whose weights are large, by chance; from the second page on it evens out.
  for (int first = 64; first + 32 < kTokens; first += 64) {
    double ratio = 0;
    for (int t = first; t < first + 64 && t + 32 < kTokens; ++t) ratio += found[t] / expected[t];
    EXPECT_NEAR(ratio / std::min(64, kTokens - 32 - first), 1, 0.03) << first;
  }
}

TEST(AttentionSampler, StepsAddUpToTheWhole) {
  Rows rows(3, 100, 4, 2, 4);
  for (const int every : {1, AttentionSampler::kEvery}) {
    const auto whole = rows.Sampled(every, {100}), parts = rows.Sampled(every, {1, 40, 7, 52});
    for (size_t t = 0; t < whole.size(); ++t) EXPECT_NEAR(parts[t], whole[t], 1e-6) << t;
  }
}

// Of a real prompt: which tokens are chosen by the sample, and which by all queries.
TEST(AttentionSampler, ChoosesWhatAllQueriesWould) {
  const std::vector<Token> prompt = testing::SourceTokens(0, 1024);
  const auto read = [&](const char* kv) {
    const auto choice = ParseKvChoice(kv);
    auto sequence = Sequence::Create(testing::TestModel(), {.kv = choice->codecs, .groups = choice->groups});
    EXPECT_TRUE(sequence && (*sequence)->Forward(prompt));
    return *std::move(sequence);
  };
  const auto all = read("tokens:all-queries/20/8/4"), sampled = read("tokens:20/8/4"),
             random = read("tokens:random/20/8/4");
  const auto overlap = [&](const Sequence& a, const Sequence& b) {
    int both = 0;
    for (int t = 0; t < a.groups().size(); ++t) both += a.groups().high[t] && b.groups().high[t];
    return static_cast<double>(both) / a.groups().n_high();
  };
  // How much of the attention that all queries gave, per query, is on the chosen tokens, the first one left out.
  const auto covered = [&](const Sequence& chosen) {
    double on_high = 0, sum = 0;
    for (int t = 1; t < all->groups().size(); ++t) {
      sum += all->importance()[t];
      if (chosen.groups().high[t]) on_high += all->importance()[t];
    }
    return on_high / sum;
  };
  std::printf("chosen by all queries too: %.1f %% of the sample's choice, %.1f %% of a random one\n",
              100 * overlap(*sampled, *all), 100 * overlap(*random, *all));
  std::printf("mean attention on the chosen tokens: %.1f %% (all queries), %.1f %% (sample), %.1f %% (random)\n",
              100 * covered(*all), 100 * covered(*sampled), 100 * covered(*random));
  EXPECT_EQ(sampled->groups().n_high(), 6 * kPageTokens);  // 20 % of 31 pages
  EXPECT_GT(overlap(*sampled, *all), 0.85);
  EXPECT_GT(covered(*sampled), 0.97 * covered(*all));
  EXPECT_LT(overlap(*random, *all), 0.4);
  // The first token is where attention rests that finds nothing better.
  EXPECT_GT(sampled->importance()[0], 0.2);
  EXPECT_GT(sampled->stats().sample_ms, 0);
  EXPECT_LT(sampled->stats().sample_ms, all->stats().sample_ms);
}

}  // namespace
}  // namespace qkv
