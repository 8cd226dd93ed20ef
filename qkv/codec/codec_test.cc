// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "hwy/highway.h"
#include "qkv/codec/blocks.h"
#include "qkv/codec/reference.h"
#include "qkv/codec/simd.h"
#include "qkv/codec/test_support.h"

namespace qkv {
namespace {

using namespace test;  // NOLINT: helpers of these tests
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kHeadDims[] = {32, 48, 64, 80, 96, 112, 128, 256};
constexpr int kTokenCounts[] = {1, 2, 31, 32};

// ---- what the tests know by themselves about the format ----

size_t ExpectedBytes(CodecId id, int head_dim) {
  if (const int bits = PlaneBits(id)) return static_cast<size_t>(32 * head_dim * bits / 8 + 32 * 2);
  const int groups = head_dim % 64 == 0 ? head_dim / 32 : 2;
  int bytes = 0;
  switch (id) {
    case CodecId::kF16: bytes = 32 * head_dim * 2; break;
    case CodecId::kI8:
    case CodecId::k8: bytes = 32 * head_dim + 32 * 2; break;
    case CodecId::kI8Channel: bytes = 32 * head_dim + head_dim * 2; break;
    case CodecId::kI8Tensor: bytes = 32 * head_dim + 2; break;
    case CodecId::kI4: bytes = 32 * head_dim / 2 + groups * 32 * 2; break;
    case CodecId::kI4Z: bytes = 32 * head_dim / 2 + groups * 32 * 4; break;
    case CodecId::kI4Channel: bytes = 32 * head_dim / 2 + head_dim * 4; break;
    default: ADD_FAILURE();
  }
  while (bytes % 64 != 0) ++bytes;
  return static_cast<size_t>(bytes);
}

// One value read out of a block by the letter of the layout, in double precision; whether all bits that belong to the
// token are zero; and the scale and minimum, where the codec has them.
struct Place {
  double value;
  bool zero;
  double scale = 0;
  double minimum = 0;
};

Place ReadByTheLetter(CodecId id, Side side, const Block& block, int t, int c, int head_dim) {
  const bool k = side == Side::kK;
  switch (id) {
    case CodecId::kF16: {
      const uint16_t half = block.U16(static_cast<size_t>(k ? (c * 32 + t) * 2 : (t * head_dim + c) * 2));
      return {HalfValue(half), half == 0};
    }
    case CodecId::kI8:
    case CodecId::kI8Channel:
    case CodecId::kI8Tensor:
    case CodecId::k8: {
      const int at = k ? (c / 2) * 64 + 2 * t + (c & 1) : (t / 2) * 2 * head_dim + 2 * c + (t & 1);
      const int code = block.U8(static_cast<size_t>(at));
      const bool own = id == CodecId::kI8 || id == CodecId::k8;
      const int scale_index = own ? t : id == CodecId::kI8Channel ? c : 0;
      const uint16_t scale = block.U16(static_cast<size_t>(32 * head_dim + 2 * scale_index));
      return {(code < 128 ? code : code - 256) * HalfValue(scale), code == 0 && (!own || scale == 0), HalfValue(scale)};
    }
    case CodecId::kI4:
    case CodecId::kI4Z:
    case CodecId::kI4Channel: {
      int u;
      if (k) {
        const int half = head_dim / 2;
        const int byte = block.U8(static_cast<size_t>(c % half / 4 * 128 + 4 * t + c % 4));
        u = c < half ? byte & 15 : byte >> 4;
      } else {
        const int word = block.U16(static_cast<size_t>((t / 8) * 4 * head_dim + 4 * c + 2 * (t & 1)));
        u = (word >> (4 * ((t & 7) >> 1))) & 15;
      }
      if (id == CodecId::kI4Channel) {
        const uint16_t scale = block.U16(static_cast<size_t>(16 * head_dim + 2 * c));
        const uint16_t min = block.U16(static_cast<size_t>(18 * head_dim + 2 * c));
        return {HalfValue(min) + HalfValue(scale) * u, u == 0, HalfValue(scale), HalfValue(min)};
      }
      const int groups = head_dim % 64 == 0 ? head_dim / 32 : 2;
      const int group = c / (head_dim / groups);
      const uint16_t scale = block.U16(static_cast<size_t>(16 * head_dim + (group * 32 + t) * 2));
      if (id == CodecId::kI4) return {HalfValue(scale) * (u - 8), u == 0 && scale == 0, HalfValue(scale)};
      const uint16_t min = block.U16(static_cast<size_t>(16 * head_dim + 64 * groups + (group * 32 + t) * 2));
      return {HalfValue(min) + HalfValue(scale) * u, u == 0 && scale == 0 && min == 0, HalfValue(scale),
              HalfValue(min)};
    }
    default: break;
  }
  const int bits = PlaneBits(id);
  int w = 0;
  if (id == CodecId::kBands) {
    const int i = (c / 2) * 64 + 2 * t + (c & 1), half = 16 * head_dim;
    const int lowest = block.U8(static_cast<size_t>(12 * head_dim + 64 * (i / 512) + i % 64)) >> (i / 64 % 8) & 1;
    const uint16_t scale = block.U16(static_cast<size_t>(16 * head_dim + 2 * t));
    int code;
    if (c < head_dim / 2) {
      w = 2 * (block.U8(static_cast<size_t>(64 * (i / 128) + i % 64)) >> (i / 64 % 2 * 4) & 15) + lowest;
      code = 2 * w - 31;
    } else {
      const int j = i - half;
      w = 2 * (block.U8(static_cast<size_t>(8 * head_dim + 64 * (j / 256) + j % 64)) >> (j / 64 % 4 * 2) & 3) + lowest;
      code = 4 * (2 * w - 7);
    }
    return {HalfValue(scale) * code, w == 0 && scale == 0, HalfValue(scale)};
  }
  if (id == CodecId::kRefine4) {
    const int byte = block.U8(static_cast<size_t>(t * head_dim / 2 + c % (head_dim / 2)));
    w = c < head_dim / 2 ? byte & 15 : byte >> 4;
  } else {
    const int i = k ? (c / 2) * 64 + 2 * t + (c & 1) : (t / 2) * 2 * head_dim + 2 * c + (t & 1);
    const std::vector<int> planes = bits == 3   ? std::vector{2, 1}
                                    : bits == 4 ? std::vector{4}
                                    : bits == 5 ? std::vector{4, 1}
                                    : bits == 6 ? std::vector{4, 2}
                                                : std::vector{4, 2, 1};
    int start = 0;
    for (const int plane : planes) {
      const int group = i / (512 / plane), lane = i % 64, place = i / 64 % (8 / plane);
      w = w * (1 << plane) +
          (block.U8(static_cast<size_t>(start + 64 * group + lane)) >> (place * plane)) % (1 << plane);
      start += 32 * head_dim * plane / 8;
    }
  }
  const uint16_t scale = block.U16(static_cast<size_t>(4 * head_dim * bits + 2 * t));
  return {HalfValue(scale) * (2 * w + 1 - (1 << bits)), w == 0 && scale == 0, HalfValue(scale)};
}

double Sanitized(float x) {
  return std::isnan(x) ? 0 : std::clamp<double>(x, -65504, 65504);
}

// ---- error bounds ----

// How far a half can be from x.
double HalfRounding(double x) {
  return std::max(std::abs(x) * 0x1p-11, 0x1p-25);
}

// Of arithmetic in fp32 on numbers up to x: a few roundings.
double FloatRounding(double x) {
  return std::abs(x) * 0x1p-21;
}

double Bound(CodecId id, const std::vector<float>& rows, int t, int c, int tokens, int head_dim) {
  const auto at = [&](int token, int channel) {
    return Sanitized(rows[static_cast<size_t>(token * head_dim + channel)]);
  };
  if (id == CodecId::kF16) return HalfRounding(at(t, c));

  // The extremes of all values under the same scale.
  const int groups = head_dim % 64 == 0 ? head_dim / 32 : 2;
  const bool group_scale = id == CodecId::kI4 || id == CodecId::kI4Z;
  const bool per_channel = id == CodecId::kI8Channel || id == CodecId::kI4Channel;
  const int group = head_dim / groups;
  double low = at(t, c), high = low;
  for (int token = 0; token < tokens; ++token) {
    if (token != t && !per_channel && id != CodecId::kI8Tensor) continue;
    for (int channel = 0; channel < head_dim; ++channel) {
      if (per_channel && channel != c) continue;
      if (group_scale && channel / group != c / group) continue;
      low = std::min(low, at(token, channel));
      high = std::max(high, at(token, channel));
    }
  }
  const double largest = std::max(-low, high);

  if (id == CodecId::kBands) {
    // As below, the second band's values in quarters.
    double half_cell = 0;
    for (int channel = 0; channel < head_dim; ++channel) {
      half_cell = std::max(half_cell, std::abs(at(t, channel)) / (channel < head_dim / 2 ? 31 : 28));
    }
    const double error = std::sqrt(head_dim) * (half_cell + 32 * HalfRounding(half_cell));
    return (c < head_dim / 2 ? 1 : 4) * error + FloatRounding(largest);
  }
  if (const int bits = PlaneBits(id)) {
    // Without clipping every value is within half a cell, which is largest / (2^bits - 1) wide by halves, and the far
    // end within the rounding of it. What an encoder chooses has no more squared error than that over the token; one
    // value may have it all.
    const int codes = (1 << bits) - 1;
    const double rounding = HalfRounding(largest / codes);
    return std::sqrt(head_dim) * (largest / codes + rounding + codes * rounding) + FloatRounding(largest);
  }

  // Half a step of the stored scale, and the far end moves with the scale's rounding.
  if (!group_scale && id != CodecId::kI4Channel) {
    const double rounding = HalfRounding(largest / 127);
    return (largest / 127 + rounding) / 2 + 127 * rounding + FloatRounding(largest);
  }
  if (id == CodecId::kI4) {
    const double rounding = HalfRounding(largest / 8);
    const double step = largest / 8 + rounding;
    // The side away from the extreme ends at 7 steps, but the data may reach 8.
    const bool clipped = std::abs(at(t, c)) > 7 * largest / 8 && (at(t, c) < 0) != (-low >= high);
    return (clipped ? step : step / 2) + 8 * rounding + FloatRounding(largest);
  }
  const double min_rounding = HalfRounding(low);
  const double scale = (high - low + min_rounding) / 15;
  const double scale_rounding = HalfRounding(scale);
  return (scale + scale_rounding) / 2 + min_rounding + 15 * scale_rounding + FloatRounding(largest);
}

// ---- the suite: every codec, head dim, side, number of tokens and kind of data ----

class EveryCodec : public ::testing::TestWithParam<std::tuple<CodecId, int>> {
 protected:
  using Check = std::function<void(Side, const std::vector<float>& rows, int tokens, const std::string& data)>;

