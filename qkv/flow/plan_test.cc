// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <optional>
#include <set>
#include <sstream>

namespace qkv {
namespace {

// A graph as text, one agent per line: "name", then "< parent" for whom it inherits from, "+ other" for whose output it
// quotes. Agents are named before they are used.
std::vector<PlanNode> Graph(const std::string& text) {
  std::vector<PlanNode> nodes;
  const auto index = [&](const std::string& name) {
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i].name == name) return static_cast<int>(i);
    }
    ADD_FAILURE() << "nobody is called " << name;
    return -1;
  };
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    PlanNode node;
    if (!(words >> node.name)) continue;
    for (std::string mark, name; words >> mark >> name;) {
      node.needs.push_back(index(name));
      if (mark == "<") node.inherits = index(name);
    }
    nodes.push_back(node);
  }
  return nodes;
}

// A plan that is spoken to by name and answers with names.
class PlanTest : public ::testing::Test {
 protected:
  void Given(const std::string& text) {
    nodes_ = Graph(text);
    plan_.emplace(nodes_);
  }
  int Index(const std::string& name) const {
    return static_cast<int>(std::find_if(nodes_.begin(), nodes_.end(), [&](auto& n) { return n.name == name; }) -
                            nodes_.begin());
  }
  std::string Names(const std::vector<int>& nodes) const {
    std::string names;
    for (int node : nodes) names += (names.empty() ? "" : " ") + nodes_[node].name;
    return names;
  }
  std::string Ready() const { return Names(plan_->Ready()); }
  void Start(const std::string& name) { plan_->OnStarted(Index(name)); }
  // "skipped / released"
  std::string Finish(const std::string& name) { return Text(plan_->OnFinished(Index(name))); }
  std::string Fail(const std::string& name) { return Text(plan_->OnFailed(Index(name))); }
  std::string Run(const std::string& name) {
    Start(name);
    return Finish(name);
  }
  std::string Text(const Plan::Change& change) const { return Names(change.skipped) + " / " + Names(change.released); }

  std::vector<PlanNode> nodes_;
  std::optional<Plan> plan_;
};

TEST_F(PlanTest, RunsAChainInOrder) {
  Given("reader\nwriter < reader\neditor < writer");
  EXPECT_EQ(Ready(), "reader");
  Start("reader");
  EXPECT_EQ(Ready(), "");
  EXPECT_FALSE(plan_->complete());
  EXPECT_EQ(Finish("reader"), " / ");
  EXPECT_EQ(Ready(), "writer");
  EXPECT_EQ(Run("writer"), " / reader") << "the writer was the reader's last reader";
  EXPECT_EQ(Run("editor"), " / writer");
  EXPECT_TRUE(plan_->complete());
}

TEST_F(PlanTest, FanOutMakesAllReadyAtOnceInTheOrderOfTheFlow) {
  Given("root\nb < root\na < root\nc + root");
  EXPECT_EQ(Run("root"), " / ");
  EXPECT_EQ(Ready(), "b a c");
}

TEST_F(PlanTest, ContextIsReleasedAfterItsLastReaderOnly) {
  Given("root\na < root\nb < root\nquoter + root");
  Run("root");
  Start("a");
  Start("b");
  EXPECT_EQ(Finish("b"), " / ");
  EXPECT_EQ(Finish("a"), " / root") << "who only quotes its output does not read its context";
  EXPECT_EQ(Run("quoter"), " / ");
}

TEST_F(PlanTest, DiamondWaitsForBothSides) {
  Given("top\nleft < top\nright < top\nbottom < left + right");
  Run("top");
  Start("left");
  Start("right");
  EXPECT_EQ(Finish("left"), " / ");
  EXPECT_EQ(Ready(), "");
  EXPECT_EQ(Finish("right"), " / top");
  EXPECT_EQ(Ready(), "bottom");
  EXPECT_EQ(Run("bottom"), " / left");
  EXPECT_TRUE(plan_->complete());
}

TEST_F(PlanTest, OnlyWhoIsInheritedFromPublishes) {
  Given("root\nreader < root\nquoter + reader");
  EXPECT_TRUE(plan_->publishes(0));
  EXPECT_FALSE(plan_->publishes(1));
  EXPECT_FALSE(plan_->publishes(2));
}

