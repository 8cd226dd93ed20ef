// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/agent_protocol.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

namespace qkv {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 8;
constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
// Beyond this a JSON number may have lost digits on its way through other programs; no count of ours comes near.
constexpr int64_t kMaxCount = int64_t{1} << 53;

template <class... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};

std::string Line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

// For messages.
std::string Shown(std::string_view text) {
  constexpr size_t kMost = 80;
  std::string shown;
  for (char c : text.substr(0, kMost)) shown += c >= 0x20 && c < 0x7f ? c : '?';
  return shown + (text.size() > kMost ? "…" : "");
}

// The parser builds what it reads, so that a line of brackets would cost a hundred times its length: look first.
bool TooDeep(std::string_view line) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < line.size(); ++i) {
    if (in_string) {
      if (line[i] == '\\') {
        ++i;
      } else if (line[i] == '"') {
        in_string = false;
      }
    } else if (line[i] == '"') {
      in_string = true;
    } else if (line[i] == '[' || line[i] == '{') {
      if (++depth > kMaxDepth) return true;
    } else if (line[i] == ']' || line[i] == '}') {
      --depth;
    }
  }
  return false;
}

Result<Json> ParseObject(std::string_view line) {
  if (line.size() > kMaxAgentLineBytes) {
    return Err(Code::kCorrupt, "agent protocol: a line of {} bytes, the limit is {}", line.size(), kMaxAgentLineBytes);
  }
  if (TooDeep(line)) return Err(Code::kCorrupt, "agent protocol: nested deeper than {}", kMaxDepth);
  Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    return Err(Code::kCorrupt, "agent protocol: expected a JSON object, found \"{}\"", Shown(line));
  }
  return json;
}

// Reads the fields of one object; remembers the first thing that was wrong, so that a caller checks once, at the end.
class Fields {
 public:
  Fields(const Json& object, std::string type) : object_(object), type_(std::move(type)) {}

  void Read(const char* key, std::string& out) {
    if (const Json* value = Find(key, &Json::is_string, "text")) out = value->get_ref<const std::string&>();
  }
  void Read(const char* key, bool& out) {
    if (const Json* value = Find(key, &Json::is_boolean, "true or false")) out = value->get<bool>();
  }
  void Read(const char* key, double& out, double low, double high) {
    const Json* value = Find(key, &Json::is_number, "a number");
    if (value == nullptr) return;
    const double number = value->get<double>();
    if (!(number >= low && number <= high)) return Fail(key, "is out of range");
    out = number;
  }
  void Read(const char* key, float& out, double low, double high) {
    double wide = out;
    Read(key, wide, low, high);
    out = static_cast<float>(wide);
  }
  void Milliseconds(const char* key, double& out) { Read(key, out, 0, 1e12); }
  template <class Integer>
  void Read(const char* key, Integer& out, int64_t low, int64_t high) {
    const Json* value = Find(key, &Json::is_number_integer, "a whole number");
    if (value != nullptr) out = static_cast<Integer>(Whole(key, *value, low, high));
  }
  void Read(const char* key, std::vector<Token>& out) {
    const Json* value = Find(key, &Json::is_array, "a list of tokens");
    if (value == nullptr) return;
    out.clear();
    out.reserve(value->size());
    for (const Json& token : *value) {
      if (!token.is_number_integer()) return Fail(key, "must be a list of tokens");
      out.push_back(static_cast<Token>(Whole(key, token, 0, kMaxInt)));
    }
  }
  void Read(const char* key, std::vector<TraceEvent>& out) {
    const Json* value = Find(key, &Json::is_array, "a list of stages");
    if (value == nullptr) return;
    if (value->size() > kMaxTraceEvents) return Fail(key, "is too long");
    for (const Json& stage : *value) {
      if (!stage.is_object()) return Fail(key, "must be a list of stages");
      constexpr double kMostMicroseconds = 1e17;  // three thousand years since the machine started
      TraceEvent event;
      Fields fields(stage, "stage");
      fields.Read("process", event.process);
      fields.Read("name", event.name);
      fields.Read("start_us", event.start_us, 0, kMostMicroseconds);
      fields.Read("duration_us", event.duration_us, 0, kMostMicroseconds);
      fields.Read("pid", event.pid, 0, kMaxCount);
      fields.Read("tid", event.tid, 0, kMaxCount);
      if (!fields.status()) return Fail(key, "has a stage that is not understood");
      out.push_back(std::move(event));
    }
  }
  const Json* List(const char* key) { return Find(key, &Json::is_array, "a list"); }
  // One of an enumeration's names.
  template <class Enum, class NameOf>
  void OneOf(const char* key, Enum& out, Enum last, NameOf name_of) {
    const Json* value = Find(key, &Json::is_string, "text");
    if (value == nullptr) return;
    for (int i = 0; i <= static_cast<int>(last); ++i) {
      if (value->get_ref<const std::string&>() == name_of(static_cast<Enum>(i))) {
        out = static_cast<Enum>(i);
        return;
      }
    }
    Fail(key, "has an unknown value");
  }
  void Read(const char* key, KvChoice& out) {
    std::string text;
    Read(key, text);
    if (error_) return;
    if (auto pair = ParseKvChoice(text)) {
      out = *pair;
    } else {
      Fail(key, pair.error().message);
    }
  }

