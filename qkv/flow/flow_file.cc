// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/flow_file.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "qkv/flow/flow_agents-inl.h"

namespace qkv {
namespace {

using flow_yaml::Counter;
using flow_yaml::Entry;
using flow_yaml::Reader;

constexpr int64_t kBytesPerToken = 4;  // of English text, roughly

class Parser {
 public:
  Parser(const std::string& path, const FlowInputs& given) : reader_(path), given_(given) {
    flow_.path = path;
    flow_.name = std::filesystem::path(path).stem().string();
  }

  Result<Flow> Parse(std::string_view yaml) {
    if (yaml.size() > kMaxFlowFileBytes) {
      return Err(Code::kInvalidArgument, "{}:1:1: larger than {} MiB; put long texts into files of their own",
                 reader_.path(), kMaxFlowFileBytes >> 20);
    }
    if (const size_t bad = FindNonText(yaml); bad != std::string_view::npos) {
      const std::string_view before = yaml.substr(0, bad);
      const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
      return Err(Code::kInvalidArgument, "{}:{}:{}: not UTF-8 text", reader_.path(),
                 1 + std::count(before.begin(), before.end(), '\n'), 1 + bad - line_start);
    }
    try {
      // Not LoadAll: yaml-cpp's finds documents without end in a file that is a single comma.
      const std::string text(yaml);
      std::istringstream stream(text);
      YAML::Parser parser(stream);
      Counter first, second;
      if (!parser.HandleNextDocument(first)) {
        return Err(Code::kInvalidArgument, "{}:1:1: the flow is empty", reader_.path());
      }
      if (parser.HandleNextDocument(second)) {
        return reader_.At(second.start(), "a second YAML document; a file holds one flow");
      }
      QKV_RETURN_IF_ERROR(Top(YAML::Load(text)));
    } catch (const YAML::Exception& e) {
      return reader_.At(e.mark, "{}{}", e.msg, BraceHint(yaml, e.mark));
    }
    return std::move(flow_);
  }

 private:
  // YAML takes an unquoted {{…}} for a map in a map, and says so in words that help nobody.
  static std::string_view BraceHint(std::string_view yaml, const YAML::Mark& mark) {
    for (int line = 0; line < mark.line && !yaml.empty(); ++line) {
      yaml.remove_prefix(std::min(yaml.find('\n'), yaml.size() - 1) + 1);
    }
    const bool braces = yaml.substr(0, yaml.find('\n')).find(": {{") != std::string_view::npos;
    return braces ? " (text that starts with '{{' must be in quotes or a '|' block)" : "";
  }

  Status Top(const YAML::Node& node) {
    static constexpr std::string_view kKeys[] = {"name", "model",  "n_ctx",  "threads", "kv",
                                                 "bal",  "budget", "inputs", "agents"};
    const YAML::Mark mark = node.Mark().is_null() ? YAML::Mark() : node.Mark();
    QKV_ASSIGN_OR_RETURN(const auto entries, reader_.Map(node, mark, "flow", kKeys));
    const Entry* agents = nullptr;
    for (const Entry& entry : entries) {
      if (entry.key == "name") {
        QKV_ASSIGN_OR_RETURN(flow_.name, reader_.Text(entry));
      } else if (entry.key == "model") {
        QKV_ASSIGN_OR_RETURN(flow_.model, reader_.Path(entry));
      } else if (entry.key == "n_ctx") {
        QKV_RETURN_IF_ERROR(reader_.Read(entry, 32, 1 << 20, flow_.n_ctx));
      } else if (entry.key == "threads") {
        QKV_RETURN_IF_ERROR(reader_.Read(entry, 0, 256, flow_.threads));
      } else if (entry.key == "kv") {
        QKV_RETURN_IF_ERROR(CodecList(entry));
      } else if (entry.key == "bal") {
        QKV_RETURN_IF_ERROR(reader_.Read(entry, flow_.bal));
      } else if (entry.key == "budget") {
        QKV_RETURN_IF_ERROR(reader_.Read(entry, 1, 1 << 30, flow_.budget));
      } else if (entry.key == "inputs") {
        QKV_RETURN_IF_ERROR(Inputs(entry));
      } else {
        agents = &entry;
      }
    }
    QKV_RETURN_IF_ERROR(CheckInputs());
    if (agents == nullptr) return reader_.At(mark, "key 'agents' is missing");
    return flow_yaml::ReadAgents(reader_, *agents, lists_, flow_);
  }

  Status CodecList(const Entry& entry) {
    for (const Entry& one : Reader::ListOrOne(entry)) {
      QKV_ASSIGN_OR_RETURN(const KvChoice pair, reader_.Codec(one, one.value));
      if (std::find(flow_.kv.begin(), flow_.kv.end(), pair) != flow_.kv.end()) {
        return reader_.At(one.mark(), "kv: {} is there twice", ToString(pair));
      }
      flow_.kv.push_back(pair);
    }
    if (flow_.kv.empty()) return reader_.At(entry.mark(), "kv: the list is empty");
    return {};
  }

