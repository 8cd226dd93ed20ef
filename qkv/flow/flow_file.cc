// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/flow_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <limits>
#include <set>
#include <span>
#include <sstream>
#include <utility>

#include "qkv/base/fd.h"

namespace qkv {
namespace {

constexpr size_t kMaxNameLength = 64;
constexpr int kMaxValues = 10000;  // keys, texts, lists and maps of a file
constexpr std::string_view kNameRule = "1 to 64 letters, digits, '-' or '_'";

bool IsName(std::string_view text) {
  return !text.empty() && text.size() <= kMaxNameLength && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
  });
}

// For messages: one line, not too long, whole characters.
std::string Quoted(std::string_view text) {
  constexpr size_t kMost = 60;
  std::string quoted(text.substr(0, kMost));
  if (text.size() > kMost) {
    size_t cut = kMost;
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;
    quoted = std::string(text.substr(0, cut)) + "…";
  }
  for (char& c : quoted) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return "'" + quoted + "'";
}

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// ", did you mean 'x'?" for the nearest of `known`, or "" when none is near.
template <class Names>
std::string Suggestion(std::string_view word, const Names& known) {
  std::string_view best;
  size_t best_distance = std::numeric_limits<size_t>::max();
  if (word.size() <= 2 * kMaxNameLength) {
    for (std::string_view name : known) {
      const size_t distance = EditDistance(word, name);
      if (distance <= std::max<size_t>(1, name.size() / 3) && distance < best_distance) {
        best = name;
        best_distance = distance;
      }
    }
  }
  return best.empty() ? "" : fmt::format(", did you mean '{}'?", best);
}

// Offset of the first byte that is not part of UTF-8 text (or is a NUL), or npos. Refuses overlong forms and
// surrogates.
size_t FindNonText(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (lead == 0 || length == 0 || text.size() - i < length) return i;
    for (size_t k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      unsigned low = 0x80, high = 0xBF;
      if (k == 1 && lead == 0xE0) low = 0xA0;
      if (k == 1 && lead == 0xED) high = 0x9F;
      if (k == 1 && lead == 0xF0) low = 0x90;
      if (k == 1 && lead == 0xF4) high = 0x8F;
      if (next < low || next > high) return i;
    }
    i += length;
  }
  return std::string_view::npos;
}

Result<std::string> ReadTextFile(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return ErrnoError("cannot read " + path);
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return ErrnoError("cannot read " + path);
  if (!S_ISREG(info.st_mode)) return Err(Code::kInvalidArgument, "cannot read {}: not a regular file", path);
  std::string text;
  char buffer[65536];
  for (;;) {
    const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError("cannot read " + path);
    if (n == 0) break;
    text.append(buffer, static_cast<size_t>(n));
    if (text.size() > kMaxFlowFileBytes) {
      return Err(Code::kInvalidArgument, "{} is larger than {} MiB", path, kMaxFlowFileBytes >> 20);
    }
  }
  return text;
}

// A text between references, or a reference.
struct Part {
  enum class Kind : uint8_t { kLiteral, kInput, kOutput } kind;
  std::string_view value;  // the text, or the name of the input or agent
};

Result<std::vector<Part>> SplitReferences(std::string_view text) {
  std::vector<Part> parts;
  while (!text.empty()) {
    const size_t open = text.find("{{");
    if (open != 0) {
      parts.push_back({Part::Kind::kLiteral, text.substr(0, open)});
      if (open == std::string_view::npos) break;
      text.remove_prefix(open);
    }
    const size_t close = text.find("}}");
    if (close == std::string_view::npos) {
      return Err(Code::kInvalidArgument, "{} has no closing '}}}}'", Quoted(text));
    }
    std::string_view reference = text.substr(2, close - 2);
    const std::string_view whole = text.substr(0, close + 2);
    text.remove_prefix(close + 2);
    while (!reference.empty() && reference.front() == ' ') reference.remove_prefix(1);
    while (!reference.empty() && reference.back() == ' ') reference.remove_suffix(1);
    const size_t dot = reference.find('.');
    const std::string_view left = reference.substr(0, dot);
    const std::string_view right = dot == std::string_view::npos ? "" : reference.substr(dot + 1);
    if (left == "input" && IsName(right)) {
      parts.push_back({Part::Kind::kInput, right});
    } else if (IsName(left) && right == "output") {
      parts.push_back({Part::Kind::kOutput, left});
    } else {
      return Err(Code::kInvalidArgument, "{} is no reference: expected {{{{input.<name>}}}} or {{{{<agent>.output}}}}",
                 Quoted(whole));
    }
  }
  return parts;
}

