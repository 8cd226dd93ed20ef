// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Flows with real agents: what comes out is what the same agents give in one process, whatever the number of jobs and
// threads and whoever is slow; and whatever dies, finished work is kept and nothing is left behind.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

#include "qkv/broker/server.h"
#include "qkv/engine/calibration.h"
#include "qkv/engine/test_support.h"
#include "qkv/flow/agent_process.h"
#include "qkv/flow/agent_protocol.h"
#include "qkv/flow/runner.h"
#include "tests/process.h"
#include "tests/tiny_model.h"

namespace qkv::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Json = nlohmann::json;

constexpr CodecPair kI8 = {CodecId::kI8, CodecId::kI8};
constexpr auto kPatience = std::chrono::seconds(60);

// What an agent gave: its tokens, and every bit of the logits behind them.
struct Output {
  std::vector<Token> tokens;
  std::string digest;
  bool operator==(const Output&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Output& output) {
  return out << output.digest << " (" << output.tokens.size() << " tokens)";
}
using Outputs = std::map<std::string, Output>;

Flow FlowOf(const std::string& yaml) {
  auto flow = ParseFlow(yaml, "test.yaml");
  EXPECT_TRUE(flow) << flow.error().message;
  if (!flow) return {};
  flow->model = TestModelPath();
  return *std::move(flow);
}

RunOptions OptionsFor(CodecPair kv = kI8) {
  RunOptions options;
  options.kv = kv;
  options.digest_logits = true;
  options.worker_argv = {QKV_PROGRAM, "agent-worker"};
  options.turn_deadline = kPatience;
  return options;
}

Outputs OutputsOf(const ModeResult& result) {
  Outputs outputs;
  for (const auto& [agent, tokens] : result.output_tokens) outputs[agent] = {tokens, result.logits_digests.at(agent)};
  return outputs;
}

// The same agents in this process, one after the other: who is the last to go on from a context uses its very sequence,
// the others attach.
class OneProcess {
 public:
  explicit OneProcess(std::shared_ptr<const Model> model = TestModel(), SequenceOptions options = {.kv = kI8})
      : model_(std::move(model)), options_(std::move(options)) {
    BrokerOptions broker;
    broker.socket_path = dir_.path() + "/broker.sock";
    server_ = *BrokerServer::Start(broker);
    client_ = *BrokerClient::Connect(broker.socket_path);
  }

  Outputs Run(const Flow& flow) {
    const std::vector<PlanNode> graph = flow.Graph();
    std::map<int, std::unique_ptr<Agent>> agents;  // whose sequence nobody has gone on with
    std::map<int, std::string> contexts;
    std::map<std::string, std::string> said;
    Outputs outputs;
    for (int i = 0; i < static_cast<int>(graph.size()); ++i) {
      const int parent = graph[i].inherits;
      int last_reader = -1;
      for (int j = 0; j < static_cast<int>(graph.size()); ++j) {
        if (parent >= 0 && graph[j].inherits == parent) last_reader = j;
      }
      std::unique_ptr<Agent> agent;
      TurnRequest request;
      if (last_reader == i) {
        agent = std::move(agents[parent]);
      } else {
        options_.n_ctx = flow.n_ctx;
        agent = std::make_unique<Agent>(model_, *Sequence::Create(model_, options_), client_.get());
        if (parent >= 0) request.inherits = contexts[parent];
      }
      request.system = *flow.SystemOf(flow.agents[i], said);
      request.prompt = *flow.PromptOf(flow.agents[i], said);
      request.max_tokens = flow.agents[i].max_tokens;
      request.sampling = flow.agents[i].sampling;
      request.digest_logits = true;
      const bool read = std::any_of(graph.begin(), graph.end(), [&](const PlanNode& n) { return n.inherits == i; });
      if (read) request.publish_as = "c" + std::to_string(i);
      auto result = agent->Run(request);
      EXPECT_TRUE(result) << result.error().message;
      if (!result) return outputs;
      said[graph[i].name] = result->text;
      contexts[i] = result->context_id;
      outputs[graph[i].name] = {result->output_tokens, result->logits_digest};
      agents[i] = std::move(agent);
    }
    return outputs;
  }

