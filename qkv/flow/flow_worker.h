// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A worker process as the runner sees it: one model, one agent's turn at a time. Keeps what state it is in; what the
// state means for the flow is the runner's business. Passive like AgentProcess, and like it one thread at a time.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "qkv/flow/agent_process.h"
#include "qkv/flow/agent_protocol.h"

namespace qkv {

struct FlowWorker {
  using Clock = std::chrono::steady_clock;

  // Starts the process and sends it its set-up. Errors: the system's.
  static Result<std::unique_ptr<FlowWorker>> Start(const std::vector<std::string>& argv, const AgentSetup& setup,
                                                   int for_agent, Clock::time_point load_deadline);

  // The process closed its output. Its exit follows at once, unless it is stuck: waits for it a short while. kPeerLost.
  Error Death();

  bool idle() const { return !loading && agent < 0; }

  std::unique_ptr<AgentProcess> process;
  std::string model;
  std::string tokenizer;  // once loaded
  int for_agent = -1;     // whom it was started for
  int agent = -1;         // whose turn it runs, or will once it has loaded
  int last = -1;          // whose turn it ran last, to the end: it keeps that one's context for a moment
  int prepared = -1;      // who was prepared here
  int threads = 0;        // of the turn
  bool loading = true;
  int turns = 0;               // that it has had
  bool spoke = false;          // in the turn that it runs
  bool taking_over = false;    // its turn goes on from contexts of others and has no first token yet
  Clock::time_point deadline;  // of loading, or of the turn
};

}  // namespace qkv
