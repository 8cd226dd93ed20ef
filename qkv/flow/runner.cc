// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/runner.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "qkv/base/temp_dir.h"
#include "qkv/broker/client.h"
#include "qkv/broker/server.h"
#include "qkv/flow/agent_protocol.h"
#include "qkv/flow/flow_worker.h"
#include "qkv/flow/hop_phases.h"
#include "qkv/flow/memory_sampler.h"
#include "qkv/flow/plan.h"
#include "qkv/flow/turn_maker.h"

namespace qkv {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kTick{50};           // how late a stop may be seen
constexpr int kMostIdleLosses = 2;          // of workers that end for no reason before they are of any use
constexpr milliseconds kExitDeadline{500};  // for agents to go when the runner hangs up

double MsBetween(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

class Run {
 public:
  Run(const Flow& flow, const RunOptions& options)
      : flow_(flow),
        options_(options),
        plan_(flow.Graph()),
        turns_(flow, plan_.nodes(), options.mode),
        agents_(flow.agents.size()) {
    result_.mode = options.mode;
    kv_ = options.mode == FlowMode::kText ? KvChoice{} : options.kv ? *options.kv : HandoffCodecs(flow).front();
    result_.kv = HandsOver() && options.kv_bits > 0 ? fmt::format("{} bits", options.kv_bits) : ToString(kv_);
    if (HandsOver() && flow.bal) result_.kv.insert(0, "bal:");
    result_.ahead = options.ahead;
    result_.threads = TotalThreads(flow);
    jobs_ = JobsFor(flow, options.jobs);
    result_.jobs = jobs_;
    forecast_ = Forecast(plan_.nodes(), jobs_, flow.budget);
  }

  Result<ModeResult> Go() {
    const auto begin = Clock::now();
    QKV_RETURN_IF_ERROR(StartBroker());
    MemorySampler memory;
    memory_ = &memory;
    if (options_.ahead) StartFirstWorkers();

    std::optional<Clock::time_point> first_turn;
    while (!plan_.complete()) {
      if (options_.stop != nullptr && options_.stop->load()) {
        result_.stopped = true;
        break;
      }
      if (first_turn || !AnyLoading()) {
        if (!first_turn) first_turn = first_turn_ = Clock::now();
        StartReady();
        if (options_.ahead) PrepareUpcoming();
      }
      Poll();
      for (size_t w = 0; w < workers_.size(); ++w) {
        if (workers_[w] != nullptr) Attend(*workers_[w]);
      }
      std::erase(workers_, nullptr);
    }
    const auto end = Clock::now();

    MemorySampler::Record record = memory.Stop();
    memory_ = nullptr;
    EndWorkers();
    Finish();
    result_.peak_pss_bytes = record.peak_bytes;
    result_.memory = std::move(record.samples);
    const double offset = first_turn ? MsBetween(begin, *first_turn) : 0;
    for (MemorySample& sample : result_.memory) sample.at_ms -= offset;
    result_.end_to_end_ms = first_turn ? MsBetween(*first_turn, end) : 0;
    result_.with_start_up_ms = MsBetween(begin, end);
    if (result_.ok() && result_.end_to_end_ms > 0) result_.tasks_per_minute = 60000 / result_.end_to_end_ms;
    return std::move(result_);
  }

 private:
  struct AgentState : AgentRecord {
    std::string announced;  // the beginning of its context that can be had while it works
    HopResult hop;          // what is known of it so far
    int retries = 0;        // taken
    int idle_losses = 0;    // workers that ended before they had a turn or said a word in it
    bool was_ready = false;
  };

  int count() const { return static_cast<int>(agents_.size()); }
  const FlowAgent& agent(int i) const { return flow_.agents[i]; }
  std::string ModelOf(int i) const { return agent(i).model.empty() ? flow_.model : agent(i).model; }
  // Of its context at the broker.
  std::string NameOf(int i) const { return fmt::format("flow-{}.{}", ::getpid(), agent(i).name); }
  const PlanNode& node(int i) const { return plan_.nodes()[i]; }
  bool HandsOver() const { return options_.mode == FlowMode::kHandoff; }
  // Nothing more is expected of it.
  bool over(int i) const {
    const Plan::State state = plan_.state(i);
    return state != Plan::State::kWaiting && state != Plan::State::kRunning;
  }
  bool AnyLoading() const {
    return std::any_of(workers_.begin(), workers_.end(), [](const auto& worker) { return worker->loading; });
  }
  size_t MostWorkers() const {
    const size_t most = static_cast<size_t>(jobs_) * (options_.ahead ? 2 : 1);
    return std::min(most, agents_.size());
  }
  double SinceStart() const { return MsBetween(first_turn_, Clock::now()); }

  void Tell(FlowEvent::Kind kind, int i, std::string_view text = {}, const TurnResult* result = nullptr,
            const Error* error = nullptr) {
    if (options_.on_event) options_.on_event({kind, agent(i).name, text, result, error});
  }

  Status StartBroker() {
    if (!HandsOver()) return {};
    bool needed = false;
    for (int i = 0; i < count(); ++i) needed = needed || plan_.publishes(i);
    if (!needed) return {};
    socket_ = options_.socket;
    if (socket_.empty()) {
      QKV_ASSIGN_OR_RETURN(directory_, TempDir::CreateForSocket());
      socket_ = directory_.path() + "/broker.sock";
      QKV_ASSIGN_OR_RETURN(
          broker_, BrokerServer::Start(
                       {.socket_path = socket_, .budget_bytes = options_.budget_bytes, .metrics = options_.metrics}));
    }
    QKV_ASSIGN_OR_RETURN(client_, BrokerClient::Connect(socket_));
    return {};
  }

  // --- workers --------------------------------------------------------------------------------------------------------

  FlowWorker* StartWorker(int i) {
    std::vector<std::string> argv = options_.worker_argv;
    if (argv.empty()) argv = {"/proc/self/exe", "agent-worker"};
    AgentSetup setup{.model = ModelOf(i),
                     .socket = socket_,
                     .refine = options_.refine,
                     .balanced = HandsOver() && flow_.bal,
                     .warm_up = options_.ahead};
    if (MostWorkers() > 1) ShareWeights(setup);
    auto worker = FlowWorker::Start(argv, setup, i, Clock::now() + options_.load_deadline);
    if (!worker) {
      FailAttempt(i, worker.error());
      return nullptr;
    }
    workers_.push_back(*std::move(worker));
    TellSampler();
    return workers_.back().get();
  }

  // Packs a model's weights once for all its workers, which open them through this process. Whatever goes wrong here, the
  // worker will meet and report itself.
  void ShareWeights(AgentSetup& setup) {
    const auto [it, is_new] = packed_.try_emplace(setup.model);
    if (is_new) {
      if (const auto model = Model::Load(setup.model)) {
        if (auto packed = (*model)->ShareWeights()) it->second = *std::move(packed);
      }
    }
    if (!it->second.fd.valid()) return;
    setup.packed_weights = fmt::format("/proc/{}/fd/{}", ::getpid(), it->second.fd.get());
    setup.packed_digest = it->second.weights_digest;
  }

  void TellSampler() {
    std::vector<pid_t> pids;
    for (const auto& worker : workers_) {
      if (worker != nullptr) pids.push_back(worker->process->pid());
    }
    if (memory_ != nullptr) memory_->SetPids(std::move(pids));
  }

  // Kills it; it leaves the list at the end of the round.
  void Drop(FlowWorker& worker) {
    for (auto& one : workers_) {
      if (one.get() == &worker) one.reset();
    }
    TellSampler();
  }

  // Those whose turns come first, so that loading models is over when the first turn begins.
  void StartFirstWorkers() {
    for (const PlanForecast::Turn& turn : forecast_.turns) {
      if (workers_.size() >= MostWorkers()) break;
      if (!over(turn.node) && !GoesOnInPlace(turn.node)) StartWorker(turn.node);
    }
  }

  // Agent i needs no worker but that of the agent whose context it goes on from, where all of it is at hand.
  bool GoesOnInPlace(int i) const {
    const int producer = node(i).inherits;
    if (!options_.in_place || !HandsOver() || producer < 0) return false;
    return plan_.heir(producer) == i && ModelOf(producer) == ModelOf(i);
  }
  // That worker, while it is at that turn or idle after it.
  FlowWorker* WorkerOfProducer(int i) const {
    if (!GoesOnInPlace(i)) return nullptr;
    const int producer = node(i).inherits;
    for (const auto& worker : workers_) {
      if (worker != nullptr && (worker->agent >= 0 ? worker->agent : worker->last) == producer) return worker.get();
    }
    return nullptr;
  }

  // A worker that may take agent i's turn or prepare it, or null. `steal`: also one that was prepared for another agent,
  // or, when no more may be started, one in place of an idle one with another model.
  FlowWorker* FindWorker(int i, bool steal) {
    const std::string model = ModelOf(i);
    const auto find = [&](auto fits) -> FlowWorker* {
      for (const auto& worker : workers_) {
        if (worker != nullptr && worker->agent < 0 && fits(*worker)) return worker.get();
      }
      return nullptr;
    };
    if (auto* w = WorkerOfProducer(i); w != nullptr && w->agent < 0) return w;
    if (auto* w = find([&](FlowWorker& w) { return w.prepared == i; })) return w;
    if (auto* w = find([&](FlowWorker& w) { return w.prepared < 0 && w.model == model && w.for_agent == i; })) return w;
    if (auto* w = find([&](FlowWorker& w) { return w.prepared < 0 && w.model == model && !w.loading; })) return w;
    if (auto* w = find([&](FlowWorker& w) { return w.prepared < 0 && w.model == model; })) return w;
    const auto alive = static_cast<size_t>(
        std::count_if(workers_.begin(), workers_.end(), [](const auto& worker) { return worker != nullptr; }));
    if (alive < MostWorkers()) return StartWorker(i);
    if (!steal) return nullptr;
    if (auto* w = find([&](FlowWorker& w) { return w.model == model; })) return w;
    if (auto* w = find([&](FlowWorker& w) { return !w.loading; })) {
      Drop(*w);
      return StartWorker(i);
    }
    return nullptr;
  }

  // --- turns ----------------------------------------------------------------------------------------------------------

  void StartReady() {
    for (int i : plan_.Ready()) {
      if (std::exchange(agents_[i].was_ready, true)) continue;
      agents_[i].hop.ready_at_ms = SinceStart();
    }
    for (int i : plan_.Startable(jobs_, flow_.budget)) {
      if (plan_.state(i) != Plan::State::kWaiting) continue;  // skipped by the one before
      FlowWorker* worker = FindWorker(i, /*steal=*/true);
      if (over(i)) continue;  // it could not be started
      if (worker == nullptr) break;
      plan_.OnStarted(i);
      worker->agent = i;
      if (!worker->loading) StartTurn(*worker);
    }
  }

  // What its share is by the plan, or what is left by those at work.
  int ThreadsFor(int i) const {
    int used = 0;
    for (const auto& worker : workers_) {
      if (worker != nullptr && worker->agent >= 0 && worker->agent != i) used += worker->threads;
    }
    return std::max(1, std::min(PlannedThreads(i), result_.threads - used));
  }
  int PlannedThreads(int i) const { return std::max(1, result_.threads / std::max(forecast_.together[i], 1)); }

  uint64_t MaxBytesOf(int i) const { return HandsOver() ? agent(i).max_bytes : 0; }
  double KvBitsOf(int i) const { return HandsOver() && !agent(i).kv ? options_.kv_bits : 0; }
  KvChoice CodecsOf(int i) const { return HandsOver() && agent(i).kv ? *agent(i).kv : kv_; }

  void StartTurn(FlowWorker& worker) {
    const int i = worker.agent;
    AgentState& state = agents_[i];
    state.tokenizer = worker.tokenizer;
    worker.threads = ThreadsFor(i);
    std::vector<AgentRecord*> records;
    for (AgentState& other : agents_) records.push_back(&other);
    auto turn = turns_.Make(i, result_.outputs, records);
    if (!turn) {
      worker.agent = -1;
      ReportOwnReason(i, /*failed=*/true);
      return Fail(i, turn.error());
    }
    turn->kv = CodecsOf(i);
    turn->max_bytes = MaxBytesOf(i);
    turn->kv_bits = KvBitsOf(i);
    turn->threads = worker.threads;
    turn->digest_logits = options_.digest_logits;
    turn->trace = options_.trace;
    if (HandsOver() && plan_.publishes(i)) {
      turn->publish_as = NameOf(i);
      turn->announce = options_.ahead && std::ranges::any_of(plan_.readers(i), [&](int reader) {
                         return !GoesOnInPlace(reader);  // which has it all at hand
                       });
    }
    worker.process->Send(ToLine(*turn));
    worker.deadline = Clock::now() + TurnDeadline(i);
    worker.prepared = worker.last = -1;
    ++worker.turns;
    worker.spoke = false;
    worker.taking_over = !turn->inherits.empty() || !turn->reads.empty();
    state.hop.started_at_ms = SinceStart();
    Tell(FlowEvent::Kind::kStarted, i);
  }

  milliseconds TurnDeadline(int i) const {
    if (agent(i).deadline_s <= 0) return options_.turn_deadline;
    return std::chrono::ceil<milliseconds>(std::chrono::duration<double>(agent(i).deadline_s));
  }

  // --- ahead of time --------------------------------------------------------------------------------------------------

  AgentPrepare PreparationOf(int i, const std::string& context) const {
    return {.agent = agent(i).name,
            .kv = CodecsOf(i),
            .max_bytes = MaxBytesOf(i),
            .kv_bits = KvBitsOf(i),
            .n_ctx = flow_.n_ctx,
            .threads = PlannedThreads(i),
            .prefix = false,
            .system = "",
            .context = context,
            .trace = options_.trace};
  }

  // Not while somebody takes over a context: what is ahead of time would be at the cost of what is due, and letting go of
  // the last turn's memory, which comes first in preparing, is not for free either.
  void PrepareUpcoming() {
    const auto takes_over = [](const auto& worker) { return worker != nullptr && worker->taking_over; };
    if (std::ranges::any_of(workers_, takes_over)) return;
    for (int i : plan_.Upcoming()) {
      const bool done = std::any_of(workers_.begin(), workers_.end(),
                                    [&](const auto& worker) { return worker != nullptr && worker->prepared == i; });
      if (done || over(i) || WorkerOfProducer(i) != nullptr) continue;
      FlowWorker* worker = FindWorker(i, /*steal=*/false);
      if (over(i)) continue;
      if (worker == nullptr) break;
      worker->prepared = i;
      worker->last = -1;  // it lets go of what it kept
      AgentPrepare prepare = PreparationOf(i, WhatIsThere(plan_.base(i)));
      if (!node(i).reads.empty() && !agent(i).system.empty()) {
        // Unless it quotes somebody who has not answered yet.
        if (auto system = flow_.SystemOf(agent(i), result_.outputs)) {
          prepare.prefix = true;
          prepare.system = *std::move(system);
        }
      }
      worker->process->Send(ToLine(prepare));
    }
  }

  // The largest part of this agent's context that can be had while it works; empty: none.
  std::string WhatIsThere(int producer) const {
    if (!HandsOver() || producer < 0) return "";
    if (!agents_[producer].announced.empty()) return agents_[producer].announced;
    const int before = plan_.base(producer);  // what it goes on from itself is all there
    return before < 0 ? "" : agents_[before].result.context_id;
  }

  void PassOn(int producer, const AgentAnnounced& announced) {
    agents_[producer].announced = announced.context;
    for (const auto& worker : workers_) {
      const int i = worker == nullptr ? -1 : worker->prepared;
      if (i < 0 || plan_.base(i) != producer) continue;
      worker->process->Send(ToLine(PreparationOf(i, announced.context)));
    }
  }

  // --- events ---------------------------------------------------------------------------------------------------------

  void Poll() {
    auto until = Clock::now() + kTick;
    std::vector<pollfd> fds;
    for (const auto& worker : workers_) {
      if (worker == nullptr) continue;
      worker->process->AddPollFds(fds);
      if (worker->loading || worker->agent >= 0) until = std::min(until, worker->deadline);
    }
    const auto left = std::chrono::ceil<milliseconds>(until - Clock::now()).count();
    ::poll(fds.data(), fds.size(), static_cast<int>(std::clamp<int64_t>(left, 0, kTick.count())));
  }

  bool Alive(const FlowWorker* worker) const {
    return std::any_of(workers_.begin(), workers_.end(), [&](const auto& one) { return one.get() == worker; });
  }

  // Takes what the worker said, and sees whether it is still there and in time.
  void Attend(FlowWorker& worker) {
    const Status pumped = worker.process->Pump();
    while (const std::optional<std::string> line = worker.process->NextLine()) {
      Heed(worker, *line);
      if (!Alive(&worker)) return;
    }
    if (!pumped) return Lose(worker, pumped.error());
    if (worker.process->output_ended()) return Lose(worker, worker.Death());
    const bool timed = worker.loading || worker.agent >= 0;
    if (timed && Clock::now() >= worker.deadline) {
      const auto limit = worker.loading ? options_.load_deadline : TurnDeadline(worker.agent);
      Lose(worker, Error{Code::kTimeout, fmt::format("it was not {} within {} s", worker.loading ? "ready" : "done",
                                                     std::chrono::duration<double>(limit).count())});
    }
  }

  // The worker is of no use any more: whose turn it had, or for whom it was loading, has failed this time.
  void Lose(FlowWorker& worker, Error error) {
    int i = worker.agent;
    if (i < 0 && (worker.loading || (worker.turns == 0 && ++agents_[worker.for_agent].idle_losses > kMostIdleLosses))) {
      i = worker.for_agent;
    }
    // Who dies without a word in a second turn may have died of the first one, whose answer is here.
    const bool of_the_last_one = i >= 0 && worker.turns > 1 && !worker.spoke && error.code == Code::kPeerLost;
    Drop(worker);
    if (of_the_last_one && plan_.state(i) == Plan::State::kRunning && ++agents_[i].idle_losses <= kMostIdleLosses) {
      return plan_.OnRetried(i);
    }
    if (i >= 0 && !over(i)) FailAttempt(i, std::move(error));
  }

  void Heed(FlowWorker& worker, const std::string& line) {
    auto event = ParseAgentEvent(line);
    if (!event) return Lose(worker, event.error());
    const int i = worker.agent;
    const bool running = i >= 0 && !worker.loading;
    worker.spoke = true;
    if (!std::holds_alternative<AgentProgress>(*event) && !std::holds_alternative<AgentPrepared>(*event)) {
      worker.taking_over = false;
    }
    if (auto* ready = std::get_if<AgentReady>(&*event); ready != nullptr && worker.loading) {
      worker.tokenizer = std::move(ready->tokenizer);
      worker.loading = false;
      Tell(FlowEvent::Kind::kReady, worker.for_agent);
      if (worker.agent >= 0) StartTurn(worker);
    } else if (auto* prepared = std::get_if<AgentPrepared>(&*event); prepared != nullptr && !worker.loading) {
      Note(worker.prepared >= 0 ? worker.prepared : i, *prepared);
    } else if (auto* announced = std::get_if<AgentAnnounced>(&*event); announced != nullptr && running) {
      PassOn(i, *announced);
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
      worker.agent = -1;
      worker.last = i;
      agents_[i].result = std::move(done->result);
      agents_[i].hop.ended_at_ms = SinceStart();
      result_.outputs[agent(i).name] = agents_[i].result.text;
      for (TraceEvent& event : done->trace) {  // a row for each agent: workers are shared
        event.process = agent(i).name;
        event.pid = i + 1;
      }
      std::move(done->trace.begin(), done->trace.end(), std::back_inserter(result_.trace));
      Tell(FlowEvent::Kind::kFinished, i, {}, &agents_[i].result);
      ReportOwnReason(i, /*failed=*/false);
      Apply(plan_.OnFinished(i));
    } else if (auto* failed = std::get_if<AgentFailed>(&*event); failed != nullptr) {
      if (!running) return Lose(worker, failed->error);
      worker.agent = -1;  // the turn is over, the worker is as good as before
      FailAttempt(i, failed->error);
    } else {
      Lose(worker, Error{Code::kCorrupt, "agent protocol: an event out of turn"});
    }
  }

  void Note(int i, const AgentPrepared& prepared) {
    if (i < 0) return;
    HopResult& hop = agents_[i].hop;
    hop.prepared_ms += prepared.ms;
    hop.prepared_tokens = std::max(hop.prepared_tokens, prepared.prefix_tokens);
    hop.prepared_bytes += prepared.bytes;
    if (options_.on_event) {
      options_.on_event({.kind = FlowEvent::Kind::kPrepared,
                         .agent = agent(i).name,
                         .done = hop.prepared_tokens,
                         .total = static_cast<int64_t>(hop.prepared_bytes)});
    }
  }

  // Dying and being late may be the moment's fault; everything else would happen again.
  void FailAttempt(int i, Error error) {
    const bool again = error.code == Code::kPeerLost || error.code == Code::kTimeout;
    if (again && agents_[i].retries < agent(i).retries) {
      ++agents_[i].retries;
      Tell(FlowEvent::Kind::kRetried, i, {}, nullptr, &error);
      if (plan_.state(i) == Plan::State::kRunning) plan_.OnRetried(i);
      return;
    }
    Fail(i, std::move(error));
  }

  // The agent never heard of a context that its model could not use, so that its worker cannot tell the broker.
  void ReportOwnReason(int i, bool failed) {
    if (client_ == nullptr || agents_[i].reason == Reason::kNone) return;
    const int producer = node(i).inherits >= 0 ? node(i).inherits : node(i).reads.front();
    (void)client_->Report({.context = agents_[producer].result.context_id,
                           .mode = failed ? "none" : "text",
                           .reason = agents_[i].reason,
                           .failed = failed});
  }

  void Fail(int i, Error error) {
    Tell(FlowEvent::Kind::kFailed, i, {}, nullptr, &error);
    result_.failures.push_back({agent(i).name, std::move(error)});
    Apply(plan_.OnFailed(i));
  }

  void Apply(const Plan::Change& change) {
    for (int i : change.skipped) {
      result_.skipped.push_back(agent(i).name);
      Tell(FlowEvent::Kind::kSkipped, i);
    }
    for (const auto& worker : workers_) {
      if (worker != nullptr && worker->prepared >= 0 && over(worker->prepared)) worker->prepared = -1;
    }
    for (int i : change.released) {
      released_[i] = true;
      // Whatever the broker answers, it has nothing of ours any more, or is gone.
      if (client_ && !agents_[i].result.context_id.empty()) (void)client_->Remove(agents_[i].result.context_id);
      if (client_) Tell(FlowEvent::Kind::kReleased, i);
    }
  }

  void EndWorkers() {
    std::erase(workers_, nullptr);
    for (const auto& worker : workers_) {
      if (result_.stopped) worker->process->Kill();
      worker->process->CloseInput();
      (void)worker->process->Pump();
    }
    const auto until = Clock::now() + kExitDeadline;
    for (auto& worker : workers_) {
      worker->process->WaitExit(std::chrono::ceil<milliseconds>(until - Clock::now()));
      worker.reset();  // kills who is still there
    }
    workers_.clear();
    // A run that ends early leaves contexts that nobody has released; a broker of our own forgets them anyway.
    for (int i = 0; client_ && !broker_ && i < count(); ++i) {
      if (plan_.publishes(i) && !released_[i]) (void)client_->Remove(NameOf(i));
    }
  }

  void Finish() {
    for (int i = 0; i < count(); ++i) {
      if (plan_.state(i) != Plan::State::kFinished) continue;
      const AgentState& state = agents_[i];
      const TurnResult& turn = state.result;
      HopResult hop = state.hop;
      hop.agent = agent(i).name;
      if (node(i).inherits >= 0) hop.from = agent(node(i).inherits).name;
      for (int producer : node(i).reads) hop.from += (hop.from.empty() ? "" : ", ") + agent(producer).name;
      hop.handoff = turn.mode == HandoffMode::kNone ? HandoffMode::kText : turn.mode;
      hop.reason = state.reason != Reason::kNone ? state.reason : turn.reason;
      hop.reason_detail = state.reason != Reason::kNone ? state.reason_detail : turn.reason_detail;
      hop.tokens_reused = turn.tokens_reused;
      hop.tokens_recomputed = turn.tokens_recomputed;
      hop.splice = turn.splice;
      hop.spans_spliced = turn.spans_spliced;
      hop.tokens_repaired = turn.tokens_repaired;
      hop.probe_kl = turn.probe_kl;
      hop.attach_ms = turn.attach_ms;
      hop.ttft_ms = turn.ttft_ms;
      hop.output_tokens = static_cast<int64_t>(turn.output_tokens.size());
      hop.prefill_ms = turn.prefill_ms;
      hop.decode_ms = turn.decode_ms;
      hop.publish_ms = turn.publish_ms;
      hop.kv_bytes = turn.kv_bytes;
      hop.own_kv_bytes = turn.own_kv_bytes;
      hop.attempts = agents_[i].retries + 1;
      double producers_end = 0;
      for (int need : node(i).needs) producers_end = std::max(producers_end, agents_[need].result.last_token_at_ms);
      if (options_.trace) AddPhases(i, hop);
      if (producers_end > 0 && turn.first_token_at_ms > 0) hop.gap_ms = turn.first_token_at_ms - producers_end;
      result_.hops.push_back(std::move(hop));
      result_.output_tokens[agent(i).name] = turn.output_tokens;
      if (!turn.logits_digest.empty()) result_.logits_digests[agent(i).name] = turn.logits_digest;
      result_.kv_bytes += HandsOver() ? turn.own_kv_bytes : turn.kv_bytes;
    }
  }

  // What its worker did not record as stages.
  void AddPhases(int i, const HopResult& hop) {
    const double start_us = std::chrono::duration<double, std::micro>(first_turn_.time_since_epoch()).count();
    for (const HopPhase& phase : PhasesOf(hop)) {
      if (phase.kind != HopPhase::Kind::kWaiting && phase.kind != HopPhase::Kind::kDecode) continue;
      result_.trace.push_back({.process = hop.agent,
                               .name = std::string(PhaseName(phase.kind)),
                               .start_us = start_us + 1000 * phase.start_ms,
                               .duration_us = 1000 * (phase.end_ms - phase.start_ms),
                               .pid = i + 1,
                               .tid = 0});
    }
  }

  const Flow& flow_;
  const RunOptions& options_;
  Plan plan_;
  const TurnMaker turns_;
  std::vector<AgentState> agents_;
  std::vector<bool> released_ = std::vector<bool>(agents_.size(), false);
  PlanForecast forecast_;
  int jobs_ = 1;
  KvChoice kv_;
  ModeResult result_;
  Clock::time_point first_turn_{};
  MemorySampler* memory_ = nullptr;

  // In this order: workers end before the broker, the broker before its directory.
  TempDir directory_;
  std::string socket_;
  std::unique_ptr<BrokerServer> broker_;
  std::unique_ptr<BrokerClient> client_;
  std::vector<std::unique_ptr<FlowWorker>> workers_;  // null: lost in this round
  std::map<std::string, PackedWeights> packed_;       // by model; no fd: there is nothing to share
};

}  // namespace

std::vector<KvChoice> HandoffCodecs(const Flow& flow) {
  if (!flow.kv.empty()) return flow.kv;
  return {CodecPair{CodecId::kI8, CodecId::kI8}, CodecPair{CodecId::kI4, CodecId::kI4}};
}

int TotalThreads(const Flow& flow) {
  if (flow.threads > 0) return flow.threads;
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 256);
}