// Runs through the events of a document without building it: a large document costs a hundred times its size when it is
// built, and no flow has as many values as a small part of that.
class Counter : public YAML::EventHandler {
 public:
  const YAML::Mark& start() const { return start_; }

  void OnDocumentStart(const YAML::Mark& mark) override { start_ = mark; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override { Count(mark); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { Count(mark); }
  void OnScalar(const YAML::Mark& mark, const std::string&, YAML::anchor_t, const std::string&) override {
    Count(mark);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    Count(mark);
  }
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    Count(mark);
  }
  void OnMapEnd() override {}

 private:
  void Count(const YAML::Mark& mark) {
    if (++values_ > kMaxValues) throw YAML::Exception(mark, fmt::format("more than {} values", kMaxValues));
  }
  YAML::Mark start_;
  int values_ = 0;
};

struct Entry {
  std::string key;
  YAML::Mark key_mark;
  YAML::Node value;

  YAML::Mark mark() const { return value.Mark().is_null() ? key_mark : value.Mark(); }
};

std::string_view KindName(const YAML::Node& node) {
  switch (node.Type()) {
    case YAML::NodeType::Scalar: return "text";
    case YAML::NodeType::Sequence: return "a list";
    case YAML::NodeType::Map: return "a map";
    default: return "nothing";
  }
}

class Parser {
 public:
  explicit Parser(const std::string& path) : path_(path), directory_(std::filesystem::path(path).parent_path()) {
    flow_.path = path;
    flow_.name = std::filesystem::path(path).stem().string();
  }

  Result<Flow> Parse(std::string_view yaml) {
    if (yaml.size() > kMaxFlowFileBytes) {
      return Err(Code::kInvalidArgument, "{}:1:1: larger than {} MiB; put long texts into files of their own", path_,
                 kMaxFlowFileBytes >> 20);
    }
    if (const size_t bad = FindNonText(yaml); bad != std::string_view::npos) {
      const std::string_view before = yaml.substr(0, bad);
      const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
      return Err(Code::kInvalidArgument, "{}:{}:{}: not UTF-8 text", path_,
                 1 + std::count(before.begin(), before.end(), '\n'), 1 + bad - line_start);
    }
    try {
      // Not LoadAll: yaml-cpp's finds documents without end in a file that is a single comma.
      const std::string text(yaml);
      std::istringstream stream(text);
      YAML::Parser parser(stream);
      Counter first, second;
      if (!parser.HandleNextDocument(first)) return Err(Code::kInvalidArgument, "{}:1:1: the flow is empty", path_);
      if (parser.HandleNextDocument(second)) {
        return At(second.start(), "a second YAML document; a file holds one flow");
      }
      QKV_RETURN_IF_ERROR(Top(YAML::Load(text)));
    } catch (const YAML::Exception& e) {
      return At(e.mark, "{}{}", e.msg, BraceHint(yaml, e.mark));
    }
    return std::move(flow_);
  }

 private:
  struct AgentMarks {
    YAML::Mark name, inherits, prompt, system;
  };

  template <class... Args>
  tl::unexpected<Error> At(const YAML::Mark& mark, fmt::format_string<Args...> format, Args&&... args) const {
    return Located(mark, Error{Code::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...)});
  }
  tl::unexpected<Error> Located(const YAML::Mark& mark, Error error) const {
    return Prefixed(fmt::format("{}:{}:{}", path_, mark.line + 1, mark.column + 1), std::move(error));
  }

  // YAML takes an unquoted {{…}} for a map in a map, and says so in words that help nobody.
  static std::string_view BraceHint(std::string_view yaml, const YAML::Mark& mark) {
    for (int line = 0; line < mark.line && !yaml.empty(); ++line) {
      yaml.remove_prefix(std::min(yaml.find('\n'), yaml.size() - 1) + 1);
    }
    const bool braces = yaml.substr(0, yaml.find('\n')).find(": {{") != std::string_view::npos;
    return braces ? " (text that starts with '{{' must be in quotes or a '|' block)" : "";
  }

