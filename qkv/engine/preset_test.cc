// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/preset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace qkv {
namespace {

std::string Within(double bits, int head_dim) {
  const auto pair = BestWithinBits(bits, head_dim);
  return pair ? ToString(*pair) : pair.error().message;
}

TEST(Preset, EveryPairIsSmallerThanTheOneBefore) {
  for (const int head_dim : {32, 64, 80, 128, 256}) {
    for (size_t i = 1; i < MeasuredPairs().size(); ++i) {
      EXPECT_LT(BitsPerValue(MeasuredPairs()[i], head_dim), BitsPerValue(MeasuredPairs()[i - 1], head_dim));
    }
  }
}

TEST(Preset, BitsAreCodesAndOneScaleOf16BitsPerTokenAndHead) {
  EXPECT_DOUBLE_EQ(BitsPerValue(CodecPair{CodecId::k5, CodecId::k4}, 64), 4.5 + 16.0 / 64);
  EXPECT_DOUBLE_EQ(BitsPerValue(CodecPair{CodecId::k4, CodecId::k3}, 128), 3.5 + 16.0 / 128);
  EXPECT_DOUBLE_EQ(BitsPerValue(CodecPair{CodecId::k4, CodecId::k4, true}, 64), 8 + 2 * 16.0 / 64);
  EXPECT_DOUBLE_EQ(BitsPerValue(CodecPair{}, 64), 16);
}

TEST(Preset, TakesTheBestPairThatFits) {
  EXPECT_EQ(Within(16, 64), "f16");
  EXPECT_EQ(Within(15.9, 64), "8");
  EXPECT_EQ(Within(8.25, 64), "8");
  EXPECT_EQ(Within(8.24, 64), "k=6,v=5");
  EXPECT_EQ(Within(4.8, 64), "k=5,v=4");
  EXPECT_EQ(Within(4.3, 64), "4");
  EXPECT_EQ(Within(4.2, 64), "k=4,v=3");
  EXPECT_EQ(Within(4.2, 128), "4");  // scales weigh half as much
  EXPECT_THAT(Within(3.7, 64), ::testing::AllOf(::testing::HasSubstr("3.7 bits"), ::testing::HasSubstr("3.75")));
}

TEST(Preset, TakesTheBestPairWithWhichAContextFits) {
  const Geometry geometry{30, 3, 64};
  // 1000 tokens are 32 pages of 30 * 3 * 2 blocks of 32 * 64 values, each page rounded up to 4096 bytes.
  const uint64_t small = 32 * ((uint64_t{180} * 32 * 64 * 17 / 4 / 8 + 4095) / 4096 * 4096);
  EXPECT_EQ(ToString(BestWithinBytes(small, 1000, geometry).value()), "4");
  EXPECT_EQ(ToString(BestWithinBytes(small - 1, 1000, geometry).value()), "k=4,v=3");
  EXPECT_EQ(ToString(BestWithinBytes(uint64_t{1} << 40, 1000, geometry).value()), "f16");
  const auto none = BestWithinBytes(1000, 1000, geometry);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().reason, Reason::kPoolFull);
}

}  // namespace
}  // namespace qkv
