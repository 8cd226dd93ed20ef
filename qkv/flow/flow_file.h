// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A flow as the user writes it (docs/FLOWS.md): YAML in, a checked value out. What comes out is complete: every name
// that is used exists, no agent waits for itself, every text is UTF-8 and every number is in range.
//
// Pure, apart from reading the files that a flow names. Any thread; no exception leaves. Every error is one line; what
// is wrong inside the flow starts with "<path>:<line>:<column>: " and suggests the nearest known word if one is likely.

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/codec/codec.h"
#include "qkv/engine/agent.h"
#include "qkv/flow/plan.h"

namespace qkv {

inline constexpr size_t kMaxFlowFileBytes = size_t{16} << 20;  // the YAML, and each input file
inline constexpr size_t kMaxFlowTextBytes = size_t{64} << 20;  // all texts of a flow together; one filled-in prompt
inline constexpr size_t kMaxFlowAgents = 64;                   // each is a process with a model in it
inline constexpr size_t kMaxFlowInputs = 256;

struct FlowAgent {
  std::string name;      // [A-Za-z0-9_-]{1,64}
  std::string model;     // path; empty: the flow's
  std::string system;    // may hold references, like the prompt; only where nothing is inherited
  std::string prompt;    // with its references: {{input.<name>}}, {{<agent>.output}}
  std::string inherits;  // the agent whose context this one goes on from; empty: starts afresh
  int max_tokens = 256;
  Sampling sampling;
  std::optional<CodecPair> kv;  // of the pages this agent writes; nothing: the run's
  OnMiss on_miss = OnMiss::kText;
};

struct Flow {
  std::string path;  // for messages
  std::string name;
  std::string model;  // path; may be empty, then the command line must give one
  int n_ctx = 4096;
  int threads = 0;                            // 0: as many as the machine has CPUs
  std::vector<CodecPair> kv;                  // to hand over with, in order; empty: the program's choice
  std::map<std::string, std::string> inputs;  // name -> text
  std::vector<FlowAgent> agents;              // in the order of the file

  // The agents' dependencies, by index: what they inherit from and whose output they quote. Without a cycle.
  std::vector<PlanNode> Graph() const;
};

// `path` names the flow in messages; relative paths inside the flow start at its directory.
// Errors: kInvalidArgument; kNotFound and kDenied for a file that can't be read.
Result<Flow> ParseFlow(std::string_view yaml, const std::string& path);
Result<Flow> ParseFlowFile(const std::string& path);

// `text` with every reference replaced; the replacements themselves are not searched for references. `outputs` holds
// what the agents said so far. Errors: kInvalidArgument (unknown or malformed reference, or more than
// kMaxFlowTextBytes).
Result<std::string> FillIn(std::string_view text, const std::map<std::string, std::string>& inputs,
                           const std::map<std::string, std::string>& outputs);

}  // namespace qkv
