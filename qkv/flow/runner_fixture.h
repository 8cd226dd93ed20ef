// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For tests: flows run by workers that need no model.

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "qkv/flow/agent_protocol.h"
#include "qkv/flow/runner.h"

namespace qkv {

// A worker that needs no model: a shell script that speaks the protocol. It keeps the lines it got as <model>.setup,
// <agent>.prepare and <agent>.turn and its pid in `pids`, loads as load-<model>.sh says (at once) and takes an agent's turn
// as <agent>.sh says (answers at once).
inline constexpr char kFakeWorker[] = R"(
cd "$1" || exit 9
IFS= read -r setup || exit 8
model=${setup#*'"model":"'}
model=${model%%'"'*}
model=${model##*/}
echo $$ >> pids
printf '%s\n' "$setup" > "$model.setup"
ready() { echo '{"type":"ready","load_ms":1.5,"tokenizer":"'"${1:-same}"'"}'; }
say() { echo '{"type":"text","piece":"'"$1"'"}'; }
answer() { cat "$agent.done"; }
if [ -e "load-$model.sh" ]; then . "./load-$model.sh"; else ready; fi
while IFS= read -r line; do
  agent=${line#*'"agent":"'}
  agent=${agent%%'"'*}
  case $line in
    *'"type":"prepare"'*)
      printf '%s\n' "$line" > "$agent.prepare"
      echo '{"type":"prepared","ms":1,"prefix_tokens":3,"bytes":5}' ;;
    *)
      printf '%s\n' "$line" > "$agent.turn"
      echo "$agent $$" >> ran
      if [ -e "$agent.sh" ]; then . "./$agent.sh"; else answer; fi ;;
  esac
done
)";

inline bool IsGone(pid_t pid) {
  return ::kill(pid, 0) < 0 && errno == ESRCH;
}

class RunnerTest : public ::testing::Test {
 protected:
  RunnerTest() {
    std::string path = (std::filesystem::temp_directory_path() / "runner_test.XXXXXX").string();
    EXPECT_NE(::mkdtemp(path.data()), nullptr);
    directory_ = path;
    Write("worker", kFakeWorker);
    options_.worker_argv = {"/bin/sh", (directory_ / "worker").string(), directory_.string()};
    options_.load_deadline = options_.turn_deadline = std::chrono::seconds(20);
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
      result.mode = agent.inherits().empty() ? HandoffMode::kNone : HandoffMode::kAttach;
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
  void Loads(const std::string& model, const std::string& script) { Write("load-" + model + ".sh", script); }

  ModeResult Run() {
    auto result = RunFlow(flow_, options_);
    EXPECT_TRUE(result) << result.error().message;
    return result ? *result : ModeResult{};
  }
  AgentSetup SetupOf(const std::string& model) { return Received<AgentSetup>(model + ".setup"); }
  AgentPrepare PrepareOf(const std::string& agent) { return Received<AgentPrepare>(agent + ".prepare"); }
  AgentTurn TurnOf(const std::string& agent) { return Received<AgentTurn>(agent + ".turn"); }

  std::vector<pid_t> Pids() {
    std::istringstream lines(Read("pids"));
    std::vector<pid_t> pids;
    for (pid_t pid; lines >> pid;) pids.push_back(pid);
    return pids;
  }
  // All workers that ever started are gone.
  void ExpectNobodyLeft() {
    EXPECT_FALSE(Pids().empty());
    for (pid_t pid : Pids()) EXPECT_TRUE(IsGone(pid)) << pid;
  }
  int Position(const std::string& event) const {
    const auto found = std::find(events_.begin(), events_.end(), event);
    EXPECT_NE(found, events_.end()) << event;
    return static_cast<int>(found - events_.begin());
  }

  std::filesystem::path directory_;
  Flow flow_;
  RunOptions options_;
  std::vector<std::string> events_, prepared_;
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
    static constexpr const char* kNames[] = {"ready",    "prepared", "started", "progress", "text",
                                             "finished", "retried",  "failed",  "skipped",  "released"};
    std::string line = std::string(kNames[static_cast<int>(event.kind)]) + " " + std::string(event.agent);
    if (event.kind == FlowEvent::Kind::kText) line += ": " + std::string(event.text);
    (event.kind == FlowEvent::Kind::kPrepared ? prepared_ : events_).push_back(line);
    if (also_) also_(event);
  }
};

constexpr char kChain[] = R"(inputs: {topic: mills}
agents:
  - {name: writer, system: be kind, prompt: "on {{input.topic}}", max_tokens: 9, seed: 5}
  - {name: editor, inherits: writer, prompt: "mend: {{writer.output}}", on_miss: fail, kv: i4}
)";

}  // namespace qkv
