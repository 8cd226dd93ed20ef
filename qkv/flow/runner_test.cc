// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <sstream>

#include "qkv/flow/agent_protocol.h"
#include "qkv/flow/runner_fixture.h"

namespace qkv {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(RunnerTest, HandsOverAlongAChain) {
  Given(kChain);
  Does("writer", "say one; say two; answer");
  const ModeResult result = Run();
  ASSERT_TRUE(result.ok());
  EXPECT_THAT(events_, ElementsAre("ready writer", "started writer", "text writer: one", "text writer: two",
                                   "finished writer", "started editor", "finished editor", "released writer"));

  const AgentTurn writer = TurnOf("writer");
  EXPECT_EQ(writer.system, "be kind");
  EXPECT_EQ(writer.prompt, "on mills");
  EXPECT_EQ(writer.max_tokens, 9);
  EXPECT_EQ(writer.sampling.seed, 5u);
  EXPECT_EQ(writer.inherits, "");
  EXPECT_THAT(writer.history, IsEmpty());
  EXPECT_NE(writer.publish_as, "");
  const AgentTurn editor = TurnOf("editor");
  EXPECT_EQ(editor.prompt, "mend: writer-says");
  EXPECT_EQ(editor.inherits, "id-writer");
  EXPECT_THAT(editor.history, ElementsAre(1, 1, 2, 3));
  EXPECT_EQ(editor.on_miss, OnMiss::kFail);
  EXPECT_EQ(editor.publish_as, "") << "nobody goes on from it";
  EXPECT_EQ(writer.threads, 2);
  EXPECT_EQ(ToString(writer.kv), "i8");
  EXPECT_EQ(ToString(editor.kv), "i4") << "its own choice";

  const AgentSetup setup = SetupOf("none.gguf");
  EXPECT_EQ(setup.model, "none.gguf");
  EXPECT_NE(setup.socket, "");

  EXPECT_EQ(result.outputs.at("editor"), "editor-says");
  ASSERT_EQ(result.hops.size(), 2u);
  EXPECT_EQ(result.hops[0].handoff, HandoffMode::kText) << "who starts afresh reads its own prompt";
  EXPECT_EQ(result.hops[1].from, "writer");
  EXPECT_EQ(result.hops[1].handoff, HandoffMode::kAttach);
  EXPECT_EQ(result.hops[1].tokens_reused, 20);
  EXPECT_EQ(result.hops[1].output_tokens, 3);
  EXPECT_EQ(result.kv_bytes, 1u + 2u) << "what each wrote";
  EXPECT_GT(result.peak_pss_bytes, 1u << 20);
  EXPECT_GT(result.end_to_end_ms, 0);
  EXPECT_GT(result.with_start_up_ms, result.end_to_end_ms);
  EXPECT_NEAR(result.tasks_per_minute * result.end_to_end_ms, 60000, 1e-6);
  ExpectNobodyLeft();
}

TEST_F(RunnerTest, WorkersBalanceTheKeysThatTheyHandOver) {
  Given(kChain);
  flow_.bal = true;
  EXPECT_EQ(Run().kv, "bal:i8");
  EXPECT_TRUE(SetupOf("none.gguf").balanced);
  options_.mode = FlowMode::kText;
  EXPECT_EQ(Run().kv, "f16");
  EXPECT_FALSE(SetupOf("none.gguf").balanced);
}

TEST_F(RunnerTest, TextModeSharesNothing) {
  Given(kChain);
  options_.mode = FlowMode::kText;
  const ModeResult result = Run();
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.kv, "f16");
  EXPECT_EQ(SetupOf("none.gguf").socket, "");
  EXPECT_EQ(ToString(TurnOf("editor").kv), "f16");
  EXPECT_EQ(TurnOf("writer").publish_as, "");
  EXPECT_EQ(TurnOf("editor").inherits, "") << "whatever the writer says it published";
  EXPECT_THAT(TurnOf("editor").history, ElementsAre(1, 1, 2, 3));
  EXPECT_EQ(result.kv_bytes, 1000u + 2000u) << "what each holds";
}

TEST_F(RunnerTest, BrokerLivesInAPrivateDirectoryAndGoesWithTheRun) {
  Given(kChain);
  std::string socket;
  mode_t mode = 0;
  also_ = [&](const FlowEvent& event) {
    if (event.kind != FlowEvent::Kind::kStarted || !socket.empty()) return;
    socket = SetupOf("none.gguf").socket;
    struct stat info {};
    EXPECT_EQ(::stat(std::filesystem::path(socket).parent_path().c_str(), &info), 0);
    mode = info.st_mode & 07777;
  };
  Run();
  EXPECT_EQ(mode, 0700u);
  EXPECT_FALSE(socket.empty());
  EXPECT_FALSE(std::filesystem::exists(std::filesystem::path(socket).parent_path()));
}

