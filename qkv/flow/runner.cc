// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/runner.h"

#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "qkv/broker/client.h"
#include "qkv/broker/server.h"
#include "qkv/flow/agent_process.h"
#include "qkv/flow/agent_protocol.h"
#include "qkv/flow/plan.h"

namespace qkv {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kTick{50};           // how late a stop may be seen, and between two looks at the memory
constexpr milliseconds kExitDeadline{500};  // for agents to go when the runner hangs up

double MsBetween(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

// A new directory that only we may enter, gone with this object.
class PrivateDirectory {
 public:
  static Result<std::unique_ptr<PrivateDirectory>> Make() {
    std::error_code ignored;
    std::string base = std::filesystem::temp_directory_path(ignored).string();
    // A Unix socket's path has at most 107 bytes.
    if (base.empty() || base.size() > 70) base = "/tmp";
    std::unique_ptr<PrivateDirectory> directory(new PrivateDirectory);
    std::string path = base + "/qkvshare-XXXXXX";
    if (::mkdtemp(path.data()) == nullptr) return ErrnoError("cannot make a directory in " + base);
    directory->path_ = std::move(path);
    return directory;
  }
  ~PrivateDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  PrivateDirectory() = default;
  std::string path_;
};

uint64_t PssBytes(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/smaps_rollup", pid));
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("Pss:")) continue;
    const size_t digits = line.find_first_of("0123456789");
    uint64_t kib = 0;
    if (digits != std::string::npos) std::from_chars(line.data() + digits, line.data() + line.size(), kib);
    return kib * 1024;
  }
  return 0;
}

// Samples the memory of some processes from a thread of its own, which ends with this object.
class MemorySampler {
 public:
  explicit MemorySampler(std::vector<pid_t> pids) : pids_(std::move(pids)), thread_([this] { Loop(); }) {}
  ~MemorySampler() { Stop(); }

  // The most that the processes had together at one time. No sampling any more.
  uint64_t Stop() {
    if (thread_.joinable()) {
      {
        std::lock_guard lock(mutex_);
        stop_ = true;
      }
      wake_.notify_one();
      thread_.join();
    }
    return peak_;
  }

 private:
  void Loop() {
    std::unique_lock lock(mutex_);
    for (bool last = false;; last = stop_) {
      const auto start = Clock::now();
      uint64_t sum = 0;
      for (pid_t pid : pids_) sum += PssBytes(pid);
      peak_ = std::max(peak_, sum);
      if (last) return;
      // The kernel walks page tables for each look: spend at most a twentieth of one CPU on it.
      wake_.wait_for(lock, std::max<Clock::duration>(kTick, 20 * (Clock::now() - start)), [this] { return stop_; });
    }
  }

  const std::vector<pid_t> pids_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  uint64_t peak_ = 0;
  std::thread thread_;  // last: it uses all of the above
};

class Run {
 public:
  Run(const Flow& flow, const RunOptions& options)
      : flow_(flow), options_(options), graph_(flow.Graph()), plan_(graph_), workers_(flow.agents.size()) {
    result_.mode = options.mode;
    kv_ = options.mode == FlowMode::kText ? CodecPair{} : options.kv ? *options.kv : HandoffCodecs(flow).front();
    result_.kv = ToString(kv_);
  }

  Result<ModeResult> Go() {
    const auto begin = Clock::now();
    QKV_RETURN_IF_ERROR(StartBroker());
    std::vector<pid_t> pids{::getpid()};
    for (int i = 0; i < count(); ++i) {
      if (over(i)) continue;  // what it needs could not be started
      if (auto started = StartWorker(i); started) {
        pids.push_back(workers_[i].process->pid());
      } else {
        Fail(i, started.error());
      }
    }
    MemorySampler memory(std::move(pids));

    std::optional<Clock::time_point> first_turn;
    while (!plan_.complete()) {
      if (options_.stop != nullptr && options_.stop->load()) {
        result_.stopped = true;
        break;
      }
      if (!AnyLoading()) {
        if (!first_turn) first_turn = Clock::now();
        for (int i : plan_.Ready()) StartTurn(i);
      }
      Poll();
      for (int i = 0; i < count(); ++i) Attend(i);
    }
    const auto end = Clock::now();

    result_.peak_pss_bytes = memory.Stop();
    EndWorkers();
    Finish();
    result_.end_to_end_ms = first_turn ? MsBetween(*first_turn, end) : 0;
    result_.with_start_up_ms = MsBetween(begin, end);
    if (result_.ok() && result_.end_to_end_ms > 0) result_.tasks_per_minute = 60000 / result_.end_to_end_ms;
    return std::move(result_);
  }

