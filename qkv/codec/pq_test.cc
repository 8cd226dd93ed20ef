// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/pq.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "hwy/highway.h"
#include "qkv/codec/test_support.h"

namespace qkv {
namespace {

using namespace test;  // NOLINT: helpers of these tests
using ::testing::HasSubstr;

std::vector<float> GaussianRows(size_t values, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> rows(values);
  for (float& x : rows) x = Gaussian(random);
  return rows;
}

std::vector<float> Trained(int head_dim, int n_centroids) {
  return TrainPq(GaussianRows(static_cast<size_t>(4096 * head_dim), 1), head_dim, n_centroids).value();
}

// The code of pair m of token t, by the letter of FORMAT.md §9.
int CodeAt(const Block& block, Side side, int t, int m, int head_dim, int n_centroids) {
  if (n_centroids == 256) {
    return block.U8(static_cast<size_t>(side == Side::kK ? m * 32 + t : t * (head_dim / 2) + m));
  }
  if (side == Side::kK) {
    const int byte = block.U8(static_cast<size_t>(m * 16 + t % 16));
    return t < 16 ? byte & 15 : byte >> 4;
  }
  const int byte = block.U8(static_cast<size_t>(t * (head_dim / 4) + m % (head_dim / 4)));
  return m < head_dim / 4 ? byte & 15 : byte >> 4;
}

class Pq : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  const int head_dim_ = std::get<0>(GetParam());
  const int n_centroids_ = std::get<1>(GetParam());
};

INSTANTIATE_TEST_SUITE_P(Codec, Pq, ::testing::Combine(::testing::Values(32, 80), ::testing::Values(16, 256)));

TEST_P(Pq, TakesTheNearestCentroidAndLaysCodesOutByTheLetter) {
  const std::vector<float> book = Trained(head_dim_, n_centroids_);
  for (const Side side : kSides) {
    for (const int tokens : {1, 17, 32}) {
      const std::vector<float> rows = GaussianRows(static_cast<size_t>(tokens * head_dim_), 2);
      Block block(PqBlockBytes(n_centroids_, head_dim_));
      PqEncode(side, rows.data(), tokens, head_dim_, n_centroids_, book.data(), block.get());
      ASSERT_TRUE(block.GuardIntact());
      std::vector<float> panel(static_cast<size_t>(32 * head_dim_));
      PqUnpack(side, block.get(), head_dim_, n_centroids_, book.data(), panel.data());
      for (int t = 0; t < 32; ++t) {
        for (int m = 0; m < head_dim_ / 2; ++m) {
          const float* centroids = book.data() + 2 * m * n_centroids_;
          const int code = CodeAt(block, side, t, m, head_dim_, n_centroids_);
          for (int i = 0; i < 2; ++i) {
            const int c = 2 * m + i;
            ASSERT_EQ(panel[static_cast<size_t>(side == Side::kK ? c * 32 + t : t * head_dim_ + c)],
                      centroids[2 * code + i]);
          }
          if (t >= tokens) {
            ASSERT_EQ(code, 0);
            continue;
          }
          const auto distance = [&](int k) {
            return std::hypot(double{rows[static_cast<size_t>(t * head_dim_ + 2 * m)]} - centroids[2 * k],
                              double{rows[static_cast<size_t>(t * head_dim_ + 2 * m + 1)]} - centroids[2 * k + 1]);
          };
          for (int k = 0; k < n_centroids_; ++k) ASSERT_LE(distance(code), distance(k) * (1 + 1e-6)) << t << " " << m;
        }
      }
    }
  }
}

TEST_P(Pq, GivesTheSameCodesOnEverySimdTarget) {
  const std::vector<float> book = Trained(head_dim_, n_centroids_);
  const std::vector<float> rows = GaussianRows(static_cast<size_t>(32 * head_dim_), 3);
  Block expected(PqBlockBytes(n_centroids_, head_dim_)), block(expected.bytes);
  PqEncode(Side::kV, rows.data(), 32, head_dim_, n_centroids_, book.data(), expected.get());
  for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1) {
    hwy::SetSupportedTargetsForTest(left & -left);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    PqEncode(Side::kV, rows.data(), 32, head_dim_, n_centroids_, book.data(), block.get());
    EXPECT_TRUE(block == expected) << hwy::TargetName(left & -left);
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// Between what one scalar at the same bits leaves at best (Max 1960: 0.1175 and 0.009497) and what no code can go below
// (2^(-2 bits)), on rows that training has not seen.
TEST(PqQuality, BeatsTheBestScalarQuantizerOfAGaussian) {
  for (const auto& [n_centroids, scalar, bound] :
       {std::tuple(16, 0.1175, 0.0625), std::tuple(256, 0.009497, 0.00390625)}) {
    constexpr int kDim = 32, kBlocks = 100;
    const std::vector<float> book = Trained(kDim, n_centroids);
    const std::vector<float> rows = GaussianRows(kBlocks * 32 * kDim, 4);
    std::vector<float> panel(32 * kDim);
    Block block(PqBlockBytes(n_centroids, kDim));
    double error = 0;
    for (int b = 0; b < kBlocks; ++b) {
      const float* from = rows.data() + b * 32 * kDim;
      PqEncode(Side::kV, from, 32, kDim, n_centroids, book.data(), block.get());
      PqUnpack(Side::kV, block.get(), kDim, n_centroids, book.data(), panel.data());
      for (size_t i = 0; i < panel.size(); ++i) error += std::pow(double{from[i]} - panel[i], 2);
    }
    const double mse = error / (kBlocks * 32 * kDim);
    std::printf("%d centroids: MSE %.4g (scalar %.4g)\n", n_centroids, mse, scalar);
    EXPECT_LT(mse, scalar);
    EXPECT_GT(mse, bound);
  }
}

TEST(PqTraining, FindsClustersThatAreThere) {
  // 16 places, far apart; each row has its pairs in places of their own.
  std::mt19937_64 random(5);
  std::vector<float> rows(1000 * 32);
  for (size_t i = 0; i < rows.size(); i += 2) {
    const uint64_t place = random() % 16;
    rows[i] = static_cast<float>(place % 4) * 10;
    rows[i + 1] = static_cast<float>(place / 4) * 10;
  }
  const std::vector<float> book = TrainPq(rows, 32, 16).value();
  Block block(PqBlockBytes(16, 32));
  std::vector<float> panel(32 * 32);
  PqEncode(Side::kV, rows.data(), 32, 32, 16, book.data(), block.get());
  PqUnpack(Side::kV, block.get(), 32, 16, book.data(), panel.data());
  EXPECT_TRUE(std::equal(panel.begin(), panel.end(), rows.begin()));
}

TEST(PqTraining, IsTheSameEveryTimeAndLeavesOutWhatIsNotFinite) {
  std::vector<float> rows = GaussianRows(200 * 32, 6);
  const auto book = TrainPq(rows, 32, 16);
  EXPECT_EQ(TrainPq(rows, 32, 16).value(), *book);
  rows.insert(rows.end(), 32, std::numeric_limits<float>::quiet_NaN());
  rows.insert(rows.end(), 32, std::numeric_limits<float>::infinity());
  EXPECT_EQ(TrainPq(rows, 32, 16).value(), *book);
}

TEST(PqTraining, RefusesTooFewRows) {
  const std::vector<float> rows = GaussianRows(1023 * 32, 7);
  const auto book = TrainPq(rows, 32, 256);
  ASSERT_FALSE(book.has_value());
  EXPECT_EQ(book.error().code, Code::kInvalidArgument);
  EXPECT_THAT(book.error().message, HasSubstr("from 1023 tokens, expected at least 1024"));
  EXPECT_TRUE(TrainPq({}, 32, 16).error().code == Code::kInvalidArgument);
}

// ---- the file ----

constexpr PqShape kSmallShape{.n_layers = 2, .n_kv_heads = 3, .head_dim = 32, .n_centroids = 16};
constexpr std::array<uint8_t, 16> kModel = {1, 2, 3};

PqCodebooks Small() {
  return PqCodebooks::Make(kSmallShape, kModel, GaussianRows(12 * 32 * 16, 8)).value();
}

std::vector<std::byte> WithChecksum(std::vector<std::byte> bytes) {
  std::memset(&bytes[40], 0, 8);
  const uint64_t checksum = XXH3_64bits(bytes.data(), bytes.size());
  std::memcpy(&bytes[40], &checksum, 8);
  return bytes;
}

TEST(PqFile, ParsesToWhatWasMade) {
  const PqCodebooks made = Small();
  const std::vector<std::byte> bytes = made.Serialize();
  ASSERT_EQ(bytes.size(), 48u + 2 * 12 * 32 * 16);
  const PqCodebooks parsed = PqCodebooks::Parse(bytes).value();
  EXPECT_EQ(parsed.shape(), kSmallShape);
  EXPECT_EQ(parsed.model_digest(), kModel);
  EXPECT_EQ(parsed.digest(), made.digest());
  EXPECT_EQ(parsed.digest().size(), 32u);
  EXPECT_EQ(parsed.book(1, 2, Side::kV) - parsed.book(0, 0, Side::kK), 11 * 32 * 16);
  // The last centroid of the last book is at the file's end.
  uint16_t half;
  std::memcpy(&half, &bytes[bytes.size() - 2], 2);
  EXPECT_EQ(parsed.book(1, 2, Side::kV)[32 * 16 - 1], HalfValue(half));
  EXPECT_EQ(made.book(1, 2, Side::kV)[32 * 16 - 1], HalfValue(half));
}

TEST(PqFile, EveryBitFlipOfTheHeadAndSomeOfTheRestAreErrors) {
  const std::vector<std::byte> valid = Small().Serialize();
  for (size_t bit = 0; bit < valid.size() * 8; bit += bit < 48 * 8 ? 1 : 1009) {
    std::vector<std::byte> bytes = valid;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    const auto parsed = PqCodebooks::Parse(bytes);
    ASSERT_FALSE(parsed.has_value()) << bit;
    EXPECT_NE(parsed.error().reason, Reason::kNone);
  }
}

TEST(PqFile, IsRefusedUnderAForgedChecksumToo) {
  const std::vector<std::byte> valid = Small().Serialize();
  const auto with = [&](size_t at, uint32_t value) {
    std::vector<std::byte> bytes = valid;
    std::memcpy(&bytes[at], &value, 4);
    return PqCodebooks::Parse(WithChecksum(bytes));
  };
  for (const size_t at : {8, 12, 16, 20}) {
    for (const uint32_t value : {0u, 1u, 17u, 64u, 512u, 513u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
      const auto parsed = with(at, value);
      ASSERT_FALSE(parsed.has_value()) << at << " " << value;
      EXPECT_EQ(parsed.error().code, Code::kCorrupt);
    }
  }
  EXPECT_THAT(with(48, 0x7e007e00).error().message, HasSubstr("not finite"));
  for (const size_t size : {0, 47, 48, 1000}) {
    EXPECT_FALSE(PqCodebooks::Parse(std::span(valid).first(static_cast<size_t>(size))).has_value());
  }
  std::vector<std::byte> next = valid;
  next[7] = std::byte{'2'};
  EXPECT_EQ(PqCodebooks::Parse(next).error().reason, Reason::kVersion);
}

TEST(PqFile, IsNotMadeOfWhatDoesNotFit) {
  EXPECT_FALSE(PqCodebooks::Make(kSmallShape, kModel, GaussianRows(12 * 32 * 16 - 1, 9)).has_value());
  std::vector<float> books = GaussianRows(12 * 32 * 16, 9);
  books[100] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(PqCodebooks::Make(kSmallShape, kModel, books).has_value());
  PqShape shape = kSmallShape;
  shape.n_centroids = 64;
  EXPECT_FALSE(PqCodebooks::Make(shape, kModel, GaussianRows(12 * 32 * 64, 9)).has_value());
}

}  // namespace
}  // namespace qkv