  void ForAll(const Check& check) {
    for (const Data& data : AllData()) {
      for (const int tokens : kTokenCounts) {
        const std::vector<float> rows = Rows(data, tokens, head_dim_);
        for (const Side side : SidesOf(id_)) {
          SCOPED_TRACE(fmt::format("{} {}, {} tokens", side == Side::kK ? "K" : "V", data.name, tokens));
          check(side, rows, tokens, data.name);
          if (HasFailure()) return;
        }
      }
    }
  }

  Block Encode(Side side, const std::vector<float>& rows, int tokens) const {
    Block block(codec_.block_bytes(head_dim_));
    codec_.encode(side, rows.data(), tokens, head_dim_, block.get());
    EXPECT_TRUE(block.GuardIntact());
    return block;
  }
  std::vector<float> Decode(Side side, const Block& block, int tokens) const {
    std::vector<float> rows(static_cast<size_t>(tokens * head_dim_));
    codec_.decode(side, block.get(), tokens, head_dim_, rows.data());
    return rows;
  }

  const CodecId id_ = std::get<0>(GetParam());
  const int head_dim_ = std::get<1>(GetParam());
  const Codec& codec_ = CodecOf(id_);
};

INSTANTIATE_TEST_SUITE_P(Codec, EveryCodec,
                         ::testing::Combine(::testing::Values(CodecId::kF16, CodecId::kI8, CodecId::kI8Channel,
                                                              CodecId::kI8Tensor, CodecId::kI4, CodecId::kI4Z,
                                                              CodecId::k3, CodecId::k4, CodecId::k5, CodecId::k6,
                                                              CodecId::k7, CodecId::k8, CodecId::kRefine4,
                                                              CodecId::kBands, CodecId::kI4Channel),
                                            ::testing::ValuesIn(kHeadDims)),
                         [](const auto& info) {
                           std::string name(CodecOf(std::get<0>(info.param)).name);
                           std::replace(name.begin(), name.end(), '-', '_');
                           std::replace(name.begin(), name.end(), '/', '_');
                           std::replace(name.begin(), name.end(), '+', 'r');
                           return name + "_" + std::to_string(std::get<1>(info.param));
                         });

TEST_P(EveryCodec, TakesExactlyTheBytesOfItsFormula) {
  EXPECT_EQ(codec_.block_bytes(head_dim_), ExpectedBytes(id_, head_dim_));
  const double bits = 8.0 * static_cast<double>(ExpectedBytes(id_, head_dim_)) / (32 * head_dim_);
  EXPECT_DOUBLE_EQ(BitsPerValue(codec_, head_dim_), bits);
}

TEST_P(EveryCodec, KeepsEveryValueWithinItsErrorBound) {
  ForAll([&](Side side, const std::vector<float>& rows, int tokens, const std::string&) {
    const std::vector<float> decoded = Decode(side, Encode(side, rows, tokens), tokens);
    for (int t = 0; t < tokens; ++t) {
      for (int c = 0; c < head_dim_; c += 1 + (id_ == CodecId::kI8Tensor) * 6) {
        const auto i = static_cast<size_t>(t * head_dim_ + c);
        ASSERT_LE(std::abs(decoded[i] - Sanitized(rows[i])), Bound(id_, rows, t, c, tokens, head_dim_))
            << "token " << t << " channel " << c << ": " << rows[i] << " became " << decoded[i];
      }
    }
  });
}

TEST_P(EveryCodec, LaysTheBlockOutByTheLetter) {
  ForAll([&](Side side, const std::vector<float>& rows, int tokens, const std::string&) {
    const Block block = Encode(side, rows, tokens);
    const std::vector<float> decoded = Decode(side, block, kPageTokens);
    for (int t = 0; t < kPageTokens; ++t) {
      for (int c = 0; c < head_dim_; ++c) {
        const Place place = ReadByTheLetter(id_, side, block, t, c, head_dim_);
        // Rounding the exact value once is what all codecs do, but for i4z: its product is rounded before.
        const float value = decoded[static_cast<size_t>(t * head_dim_ + c)];
        if (id_ == CodecId::kI4Z || id_ == CodecId::kI4Channel) {
          ASSERT_NEAR(value, place.value, FloatRounding(std::abs(place.value) + 1e-30)) << t << " " << c;
        } else {
          ASSERT_EQ(value, static_cast<float>(place.value)) << t << " " << c;
        }
        if (t >= tokens) {
          ASSERT_TRUE(place.zero) << t << " " << c;
          if (id_ == CodecId::kI4Channel) continue;  // reads as the channel's minimum
          ASSERT_EQ(std::bit_cast<uint32_t>(value), 0u) << t << " " << c;
        }
      }
    }
  });
}

TEST_P(EveryCodec, ZeroesThePaddingBehindTheScales) {
  size_t used = codec_.block_bytes(head_dim_);
  if (id_ == CodecId::kI8Channel) used = static_cast<size_t>(34 * head_dim_);
  if (id_ == CodecId::kI8Tensor) used = static_cast<size_t>(32 * head_dim_ + 2);
  ForAll([&](Side side, const std::vector<float>& rows, int tokens, const std::string&) {
    const Block block = Encode(side, rows, tokens);
    for (size_t i = used; i < block.bytes; ++i) ASSERT_EQ(block.U8(i), 0) << i;
  });
}

TEST_P(EveryCodec, EncodesItsOwnValuesToTheSameBytes) {
  int checked = 0, cases = 0;
  ForAll([&](Side side, const std::vector<float>& rows, int tokens, const std::string&) {
    const Block first = Encode(side, rows, tokens);
    ++cases;
    for (int t = 0; t < tokens; ++t) {
      for (int c = 0; c < head_dim_; ++c) {
        const Place place = ReadByTheLetter(id_, side, first, t, c, head_dim_);
        // The rounding of a denormal scale is coarse enough to move the extreme to another code. The rounding of a
        // minimum far from zero may exceed half a step, and then no value has code 0.
        const bool coarse_scale = place.scale != 0 && std::abs(place.scale) < 0x1p-14;
        const bool coarse_minimum = place.scale != 0 && std::abs(place.minimum) > 0x1p10 * std::abs(place.scale);
        // One scale fitted to two bands may end beyond what encoders take.
        const bool saturates = id_ == CodecId::kBands && std::abs(place.value) > 65504;
        if (coarse_scale || coarse_minimum || saturates) return;
      }
    }
    const Block second = Encode(side, Decode(side, first, tokens), tokens);
    ASSERT_TRUE(first == second);
    ++checked;
  });
  // Under a scale of one value or two, most minima are far from zero; and many kinds of data reach ±65504.
  const bool half = id_ == CodecId::kI4Channel || id_ == CodecId::kBands;
  EXPECT_GE(checked, half ? cases / 2 : cases * 3 / 4) << "of " << cases;
}

TEST_P(EveryCodec, DecodesFewerTokensToTheSameRows) {
  ForAll([&](Side side, const std::vector<float>& rows, int tokens, const std::string&) {
    const Block block = Encode(side, rows, tokens);
    const std::vector<float> all = Decode(side, block, kPageTokens);
    for (const int n : {1, 7, 31}) {
      const std::vector<float> some = Decode(side, block, n);
      ASSERT_EQ(std::memcmp(some.data(), all.data(), some.size() * sizeof(float)), 0) << n;
    }
  });
}

TEST_P(EveryCodec, UnpacksToTheDecodedBits) {
  ForAll([&](Side side, const std::vector<float>& rows, int tokens, const std::string&) {
    const Block block = Encode(side, rows, tokens);
    std::vector<float> decoded(static_cast<size_t>(kPageTokens * head_dim_));
    reference::Decode(id_, side, block.get(), kPageTokens, head_dim_, decoded.data());
    Block panel(decoded.size() * sizeof(float));
    codec_.unpack(side, block.get(), head_dim_, reinterpret_cast<float*>(panel.get()));
    ASSERT_TRUE(panel.GuardIntact());
    for (int t = 0; t < kPageTokens; ++t) {
      for (int c = 0; c < head_dim_; ++c) {
        const int at = side == Side::kK ? c * 32 + t : t * head_dim_ + c;
        const float& expected = decoded[static_cast<size_t>(t * head_dim_ + c)];
        ASSERT_EQ(std::memcmp(panel.get() + 4 * at, &expected, 4), 0) << t << " " << c;
      }
    }
  });
}

// ---- SIMD against the scalar twin, on every target of this CPU ----

class ForcedTarget {
 public:
  explicit ForcedTarget(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  ~ForcedTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1) {
    targets.push_back(left & -left);
  }
  return targets;
}

TEST_P(EveryCodec, GivesTheScalarBytesOnEverySimdTarget) {
  for (const int64_t target : Targets()) {
    const ForcedTarget forced(target);
    ASSERT_EQ(simd::TargetName(), hwy::TargetName(target));
    SCOPED_TRACE(hwy::TargetName(target));
    ForAll([&](Side side, const std::vector<float>& rows, int tokens, const std::string&) {
      const Block block = Encode(side, rows, tokens);
      Block expected(block.bytes);
      reference::Encode(id_, side, rows.data(), tokens, head_dim_, expected.get());
      for (size_t i = 0; i < block.bytes; ++i) ASSERT_EQ(block.U8(i), expected.U8(i)) << "byte " << i;

      Block panel(static_cast<size_t>(kPageTokens * head_dim_) * sizeof(float));
      Block expected_panel(panel.bytes);
      codec_.unpack(side, block.get(), head_dim_, reinterpret_cast<float*>(panel.get()));
      reference::Unpack(id_, side, block.get(), head_dim_, reinterpret_cast<float*>(expected_panel.get()));
      ASSERT_TRUE(panel == expected_panel);
    });
  }
}

TEST(Simd, RunsOnTheWidestTargetUnlessForced) {
  std::string names;
  for (const int64_t target : Targets()) names.append(" ").append(hwy::TargetName(target));
  std::printf("targets:%s; running %s\n", names.c_str(), std::string(simd::TargetName()).c_str());
  EXPECT_EQ(simd::TargetName(), hwy::TargetName(Targets().front()));
}

// ---- layout by literal offsets, head dim 64 ----

Block EncodeOneHot(CodecId id, Side side, int token, int channel, float value) {
  std::vector<float> rows(32 * 64);
  rows[static_cast<size_t>(token * 64 + channel)] = value;
  Block block(CodecOf(id).block_bytes(64));
  CodecOf(id).encode(side, rows.data(), kPageTokens, 64, block.get());
  return block;
}

std::vector<size_t> NonZeroBytes(const Block& block) {
  std::vector<size_t> at;
  for (size_t i = 0; i < block.bytes; ++i) {
    if (block.U8(i) != 0) at.push_back(i);
  }
  return at;
}

TEST(Layout, F16StoresKByChannelAndVByToken) {
  // 1.0 is 0x3c00, so only the high byte shows.
  EXPECT_THAT(NonZeroBytes(EncodeOneHot(CodecId::kF16, Side::kK, 3, 5, 1.0f)), ElementsAre(5 * 64 + 6 + 1));
  EXPECT_THAT(NonZeroBytes(EncodeOneHot(CodecId::kF16, Side::kV, 3, 5, 1.0f)), ElementsAre(3 * 128 + 10 + 1));
}

TEST(Layout, I8InterleavesChannelPairsOfKAndTokenPairsOfV) {
  // 127 * 0.25: scale 0.25 = 0x3400.
  const Block k = EncodeOneHot(CodecId::kI8, Side::kK, 3, 5, -31.75f);
  EXPECT_THAT(NonZeroBytes(k), ElementsAre(2 * 64 + 6 + 1, 2048 + 6 + 1));
  EXPECT_EQ(k.U8(135), 256 - 127);
  EXPECT_EQ(k.U16(2054), 0x3400);
  const Block v = EncodeOneHot(CodecId::kI8, Side::kV, 3, 5, 31.75f);
  EXPECT_THAT(NonZeroBytes(v), ElementsAre(128 + 10 + 1, 2048 + 6 + 1));
  EXPECT_EQ(v.U8(139), 127);
  EXPECT_THAT(NonZeroBytes(EncodeOneHot(CodecId::kI8Channel, Side::kK, 3, 5, 31.75f)), ElementsAre(135, 2048 + 10 + 1));
  EXPECT_THAT(NonZeroBytes(EncodeOneHot(CodecId::kI8Tensor, Side::kV, 3, 5, 31.75f)), ElementsAre(139, 2049));
}

TEST(Layout, I4PacksTheChannelHalvesOfKAndEightTokensOfV) {
  // The extreme is 0, i.e. -8 steps of -0.25 = 0xb400; the other 31 channels of the group are 8.
  const Block k = EncodeOneHot(CodecId::kI4, Side::kK, 3, 37, 2.0f);
  EXPECT_EQ(k.U16(1024 + (32 + 3) * 2), 0xb400);
  for (int c = 32; c < 64; ++c) {
    EXPECT_EQ(k.U8(static_cast<size_t>((c - 32) / 4 * 128 + 12 + c % 4)), c == 37 ? 0 : 0x80) << c;
  }
  const Block v = EncodeOneHot(CodecId::kI4, Side::kV, 13, 5, -2.0f);
  EXPECT_EQ(v.U16(1024 + 13 * 2), 0x3400);
  // Token 13 is the sixth of group 1: an odd one, third nibble of the second u16.
  for (int c = 0; c < 32; ++c) EXPECT_EQ(v.U16(static_cast<size_t>(256 + c * 4 + 2)), c == 5 ? 0 : 0x0800) << c;
}

TEST(Layout, I4ZStoresMinimaBehindTheScales) {
  // -30 to 0: step 2 = 0x4000, minimum -30 = 0xcf80.
  const Block k = EncodeOneHot(CodecId::kI4Z, Side::kK, 3, 5, -30.0f);
  EXPECT_EQ(k.U16(1024 + 3 * 2), 0x4000);
  EXPECT_EQ(k.U16(1024 + 128 + 3 * 2), 0xcf80);
  for (int c = 0; c < 32; ++c) EXPECT_EQ(k.U8(static_cast<size_t>(c / 4 * 128 + 12 + c % 4)), c == 5 ? 0 : 15) << c;
}

TEST(Layout, OffsetsCoverEveryPlaceOfABlockExactlyOnce) {
  for (const int d : kHeadDims) {
    std::vector<int> f16_k(static_cast<size_t>(64 * d)), f16_v = f16_k;
    std::vector<int> i8_k(static_cast<size_t>(32 * d)), i8_v = i8_k, i4_k = i8_k, i4_v = i8_k;
    for (int t = 0; t < 32; ++t) {
      for (int c = 0; c < d; ++c) {
        ++f16_k.at(blocks::F16KOffset(t, c));
        ++f16_v.at(blocks::F16VOffset(t, c, d));
        ++i8_k.at(blocks::I8KOffset(t, c));
        ++i8_v.at(blocks::I8VOffset(t, c, d));
        ++i4_k.at(2 * blocks::I4KOffset(t, c, d) + static_cast<size_t>(blocks::I4KShift(c, d) / 4));
        ++i4_v.at(2 * blocks::I4VOffset(t, c, d) + static_cast<size_t>(blocks::I4VShift(t) / 4));
      }
    }
    for (const auto& seen : {i8_k, i8_v, i4_k, i4_v}) EXPECT_THAT(seen, ::testing::Each(1)) << d;
    for (const auto& seen : {f16_k, f16_v}) {
      for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], i % 2 == 0 ? 1 : 0) << d;
    }
  }
}