  Status Inputs(const Entry& entry) {
    QKV_ASSIGN_OR_RETURN(const auto inputs, reader_.Map(entry.value, entry.mark(), "inputs", {}));
    if (inputs.size() > kMaxFlowInputs) return reader_.At(entry.mark(), "inputs: more than {}", kMaxFlowInputs);
    for (const Entry& input : inputs) {
      if (!IsFlowName(input.key)) {
        return reader_.At(input.key_mark, "input name {}: expected {}", Quoted(input.key), kFlowNameRule);
      }
      std::vector<std::string>& items = lists_[input.key];
      if (const auto given = given_.find(input.key); given != given_.end()) {
        items = given->second;
        continue;  // what stands in the file need not even be there
      }
      if (input.value.IsNull()) {
        missing_.emplace_back(input.key, input.key_mark);
        continue;
      }
      if (input.value.IsSequence() && input.value.size() == 0) {
        return reader_.At(input.mark(), "input '{}': the list is empty", input.key);
      }
      for (const Entry& one : Reader::ListOrOne(input)) {
        QKV_ASSIGN_OR_RETURN(std::string text, InputText(one));
        items.push_back(std::move(text));
      }
    }
    return {};
  }

  Result<std::string> InputText(const Entry& input) {
    if (!input.value.IsMap()) return reader_.Text(input);
    static constexpr std::string_view kKeys[] = {"file"};
    QKV_ASSIGN_OR_RETURN(const auto source, reader_.Map(input.value, input.mark(), "input '" + input.key + "'", kKeys));
    if (source.empty()) return reader_.At(input.mark(), "input '{}': key 'file' is missing", input.key);
    QKV_ASSIGN_OR_RETURN(const std::string file, reader_.Path(source[0]));
    auto text = ReadTextFile(file);
    if (!text) return reader_.Located(source[0].mark(), Prefixed("input '" + input.key + "'", text.error()).value());
    if (FindNonText(*text) != std::string::npos) {
      return reader_.At(source[0].mark(), "input '{}': {} is not UTF-8 text", input.key, file);
    }
    QKV_RETURN_IF_ERROR(reader_.Account(source[0], text->size()));
    return text;
  }

  Status CheckInputs() {
    std::vector<std::string_view> known;
    for (const auto& [name, items] : lists_) known.push_back(name);
    for (const auto& [name, texts] : given_) {
      if (!lists_.contains(name)) {
        return Err(Code::kInvalidArgument, "{}: there is no input {}{}", reader_.path(), Quoted(name),
                   Suggestion(name, known));
      }
    }
    if (!missing_.empty()) {
      return reader_.At(missing_[0].second, "input '{0}' has no text: give one with --input {0}=TEXT or {0}=@FILE",
                        missing_[0].first);
    }
    for (const auto& [name, items] : lists_) {
      std::string& all = flow_.inputs[name];
      for (const std::string& item : items) all += (&item == &items.front() ? "" : "\n\n") + item;
    }
    return {};
  }

