// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the runner of a flow and a worker process say to each other: one JSON object per line, the runner's on the
// process's stdin, the process's on its stdout. A worker runs agents of one model, one turn after the other.
//
//   runner: setup                                  (prepare* turn)*                    (hang-up: exit)
//   worker:       … loads the model …     ready    prepared* progress* (text | announced)* (done | error)
//
// After an error instead of ready the worker exits; after an error of a turn it takes the next one. Both ends are of one
// version (the runner starts its own executable), so there is no version field. Pure functions, any thread; the lines may
// come from anybody: every parser checks types, ranges, depth and length. Errors: kCorrupt.

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
  std::string model;               // path
  std::string socket;              // the broker's; empty: nobody here inherits or publishes
  double refine = kDefaultRefine;  // SequenceOptions::refine, of every agent here
  bool balanced = false;           // with the calibration beside the model, every agent here
  bool warm_up = false;            // compute something with the model before saying ready: its pages are in place then
  std::string packed_weights;      // path of PackedWeights::fd as the worker can open it; empty: it packs its own
  std::string packed_digest;       // PackedWeights::weights_digest
};

// What an agent's turn will need, ahead of it.
struct AgentPrepare {
  std::string agent;
  KvChoice kv;
  uint64_t max_bytes = 0;  // FlowAgent::max_bytes, instead of kv
  double kv_bits = 0;      // > 0: RunOptions::kv_bits, instead of kv where there is no max_bytes
  int n_ctx = 4096;
  int threads = 2;
  bool prefix = false;  // read `system` as the agent's own prefix
  std::string system;
  std::string context;  // map and check what there is of this context; empty: none
  bool trace = false;   // record stages
};

// What to do; TurnRequest's fields of the same names.
struct AgentTurn {
  std::string agent;
  KvChoice kv;             // of the pages that this agent writes
  uint64_t max_bytes = 0;  // as in AgentPrepare
  double kv_bits = 0;      // likewise
  int n_ctx = 4096;
  int threads = 2;
  std::string system;
  std::string prompt;
  bool document = false;
  int max_tokens = 256;  // 0 for a document
  Sampling sampling;
  std::string inherits;
  OnMiss on_miss = OnMiss::kText;
  int64_t budget = 0;
  std::vector<Token> history;
  int64_t prefix_tokens = 0;
  std::vector<ContextToRead> reads;
  std::string publish_as;
  bool announce = false;  // tell what is sealed while the turn goes on
  bool digest_logits = false;
  bool trace = false;
};

using AgentCommand = std::variant<AgentSetup, AgentPrepare, AgentTurn>;

struct AgentReady {
  double load_ms = 0;
  std::string tokenizer;  // digest; token ids mean the same to agents with the same one
};
struct AgentPrepared {
  double ms = 0;
  int64_t prefix_tokens = 0;  // read
  uint64_t bytes = 0;         // of pages mapped and checked
};
struct AgentAnnounced {  // the context's beginning can be had already
  std::string context;
  int64_t tokens = 0;
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

using AgentEvent =
    std::variant<AgentReady, AgentPrepared, AgentAnnounced, AgentProgress, AgentText, AgentDone, AgentFailed>;

// One line, its newline included. Bytes that are not UTF-8 are replaced by U+FFFD.
std::string ToLine(const AgentCommand& command);
std::string ToLine(const AgentEvent& event);

Result<AgentCommand> ParseAgentCommand(std::string_view line);
Result<AgentEvent> ParseAgentEvent(std::string_view line);

}  // namespace qkv