  void Read(const char* key, SplicePolicy& out) {
    std::string text;
    Read(key, text);
    if (error_) return;
    if (auto policy = ParseSplicePolicy(text)) {
      out = *policy;
    } else {
      Fail(key, policy.error().message);
    }
  }

  Status status() const {
    if (error_) return tl::unexpected(*error_);
    return {};
  }

 private:
  const Json* Find(const char* key, bool (Json::*is_right)() const noexcept, const char* expected) {
    const auto found = object_.find(key);
    if (found == object_.end()) {
      Fail(key, "is missing");
    } else if (!((*found).*is_right)()) {
      Fail(key, fmt::format("must be {}", expected));
    } else {
      return &*found;
    }
    return nullptr;
  }
  int64_t Whole(const char* key, const Json& value, int64_t low, int64_t high) {
    // An unsigned number beyond int64 would come out negative.
    const bool huge = value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(kMaxCount);
    const int64_t number = huge ? 0 : value.get<int64_t>();
    if (huge || number < low || number > high) Fail(key, "is out of range");
    return number;
  }
  void Fail(const char* key, std::string_view what) {
    if (!error_) error_ = Error{Code::kCorrupt, fmt::format("agent protocol: {}: '{}' {}", type_, key, what)};
  }

  const Json& object_;
  const std::string type_;
  std::optional<Error> error_;
};

std::string_view OnMissName(OnMiss on_miss) {
  return on_miss == OnMiss::kFail ? "fail" : "text";
}

Json ToJson(const AgentSetup& setup) {
  return {{"type", "setup"},
          {"model", setup.model},
          {"socket", setup.socket},
          {"refine", setup.refine},
          {"balanced", setup.balanced},
          {"warm_up", setup.warm_up},
          {"packed_weights", setup.packed_weights},
          {"packed_digest", setup.packed_digest}};
}

Json ToJson(const AgentPrepare& prepare) {
  return {{"type", "prepare"},          {"agent", prepare.agent},
          {"kv", ToString(prepare.kv)}, {"max_bytes", prepare.max_bytes},
          {"kv_bits", prepare.kv_bits}, {"n_ctx", prepare.n_ctx},
          {"threads", prepare.threads}, {"prefix", prepare.prefix},
          {"system", prepare.system},   {"context", prepare.context},
          {"trace", prepare.trace}};
}