  // The entries of a map. An empty `known` admits every key.
  Result<std::vector<Entry>> Map(const YAML::Node& node, const YAML::Mark& mark, std::string_view what,
                                 std::span<const std::string_view> known) const {
    if (!node.IsMap()) return At(mark, "{}: expected a map of keys, found {}", what, KindName(node));
    std::vector<Entry> entries;
    std::set<std::string> seen;
    for (const auto& pair : node) {
      if (!pair.first.IsScalar()) return At(pair.first.Mark(), "{}: a key must be text", what);
      Entry entry{pair.first.Scalar(), pair.first.Mark(), pair.second};
      if (!known.empty() && std::find(known.begin(), known.end(), entry.key) == known.end()) {
        return At(entry.key_mark, "unknown key {}{}", Quoted(entry.key), Suggestion(entry.key, known));
      }
      if (!seen.insert(entry.key).second) return At(entry.key_mark, "key {} is there twice", Quoted(entry.key));
      entries.push_back(std::move(entry));
    }
    return entries;
  }

  Result<std::string> Text(const Entry& entry) {
    if (!entry.value.IsScalar()) {
      return At(entry.mark(), "{}: expected text, found {}{}", entry.key, KindName(entry.value),
                entry.value.IsMap() ? " (text that starts with '{{' must be in quotes or a '|' block)" : "");
    }
    const std::string& text = entry.value.Scalar();
    // Escapes such as "\0" make bytes that the file itself may not hold.
    if (FindNonText(text) != std::string::npos) return At(entry.mark(), "{}: not UTF-8 text", entry.key);
    QKV_RETURN_IF_ERROR(Account(entry, text.size()));
    return text;
  }
  // Aliases make a small file name a large text many times.
  Status Account(const Entry& entry, size_t bytes) {
    text_bytes_ += bytes;
    if (text_bytes_ <= kMaxFlowTextBytes) return {};
    return At(entry.mark(), "{}: the flow's texts are more than {} MiB together", entry.key, kMaxFlowTextBytes >> 20);
  }

  template <class Number>
  Status Read(const Entry& entry, double low, double high, Number& out) const {
    const std::string_view kind = std::is_integral_v<Number> ? "a whole number" : "a number";
    const std::string text = entry.value.IsScalar() ? entry.value.Scalar() : std::string();
    std::conditional_t<std::is_integral_v<Number>, int64_t, double> value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool whole = !text.empty() && end == text.data() + text.size();
    if (!whole || error != std::errc() || !(value >= low && value <= high)) {
      return At(entry.mark(), "{}: expected {} from {} to {}, found {}", entry.key, kind, low, high,
                entry.value.IsScalar() ? Quoted(text) : std::string(KindName(entry.value)));
    }
    out = static_cast<Number>(value);
    return {};
  }

  Result<CodecPair> Codec(const Entry& entry, const YAML::Node& node) {
    const YAML::Mark mark = node.Mark().is_null() ? entry.key_mark : node.Mark();
    if (!node.IsScalar()) return At(mark, "{}: expected a codec pair such as i8, found {}", entry.key, KindName(node));
    auto pair = ParseCodecPair(node.Scalar());
    if (!pair) return Located(mark, Error{Code::kInvalidArgument, entry.key + ": " + pair.error().message});
    return pair;
  }

  Result<std::string> Path(const Entry& entry) {
    QKV_ASSIGN_OR_RETURN(std::string text, Text(entry));
    if (text.empty()) return At(entry.mark(), "{}: expected a path, found nothing", entry.key);
    return (directory_ / text).string();
  }

