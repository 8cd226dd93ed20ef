// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/quality_probe.h"

#include <gtest/gtest.h>

#include <cmath>

#include "qkv/engine/quality_codecs.h"
#include "qkv/engine/test_support.h"

namespace qkv {
namespace {

constexpr CodecPair kF16 = {CodecId::kF16, CodecId::kF16};
constexpr CodecPair kI8 = {CodecId::kI8, CodecId::kI8};
constexpr CodecPair kI4 = {CodecId::kI4, CodecId::kI4};
constexpr int kPrefix = 70;  // two pages and a part of one
constexpr int kScored = 8;

std::vector<std::string> SegmentDigests(const Context& context) {
  std::vector<std::string> digests;
  for (const auto& segment : context.segments) digests.push_back(segment->digest());
  return digests;
}

class Probe : public ::testing::Test {
 protected:
  std::unique_ptr<Sequence> NewSequence(CodecPair kv) {
    SequenceOptions options;
    options.n_ctx = 256;
    options.kv = kv;
    auto sequence = Sequence::Create(TestModel(), options);
    EXPECT_TRUE(sequence) << sequence.error().message;
    return *std::move(sequence);
  }
  static std::shared_ptr<const Model> TestModel() { return testing::TestModel(); }
  std::vector<Token> tokens_ = testing::SourceTokens(0, kPrefix + kScored + 1);
};

TEST_F(Probe, CopiedExactRowsArePublishedAsIfTheyHadBeenReadThere) {
  const auto prefix = std::span(tokens_).first(kPrefix);
  const auto exact = NewSequence(kF16);
  ASSERT_TRUE(exact->Forward(prefix));
  const auto exact_context = exact->Publish({});
  ASSERT_TRUE(exact_context) << exact_context.error().message;
  for (const CodecPair kv : {kI8, kI4, kF16}) {
    const auto reader = NewSequence(kv);
    ASSERT_TRUE(reader->Forward(prefix));
    const auto expected = reader->Publish({});
    ASSERT_TRUE(expected) << expected.error().message;
    const auto copier = NewSequence(kv);
    ASSERT_TRUE(copier->Forward(prefix.first(3)));  // is forgotten
    ASSERT_TRUE(copier->CopyExact(*exact_context));
    EXPECT_EQ(copier->tokens().size(), prefix.size());
    const auto copied = copier->Publish({});
    ASSERT_TRUE(copied) << copied.error().message;
    EXPECT_EQ(SegmentDigests(*copied), SegmentDigests(*expected)) << ToString(kv);
    EXPECT_EQ(copied->card.parents_size(), 0);
  }
}

TEST_F(Probe, OnlyExactPagesCanBeCopied) {
  const auto sequence = NewSequence(kI8);
  ASSERT_TRUE(sequence->Forward(std::span(tokens_).first(40)));
  const auto context = sequence->Publish({});
  ASSERT_TRUE(context);
  const Status copied = NewSequence(kI8)->CopyExact(*context);
  ASSERT_FALSE(copied);
  EXPECT_EQ(copied.error().code, Code::kInvalidArgument);
}

TEST_F(Probe, ExactPagesHaveNoDivergenceAndCoarserOnesMore) {
  const auto probe = HandoffProbe::Read(TestModel(), tokens_, kPrefix, {});
  ASSERT_TRUE(probe) << probe.error().message;
  const auto exact = (*probe)->Score({kF16, {}});
  const auto eight = (*probe)->Score({kI8, {}});
  const auto four = (*probe)->Score({kI4, {}});
  ASSERT_TRUE(exact && eight && four);
  EXPECT_EQ(exact->score.n(), static_cast<size_t>(kScored));
  for (const double kl : exact->score.kl) EXPECT_EQ(kl, 0);
  EXPECT_EQ(exact->score.same_top, static_cast<size_t>(kScored));
  EXPECT_GT(eight->score.kl_mean(), 0);
  EXPECT_GT(four->score.kl_mean(), eight->score.kl_mean());
  // Three pages hold 70 tokens; a partial page takes a whole one's room.
  EXPECT_NEAR(exact->size.bits_per_value, 16.0 * 96 / 70, 1e-9);
  EXPECT_NEAR(eight->size.bits_per_value, BitsPerValue(CodecOf(CodecId::kI8), TestModel()->params().head_dim) * 96 / 70,
              1e-9);
  EXPECT_GT(eight->size.file_bits, eight->size.bits_per_value);
}

// Per value 4 bits and a 64th of a scale's 16; and once per segment, for each layer, head and channel, halves of a mean
// and of the first token's K and V, over two values of each of 70 tokens.
TEST_F(Probe, RotatedPagesTakeTheirConstantsAsWell) {
  ASSERT_EQ(TestModel()->params().head_dim, 64);
  const auto probe = HandoffProbe::Read(TestModel(), tokens_, kPrefix, {});
  ASSERT_TRUE(probe) << probe.error().message;
  const auto four = (*probe)->Score({{CodecId::k4, CodecId::k4}, {}});
  const auto refined = (*probe)->Score({{CodecId::k4, CodecId::k4, /*refine=*/true}, {}});
  ASSERT_TRUE(four && refined);
  EXPECT_NEAR(four->size.bits_per_value, 4.25 * 96 / 70 + 3 * 16.0 / (2 * 70), 1e-9);
  EXPECT_NEAR(refined->size.bits_per_value, 8.5 * 96 / 70 + 3 * 16.0 / (2 * 70), 1e-9);
  EXPECT_EQ(four->refined_share, 0);
  EXPECT_DOUBLE_EQ(four->read_bits, 4.25);  // of pages alone
}

TEST_F(Probe, ATransformIsSeenInThePages) {
  const auto probe = HandoffProbe::Read(TestModel(), tokens_, kPrefix, {});
  ASSERT_TRUE(probe) << probe.error().message;
  int calls = 0;
  const auto same = (*probe)->Score({kF16, [&](Side, int, int, int, int, float*) { ++calls; }});
  ASSERT_TRUE(same);
  const HyperParams& p = TestModel()->params();
  EXPECT_EQ(calls, 3 * 2 * p.n_layers * p.n_kv_heads);
  EXPECT_EQ(same->score.kl_mean(), 0);
  const auto noise = (*probe)->NoiseFloor();
  ASSERT_TRUE(noise);
  EXPECT_GT(noise->kl_mean(), 0);
  const auto rounded = (*probe)->Score({kF16, LikeGgml("q4_0", p.head_dim)});
  ASSERT_TRUE(rounded);
  EXPECT_GT(rounded->score.kl_mean(), 0);
}

TEST_F(Probe, EverythingInPagesIsWorseThanAnExactPrefix) {
  ProbeOptions options;
  options.n_batch = 16;
  const auto all = PagesProbe::Read(TestModel(), testing::SourceTokens(0, 257), options);
  ASSERT_TRUE(all) << all.error().message;
  const auto exact = (*all)->Score({kF16, {}});
  const auto four = (*all)->Score({kI4, {}});
  ASSERT_TRUE(exact && four);
  EXPECT_EQ(exact->score.n(), 128u);
  EXPECT_EQ(exact->score.kl_mean(), 0);
  EXPECT_GT(four->score.kl_mean(), 0);
}

TEST_F(Probe, WhatWasRefinedIsSaidOfEveryProtocol) {
  const CodecPair kv{CodecId::k4, CodecId::k4, /*refine=*/true};
  ProbeOptions options;
  options.n_batch = 16;
  const auto all = PagesProbe::Read(TestModel(), testing::SourceTokens(0, 129), options);
  const auto hops = HopsProbe::Read(TestModel(), testing::SourceTokens(0, 64 + 2 * 40 + 1), 64, 2, options);
  ASSERT_TRUE(all && hops);
  KvSize size;
  const auto pages = (*all)->Score({kv, {}});
  const auto chain = (*hops)->Score({kv, {}}, size);
  ASSERT_TRUE(pages && chain);
  EXPECT_GT(pages->refined_share, 0);
  EXPECT_LT(pages->refined_share, 1);
  EXPECT_DOUBLE_EQ(pages->read_bits, 4.25 * (1 + pages->refined_share));
  for (int hop = 0; hop < 2; ++hop) {
    EXPECT_GT(chain->refined_share[hop], 0);
    EXPECT_LT(chain->refined_share[hop], 1);
    EXPECT_DOUBLE_EQ(chain->read_bits[hop], 4.25 * (1 + chain->refined_share[hop]));
  }
}

TEST_F(Probe, HopsCompareAChainWithASingleHandoff) {
  const auto hops = HopsProbe::Read(TestModel(), testing::SourceTokens(0, 64 + 3 * 8 + 1), 64, 3, {});
  ASSERT_TRUE(hops) << hops.error().message;
  KvSize size;
  const auto exact = (*hops)->Score({kF16, {}}, size);
  const auto eight = (*hops)->Score({kI8, {}}, size);
  ASSERT_TRUE(exact && eight);
  ASSERT_EQ(eight->chain.size(), 3u);
  for (int hop = 0; hop < 3; ++hop) {
    EXPECT_EQ(exact->chain[hop].kl_mean(), 0) << hop;
    EXPECT_EQ(exact->single[hop].kl_mean(), 0) << hop;
    EXPECT_EQ(eight->chain[hop].n(), 8u);
  }
  EXPECT_EQ(eight->chain[0].kl, eight->single[0].kl);  // the first hop is a single one
  EXPECT_GT(eight->chain[2].kl_mean(), 0);
}

TEST(QualityCodecs, GgmlsRoundingIsItsOwnAndRotatedWhereItRotates) {
  // A row of one value: rotated, it is 64 equal ones, which q8_0 holds as 127 steps of its scale; turned back, it is
  // one value again, and nothing leaks into the others.
  std::vector<float> row(64, 0.0f);
  row[5] = 1;
  LikeGgml("q8_0", 64)(Side::kK, 0, 0, 0, 1, row.data());
  for (int i = 0; i < 64; ++i) EXPECT_NEAR(row[i], i == 5 ? 1 : 0, 2e-3) << i;
  EXPECT_TRUE(LikeGgml("q4_0", 64));
  EXPECT_FALSE(LikeGgml("q3_k", 64));
  // Without rotation, what is less than half a step of 1/127 is lost beside a 1 among its 32 channels only.
  row.assign(64, 0.003f);
  row[5] = 1;
  LikeGgml("q8_0:plain", 64)(Side::kK, 0, 0, 0, 1, row.data());
  for (int i = 0; i < 32; ++i) EXPECT_NEAR(row[i], i == 5 ? 1 : 0, 1e-3) << i;
  for (int i = 32; i < 64; ++i) EXPECT_NEAR(row[i], 0.003, 1e-5) << i;
  EXPECT_EQ(LikeGgmlBits("q8_0:plain"), 8.5);
  EXPECT_FALSE(LikeGgml(":plain", 64));
}

}  // namespace
}  // namespace qkv