 private:
  const std::shared_ptr<const Model> model_;
  SequenceOptions options_;
  TemporaryFolder dir_;
  std::unique_ptr<BrokerServer> server_;
  std::unique_ptr<BrokerClient> client_;
};

// Agents that sample, so that the least difference shows: one where it is not greedy has a seed of its own.
std::string AgentYaml(int i, int parent) {
  return fmt::format(
      "  - {{name: a{}, {}prompt: 'Say something new about mills, part {}.', max_tokens: 12, "
      "temperature: 0.9, seed: {}}}\n",
      i, parent < 0 ? std::string("system: You are brief., ") : fmt::format("inherits: a{}, ", parent), i, i + 1);
}

TEST(FlowExact, AChainOfEightIsWhatOneSequenceGives) {
  std::string yaml = "n_ctx: 1024\nthreads: 2\nagents:\n";
  for (int i = 0; i < 8; ++i) yaml += AgentYaml(i, i - 1);
  const Flow flow = FlowOf(yaml);
  const auto result = RunFlow(flow, OptionsFor());
  ASSERT_TRUE(result) << result.error().message;
  ASSERT_TRUE(result->ok());
  for (size_t i = 1; i < result->hops.size(); ++i) EXPECT_EQ(result->hops[i].handoff, HandoffMode::kAttach);
  EXPECT_EQ(OutputsOf(*result), OneProcess().Run(flow));
}

TEST(FlowExact, ATreeOfSixteenIsWhatOneProcessGives) {
  std::string yaml = "n_ctx: 1024\nthreads: 2\nagents:\n";
  for (int i = 0; i < 16; ++i) yaml += AgentYaml(i, i == 0 ? -1 : (i - 1) / 2);
  const Flow flow = FlowOf(yaml);
  const auto result = RunFlow(flow, OptionsFor());
  ASSERT_TRUE(result) << result.error().message;
  ASSERT_TRUE(result->ok());
  EXPECT_EQ(OutputsOf(*result), OneProcess().Run(flow));
}

// On a tiny model, whose calibration lies beside it. Who goes on in its producer's worker, who elsewhere, and who may not.
TEST(FlowExact, BalancedKeysOfTwoBandsAreHandedOver) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/tiny.gguf";
  WriteTinyModel({.chat_template = "<|im_start|>{{ messages }}"}, path);
  const auto model = *Model::Load(path);
  std::string yaml =
      "n_ctx: 1024\nthreads: 2\nbal: true\nagents:\n" + AgentYaml(0, -1) + AgentYaml(1, 0) + AgentYaml(2, 0);
  Flow flow = FlowOf(yaml);
  flow.model = path;
  RunOptions run = OptionsFor();
  run.kv = *ParseKvChoice("k=5/3,v=4");
  const auto without = RunFlow(flow, run);
  ASSERT_TRUE(without) << without.error().message;
  EXPECT_FALSE(without->failures.empty());
  for (const AgentFailure& failure : without->failures) {  // of whomever a worker was started for
    EXPECT_THAT(failure.error.message, HasSubstr("make one with: qkvshare calibrate"));
  }

  std::vector<Token> tokens(300);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<Token>(i * i % TinyModel::kVocab);
  SequenceOptions options{.kv = run.kv->codecs};
  const auto calibration = Calibrate(model, tokens, 150, 1);
  ASSERT_TRUE(calibration) << calibration.error().message;
  ASSERT_TRUE(calibration->Write(*model, Calibration::PathFor(*model)));
  options.calibration = std::make_shared<const Calibration>(*calibration);
  const auto result = RunFlow(flow, run);
  ASSERT_TRUE(result) << result.error().message;
  ASSERT_TRUE(result->ok()) << result->failures[0].error.message;
  for (size_t i = 1; i < result->hops.size(); ++i) {
    EXPECT_EQ(result->hops[i].handoff, HandoffMode::kAttach) << result->hops[i].reason_detail;
  }
  EXPECT_EQ(OutputsOf(*result), OneProcess(model, options).Run(flow));
}

constexpr char kMixed[] = R"(n_ctx: 1024
agents:
  - {name: a, system: You are brief., prompt: Name a river., max_tokens: 5, temperature: 0.9, seed: 1}
  - {name: b, system: You are kind., prompt: Name a town., max_tokens: 5, temperature: 0.9, seed: 2}
  - {name: c, inherits: a, prompt: "And {{b.output}}?", max_tokens: 5, temperature: 0.9, seed: 3}
  - {name: d, inherits: a, max_tokens: 5, temperature: 0.9, seed: 4}
  - {name: e, system: You sum up., reads: [b, c], prompt: Sum up., max_tokens: 5, temperature: 0.9, seed: 5}
)";