  Reader reader_;
  const FlowInputs& given_;
  Flow flow_;
  flow_yaml::InputLists lists_;
  std::vector<std::pair<std::string, YAML::Mark>> missing_;
};

// What a reference of `agent` stands for.
Result<std::string> ValueOf(const Flow& flow, const FlowAgent& agent, const TextPart& part,
                            const std::map<std::string, std::string>& outputs) {
  const auto in = [&](const std::map<std::string, std::string>& values,
                      const std::string& name) -> Result<std::string> {
    const auto found = values.find(name);
    if (found == values.end()) return Err(Code::kInvalidArgument, "there is no text for {}", Quoted(part.value));
    return found->second;
  };
  switch (part.kind) {
    case TextPart::Kind::kLiteral: return std::string(part.value);
    case TextPart::Kind::kItem: return agent.item;
    case TextPart::Kind::kIndex: return std::to_string(agent.index + 1);
    case TextPart::Kind::kInput: return in(flow.inputs, std::string(part.value));
    case TextPart::Kind::kOutput: break;
  }
  const std::vector<int> agents = flow.Resolve(agent, part.value);
  if (agents.empty()) return Err(Code::kInvalidArgument, "there is no text for {}", Quoted(part.value));
  std::string all;
  for (int i : agents) {
    QKV_ASSIGN_OR_RETURN(const std::string text, in(outputs, flow.agents[i].name));
    all += (all.empty() ? "" : "\n\n") + text;
  }
  return all;
}

}  // namespace

std::string_view EdgeKindName(EdgeKind kind) {
  switch (kind) {
    case EdgeKind::kInherits: return "inherits";
    case EdgeKind::kReads: return "reads";
    case EdgeKind::kText: return "text";
  }
  return "text";
}

std::string_view FlowAgent::inherits() const {
  const FlowEdge* found = edge(EdgeKind::kInherits);
  return found == nullptr ? std::string_view() : found->from;
}

const FlowEdge* FlowAgent::edge(EdgeKind kind) const {
  for (const FlowEdge& one : edges) {
    if (one.kind == kind) return &one;
  }
  return nullptr;
}

std::vector<int> Flow::Resolve(const FlowAgent& reader, std::string_view name) const {
  const auto found = names.find(name);
  if (found == names.end()) return {};
  const FlowAgent& first = agents[found->second.front()];
  const bool item_by_item = reader.list >= 0 && first.list == reader.list && first.name != name;
  if (item_by_item) return {found->second[reader.index]};
  return found->second;
}

std::vector<PlanNode> Flow::Graph() const {
  std::vector<PlanNode> graph;
  graph.reserve(agents.size());
  for (const FlowAgent& agent : agents) {
    PlanNode node;
    node.name = agent.name;
    node.write_tokens = agent.max_tokens;
    node.own_prefix = !agent.system.empty();
    std::vector<bool> known(agents.size(), false);
    const auto need = [&](int other) {
      if (!known[other]) node.needs.push_back(other);
      known[other] = true;
    };
    int64_t bytes = 0;
    for (const FlowEdge& edge : agent.edges) {
      for (int other : Resolve(agent, edge.from)) {
        need(other);
        if (edge.kind == EdgeKind::kInherits) node.inherits = other;
        if (edge.kind == EdgeKind::kReads) node.reads.push_back(other);
        if (edge.kind == EdgeKind::kReads && edge.splice.kind >= SplicePolicy::Kind::kHide)
          node.spliced.push_back(other);
        if (edge.kind == EdgeKind::kText) node.read_tokens += agents[other].max_tokens;
      }
    }
    for (const std::string* text : {&agent.system, &agent.prompt}) {
      const auto parts = SplitReferences(*text);
      if (!parts) continue;
      for (const TextPart& part : *parts) {
        if (part.kind == TextPart::Kind::kLiteral) bytes += static_cast<int64_t>(part.value.size());
        if (part.kind == TextPart::Kind::kItem) bytes += static_cast<int64_t>(agent.item.size());
        if (part.kind == TextPart::Kind::kInput) {
          const auto input = inputs.find(std::string(part.value));
          if (input != inputs.end()) bytes += static_cast<int64_t>(input->second.size());
        }
        if (part.kind != TextPart::Kind::kOutput) continue;
        for (int other : Resolve(agent, part.value)) {
          need(other);
          node.read_tokens += agents[other].max_tokens;
        }
      }
    }
    node.read_tokens += (bytes + kBytesPerToken - 1) / kBytesPerToken;
    graph.push_back(std::move(node));
  }
  return graph;
}

Result<std::string> Flow::SystemOf(const FlowAgent& agent, const std::map<std::string, std::string>& outputs) const {
  return FillReferences(agent.system, [&](const TextPart& part) { return ValueOf(*this, agent, part, outputs); });
}

Result<std::string> Flow::PromptOf(const FlowAgent& agent, const std::map<std::string, std::string>& outputs) const {
  std::string before;
  for (const FlowEdge& edge : agent.edges) {
    if (edge.kind != EdgeKind::kText) continue;
    for (int other : Resolve(agent, edge.from)) {
      const auto found = outputs.find(agents[other].name);
      if (found == outputs.end()) return Err(Code::kInvalidArgument, "there is no text for {}", Quoted(edge.from));
      before += fmt::format("{}:\n{}\n\n", agents[other].name, found->second);
    }
  }
  QKV_ASSIGN_OR_RETURN(std::string prompt, FillReferences(agent.prompt, [&](const TextPart& part) {
                         return ValueOf(*this, agent, part, outputs);
                       }));
  if (before.size() + prompt.size() > kMaxFlowTextBytes) {
    return Err(Code::kInvalidArgument, "the prompt is longer than {} MiB", kMaxFlowTextBytes >> 20);
  }
  return before + prompt;
}

Status AddInput(std::string_view argument, FlowInputs& inputs) {
  const size_t equals = argument.find('=');
  const std::string_view name = argument.substr(0, equals);
  if (equals == std::string_view::npos || !IsFlowName(name)) {
    return Err(Code::kInvalidArgument, "--input {}: expected NAME=TEXT or NAME=@FILE", Quoted(argument));
  }
  std::string text(argument.substr(equals + 1));
  if (text.starts_with('@')) {
    auto content = ReadTextFile(text.substr(1));
    if (!content) return Prefixed(fmt::format("--input {}", name), content.error());
    text = *std::move(content);
  }
  if (FindNonText(text) != std::string::npos) return Err(Code::kInvalidArgument, "--input {}: not UTF-8 text", name);
  inputs[std::string(name)].push_back(std::move(text));
  return {};
}

Result<Flow> ParseFlow(std::string_view yaml, const std::string& path, const FlowInputs& given) {
  return Parser(path, given).Parse(yaml);
}

Result<Flow> ParseFlowFile(const std::string& path, const FlowInputs& given) {
  QKV_ASSIGN_OR_RETURN(const std::string yaml, ReadTextFile(path));
  return ParseFlow(yaml, path, given);
}

}  // namespace qkv
