// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "qkv/base/size.h"
#include "qkv/flow/flow_agents-inl.h"

namespace qkv::flow_yaml {
namespace {

constexpr double kMaxDeadlineSeconds = 86400;
constexpr int kMaxRetries = 10;

// An edge as it stands in the file.
struct RawEdge {
  FlowEdge edge;
  YAML::Mark mark;             // of the name
  std::optional<KvChoice> kv;  // pages that the other is to write
  YAML::Mark kv_mark;
};

// An agent as it stands in the file: `foreach` makes several of it.
struct RawAgent {
  FlowAgent agent;
  std::vector<RawEdge> edges;
  std::optional<std::vector<std::string>> items;
  YAML::Mark name_mark, prompt_mark, system_mark;
};

class AgentsReader {
 public:
  AgentsReader(Reader& reader, const InputLists& lists, Flow& flow) : reader_(reader), lists_(lists), flow_(flow) {}

  Status Read(const Entry& entry) {
    if (!entry.value.IsSequence()) {
      return reader_.At(entry.mark(), "agents: expected a list of agents, found {}", KindName(entry.value));
    }
    if (entry.value.size() == 0) return reader_.At(entry.mark(), "agents: the list is empty");
    size_t count = 0;
    for (const YAML::Node& node : entry.value) {
      const YAML::Mark mark = node.Mark().is_null() ? entry.mark() : node.Mark();
      QKV_ASSIGN_OR_RETURN(RawAgent raw, Agent(node, mark));
      count += raw.items ? raw.items->size() : 1;
      if (count > kMaxFlowAgents) {
        return reader_.At(entry.mark(), "agents: more than {}{}", kMaxFlowAgents,
                          raw.items ? ", counting what 'foreach' makes" : "");
      }
      QKV_RETURN_IF_ERROR(Spread(raw));
      raws_.push_back(std::move(raw));
    }
    for (const RawAgent& raw : raws_) QKV_RETURN_IF_ERROR(CheckNames(raw));
    QKV_RETURN_IF_ERROR(CheckCodecs());
    return CheckOrder();
  }

 private:
  // --- one agent ------------------------------------------------------------------------------------------------------

