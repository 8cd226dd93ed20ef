// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A flow as the user writes it (docs/FLOWS.md): YAML in, a checked value out. What comes out is complete: every name
// that is used exists, lists are spread (`foreach`), no agent waits for itself, every text is UTF-8 and every number is
// in range.
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
#include "qkv/flow/flow_text.h"
#include "qkv/flow/plan.h"

namespace qkv {

inline constexpr size_t kMaxFlowAgents = 4096;  // after `foreach`
inline constexpr size_t kMaxFlowInputs = 256;

enum class EdgeKind : uint8_t {
  kInherits,  // goes on from the other's context; exact
  kReads,     // uses the other's context behind an own prefix
  kText,      // what the other answered stands before the prompt
};
std::string_view EdgeKindName(EdgeKind kind);  // "inherits", "reads", "text"

// From another agent to the one that holds it.
struct FlowEdge {
  EdgeKind kind = EdgeKind::kInherits;
  std::string from;
  OnMiss on_miss = OnMiss::kText;  // not for kText
  int64_t budget = 0;              // most tokens to take over; a longer context is a miss. 0: any
  uint64_t budget_bytes = 0;       // the same for its pages
  SplicePolicy splice;             // for kReads
};

struct FlowAgent {
  std::string name;       // [A-Za-z0-9_-]{1,64}; of `foreach`: "<name>-<k>", k from 1
  std::string model;      // path; empty: the flow's
  std::string system;     // may hold references, like the prompt; only where nothing is inherited
  std::string prompt;     // with its references
  bool document = false;  // the prompt is a text for others to read: this agent says nothing (max_tokens is 0)
  std::vector<FlowEdge> edges;
  int max_tokens = 256;
  Sampling sampling;
  std::optional<KvChoice> kv;  // of the pages this agent writes; nothing: the run's
  uint64_t max_bytes = 0;      // instead: the best codecs with which n_ctx tokens take no more; 0: no such limit
  double deadline_s = 0;       // for its turn; 0: the run's
  int retries = 0;             // further attempts after its process died or its deadline passed

  // For `foreach`: which of the flow's lists, and which item of it. Agents over one list belong together item by item.
  int list = -1;
  int index = 0;  // from 0
  std::string item;

  std::string_view inherits() const;          // whose context it goes on from; "": nobody's
  const FlowEdge* edge(EdgeKind kind) const;  // the first of that kind; null: none
};

struct Flow {
  std::string path;  // for messages
  std::string name;
  std::string model;  // path; may be empty, then the command line must give one
  int n_ctx = 4096;
  int threads = 0;           // of all agents together; 0: as many as the machine has CPUs
  int64_t budget = 0;        // tokens of KV to have at one time, if the order can help it; 0: any
  bool bal = false;          // hand over keys multiplied by the matrices kept beside each model (engine/calibration.h)
  std::vector<KvChoice> kv;  // to hand over with, in order; empty: the program's choice
  std::map<std::string, std::string> inputs;  // name -> text; of a list: its items, a blank line between
  std::vector<FlowAgent> agents;              // in the order of the file
  std::map<std::string, std::vector<int>, std::less<>> names;  // of agents, and of what `foreach` made

  // Whom `name` means to `reader`: one agent, or all that `foreach` made of that name; of those over the reader's own
  // list, the one of the same item. Empty: nobody.
  std::vector<int> Resolve(const FlowAgent& reader, std::string_view name) const;

  // The agents' dependencies, by index: whose context they go on from or read, and whose output they quote. Without a
  // cycle. Token counts are guesses from the texts' lengths.
  std::vector<PlanNode> Graph() const;

  // The texts of an agent with every reference replaced; what its `text` edges bring stands before the prompt.
  // `outputs` holds what the agents said so far, by name. Errors: kInvalidArgument (an unknown reference, or more than
  // kMaxFlowTextBytes).
  Result<std::string> SystemOf(const FlowAgent& agent, const std::map<std::string, std::string>& outputs) const;
  Result<std::string> PromptOf(const FlowAgent& agent, const std::map<std::string, std::string>& outputs) const;
};

// Texts for a flow's inputs, in place of those in the file; several of one name make a list.
using FlowInputs = std::map<std::string, std::vector<std::string>>;
// "name=text", or "name=@path" for a file's text. Errors: kInvalidArgument, and those of ReadTextFile.
Status AddInput(std::string_view argument, FlowInputs& inputs);

// `path` names the flow in messages; relative paths inside the flow start at its directory.
// Errors: kInvalidArgument; kNotFound and kDenied for a file that can't be read.
Result<Flow> ParseFlow(std::string_view yaml, const std::string& path, const FlowInputs& given = {});
Result<Flow> ParseFlowFile(const std::string& path, const FlowInputs& given = {});

}  // namespace qkv
