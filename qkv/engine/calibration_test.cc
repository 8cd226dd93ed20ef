// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/calibration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "tests/tiny_model_fixture.h"

namespace qkv {
namespace {

using ::qkv::testing::TinyModel;
using ::testing::HasSubstr;

constexpr Geometry kGeometry = {.n_layers = 2, .n_kv_heads = 2, .head_dim = 32};
constexpr int kHeads = 4;

// Rows whose channels depend on each other: x = M n for normal n, M near the identity (no direction is without energy),
// another one per head.
std::vector<float> Correlated(int n, int heads, int seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const int d = kGeometry.head_dim;
  std::vector<float> mix(static_cast<size_t>(heads) * d * d), rows(static_cast<size_t>(n) * heads * d, 0.0f);
  for (size_t i = 0; i < mix.size(); ++i) {
    const bool diagonal = i / static_cast<size_t>(d) % static_cast<size_t>(d) == i % static_cast<size_t>(d);
    mix[i] = normal(random) / 10 + (diagonal ? 1.0f : 0.0f);
  }
  for (int i = 0; i < n; ++i) {
    for (int h = 0; h < heads; ++h) {
      for (int j = 0; j < d; ++j) {
        const float x = normal(random);
        for (int c = 0; c < d; ++c) rows[(static_cast<size_t>(i) * heads + h) * d + c] += mix[(h * d + c) * d + j] * x;
      }
    }
  }
  return rows;
}

struct Data {
  std::vector<float> k, q;  // of layer 1
  Calibration calibration;
};
Data MakeData() {
  constexpr int kTokens = 400;
  BalanceStatistics statistics(kGeometry, kHeads);
  Data data;
  for (int layer = 0; layer < 2; ++layer) {
    data.k = Correlated(kTokens, kGeometry.n_kv_heads, 10 + layer);
    data.q = Correlated(kTokens, kHeads, 20 + layer);
    for (int done = 0; done < kTokens; done += 100) {  // in batches, as Forward gives them
      const auto part = [&](const std::vector<float>& rows, int heads) {
        const size_t row = static_cast<size_t>(heads) * kGeometry.head_dim;
        return std::span(rows).subspan(done * row, 100 * row);
      };
      statistics.Add(RowKind::kK, layer, done, 100, part(data.k, kGeometry.n_kv_heads));
      statistics.Add(RowKind::kQ, layer, done, 100, part(data.q, kHeads));
    }
  }
  EXPECT_EQ(statistics.n_keys(), kTokens - 1);
  auto calibration = Calibration::Compute(statistics);
  EXPECT_TRUE(calibration) << calibration.error().message;
  data.calibration = *std::move(calibration);
  return data;
}

std::vector<double> Times(std::span<const float> matrix, const float* x) {
  const int d = kGeometry.head_dim;
  std::vector<double> y(d, 0.0);
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) y[i] += static_cast<double>(matrix[i * d + j]) * x[j];
  }
  return y;
}

TEST(Calibration, ScoresStayWhatTheyAre) {
  const Data data = MakeData();
  const Calibration bands = data.calibration.ForBands();
  EXPECT_NE(bands.digest(), data.calibration.digest());
  const int d = kGeometry.head_dim;
  for (const Calibration* calibration : {&data.calibration, &bands}) {
    for (int i = 0; i < 50; ++i) {
      for (int h = 0; h < kHeads; ++h) {
        const int kv_head = h / 2;
        const float* q = data.q.data() + (static_cast<size_t>(i) * kHeads + h) * d;
        const float* k = data.k.data() + (static_cast<size_t>(i + 7) * 2 + kv_head) * d;
        const auto turned_q = Times(calibration->query_matrix(1, kv_head), q);
        const auto turned_k = Times(calibration->key_matrix(1, kv_head), k);
        double expected = 0, actual = 0, size = 0;
        for (int c = 0; c < d; ++c) {
          expected += static_cast<double>(q[c]) * k[c];
          actual += turned_q[c] * turned_k[c];
          size += std::abs(turned_q[c] * turned_k[c]);
        }
        EXPECT_NEAR(actual, expected, 1e-5 * size);
      }
    }
  }
}