  Result<RawAgent> Agent(const YAML::Node& node, const YAML::Mark& mark) {
    static constexpr std::string_view kKeys[] = {
        "name",    "model",      "system",   "prompt",      "inherits", "reads",    "text",
        "foreach", "max_tokens", "seed",     "temperature", "top_k",    "top_p",    "min_p",
        "kv",      "on_miss",    "deadline", "retries",     "splice",   "document", "max_bytes"};
    QKV_ASSIGN_OR_RETURN(const auto entries, reader_.Map(node, mark, "agent", kKeys));
    RawAgent raw;
    FlowAgent& agent = raw.agent;
    raw.name_mark = raw.prompt_mark = raw.system_mark = mark;
    FlowEdge defaults;
    std::optional<YAML::Mark> splice_mark;
    for (const Entry& entry : entries) {  // before the edges
      if (entry.key == "on_miss") {
        QKV_ASSIGN_OR_RETURN(defaults.on_miss, ReadOnMiss(entry));
      } else if (entry.key == "splice") {
        QKV_ASSIGN_OR_RETURN(defaults.splice, ReadSplice(entry));
        splice_mark = entry.mark();
      }
    }
    for (const Entry& entry : entries) {
      if (entry.key == "name") {
        QKV_ASSIGN_OR_RETURN(agent.name, reader_.Text(entry));
        raw.name_mark = entry.mark();
        if (!IsFlowName(agent.name)) {
          return reader_.At(entry.mark(), "agent name {}: expected {}", Quoted(agent.name), kFlowNameRule);
        }
        if (agent.name == "input") {
          return reader_.At(entry.mark(), "no agent can be called 'input': {{{{input.…}}}} means an input");
        }
      } else if (entry.key == "model") {
        QKV_ASSIGN_OR_RETURN(agent.model, reader_.Path(entry));
      } else if (entry.key == "system") {
        QKV_ASSIGN_OR_RETURN(agent.system, reader_.Text(entry));
        raw.system_mark = entry.mark();
      } else if (entry.key == "prompt") {
        QKV_ASSIGN_OR_RETURN(agent.prompt, reader_.Text(entry));
        raw.prompt_mark = entry.mark();
      } else if (entry.key == "document") {
        QKV_ASSIGN_OR_RETURN(agent.prompt, reader_.Text(entry));
        raw.prompt_mark = entry.mark();
        agent.document = true;
      } else if (entry.key == "inherits") {
        QKV_RETURN_IF_ERROR(Edges(entry, EdgeKind::kInherits, defaults, raw));
      } else if (entry.key == "reads") {
        QKV_RETURN_IF_ERROR(Edges(entry, EdgeKind::kReads, defaults, raw));
      } else if (entry.key == "text") {
        QKV_RETURN_IF_ERROR(Edges(entry, EdgeKind::kText, defaults, raw));
      } else if (entry.key == "foreach") {
        QKV_ASSIGN_OR_RETURN(raw.items, Items(entry));
      } else if (entry.key == "max_tokens") {
        QKV_RETURN_IF_ERROR(reader_.Read(entry, 1, 1 << 20, agent.max_tokens));
      } else if (entry.key == "seed") {
        QKV_RETURN_IF_ERROR(reader_.Read(entry, 0, std::numeric_limits<uint32_t>::max(), agent.sampling.seed));
      } else if (entry.key == "temperature") {
        QKV_RETURN_IF_ERROR(reader_.Read(entry, 0, 100, agent.sampling.temperature));
      } else if (entry.key == "top_k") {
        QKV_RETURN_IF_ERROR(reader_.Read(entry, 0, 1 << 20, agent.sampling.top_k));
      } else if (entry.key == "top_p") {
        QKV_RETURN_IF_ERROR(reader_.Read(entry, 0, 1, agent.sampling.top_p));
      } else if (entry.key == "min_p") {
        QKV_RETURN_IF_ERROR(reader_.Read(entry, 0, 1, agent.sampling.min_p));
      } else if (entry.key == "kv") {
        QKV_ASSIGN_OR_RETURN(agent.kv, reader_.Codec(entry, entry.value));
      } else if (entry.key == "max_bytes") {
        QKV_RETURN_IF_ERROR(MaxBytes(entry, agent));
      } else if (entry.key == "deadline") {
        QKV_RETURN_IF_ERROR(reader_.Read(entry, 0.001, kMaxDeadlineSeconds, agent.deadline_s));
      } else if (entry.key == "retries") {
        QKV_RETURN_IF_ERROR(reader_.Read(entry, 0, kMaxRetries, agent.retries));
      }
    }
    if (agent.kv && agent.max_bytes > 0) {
      return reader_.At(mark, "agent '{}': either 'kv' or 'max_bytes' says which codecs it writes", agent.name);
    }
    if (splice_mark &&
        std::ranges::none_of(raw.edges, [](const RawEdge& e) { return e.edge.kind == EdgeKind::kReads; })) {
      return reader_.At(*splice_mark, "agent '{}': 'splice' has no meaning without 'reads'", agent.name);
    }
    if (agent.document) {
      for (const Entry& entry : entries) {
        static constexpr std::string_view kAllowed[] = {"name", "model",     "system",   "document", "foreach",
                                                        "kv",   "max_bytes", "deadline", "retries"};
        if (std::ranges::find(kAllowed, entry.key) != std::end(kAllowed)) continue;
        return reader_.At(entry.key_mark, "agent '{}': '{}' has no meaning with 'document', which is only read",
                          agent.name, entry.key);
      }
      agent.max_tokens = 0;
    }
    QKV_RETURN_IF_ERROR(CheckAgent(raw, mark));
    return raw;
  }

  Status CheckAgent(const RawAgent& raw, const YAML::Mark& mark) const {
    const FlowAgent& agent = raw.agent;
    const auto has = [&](EdgeKind kind) {
      return std::find_if(raw.edges.begin(), raw.edges.end(), [&](const RawEdge& e) { return e.edge.kind == kind; });
    };
    if (agent.name.empty()) return reader_.At(mark, "agent: key 'name' is missing");
    const auto inherits = has(EdgeKind::kInherits);
    if (agent.prompt.empty() && inherits == raw.edges.end()) {
      return reader_.At(raw.prompt_mark, "agent '{}': it has nothing to read: '{}' is missing or empty", agent.name,
                        agent.document ? "document" : "prompt");
    }
    if (!agent.system.empty() && inherits != raw.edges.end()) {
      return reader_.At(raw.system_mark,
                        "agent '{}': 'system' has no place behind an inherited context; put it into 'prompt'",
                        agent.name);
    }
    const auto reads = has(EdgeKind::kReads);
    if (inherits != raw.edges.end() && reads != raw.edges.end()) {
      return reader_.At(reads->mark,
                        "agent '{}': 'reads' puts contexts behind an own prefix, 'inherits' goes on from one; "
                        "an agent has either",
                        agent.name);
    }
    return {};
  }

