// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Sequences with pages of the rotated codecs: their constants and their refinement planes. Handing over between
// processes is tests/handoff_exact_test.cc.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "qkv/codec/half.h"
#include "qkv/engine/page_encoder.h"
#include "qkv/engine/peer.h"
#include "qkv/engine/quality.h"
#include "qkv/engine/sequence.h"
#include "qkv/engine/test_support.h"
#include "qkv/segment/test_support.h"

namespace qkv {
namespace {

using testing::Checksums;
using ::testing::HasSubstr;
using testing::Logits;
using testing::NewSequence;
using testing::PublishedBy;
using testing::Read;
using testing::SourceTokens;
using testing::TestModel;
using testing::TestModelPath;

CodecPair Pair(const std::string& text) {
  const auto pair = ParseCodecPair(text);
  EXPECT_TRUE(pair) << pair.error().message;
  return *pair;
}

Context PublishedF16(std::span<const Token> tokens) {
  auto sequence = NewSequence("f16");
  Read(*sequence, tokens);
  return PublishedBy(*sequence);
}

// Mean KL of logits [rows][n_vocab].
double MeanKl(std::span<const float> exact, std::span<const float> other, int n_vocab) {
  const ReferenceLogits reference({exact.begin(), exact.end()}, n_vocab);
  return reference.ScoreAll(other, std::vector<Token>(reference.rows())).kl_mean();
}

// Of the weights as fp32: with quantized ones ggml rounds activations to 8 bits, and that noise is larger than what is
// to be seen here.
std::shared_ptr<const Model> Fp32Model() {
  static const auto model = []() -> std::shared_ptr<const Model> {
    const std::string path = ::testing::TempDir() + "qkv-progressive-f32.gguf";
    EXPECT_TRUE(WriteRequantizedModel(TestModelPath(), "f32", path));
    auto loaded = Model::Load(path);
    std::remove(path.c_str());  // it has it mapped
    EXPECT_TRUE(loaded) << loaded.error().message;
    return loaded ? *loaded : nullptr;
  }();
  return model;
}

TEST(Progressive, AConsumerGoesOnBitForBitAsTheProducerDoes) {
  for (const std::string kv : {"8", "k=6,v=5", "4", "k=4,v=3", "4+4", "k=3,v=3,+4", "k=4,v=i8"}) {
    for (const size_t n : {1, 33, 100}) {
      SCOPED_TRACE(kv + ", " + std::to_string(n) + " tokens");
      auto producer = NewSequence(kv);
      Read(*producer, SourceTokens(50, n));
      const Context context = PublishedBy(*producer);
      auto consumer = NewSequence(kv);
      ASSERT_TRUE(consumer->Attach(context));
      Read(*producer, {});
      Read(*consumer, {});
      EXPECT_EQ(Logits(*consumer), Logits(*producer));
      // Far enough that both write pages, with constants of their own.
      Read(*producer, SourceTokens(300, 80));
      Read(*consumer, SourceTokens(300, 80));
      Read(*producer, SourceTokens(900, 9));
      Read(*consumer, SourceTokens(900, 9));
      EXPECT_EQ(Logits(*consumer), Logits(*producer));
      EXPECT_EQ(Checksums(PublishedBy(*consumer)), Checksums(PublishedBy(*producer)));
    }
  }
}

TEST(Progressive, RotatedPagesBehindPlainOnesAreReadByWhoeverGoesOn) {
  auto plain = NewSequence("i8");
  Read(*plain, SourceTokens(0, 70));
  const Context parent = PublishedBy(*plain);
  auto middle = NewSequence("4");
  ASSERT_TRUE(middle->Attach(parent));
  Read(*middle, SourceTokens(300, 50));
  const Context context = PublishedBy(*middle);
  EXPECT_EQ(context.card.format().rotation(), "hadamard");
  EXPECT_EQ(parent.card.format().rotation(), "none");
  auto last = NewSequence("4");
  ASSERT_TRUE(last->Attach(context));
  for (Sequence* sequence : {middle.get(), last.get()}) {
    Read(*sequence, SourceTokens(500, 64));
    Read(*sequence, SourceTokens(700, 9));
  }
  EXPECT_EQ(Logits(*last), Logits(*middle));
  EXPECT_EQ(Checksums(PublishedBy(*last)), Checksums(PublishedBy(*middle)));
}

// How far the mean of a segment's keys is from the mean in `constants`, squared, as a share of their variance around
// it.
double OffMean(const Segment& segment, const std::byte* constants) {
  const Geometry& geometry = segment.geometry();
  const ConstantsLayout layout(geometry);
  std::vector<float> rows(static_cast<size_t>(kPageTokens) * geometry.head_dim), mean(geometry.head_dim);
  double off = 0, variance = 0;
  for (int layer = 0; layer < geometry.n_layers; ++layer) {
    for (int head = 0; head < geometry.n_kv_heads; ++head) {
      std::vector<double> sum(geometry.head_dim), squares(geometry.head_dim);
      int n = 0;
      for (int c = 0; c < geometry.head_dim; ++c) {
        uint16_t half;
        std::memcpy(&half, constants + layout.Offset(layer, head, Constant::kMeanK) + 2 * c, sizeof half);
        mean[c] = FloatFromHalf(half);
      }
      for (size_t page = 0; page < segment.pages().size(); ++page) {
        const int tokens = segment.pages()[page].tokens;
        PlainRows(segment, page, nullptr, Side::kK, layer, head, tokens, rows.data());
        n += tokens;
        for (int i = 0; i < tokens * geometry.head_dim; ++i) {
          const double from_mean = rows[i] - mean[i % geometry.head_dim];
          sum[i % geometry.head_dim] += from_mean;
          squares[i % geometry.head_dim] += from_mean * from_mean;
        }
      }
      for (int c = 0; c < geometry.head_dim; ++c) {
        off += sum[c] / n * sum[c] / n;
        variance += squares[c] / n;
      }
    }
  }
  return off / variance;
}

TEST(Progressive, KeysOfAReaderAreCodedAroundTheirOwnMean) {
  auto producer = NewSequence("4");
  Read(*producer, SourceTokens(0, 200));
  const Context parent = PublishedBy(*producer);
  auto reader = NewSequence("4");
  ASSERT_TRUE(reader->Attach(parent));
  Read(*reader, SourceTokens(900, 64));
  const Context context = PublishedBy(*reader);
  ASSERT_EQ(context.segments.size(), 2u);
  const Segment& own = *context.segments[1];
  EXPECT_LT(OffMean(own, own.constants()), 1e-3);
  EXPECT_GT(OffMean(own, parent.segments[0]->constants()), 1e-2);
}

TEST(Progressive, WhatWasTruncatedAwayLeavesNoConstantsBehind) {
  auto fresh = NewSequence("4+4");
  Read(*fresh, SourceTokens(400, 90));
  const auto wanted = Checksums(PublishedBy(*fresh));
  auto used = NewSequence("4+4");
  Read(*used, SourceTokens(0, 200));
  PublishedBy(*used);
  Read(*used, SourceTokens(600, 100));  // in a segment that is open
  ASSERT_TRUE(used->Truncate(0));
  Read(*used, SourceTokens(400, 90));
  EXPECT_EQ(Checksums(PublishedBy(*used)), wanted);
  // And what stays keeps them.
  Read(*used, SourceTokens(0, 64));
  ASSERT_TRUE(used->Truncate(90));
  Read(*used, SourceTokens(800, 40));
  Read(*fresh, SourceTokens(800, 40));
  EXPECT_EQ(Checksums(PublishedBy(*used)), Checksums(PublishedBy(*fresh)));
}

TEST(Progressive, WithoutRefinementPagesAreThoseOfTheBaseAlone) {
  auto base = NewSequence("4");
  auto unrefined = NewSequence("4+4", {.refine = 0});
  auto refined = NewSequence("4+4");
  for (Sequence* sequence : {base.get(), unrefined.get(), refined.get()}) {
    Read(*sequence, SourceTokens(20, 200));
    PublishedBy(*sequence);
    Read(*sequence, SourceTokens(700, 30));
  }
  EXPECT_EQ(Logits(*unrefined), Logits(*base));
  EXPECT_NE(Logits(*refined), Logits(*base));
  EXPECT_EQ(unrefined->stats().keys_refined, 0u);
  EXPECT_EQ(unrefined->stats().read_bits(), 4.25);
  EXPECT_EQ(base->stats().stored_bits, 4.25);
}

TEST(Progressive, CountsWhatWasRefinedAndWhatWasReadForIt) {
  double share_before = 0;
  for (const double tau : {0.3, 0.01, 1e-30}) {
    auto sequence = NewSequence("4+4", {.refine = tau});
    Read(*sequence, SourceTokens(20, 200));
    PublishedBy(*sequence);
    Read(*sequence, {});
    const Token token = SourceTokens(220, 1).front();
    for (int i = 0; i < 4; ++i) Read(*sequence, {&token, 1});
    const Sequence::Stats& stats = sequence->stats();
    // 5 steps over 199 keys in refinable pages, each by 30 layers and 3 KV heads; the last one is read again.
    EXPECT_EQ(stats.keys_with_refinement, 90u * 5 * 199) << tau;
    EXPECT_GT(stats.refined_share(), share_before);
    share_before = stats.refined_share();
    EXPECT_EQ(stats.stored_bits, 8.5);
    EXPECT_DOUBLE_EQ(stats.read_bits(), 4.25 + 4.25 * stats.refined_share());
  }
  EXPECT_GT(share_before, 0.95);  // a weight of 1e-30 of the largest is reached by nearly all
}

TEST(Progressive, ErrorsFallWithBitsAndWithRefinement) {
  const auto model = Fp32Model();
  const std::vector<Token> prefix = SourceTokens(100, 300), text = SourceTokens(400, 40);
  const auto logits = [&](const std::string& kv, double refine = kDefaultRefine) {
    auto sequence = NewSequence(kv, {.refine = refine}, model);
    Read(*sequence, prefix);
    PublishedBy(*sequence);
    sequence->KeepAllLogits(true);
    Read(*sequence, text);
    return std::vector<float>(sequence->all_logits().begin(), sequence->all_logits().end());
  };
  const std::vector<float> exact = logits("f16");
  const auto kl = [&](const std::string& kv, double refine = kDefaultRefine) {
    const double value = MeanKl(exact, logits(kv, refine), model->params().n_vocab);
    ::testing::Test::RecordProperty("kl_" + kv, std::to_string(value));
    std::printf("kv %s, refine %g: KL %.2e\n", kv.c_str(), refine, value);
    return value;
  };
  const double kl_8 = kl("8"), kl_i8 = kl("i8"), kl_5 = kl("k=5,v=4"), kl_4 = kl("4"), kl_i4 = kl("i4");
  EXPECT_LT(kl_8, 1e-4);
  EXPECT_LT(kl_8, kl_i8);
  EXPECT_LT(kl_5, kl_4);
  EXPECT_LT(kl_4, kl_i4 / 2);
  const double kl_refined = kl("4+4");
  EXPECT_LT(kl_refined, kl_4 / 5);
  EXPECT_LT(kl("4+4", 1e-4), kl_refined);
}

TEST(Progressive, PagesThatCouldNotBeSealedAreReadOnAndSealedLater) {
  const std::vector<Token> tokens = SourceTokens(60, 100);
  const auto with_three_pages_written = [&] {
    auto sequence = NewSequence("4+4");
    Read(*sequence, tokens);
    Read(*sequence, {});  // which waits for them
    return sequence;
  };
  auto untroubled = with_three_pages_written();
  std::vector<uint64_t> sums = Checksums(PublishedBy(*untroubled));
  Read(*untroubled, {});
  for (const size_t plane : {0, 1}) {
    SCOPED_TRACE(plane == 0 ? "base" : "refinement");
    auto producer = with_three_pages_written();
    {
      const std::vector<Fd> open = test::WritableSegmentDescriptors();
      ASSERT_EQ(open.size(), 2u);
      const Mapping writable = test::Take(Mapping::Map(open[plane], Mapping::Access::kReadWrite, 0, 4096));
      EXPECT_FALSE(producer->Publish({}));
      Read(*producer, {});
      EXPECT_EQ(Logits(*producer), Logits(*untroubled));
    }
    std::vector<uint64_t> later = Checksums(PublishedBy(*producer));
    later.resize(6);  // of the three pages; who could not seal goes on with the old constants
    sums.resize(6);
    EXPECT_EQ(later, sums);
  }
}

TEST(Progressive, WhatCouldNotBeEncodedLeavesTheTokensThatWereThere) {
  std::vector<Token> first = SourceTokens(60, 100);
  const std::vector<Token> second = SourceTokens(300, 20), third = SourceTokens(500, 20);
  auto untroubled = NewSequence("4+4"), troubled = NewSequence("4+4");
  Read(*untroubled, first);
  Read(*untroubled, second);  // pages take their places behind it
  Read(*untroubled, third);

  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit tight{.rlim_cur = 0, .rlim_max = limit.rlim_max};  // no descriptor for a segment
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  const Status read = troubled->Forward(first), read_more = troubled->Forward(second);
  const Status failed = troubled->Forward(third), again = troubled->Forward(third);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_TRUE(read && read_more);
  ASSERT_FALSE(failed);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, Code::kExhausted) << again.error().message;
  first.insert(first.end(), second.begin(), second.end());
  EXPECT_EQ(troubled->tokens(), first);

