// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/block_offsets.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "qkv/codec/half.h"

namespace qkv {
namespace {

TEST(AddBlockOffsets, EqualsTheFormulaForAnyShapeAndNumberOfThreads) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  // The third is longer than what is summed at once.
  for (const auto [n_in, n_out, n_tokens] : {std::array{32, 8, 1}, {576, 960, 7}, {16384 + 32, 40, 5}}) {
    std::vector<uint16_t> values(static_cast<size_t>(n_in) / 32 * n_out);
    std::vector<float> x(static_cast<size_t>(n_in) * n_tokens), before(static_cast<size_t>(n_out) * n_tokens);
    for (uint16_t& value : values) value = HalfFromFloat(normal(random));
    for (float& value : x) value = normal(random);
    for (float& value : before) value = normal(random);
    std::vector<float> one;
    for (const int nth : {1, 3}) {
      std::vector<float> y = before;
      for (int ith = 0; ith < nth; ++ith)
        AddBlockOffsets({values.data(), n_in, n_out}, x.data(), n_tokens, y.data(), ith, nth);
      for (int t = 0; t < n_tokens; ++t) {
        for (int o = 0; o < n_out; ++o) {
          double expected = before[static_cast<size_t>(t) * n_out + o], size = 1;
          for (int i = 0; i < n_in; ++i) {
            const double term = static_cast<double>(x[static_cast<size_t>(t) * n_in + i]) *
                                FloatFromHalf(values[static_cast<size_t>(i) / 32 * n_out + o]);
            expected += term;
            size += std::abs(term);
          }
          ASSERT_NEAR(y[static_cast<size_t>(t) * n_out + o], expected, 1e-6 * size)
              << n_in << " in, token " << t << ", output " << o;
        }
      }
      if (nth == 1) one = y;
      EXPECT_EQ(y, one) << nth << " threads";
    }
  }
}

}  // namespace
}  // namespace qkv
