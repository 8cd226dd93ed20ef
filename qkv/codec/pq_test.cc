// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/pq.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "hwy/highway.h"
#include "qkv/codec/half.h"
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

CodecId CodecWith(int n_centroids) {
  return n_centroids == 16 ? CodecId::kPq2 : CodecId::kPq4;
}

// FORMAT.md §3.7 read anew: one value after the other, nothing shared with the codec but the rounding to halves.
struct ByTheLetter {
  int code[32][128] = {};
  uint16_t scale[32] = {};
};
ByTheLetter EncodeByTheLetter(const float* rows, int tokens, int head_dim, const PqBook& book) {
  ByTheLetter result;
  const int pairs = head_dim / 2;
  for (int t = 0; t < tokens; ++t) {
    const float* x = rows + t * head_dim;
    float squares = 0;
    for (int c = 0; c < head_dim; ++c) squares += x[c] * x[c];
    const float rms = std::sqrt(squares / static_cast<float>(head_dim));
    float most = 0;
    for (const float f : {1.0f, 1.1f, 0.9f, 0.8f}) {
      const float h = FloatFromHalf(HalfFromFloat(f * rms / 32));
      if (h == 0) continue;
      int code[128];
      float products = 0, centroid_squares = 0;
      for (int m = 0; m < pairs; ++m) {
        const float u = x[m] * (1 / h), v = x[pairs + m] * (1 / h);
        code[m] = 0;
        float best = -std::numeric_limits<float>::infinity();
        for (int k = 0; k < book.n_centroids; ++k) {
          const float a = book.first[k], b = book.second[k];
          const float nearness = (u * a + v * b) - (a * a + b * b) / 2;
          if (nearness > best) best = nearness, code[m] = k;
        }
        const float a = book.first[code[m]], b = book.second[code[m]];
        products += x[m] * a;
        products += x[pairs + m] * b;
        centroid_squares += a * a + b * b;
      }
      const uint16_t stored = HalfFromFloat(products / centroid_squares);
      const float scale = FloatFromHalf(stored), gain = scale * (2 * products - scale * centroid_squares);
      if (!(gain > most)) continue;
      most = gain;
      result.scale[t] = stored;
      std::copy_n(code, pairs, result.code[t]);
    }
  }
  return result;
}

int CodeAt(const Block& block, Side side, int t, int m, int head_dim, int n_centroids) {
  const int i = side == Side::kK ? 64 * (m / 2) + 2 * t + m % 2 : head_dim * (t / 2) + 2 * m + t % 2;
  if (n_centroids == 256) return block.U8(static_cast<size_t>(i));
  return block.U8(static_cast<size_t>(64 * (i / 128) + i % 64)) >> (i / 64 % 2 * 4) & 15;
}

class Pq : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  const int head_dim_ = std::get<0>(GetParam());
  const int n_centroids_ = std::get<1>(GetParam());
  const size_t codes_bytes_ = static_cast<size_t>(head_dim_ * (n_centroids_ == 16 ? 8 : 16));
  const Codec& codec_ = CodecOf(CodecWith(n_centroids_));
  const PqCodebooks codebooks_ = TestCodebooks({1, 1, head_dim_});
  PqBook book(Side side) const { return codebooks_.book(codec_.id, 0, 0, side); }
};

INSTANTIATE_TEST_SUITE_P(Codec, Pq,
                         ::testing::Combine(::testing::Values(32, 48, 64, 80, 256), ::testing::Values(16, 256)));