  Read(*troubled, third);
  EXPECT_EQ(Logits(*troubled), Logits(*untroubled));
  EXPECT_EQ(Checksums(PublishedBy(*troubled)), Checksums(PublishedBy(*untroubled)));
}

TEST(Progressive, AReadingThatFailsBehindItsFirstStepIsTakenBack) {
  // Pages are settled at every step of a reading, and handing over leaves no segment open.
  const SequenceOptions options{.n_batch = 32, .tail_budget_bytes = 0};
  const std::vector<Token> first = SourceTokens(60, 64), second = SourceTokens(300, 96);
  auto untroubled = NewSequence("4+4", options), troubled = NewSequence("4+4", options);
  for (Sequence* sequence : {untroubled.get(), troubled.get()}) {
    Read(*sequence, first);
    PublishedBy(*sequence);
  }
  Read(*untroubled, second);

  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit tight{.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  const Status failed = troubled->Forward(second);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_FALSE(failed);
  EXPECT_EQ(troubled->tokens(), first);

  Read(*troubled, second);
  EXPECT_EQ(Logits(*troubled), Logits(*untroubled));
  EXPECT_EQ(Checksums(PublishedBy(*troubled)), Checksums(PublishedBy(*untroubled)));
}

TEST(Progressive, WithoutRefiningThePagesAreStillStoredWithBothPlanes) {
  auto sequence = NewSequence("4+4", {.refine = 0});
  Read(*sequence, SourceTokens(0, 100));
  const auto expect_both = [&] {
    EXPECT_EQ(sequence->stats().base_bits, 4.25);
    EXPECT_EQ(sequence->stats().stored_bits, 8.5);
    EXPECT_EQ(sequence->stats().read_bits(), 4.25);
  };
  Read(*sequence, {});
  expect_both();
  const Context context = PublishedBy(*sequence);
  expect_both();
  ASSERT_TRUE(sequence->Attach(context));
  expect_both();
}

TEST(Progressive, ABudgetOfNothingReadsPagesFromTheSecondBatchOn) {
  SequenceOptions options{.n_batch = 32, .tail_budget_bytes = 0};
  auto sequence = NewSequence("4", options);
  Read(*sequence, SourceTokens(0, 128));
  EXPECT_EQ(sequence->stats().own_kv_bytes, 3 * PageLayout(TestModel()->geometry(), Pair("4")).bytes);
  EXPECT_EQ(sequence->stats().tail_bytes, PageLayout(TestModel()->geometry(), Pair("f16")).bytes);
  auto exact = NewSequence("4", {.n_batch = 32});
  Read(*exact, SourceTokens(0, 128));
  EXPECT_EQ(exact->stats().own_kv_bytes, 0u);
  EXPECT_NE(Logits(*exact), Logits(*sequence));
}

TEST(Progressive, AContextReadExactlyGivesThePagesThatReadingItHereWould) {
  const std::vector<Token> tokens = SourceTokens(30, 150);
  const Context exact = PublishedF16(tokens);
  for (const std::string kv : {"4+4", "8"}) {
    auto direct = NewSequence(kv);
    Read(*direct, tokens);
    auto copied = NewSequence(kv);
    ASSERT_TRUE(copied->CopyExact(exact));
    EXPECT_EQ(Checksums(PublishedBy(*copied)), Checksums(PublishedBy(*direct))) << kv;
  }
}

TEST(Progressive, ACardThatNamesOtherPagesAsRefinementIsRefused) {
  auto producer = NewSequence("4+4");
  Read(*producer, SourceTokens(0, 70));
  const Context good = PublishedBy(*producer);
  ASSERT_EQ(good.segments.size(), 2u);
  auto other_producer = NewSequence("4+4");
  Read(*other_producer, SourceTokens(0, 40));
  const Context other = PublishedBy(*other_producer);

  const auto refused = [&](const Context& context) {
    auto consumer = NewSequence("4+4");
    const Status status = consumer->Attach(context);
    EXPECT_FALSE(status);
    return status ? "" : status.error().message;
  };
  Context bad = good;
  bad.card.mutable_spans(0)->set_refinement_segment(1);  // its own base pages
  EXPECT_THAT(refused(bad), HasSubstr("does not match its refinement pages"));
  bad = good;
  bad.card.mutable_spans(0)->set_segment(1);  // refinement pages for a base
  bad.card.mutable_spans(0)->set_refinement_segment(0);
  EXPECT_THAT(refused(bad), HasSubstr("has refinement pages for its own"));
  bad = good;
  bad.segments[1] = other.segments[1];  // fewer pages, of other tokens
  bad.card.mutable_segments(1)->set_digest(bad.segments[1]->digest());
  EXPECT_THAT(refused(bad), HasSubstr("does not match its refinement pages"));
  bad = good;
  bad.card.mutable_spans(0)->set_refinement_first_page(1);
  EXPECT_THAT(refused(bad), HasSubstr("does not match its refinement pages"));
  bad = good;
  bad.card.mutable_spans(0)->set_refinement_segment(9);
  EXPECT_THAT(refused(bad), HasSubstr("in no segment"));

  // Without them it is a context of 4-bit pages.
  Context base_alone = good;
  base_alone.card.mutable_spans(0)->set_refinement_segment(0);
  auto consumer = NewSequence("4");
  ASSERT_TRUE(consumer->Attach(base_alone));
  Read(*consumer, SourceTokens(500, 5));
  EXPECT_EQ(consumer->stats().stored_bits, 4.25);
}

TEST(Progressive, AnUnsuitableShareIsRefused) {
  for (const double refine : {-0.1, 1.1, std::nan("")}) {
    EXPECT_FALSE(Sequence::Create(TestModel(), {.refine = refine}));
  }
}

}  // namespace
}  // namespace qkv