Json ToJson(const AgentTurn& turn) {
  Json reads = Json::array();
  for (const ContextToRead& read : turn.reads) {
    reads.push_back(Json{{"context", read.context},
                         {"history", read.history},
                         {"on_miss", OnMissName(read.on_miss)},
                         {"splice", ToString(read.splice)},
                         {"prefix_tokens", read.prefix_tokens}});
  }
  return {{"type", "turn"},
          {"agent", turn.agent},
          {"kv", ToString(turn.kv)},
          {"max_bytes", turn.max_bytes},
          {"kv_bits", turn.kv_bits},
          {"n_ctx", turn.n_ctx},
          {"threads", turn.threads},
          {"system", turn.system},
          {"prompt", turn.prompt},
          {"document", turn.document},
          {"max_tokens", turn.max_tokens},
          {"temperature", turn.sampling.temperature},
          {"top_k", turn.sampling.top_k},
          {"top_p", turn.sampling.top_p},
          {"min_p", turn.sampling.min_p},
          {"seed", turn.sampling.seed},
          {"inherits", turn.inherits},
          {"on_miss", OnMissName(turn.on_miss)},
          {"budget", turn.budget},
          {"history", turn.history},
          {"prefix_tokens", turn.prefix_tokens},
          {"reads", std::move(reads)},
          {"publish_as", turn.publish_as},
          {"announce", turn.announce},
          {"digest_logits", turn.digest_logits},
          {"trace", turn.trace}};
}

Json ToJson(const std::vector<TraceEvent>& events) {
  Json list = Json::array();
  for (const TraceEvent& event : events) {
    list.push_back({{"process", event.process},
                    {"name", event.name},
                    {"start_us", event.start_us},
                    {"duration_us", event.duration_us},
                    {"pid", event.pid},
                    {"tid", event.tid}});
  }
  return list;
}

Json ToJson(const TurnResult& result) {
  return {{"type", "done"},
          {"text", result.text},
          {"output_tokens", result.output_tokens},
          {"context_tokens", result.context_tokens},
          {"stopped_by_eos", result.stopped_by_eos},
          {"logits_digest", result.logits_digest},
          {"mode", HandoffModeName(result.mode)},
          {"reason", ReasonName(result.reason)},
          {"reason_detail", result.reason_detail},
          {"bytes_copied", result.bytes_copied},
          {"tokens_reused", result.tokens_reused},
          {"tokens_recomputed", result.tokens_recomputed},
          {"splice", result.splice},
          {"spans_spliced", result.spans_spliced},
          {"tokens_repaired", result.tokens_repaired},
          {"probe_kl", result.probe_kl},
          {"prefix_tokens", result.prefix_tokens},
          {"attach_ms", result.attach_ms},
          {"ttft_ms", result.ttft_ms},
          {"prefill_ms", result.prefill_ms},
          {"decode_ms", result.decode_ms},
          {"first_token_at_ms", result.first_token_at_ms},
          {"last_token_at_ms", result.last_token_at_ms},
          {"publish_ms", result.publish_ms},
          {"context_id", result.context_id},
          {"publish_error", result.publish_error},
          {"kv_bytes", result.kv_bytes},
          {"own_kv_bytes", result.own_kv_bytes}};
}

// What a sequence is made with.
template <class Command>
void ReadSequenceFields(Fields& fields, Command& command) {
  fields.Read("agent", command.agent);
  fields.Read("kv", command.kv);
  fields.Read("max_bytes", command.max_bytes, 0, kMaxCount);
  fields.Read("kv_bits", command.kv_bits, 0.0, 16.0);
  fields.Read("n_ctx", command.n_ctx, 1, kMaxInt);
  fields.Read("threads", command.threads, 1, 1024);
  fields.Read("trace", command.trace);
}

Status ReadContexts(Fields& fields, std::vector<ContextToRead>& out) {
  const Json* all = fields.List("reads");
  if (all == nullptr) return fields.status();
  for (const Json& one : *all) {
    if (!one.is_object()) return Err(Code::kCorrupt, "agent protocol: turn: 'reads' must be a list of objects");
    Fields inner(one, "reads");
    ContextToRead& read = out.emplace_back();
    inner.Read("context", read.context);
    inner.Read("history", read.history);
    inner.OneOf("on_miss", read.on_miss, OnMiss::kFail, OnMissName);
    inner.Read("splice", read.splice);
    inner.Read("prefix_tokens", read.prefix_tokens, 0, kMaxInt);
    QKV_RETURN_IF_ERROR(inner.status());
  }
  return {};
}