TEST_F(RunnerTest, FanOutRunsAtTheSameTime) {
  Given(R"(agents:
  - {name: root, prompt: x}
  - {name: left, inherits: root}
  - {name: right, inherits: root}
)");
  options_.jobs = 2;
  // Each answers only once the other has begun.
  Does("left", "while [ ! -e right.turn ]; do sleep 0.01; done; answer");
  Does("right", "while [ ! -e left.turn ]; do sleep 0.01; done; answer");
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(events_.back(), "released root");
}

TEST_F(RunnerTest, FirstTurnWaitsForAllModels) {
  Given(kChain);
  options_.in_place = false;
  Loads("none.gguf", "if ! mkdir first 2>&-; then sleep 0.2; fi; ready");
  EXPECT_TRUE(Run().ok());
  EXPECT_LT(Position("ready editor"), Position("started writer"));
  EXPECT_LT(Position("ready writer"), Position("started writer"));
}

TEST_F(RunnerTest, ReaderWithOtherTokensGetsWords) {
  Given(R"(agents:
  - {name: a, system: sys, prompt: first}
  - {name: b, inherits: a, prompt: second}
  - {name: c, inherits: b, prompt: third}
)");
  flow_.agents[2].model = "other.gguf";
  Loads("other.gguf", "ready another");
  const ModeResult result = Run();
  ASSERT_TRUE(result.ok());
  const AgentTurn turn = TurnOf("c");
  EXPECT_EQ(turn.prompt, "sys\n\nfirst\n\na-says\n\nsecond\n\nb-says\n\nthird") << "all that b was told and said";
  EXPECT_EQ(turn.inherits, "");
  EXPECT_THAT(turn.history, IsEmpty());
  EXPECT_EQ(result.hops[2].reason, Reason::kTokenizerMismatch);
}

TEST_F(RunnerTest, ReaderWithOtherTokensFailsIfTextIsNotWanted) {
  Given(kChain);
  flow_.agents[1].model = "other.gguf";
  Loads("other.gguf", "ready another");
  const ModeResult result = Run();
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.code, Code::kIncompatible);
  EXPECT_EQ(result.failures[0].error.reason, Reason::kTokenizerMismatch);
}

TEST_F(RunnerTest, AgentsOfOneModelShareWorkers) {
  std::string yaml = "agents:\n  - {name: a0, prompt: x}\n";
  for (int i = 1; i < 12; ++i) yaml += fmt::format("  - {{name: a{}, inherits: a{}}}\n", i, i - 1);
  Given(yaml);
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(Pids().size(), 1u) << "each goes on where its context is";
  EXPECT_THAT(prepared_, IsEmpty());
  ExpectNobodyLeft();
  std::filesystem::remove(directory_ / "pids");
  options_.in_place = false;
  for (int i = 0; i < 11; ++i) {
    Does(fmt::format("a{}", i), fmt::format("say x; while [ ! -e a{}.prepare ]; do sleep 0.01; done; answer", i + 1));
  }
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(Pids().size(), 2u) << "one at work and one getting ready";
  EXPECT_EQ(prepared_.size(), 11u);
  ExpectNobodyLeft();
}

TEST_F(RunnerTest, JobsLimitHowManyWorkAtOneTime) {
  std::string yaml = "agents:\n";
  for (int i = 0; i < 9; ++i) yaml += fmt::format("  - {{name: a{}, prompt: x}}\n", i);
  for (int jobs : {1, 3}) {
    Given(yaml);
    for (const FlowAgent& agent : flow_.agents) Does(agent.name, "sleep 0.02; answer");
    options_.jobs = jobs;
    int running = 0, most = 0;
    also_ = [&](const FlowEvent& event) {
      if (event.kind == FlowEvent::Kind::kStarted) most = std::max(most, ++running);
      if (event.kind == FlowEvent::Kind::kFinished) --running;
    };
    EXPECT_TRUE(Run().ok());
    EXPECT_EQ(most, jobs);
  }
}

TEST_F(RunnerTest, ThreadsAreSharedByThoseWhoWorkTogether) {
  Given(R"(agents:
  - {name: a, prompt: x}
  - {name: b, prompt: x}
  - {name: c, prompt: x}
  - {name: last, prompt: "{{a.output}}{{b.output}}{{c.output}}"}
)");
  flow_.threads = 8;
  options_.jobs = 3;
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(TurnOf("a").threads, 2);
  EXPECT_EQ(TurnOf("b").threads, 2);
  EXPECT_EQ(TurnOf("last").threads, 8);
}