 private:
  struct Worker {
    std::unique_ptr<AgentProcess> process;
    bool loading = false;
    Clock::time_point deadline;  // of loading, or of its turn
    AgentReady ready;
    Reason reason = Reason::kNone;  // found by the runner, before the agent had a say
    TurnResult result;              // once finished
    std::string transcript;         // once its turn began: all it was told, for a reader with other tokens
  };

  int count() const { return static_cast<int>(workers_.size()); }
  const FlowAgent& agent(int i) const { return flow_.agents[i]; }
  // Nothing more is expected of it.
  bool over(int i) const {
    const Plan::State state = plan_.state(i);
    return state != Plan::State::kWaiting && state != Plan::State::kRunning;
  }
  bool AnyLoading() const {
    for (int i = 0; i < count(); ++i) {
      if (workers_[i].loading && !over(i)) return true;
    }
    return false;
  }

  void Tell(FlowEvent::Kind kind, int i, std::string_view text = {}, const TurnResult* result = nullptr,
            const Error* error = nullptr) {
    if (options_.on_event) options_.on_event({kind, agent(i).name, text, result, error});
  }

  Status StartBroker() {
    if (options_.mode == FlowMode::kText) return {};
    if (std::none_of(graph_.begin(), graph_.end(), [](const PlanNode& node) { return node.inherits >= 0; })) return {};
    socket_ = options_.socket;
    if (socket_.empty()) {
      QKV_ASSIGN_OR_RETURN(directory_, PrivateDirectory::Make());
      socket_ = directory_->path() + "/broker.sock";
      QKV_ASSIGN_OR_RETURN(broker_,
                           BrokerServer::Start({.socket_path = socket_, .budget_bytes = options_.budget_bytes}));
    }
    QKV_ASSIGN_OR_RETURN(client_, BrokerClient::Connect(socket_));
    return {};
  }