  Result<OnMiss> ReadOnMiss(const Entry& entry) {
    QKV_ASSIGN_OR_RETURN(const std::string on_miss, reader_.Text(entry));
    if (on_miss == "text") return OnMiss::kText;
    if (on_miss == "fail") return OnMiss::kFail;
    return reader_.At(entry.mark(), "on_miss: expected 'text' or 'fail', found {}{}", Quoted(on_miss),
                      Suggestion(on_miss, {"text", "fail"}));
  }

  Result<SplicePolicy> ReadSplice(const Entry& entry) {
    QKV_ASSIGN_OR_RETURN(const std::string text, reader_.Text(entry));
    const auto policy = ParseSplicePolicy(text);
    if (policy) return *policy;
    return reader_.At(entry.mark(), "splice: {}, found {}{}", policy.error().message, Quoted(text),
                      Suggestion(text, {"off", "exact-only", "hide", "repair=32", "auto"}));
  }

  // A name, a map with `from`, or (but for `inherits`) a list of these. What an edge does not say is as in `defaults`.
  Status Edges(const Entry& entry, EdgeKind kind, const FlowEdge& defaults, RawAgent& raw) {
    if (entry.value.IsNull() && kind == EdgeKind::kInherits) return {};
    if (entry.value.IsSequence() && kind == EdgeKind::kInherits) {
      return reader_.At(entry.mark(),
                        "inherits: expected one agent's name, found a list; "
                        "'reads' takes several contexts");
    }
    for (const Entry& one : Reader::ListOrOne(entry)) {
      RawEdge edge;
      edge.edge = defaults;
      edge.edge.kind = kind;
      edge.mark = edge.kv_mark = one.mark();
      if (one.value.IsMap() && kind != EdgeKind::kText) {
        QKV_RETURN_IF_ERROR(EdgeMap(one, edge));
      } else {
        QKV_ASSIGN_OR_RETURN(edge.edge.from, reader_.Text(one));
      }
      if (edge.edge.from.empty()) {
        return reader_.At(edge.mark, "{}: expected an agent's name, found nothing", entry.key);
      }
      for (const RawEdge& other : raw.edges) {
        if (other.edge.kind == kind && other.edge.from == edge.edge.from) {
          return reader_.At(edge.mark, "{}: {} is there twice", entry.key, Quoted(edge.edge.from));
        }
      }
      raw.edges.push_back(std::move(edge));
    }
    if (entry.value.IsSequence() && entry.value.size() == 0) {
      return reader_.At(entry.mark(), "{}: the list is empty", entry.key);
    }
    return {};
  }

  Status EdgeMap(const Entry& entry, RawEdge& edge) {
    static constexpr std::string_view kKeys[] = {"from", "on_miss", "kv", "budget", "splice"};
    // What goes on from a context needs no splicing.
    const auto keys = std::span(kKeys).first(edge.edge.kind == EdgeKind::kReads ? 5 : 4);
    QKV_ASSIGN_OR_RETURN(const auto entries, reader_.Map(entry.value, entry.mark(), entry.key, keys));
    for (const Entry& one : entries) {
      if (one.key == "from") {
        QKV_ASSIGN_OR_RETURN(edge.edge.from, reader_.Text(one));
        edge.mark = one.mark();
      } else if (one.key == "on_miss") {
        QKV_ASSIGN_OR_RETURN(edge.edge.on_miss, ReadOnMiss(one));
      } else if (one.key == "kv") {
        QKV_ASSIGN_OR_RETURN(edge.kv, reader_.Codec(one, one.value));
        edge.kv_mark = one.mark();
      } else if (one.key == "splice") {
        QKV_ASSIGN_OR_RETURN(edge.edge.splice, ReadSplice(one));
      } else {
        QKV_RETURN_IF_ERROR(Budget(one, edge.edge));
      }
    }
    return {};
  }

  // Tokens, or bytes with a unit.
  Status Budget(const Entry& entry, FlowEdge& edge) const {
    const std::string text = entry.value.IsScalar() ? entry.value.Scalar() : std::string();
    const bool has_unit = !text.empty() && text.find_first_not_of("0123456789") != std::string::npos;
    const auto bytes = has_unit ? ParseBytes(text, entry.key) : Result<uint64_t>(0);
    if (!bytes || (has_unit && text[0] == '-')) {
      return reader_.At(entry.mark(),
                        "{}: expected a number of tokens from 1 to {}, or a size such as 512MiB, found {}", entry.key,
                        1 << 30, Quoted(text));
    }
    edge.budget_bytes = *bytes;
    return has_unit ? Status{} : reader_.Read(entry, 1, 1 << 30, edge.budget);
  }