// ---- rounding ----

TEST(Rounding, CodesGoToTheNearestAndTiesToEven) {
  std::vector<float> rows(64);
  const std::pair<float, int> cases[] = {{0.5f, 0},   {1.5f, 2},  {2.5f, 2}, {-0.5f, 0},
                                         {-1.5f, -2}, {0.51f, 1}, {2.49f, 2}};
  for (size_t i = 0; i < std::size(cases); ++i) rows[i + 1] = cases[i].first;
  for (const CodecId id : {CodecId::kI8, CodecId::kI4, CodecId::kI4Z}) {
    rows[0] = id == CodecId::kI8 ? -127 : -8;  // so that a step is 1
    rows[31] = id == CodecId::kI4Z ? 7 : 0;
    Block block(CodecOf(id).block_bytes(64));
    CodecOf(id).encode(Side::kK, rows.data(), 1, 64, block.get());
    std::vector<float> decoded(64);
    CodecOf(id).decode(Side::kK, block.get(), 1, 64, decoded.data());
    for (size_t i = 0; i < std::size(cases); ++i) {
      EXPECT_EQ(decoded[i + 1], cases[i].second) << CodecOf(id).name << " " << cases[i].first;
    }
  }
}

// A partial page is the beginning of the full one, as long as scales belong to tokens.
TEST(Tokens, AreEncodedRegardlessOfEachOtherWhereScalesAreTheirOwn) {
  std::mt19937_64 random(Seed());
  for (const CodecId id : {CodecId::kF16, CodecId::kI8, CodecId::kI4, CodecId::kI4Z, CodecId::k3, CodecId::k4,
                           CodecId::k5, CodecId::k6, CodecId::k7, CodecId::k8, CodecId::kRefine4, CodecId::kBands}) {
    for (const Side side : SidesOf(id)) {
      for (const int head_dim : kHeadDims) {
        std::vector<float> rows(static_cast<size_t>(kPageTokens * head_dim)), all(rows), some(rows);
        for (float& x : rows) x = Gaussian(random);
        Block block(CodecOf(id).block_bytes(head_dim));
        CodecOf(id).encode(side, rows.data(), kPageTokens, head_dim, block.get());
        CodecOf(id).decode(side, block.get(), kPageTokens, head_dim, all.data());
        for (const int tokens : kTokenCounts) {
          CodecOf(id).encode(side, rows.data(), tokens, head_dim, block.get());
          CodecOf(id).decode(side, block.get(), tokens, head_dim, some.data());
          EXPECT_TRUE(std::equal(some.begin(), some.begin() + tokens * head_dim, all.begin())) << tokens;
        }
      }
    }
  }
}