  Status StartWorker(int i) {
    std::vector<std::string> argv = options_.worker_argv;
    if (argv.empty()) argv = {"/proc/self/exe", "agent-worker"};
    QKV_ASSIGN_OR_RETURN(workers_[i].process, AgentProcess::Start(argv));
    AgentSetup setup;
    setup.agent = agent(i).name;
    setup.model = agent(i).model.empty() ? flow_.model : agent(i).model;
    if (graph_[i].inherits >= 0 || plan_.publishes(i)) setup.socket = socket_;
    setup.kv = options_.mode == FlowMode::kHandoff && agent(i).kv ? *agent(i).kv : kv_;
    setup.n_ctx = flow_.n_ctx;
    setup.threads =
        flow_.threads > 0 ? flow_.threads : std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 256);
    setup.trace = options_.trace;
    workers_[i].process->Send(ToLine(setup));
    workers_[i].loading = true;
    workers_[i].deadline = Clock::now() + options_.load_deadline;
    return {};
  }

  void StartTurn(int i) {
    plan_.OnStarted(i);
    auto turn = MakeTurn(i);
    if (!turn) return Fail(i, turn.error());
    workers_[i].process->Send(ToLine(*turn));
    workers_[i].deadline = Clock::now() + options_.turn_deadline;
    Tell(FlowEvent::Kind::kStarted, i);
  }

  Result<AgentTurn> MakeTurn(int i) {
    const FlowAgent& spec = agent(i);
    Worker& worker = workers_[i];
    AgentTurn turn;
    QKV_ASSIGN_OR_RETURN(turn.system, FillIn(spec.system, flow_.inputs, result_.outputs));
    QKV_ASSIGN_OR_RETURN(turn.prompt, FillIn(spec.prompt, flow_.inputs, result_.outputs));
    turn.max_tokens = spec.max_tokens;
    turn.sampling = spec.sampling;
    turn.on_miss = spec.on_miss;
    if (options_.mode == FlowMode::kHandoff && plan_.publishes(i)) {
      turn.publish_as = fmt::format("flow-{}.{}", ::getpid(), spec.name);
    }
    std::string said = turn.system;
    if (graph_[i].inherits >= 0) {
      const Worker& parent = workers_[graph_[i].inherits];
      said = parent.transcript + parent.result.text;
      if (parent.ready.tokenizer == worker.ready.tokenizer) {
        if (options_.mode == FlowMode::kHandoff) turn.inherits = parent.result.context_id;
        turn.history = parent.result.context_tokens;
      } else if (spec.on_miss == OnMiss::kFail) {
        worker.reason = Reason::kTokenizerMismatch;
        ReportOwnReason(i, /*failed=*/true);
        return Err(Code::kIncompatible, Reason::kTokenizerMismatch,
                   "its model's tokens are not those of '{}', whose context it inherits", spec.inherits);
      } else {
        // Neither pages nor token ids mean anything to this model; words do.
        worker.reason = Reason::kTokenizerMismatch;
        turn.prompt = said + "\n\n" + turn.prompt;
        said.clear();
      }
    }
    worker.transcript = (said.empty() ? "" : said + "\n\n") + turn.prompt + "\n\n";
    return turn;
  }

  void Poll() {
    auto until = Clock::now() + kTick;
    std::vector<pollfd> fds;
    for (int i = 0; i < count(); ++i) {
      if (workers_[i].process) workers_[i].process->AddPollFds(fds);
      if (workers_[i].loading || plan_.state(i) == Plan::State::kRunning) until = std::min(until, workers_[i].deadline);
    }
    const auto left = std::chrono::ceil<milliseconds>(until - Clock::now()).count();
    ::poll(fds.data(), fds.size(), static_cast<int>(std::clamp<int64_t>(left, 0, kTick.count())));
  }

  // Takes what the agent said, and sees whether it is still there and in time.
  void Attend(int i) {
    Worker& worker = workers_[i];
    if (!worker.process) return;
    Status pumped = worker.process->Pump();
    while (!over(i)) {
      const std::optional<std::string> line = worker.process->NextLine();
      if (!line) break;
      Heed(i, *line);
    }
    if (over(i)) return;
    if (!pumped) return Fail(i, pumped.error());
    if (worker.process->output_ended()) return Fail(i, Death(worker));
    const bool timed = worker.loading || plan_.state(i) == Plan::State::kRunning;
    if (timed && Clock::now() >= worker.deadline) {
      const auto limit = worker.loading ? options_.load_deadline : options_.turn_deadline;
      Fail(i, Error{Code::kTimeout, fmt::format("it was not {} within {} s", worker.loading ? "ready" : "done",
                                                std::chrono::duration<double>(limit).count())});
    }
  }

  void Heed(int i, const std::string& line) {
    Worker& worker = workers_[i];
    auto event = ParseAgentEvent(line);
    if (!event) return Fail(i, event.error());
    const bool running = plan_.state(i) == Plan::State::kRunning;
    if (auto* ready = std::get_if<AgentReady>(&*event); ready != nullptr && worker.loading) {
      worker.ready = std::move(*ready);
      worker.loading = false;
      Tell(FlowEvent::Kind::kReady, i);
    } else if (auto* progress = std::get_if<AgentProgress>(&*event); progress != nullptr && running) {
      if (options_.on_event) {
        options_.on_event({.kind = FlowEvent::Kind::kProgress,
                           .agent = agent(i).name,
                           .done = progress->done,
                           .total = progress->total});
      }
    } else if (auto* text = std::get_if<AgentText>(&*event); text != nullptr && running) {
      Tell(FlowEvent::Kind::kText, i, text->piece);
    } else if (auto* done = std::get_if<AgentDone>(&*event); done != nullptr && running) {
      worker.result = std::move(done->result);
      std::move(done->trace.begin(), done->trace.end(), std::back_inserter(result_.trace));
      result_.outputs[agent(i).name] = worker.result.text;
      Tell(FlowEvent::Kind::kFinished, i, {}, &worker.result);
      ReportOwnReason(i, /*failed=*/false);
      Apply(plan_.OnFinished(i));
    } else if (auto* failed = std::get_if<AgentFailed>(&*event)) {
      Fail(i, failed->error);
    } else {
      Fail(i, Error{Code::kCorrupt, "agent protocol: an event out of turn"});
    }
  }

  // The process closed its output. Its exit follows at once, unless it is stuck.
  static Error Death(Worker& worker) {
    AgentProcess& process = *worker.process;
    const bool exited = process.WaitExit(kExitDeadline);
    (void)process.Pump();  // its last words
    std::string message = "its process " + (exited ? process.DescribeExit() : "closed its output");
    message += worker.loading ? " while loading the model" : " before its answer was complete";
    if (std::string words = process.last_stderr(); !words.empty()) {
      // A few lines are enough, and an error is one line.
      size_t start = words.size();
      for (int lines = 0; lines < 3 && start != std::string::npos && start > 0; ++lines) {
        start = words.rfind('\n', start - 1);
      }
      if (start != std::string::npos && start > 0) words.erase(0, start + 1);
      std::replace(words.begin(), words.end(), '\n', '|');
      message += "; it said: " + words;
    }
    return Error{Code::kPeerLost, std::move(message), Reason::kPeerLost};
  }

  // The agent never heard of the context that its model could not use, so it cannot tell the broker.
  void ReportOwnReason(int i, bool failed) {
    if (client_ == nullptr || workers_[i].reason == Reason::kNone) return;
    (void)client_->Report({.context = workers_[graph_[i].inherits].result.context_id,
                           .mode = failed ? "none" : "text",
                           .reason = workers_[i].reason,
                           .failed = failed});
  }

  void Fail(int i, Error error) {
    if (workers_[i].process) workers_[i].process->Kill();
    workers_[i].loading = false;
    Tell(FlowEvent::Kind::kFailed, i, {}, nullptr, &error);
    result_.failures.push_back({agent(i).name, std::move(error)});
    Apply(plan_.OnFailed(i));
  }

  void Apply(const Plan::Change& change) {
    for (int i : change.skipped) {
      result_.skipped.push_back(agent(i).name);
      Tell(FlowEvent::Kind::kSkipped, i);
    }
    for (int i : change.released) {
      // Whatever the broker answers, it has nothing of ours any more, or is gone.
      if (client_ && !workers_[i].result.context_id.empty()) (void)client_->Remove(workers_[i].result.context_id);
      if (client_) Tell(FlowEvent::Kind::kReleased, i);
    }
  }

  void EndWorkers() {
    for (Worker& worker : workers_) {
      if (!worker.process) continue;
      if (result_.stopped) worker.process->Kill();
      worker.process->CloseInput();
      (void)worker.process->Pump();
    }
    const auto until = Clock::now() + kExitDeadline;
    for (Worker& worker : workers_) {
      if (worker.process) worker.process->WaitExit(std::chrono::ceil<milliseconds>(until - Clock::now()));
      worker.process.reset();  // kills who is still there
    }
  }

  void Finish() {
    for (int i = 0; i < count(); ++i) {
      if (plan_.state(i) != Plan::State::kFinished) continue;
      const TurnResult& turn = workers_[i].result;
      HopResult hop;
      hop.agent = agent(i).name;
      hop.from = agent(i).inherits;
      hop.handoff = turn.mode == HandoffMode::kNone ? HandoffMode::kText : turn.mode;
      hop.reason = workers_[i].reason != Reason::kNone ? workers_[i].reason : turn.reason;
      hop.reason_detail = turn.reason_detail;
      hop.tokens_reused = turn.tokens_reused;
      hop.tokens_recomputed = turn.tokens_recomputed;
      hop.attach_ms = turn.attach_ms;
      hop.ttft_ms = turn.ttft_ms;
      hop.output_tokens = static_cast<int64_t>(turn.output_tokens.size());
      result_.hops.push_back(std::move(hop));
      result_.output_tokens[agent(i).name] = turn.output_tokens;
      result_.kv_bytes += options_.mode == FlowMode::kHandoff ? turn.own_kv_bytes : turn.kv_bytes;
    }
  }

  const Flow& flow_;
  const RunOptions& options_;
  const std::vector<PlanNode> graph_;
  Plan plan_;
  CodecPair kv_;
  ModeResult result_;

  // In this order: agents end before the broker, the broker before its directory.
  std::unique_ptr<PrivateDirectory> directory_;
  std::string socket_;
  std::unique_ptr<BrokerServer> broker_;
  std::unique_ptr<BrokerClient> client_;
  std::vector<Worker> workers_;
};

}  // namespace

