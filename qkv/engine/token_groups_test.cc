// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/token_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace qkv {
namespace {

using ::testing::HasSubstr;

TEST(KvChoice, GoesFromTextAndBack) {
  for (const char* text : {"i8", "k=5,v=4", "4+4", "pq4", "tokens:20/8/4", "tokens:20/8/pq2", "tokens:1/i8/k=4,v=3",
                           "tokens:99/8/drop", "tokens:all-queries/20/8/4", "tokens:random/20/8/drop"}) {
    const auto choice = ParseKvChoice(text);
    ASSERT_TRUE(choice) << text << ": " << choice.error().message;
    EXPECT_EQ(ToString(*choice), text);
  }
  const auto choice = ParseKvChoice("tokens:attention/20/8/k=4,v=3");
  ASSERT_TRUE(choice);
  EXPECT_EQ(*choice, *ParseKvChoice("tokens:20/8/k=4,v=3"));
  EXPECT_EQ(choice->codecs, (CodecPair{CodecId::k8, CodecId::k8}));
  ASSERT_TRUE(choice->groups);
  EXPECT_EQ(choice->groups->percent, 20);
  EXPECT_EQ(choice->groups->low, (CodecPair{CodecId::k4, CodecId::k3}));
  EXPECT_FALSE(ParseKvChoice("tokens:20/8/drop")->groups->low);
}

TEST(KvChoice, WhatIsWrongIsSaid) {
  struct Row {
    const char* text;
    const char* message;
  };
  for (const Row& row : {Row{"tokens:", "such as tokens:20/8/4"}, Row{"tokens:20/8", "such as tokens:20/8/4"},
                         Row{"tokens:20/8/4/3", "such as tokens:20/8/4"}, Row{"tokens:luck/20/8/4", "such as tokens"},
                         Row{"tokens:0/8/4", "from 1 to 99"}, Row{"tokens:100/8/4", "from 1 to 99"},
                         Row{"tokens:-1/8/4", "from 1 to 99"}, Row{"tokens:20%/8/4", "from 1 to 99"},
                         Row{"tokens:x/8/4", "from 1 to 99"}, Row{"tokens:20/9/4", "'9'"},
                         Row{"tokens:20/drop/8", "'drop'"}, Row{"tokens:20/4+4/4", "no refinement"},
                         Row{"tokens:20/8/3+4", "no refinement"}, Row{"token:20/8/4", "token:20/8/4"}}) {
    const auto choice = ParseKvChoice(row.text);
    ASSERT_FALSE(choice) << row.text;
    EXPECT_EQ(choice.error().code, Code::kInvalidArgument);
    EXPECT_THAT(choice.error().message, HasSubstr(row.message)) << row.text;
  }
}

TEST(KvChoice, BitsAreThoseOfBothGroups) {
  EXPECT_DOUBLE_EQ(BitsPerValue(*ParseKvChoice("tokens:20/8/4"), 64), 0.2 * 8.25 + 0.8 * 4.25);
  EXPECT_DOUBLE_EQ(BitsPerValue(*ParseKvChoice("tokens:20/8/drop"), 64), 0.2 * 8.25);
  EXPECT_DOUBLE_EQ(BitsPerValue(*ParseKvChoice("4+4"), 64), 8.5);
  const CodecPair wide = {CodecId::k8, CodecId::k8}, narrow = {CodecId::k4, CodecId::k4};
  const auto layers = LayerCodecs::Create({3, 2, 64}, std::vector{wide, narrow, narrow});
  ASSERT_TRUE(layers);
  EXPECT_DOUBLE_EQ(BitsPerValue(PageCodecs(kLayersPair, *layers), 64), (8.25 + 2 * 4.25) / 3);
}

TEST(PlanGroups, WholePagesButTheNewestTokensAreGrouped) {
  EXPECT_EQ(TokensToGroup(0), 0);
  EXPECT_EQ(TokensToGroup(95), 0);
  EXPECT_EQ(TokensToGroup(96), 64);
  EXPECT_EQ(TokensToGroup(127), 64);
  EXPECT_EQ(TokensToGroup(128), 96);
  EXPECT_EQ(TokensToGroup(1024), 992);
}

TEST(PlanGroups, TheMostImportantStandFirstInTheOrderOfTheText) {
  std::vector<float> importance(96);
  for (size_t t = 0; t < importance.size(); ++t) importance[t] = static_cast<float>(t % 3);
  const GroupedTokens groups = PlanGroups(importance, 30, false);  // one page of three
  std::vector<int> high = {0}, low;  // token 0 has the least importance and is among them all the same
  for (int t = 1; t < 96; ++t) (t % 3 == 2 && t < 93 ? high : low).push_back(t);
  ASSERT_EQ(groups.n_high(), 32);
  std::vector<int> order = high;
  order.insert(order.end(), low.begin(), low.end());
  EXPECT_EQ(groups.Order(), order);
  EXPECT_EQ(groups.n_in_pages(), 96);

  const GroupedTokens dropping = PlanGroups(importance, 30, true);
  EXPECT_EQ(dropping.Order(), high);
  EXPECT_EQ(dropping.n_dropped(), 64);
  EXPECT_EQ(dropping.n_in_pages(), 32);
}

TEST(PlanGroups, SharesAreRoundedToPages) {
  const std::vector<float> importance(320);
  EXPECT_EQ(PlanGroups(importance, 1, false).n_high(), 32);
  EXPECT_EQ(PlanGroups(importance, 24, false).n_high(), 64);
  EXPECT_EQ(PlanGroups(importance, 26, false).n_high(), 96);
  EXPECT_EQ(PlanGroups(importance, 94, false).n_high(), 288);
  EXPECT_TRUE(PlanGroups(importance, 96, true).empty());  // nothing would be left for the others
  EXPECT_TRUE(PlanGroups({}, 20, false).empty());
}

RC_GTEST_PROP(PlanGroups, TakesAnyNumbers, ()) {
  const auto n_pages = *rc::gen::inRange(2, 12);
  const auto percent = *rc::gen::inRange(1, 100);
  std::vector<float> importance(static_cast<size_t>(n_pages) * kPageTokens);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (float& x : importance) x = *rc::gen::element(0.0f, 1.0f, 2.0f, NAN, kInfinity, -kInfinity);
  const GroupedTokens groups = PlanGroups(importance, percent, *rc::gen::arbitrary<bool>());
  if (groups.empty()) return;
  RC_ASSERT(groups.size() == n_pages * kPageTokens);
  RC_ASSERT(groups.high[0]);
  RC_ASSERT(groups.n_high() % kPageTokens == 0 && groups.n_high() > 0 && groups.n_high() < groups.size());
  const auto key = [&](size_t t) { return std::isnan(importance[t]) ? -kInfinity : importance[t]; };
  float least_high = kInfinity, most_low = -kInfinity;
  for (size_t t = 1; t < importance.size(); ++t) {
    if (groups.high[t]) least_high = std::min(least_high, key(t));
    if (!groups.high[t]) most_low = std::max(most_low, key(t));
  }
  RC_ASSERT(least_high >= most_low);
}

}  // namespace
}  // namespace qkv