// Two documents that were read apart, behind the reader's own system message.
TEST(FlowSplice, TwoDocumentsBehindASystemMessage) {
  const std::string documents = R"(n_ctx: 1024
agents:
  - name: wood
    document: The mill of wood stood by the river for two hundred years. The miller's daughter wrote down who came and went.
  - name: stone
    document: The mill of stone was built by the town in 1812 and burned down in the year that the railway came.
)";
  const auto reader = [&](const std::string& splice) {
    return documents +
           "  - {name: r, system: You compare., reads: [wood, stone], prompt: 'Which burned?', max_tokens: 8, " +
           "splice: " + splice + "}\n";
  };
  const auto run = [&](const std::string& splice, FlowMode mode) {
    RunOptions options = OptionsFor();
    options.mode = mode;
    const auto result = RunFlow(FlowOf(reader(splice)), options);
    EXPECT_TRUE(result) << result.error().message;
    EXPECT_TRUE(result->ok());
    return *result;
  };
  const ModeResult text = run("hide", FlowMode::kText), off = run("off", FlowMode::kHandoff);
  EXPECT_EQ(off.hops[2].handoff, HandoffMode::kText);
  EXPECT_EQ(off.hops[2].reason, Reason::kDenied);
  EXPECT_EQ(off.logits_digests.at("r"), text.logits_digests.at("r")) << "the fallback is a cold run";
  EXPECT_EQ(off.hops[2].tokens_recomputed, text.hops[2].tokens_recomputed);

  const ModeResult hide = run("hide", FlowMode::kHandoff), repair = run("repair=32", FlowMode::kHandoff);
  EXPECT_EQ(hide.hops[2].handoff, HandoffMode::kSplice);
  EXPECT_EQ(hide.hops[2].splice, "hide");
  EXPECT_EQ(hide.hops[2].spans_spliced, 2);
  EXPECT_EQ(hide.hops[2].tokens_repaired, 0);
  EXPECT_EQ(repair.hops[2].splice, "repair=32");
  EXPECT_GT(repair.hops[2].tokens_repaired, 0);
  // What is read: the tokens for the beginning of each document are only in the pages.
  EXPECT_EQ(hide.hops[2].tokens_reused + hide.hops[2].tokens_recomputed, text.hops[2].tokens_recomputed + 2);
  EXPECT_EQ(repair.hops[2].tokens_reused + repair.hops[2].tokens_recomputed, text.hops[2].tokens_recomputed);
  EXPECT_EQ(hide.hops[0].output_tokens, 0);
}

TEST(FlowExact, JobsThreadsAndDelaysChangeNothing) {
  Flow flow = FlowOf(kMixed);
  std::mt19937 random(7);  // a fixed seed: a failure can be had again
  const auto delay = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
  Outputs first;
  for (int round = 0; round < 20; ++round) {
    RunOptions options = OptionsFor();
    flow.threads = 1 + round % 2;
    options.jobs = 1 + round % 3;
    options.ahead = round % 4 != 3;
    options.worker_argv = {"/bin/sh", "-c", fmt::format("sleep 0.0{}; exec \"$0\" agent-worker", delay(9)),
                           QKV_PROGRAM};
    options.on_event = [&](const FlowEvent& event) {
      if (event.kind != FlowEvent::Kind::kText) std::this_thread::sleep_for(milliseconds(delay(20)));
    };
    const auto result = RunFlow(flow, options);
    ASSERT_TRUE(result) << result.error().message;
    ASSERT_TRUE(result->ok()) << result->failures[0].error.message;
    if (round == 0) first = OutputsOf(*result);
    EXPECT_EQ(OutputsOf(*result), first) << "round " << round;
    EXPECT_EQ(result->hops[4].handoff, HandoffMode::kSplice);
    EXPECT_EQ(result->hops[4].splice, "hide");
    // Of b all is read again: its system message ends in the page that the rest of it is in.
    EXPECT_EQ(result->hops[4].spans_spliced, 1);
    EXPECT_GT(result->hops[4].tokens_repaired, 0);
    EXPECT_EQ(result->hops[4].reason, Reason::kNone);
  }
  ASSERT_EQ(first.size(), 5u);
}