TEST_F(PlanTest, FailureSkipsAllThatDependOnItAndNothingElse) {
  Given("root\nbad < root\nchild < bad\ngrandchild + child\nother < root");
  Run("root");
  Start("bad");
  EXPECT_EQ(Fail("bad"), "child grandchild / ");
  EXPECT_EQ(Ready(), "other");
  EXPECT_EQ(Run("other"), " / root");
  EXPECT_TRUE(plan_->complete());
  EXPECT_EQ(plan_->state(Index("grandchild")), Plan::State::kSkipped);
}

TEST_F(PlanTest, FailureOfTheLastReaderReleasesTheContext) {
  Given("root\nbad < root");
  Run("root");
  Start("bad");
  EXPECT_EQ(Fail("bad"), " / root");
}

TEST_F(PlanTest, SkippedReaderReleasesTheContextOnce) {
  Given("root\nother\nreader < root + other\nreader2 < root + other");
  Run("root");
  Start("other");
  EXPECT_EQ(Fail("other"), "reader reader2 / root");
}

TEST_F(PlanTest, NothingIsReleasedThatWasNeverPublished) {
  Given("root\nreader < root");
  Start("root");
  EXPECT_EQ(Fail("root"), "reader / ");
  EXPECT_TRUE(plan_->complete());
}

TEST_F(PlanTest, AgentMayFailBeforeItsTurn) {
  Given("root\nreader < root\nlast < reader");
  EXPECT_EQ(Fail("reader"), "last / ");
  EXPECT_EQ(Ready(), "root");
  EXPECT_EQ(Run("root"), " / root") << "nobody is left to read it";
}

TEST(FindCycle, NamesTheWayRound) {
  std::vector<PlanNode> nodes{{"a", {1}, 1}, {"b", {2}, 2}, {"c", {1}, -1}};
  EXPECT_THAT(FindCycle(nodes), ::testing::ElementsAre(1, 2, 1));
  nodes[2].needs = {};
  EXPECT_TRUE(FindCycle(nodes).empty());
}

TEST(FindCycle, LongChainDoesNotExhaustTheStack) {
  std::vector<PlanNode> nodes(1000000);
  for (size_t i = 0; i + 1 < nodes.size(); ++i) nodes[i].needs = {static_cast<int>(i + 1)};
  EXPECT_TRUE(FindCycle(nodes).empty());
  nodes.back().needs = {0};
  EXPECT_EQ(FindCycle(nodes).size(), nodes.size() + 1);
}

TEST(PlanProperties, RandomGraphsRunToTheEndEachAgentOnceAfterWhatItNeeds) {
  EXPECT_TRUE(rc::check([] {
    const int count = *rc::gen::inRange(1, 12);
    std::vector<PlanNode> nodes(count);
    for (int i = 0; i < count; ++i) {
      nodes[i].name = std::to_string(i);
      for (int j = 0; j < i; ++j) {
        if (*rc::gen::inRange(0, 4) == 0) nodes[i].needs.push_back(j);
      }
      if (!nodes[i].needs.empty() && *rc::gen::arbitrary<bool>()) nodes[i].inherits = nodes[i].needs[0];
    }
    const int failing = *rc::gen::inRange(-1, count);
    Plan plan(nodes);
    std::set<int> finished, dropped, released;
    std::vector<int> running;
    for (int steps = 0; !plan.complete(); ++steps) {
      RC_ASSERT(steps <= 2 * count);
      for (int node : plan.Ready()) {
        for (int need : nodes[node].needs) RC_ASSERT(finished.contains(need));
        plan.OnStarted(node);
        running.push_back(node);
      }
      RC_ASSERT(!running.empty());
      const size_t pick = *rc::gen::inRange<size_t>(0, running.size());
      const int node = running[pick];
      running.erase(running.begin() + static_cast<int>(pick));
      const Plan::Change change = node == failing ? plan.OnFailed(node) : plan.OnFinished(node);
      (node == failing ? dropped : finished).insert(node);
      dropped.insert(change.skipped.begin(), change.skipped.end());
      for (int context : change.released) {
        RC_ASSERT(released.insert(context).second);
        RC_ASSERT(finished.contains(context));
        for (int i = 0; i < count; ++i) {
          if (nodes[i].inherits == context) RC_ASSERT(finished.contains(i) || dropped.contains(i));
        }
      }
    }
    RC_ASSERT(finished.size() + dropped.size() == static_cast<size_t>(count));
  }));
}

}  // namespace
}  // namespace qkv
