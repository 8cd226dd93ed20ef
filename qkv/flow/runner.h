// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs a flow: worker processes, each with one model, take the agents' turns when the plan says so. Handing over goes
// through a broker, embedded unless one is named; the text mode is the same flow without sharing, for comparison and as
// what everything falls back to.
//
// Ahead of time: while a producer still generates, its readers' workers are started, their own prefix is read, and what
// exists of the contexts they need is mapped and checked. What comes out does not depend on it, nor on the number of jobs
// or threads, nor on how long anything takes.
//
// Blocks the calling thread, which must live until it returns (the workers end with it). Several runs may go on at once.
// When it returns, or the process is killed, no worker is left.

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/broker/metrics.h"
#include "qkv/engine/sequence.h"
#include "qkv/flow/flow_file.h"
#include "qkv/flow/report.h"

namespace qkv {

// Borrowed until the callback returns.
struct FlowEvent {
  enum class Kind : uint8_t {
    kReady,     // a worker that was started for it has loaded its model
    kPrepared,  // its worker holds what it could get ready ahead: `done` tokens read, `total` bytes of pages
    kStarted,   // its turn began
    kProgress,  // it has read `done` of `total` tokens
    kText,      // `text` was generated
    kFinished,  // `result`
    kRetried,   // `error`; it will be tried again
    kFailed,    // `error`
    kSkipped,   // something it needs failed
    kReleased,  // the last reader of its context is through; the broker forgets it
  };
  Kind kind;
  std::string_view agent;
  std::string_view text;
  const TurnResult* result = nullptr;
  const Error* error = nullptr;
  int64_t done = 0;
  int64_t total = 0;
};

struct RunOptions {
  FlowMode mode = FlowMode::kHandoff;
  std::optional<KvChoice> kv;      // handoff only; nothing: HandoffCodecs(flow)'s first. Text mode keeps f16 pages.
  double kv_bits = 0;              // > 0: instead of `kv`, the best of so many bits per value for each agent's model
  double refine = kDefaultRefine;  // SequenceOptions::refine, of every agent
  std::string socket;              // an existing broker's; empty: one of our own, in a private directory
  uint64_t budget_bytes = uint64_t{4} << 30;  // of our own broker
  std::shared_ptr<BrokerMetrics> metrics;     // where our own broker counts; null: nowhere
  int jobs = 0;                // most agents at work at one time; 0: as many as are of use, and not more than threads
  bool ahead = true;           // get readers ready while their producers still generate
  bool in_place = true;        // who is first to go on from a context does so in its producer's worker
  bool digest_logits = false;  // for tests: fill in ModeResult::logits_digests
  std::chrono::milliseconds load_deadline = std::chrono::minutes(2);
  std::chrono::milliseconds turn_deadline = std::chrono::minutes(30);  // of agents without their own
  const std::atomic<bool>* stop = nullptr;         // set it (from a signal handler, say): all ends within a second
  std::function<void(const FlowEvent&)> on_event;  // on the calling thread
  // What a worker is; empty: this very program with the argument "agent-worker".
  std::vector<std::string> worker_argv;
  bool trace = false;  // collect ModeResult::trace
};

// The flow's own list, or i8 and i4.
std::vector<KvChoice> HandoffCodecs(const Flow& flow);

// Threads that all agents of a flow have together.
int TotalThreads(const Flow& flow);
// How many agents work at one time: `wanted`, or (0) as many as the flow's graph has use for, not more than threads.
int JobsFor(const Flow& flow, int wanted);

// An agent's failure is in the result, not an error: the others' work is there too. Errors: kInvalidArgument (an agent
// without a model), the broker's and the system's when starting.
Result<ModeResult> RunFlow(const Flow& flow, const RunOptions& options);

// Text mode, then handing over with each of HandoffCodecs(flow) (`options.mode`, `kv` and `kv_bits` are not looked at),
// one after the other. `on_mode` is told which one begins. Ends early when stopped.
Result<FlowReport> CompareModes(const Flow& flow, const RunOptions& options,
                                const std::function<void(FlowMode, const KvChoice&)>& on_mode = {});

}  // namespace qkv