TurnResult ReadTurnResult(Fields& fields) {
  TurnResult result;
  fields.Read("text", result.text);
  fields.Read("output_tokens", result.output_tokens);
  fields.Read("context_tokens", result.context_tokens);
  fields.Read("stopped_by_eos", result.stopped_by_eos);
  fields.Read("logits_digest", result.logits_digest);
  fields.OneOf("mode", result.mode, HandoffMode::kText, HandoffModeName);
  fields.OneOf("reason", result.reason, Reason::kVersion, ReasonName);
  fields.Read("reason_detail", result.reason_detail);
  fields.Read("bytes_copied", result.bytes_copied, 0, kMaxCount);
  fields.Read("tokens_reused", result.tokens_reused, 0, kMaxCount);
  fields.Read("tokens_recomputed", result.tokens_recomputed, 0, kMaxCount);
  fields.Read("splice", result.splice);
  fields.Read("spans_spliced", result.spans_spliced, 0, kMaxInt);
  fields.Read("tokens_repaired", result.tokens_repaired, 0, kMaxCount);
  fields.Read("probe_kl", result.probe_kl, -1, 1e6);
  fields.Read("prefix_tokens", result.prefix_tokens, 0, kMaxInt);
  fields.Milliseconds("attach_ms", result.attach_ms);
  fields.Milliseconds("ttft_ms", result.ttft_ms);
  fields.Milliseconds("prefill_ms", result.prefill_ms);
  fields.Milliseconds("decode_ms", result.decode_ms);
  fields.Milliseconds("first_token_at_ms", result.first_token_at_ms);
  fields.Milliseconds("last_token_at_ms", result.last_token_at_ms);
  fields.Milliseconds("publish_ms", result.publish_ms);
  fields.Read("context_id", result.context_id);
  fields.Read("publish_error", result.publish_error);
  fields.Read("kv_bytes", result.kv_bytes, 0, kMaxCount);
  fields.Read("own_kv_bytes", result.own_kv_bytes, 0, kMaxCount);
  return result;
}

}  // namespace

std::string ToLine(const AgentCommand& command) {
  return std::visit([](const auto& value) { return Line(ToJson(value)); }, command);
}

std::string ToLine(const AgentEvent& event) {
  return Line(
      std::visit(Overloaded{
                     [](const AgentReady& ready) {
                       return Json{{"type", "ready"}, {"load_ms", ready.load_ms}, {"tokenizer", ready.tokenizer}};
                     },
                     [](const AgentPrepared& prepared) {
                       return Json{{"type", "prepared"},
                                   {"ms", prepared.ms},
                                   {"prefix_tokens", prepared.prefix_tokens},
                                   {"bytes", prepared.bytes}};
                     },
                     [](const AgentAnnounced& announced) {
                       return Json{{"type", "announced"}, {"context", announced.context}, {"tokens", announced.tokens}};
                     },
                     [](const AgentProgress& progress) {
                       return Json{{"type", "progress"}, {"done", progress.done}, {"total", progress.total}};
                     },
                     [](const AgentText& text) {
                       return Json{{"type", "text"}, {"piece", text.piece}};
                     },
                     [](const AgentDone& done) {
                       Json json = ToJson(done.result);
                       json["trace"] = ToJson(done.trace);
                       return json;
                     },
                     [](const AgentFailed& failed) {
                       return Json{{"type", "error"},
                                   {"code", CodeName(failed.error.code)},
                                   {"message", failed.error.message},
                                   {"reason", ReasonName(failed.error.reason)}};
                     },
                 },
                 event));
}