  Status Top(const YAML::Node& node) {
    static constexpr std::string_view kKeys[] = {"name", "model", "n_ctx", "threads", "kv", "inputs", "agents"};
    const YAML::Mark mark = node.Mark().is_null() ? YAML::Mark() : node.Mark();
    QKV_ASSIGN_OR_RETURN(const auto entries, Map(node, mark, "flow", kKeys));
    const Entry* agents = nullptr;
    for (const Entry& entry : entries) {
      if (entry.key == "name") {
        QKV_ASSIGN_OR_RETURN(flow_.name, Text(entry));
      } else if (entry.key == "model") {
        QKV_ASSIGN_OR_RETURN(flow_.model, Path(entry));
      } else if (entry.key == "n_ctx") {
        QKV_RETURN_IF_ERROR(Read(entry, 32, 1 << 20, flow_.n_ctx));
      } else if (entry.key == "threads") {
        QKV_RETURN_IF_ERROR(Read(entry, 0, 256, flow_.threads));
      } else if (entry.key == "kv") {
        QKV_RETURN_IF_ERROR(CodecList(entry));
      } else if (entry.key == "inputs") {
        QKV_RETURN_IF_ERROR(Inputs(entry));
      } else {
        agents = &entry;
      }
    }
    if (agents == nullptr) return At(mark, "key 'agents' is missing");
    return Agents(*agents);
  }

  Status CodecList(const Entry& entry) {
    if (!entry.value.IsSequence()) {
      QKV_ASSIGN_OR_RETURN(const CodecPair pair, Codec(entry, entry.value));
      flow_.kv.push_back(pair);
      return {};
    }
    for (const YAML::Node& node : entry.value) {
      QKV_ASSIGN_OR_RETURN(const CodecPair pair, Codec(entry, node));
      if (std::find(flow_.kv.begin(), flow_.kv.end(), pair) != flow_.kv.end()) {
        return At(node.Mark(), "kv: {} is there twice", ToString(pair));
      }
      flow_.kv.push_back(pair);
    }
    if (flow_.kv.empty()) return At(entry.mark(), "kv: the list is empty");
    return {};
  }

  Status Inputs(const Entry& entry) {
    QKV_ASSIGN_OR_RETURN(const auto inputs, Map(entry.value, entry.mark(), "inputs", {}));
    if (inputs.size() > kMaxFlowInputs) return At(entry.mark(), "inputs: more than {}", kMaxFlowInputs);
    for (const Entry& input : inputs) {
      if (!IsName(input.key)) return At(input.key_mark, "input name {}: expected {}", Quoted(input.key), kNameRule);
      if (!input.value.IsMap()) {
        QKV_ASSIGN_OR_RETURN(flow_.inputs[input.key], Text(input));
        continue;
      }
      static constexpr std::string_view kKeys[] = {"file"};
      QKV_ASSIGN_OR_RETURN(const auto source, Map(input.value, input.mark(), "input '" + input.key + "'", kKeys));
      if (source.empty()) return At(input.mark(), "input '{}': key 'file' is missing", input.key);
      QKV_ASSIGN_OR_RETURN(const std::string file, Path(source[0]));
      auto text = ReadTextFile(file);
      if (!text) return Located(source[0].mark(), Prefixed("input '" + input.key + "'", text.error()).value());
      if (FindNonText(*text) != std::string::npos) {
        return At(source[0].mark(), "input '{}': {} is not UTF-8 text", input.key, file);
      }
      QKV_RETURN_IF_ERROR(Account(source[0], text->size()));
      flow_.inputs[input.key] = *std::move(text);
    }
    return {};
  }

  Status Agents(const Entry& entry) {
    if (!entry.value.IsSequence()) {
      return At(entry.mark(), "agents: expected a list of agents, found {}", KindName(entry.value));
    }
    if (entry.value.size() == 0) return At(entry.mark(), "agents: the list is empty");
    if (entry.value.size() > kMaxFlowAgents) return At(entry.mark(), "agents: more than {}", kMaxFlowAgents);
    for (const YAML::Node& node : entry.value) {
      QKV_RETURN_IF_ERROR(Agent(node, node.Mark().is_null() ? entry.mark() : node.Mark()));
    }
    for (size_t i = 0; i < flow_.agents.size(); ++i) QKV_RETURN_IF_ERROR(CheckNames(i));
    return CheckOrder();
  }