// ---- values that no quantizer likes ----

TEST(Special, NanBecomesZeroAndInfinityTheLargestHalf) {
  for (const Codec& codec : Codecs()) {
    if (PlaneBits(codec.id) != 0 || codec.needs_book) continue;  // have no zero
    for (const Side side : kSides) {
      std::vector<float> rows(64, std::numeric_limits<float>::quiet_NaN());
      rows[1] = std::numeric_limits<float>::infinity();
      rows[40] = -std::numeric_limits<float>::infinity();
      Block block(codec.block_bytes(64));
      codec.encode(side, rows.data(), 1, 64, block.get());
      codec.decode(side, block.get(), 1, 64, rows.data());
      const bool asymmetric = codec.id == CodecId::kI4Z || codec.id == CodecId::kI4Channel;
      const double step = codec.id == CodecId::kF16 ? 0 : asymmetric ? 65504.0 / 15 : 65504.0 / 127;
      EXPECT_NEAR(rows[1], 65504, step / 2) << codec.name;
      EXPECT_NEAR(rows[40], -65504, step / 2) << codec.name;
      EXPECT_EQ(rows[0], 0) << codec.name;
    }
  }
}

TEST(Special, MidRiseCodecsTakeNanAsZeroAndInfinityAsTheLargestHalf) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const CodecId id :
       {CodecId::k3, CodecId::k4, CodecId::k5, CodecId::k6, CodecId::k7, CodecId::kRefine4, CodecId::kBands}) {
    for (const Side side : SidesOf(id)) {
      std::vector<float> special(64, std::numeric_limits<float>::quiet_NaN()), plain(64, 0.0f);
      for (const int c : {1, 40}) special[static_cast<size_t>(c)] = -kInf, plain[static_cast<size_t>(c)] = -65504.0f;
      for (const int c : {2, 41}) special[static_cast<size_t>(c)] = FLT_MAX, plain[static_cast<size_t>(c)] = 65504.0f;
      Block block(CodecOf(id).block_bytes(64)), expected(block.bytes);
      CodecOf(id).encode(side, special.data(), 1, 64, block.get());
      CodecOf(id).encode(side, plain.data(), 1, 64, expected.get());
      EXPECT_TRUE(block == expected) << CodecOf(id).name;
    }
  }
}