Result<AgentCommand> ParseAgentCommand(std::string_view line) {
  QKV_ASSIGN_OR_RETURN(const Json json, ParseObject(line));
  std::string type;
  Fields top(json, "command");
  top.Read("type", type);
  QKV_RETURN_IF_ERROR(top.status());
  Fields fields(json, type);
  AgentCommand command;
  if (type == "setup") {
    AgentSetup setup;
    fields.Read("model", setup.model);
    fields.Read("socket", setup.socket);
    fields.Read("refine", setup.refine, 0, 1);
    fields.Read("balanced", setup.balanced);
    fields.Read("warm_up", setup.warm_up);
    fields.Read("packed_weights", setup.packed_weights);
    fields.Read("packed_digest", setup.packed_digest);
    command = std::move(setup);
  } else if (type == "prepare") {
    AgentPrepare prepare;
    ReadSequenceFields(fields, prepare);
    fields.Read("prefix", prepare.prefix);
    fields.Read("system", prepare.system);
    fields.Read("context", prepare.context);
    command = std::move(prepare);
  } else if (type == "turn") {
    AgentTurn turn;
    ReadSequenceFields(fields, turn);
    fields.Read("system", turn.system);
    fields.Read("prompt", turn.prompt);
    fields.Read("document", turn.document);
    fields.Read("max_tokens", turn.max_tokens, turn.document ? 0 : 1, kMaxInt);
    fields.Read("temperature", turn.sampling.temperature, 0, 100);
    fields.Read("top_k", turn.sampling.top_k, 0, kMaxInt);
    fields.Read("top_p", turn.sampling.top_p, 0, 1);
    fields.Read("min_p", turn.sampling.min_p, 0, 1);
    fields.Read("seed", turn.sampling.seed, 0, std::numeric_limits<uint32_t>::max());
    fields.Read("inherits", turn.inherits);
    fields.OneOf("on_miss", turn.on_miss, OnMiss::kFail, OnMissName);
    fields.Read("budget", turn.budget, 0, kMaxInt);
    fields.Read("history", turn.history);
    fields.Read("prefix_tokens", turn.prefix_tokens, 0, kMaxInt);
    QKV_RETURN_IF_ERROR(ReadContexts(fields, turn.reads));
    fields.Read("publish_as", turn.publish_as);
    fields.Read("announce", turn.announce);
    fields.Read("digest_logits", turn.digest_logits);
    command = std::move(turn);
  } else {
    return Err(Code::kCorrupt, "agent protocol: expected a command, found type '{}'", Shown(type));
  }
  QKV_RETURN_IF_ERROR(fields.status());
  return command;
}

Result<AgentEvent> ParseAgentEvent(std::string_view line) {
  QKV_ASSIGN_OR_RETURN(const Json json, ParseObject(line));
  std::string type;
  Fields top(json, "event");
  top.Read("type", type);
  QKV_RETURN_IF_ERROR(top.status());
  Fields fields(json, type);
  AgentEvent event;
  if (type == "ready") {
    AgentReady ready;
    fields.Milliseconds("load_ms", ready.load_ms);
    fields.Read("tokenizer", ready.tokenizer);
    event = std::move(ready);
  } else if (type == "prepared") {
    AgentPrepared prepared;
    fields.Milliseconds("ms", prepared.ms);
    fields.Read("prefix_tokens", prepared.prefix_tokens, 0, kMaxCount);
    fields.Read("bytes", prepared.bytes, 0, kMaxCount);
    event = prepared;
  } else if (type == "announced") {
    AgentAnnounced announced;
    fields.Read("context", announced.context);
    fields.Read("tokens", announced.tokens, 0, kMaxCount);
    event = std::move(announced);
  } else if (type == "progress") {
    AgentProgress progress;
    fields.Read("done", progress.done, 0, kMaxCount);
    fields.Read("total", progress.total, 0, kMaxCount);
    event = progress;
  } else if (type == "text") {
    AgentText text;
    fields.Read("piece", text.piece);
    event = std::move(text);
  } else if (type == "done") {
    AgentDone done{.result = ReadTurnResult(fields)};
    fields.Read("trace", done.trace);
    event = std::move(done);
  } else if (type == "error") {
    AgentFailed failed;
    fields.OneOf("code", failed.error.code, Code::kInternal, CodeName);
    fields.Read("message", failed.error.message);
    fields.OneOf("reason", failed.error.reason, Reason::kVersion, ReasonName);
    event = std::move(failed);
  } else {
    return Err(Code::kCorrupt, "agent protocol: expected an event, found type '{}'", Shown(type));
  }
  QKV_RETURN_IF_ERROR(fields.status());
  return event;
}

}  // namespace qkv