  Status MaxBytes(const Entry& entry, FlowAgent& agent) const {
    const std::string text = entry.value.IsScalar() ? entry.value.Scalar() : std::string();
    const auto bytes = ParseBytes(text, entry.key);
    if (!bytes || *bytes == 0 || text[0] == '-') {
      return reader_.At(entry.mark(), "max_bytes: expected a size such as 512MiB, found {}", Quoted(text));
    }
    agent.max_bytes = *bytes;
    return {};
  }

  // An input's name, or a list of texts.
  Result<std::vector<std::string>> Items(const Entry& entry) {
    if (!entry.value.IsSequence()) {
      QKV_ASSIGN_OR_RETURN(const std::string name, reader_.Text(entry));
      const auto found = lists_.find(name);
      if (found != lists_.end()) return found->second;
      std::vector<std::string_view> known;
      for (const auto& [input, items] : lists_) known.push_back(input);
      return reader_.At(entry.mark(), "foreach: expected an input's name or a list of texts; there is no input {}{}",
                        Quoted(name), Suggestion(name, known));
    }
    std::vector<std::string> items;
    for (const Entry& one : Reader::ListOrOne(entry)) {
      QKV_ASSIGN_OR_RETURN(std::string text, reader_.Text(one));
      items.push_back(std::move(text));
    }
    if (items.empty()) return reader_.At(entry.mark(), "foreach: the list is empty");
    return items;
  }

  // --- all agents -----------------------------------------------------------------------------------------------------

  Status Spread(const RawAgent& raw) {
    const auto add = [&](FlowAgent agent, const std::string& group) -> Status {
      if (flow_.names.contains(agent.name)) {
        return reader_.At(raw.name_mark, "a second agent is called '{}'", agent.name);
      }
      if (!IsFlowName(agent.name)) {
        return reader_.At(raw.name_mark, "agent name '{}': expected {}, counting what 'foreach' adds", agent.name,
                          kFlowNameRule);
      }
      for (const RawEdge& edge : raw.edges) agent.edges.push_back(edge.edge);
      const int index = static_cast<int>(flow_.agents.size());
      flow_.names[agent.name] = {index};
      if (!group.empty()) flow_.names[group].push_back(index);
      flow_.agents.push_back(std::move(agent));
      raw_of_.push_back(raws_.size());
      return {};
    };
    if (!raw.items) return add(raw.agent, "");
    if (flow_.names.contains(raw.agent.name)) {
      return reader_.At(raw.name_mark, "a second agent is called '{}'", raw.agent.name);
    }
    const int list = list_ids_.emplace(*raw.items, static_cast<int>(list_ids_.size())).first->second;
    for (size_t k = 0; k < raw.items->size(); ++k) {
      FlowAgent agent = raw.agent;
      agent.name += fmt::format("-{}", k + 1);
      agent.list = list;
      agent.index = static_cast<int>(k);
      agent.item = (*raw.items)[k];
      QKV_RETURN_IF_ERROR(add(std::move(agent), raw.agent.name));
    }
    return {};
  }

  bool Known(std::string_view name) const { return flow_.names.find(name) != flow_.names.end(); }
  bool IsDocument(std::string_view name) const {
    const auto found = flow_.names.find(name);
    return found != flow_.names.end() && flow_.agents[found->second.front()].document;
  }
  std::string Suggest(std::string_view name) const {
    std::vector<std::string_view> names;
    for (const RawAgent& raw : raws_) names.push_back(raw.agent.name);
    return Suggestion(name, names);
  }