TEST_P(Pq, EncodesAndDecodesByTheLetterOnEverySimdTarget) {
  ASSERT_EQ(codec_.block_bytes(head_dim_), codes_bytes_ + 64);
  for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1) {
    hwy::SetSupportedTargetsForTest(left & -left);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    for (const Side side : kSides) {
      for (const int tokens : {1, 17, 32}) {
        SCOPED_TRACE(fmt::format("{} {} tokens, K {}", hwy::TargetName(left & -left), tokens, side == Side::kK));
        std::vector<float> rows = GaussianRows(static_cast<size_t>(tokens * head_dim_), 2);
        for (size_t i = 0; i < rows.size(); ++i) rows[i] *= std::ldexp(1.0f, static_cast<int>(i / 32 % 7) - 3);
        const PqBook book = this->book(side);
        Block block(codec_.block_bytes(head_dim_));
        codec_.encode(side, rows.data(), tokens, head_dim_, block.get(), &book);
        ASSERT_TRUE(block.GuardIntact());
        std::vector<float> panel(static_cast<size_t>(32 * head_dim_));
        codec_.unpack(side, block.get(), head_dim_, panel.data(), &book);
        const ByTheLetter expected = EncodeByTheLetter(rows.data(), tokens, head_dim_, book);
        for (int t = 0; t < 32; ++t) {
          ASSERT_EQ(block.U16(codes_bytes_ + 2 * static_cast<size_t>(t)), expected.scale[t]) << t;
          for (int m = 0; m < head_dim_ / 2; ++m) {
            const int code = CodeAt(block, side, t, m, head_dim_, n_centroids_);
            ASSERT_EQ(code, expected.code[t][m]) << t << " " << m;
            for (const auto& [c, centroid] :
                 {std::pair(m, book.first[code]), std::pair(head_dim_ / 2 + m, book.second[code])}) {
              ASSERT_EQ(panel[static_cast<size_t>(side == Side::kK ? c * 32 + t : t * head_dim_ + c)],
                        static_cast<float>(HalfValue(expected.scale[t]) * centroid));
            }
          }
        }
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST_P(Pq, TakesNanAsZeroAndInfinityAsTheLargestHalfAndNothingAsNothing) {
  const PqBook book = this->book(Side::kK);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> special(static_cast<size_t>(head_dim_), std::nanf("")), plain(special.size(), 0.0f);
  special[1] = -kInf, plain[1] = -65504;
  special[20] = 1e30f, plain[20] = 65504;
  Block block(codec_.block_bytes(head_dim_)), expected(block.bytes);
  codec_.encode(Side::kK, special.data(), 1, head_dim_, block.get(), &book);
  codec_.encode(Side::kK, plain.data(), 1, head_dim_, expected.get(), &book);
  EXPECT_TRUE(block == expected);
  for (const float tiny : {0.0f, -0x1p-27f}) {
    const std::vector<float> rows(static_cast<size_t>(head_dim_), tiny);
    codec_.encode(Side::kV, rows.data(), 1, head_dim_, block.get(), &book);
    EXPECT_TRUE(std::all_of(block.get(), block.get() + block.bytes, [](std::byte b) { return b == std::byte{0}; }));
    std::vector<float> decoded(rows.size(), 1.0f);
    codec_.decode(Side::kV, block.get(), 1, head_dim_, decoded.data(), &book);
    for (const float x : decoded) ASSERT_EQ(std::bit_cast<uint32_t>(x), 0u);
  }
}

// Between what one scalar at the same bits leaves at best (Max 1960: 0.1175 and 0.009497) and what no code can go below
// (2^(-2 bits)), on rows that training has not seen. A row's own scale and the choice among four of them count as well:
// hence rows that are long.
TEST(PqQuality, BeatsTheBestScalarQuantizerOfAGaussian) {
  for (const auto& [n_centroids, scalar, bound] :
       {std::tuple(16, 0.1175, 0.0625), std::tuple(256, 0.009497, 0.00390625)}) {
    constexpr int kDim = 256, kBlocks = 12;
    const Codec& codec = CodecOf(CodecWith(n_centroids));
    const PqCodebooks codebooks = TestCodebooks({1, 1, kDim});
    const PqBook book = codebooks.book(codec.id, 0, 0, Side::kV);
    const std::vector<float> rows = GaussianRows(kBlocks * 32 * kDim, 4);
    std::vector<float> panel(32 * kDim);
    Block block(codec.block_bytes(kDim));
    double error = 0;
    for (int b = 0; b < kBlocks; ++b) {
      const float* from = rows.data() + b * 32 * kDim;
      codec.encode(Side::kV, from, 32, kDim, block.get(), &book);
      codec.unpack(Side::kV, block.get(), kDim, panel.data(), &book);
      for (size_t i = 0; i < panel.size(); ++i) error += std::pow(double{from[i]} - panel[i], 2);
    }
    const double mse = error / (kBlocks * 32 * kDim);
    std::printf("%d centroids: MSE %.4g (scalar %.4g)\n", n_centroids, mse, scalar);
    EXPECT_LT(mse, scalar);
    EXPECT_GT(mse, bound);
  }
}

TEST(PqTraining, FindsClustersThatAreThere) {
  std::mt19937_64 random(5);
  std::vector<float> points;
  for (int i = 0; i < 4000; ++i) {
    const uint64_t place = random() % 16;
    points.push_back(static_cast<float>(place % 4) - 2);
    points.push_back(static_cast<float>(place / 4) - 2);
  }
  const std::vector<int8_t> book = TrainPq(points, 16).value();
  std::vector<std::pair<int, int>> found, expected;
  for (size_t k = 0; k < 16; ++k) {
    found.emplace_back(book[k], book[16 + k]);
    expected.emplace_back(32 * (static_cast<int>(k % 4) - 2), 32 * (static_cast<int>(k / 4) - 2));
  }
  EXPECT_THAT(found, ::testing::UnorderedElementsAreArray(expected));
}

TEST(PqTraining, IsTheSameEveryTimeAndLeavesOutWhatIsNotFinite) {
  std::vector<float> points = GaussianRows(2 * 700, 6);
  const auto book = TrainPq(points, 16);
  EXPECT_EQ(TrainPq(points, 16).value(), *book);
  points.insert(points.end(), {std::nanf(""), 0.0f, 1.0f, std::numeric_limits<float>::infinity()});
  EXPECT_EQ(TrainPq(points, 16).value(), *book);
}

TEST(PqTraining, StaysWithinTheRangeOfABook) {
  std::vector<float> points = GaussianRows(2 * 700, 7);
  for (int i = 0; i < 200; ++i) points[static_cast<size_t>(i)] = i % 2 == 0 ? 1e6f : -1e6f;
  const std::vector<int8_t> book = TrainPq(points, 16).value();
  EXPECT_THAT(book, ::testing::Each(::testing::AllOf(::testing::Ge(-127), ::testing::Le(127))));
  EXPECT_THAT(book, ::testing::Contains(127));
}

TEST(PqTraining, RefusesTooFewPoints) {
  const auto book = TrainPq(GaussianRows(2 * 1023, 7), 256);
  ASSERT_FALSE(book.has_value());
  EXPECT_EQ(book.error().code, Code::kInvalidArgument);
  EXPECT_THAT(book.error().message, HasSubstr("from 1023 pairs of values, expected at least 1024"));
  EXPECT_EQ(TrainPq({}, 16).error().code, Code::kInvalidArgument);
}

// ---- the file ----

constexpr PqShape kSmallShape{.n_layers = 2, .n_kv_heads = 3, .head_dim = 32};
constexpr std::array<uint8_t, 16> kModel = {1, 2, 3};
constexpr size_t kSmallBytes = 12 * 544;

std::vector<int8_t> SomeCentroids() {
  std::mt19937_64 random(8);
  std::vector<int8_t> centroids(kSmallBytes);
  for (int8_t& x : centroids) x = static_cast<int8_t>(static_cast<int>(random() % 255) - 127);
  return centroids;
}

PqCodebooks Small() {
  return PqCodebooks::Make(kSmallShape, kModel, SomeCentroids()).value();
}

std::vector<std::byte> WithChecksum(std::vector<std::byte> bytes) {
  std::memset(&bytes[40], 0, 8);
  const uint64_t checksum = XXH3_64bits(bytes.data(), bytes.size());
  std::memcpy(&bytes[40], &checksum, 8);
  return bytes;
}

TEST(PqFile, ParsesToWhatWasMadeWithEveryBookInItsPlace) {
  const PqCodebooks made = Small();
  const std::vector<std::byte> bytes = made.Serialize();
  ASSERT_EQ(bytes.size(), 48 + kSmallBytes);
  const PqCodebooks parsed = PqCodebooks::Parse(bytes).value();
  EXPECT_EQ(parsed.shape(), kSmallShape);
  EXPECT_EQ(parsed.model_digest(), kModel);
  EXPECT_EQ(parsed.digest(), made.digest());
  EXPECT_EQ(parsed.digest().size(), 32u);
  const std::vector<int8_t> all = SomeCentroids();
  size_t at = 0;
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 3; ++head) {
      for (const Side side : kSides) {
        for (const int n : {256, 16}) {
          const PqBook book = parsed.book(CodecWith(n), layer, head, side);
          ASSERT_EQ(book.n_centroids, n);
          for (const int8_t* coordinates : {book.first, book.second}) {
            for (int k = 0; k < n; ++k) {
              EXPECT_EQ(coordinates[k], all[at]);
              EXPECT_EQ(static_cast<uint8_t>(all[at]), std::to_integer<uint8_t>(bytes[48 + at]));
              ++at;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(at, kSmallBytes);
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
    for (const uint32_t value : {1u, 17u, 512u, 513u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
      const auto parsed = with(at, value);
      ASSERT_FALSE(parsed.has_value()) << at << " " << value;
      EXPECT_EQ(parsed.error().code, Code::kCorrupt);
    }
  }
  EXPECT_THAT(with(48, 0x01800101).error().message, HasSubstr("-128"));
  for (const size_t size : {0, 47, 48, 1000}) {
    EXPECT_FALSE(PqCodebooks::Parse(std::span(valid).first(static_cast<size_t>(size))).has_value());
  }
  std::vector<std::byte> next = valid;
  next[7] = std::byte{'2'};
  EXPECT_EQ(PqCodebooks::Parse(next).error().reason, Reason::kVersion);
}

TEST(PqFile, IsNotMadeOfWhatDoesNotFit) {
  std::vector<int8_t> centroids = SomeCentroids();
  centroids.pop_back();
  EXPECT_FALSE(PqCodebooks::Make(kSmallShape, kModel, centroids).has_value());
  centroids.push_back(-128);
  EXPECT_FALSE(PqCodebooks::Make(kSmallShape, kModel, centroids).has_value());
  EXPECT_FALSE(PqCodebooks::Make({2, 3, 40}, kModel, SomeCentroids()).has_value());
}

}  // namespace
}  // namespace qkv