// What a worker answers in the last of these commands, a turn.
TurnResult AnswerTo(const std::vector<AgentCommand>& commands) {
  auto worker = AgentProcess::Start({QKV_PROGRAM, "agent-worker"});
  EXPECT_TRUE(worker) << worker.error().message;
  (*worker)->Send(ToLine(AgentCommand(AgentSetup{.model = TestModelPath()})));
  for (const AgentCommand& command : commands) (*worker)->Send(ToLine(command));
  std::optional<TurnResult> result;
  Eventually(
      [&] {
        EXPECT_TRUE((*worker)->Pump());
        while (const auto line = (*worker)->NextLine()) {
          auto event = ParseAgentEvent(*line);
          if (event && std::holds_alternative<AgentDone>(*event)) result = std::get<AgentDone>(*event).result;
        }
        return result.has_value() || (*worker)->output_ended();
      },
      kPatience);
  EXPECT_TRUE(result.has_value());
  return result.value_or(TurnResult{});
}

TEST(FlowExact, WhatWasReadAheadForAnAgentIsNobodyElses) {
  const AgentPrepare ahead{.agent = "reader", .n_ctx = 512, .prefix = true, .system = "You are terse."};
  const AgentTurn turn{
      .agent = "other", .n_ctx = 512, .prompt = "Name a river.", .max_tokens = 4, .digest_logits = true};
  const TurnResult fresh = AnswerTo({turn}), after = AnswerTo({ahead, turn});
  EXPECT_EQ(after.context_tokens, fresh.context_tokens);
  EXPECT_EQ(after.logits_digest, fresh.logits_digest);
}

// --- faults ---------------------------------------------------------------------------------------------------------

// Processes, apart from this one, that were started with QKV_TEST_TAG in their environment.
std::set<pid_t> Tagged(const std::string& tag) {
  std::set<pid_t> pids;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos || std::stoi(name) == ::getpid()) continue;
    std::ifstream file(entry.path() / "environ", std::ios::binary);
    const std::string environment{std::istreambuf_iterator<char>(file), {}};
    if (environment.find("QKV_TEST_TAG=" + tag) != std::string::npos) pids.insert(std::stoi(name));
  }
  return pids;
}

class FlowFaults : public ::testing::Test {
 protected:
  FlowFaults()
      : tag_(fmt::format("{}-{}", ::getpid(), ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directory(dir_.path() + "/tmp");
  }

  std::string Write(const std::string& name, const std::string& text) {
    std::ofstream(dir_.path() + "/" + name) << text;
    return dir_.path() + "/" + name;
  }
  // The program with its own temporary directory, tagged.
  std::unique_ptr<Process> Start(std::vector<std::string> args) {
    std::vector<std::string> argv = {"/usr/bin/env", "TMPDIR=" + dir_.path() + "/tmp", "QKV_TEST_TAG=" + tag_,
                                     QKV_PROGRAM};
    argv.insert(argv.end(), args.begin(), args.end());
    if (args[0] == "run") argv.insert(argv.end(), {"--quality-gate", "off"});  // what it takes is not what is tested
    return Process::Start(argv);
  }
  Json Report() {
    std::ifstream file(dir_.path() + "/report.json");
    return Json::parse(file, nullptr, false);
  }
  void ExpectNothingLeft() {
    EXPECT_THAT(Tagged(tag_), IsEmpty());
    EXPECT_TRUE(std::filesystem::is_empty(dir_.path() + "/tmp")) << "the broker's directory";
  }
  // The workers of a running flow, once there are that many.
  std::set<pid_t> Workers(const Process& runner, size_t count) {
    std::set<pid_t> pids;
    Eventually(
        [&] {
          pids = Tagged(tag_);
          pids.erase(runner.pid());
          return pids.size() >= count;
        },
        kPatience);
    return pids;
  }

  TemporaryFolder dir_;
  const std::string tag_;
};

constexpr char kShort[] = R"(n_ctx: 512
agents:
  - {name: a, prompt: Name a river., max_tokens: 4}
  - {name: b, inherits: a, prompt: Another., max_tokens: 4}
  - {name: c, prompt: Name a town., max_tokens: 4}
)";
// The second agent takes seconds.
constexpr char kLong[] = R"(n_ctx: 4096
agents:
  - {name: a, prompt: Name a river., max_tokens: 4}
  - {name: b, inherits: a, prompt: "Tell a long story, and never stop.", max_tokens: 3000, temperature: 1.5, top_k: 0,
     top_p: 1, min_p: 0}
  - {name: c, inherits: b, prompt: "And then?", max_tokens: 4}
)";