  Status Agent(const YAML::Node& node, const YAML::Mark& mark) {
    static constexpr std::string_view kKeys[] = {"name",       "model", "system",      "prompt", "inherits",
                                                 "max_tokens", "seed",  "temperature", "top_k",  "top_p",
                                                 "min_p",      "kv",    "on_miss"};
    QKV_ASSIGN_OR_RETURN(const auto entries, Map(node, mark, "agent", kKeys));
    FlowAgent agent;
    AgentMarks marks{mark, mark, mark, mark};
    for (const Entry& entry : entries) {
      if (entry.key == "name") {
        QKV_ASSIGN_OR_RETURN(agent.name, Text(entry));
        marks.name = entry.mark();
        if (!IsName(agent.name)) return At(marks.name, "agent name {}: expected {}", Quoted(agent.name), kNameRule);
        if (agent.name == "input") {
          return At(marks.name, "no agent can be called 'input': {{{{input.…}}}} means an input");
        }
      } else if (entry.key == "model") {
        QKV_ASSIGN_OR_RETURN(agent.model, Path(entry));
      } else if (entry.key == "system") {
        QKV_ASSIGN_OR_RETURN(agent.system, Text(entry));
        marks.system = entry.mark();
      } else if (entry.key == "prompt") {
        QKV_ASSIGN_OR_RETURN(agent.prompt, Text(entry));
        marks.prompt = entry.mark();
      } else if (entry.key == "inherits") {
        if (entry.value.IsNull()) continue;
        QKV_ASSIGN_OR_RETURN(agent.inherits, Text(entry));
        marks.inherits = entry.mark();
        if (agent.inherits.empty()) return At(marks.inherits, "inherits: expected an agent's name, found nothing");
      } else if (entry.key == "max_tokens") {
        QKV_RETURN_IF_ERROR(Read(entry, 1, 1 << 20, agent.max_tokens));
      } else if (entry.key == "seed") {
        QKV_RETURN_IF_ERROR(Read(entry, 0, std::numeric_limits<uint32_t>::max(), agent.sampling.seed));
      } else if (entry.key == "temperature") {
        QKV_RETURN_IF_ERROR(Read(entry, 0, 100, agent.sampling.temperature));
      } else if (entry.key == "top_k") {
        QKV_RETURN_IF_ERROR(Read(entry, 0, 1 << 20, agent.sampling.top_k));
      } else if (entry.key == "top_p") {
        QKV_RETURN_IF_ERROR(Read(entry, 0, 1, agent.sampling.top_p));
      } else if (entry.key == "min_p") {
        QKV_RETURN_IF_ERROR(Read(entry, 0, 1, agent.sampling.min_p));
      } else if (entry.key == "kv") {
        QKV_ASSIGN_OR_RETURN(agent.kv, Codec(entry, entry.value));
      } else {
        QKV_ASSIGN_OR_RETURN(const std::string on_miss, Text(entry));
        static constexpr std::string_view kValues[] = {"text", "fail"};
        if (on_miss != "text" && on_miss != "fail") {
          return At(entry.mark(), "on_miss: expected 'text' or 'fail', found {}{}", Quoted(on_miss),
                    Suggestion(on_miss, kValues));
        }
        agent.on_miss = on_miss == "fail" ? OnMiss::kFail : OnMiss::kText;
      }
    }
    if (agent.name.empty()) return At(mark, "agent: key 'name' is missing");
    if (agent.prompt.empty() && agent.inherits.empty()) {
      return At(marks.prompt, "agent '{}': it has nothing to read: 'prompt' is missing or empty", agent.name);
    }
    if (!agent.system.empty() && !agent.inherits.empty()) {
      return At(marks.system, "agent '{}': 'system' has no place behind an inherited context; put it into 'prompt'",
                agent.name);
    }
    for (const FlowAgent& other : flow_.agents) {
      if (other.name == agent.name) return At(marks.name, "a second agent is called '{}'", agent.name);
    }
    flow_.agents.push_back(std::move(agent));
    marks_.push_back(marks);
    return {};
  }

  std::vector<std::string_view> AgentNames() const {
    std::vector<std::string_view> names;
    for (const FlowAgent& agent : flow_.agents) names.push_back(agent.name);
    return names;
  }

