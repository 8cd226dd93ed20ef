// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/frame.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "hwy/highway.h"

namespace qkv {
namespace {

constexpr int kHeadDims[] = {32, 48, 64, 80, 96, 112, 128, 160, 192, 256};

std::vector<float> Gaussian(int n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& x : values) x = normal(random);
  return values;
}

// H D x by the definition: entry (i, j) of H is -1 to the number of ones that i and j share, over sqrt(run).
std::vector<double> RotatedByDefinition(const std::vector<float>& x, bool bands) {
  const int dim = static_cast<int>(x.size());
  int run = 1;
  while ((bands ? dim / 2 : dim) % (2 * run) == 0) run *= 2;
  std::vector<double> y(x.size());
  for (int i = 0; i < dim; ++i) {
    for (int j = i / run * run; j < i / run * run + run; ++j) {
      const double sign = std::popcount(static_cast<unsigned>(i % run & j % run)) % 2 == 0 ? 1 : -1;
      y[static_cast<size_t>(i)] +=
          sign * (RotationFlips(j) ? -1 : 1) * double{x[static_cast<size_t>(j)]} / std::sqrt(run);
    }
  }
  return y;
}

// The first outputs of splitmix64 for the seed, computed apart (tests/codec_reference.py has them as well).
TEST(Frame, SignsAreTheBitsOfSplitmix64) {
  int flipped = 0;
  for (int c = 0; c < 256; ++c) flipped += RotationFlips(c);
  EXPECT_GT(flipped, 96);
  EXPECT_LT(flipped, 160);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(&kRotationSeed), 8), "QKVShare");
}

TEST(Frame, RotatesAsTheDefinitionSays) {
  for (const int dim : kHeadDims) {
    for (const bool bands : {false, true}) {
      std::vector<float> x = Gaussian(dim, 1);
      const std::vector<double> expected = RotatedByDefinition(x, bands);
      Rotate(x.data(), dim, bands);
      for (size_t c = 0; c < x.size(); ++c) ASSERT_NEAR(x[c], expected[c], 2e-6) << dim << " " << c;
    }
  }
}

TEST(Frame, TurnsBackToWhatItWas) {
  for (const int dim : kHeadDims) {
    const std::vector<float> x = Gaussian(dim, 2);
    std::vector<float> y = x;
    Rotate(y.data(), dim);
    EXPECT_NE(x, y);
    RotateBack(y.data(), dim);
    for (size_t c = 0; c < x.size(); ++c) ASSERT_NEAR(x[c], y[c], 2e-6) << dim << " " << c;
  }
}

TEST(Frame, KeepsDotProductsTheMeanApart) {
  for (const int dim : kHeadDims) {
    for (const bool bands : {false, true}) {
      const std::vector<float> k = Gaussian(dim, 3), mean = Gaussian(dim, 4);
      std::vector<float> q = Gaussian(dim, 5), y(k.size());
      double expected = 0, found = 0;
      for (size_t c = 0; c < k.size(); ++c) expected += double{q[c]} * k[c];
      for (size_t c = 0; c < k.size(); ++c) found += double{q[c]} * mean[c];
      ToRotated(k.data(), 1, dim, mean.data(), y.data(), bands);
      Rotate(q.data(), dim, bands);
      for (size_t c = 0; c < k.size(); ++c) found += double{q[c]} * y[c];
      EXPECT_NEAR(found, expected, 2e-5) << dim;
    }
  }
}

TEST(Frame, TakesManyRowsInPlaceOrApartWithAndWithoutAMean) {
  constexpr int kDim = 80, kRows = 5;
  const std::vector<float> rows = Gaussian(kRows * kDim, 6), mean = Gaussian(kDim, 7);
  for (const float* mu : {static_cast<const float*>(nullptr), mean.data()}) {
    const bool bands = mu != nullptr;
    std::vector<float> apart(rows.size()), in_place = rows, back(rows.size());
    ToRotated(rows.data(), kRows, kDim, mu, apart.data(), bands);
    ToRotated(in_place.data(), kRows, kDim, mu, in_place.data(), bands);
    EXPECT_EQ(apart, in_place);
    for (int r = 0; r < kRows; ++r) {
      std::vector<float> one(rows.begin() + r * kDim, rows.begin() + (r + 1) * kDim);
      for (int c = 0; mu != nullptr && c < kDim; ++c) one[static_cast<size_t>(c)] -= mu[c];
      Rotate(one.data(), kDim, bands);
      EXPECT_TRUE(std::equal(one.begin(), one.end(), apart.begin() + r * kDim)) << r;
    }
    FromRotated(apart.data(), kRows, kDim, mu, back.data(), bands);
    FromRotated(in_place.data(), kRows, kDim, mu, in_place.data(), bands);
    EXPECT_EQ(back, in_place);
    for (size_t i = 0; i < rows.size(); ++i) ASSERT_NEAR(back[i], rows[i], 3e-6);
  }
}

TEST(Frame, SpreadsOneChannelOverItsRun) {
  std::vector<float> x(96);
  x[40] = 32;
  Rotate(x.data(), 96);
  for (int c = 0; c < 96; ++c) {
    EXPECT_NEAR(std::abs(x[static_cast<size_t>(c)]), c / 32 == 1 ? 32 / std::sqrt(32) : 0, 1e-5) << c;
  }
  std::vector<float> in_half(96);
  in_half[40] = 32;
  Rotate(in_half.data(), 96, /*bands=*/true);
  for (int c = 0; c < 96; ++c) {
    EXPECT_NEAR(std::abs(in_half[static_cast<size_t>(c)]), c / 16 == 2 ? 32 / std::sqrt(16) : 0, 1e-5) << c;
  }
}

TEST(Frame, KeepsNanAndInfinityOutOfOtherChannels) {
  std::vector<float> x(64, 1.0f), y(64), expected = x;
  x[3] = std::numeric_limits<float>::quiet_NaN();
  x[7] = -std::numeric_limits<float>::infinity();
  expected[3] = 0;
  expected[7] = -65504;
  ToRotated(x.data(), 1, 64, nullptr, y.data());
  Rotate(expected.data(), 64);
  EXPECT_EQ(y, expected);
}

TEST(Frame, GivesTheSameBitsOnEverySimdTarget) {
  for (int i = 0; i < 2 * static_cast<int>(std::size(kHeadDims)); ++i) {
    const int dim = kHeadDims[i / 2];
    const bool bands = i % 2 != 0;
    const std::vector<float> rows = Gaussian(3 * dim, 8), mean = Gaussian(dim, 9);
    std::vector<float> first_to, first_from;
    for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1) {
      hwy::SetSupportedTargetsForTest(left & -left);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      std::vector<float> to(rows.size()), from(rows.size());
      ToRotated(rows.data(), 3, dim, mean.data(), to.data(), bands);
      FromRotated(rows.data(), 3, dim, mean.data(), from.data(), bands);
      if (first_to.empty()) first_to = to, first_from = from;
      EXPECT_EQ(to, first_to) << dim << " " << hwy::TargetName(left & -left);
      EXPECT_EQ(from, first_from) << dim << " " << hwy::TargetName(left & -left);
    }
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
}

}  // namespace
}  // namespace qkv