TEST_F(FlowFaults, CtrlCAtFiftyMomentsEndsAllWithinASecond) {
  const std::string flow = Write("flow.yaml", kShort);
  std::mt19937 random(11);
  int stopped = 0, finished = 0;
  double slowest = 0;
  for (int round = 0; round < 50; ++round) {
    auto runner = Start({"run", flow, "-m", TestModelPath(), "--json", dir_.path() + "/report.json", "-q"});
    std::this_thread::sleep_for(milliseconds(std::uniform_int_distribution<int>(20, 900)(random)));
    const auto sent = std::chrono::steady_clock::now();
    ::kill(runner->pid(), round % 5 == 4 ? SIGTERM : SIGINT);
    const int status = runner->Wait(kPatience);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - sent;
    slowest = std::max(slowest, took.count());
    // Before its handler is there, the signal itself ends it.
    EXPECT_TRUE(status == 130 || status == 0 || status == 128 + SIGINT || status == 128 + SIGTERM)
        << status << " " << runner->errors();
    if (status == 130) {
      ++stopped;
      const Json report = Report();
      ASSERT_FALSE(report.is_discarded());
      EXPECT_TRUE(report["modes"][0]["stopped"]);
      for (const Json& hop : report["modes"][0]["hops"]) EXPECT_EQ(hop["output_tokens"], 4) << "finished work is whole";
    }
    finished += status == 0 ? 1 : 0;
    ExpectNothingLeft();
    std::filesystem::remove(dir_.path() + "/report.json");
  }
  printf("%d stopped, %d had finished, the slowest end took %.2f s\n", stopped, finished, slowest);
  EXPECT_LT(slowest, 1.0);
  EXPECT_GE(stopped, 10);
}

TEST_F(FlowFaults, AKilledWorkerFailsItsAgentAndWhatDependsOnIt) {
  const std::string flow = Write("flow.yaml", kLong);
  auto runner = Start({"run", flow, "-m", TestModelPath(), "--json", dir_.path() + "/report.json", "--no-ahead"});
  // With nothing ahead and one chain there is one worker at a time; b's turn comes soon.
  ASSERT_EQ(Workers(*runner, 1).size(), 1u);
  std::this_thread::sleep_for(milliseconds(1500));
  for (pid_t pid : Workers(*runner, 1)) ::kill(pid, SIGKILL);
  EXPECT_EQ(runner->Wait(kPatience), 1);
  EXPECT_THAT(runner->errors(), HasSubstr("killed by signal 9"));
  const Json mode = Report()["modes"][0];
  ASSERT_EQ(mode["hops"].size(), 1u) << mode.dump();
  EXPECT_EQ(mode["hops"][0]["agent"], "a");
  EXPECT_NE(mode["hops"][0]["output"], "") << "finished outputs are kept";
  EXPECT_EQ(mode["failures"][0]["agent"], "b");
  EXPECT_EQ(mode["skipped"][0], "c");
  ExpectNothingLeft();
}

TEST_F(FlowFaults, AKilledBrokerCostsTimeButNoWork) {
  const std::string socket = dir_.path() + "/broker.sock";
  auto broker = Start({"broker", "--socket", socket});
  const Flow flow = FlowOf(R"(n_ctx: 1024
agents:
  - {name: a, prompt: Name a river., max_tokens: 4}
  - {name: b, inherits: a, prompt: Tell a story., max_tokens: 250, temperature: 1.2}
  - {name: c, inherits: b, prompt: "And then?", max_tokens: 4}
)");
  ASSERT_TRUE(Eventually([&] { return BrokerClient::Connect(socket).has_value(); }));
  RunOptions options = OptionsFor();
  options.socket = socket;
  options.on_event = [&](const FlowEvent& event) {
    if (event.kind == FlowEvent::Kind::kStarted && event.agent == "b") ::kill(broker->pid(), SIGKILL);
  };
  const auto result = RunFlow(flow, options);
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_TRUE(result->ok());
  ASSERT_EQ(result->hops.size(), 3u);
  EXPECT_EQ(result->hops[2].handoff, HandoffMode::kText);
  EXPECT_EQ(result->hops[2].reason, Reason::kPeerLost);
  broker.reset();
  ExpectNothingLeft();
}