int JobsFor(const Flow& flow, int wanted) {
  if (wanted > 0) return wanted;
  const PlanForecast forecast = Forecast(flow.Graph(), static_cast<int>(flow.agents.size()), flow.budget);
  return std::clamp(forecast.width, 1, TotalThreads(flow));
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
                                const std::function<void(FlowMode, const KvChoice&)>& on_mode) {
  FlowReport report{.flow = flow.name, .graph = flow.Graph()};
  RunOptions one = options;
  const auto run = [&](FlowMode mode, const KvChoice& kv) -> Status {
    one.mode = mode;
    one.kv = kv;
    one.kv_bits = 0;
    if (on_mode) on_mode(mode, kv);
    QKV_ASSIGN_OR_RETURN(ModeResult result, RunFlow(flow, one));
    report.modes.push_back(std::move(result));
    return {};
  };
  QKV_RETURN_IF_ERROR(run(FlowMode::kText, KvChoice{}));
  for (const KvChoice& kv : HandoffCodecs(flow)) {
    if (report.modes.back().stopped) break;
    QKV_RETURN_IF_ERROR(run(FlowMode::kHandoff, kv));
    for (Agreement& one_agent : CompareOutputs(report.modes.front(), report.modes.back())) {
      report.agreement.push_back(std::move(one_agent));
    }
  }
  return report;
}

}  // namespace qkv