TEST(Calibration, ForTwoBandsBothHalvesOfTheKeysFillOneRange) {
  const Data data = MakeData();
  const Calibration bands = data.calibration.ForBands();
  const int d = kGeometry.head_dim;
  for (int kv_head = 0; kv_head < kGeometry.n_kv_heads; ++kv_head) {
    const auto deviation = [&](const Calibration& calibration, int first_channel) {
      double sum = 0;
      std::vector<double> mean(d, 0.0), square(d, 0.0);
      const int n = 399;
      for (int i = 1; i <= n; ++i) {
        const float* k = data.k.data() + (static_cast<size_t>(i) * kGeometry.n_kv_heads + kv_head) * d;
        const auto y = Times(calibration.key_matrix(1, kv_head), k);
        for (int c = 0; c < d; ++c) mean[c] += y[c] / n, square[c] += y[c] * y[c] / n;
      }
      for (int c = first_channel; c < first_channel + d / 2; ++c) sum += square[c] - mean[c] * mean[c];
      return std::sqrt(sum);
    };
    EXPECT_NEAR(deviation(bands, d / 2) / deviation(bands, 0), 1.15, 0.02);
    EXPECT_EQ(deviation(bands, 0), deviation(data.calibration, 0));
    EXPECT_LT(deviation(data.calibration, d / 2), deviation(data.calibration, 0));
  }
}

// Balanced: what keys and queries spend on a direction is the same, and no two directions depend on each other.
TEST(Calibration, KeysAndQueriesHaveOneDiagonalCovarianceAfterwards) {
  const Data data = MakeData();
  const int d = kGeometry.head_dim;
  const int kv_head = 1;
  std::vector<double> kk(d * d, 0.0), qq(d * d, 0.0), mean(d, 0.0);
  const int n = 399;
  for (int i = 1; i <= n; ++i) {
    const auto y =
        Times(data.calibration.key_matrix(1, kv_head), data.k.data() + (static_cast<size_t>(i) * 2 + kv_head) * d);
    for (int a = 0; a < d; ++a) {
      mean[a] += y[a] / n;
      for (int b = 0; b < d; ++b) kk[a * d + b] += y[a] * y[b] / n;
    }
  }
  for (int i = 0; i < 400; ++i) {
    for (int h = 2; h < 4; ++h) {
      const auto y =
          Times(data.calibration.query_matrix(1, kv_head), data.q.data() + (static_cast<size_t>(i) * kHeads + h) * d);
      for (int a = 0; a < d; ++a) {
        for (int b = 0; b < d; ++b) qq[a * d + b] += y[a] * y[b] / 800;
      }
    }
  }
  const double ratio = qq[0] / (kk[0] - mean[0] * mean[0]);
  for (int a = 0; a < d; ++a) {
    for (int b = 0; b < d; ++b) {
      const double k = kk[a * d + b] - mean[a] * mean[b];
      const double size_k = std::sqrt(kk[a * d + a] * kk[b * d + b]), size_q = std::sqrt(qq[a * d + a] * qq[b * d + b]);
      if (a == b) {
        EXPECT_NEAR(qq[a * d + a] / k / ratio, 1, 0.05) << a;
      } else {
        EXPECT_LT(std::abs(k) / size_k, 0.05) << a << " " << b;
        EXPECT_LT(std::abs(qq[a * d + b]) / size_q, 0.05) << a << " " << b;
      }
    }
  }
}

TEST(Calibration, TooFewTokensMakeNoCovariance) {
  BalanceStatistics statistics(kGeometry, kHeads);
  const auto k = Correlated(100, 2, 1);
  statistics.Add(RowKind::kK, 0, 0, 100, k);
  const auto calibration = Calibration::Compute(statistics);
  ASSERT_FALSE(calibration);
  EXPECT_EQ(calibration.error().code, Code::kInvalidArgument);
  EXPECT_THAT(calibration.error().message, HasSubstr("99 tokens are too few"));
}