  Status CheckNames(size_t index) const {
    const FlowAgent& agent = flow_.agents[index];
    const auto names = AgentNames();
    const auto known = [&](std::string_view name) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    if (!agent.inherits.empty() && !known(agent.inherits)) {
      return At(marks_[index].inherits, "agent '{}' inherits from {}, but there is no such agent{}", agent.name,
                Quoted(agent.inherits), Suggestion(agent.inherits, names));
    }
    const std::pair<std::string_view, YAML::Mark> texts[] = {{agent.system, marks_[index].system},
                                                             {agent.prompt, marks_[index].prompt}};
    for (const auto& [text, mark] : texts) {
      const auto parts = SplitReferences(text);
      if (!parts) return At(mark, "agent '{}': {}", agent.name, parts.error().message);
      for (const Part& part : *parts) {
        if (part.kind == Part::Kind::kInput && !flow_.inputs.contains(std::string(part.value))) {
          std::vector<std::string_view> inputs;
          for (const auto& input : flow_.inputs) inputs.push_back(input.first);
          return At(mark, "agent '{}': there is no input {}{}", agent.name, Quoted(part.value),
                    Suggestion(part.value, inputs));
        }
        if (part.kind == Part::Kind::kOutput && !known(part.value)) {
          return At(mark, "agent '{}': {{{{{}.output}}}}: there is no agent {}{}", agent.name, part.value,
                    Quoted(part.value), Suggestion(part.value, names));
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
    if (graph[cycle[0]].inherits == cycle[1]) {
      return At(marks_[cycle[0]].inherits, "agent '{}' inherits from '{}', which is not before it ({})", first.name,
                second, path);
    }
    return At(marks_[cycle[0]].prompt, "agent '{}' uses {{{{{}.output}}}}, but '{}' is not before it ({})", first.name,
              second, second, path);
  }

  const std::string path_;
  const std::filesystem::path directory_;
  Flow flow_;
  std::vector<AgentMarks> marks_;
  size_t text_bytes_ = 0;
};

}  // namespace

std::vector<PlanNode> Flow::Graph() const {
  std::map<std::string_view, int> index;
  for (size_t i = 0; i < agents.size(); ++i) index[agents[i].name] = static_cast<int>(i);
  std::vector<PlanNode> graph;
  for (const FlowAgent& agent : agents) {
    PlanNode node{agent.name};
    const auto need = [&](std::string_view name) {
      const auto found = index.find(name);
      if (found == index.end()) return -1;
      if (std::find(node.needs.begin(), node.needs.end(), found->second) == node.needs.end()) {
        node.needs.push_back(found->second);
      }
      return found->second;
    };
    if (!agent.inherits.empty()) node.inherits = need(agent.inherits);
    for (const std::string* text : {&agent.system, &agent.prompt}) {
      const auto parts = SplitReferences(*text);
      if (!parts) continue;
      for (const Part& part : *parts) {
        if (part.kind == Part::Kind::kOutput) need(part.value);
      }
    }
    graph.push_back(std::move(node));
  }
  return graph;
}

Result<Flow> ParseFlow(std::string_view yaml, const std::string& path) {
  return Parser(path).Parse(yaml);
}

Result<Flow> ParseFlowFile(const std::string& path) {
  QKV_ASSIGN_OR_RETURN(const std::string yaml, ReadTextFile(path));
  return ParseFlow(yaml, path);
}

Result<std::string> FillIn(std::string_view text, const std::map<std::string, std::string>& inputs,
                           const std::map<std::string, std::string>& outputs) {
  QKV_ASSIGN_OR_RETURN(const std::vector<Part> parts, SplitReferences(text));
  std::string filled;
  for (const Part& part : parts) {
    std::string_view piece = part.value;
    if (part.kind != Part::Kind::kLiteral) {
      const auto& values = part.kind == Part::Kind::kInput ? inputs : outputs;
      const auto found = values.find(std::string(part.value));
      if (found == values.end()) return Err(Code::kInvalidArgument, "there is no text for {}", Quoted(part.value));
      piece = found->second;
    }
    if (filled.size() + piece.size() > kMaxFlowTextBytes) {
      return Err(Code::kInvalidArgument, "the prompt is longer than {} MiB", kMaxFlowTextBytes >> 20);
    }
    filled += piece;
  }
  return filled;
}

}  // namespace qkv