TEST_F(FlowFaults, AMissingModelFailsOnlyWhatNeedsIt) {
  const std::string flow = Write("flow.yaml", std::string(kShort) +
                                                  "  - {name: d, model: nowhere.gguf, prompt: x}\n"
                                                  "  - {name: e, text: d, prompt: x}\n");
  auto runner = Start({"run", flow, "-m", TestModelPath(), "--json", dir_.path() + "/report.json"});
  EXPECT_EQ(runner->Wait(kPatience), 2) << "the user can mend it";
  EXPECT_THAT(runner->errors(), HasSubstr("nowhere.gguf"));
  const Json mode = Report()["modes"][0];
  EXPECT_EQ(mode["hops"].size(), 3u);
  EXPECT_EQ(mode["failures"].size(), 1u);
  EXPECT_EQ(mode["skipped"][0], "e");
  ExpectNothingLeft();
}

TEST_F(FlowFaults, APassedDeadlineFailsTheAgent) {
  const std::string flow = Write("flow.yaml", std::string(kShort) +
                                                  "  - {name: d, prompt: Tell a long story., max_tokens: 400, "
                                                  "temperature: 1.5, top_k: 0, top_p: 1, min_p: 0, deadline: 0.4}\n");
  auto runner = Start({"run", flow, "-m", TestModelPath(), "--json", dir_.path() + "/report.json"});
  EXPECT_EQ(runner->Wait(kPatience), 1) << runner->errors();
  EXPECT_THAT(runner->errors(), HasSubstr("it was not done within 0.4 s"));
  EXPECT_EQ(Report()["modes"][0]["hops"].size(), 3u);
  ExpectNothingLeft();
}

// --- scale ----------------------------------------------------------------------------------------------------------

TEST(FlowScale, SixtyFourAgentsOverOneContextKeepOneCopyOfIt) {
  constexpr int kContext = 4096, kReaders = 64, kSuffix = 8;
  SequenceOptions options;
  options.n_ctx = kContext + 256;
  options.n_threads = 2;
  options.kv = kI8;
  auto producer = *Sequence::Create(TestModel(), options);
  ASSERT_TRUE(producer->Forward(SourceTokens(0, kContext)));
  const auto context = producer->Publish({.name = "shared"});
  ASSERT_TRUE(context) << context.error().message;
  const uint64_t shared = producer->stats().own_kv_bytes;

  options.n_threads = 1;
  std::vector<std::unique_ptr<Sequence>> readers;
  uint64_t suffixes = 0;
  for (int i = 0; i < kReaders; ++i) {
    readers.push_back(*Sequence::Create(TestModel(), options));
    ASSERT_TRUE(readers[i]->Attach(*context));
    ASSERT_TRUE(readers[i]->Forward(SourceTokens(100 * i, kSuffix)));
    const Sequence::Stats& stats = readers[i]->stats();
    EXPECT_EQ(stats.shared_kv_bytes, shared) << "all of the context's pages, and none of its own";
    suffixes += stats.own_kv_bytes + stats.tail_bytes;
  }
  uint64_t bytes = 0;
  for (const auto& segment : context->segments) bytes += segment->bytes();
  const double mib = 1 << 20;
  printf(
      "one context of %d tokens: %.1f MiB; %d agents on it: + %.1f MiB of suffixes = %.1f MiB of KV (apart: %.1f "
      "MiB)\n",
      kContext, static_cast<double>(shared) / mib, kReaders, static_cast<double>(suffixes) / mib,
      static_cast<double>(shared + suffixes) / mib, static_cast<double>(shared * kReaders + suffixes) / mib);
  // A suffix of 8 tokens is a page of the tail: f16, twice an i8 page of 32 tokens.
  const double page = static_cast<double>(shared) / (kContext / 32);
  EXPECT_LE(static_cast<double>(suffixes), kReaders * 2.1 * page);
  EXPECT_LE(static_cast<double>(bytes), 1.1 * static_cast<double>(shared)) << "nothing else is in the files";
}

}  // namespace
}  // namespace qkv::testing