std::vector<CodecPair> HandoffCodecs(const Flow& flow) {
  if (!flow.kv.empty()) return flow.kv;
  return {{CodecId::kI8, CodecId::kI8}, {CodecId::kI4, CodecId::kI4}};
}

Result<ModeResult> RunFlow(const Flow& flow, const RunOptions& options) {
  for (const FlowAgent& agent : flow.agents) {
    if (agent.model.empty() && flow.model.empty()) {
      return Err(Code::kInvalidArgument, "{}: agent '{}' has no model: give one with -m, or as 'model' in the flow",
                 flow.path, agent.name);
    }
  }
  return Run(flow, options).Go();
}

Result<FlowReport> CompareModes(const Flow& flow, const RunOptions& options,
                                const std::function<void(FlowMode, CodecPair)>& on_mode) {
  FlowReport report{.flow = flow.name};
  RunOptions one = options;
  const auto run = [&](FlowMode mode, CodecPair kv) -> Status {
    one.mode = mode;
    one.kv = kv;
    if (on_mode) on_mode(mode, kv);
    QKV_ASSIGN_OR_RETURN(ModeResult result, RunFlow(flow, one));
    report.modes.push_back(std::move(result));
    return {};
  };
  QKV_RETURN_IF_ERROR(run(FlowMode::kText, CodecPair{}));
  for (CodecPair kv : HandoffCodecs(flow)) {
    if (report.modes.back().stopped) break;
    QKV_RETURN_IF_ERROR(run(FlowMode::kHandoff, kv));
    for (Agreement& one_agent : CompareOutputs(report.modes.front(), report.modes.back())) {
      report.agreement.push_back(std::move(one_agent));
    }
  }
  return report;
}

}  // namespace qkv
