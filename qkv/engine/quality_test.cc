// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/quality.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace qkv {
namespace {

// The definition, in long double.
long double KlByDefinition(std::span<const float> p_logits, std::span<const float> q_logits) {
  const auto log_sum = [](std::span<const float> logits) {
    long double sum = 0;
    for (const float x : logits) sum += std::exp(static_cast<long double>(x));
    return std::log(sum);
  };
  const long double p_sum = log_sum(p_logits), q_sum = log_sum(q_logits);
  long double kl = 0;
  for (size_t i = 0; i < p_logits.size(); ++i) {
    kl += std::exp(p_logits[i] - p_sum) * ((p_logits[i] - p_sum) - (q_logits[i] - q_sum));
  }
  return kl;
}

SampleScore SampleOf(std::vector<double> kl, size_t same_top, double nll, double nll_ref) {
  SampleScore sample;
  sample.kl = std::move(kl);
  sample.same_top = same_top;
  sample.nll = nll;
  sample.nll_ref = nll_ref;
  return sample;
}

TEST(Quality, TwoTokensByHand) {
  // p = (3/4, 1/4), q = (1/2, 1/2).
  const ReferenceLogits reference({std::log(3.0f), 0}, 2);
  const std::vector<float> candidate = {5, 5};
  const TokenScore score = reference.Score(0, candidate, 1);
  EXPECT_NEAR(score.kl, 0.75 * std::log(1.5) + 0.25 * std::log(0.5), 1e-7);
  EXPECT_NEAR(score.nll, std::log(2.0), 1e-7);
  EXPECT_NEAR(score.nll_ref, std::log(4.0), 1e-7);
  EXPECT_TRUE(score.same_top);  // the first of equals
  EXPECT_FALSE(score.right);
  EXPECT_FALSE(score.right_ref);
}

TEST(Quality, AgreesWithTheDefinitionFromTinyToLarge) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  constexpr size_t kVocab = 500;
  for (const float size : {1e-3f, 1e-2f, 0.1f, 1.0f, 10.0f, 100.0f}) {
    std::vector<float> p(kVocab), q(kVocab);
    for (size_t i = 0; i < kVocab; ++i) {
      p[i] = 4 * normal(random);
      q[i] = p[i] + size * normal(random) + 2;
    }
    const long double expected = KlByDefinition(p, q);
    const double kl = ReferenceLogits(p, kVocab).Score(0, q, 0).kl;
    EXPECT_NEAR(kl / static_cast<double>(expected), 1, 1e-6) << size;
    EXPECT_EQ(KlDivergence(p, q), kl) << size;
  }
}

TEST(Quality, ATinyDivergenceIsNotLostInRounding) {
  // Two equal tokens, one raised by e: KL = ln cosh(e / 2) = e^2 / 8 to first order.
  const float e = std::ldexp(1.0f, -20);
  const ReferenceLogits reference({1.0f, 1.0f}, 2);
  const std::vector<float> candidate = {1.0f + e, 1.0f};
  const double kl = reference.Score(0, candidate, 0).kl;
  EXPECT_NEAR(kl / (std::pow(static_cast<double>(e), 2) / 8), 1, 1e-6);
}

TEST(Quality, AShiftOfAllLogitsIsNoDifference) {
  const ReferenceLogits reference({1, 2, 3}, 3);
  const std::vector<float> candidate = {101, 102, 103};
  EXPECT_NEAR(reference.Score(0, candidate, 2).kl, 0, 1e-12);
}

TEST(Quality, WhatIsNotANumberCountsAsInfinitelyFar) {
  const ReferenceLogits reference({1, 2}, 2);
  const std::vector<float> candidate = {std::numeric_limits<float>::quiet_NaN(), 1};
  EXPECT_TRUE(std::isinf(reference.Score(0, candidate, 0).kl));
  const std::vector<float> huge = {-3e38f, 3e38f};
  EXPECT_GT(reference.Score(0, huge, 0).kl, 1e30);
}

TEST(Quality, SummaryOfTwoSamples) {
  const std::vector<SampleScore> samples = {SampleOf({0.1, 0.3}, 2, 2.0, 1.8), SampleOf({0.5, 0.7}, 1, 4.0, 3.0)};
  const QualitySummary summary = Summarize(samples);
  EXPECT_EQ(summary.samples, 2u);
  EXPECT_EQ(summary.tokens, 4u);
  EXPECT_NEAR(summary.kl.value, 0.4, 1e-12);
  EXPECT_NEAR(summary.kl.se, 0.2, 1e-12);  // means .2 and .6: s = .2828, / sqrt 2
  EXPECT_DOUBLE_EQ(summary.kl_p99, 0.7);
  EXPECT_NEAR(summary.top1.value, 0.75, 1e-12);
  EXPECT_NEAR(summary.ppl, std::exp(1.5), 1e-12);
  EXPECT_NEAR(summary.ppl_ref, std::exp(1.2), 1e-12);
  EXPECT_NEAR(summary.nll_delta.value, 0.3, 1e-12);  // .1 and .5
  EXPECT_NEAR(summary.nll_delta.se, 0.2, 1e-12);
}

TEST(Quality, RatiosArePairedAndGeometric) {
  const std::vector<SampleScore> a = {SampleOf({2}, 0, 0, 0), SampleOf({16}, 0, 0, 0)};
  const std::vector<SampleScore> b = {SampleOf({1}, 0, 0, 0), SampleOf({2}, 0, 0, 0)};
  const Estimate ratio = PairedKlRatio(a, b);  // 2 and 8
  EXPECT_NEAR(ratio.value, 4, 1e-12);
  EXPECT_NEAR(ratio.se, 2, 1e-12);  // logs ln 4 -/+ ln 2: s / sqrt 2 = ln 2
  EXPECT_EQ(PairedKlRatio(a, std::span(b).first(1)).value, 0);
}

TEST(Quality, Quantiles) {
  std::vector<double> values;
  for (int i = 100; i >= 1; --i) values.push_back(i);
  EXPECT_EQ(QuantileOf(values, 0.99), 99);
  EXPECT_EQ(QuantileOf(values, 1), 100);
  EXPECT_EQ(QuantileOf(values, 0), 1);
  EXPECT_EQ(QuantileOf({7}, 0.99), 7);
}

}  // namespace
}  // namespace qkv