class CalibrationFile : public testing::TinyModelTest {
 protected:
  static std::string Bytes(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
};

TEST_F(CalibrationFile, IsReadAsItWasWrittenByItsModelOnly) {
  const auto model = Load({});
  const auto made = Calibrate(model, SomeTokens(600), 200, 1);
  ASSERT_TRUE(made) << made.error().message;
  const std::string path = Calibration::PathFor(*model);
  EXPECT_THAT(path, HasSubstr(model->identity().weights_digest()));
  const auto missing = Calibration::Read(*model, path);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_THAT(missing.error().message, HasSubstr("qkvshare calibrate"));
  ASSERT_TRUE(made->Write(*model, path));
  const auto read = Calibration::Read(*model, path);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->digest(), made->digest());
  for (int layer = 0; layer < 2; ++layer) {
    EXPECT_TRUE(std::ranges::equal(read->key_matrix(layer, 1), made->key_matrix(layer, 1)));
    EXPECT_TRUE(std::ranges::equal(read->query_matrix(layer, 1), made->query_matrix(layer, 1)));
  }
  const auto other = Calibration::Read(*Load({.weights_seed = 2}), path);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, Code::kIncompatible);
}

TEST_F(CalibrationFile, DamageIsFound) {
  const auto model = Load({});
  const auto made = Calibrate(model, SomeTokens(600), 200, 1);
  ASSERT_TRUE(made) << made.error().message;
  const std::string path = dir_.path() + "/calibration";
  ASSERT_TRUE(made->Write(*model, path));
  const std::string whole = Bytes(path);
  for (size_t at = 0; at < whole.size(); at += at < 64 ? 1 : 997) {
    std::string bytes = whole;
    bytes[at] ^= 0x10;
    std::ofstream(path, std::ios::binary) << bytes;
    EXPECT_FALSE(Calibration::Read(*model, path)) << at;
  }
  for (const size_t size : {size_t{0}, size_t{10}, size_t{64}, whole.size() - 1}) {
    std::ofstream(path, std::ios::binary) << whole.substr(0, size);
    EXPECT_FALSE(Calibration::Read(*model, path)) << size;
  }
  std::ofstream(path, std::ios::binary) << whole << "x";
  EXPECT_FALSE(Calibration::Read(*model, path));
}