TEST(Special, MagnitudesBelowTheSmallestScaleBecomeZero) {
  for (const Codec& codec : Codecs()) {
    if (codec.id == CodecId::kF16 || codec.needs_book) continue;
    const std::vector<float> rows(64, -0x1p-27f);
    std::vector<float> decoded(64, 1.0f);
    Block block(codec.block_bytes(64));
    codec.encode(Side::kK, rows.data(), 1, 64, block.get());
    EXPECT_THAT(NonZeroBytes(block), ::testing::IsEmpty()) << codec.name;
    codec.decode(Side::kK, block.get(), 1, 64, decoded.data());
    for (const float x : decoded) EXPECT_EQ(std::bit_cast<uint32_t>(x), 0u) << codec.name;
  }
}

// ---- the table ----

TEST(Table, FindsCodecsByIdAndName) {
  ASSERT_EQ(Codecs().size(), 16u);
  EXPECT_TRUE(std::ranges::is_sorted(Codecs(), {}, &Codec::id));
  const std::pair<int, std::string_view> released[] = {{1, "f16"},  {2, "i8"},   {3, "i8-channel"},  {4, "i8-tensor"},
                                                       {5, "i4"},   {6, "i4z"},  {7, "3"},           {8, "4"},
                                                       {9, "5"},    {10, "6"},   {11, "7"},          {12, "8"},
                                                       {14, "pq4"}, {15, "5/3"}, {16, "i4-channel"}, {17, "pq2"}};
  for (const auto& [id, name] : released) {
    ASSERT_NE(FindCodec(static_cast<uint8_t>(id)), nullptr) << name;
    EXPECT_EQ(FindCodec(static_cast<uint8_t>(id))->name, name);
    EXPECT_EQ(FindCodec(name), FindCodec(static_cast<uint8_t>(id)));
    EXPECT_EQ(&CodecOf(static_cast<CodecId>(id)), FindCodec(name));
    EXPECT_EQ(FindCodec(name)->needs_book, name.starts_with("pq"));
    EXPECT_EQ(FindCodec(name)->rotated, (id >= 7 && id <= 12) || id == 15 || FindCodec(name)->needs_book);
    EXPECT_EQ(FindCodec(name)->keys_only, id == 15);
  }
  ASSERT_NE(FindCodec(uint8_t{13}), nullptr);
  EXPECT_EQ(FindCodec(uint8_t{13})->name, "+4");
  EXPECT_TRUE(FindCodec(uint8_t{13})->rotated);
  for (const int unknown : {0, 18, 255}) EXPECT_EQ(FindCodec(static_cast<uint8_t>(unknown)), nullptr);
  for (const std::string_view unknown : {"", "I8", "i8 ", "i9", "+4", "2", "9"}) EXPECT_EQ(FindCodec(unknown), nullptr);
}