TEST_F(RunnerTest, ReadersArePreparedWhileTheirProducersWork) {
  Given(R"(agents:
  - {name: a, prompt: x}
  - {name: b, inherits: a}
  - {name: heir, inherits: b, prompt: y}
  - {name: c, inherits: b, prompt: y}
  - {name: d, system: own, reads: [b], prompt: z}
)");
  options_.jobs = 2;
  // The producer answers only once its readers are ready.
  Does("b", "say x; while [ ! -e c.prepare -o ! -e d.prepare ]; do sleep 0.01; done; answer");
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(PrepareOf("c").context, "id-a") << "what its producer goes on from is there already";
  EXPECT_FALSE(PrepareOf("c").prefix);
  EXPECT_EQ(Read("heir.prepare"), "") << "it goes on where its context is";
  EXPECT_TRUE(PrepareOf("d").prefix);
  EXPECT_EQ(PrepareOf("d").system, "own");
}

TEST_F(RunnerTest, NobodyIsPreparedWhileAContextIsTakenOver) {
  Given(R"(agents:
  - {name: a, prompt: x}
  - {name: b, inherits: a, prompt: y}
  - {name: c, inherits: b, prompt: z}
)");
  options_.in_place = false;
  // Long enough for a command to arrive, were there one.
  Does("b", "sleep 0.2; [ -e c.prepare ] && exit 7; say x; while [ ! -e c.prepare ]; do sleep 0.01; done; answer");
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(PrepareOf("c").context, "id-a");
}

TEST_F(RunnerTest, TheFirstToGoOnFromAContextDoesSoInItsProducersWorker) {
  Given(R"(agents:
  - {name: a, prompt: x}
  - {name: b, inherits: a, prompt: y}
  - {name: c, inherits: b, prompt: y}
  - {name: d, inherits: b, prompt: z}
)");
  options_.jobs = 2;
  const auto run = [&] {
    std::filesystem::remove(directory_ / "ran");
    EXPECT_TRUE(Run().ok());
    std::map<std::string, pid_t> ran;
    std::istringstream lines(Read("ran"));
    std::string name;
    for (pid_t pid; lines >> name >> pid;) ran[name] = pid;
    return ran;
  };
  Does("c", "while [ ! -e d.turn ]; do sleep 0.01; done; answer");  // d must have another
  const auto in_place = run();
  EXPECT_EQ(in_place.at("b"), in_place.at("a"));
  EXPECT_FALSE(TurnOf("a").announce) << "nobody else would look at it";
  EXPECT_TRUE(TurnOf("b").announce) << "d gets ready elsewhere";
  EXPECT_EQ(in_place.at("c"), in_place.at("a"));
  EXPECT_NE(in_place.at("d"), in_place.at("a"));
  Does("a", "while [ ! -e b.prepare ]; do sleep 0.01; done; answer");
  options_.in_place = false;
  const auto apart = run();
  EXPECT_NE(apart.at("b"), apart.at("a")) << "it was prepared in another";
}

TEST_F(RunnerTest, NothingIsPreparedIfNotWanted) {
  Given(kChain);
  options_.ahead = false;
  const ModeResult result = Run();
  EXPECT_TRUE(result.ok());
  EXPECT_THAT(prepared_, IsEmpty());
  EXPECT_EQ(Pids().size(), 1u);
  EXPECT_EQ(result.hops[1].prepared_ms, 0);
}

TEST_F(RunnerTest, ContextsThatAreReadTravelWithTheirTokens) {
  Given(R"(agents:
  - {name: a, prompt: x}
  - {name: b, prompt: x}
  - {name: c, system: own, prompt: z, reads: [b, {from: a, on_miss: fail}]}
)");
  EXPECT_TRUE(Run().ok());
  AgentTurn turn = TurnOf("c");
  ASSERT_EQ(turn.reads.size(), 2u);
  EXPECT_EQ(turn.reads[0].context, "id-b") << "in the order of the file";
  EXPECT_THAT(turn.reads[0].history, ElementsAre(2, 1, 2, 3));
  EXPECT_EQ(turn.reads[1].context, "id-a");
  EXPECT_EQ(turn.reads[1].on_miss, OnMiss::kFail);
  EXPECT_EQ(turn.inherits, "");
  options_.mode = FlowMode::kText;
  EXPECT_TRUE(Run().ok());
  turn = TurnOf("c");
  ASSERT_EQ(turn.reads.size(), 2u);
  EXPECT_EQ(turn.reads[1].context, "") << "text is wanted";
  EXPECT_THAT(turn.reads[1].history, ElementsAre(1, 1, 2, 3));
}