TEST_F(CalibrationFile, NothingIsLeftWhereItCannotBeWritten) {
  const auto model = Load({});
  const auto made = Calibrate(model, SomeTokens(600), 200, 1);
  ASSERT_TRUE(made) << made.error().message;
  const std::string folder = dir_.path() + "/folder";
  std::filesystem::create_directory(folder);
  std::filesystem::create_directory(folder + "/taken");  // cannot be replaced by a file
  EXPECT_FALSE(made->Write(*model, folder + "/taken"));
  EXPECT_FALSE(made->Write(*model, folder + "/missing/x"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
}

// A sequence whose keys stand multiplied by the matrices.
class Balanced : public CalibrationFile {
 protected:
  void SetUp() override {
    model_ = Load({.q_scale = 16});
    auto made = Calibrate(model_, SomeTokens(600), 200, 1);
    ASSERT_TRUE(made) << made.error().message;
    calibration_ = std::make_shared<const Calibration>(*std::move(made));
  }
  std::unique_ptr<Sequence> NewSequence(std::string_view kv, std::shared_ptr<const Calibration> calibration) {
    SequenceOptions options;
    options.n_ctx = 256;
    options.n_threads = 1;
    options.kv = *ParseCodecPair(kv);
    options.calibration = std::move(calibration);
    auto sequence = Sequence::Create(model_, options);
    EXPECT_TRUE(sequence) << sequence.error().message;
    return *std::move(sequence);
  }
  std::shared_ptr<const Model> model_;
  std::shared_ptr<const Calibration> calibration_;
};

TEST_F(Balanced, TheAnswerIsWhatItWasWithoutTheMatrices) {
  const auto plain = NewSequence("f16", nullptr), balanced = NewSequence("f16", calibration_);
  ASSERT_TRUE(plain->Forward(SomeTokens(100)));
  ASSERT_TRUE(balanced->Forward(SomeTokens(100)));
  float largest = 0, difference = 0;
  for (size_t i = 0; i < plain->logits().size(); ++i) {
    largest = std::max(largest, std::abs(plain->logits()[i]));
    difference = std::max(difference, std::abs(plain->logits()[i] - balanced->logits()[i]));
  }
  EXPECT_LT(difference, 0.01f * largest);
  EXPECT_GT(difference, 0.0f) << "the matrices were not used";
}

TEST_F(Balanced, ProducerAndReaderGoOnBitForBit) {
  for (const char* kv : {"i8", "5", "k=5,v=4", "4+4", "k=5/3,v=4", "k=5/3,v=4,+4"}) {
    const auto producer = NewSequence(kv, calibration_), reader = NewSequence(kv, calibration_);
    ASSERT_TRUE(producer->Forward(SomeTokens(70)));
    const auto context = producer->Publish({});
    ASSERT_TRUE(context) << context.error().message;
    const bool bands = std::string_view(kv).starts_with("k=5/3");
    EXPECT_EQ(context->card.model().calibration_digest(),
              bands ? calibration_->ForBands().digest_text() : calibration_->digest_text());
    ASSERT_TRUE(reader->Attach(*context));
    const std::vector<Token> more = {5, 6, 7};
    ASSERT_TRUE(producer->Forward(more));
    ASSERT_TRUE(reader->Forward(more));
    EXPECT_TRUE(std::ranges::equal(producer->logits(), reader->logits())) << kv;
  }
}

TEST_F(Balanced, TwoBandsNeedACalibrationAndReadersOfTwoBands) {
  SequenceOptions options;
  options.n_threads = 1;
  options.kv = *ParseCodecPair("k=5/3,v=4");
  const auto without = Sequence::Create(model_, options);
  ASSERT_FALSE(without);
  EXPECT_EQ(without.error().code, Code::kInvalidArgument);
  EXPECT_THAT(without.error().message, HasSubstr("keys in codec 5/3 need the matrices of 'qkvshare calibrate'"));
  // Their keys stand in another scale than those of the other codecs.
  for (const auto& [writes, reads] : {std::pair{"k=5/3,v=4", "5"}, {"5", "k=5/3,v=4"}}) {
    const auto producer = NewSequence(writes, calibration_);
    ASSERT_TRUE(producer->Forward(SomeTokens(70)));
    const auto context = producer->Publish({});
    ASSERT_TRUE(context) << context.error().message;
    const Status attached = NewSequence(reads, calibration_)->Attach(*context);
    ASSERT_FALSE(attached) << writes;
    EXPECT_THAT(attached.error().message, HasSubstr("calibration_digest"));
  }
}

TEST_F(Balanced, NobodyElseCanReadIt) {
  const auto producer = NewSequence("5", calibration_);
  ASSERT_TRUE(producer->Forward(SomeTokens(70)));
  const auto context = producer->Publish({});
  ASSERT_TRUE(context) << context.error().message;
  const Status plain = NewSequence("5", nullptr)->Attach(*context);
  ASSERT_FALSE(plain);
  EXPECT_EQ(plain.error().reason, Reason::kModelMismatch);
  EXPECT_THAT(plain.error().message, HasSubstr("calibration_digest"));

  auto other = Calibrate(model_, SomeTokens(500), 250, 1);
  ASSERT_TRUE(other);
  EXPECT_FALSE(NewSequence("5", std::make_shared<const Calibration>(*std::move(other)))->Attach(*context));

  const auto splicing = NewSequence("5", calibration_);
  ASSERT_TRUE(splicing->Forward(SomeTokens(10)));
  const SpliceSource source{.context = &*context};
  const auto spliced = splicing->Splice({&source, 1}, {});
  ASSERT_FALSE(spliced);
  EXPECT_EQ(spliced.error().reason, Reason::kCodecUnsupported);
}

TEST_F(CalibrationFile, ThreeTokensAreTooFew) {
  const auto made = Calibrate(Load({}), SomeTokens(3), 200, 1);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, Code::kInvalidArgument);
}

}  // namespace
}  // namespace qkv