TEST(Table, ParsesWhatItPrints) {
  for (const Codec& k : Codecs()) {
    for (const Codec& v : Codecs()) {
      for (const bool refine : {false, true}) {
        const CodecPair pair{k.id, v.id, refine};
        const auto parsed = ParseCodecPair(ToString(pair));
        const bool refinable = k.rotated && v.rotated && !k.needs_book && !v.needs_book;
        ASSERT_EQ(parsed.has_value(), !v.keys_only && (!refine || refinable)) << ToString(pair);
        if (parsed.has_value()) {
          EXPECT_EQ(*parsed, pair);
        }
      }
    }
  }
  EXPECT_EQ(ToString({CodecId::kI8, CodecId::kI8}), "i8");
  EXPECT_EQ(ToString({CodecId::kI8, CodecId::kI4}), "k=i8,v=i4");
  EXPECT_EQ(ToString({CodecId::k4, CodecId::k4, true}), "4+4");
  EXPECT_EQ(ToString({CodecId::k4, CodecId::k3, true}), "k=4,v=3,+4");
  EXPECT_EQ(ParseCodecPair("v=i4z,k=i8-channel").value(), (CodecPair{CodecId::kI8Channel, CodecId::kI4Z}));
  EXPECT_EQ(ParseCodecPair("+4,v=3,k=4").value(), (CodecPair{CodecId::k4, CodecId::k3, true}));
}

