// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Of the runner: agents and workers that crash, hang, talk nonsense or are stopped.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "qkv/flow/agent_protocol.h"
#include "qkv/flow/runner_fixture.h"

namespace qkv {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(RunnerTest, CrashFailsTheAgentAndSkipsWhatDependsOnIt) {
  Given(R"(agents:
  - {name: writer, prompt: x}
  - {name: editor, inherits: writer}
  - {name: printer, prompt: "{{editor.output}}"}
  - {name: other, prompt: y}
)");
  Does("writer", "echo 'reading page 3' >&2; kill -9 $$");
  FlowReport report{.modes = {Run()}};
  const ModeResult& result = report.modes[0];
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].agent, "writer");
  EXPECT_EQ(result.failures[0].error.code, Code::kPeerLost);
  EXPECT_EQ(result.failures[0].error.message,
            "its process was killed by signal 9 (Killed) before its answer was complete; it said: reading page 3");
  EXPECT_THAT(result.skipped, ElementsAre("editor", "printer"));
  ASSERT_EQ(result.hops.size(), 1u);
  EXPECT_EQ(result.hops[0].agent, "other") << "it needs nobody";
  EXPECT_EQ(result.tasks_per_minute, 0) << "the task was not done";
  EXPECT_EQ(FlowExitStatus(report), 1);
  ExpectNobodyLeft();
}

TEST_F(RunnerTest, CrashWhileLoading) {
  Given(kChain);
  flow_.agents[1].model = "bad.gguf";
  Loads("bad.gguf", "echo 'one\ntwo\nthree\nfour' >&2; exit 3");
  const ModeResult result = Run();
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.message,
            "its process exited with status 3 while loading the model; it said: two|three|four");
  EXPECT_EQ(result.hops.size(), 1u) << "the writer's work is still done";
}

TEST_F(RunnerTest, AgentMayDieAfterItsAnswer) {
  Given(kChain);
  Does("writer", "answer; exit 1");
  EXPECT_TRUE(Run().ok()) << "the editor goes on elsewhere";
  EXPECT_EQ(Pids().size(), 2u);
}

TEST_F(RunnerTest, ErrorsOfAnAgentArriveAsTheyAre) {
  Given(kChain);
  Write("error", ToLine(AgentFailed{Error{Code::kIncompatible, "rope.base differs", Reason::kModelMismatch}}));
  Does("editor", "cat error; exit 1");
  const ModeResult result = Run();
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.code, Code::kIncompatible);
  EXPECT_EQ(result.failures[0].error.reason, Reason::kModelMismatch);
  EXPECT_EQ(result.failures[0].error.message, "rope.base differs");
  EXPECT_EQ(events_.back(), "released writer") << "its last reader is through, however";
}

TEST_F(RunnerTest, GarbageFailsTheAgent) {
  Given(kChain);
  Does("writer", "echo 'Segmentation what?'; exec sleep 60");
  const ModeResult result = Run();
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.code, Code::kCorrupt);
  EXPECT_THAT(result.failures[0].error.message, HasSubstr("Segmentation what?"));
  ExpectNobodyLeft();
}

TEST_F(RunnerTest, EventsOutOfTurnFailTheAgent) {
  Given(kChain);
  const auto expect_failure = [&](const std::string& what) {
    const ModeResult result = Run();
    ASSERT_EQ(result.failures.size(), 1u) << what;
    EXPECT_EQ(result.failures[0].agent, "writer");
    EXPECT_EQ(result.failures[0].error.message, "agent protocol: an event out of turn") << what;
  };
  Does("writer", "ready; exec sleep 60");
  expect_failure("ready in a turn");
  for (const char* script : {"say early; exec sleep 60", "ready; ready; exec sleep 60"}) {
    Loads("none.gguf", script);
    expect_failure(script);
  }
  ExpectNobodyLeft();
}

TEST_F(RunnerTest, SilenceEndsWithTheDeadline) {
  Given(kChain);
  options_.turn_deadline = milliseconds(150);
  Does("writer", "exec sleep 60");
  ModeResult result = Run();
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.code, Code::kTimeout);
  EXPECT_EQ(result.failures[0].error.message, "it was not done within 0.15 s");

  options_.load_deadline = milliseconds(150);
  options_.turn_deadline = seconds(20);
  Loads("none.gguf", "exec sleep 60");
  result = Run();
  ASSERT_GE(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.message, "it was not ready within 0.15 s");
  ExpectNobodyLeft();
}

