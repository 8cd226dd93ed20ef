// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an agent is told when its turn comes: its texts filled in, and the contexts it goes on from or reads: as pages, as
// tokens where pages can't be had, as words where tokens mean nothing to its model. Pure; any thread.

#include <map>
#include <string>
#include <vector>

#include "qkv/flow/agent_protocol.h"
#include "qkv/flow/flow_file.h"
#include "qkv/flow/plan.h"
#include "qkv/flow/report.h"

namespace qkv {

// What is known of an agent's turn, for those that come after it.
struct AgentRecord {
  std::string tokenizer;          // digest, of the model that runs it; known before its turn is made
  TurnResult result;              // once finished
  std::string transcript;         // once its turn was made: all it was told, for a reader with other tokens
  Reason reason = Reason::kNone;  // why it can't have a context as pages, found before its worker had a say
  std::string reason_detail;
};

class TurnMaker {
 public:
  // Both must outlive this object; `graph` is the flow's.
  TurnMaker(const Flow& flow, const std::vector<PlanNode>& graph, FlowMode mode)
      : flow_(flow), graph_(graph), mode_(mode) {}

  // The turn of agent `i`: names, texts, contexts, sampling. Fills in the record's transcript and reason. What it does not
  // know stays as it is by default: codec, threads, what to publish. Errors: an edge with on_miss 'fail' that can't hand
  // over (kIncompatible, kPeerLost, kExhausted), kInvalidArgument (texts too long).
  Result<AgentTurn> Make(int i, const std::map<std::string, std::string>& outputs,
                         std::vector<AgentRecord*>& records) const;

 private:
  Status CheckHandoff(const AgentRecord& reader, int reader_index, int producer_index, const AgentRecord& producer,
                      const FlowEdge& edge) const;
  Status GoOn(int i, const std::vector<AgentRecord*>& records, AgentTurn& turn, std::string& said) const;
  Status ReadContexts(int i, const std::vector<AgentRecord*>& records, AgentTurn& turn, std::string& said) const;

  const Flow& flow_;
  const std::vector<PlanNode>& graph_;
  const FlowMode mode_;
};

}  // namespace qkv
