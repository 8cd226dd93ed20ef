// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/splice_probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qkv/engine/test_support.h"

namespace qkv {
namespace {

using ::qkv::testing::SourceTokens;
using ::qkv::testing::TestModel;
using ::testing::HasSubstr;

TEST(SpliceArm, IsReadFromText) {
  const auto arm = ParseSpliceArm("own:repair=64@k=i8,v=i4");
  ASSERT_TRUE(arm) << arm.error().message;
  EXPECT_EQ(arm->name, "own:repair=64@k=i8,v=i4");
  EXPECT_EQ(arm->encoding, SpliceArm::Encoding::kProducer);
  EXPECT_EQ(arm->method, SpliceArm::Method::kSplice);
  EXPECT_EQ(arm->policy.repair, 64);
  EXPECT_EQ(arm->kv, (CodecPair{CodecId::kI8, CodecId::kI4}));
  EXPECT_EQ(ParseSpliceArm("full")->policy.repair, kRepairAll);
  EXPECT_EQ(ParseSpliceArm("random=38")->n_random, 38);
  for (const char* text : {"", "rot", "off", "exact-only", "own:none", "bos:random=3", "random=0", "random=x",
                           "repair=33", "hide@", "hide@i9", "own:own:hide"}) {
    EXPECT_FALSE(ParseSpliceArm(text)) << text;
  }
  EXPECT_THAT(ParseSpliceArm("rot").error().message, HasSubstr("rotate"));
}

SpliceCase SmallCase() {
  SpliceCase c;
  c.own = SourceTokens(2000, 48);
  c.producer = SourceTokens(2300, 64);
  c.a = SourceTokens(0, 96);
  c.b = SourceTokens(96, 96);
  c.prompt = SourceTokens(192, 24);
  c.scored = SourceTokens(216, 25);
  return c;
}

double KlOf(SpliceProbe& probe, const char* arm, int64_t recomputed) {
  const auto parsed = ParseSpliceArm(arm);
  EXPECT_TRUE(parsed) << arm;
  const auto score = probe.Score(*parsed);
  EXPECT_TRUE(score) << score.error().message;
  EXPECT_EQ(score->places.size(), 24u);
  EXPECT_EQ(score->recomputed, recomputed) << arm;
  double kl = 0;
  for (const TokenScore& place : score->places) kl += place.kl / 24;
  return kl;
}

// With quantized weights rounding of activations alone makes some 2e-3; what splicing does is ten times that.
TEST(SpliceProbe, ArmsStandInTheOrderTheyMust) {
  auto probe = SpliceProbe::Read(TestModel(), SmallCase(), {});
  ASSERT_TRUE(probe) << probe.error().message;
  const double none = KlOf(**probe, "none", 0), rotate = KlOf(**probe, "rotate", 0), hide = KlOf(**probe, "hide", 0);
  const double full = KlOf(**probe, "full", 192);
  EXPECT_GT(none, rotate) << "positions are mended";
  EXPECT_GT(rotate, hide);
  EXPECT_GT(hide, full);
  KlOf(**probe, "repair=32@i8", 64);
  KlOf(**probe, "random=8", 16);
  KlOf(**probe, "own:hide", 0);
  KlOf(**probe, "own:repair=32", 64);
  KlOf(**probe, "bos:hide", 0);
  KlOf(**probe, "common:rotate", 32);  // the prefix ends in the middle of a page
  const auto climbed = (*probe)->Score(*ParseSpliceArm("auto"));
  ASSERT_TRUE(climbed);
  EXPECT_GE(climbed->rung, 32);
  EXPECT_GE(climbed->probe_kl, 0);
}

TEST(SpliceProbe, RotatedKeysAndTurnedQueriesAreOneAndTheSame) {
  // With no token picked, all are copies whose keys were rotated in fp64.
  SpliceCase c = SmallCase();
  auto probe = SpliceProbe::Read(TestModel(), c, {});
  ASSERT_TRUE(probe) << probe.error().message;
  SpliceArm copied = *ParseSpliceArm("random=1");
  copied.n_random = 0;
  const auto by_keys = (*probe)->Score(copied), by_queries = (*probe)->Score(*ParseSpliceArm("rotate"));
  ASSERT_TRUE(by_keys && by_queries);
  double keys = 0, queries = 0;
  for (const TokenScore& place : by_keys->places) keys += place.kl / 24;
  for (const TokenScore& place : by_queries->places) queries += place.kl / 24;
  EXPECT_NEAR(keys / queries, 1, 0.1);
}

}  // namespace
}  // namespace qkv
