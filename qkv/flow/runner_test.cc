// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "qkv/flow/agent_protocol.h"

namespace qkv {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

// An agent that needs no model: a shell script that speaks the protocol. It keeps the lines it got as <agent>.setup and
// <agent>.turn and its pid as <agent>.pid, and does what <agent>.sh says, by default: answer at once.
constexpr char kFakeAgent[] = R"(
cd "$1" || exit 9
IFS= read -r setup || exit 8
agent=${setup#*'"agent":"'}
agent=${agent%%'"'*}
echo $$ > "$agent.pid"
printf '%s\n' "$setup" > "$agent.setup"
ready() { echo '{"type":"ready","load_ms":1.5,"tokenizer":"'"${1:-same}"'"}'; }
turn() { IFS= read -r turn || exit 7; printf '%s\n' "$turn" > "$agent.turn"; }
say() { echo '{"type":"text","piece":"'"$1"'"}'; }
answer() { cat "$agent.done"; }
hold() { while IFS= read -r more; do :; done; exit 0; }
if [ -e "$agent.sh" ]; then . "./$agent.sh"; else ready; turn; answer; hold; fi
)";

bool IsGone(pid_t pid) {
  return ::kill(pid, 0) < 0 && errno == ESRCH;
}

class RunnerTest : public ::testing::Test {
 protected:
  RunnerTest() {
    std::string path = (std::filesystem::temp_directory_path() / "runner_test.XXXXXX").string();
    EXPECT_NE(::mkdtemp(path.data()), nullptr);
    directory_ = path;
    Write("agent", kFakeAgent);
    options_.worker_argv = {"/bin/sh", (directory_ / "agent").string(), directory_.string()};
    options_.load_deadline = options_.turn_deadline = seconds(20);
    options_.kv = CodecPair{CodecId::kI8, CodecId::kI8};
    options_.on_event = [this](const FlowEvent& event) { OnEvent(event); };
  }
  ~RunnerTest() override { std::filesystem::remove_all(directory_); }

  void Write(const std::string& name, const std::string& text) { std::ofstream(directory_ / name) << text; }
  std::string Read(const std::string& name) {
    std::stringstream text;
    text << std::ifstream(directory_ / name).rdbuf();
    return text.str();
  }

  void Given(const std::string& agents_yaml) {
    auto flow = ParseFlow("model: none.gguf\nthreads: 2\n" + agents_yaml, "f.yaml");
    ASSERT_TRUE(flow) << flow.error().message;
    flow_ = *std::move(flow);
    int n = 0;
    for (const FlowAgent& agent : flow_.agents) {
      TurnResult result;
      result.text = agent.name + "-says";
      result.output_tokens = {++n, 2, 3};
      result.context_tokens = {n, 1, 2, 3};
      result.context_id = "id-" + agent.name;
      result.mode = agent.inherits.empty() ? HandoffMode::kNone : HandoffMode::kAttach;
      result.tokens_reused = 10 * n;
      result.tokens_recomputed = n;
      result.attach_ms = 0.5;
      result.ttft_ms = 2;
      result.kv_bytes = 1000 * n;
      result.own_kv_bytes = n;
      Write(agent.name + ".done", ToLine(AgentDone{result}));
    }
  }
  void Does(const std::string& agent, const std::string& script) { Write(agent + ".sh", script); }

  ModeResult Run() {
    auto result = RunFlow(flow_, options_);
    EXPECT_TRUE(result) << result.error().message;
    return result ? *result : ModeResult{};
  }
  AgentSetup SetupOf(const std::string& agent) { return Received<AgentSetup>(agent + ".setup"); }
  AgentTurn TurnOf(const std::string& agent) { return Received<AgentTurn>(agent + ".turn"); }

