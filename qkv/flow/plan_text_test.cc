// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/plan_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace qkv {
namespace {

using ::testing::HasSubstr;

constexpr char kFlow[] = R"(name: team
agents:
  - {name: a, prompt: xxxx, max_tokens: 10}
  - {name: b, prompt: xxxx, max_tokens: 20}
  - {name: c, inherits: b, max_tokens: 4}
  - {name: d, reads: a, prompt: "{{c.output}}", max_tokens: 2}
)";

class PlanTextTest : public ::testing::Test {
 protected:
  PlanTextTest() : flow_(*ParseFlow(kFlow, "f.yaml")), forecast_(Forecast(flow_.Graph(), 2, 0)) {}
  PlanView View() const { return {flow_, forecast_, 2}; }

  const Flow flow_;
  const PlanForecast forecast_;
};

TEST_F(PlanTextTest, TableTellsOrderPathAndRelease) {
  const std::string text = FormatPlan(View());
  EXPECT_THAT(text, HasSubstr("team: 4 agents, 2 at a time, 2 of which may be of use\n"));
  EXPECT_THAT(text, HasSubstr("longest way: b > c > d\n"));
  // d: 4 tokens of c's answer, 2 written; a's context is gone on from.
  EXPECT_THAT(text, HasSubstr("c (text)"));
  EXPECT_THAT(text, ::testing::ContainsRegex("\nd +3 +61 +70 +4 +2 +a \\(reads\\), c \\(text\\) +- +-\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("\nb +1 +0 +51 +1 +20 +- +c +c\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("\na +1 +0 +26 +1 +10 +- +d +d\n"));
}

TEST_F(PlanTextTest, DotNamesEveryEdge) {
  const std::string dot = PlanToDot(View());
  EXPECT_THAT(dot, HasSubstr("digraph \"team\" {"));
  EXPECT_THAT(dot, HasSubstr("\"b\" -> \"c\" [label=\"inherits\", style=solid, penwidth=2];"));
  EXPECT_THAT(dot, HasSubstr("\"a\" -> \"d\" [label=\"reads\", style=dashed];"));
  EXPECT_THAT(dot, HasSubstr("\"c\" -> \"d\" [label=\"text\", style=dotted, penwidth=2];"));
}

TEST_F(PlanTextTest, MermaidNamesEveryEdge) {
  const std::string mermaid = PlanToMermaid(View());
  EXPECT_THAT(mermaid, HasSubstr("flowchart LR\n  a0[\"a\"]\n"));
  EXPECT_THAT(mermaid, HasSubstr("  a1 ==>|inherits| a2\n"));
  EXPECT_THAT(mermaid, HasSubstr("  a0 -->|reads| a3\n"));
  EXPECT_THAT(mermaid, HasSubstr("  a2 -.->|text| a3\n"));
}

TEST_F(PlanTextTest, JsonHasTheSame) {
  const auto json = nlohmann::json::parse(PlanToJson(View()));
  EXPECT_EQ(json["critical_path"], nlohmann::json({"b", "c", "d"}));
  EXPECT_EQ(json["critical_cost"], 70);
  EXPECT_EQ(json["agents"].size(), 4u);
  EXPECT_EQ(json["agents"][0]["agent"], "b");
  EXPECT_EQ(json["agents"][0]["released_after"], "c");
  EXPECT_EQ(json["agents"][3]["needs"][0], nlohmann::json({{"agent", "a"}, {"edge", "reads"}}));
  EXPECT_TRUE(json["budget_tokens"].is_null());
}

TEST(PlanText, QuotesInANameAreEscaped) {
  const Flow flow = *ParseFlow("name: 'a \"b\"'\nagents: [{name: a, prompt: x}]\n", "f.yaml");
  const PlanForecast forecast = Forecast(flow.Graph(), 1, 0);
  EXPECT_THAT(PlanToDot({flow, forecast, 1}), HasSubstr("digraph \"a \\\"b\\\"\""));
}

}  // namespace
}  // namespace qkv