TEST_F(RunnerTest, StopEndsAllWithinASecond) {
  Given(kChain);
  Does("writer", "say begun; trap '' TERM INT HUP; while :; do read x || :; done");
  std::atomic<bool> stop{false};
  std::chrono::steady_clock::time_point stopped_at;
  options_.stop = &stop;
  also_ = [&](const FlowEvent& event) {
    if (event.kind != FlowEvent::Kind::kText) return;
    stop = true;
    stopped_at = std::chrono::steady_clock::now();
  };
  FlowReport report{.modes = {Run()}};
  EXPECT_LT(std::chrono::steady_clock::now() - stopped_at, seconds(1));
  EXPECT_TRUE(report.modes[0].stopped);
  EXPECT_EQ(FlowExitStatus(report), 130);
  ExpectNobodyLeft();
}

TEST_F(RunnerTest, WorkerThatIgnoresTheHangUpIsKilled) {
  Given(kChain);
  Does("editor", "answer; exec sleep 60");
  EXPECT_TRUE(Run().ok());
  ExpectNobodyLeft();
}

TEST_F(RunnerTest, MissingProgramFailsEveryAgent) {
  Given(kChain);
  options_.worker_argv = {"/nowhere/agent"};
  const ModeResult result = Run();
  EXPECT_EQ(result.failures.size(), 1u) << "the editor is skipped, it has no writer";
  EXPECT_EQ(result.failures[0].error.code, Code::kNotFound);
  EXPECT_THAT(result.skipped, ElementsAre("editor"));
}

TEST_F(RunnerTest, AgentWithoutAModelIsTheUsersToMend) {
  Given(kChain);
  flow_.model.clear();
  flow_.agents[0].model = "x.gguf";
  auto result = RunFlow(flow_, options_);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, Code::kInvalidArgument);
  EXPECT_THAT(result.error().message, HasSubstr("agent 'editor' has no model"));
}

TEST_F(RunnerTest, CrashIsTriedAgainAsOftenAsWanted) {
  Given(kChain);
  flow_.agents[0].retries = 2;
  Does("writer", "echo x >> tries; if [ $(wc -l < tries) -lt 3 ]; then kill -9 $$; fi; answer");
  const ModeResult result = Run();
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.hops[0].attempts, 3);
  EXPECT_EQ(std::count(events_.begin(), events_.end(), "retried writer"), 2);

  std::filesystem::remove(directory_ / "tries");
  flow_.agents[0].retries = 1;
  EXPECT_EQ(Run().failures.size(), 1u);
  ExpectNobodyLeft();
}

TEST_F(RunnerTest, WhatWouldFailAgainIsNotTriedAgain) {
  Given(kChain);
  flow_.agents[0].retries = 5;
  Write("error", ToLine(AgentFailed{Error{Code::kInvalidArgument, "too long", Reason::kTooLong}}));
  Does("writer", "echo x >> tries; cat error");
  EXPECT_EQ(Run().failures.size(), 1u);
  EXPECT_EQ(Read("tries"), "x\n");
}

TEST_F(RunnerTest, AWorkerSurvivesItsAgentsError) {
  Given("agents:\n  - {name: bad, prompt: x, max_tokens: 999}\n  - {name: good, prompt: y}\n");
  options_.jobs = 1;
  options_.ahead = false;
  Write("error", ToLine(AgentFailed{Error{Code::kInvalidArgument, "too long", Reason::kTooLong}}));
  Does("bad", "cat error");
  const ModeResult result = Run();
  EXPECT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.hops.size(), 1u);
  EXPECT_EQ(Pids().size(), 1u);
}

TEST_F(RunnerTest, AnAgentsOwnDeadlineCounts) {
  Given(kChain);
  flow_.agents[0].deadline_s = 0.15;
  Does("writer", "exec sleep 60");
  const ModeResult result = Run();
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.message, "it was not done within 0.15 s");
}

}  // namespace
}  // namespace qkv
