// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/turn_maker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace qkv {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TurnMakerTest : public ::testing::Test {
 protected:
  void Given(const std::string& agents) {
    auto flow = ParseFlow("n_ctx: 512\nagents:\n" + agents, "f.yaml");
    ASSERT_TRUE(flow) << flow.error().message;
    flow_ = *std::move(flow);
    graph_ = flow_.Graph();
    all_.assign(flow_.agents.size(), {});
    for (size_t i = 0; i < all_.size(); ++i) all_[i].tokenizer = "t";
  }
  // The agent has answered with its name; its context has three tokens.
  void Finished(int i) {
    const std::string& name = flow_.agents[i].name;
    ASSERT_TRUE(Make(i)) << name;
    all_[i].result.text = name + "!";
    all_[i].result.context_tokens = {i, 7, 8};
    all_[i].result.context_id = "id-" + name;
    outputs_[name] = name + "!";
  }
  Result<AgentTurn> Make(int i, FlowMode mode = FlowMode::kHandoff) {
    std::vector<AgentRecord*> records;
    for (AgentRecord& record : all_) records.push_back(&record);
    return TurnMaker(flow_, graph_, mode).Make(i, outputs_, records);
  }

  Flow flow_;
  std::vector<PlanNode> graph_;
  std::vector<AgentRecord> all_;
  std::map<std::string, std::string> outputs_;
};

constexpr char kFan[] = R"(  - {name: a, system: s, prompt: p}
  - {name: b, prompt: q}
  - {name: c, system: own, reads: [b, a], prompt: "sum {{a.output}}", max_tokens: 5}
  - {name: d, inherits: a, prompt: go on}
)";

TEST_F(TurnMakerTest, FillsInTextsAndSettings) {
  Given(kFan);
  Finished(0);
  Finished(1);
  const auto turn = Make(2);
  ASSERT_TRUE(turn) << turn.error().message;
  EXPECT_EQ(turn->agent, "c");
  EXPECT_EQ(turn->system, "own");
  EXPECT_EQ(turn->prompt, "sum a!");
  EXPECT_EQ(turn->max_tokens, 5);
  EXPECT_EQ(turn->n_ctx, 512);
  ASSERT_EQ(turn->reads.size(), 2u);
  EXPECT_EQ(turn->reads[0].context, "id-b");
  EXPECT_THAT(turn->reads[1].history, ElementsAre(0, 7, 8));
  EXPECT_EQ(all_[2].reason, Reason::kNone);
}

TEST_F(TurnMakerTest, SaysHowContextsMayBeSplicedAndWhatOfThemIsASystemMessage) {
  Given(
      "  - {name: a, system: s, prompt: p}\n  - {name: b, prompt: q, reads: {from: a, splice: auto}}\n"
      "  - {name: c, inherits: a, prompt: r}\n");
  Finished(0);
  all_[0].result.prefix_tokens = 2;
  for (const FlowMode mode : {FlowMode::kHandoff, FlowMode::kText}) {
    const auto turn = Make(1, mode);
    ASSERT_TRUE(turn);
    EXPECT_EQ(ToString(turn->reads[0].splice), "auto");
    EXPECT_EQ(turn->reads[0].prefix_tokens, 2) << "text handoff leaves it out as well";
    EXPECT_EQ(Make(2, mode)->prefix_tokens, 2);
  }
}

TEST_F(TurnMakerTest, TextModeGivesTokensOnly) {
  Given(kFan);
  Finished(0);
  Finished(1);
  EXPECT_EQ(Make(2, FlowMode::kText)->reads[0].context, "");
  EXPECT_EQ(Make(3, FlowMode::kText)->inherits, "");
  EXPECT_THAT(Make(3, FlowMode::kText)->history, ElementsAre(0, 7, 8));
}

TEST_F(TurnMakerTest, OneContextWithOtherTokensMakesAllOfThemWords) {
  Given(kFan);
  Finished(0);
  all_[1].tokenizer = "another";
  Finished(1);
  const auto turn = Make(2);
  ASSERT_TRUE(turn);
  EXPECT_THAT(turn->reads, IsEmpty());
  EXPECT_EQ(turn->prompt, "q\n\nb!\n\ns\n\np\n\na!\n\nsum a!");
  EXPECT_EQ(turn->system, "own");
  EXPECT_EQ(all_[2].reason, Reason::kTokenizerMismatch);
  EXPECT_THAT(all_[2].reason_detail, HasSubstr("whose context it reads"));
}

TEST_F(TurnMakerTest, AContextThatWasNotPublishedTravelsAsTokens) {
  Given(kFan);
  Finished(0);
  Finished(1);
  all_[0].result.context_id.clear();
  all_[0].result.publish_error = "full";
  const auto reads = Make(2);
  EXPECT_EQ(reads->reads[1].context, "");
  EXPECT_EQ(reads->reads[0].context, "id-b");
  const auto goes_on = Make(3);
  EXPECT_EQ(goes_on->inherits, "");
  EXPECT_THAT(goes_on->history, ElementsAre(0, 7, 8));
  EXPECT_EQ(all_[3].reason_detail, "'a' could not publish its context: full");
}

TEST_F(TurnMakerTest, AMissThatIsNotWantedIsAnErrorAndTheReasonStays) {
  Given("  - {name: a, prompt: p}\n  - {name: b, reads: {from: a, budget: 2, on_miss: fail}, prompt: q}\n");
  Finished(0);
  const auto turn = Make(1);
  ASSERT_FALSE(turn);
  EXPECT_EQ(turn.error().reason, Reason::kTooLong);
  EXPECT_EQ(all_[1].reason, Reason::kTooLong);
  all_[0].result.context_tokens.pop_back();
  EXPECT_TRUE(Make(1));
  EXPECT_EQ(all_[1].reason, Reason::kNone) << "of the last attempt";
}

TEST_F(TurnMakerTest, ABudgetInBytesCountsPages) {
  Given("  - {name: a, prompt: p}\n  - {name: b, inherits: {from: a, budget: 1KiB, on_miss: fail}, prompt: q}\n");
  Finished(0);
  all_[0].result.kv_bytes = 1024;
  EXPECT_TRUE(Make(1));
  all_[0].result.kv_bytes = 1025;
  const auto turn = Make(1);
  ASSERT_FALSE(turn);
  EXPECT_EQ(turn.error().reason, Reason::kTooLong);
  EXPECT_EQ(turn.error().message, "the context of 'a' has 1025 bytes, the budget is 1024");
}

TEST_F(TurnMakerTest, TranscriptsGrowAlongAChain) {
  Given("  - {name: a, system: s, prompt: p}\n  - {name: b, inherits: a, prompt: q}\n  - {name: c, inherits: b}\n");
  Finished(0);
  Finished(1);
  Finished(2);
  EXPECT_EQ(all_[1].transcript, "s\n\np\n\na!\n\nq\n\n");
}

}  // namespace
}  // namespace qkv
