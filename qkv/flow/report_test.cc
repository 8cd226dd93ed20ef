// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace qkv {
namespace {

using ::testing::HasSubstr;

// Two modes of a flow of two agents, with numbers made by hand.
FlowReport Example() {
  ModeResult text;
  text.mode = FlowMode::kText;
  text.kv = "f16";
  text.end_to_end_ms = 12345.6789;
  text.with_start_up_ms = 13000;
  text.peak_pss_bytes = 400 * 1048576;
  text.kv_bytes = 24 * 1048576 + 524288;
  text.tasks_per_minute = 4.8600001;
  text.hops = {{.agent = "writer", .tokens_recomputed = 85, .ttft_ms = 412.4, .output_tokens = 4},
               {.agent = "editor", .from = "writer", .tokens_recomputed = 260, .ttft_ms = 1210, .output_tokens = 5}};
  text.output_tokens = {{"writer", {1, 2, 3, 4}}, {"editor", {1, 2, 3, 4, 5}}};

  ModeResult handoff;
  handoff.mode = FlowMode::kHandoff;
  handoff.kv = "i8";
  handoff.end_to_end_ms = 9000;
  handoff.with_start_up_ms = 9500;
  handoff.peak_pss_bytes = uint64_t{3} << 29;
  handoff.kv_bytes = 9216;
  handoff.tasks_per_minute = 6.6666667;
  handoff.jobs = handoff.threads = 2;
  handoff.hops = {{.agent = "writer", .tokens_recomputed = 85, .ttft_ms = 412.4, .output_tokens = 4},
                  {.agent = "editor",
                   .from = "writer",
                   .handoff = HandoffMode::kAttach,
                   .tokens_reused = 235,
                   .tokens_recomputed = 25,
                   .attach_ms = 0.4321,
                   .ttft_ms = 98.7654,
                   .output_tokens = 4}};
  handoff.output_tokens = {{"writer", {1, 2, 3, 4}}, {"editor", {1, 2, 9, 4}}};

  FlowReport report{.flow = "demo", .modes = {text, handoff}};
  report.agreement = CompareOutputs(text, handoff);
  return report;
}

TEST(Report, TableIsAlignedAndHasUnits) {
  EXPECT_EQ(FormatTable(Example()),
            "demo               text (f16)  handoff (i8)\n"
            "end-to-end             12.3 s       9000 ms\n"
            "peak memory (PSS)   400.0 MiB      1.50 GiB\n"
            "KV                   24.5 MiB       9.0 KiB\n"
            "tasks per minute         4.86          6.67\n"
            "\n"
            "mode          agent   from    handoff  reused  recomputed   attach     TTFT  out tokens\n"
            "text (f16)    writer  -       text          0          85        -   412 ms           4\n"
            "text (f16)    editor  writer  text          0         260        -  1210 ms           5\n"
            "handoff (i8)  writer  -       text          0          85        -   412 ms           4\n"
            "handoff (i8)  editor  writer  attach      235          25  0.43 ms    99 ms           4\n"
            "\n"
            "same output as text  agent   tokens  share\n"
            "handoff (i8)         writer  4 of 4  100 %\n"
            "handoff (i8)         editor  2 of 5   40 %\n");
}

TEST(Report, JsonHasExactlyTheDocumentedKeys) {
  const auto json = nlohmann::json::parse(ToJson(Example()));
  EXPECT_EQ(json, nlohmann::json::parse(R"({
    "modes": [
      {"mode": "text", "kv": "f16", "end_to_end_ms": 12345.679, "peak_pss_bytes": 419430400, "kv_bytes": 25690112,
       "tasks_per_minute": 4.86, "jobs": 0, "threads": 0, "ahead": true, "hops": [
        {"agent": "writer", "from": null, "handoff": "text", "reason": "", "tokens_reused": 0, "tokens_recomputed": 85,
         "attach_ms": 0.0, "ttft_ms": 412.4, "output_tokens": 4, "ready_at_ms": 0.0, "started_at_ms": 0.0, "ended_at_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0,
         "publish_ms": 0.0, "gap_ms": null, "prepared_ms": 0.0, "prepared_tokens": 0, "prepared_bytes": 0, "kv_bytes": 0,
         "own_kv_bytes": 0, "attempts": 1, "output": ""},
        {"agent": "editor", "from": "writer", "handoff": "text", "reason": "", "tokens_reused": 0,
         "tokens_recomputed": 260, "attach_ms": 0.0, "ttft_ms": 1210.0, "output_tokens": 5, "ready_at_ms": 0.0, "started_at_ms": 0.0, "ended_at_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0,
         "publish_ms": 0.0, "gap_ms": null, "prepared_ms": 0.0, "prepared_tokens": 0, "prepared_bytes": 0, "kv_bytes": 0,
         "own_kv_bytes": 0, "attempts": 1, "output": ""}]},
      {"mode": "handoff", "kv": "i8", "end_to_end_ms": 9000.0, "peak_pss_bytes": 1610612736, "kv_bytes": 9216,
       "tasks_per_minute": 6.667, "jobs": 2, "threads": 2, "ahead": true, "hops": [
        {"agent": "writer", "from": null, "handoff": "text", "reason": "", "tokens_reused": 0, "tokens_recomputed": 85,
         "attach_ms": 0.0, "ttft_ms": 412.4, "output_tokens": 4, "ready_at_ms": 0.0, "started_at_ms": 0.0, "ended_at_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0,
         "publish_ms": 0.0, "gap_ms": null, "prepared_ms": 0.0, "prepared_tokens": 0, "prepared_bytes": 0, "kv_bytes": 0,
         "own_kv_bytes": 0, "attempts": 1, "output": ""},
        {"agent": "editor", "from": "writer", "handoff": "attach", "reason": "", "tokens_reused": 235,
         "tokens_recomputed": 25, "attach_ms": 0.432, "ttft_ms": 98.765, "output_tokens": 4, "ready_at_ms": 0.0, "started_at_ms": 0.0, "ended_at_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0,
         "publish_ms": 0.0, "gap_ms": null, "prepared_ms": 0.0, "prepared_tokens": 0, "prepared_bytes": 0, "kv_bytes": 0,
         "own_kv_bytes": 0, "attempts": 1, "output": ""}]}],
    "output_agreement": {"i8": {"writer": {"tokens_equal": 4, "tokens": 4, "ratio": 1.0},
                                "editor": {"tokens_equal": 2, "tokens": 5, "ratio": 0.4}}}
  })"));
}

TEST(Report, ReasonsStandBesideTheMode) {
  FlowReport report = Example();
  report.modes[1].hops[1].handoff = HandoffMode::kText;
  report.modes[1].hops[1].reason = Reason::kModelMismatch;
  EXPECT_THAT(FormatTable(report), HasSubstr("text (model_mismatch)"));
  EXPECT_EQ(nlohmann::json::parse(ToJson(report))["modes"][1]["hops"][1]["reason"], "model_mismatch");
}

TEST(Report, FailuresAreToldInBothForms) {
  FlowReport report = Example();
  report.modes[1].failures = {{"editor", Error{Code::kPeerLost, "its process was killed", Reason::kPeerLost}}};
  report.modes[1].skipped = {"printer"};
  EXPECT_THAT(FormatTable(report), AllOf(HasSubstr("handoff (i8): agent 'editor' failed: its process was killed\n"),
                                         HasSubstr("handoff (i8): agent 'printer' was not run\n")));
  const auto json = nlohmann::json::parse(ToJson(report))["modes"][1];
  EXPECT_EQ(json["failures"][0]["code"], "peer_lost");
  EXPECT_EQ(json["skipped"][0], "printer");
}

TEST(Report, WhatIsUnknownIsADash) {
  FlowReport report{.flow = "empty", .modes = {ModeResult{.kv = "i8"}}};
  EXPECT_THAT(FormatTable(report), HasSubstr("peak memory (PSS)             -\n"));
}

TEST(Report, OutputsThatAreNotUtf8StillMakeJson) {
  FlowReport report = Example();
  report.modes[0].failures = {{"a", Error{Code::kIo, "bad \xff byte"}}};
  EXPECT_THAT(ToJson(report), HasSubstr("bad \xEF\xBF\xBD byte"));
}

TEST(Agreement, OfEmptyOutputsIsComplete) {
  ModeResult text, handoff;
  text.output_tokens = handoff.output_tokens = {{"a", {}}};
  handoff.hops = {{.agent = "a"}};
  EXPECT_EQ(CompareOutputs(text, handoff).at(0).ratio(), 1.0);
}

TEST(Agreement, CountsAgainstTheLongerOutput) {
  ModeResult text, handoff;
  text.output_tokens = {{"a", {1, 2}}};
  handoff.output_tokens = {{"a", {1, 2, 3, 4}}};
  handoff.hops = {{.agent = "a"}};
  EXPECT_EQ(CompareOutputs(text, handoff).at(0).ratio(), 0.5);
}

TEST(Agreement, LeavesOutWhoDidNotFinishInBoth) {
  ModeResult text, handoff;
  handoff.output_tokens = {{"a", {1}}};
  handoff.hops = {{.agent = "a"}};
  EXPECT_TRUE(CompareOutputs(text, handoff).empty());
}

TEST(ExitStatus, FollowsWhatHappened) {
  FlowReport report{.modes = {ModeResult{}, ModeResult{}}};
  EXPECT_EQ(FlowExitStatus(report), 0);
  report.modes[1].failures = {{"a", Error{Code::kPeerLost, ""}}};
  EXPECT_EQ(FlowExitStatus(report), 1) << "an agent that dies is our failure";
  report.modes[1].failures = {{"a", Error{Code::kNotFound, ""}}};
  EXPECT_EQ(FlowExitStatus(report), 2) << "a model that is not there is the user's to mend";
  report.modes[1].stopped = true;
  EXPECT_EQ(FlowExitStatus(report), 130);
}

}  // namespace
}  // namespace qkv