  // All agents that ever started are gone.
  void ExpectNobodyLeft() {
    for (const FlowAgent& agent : flow_.agents) {
      if (const std::string pid = Read(agent.name + ".pid"); !pid.empty()) {
        EXPECT_TRUE(IsGone(std::stoi(pid))) << agent.name;
      }
    }
  }
  int Position(const std::string& event) const {
    const auto found = std::find(events_.begin(), events_.end(), event);
    EXPECT_NE(found, events_.end()) << event;
    return static_cast<int>(found - events_.begin());
  }

  std::filesystem::path directory_;
  Flow flow_;
  RunOptions options_;
  std::vector<std::string> events_;
  std::function<void(const FlowEvent&)> also_;

 private:
  template <class Command>
  Command Received(const std::string& file) {
    auto command = ParseAgentCommand(Read(file));
    EXPECT_TRUE(command) << file << ": " << command.error().message;
    if (!command || !std::holds_alternative<Command>(*command)) return {};
    return std::get<Command>(*command);
  }
  void OnEvent(const FlowEvent& event) {
    static constexpr const char* kNames[] = {"ready",    "started", "progress", "text",
                                             "finished", "failed",  "skipped",  "released"};
    std::string line = std::string(kNames[static_cast<int>(event.kind)]) + " " + std::string(event.agent);
    if (event.kind == FlowEvent::Kind::kText) line += ": " + std::string(event.text);
    events_.push_back(line);
    if (also_) also_(event);
  }
};

constexpr char kChain[] = R"(inputs: {topic: mills}
agents:
  - {name: writer, system: be kind, prompt: "on {{input.topic}}", max_tokens: 9, seed: 5}
  - {name: editor, inherits: writer, prompt: "mend: {{writer.output}}", on_miss: fail, kv: i4}
)";

TEST_F(RunnerTest, HandsOverAlongAChain) {
  Given(kChain);
  Does("writer", "ready; turn; say one; say two; answer; hold");
  const ModeResult result = Run();
  ASSERT_TRUE(result.ok());
  EXPECT_THAT(std::vector(events_.begin(), events_.begin() + 2), UnorderedElementsAre("ready writer", "ready editor"));
  EXPECT_THAT(std::vector(events_.begin() + 2, events_.end()),
              ElementsAre("started writer", "text writer: one", "text writer: two", "finished writer", "started editor",
                          "finished editor", "released writer"));

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

  const AgentSetup setup = SetupOf("writer");
  EXPECT_EQ(setup.model, "none.gguf");
  EXPECT_EQ(setup.threads, 2);
  EXPECT_EQ(ToString(setup.kv), "i8");
  EXPECT_EQ(ToString(SetupOf("editor").kv), "i4") << "its own choice";
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

TEST_F(RunnerTest, TextModeSharesNothing) {
  Given(kChain);
  options_.mode = FlowMode::kText;
  const ModeResult result = Run();
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.kv, "f16");
  EXPECT_EQ(SetupOf("editor").socket, "");
  EXPECT_EQ(ToString(SetupOf("editor").kv), "f16");
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
    socket = SetupOf("writer").socket;
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
  // Each answers only once the other has begun.
  Does("left", "ready; turn; while [ ! -e right.turn ]; do sleep 0.01; done; answer; hold");
  Does("right", "ready; turn; while [ ! -e left.turn ]; do sleep 0.01; done; answer; hold");
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(events_.back(), "released root");
}

TEST_F(RunnerTest, FirstTurnWaitsForAllModels) {
  Given(kChain);
  Does("editor", "while [ ! -e writer.pid ]; do sleep 0.01; done; sleep 0.1; ready; turn; answer; hold");
  EXPECT_TRUE(Run().ok());
  EXPECT_LT(Position("ready editor"), Position("started writer"));
}

TEST_F(RunnerTest, CrashFailsTheAgentAndSkipsWhatDependsOnIt) {
  Given(R"(agents:
  - {name: writer, prompt: x}
  - {name: editor, inherits: writer}
  - {name: printer, prompt: "{{editor.output}}"}
  - {name: other, prompt: y}
)");
  Does("writer", "ready; turn; echo 'reading page 3' >&2; kill -9 $$");
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
  Does("editor", "echo 'one\ntwo\nthree\nfour' >&2; exit 3");
  const ModeResult result = Run();
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.message,
            "its process exited with status 3 while loading the model; it said: two|three|four");
  EXPECT_EQ(result.hops.size(), 1u) << "the writer's work is still done";
}