TEST(Table, PresetsGoFromTheBestToTheSmallestAndAreReadWhereverAPairIs) {
  const std::pair<std::string_view, std::string_view> expected[] = {
      {"exact", "8"}, {"safe", "k=6,v=5"}, {"balanced", "k=5,v=4"}, {"small", "4"}, {"tiny", "k=4,v=3"}};
  ASSERT_EQ(Presets().size(), std::size(expected));
  double bits = 100;
  for (size_t i = 0; i < std::size(expected); ++i) {
    const Preset& preset = Presets()[i];
    EXPECT_EQ(preset.name, expected[i].first);
    EXPECT_EQ(ToString(preset.codecs), expected[i].second);
    EXPECT_EQ(ParseCodecPair(preset.name).value(), preset.codecs);
    const double both = BitsPerValue(CodecOf(preset.codecs.k), 64) + BitsPerValue(CodecOf(preset.codecs.v), 64);
    EXPECT_LT(both, bits);
    bits = both;
  }
  EXPECT_EQ(ParseCodecPair("tiny+4").value(), (CodecPair{CodecId::k4, CodecId::k3, true}));
}

TEST(Table, RefusesPairsItCannotReadAndSaysWhatThereIs) {
  for (const std::string_view text :
       {"",           "i7",       "k=i8",        "v=i8",      "k=i8,k=i4", "k=i8,v=",     "k=i8,v=i7",
        "k=i8,v=i4,", "i8,i4",    "k=i8, v=i4",  "q=i8,v=i4", "=",         ",",           "k=i8,v=i4,v=i4",
        "+4",         "4+4+4",    "4+",          "4+5",       "i8+4",      "k=4,v=i4,+4", "k=4,v=3,+4,+4",
        "k=4+4,v=3",  "k=+4,v=4", "k=small,v=4", "k=4,v=3+4", "2",         "balanced+",   "k=4,+4",
        "+4,+4",      "pq4+4",    "5/3",         "k=4,v=5/3", "5/3+4"}) {
    const auto pair = ParseCodecPair(text);
    ASSERT_FALSE(pair.has_value()) << text;
    EXPECT_EQ(pair.error().code, Code::kInvalidArgument);
  }
  EXPECT_THAT(ParseCodecPair("i8+4").error().message, HasSubstr("'i8+4': a refinement plane goes with"));
  EXPECT_THAT(ParseCodecPair("5/3").error().message, HasSubstr("5/3 is for keys only, as in k=5/3,v=4"));
  EXPECT_THAT(ParseCodecPair("smal").error().message, HasSubstr("exact, safe, balanced, small, tiny"));
  const std::string message = ParseCodecPair("k=i8,v=i7").error().message;
  EXPECT_THAT(message, HasSubstr("'i7'"));
  for (const Codec& codec : Codecs()) EXPECT_THAT(message, HasSubstr(std::string(codec.name)));
}

}  // namespace
}  // namespace qkv
