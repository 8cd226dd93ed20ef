// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/report_html.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qkv/flow/hop_phases.h"

namespace qkv {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

FlowReport Example() {
  FlowReport report{.flow = "a <b> & \"c\""};
  report.graph.resize(2);
  report.graph[0].name = "writer";
  report.graph[1].name = "editor";
  report.graph[1].needs = {0};
  report.graph[1].inherits = 0;
  ModeResult mode;
  mode.kv = "i8";
  mode.end_to_end_ms = 1000;
  mode.hops = {{.agent = "writer", .ttft_ms = 100, .ended_at_ms = 500, .decode_ms = 380, .publish_ms = 20},
               {.agent = "editor",
                .from = "writer",
                .handoff = HandoffMode::kAttach,
                .tokens_reused = 50,
                .attach_ms = 2,
                .ttft_ms = 60,
                .ready_at_ms = 505,
                .started_at_ms = 510,
                .ended_at_ms = 970,
                .decode_ms = 400}};
  mode.outputs = {{"writer", "<script>alert(1)</script>"}, {"editor", "fine"}};
  mode.memory = {{-20, 1000000}, {0, 2000000}, {900, 3000000}};
  report.modes = {mode};
  return report;
}

// Opening and closing tags match up; the page has none of its own that would not.
void ExpectBalanced(const std::string& html) {
  std::vector<std::string> open;
  for (size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at + 1)) {
    const size_t end = html.find('>', at);
    ASSERT_NE(end, std::string::npos);
    std::string tag = html.substr(at + 1, end - at - 1);
    const bool closes = tag[0] == '/', alone = tag[0] == '!' || tag.ends_with('/') || tag.starts_with("meta");
    tag = tag.substr(closes ? 1 : 0, tag.find(' ') == std::string::npos ? std::string::npos : tag.find(' '));
    if (alone) continue;
    if (!closes) {
      open.push_back(tag);
      continue;
    }
    ASSERT_FALSE(open.empty()) << tag;
    EXPECT_EQ(open.back(), tag);
    open.pop_back();
  }
  EXPECT_THAT(open, ::testing::IsEmpty());
}

TEST(ReportHtml, IsOnePageThatNeedsNothingElse) {
  const std::string html = ToHtml(Example());
  ExpectBalanced(html);
  for (const char* outside : {"http://", "https://", "src=", "href=", "@import", "url("}) {
    EXPECT_THAT(html, Not(HasSubstr(outside)));
  }
  EXPECT_THAT(html, HasSubstr("<h1>a &lt;b&gt; &amp; &quot;c&quot;</h1>"));
  EXPECT_THAT(html, HasSubstr("&lt;script&gt;")) << "an answer is text";
  EXPECT_THAT(html, Not(HasSubstr("<script>")));
}

TEST(ReportHtml, ShowsGraphTimelineMemoryAndFigures) {
  const std::string html = ToHtml(Example());
  EXPECT_THAT(html, HasSubstr("editor inherits writer"));
  EXPECT_THAT(html, HasSubstr("writer: prefill 100.0 ms"));
  EXPECT_THAT(html, HasSubstr("writer: decode 380.0 ms"));
  EXPECT_THAT(html, HasSubstr("editor: waiting 5.0 ms"));
  EXPECT_THAT(html, HasSubstr("editor: handoff 2.0 ms"));
  EXPECT_THAT(html, HasSubstr("aria-label=\"memory\""));
}

TEST(ReportHtml, ComparesWithTextHandoff) {
  FlowReport report = Example();
  ModeResult text = report.modes[0];
  text.mode = FlowMode::kText;
  text.kv = "f16";
  text.end_to_end_ms = 4000;
  report.modes.insert(report.modes.begin(), text);
  EXPECT_THAT(ToHtml(report), HasSubstr("<td>0.25</td>")) << "a fourth of text's time";
}

TEST(ReportHtml, SurvivesARunOfNothing) {
  ExpectBalanced(ToHtml(FlowReport{.flow = "empty", .modes = {ModeResult{}}}));
}

TEST(Phases, FollowOneAnother) {
  const auto phases = PhasesOf(Example().modes[0].hops[1]);
  ASSERT_EQ(phases.size(), 4u) << "it publishes nothing";
  EXPECT_EQ(phases[0].kind, HopPhase::Kind::kWaiting);
  for (size_t i = 1; i < phases.size(); ++i) EXPECT_EQ(phases[i].start_ms, phases[i - 1].end_ms);
  EXPECT_EQ(phases.back().end_ms, 970);
}

}  // namespace
}  // namespace qkv
