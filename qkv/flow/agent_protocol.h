// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the runner of a flow and an agent's process say to each other: one JSON object per line, the runner's on the
// process's stdin, the process's on its stdout.
//
//   runner: setup                                   turn                      (hang-up: exit)
//   agent:          … loads the model …     ready         text* done | error
//
// Both ends are of one version (the runner starts its own executable), so there is no version field. Pure functions,
// any thread; the lines may come from anybody: every parser checks types, ranges, depth and length. Errors: kCorrupt.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "qkv/codec/codec.h"
#include "qkv/engine/agent.h"

namespace qkv {

inline constexpr size_t kMaxAgentLineBytes = size_t{64} << 20;

// To load a model and reach the broker.
struct AgentSetup {
  std::string agent;
  std::string model;   // path
  std::string socket;  // the broker's; empty: this agent neither inherits nor publishes
  CodecPair kv;
  int n_ctx = 4096;
  int threads = 2;
  bool trace = false;  // record stages
};

// What to do; TurnRequest's fields of the same names.
struct AgentTurn {
  std::string system;
  std::string prompt;
  int max_tokens = 256;
  Sampling sampling;
  std::string inherits;
  OnMiss on_miss = OnMiss::kText;
  std::vector<Token> history;
  std::string publish_as;
};

using AgentCommand = std::variant<AgentSetup, AgentTurn>;

struct AgentReady {
  double load_ms = 0;
  std::string tokenizer;  // digest; token ids mean the same to agents with the same one
};
struct AgentProgress {  // of reading a prompt that takes more than one batch
  int64_t done = 0;
  int64_t total = 0;
};
struct AgentText {
  std::string piece;
};
struct AgentDone {
  TurnResult result;
  std::vector<TraceEvent> trace;
};
struct AgentFailed {
  Error error;
};

using AgentEvent = std::variant<AgentReady, AgentProgress, AgentText, AgentDone, AgentFailed>;

// One line, its newline included. Bytes that are not UTF-8 are replaced by U+FFFD.
std::string ToLine(const AgentCommand& command);
std::string ToLine(const AgentEvent& event);

Result<AgentCommand> ParseAgentCommand(std::string_view line);
Result<AgentEvent> ParseAgentEvent(std::string_view line);

}  // namespace qkv
