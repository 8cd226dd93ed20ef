// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/half.h"

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <limits>

#include "qkv/codec/test_support.h"

namespace qkv {
namespace {

using test::HalfValue;

TEST(Half, ValuesAreThoseOfIeee) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const float value = FloatFromHalf(static_cast<uint16_t>(half));
    if ((half & 0x7c00) != 0x7c00) {
      ASSERT_EQ(value, static_cast<float>(HalfValue(static_cast<uint16_t>(half)))) << half;
      ASSERT_EQ(std::signbit(value), half >= 0x8000) << half;
      ASSERT_EQ(HalfFromFloat(value), half);
    } else {
      ASSERT_EQ(std::isinf(value), (half & 0x3ff) == 0) << half;
      ASSERT_EQ(std::isnan(value), (half & 0x3ff) != 0) << half;
    }
  }
}

TEST(Half, RoundsToTheNearestAndTiesToEven) {
  for (uint16_t below = 0; below < 0x7bff; ++below) {
    const auto above = static_cast<uint16_t>(below + 1);
    const auto middle = static_cast<float>((HalfValue(below) + HalfValue(above)) / 2);
    ASSERT_EQ(HalfFromFloat(middle), below % 2 == 0 ? below : above) << below;
    ASSERT_EQ(HalfFromFloat(std::nextafter(middle, 0.0f)), below) << below;
    ASSERT_EQ(HalfFromFloat(std::nextafter(middle, 1e9f)), above) << below;
    ASSERT_EQ(HalfFromFloat(-middle), HalfFromFloat(middle) | 0x8000) << below;
  }
  EXPECT_EQ(HalfFromFloat(FLT_MAX), 0x7bff);
  EXPECT_EQ(HalfFromFloat(-std::numeric_limits<float>::infinity()), 0xfbff);
  EXPECT_EQ(HalfFromFloat(std::numeric_limits<float>::quiet_NaN()), 0);
}

}  // namespace
}  // namespace qkv
