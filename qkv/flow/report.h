// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What came of running a flow in one or more modes, and how people (a table) and programs (JSON) get to see it.
// Values and pure functions; any thread.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "qkv/engine/agent.h"
#include "qkv/flow/memory_sampler.h"
#include "qkv/flow/plan.h"

namespace qkv {

enum class FlowMode : uint8_t {
  kHandoff,  // readers go on from the published pages
  kText,     // readers get what was read so far as tokens and read it again; nobody shares anything
};
std::string_view FlowModeName(FlowMode mode);  // "handoff", "text"

// One agent that finished. Times `_at_ms` are from the start of the first turn.
struct HopResult {
  std::string agent;
  std::string from;                          // whose context it took over; several: with commas; empty: nobody's
  HandoffMode handoff = HandoffMode::kText;  // kText also for who starts afresh: it reads its own prompt
  Reason reason = Reason::kNone;             // why not kAttach
  std::string reason_detail;
  int64_t tokens_reused = 0;
  int64_t tokens_recomputed = 0;
  std::string splice;           // how contexts were used at other places; empty: none was (TurnResult::splice)
  int spans_spliced = 0;        // moved
  int64_t tokens_repaired = 0;  // of their contexts, read again; part of tokens_recomputed
  double probe_kl = -1;         // of `auto`, nats; -1: it was not
  double attach_ms = 0;
  double ttft_ms = 0;
  int64_t output_tokens = 0;

  double ready_at_ms = 0;    // all it needs had finished
  double started_at_ms = 0;  // its turn began
  double ended_at_ms = 0;
  double prefill_ms = 0;
  double decode_ms = 0;
  double publish_ms = 0;
  double gap_ms = -1;           // from its last producer's last token to its own first; -1: it has none
  double prepared_ms = 0;       // spent ahead of its turn
  int64_t prepared_tokens = 0;  // of its own prefix, read ahead
  uint64_t prepared_bytes = 0;  // of pages, mapped and checked ahead
  uint64_t kv_bytes = 0;        // its context's pages
  uint64_t own_kv_bytes = 0;    // of which it wrote
  int attempts = 1;
};

struct AgentFailure {
  std::string agent;
  Error error;
};

struct ModeResult {
  FlowMode mode = FlowMode::kHandoff;
  std::string kv;  // codec pair of the pages; an agent's own `kv` may differ

  double end_to_end_ms = 0;     // from the first turn's start, when every model was loaded, to the last one's end
  double with_start_up_ms = 0;  // the same, plus starting the processes and loading the models
  uint64_t peak_pss_bytes = 0;  // of the runner and all agents together, sampled; 0: the system doesn't tell
  uint64_t kv_bytes = 0;        // at the end. Handoff: the sum of what each wrote (every page has one writer); text: of
                                // what each holds
  double tasks_per_minute = 0;  // one task: the whole flow; 0 unless every agent finished
  int jobs = 0;                 // agents that could work at one time
  int threads = 0;              // of all together
  bool ahead = true;
  std::vector<MemorySample> memory;  // at_ms from the start of the first turn; what was before is negative

  std::vector<TraceEvent> trace;  // of all agents, if it was asked for

  std::vector<HopResult> hops;  // the agents that finished, in the order of the flow
  std::map<std::string, std::string> outputs;
  std::map<std::string, std::vector<Token>> output_tokens;
  std::map<std::string, std::string> logits_digests;  // empty unless asked for

  std::vector<AgentFailure> failures;
  std::vector<std::string> skipped;  // not run, because something they need failed
  bool stopped = false;              // by the caller's stop flag

  bool ok() const { return failures.empty() && skipped.empty() && !stopped; }
};

// How far a handoff's output is the text mode's: tokens in their common prefix, of the longer one's.
struct Agreement {
  std::string kv;
  std::string agent;
  int64_t tokens_equal = 0;
  int64_t tokens = 0;
  double ratio() const { return tokens == 0 ? 1.0 : static_cast<double>(tokens_equal) / static_cast<double>(tokens); }
};

struct FlowReport {
  std::string flow;
  std::vector<PlanNode> graph;  // of the flow; empty if nobody asked
  std::vector<ModeResult> modes;
  std::vector<Agreement> agreement;  // empty unless text mode is among the modes
};

// For every agent that finished in both modes, in the order of `handoff`'s hops.
std::vector<Agreement> CompareOutputs(const ModeResult& text, const ModeResult& handoff);

std::string FormatTable(const FlowReport& report);  // ends in a newline
std::string ToJson(const FlowReport& report);       // pretty-printed, ends in a newline; docs/FLOWS.md lists the keys

// 0 if all is well; 130 after a stop; else by the first failure, where an agent's death counts as our failure (1).
int FlowExitStatus(const FlowReport& report);

}  // namespace qkv