TEST_F(RunnerTest, AgentMayDieAfterItsAnswer) {
  Given(kChain);
  Does("writer", "ready; turn; answer; exit 1");
  EXPECT_TRUE(Run().ok());
}

TEST_F(RunnerTest, ErrorsOfAnAgentArriveAsTheyAre) {
  Given(kChain);
  Write("error", ToLine(AgentFailed{Error{Code::kIncompatible, "rope.base differs", Reason::kModelMismatch}}));
  Does("editor", "ready; turn; cat error; exit 1");
  const ModeResult result = Run();
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.code, Code::kIncompatible);
  EXPECT_EQ(result.failures[0].error.reason, Reason::kModelMismatch);
  EXPECT_EQ(result.failures[0].error.message, "rope.base differs");
  EXPECT_EQ(events_.back(), "released writer") << "its last reader is through, however";
}

TEST_F(RunnerTest, GarbageFailsTheAgent) {
  Given(kChain);
  Does("writer", "ready; turn; echo 'Segmentation what?'; exec sleep 60");
  const ModeResult result = Run();
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.code, Code::kCorrupt);
  EXPECT_THAT(result.failures[0].error.message, HasSubstr("Segmentation what?"));
  ExpectNobodyLeft();
}

TEST_F(RunnerTest, EventsOutOfTurnFailTheAgent) {
  Given(kChain);
  for (const char* script : {"answer; exec sleep 60", "say early; exec sleep 60", "ready; ready; exec sleep 60"}) {
    Does("writer", script);
    const ModeResult result = Run();
    ASSERT_EQ(result.failures.size(), 1u) << script;
    EXPECT_EQ(result.failures[0].error.message, "agent protocol: an event out of turn") << script;
  }
}

TEST_F(RunnerTest, SilenceEndsWithTheDeadline) {
  Given(kChain);
  options_.turn_deadline = milliseconds(150);
  Does("writer", "ready; turn; exec sleep 60");
  ModeResult result = Run();
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.code, Code::kTimeout);
  EXPECT_EQ(result.failures[0].error.message, "it was not done within 0.15 s");

  options_.load_deadline = milliseconds(150);
  options_.turn_deadline = seconds(20);
  Does("writer", "exec sleep 60");
  result = Run();
  ASSERT_GE(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.message, "it was not ready within 0.15 s");
  ExpectNobodyLeft();
}

TEST_F(RunnerTest, StopEndsAllWithinASecond) {
  Given(kChain);
  Does("writer", "ready; turn; say begun; trap '' TERM INT HUP; while :; do read x || :; done");
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

TEST_F(RunnerTest, AgentThatIgnoresTheHangUpIsKilled) {
  Given(kChain);
  Does("writer", "ready; turn; answer; exec sleep 60");
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

TEST_F(RunnerTest, ReaderWithOtherTokensGetsWords) {
  Given(R"(agents:
  - {name: a, system: sys, prompt: first}
  - {name: b, inherits: a, prompt: second}
  - {name: c, inherits: b, prompt: third}
)");
  Does("c", "ready another; turn; answer; hold");
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
  Does("editor", "ready another; turn; answer; hold");
  const ModeResult result = Run();
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_EQ(result.failures[0].error.code, Code::kIncompatible);
  EXPECT_EQ(result.failures[0].error.reason, Reason::kTokenizerMismatch);
}

TEST_F(RunnerTest, CompareRunsTextThenEveryCodecOfTheFlow) {
  Given("kv: [i8, i4]\n" + std::string(kChain));
  std::vector<std::string> modes;
  auto report = CompareModes(flow_, options_, [&](FlowMode mode, CodecPair kv) {
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