  Status CheckNames(const RawAgent& raw) const {
    const FlowAgent& agent = raw.agent;
    for (const RawEdge& raw_edge : raw.edges) {
      const FlowEdge& edge = raw_edge.edge;
      if (!Known(edge.from)) {
        if (edge.kind == EdgeKind::kInherits) {
          return reader_.At(raw_edge.mark, "agent '{}' inherits from {}, but there is no such agent{}", agent.name,
                            Quoted(edge.from), Suggest(edge.from));
        }
        return reader_.At(raw_edge.mark, "agent '{}': {}: there is no agent {}{}", agent.name, EdgeKindName(edge.kind),
                          Quoted(edge.from), Suggest(edge.from));
      }
      if (edge.kind == EdgeKind::kText && IsDocument(edge.from)) {
        return reader_.At(raw_edge.mark, "agent '{}': text: '{}' is a document and says nothing; 'reads' takes it",
                          agent.name, edge.from);
      }
    }
    const std::pair<std::string_view, YAML::Mark> texts[] = {{agent.system, raw.system_mark},
                                                             {agent.prompt, raw.prompt_mark}};
    for (const auto& [text, mark] : texts) {
      const auto parts = SplitReferences(text);
      if (!parts) return reader_.At(mark, "agent '{}': {}", agent.name, parts.error().message);
      for (const TextPart& part : *parts) {
        if (part.kind == TextPart::Kind::kInput && !lists_.contains(std::string(part.value))) {
          std::vector<std::string_view> inputs;
          for (const auto& [input, items] : lists_) inputs.push_back(input);
          return reader_.At(mark, "agent '{}': there is no input {}{}", agent.name, Quoted(part.value),
                            Suggestion(part.value, inputs));
        }
        if (part.kind == TextPart::Kind::kOutput && !Known(part.value)) {
          return reader_.At(mark, "agent '{}': {{{{{}.output}}}}: there is no agent {}{}", agent.name, part.value,
                            Quoted(part.value), Suggest(part.value));
        }
        if (part.kind == TextPart::Kind::kOutput && IsDocument(part.value)) {
          return reader_.At(mark,
                            "agent '{}': {{{{{}.output}}}}: '{}' is a document and says nothing; 'reads' takes it",
                            agent.name, part.value, part.value);
        }
        if ((part.kind == TextPart::Kind::kItem || part.kind == TextPart::Kind::kIndex) && !raw.items) {
          return reader_.At(mark, "agent '{}': {{{{{}}}}} has no meaning without 'foreach'", agent.name, part.value);
        }
      }
    }
    return {};
  }

  // Inheriting needs one agent to go on from. And pages are written once: whoever reads them reads the same.
  Status CheckCodecs() {
    for (size_t i = 0; i < flow_.agents.size(); ++i) {
      const FlowAgent& agent = flow_.agents[i];
      for (const RawEdge& edge : raws_[raw_of_[i]].edges) {
        const std::vector<int> from = flow_.Resolve(agent, edge.edge.from);
        if (edge.edge.kind == EdgeKind::kInherits && from.size() != 1) {
          return reader_.At(edge.mark,
                            "agent '{}' inherits from '{}', which are {} agents; 'reads' takes several contexts",
                            agent.name, edge.edge.from, from.size());
        }
        if (!edge.kv) continue;
        for (int other : from) {
          FlowAgent& producer = flow_.agents[other];
          if (producer.max_bytes > 0) {
            return reader_.At(edge.kv_mark, "agent '{}' wants {} pages of '{}', whose 'max_bytes' decides about them",
                              agent.name, ToString(*edge.kv), producer.name);
          }
          if (!producer.kv) producer.kv = edge.kv;
          if (*producer.kv == *edge.kv) continue;
          return reader_.At(edge.kv_mark, "agent '{}' wants {} pages of '{}', which writes {}; pages are written once",
                            agent.name, ToString(*edge.kv), producer.name, ToString(*producer.kv));
        }
      }
    }
    return {};
  }

  Status CheckOrder() const {
    const std::vector<PlanNode> graph = flow_.Graph();
    const std::vector<int> cycle = FindCycle(graph);
    if (cycle.empty()) return {};
    std::string path;
    for (int node : cycle) path += (path.empty() ? "" : " → ") + graph[node].name;
    const FlowAgent& first = flow_.agents[cycle[0]];
    const std::string& second = flow_.agents[cycle[1]].name;
    const RawAgent& raw = raws_[raw_of_[cycle[0]]];
    for (const RawEdge& edge : raw.edges) {
      const std::vector<int> from = flow_.Resolve(first, edge.edge.from);
      if (std::find(from.begin(), from.end(), cycle[1]) == from.end()) continue;
      if (edge.edge.kind == EdgeKind::kInherits) {
        return reader_.At(edge.mark, "agent '{}' inherits from '{}', which is not before it ({})", first.name, second,
                          path);
      }
      return reader_.At(edge.mark, "agent '{}': {}: '{}' is not before it ({})", first.name,
                        EdgeKindName(edge.edge.kind), second, path);
    }
    return reader_.At(raw.prompt_mark, "agent '{}' uses {{{{{}.output}}}}, but '{}' is not before it ({})", first.name,
                      second, second, path);
  }

  Reader& reader_;
  const InputLists& lists_;
  Flow& flow_;
  std::vector<RawAgent> raws_;
  std::vector<size_t> raw_of_;  // of each of the flow's agents
  std::map<std::vector<std::string>, int> list_ids_;
};

}  // namespace

Status ReadAgents(Reader& reader, const Entry& agents, const InputLists& lists, Flow& flow) {
  return AgentsReader(reader, lists, flow).Read(agents);
}

}  // namespace qkv::flow_yaml
