// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/turn_maker.h"

#include <utility>

namespace qkv {

Result<AgentTurn> TurnMaker::Make(int i, const std::map<std::string, std::string>& outputs,
                                  std::vector<AgentRecord*>& records) const {
  const FlowAgent& spec = flow_.agents[i];
  AgentRecord& record = *records[i];
  record.reason = Reason::kNone;
  record.reason_detail.clear();
  AgentTurn turn;
  turn.agent = spec.name;
  turn.n_ctx = flow_.n_ctx;
  QKV_ASSIGN_OR_RETURN(turn.system, flow_.SystemOf(spec, outputs));
  QKV_ASSIGN_OR_RETURN(turn.prompt, flow_.PromptOf(spec, outputs));
  turn.document = spec.document;
  turn.max_tokens = spec.max_tokens;
  turn.sampling = spec.sampling;
  std::string said = turn.system;
  if (graph_[i].inherits >= 0) {
    QKV_RETURN_IF_ERROR(GoOn(i, records, turn, said));
  } else if (!graph_[i].reads.empty()) {
    QKV_RETURN_IF_ERROR(ReadContexts(i, records, turn, said));
  }
  record.transcript = (said.empty() ? "" : said + "\n\n") + turn.prompt + "\n\n";
  return turn;
}

// Why `reader` can't take over `producer`'s context, apart from what only its worker can find out.
Status TurnMaker::CheckHandoff(const AgentRecord& reader, int reader_index, int producer_index,
                               const AgentRecord& producer, const FlowEdge& edge) const {
  const std::string& name = flow_.agents[producer_index].name;
  if (producer.tokenizer != reader.tokenizer) {
    return Err(Code::kIncompatible, Reason::kTokenizerMismatch,
               "its model's tokens are not those of '{}', whose context it {}", name,
               graph_[reader_index].inherits == producer_index ? "inherits" : "reads");
  }
  if (mode_ == FlowMode::kText) return {};
  if (producer.result.context_id.empty()) {
    return Err(Code::kPeerLost, Reason::kPeerLost, "'{}' could not publish its context: {}", name,
               producer.result.publish_error);
  }
  const auto n_tokens = static_cast<int64_t>(producer.result.context_tokens.size());
  if (edge.budget > 0 && n_tokens > edge.budget) {
    return Err(Code::kExhausted, Reason::kTooLong, "the context of '{}' has {} tokens, the budget is {}", name,
               n_tokens, edge.budget);
  }
  if (edge.budget_bytes > 0 && producer.result.kv_bytes > edge.budget_bytes) {
    return Err(Code::kExhausted, Reason::kTooLong, "the context of '{}' has {} bytes, the budget is {}", name,
               producer.result.kv_bytes, edge.budget_bytes);
  }
  return {};
}

Status TurnMaker::GoOn(int i, const std::vector<AgentRecord*>& records, AgentTurn& turn, std::string& said) const {
  const int producer = graph_[i].inherits;
  const FlowEdge& edge = *flow_.agents[i].edge(EdgeKind::kInherits);
  const AgentRecord& parent = *records[producer];
  AgentRecord& record = *records[i];
  turn.on_miss = edge.on_miss;
  said = parent.transcript + parent.result.text;
  turn.history = parent.result.context_tokens;
  turn.prefix_tokens = parent.result.prefix_tokens;
  const Status fits = CheckHandoff(record, i, producer, parent, edge);
  if (fits) {
    if (mode_ == FlowMode::kHandoff) turn.inherits = parent.result.context_id;
    return {};
  }
  record.reason = fits.error().reason;
  record.reason_detail = fits.error().message;
  if (edge.on_miss == OnMiss::kFail) return fits;
  if (record.reason == Reason::kTokenizerMismatch) {
    // Neither pages nor token ids mean anything to this model; words do.
    turn.history.clear();
    turn.prompt = said + "\n\n" + turn.prompt;
    said.clear();
  }
  return {};
}

Status TurnMaker::ReadContexts(int i, const std::vector<AgentRecord*>& records, AgentTurn& turn,
                               std::string& said) const {
  const FlowAgent& spec = flow_.agents[i];
  AgentRecord& record = *records[i];
  bool as_words = false;
  std::string words;
  for (const FlowEdge& edge : spec.edges) {
    if (edge.kind != EdgeKind::kReads) continue;
    for (int producer : flow_.Resolve(spec, edge.from)) {
      const AgentRecord& parent = *records[producer];
      words += parent.transcript + parent.result.text + "\n\n";
      ContextToRead read{.context = mode_ == FlowMode::kHandoff ? parent.result.context_id : "",
                         .history = parent.result.context_tokens,
                         .on_miss = edge.on_miss,
                         .splice = edge.splice,
                         .prefix_tokens = static_cast<int>(parent.result.prefix_tokens)};
      if (const Status fits = CheckHandoff(record, i, producer, parent, edge); !fits) {
        record.reason = fits.error().reason;
        record.reason_detail = fits.error().message;
        if (edge.on_miss == OnMiss::kFail) return fits;
        as_words = as_words || record.reason == Reason::kTokenizerMismatch;
        read.context.clear();
      }
      turn.reads.push_back(std::move(read));
    }
  }
  if (as_words) {
    turn.reads.clear();
    turn.prompt = words + turn.prompt;
  } else {
    said += (said.empty() ? "" : "\n\n") + words;
  }
  return {};
}

}  // namespace qkv