TEST_F(RunnerTest, AContextBeyondTheBudgetIsReadAsText) {
  Given(R"(agents:
  - {name: a, prompt: x}
  - {name: fits, inherits: {from: a, budget: 4}}
  - {name: beyond, inherits: {from: a, budget: 3}}
  - {name: strict, inherits: {from: a, budget: 3, on_miss: fail}}
)");
  const ModeResult result = Run();
  EXPECT_EQ(TurnOf("fits").inherits, "id-a");
  EXPECT_EQ(TurnOf("beyond").inherits, "");
  EXPECT_THAT(TurnOf("beyond").history, ElementsAre(1, 1, 2, 3));
  ASSERT_EQ(result.hops.size(), 3u);
  EXPECT_EQ(result.hops[2].reason, Reason::kTooLong);
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].agent, "strict");
  EXPECT_EQ(result.failures[0].error.message, "the context of 'a' has 4 tokens, the budget is 3");
}

TEST_F(RunnerTest, AContextThatCouldNotBePublishedIsReadAsText) {
  Given(kChain);
  flow_.agents[1].edges[0].on_miss = OnMiss::kText;
  TurnResult result;
  result.context_tokens = {7, 8};
  result.publish_error = "the broker is gone";
  Write("writer.done", ToLine(AgentDone{result}));
  const ModeResult ran = Run();
  ASSERT_TRUE(ran.ok());
  EXPECT_EQ(TurnOf("editor").inherits, "");
  EXPECT_THAT(TurnOf("editor").history, ElementsAre(7, 8));
  EXPECT_EQ(ran.hops[1].reason, Reason::kPeerLost);
  EXPECT_THAT(ran.hops[1].reason_detail, HasSubstr("the broker is gone"));
}

TEST_F(RunnerTest, TheGapIsFromTheLastProducersLastToken) {
  Given(kChain);
  TurnResult writer, editor;
  writer.context_id = "w";
  writer.context_tokens = {1};
  writer.first_token_at_ms = 1000;
  writer.last_token_at_ms = 1500;
  editor.first_token_at_ms = 1620;
  Write("writer.done", ToLine(AgentDone{writer}));
  Write("editor.done", ToLine(AgentDone{editor}));
  const ModeResult result = Run();
  ASSERT_EQ(result.hops.size(), 2u);
  EXPECT_EQ(result.hops[0].gap_ms, -1);
  EXPECT_EQ(result.hops[1].gap_ms, 120);
}

TEST_F(RunnerTest, EveryInterleavingGivesTheSameResult) {
  std::string yaml = R"(agents:
  - {name: a, prompt: x}
  - {name: b, prompt: x}
  - {name: c, inherits: a, prompt: "{{b.output}}"}
  - {name: d, reads: [a, b], prompt: y}
  - {name: e, inherits: c, text: d}
)";
  std::map<std::string, std::string> turns;
  for (int round = 0; round < 20; ++round) {
    Given(yaml);
    options_.jobs = 1 + round % 4;
    options_.ahead = round % 2 == 0;
    for (size_t i = 0; i < flow_.agents.size(); ++i) {
      Does(flow_.agents[i].name, fmt::format("sleep 0.0{}; answer", (round * 7 + static_cast<int>(i) * 3) % 5));
    }
    ASSERT_TRUE(Run().ok());
    for (const FlowAgent& agent : flow_.agents) {
      AgentTurn turn = TurnOf(agent.name);
      turn.threads = 1;  // these two may differ
      turn.announce = false;
      const auto [known, is_new] = turns.emplace(agent.name, ToLine(turn));
      EXPECT_EQ(known->second, ToLine(turn)) << "round " << round;
    }
  }
}

TEST_F(RunnerTest, CompareRunsTextThenEveryCodecOfTheFlow) {
  Given("kv: [i8, i4]\n" + std::string(kChain));
  std::vector<std::string> modes;
  auto report = CompareModes(flow_, options_, [&](FlowMode mode, const KvChoice& kv) {
    modes.push_back(std::string(FlowModeName(mode)) + " " + ToString(kv));
  });
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_THAT(modes, ElementsAre("text f16", "handoff i8", "handoff i4"));
  ASSERT_EQ(report->modes.size(), 3u);
  EXPECT_EQ(report->modes[2].kv, "i4");
  ASSERT_EQ(report->agreement.size(), 4u);
  EXPECT_EQ(report->agreement[3].kv, "i4");
  EXPECT_EQ(report->agreement[3].agent, "editor");
  EXPECT_EQ(report->agreement[3].ratio(), 1.0);
}

TEST_F(RunnerTest, CompareEndsWhenStopped) {
  Given(kChain);
  std::atomic<bool> stop{true};
  options_.stop = &stop;
  auto report = CompareModes(flow_, options_);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->modes.size(), 1u);
}

}  // namespace
}  // namespace qkv
