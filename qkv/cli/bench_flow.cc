// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// bench flow: what a flow gains by handing over. The gap between a producer's last token and its reader's first, in the
// producer's worker and in another, with and without getting ready ahead, against reading the same instruction in the
// producer's own sequence, where nothing is handed over; and a research team
// (three readers, a synthesizer, a critic, an editor) handed over, as text, and by libllama in one process that reuses its
// cache wherever a prompt begins as the last one did.

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>

#include "qkv/cli/bench.h"
#include "qkv/cli/options.h"
#include "qkv/cli/progress.h"
#include "qkv/engine/peer.h"
#include "qkv/flow/memory_sampler.h"
#include "qkv/flow/runner.h"

namespace qkv::cli {
namespace {

constexpr char kInstruction[] =
    "Name the weakest point of this, and say in two sentences what follows from it for the town.";
constexpr char kSystem[] = "You advise a council. You weigh what others have found, and you are fair.";
constexpr int kReaders = 3;

struct Options {
  std::string model;
  int n_threads = 0;
  std::string kv = "i8";
  int n_tokens = 2000;
  int n_output = 48;
  int runs = 3;
  bool no_team = false;
  bool no_peer = false;
  bool json = false;
};

// Text of about that many tokens; which of several.
Result<std::string> Document(const Vocab& vocab, int n_tokens, int which) {
  std::string text;
  for (int i = 0;; ++i) {
    text += fmt::format("In year {} the mill at place {} ground {} sacks of flour, and the council wrote it down. ",
                        1700 + i, which + 1, 100 + (i * 37 + which * 11) % 900);
    if (i % 8 != 7) continue;
    QKV_ASSIGN_OR_RETURN(const auto tokens, vocab.Tokenize(text, false, false));
    if (static_cast<int>(tokens.size()) >= n_tokens) return text;
  }
}

Flow NewFlow(const Options& options, const std::string& name, int n_ctx) {
  Flow flow;
  flow.path = flow.name = name;
  flow.model = options.model;
  flow.n_ctx = n_ctx;
  flow.threads = options.n_threads;
  return flow;
}

FlowAgent& AddAgent(Flow& flow, const std::string& name, int max_tokens) {
  flow.names[name] = {static_cast<int>(flow.agents.size())};
  FlowAgent& agent = flow.agents.emplace_back();
  agent.name = name;
  agent.max_tokens = max_tokens;
  return agent;
}

// --- the gap --------------------------------------------------------------------------------------------------------

// Reading the instruction where the context is, without handing anything over.
class BareReader {
 public:
  static Result<BareReader> Create(const Options& options, const std::shared_ptr<const Model>& model,
                                   const std::string& document) {
    const Vocab vocab(*model);
    SequenceOptions sequence_options;
    sequence_options.n_ctx = options.n_tokens + 1024;
    sequence_options.n_threads = options.n_threads;
    QKV_ASSIGN_OR_RETURN(sequence_options.kv, ParseCodecPair(options.kv));
    BareReader reader;
    QKV_ASSIGN_OR_RETURN(reader.sequence_, Sequence::Create(model, sequence_options));
    QKV_ASSIGN_OR_RETURN(reader.instruction_, vocab.NextTurn(kInstruction));
    QKV_ASSIGN_OR_RETURN(const auto context, vocab.FirstTurn("", document));
    QKV_RETURN_IF_ERROR(reader.sequence_->Forward(context));
    for (int i = 0; i < options.n_output; ++i) QKV_RETURN_IF_ERROR(reader.sequence_->Forward({&context.back(), 1}));
    QKV_RETURN_IF_ERROR(reader.sequence_->Publish({}));  // all of it is in pages
    QKV_RETURN_IF_ERROR(reader.ReadMs());
    return reader;
  }

  Result<double> ReadMs() {
    const int before = static_cast<int>(sequence_->tokens().size());
    const auto start = Clock::now();
    QKV_RETURN_IF_ERROR(sequence_->Forward(instruction_));
    const double ms = MsSince(start);
    QKV_RETURN_IF_ERROR(sequence_->Truncate(before));
    return ms;
  }

 private:
  std::unique_ptr<Sequence> sequence_;
  std::vector<Token> instruction_;
};

struct Way {
  const char* name;
  FlowMode mode;
  bool in_place;
  bool ahead;
};
constexpr Way kWays[] = {{"in_place", FlowMode::kHandoff, true, true},
                         {"ahead", FlowMode::kHandoff, false, true},
                         {"no_ahead", FlowMode::kHandoff, false, false},
                         {"text", FlowMode::kText, true, true}};

// The bare reading before every run of every way: what the machine does meanwhile is in all of them.
Result<Json> MeasureGap(const Options& options, const std::shared_ptr<const Model>& model,
                        const std::string& document) {
  Flow flow = NewFlow(options, "gap", options.n_tokens + 1024);
  flow.inputs["document"] = document;
  AddAgent(flow, "producer", options.n_output).prompt = "{{input.document}}";
  FlowAgent& middle = AddAgent(flow, "middle", options.n_output);
  middle.prompt = kInstruction;
  middle.edges = {{.from = "producer"}};
  FlowAgent& last = AddAgent(flow, "last", 4);
  last.prompt = kInstruction;
  last.edges = {{.from = "middle"}};

  QKV_ASSIGN_OR_RETURN(BareReader reader, BareReader::Create(options, model, document));
  std::vector<double> bare, first[std::size(kWays)], second[std::size(kWays)];
  Json json;
  for (int run = 0; run < options.runs; ++run) {
    for (size_t i = 0; i < std::size(kWays); ++i) {
      const Way& way = kWays[i];
      if (way.mode == FlowMode::kText && run > 0) continue;  // seconds, and nothing that a run more would make clearer
      RunOptions run_options;
      run_options.mode = way.mode;
      run_options.ahead = way.ahead;
      run_options.in_place = way.in_place;
      QKV_ASSIGN_OR_RETURN(run_options.kv, ParseCodecPair(options.kv));
      QKV_ASSIGN_OR_RETURN(bare.emplace_back(), reader.ReadMs());
      QKV_ASSIGN_OR_RETURN(const ModeResult result, RunFlow(flow, run_options));
      if (!result.ok()) return tl::unexpected(result.failures.front().error);
      first[i].push_back(result.hops[1].gap_ms);
      second[i].push_back(result.hops[2].gap_ms);
      json[way.name]["last_run"] = {
          {"prefill_ms", result.hops[1].prefill_ms},          {"attach_ms", result.hops[1].attach_ms},
          {"producer_publish_ms", result.hops[0].publish_ms}, {"prepared_bytes", result.hops[1].prepared_bytes},
          {"tokens_reused", result.hops[1].tokens_reused},    {"tokens_recomputed", result.hops[1].tokens_recomputed}};
    }
  }
  json["bare_ms"] = Median(bare);
  for (size_t i = 0; i < std::size(kWays); ++i) {
    json[kWays[i].name]["gap_ms"] = Median(first[i]);
    json[kWays[i].name]["next_gap_ms"] = Median(second[i]);
  }
  return json;
}

// --- the team -------------------------------------------------------------------------------------------------------

Result<Json> MeasureTeam(const Options& options, const std::vector<std::string>& documents, FlowMode mode) {
  Flow flow = NewFlow(options, "team", kReaders * (options.n_tokens + options.n_output + 64) + 1024);
  std::vector<FlowEdge> reads;
  for (int i = 0; i < kReaders; ++i) {
    const std::string name = fmt::format("reader-{}", i + 1);
    flow.inputs[name] = documents[i];
    AddAgent(flow, name, options.n_output).prompt = fmt::format("{{{{input.{}}}}}", name);
    reads.push_back({.kind = EdgeKind::kReads, .from = name});
  }
  FlowAgent& synthesizer = AddAgent(flow, "synthesizer", options.n_output);
  synthesizer.system = kSystem;
  synthesizer.prompt = kInstruction;
  synthesizer.edges = reads;
  FlowAgent& critic = AddAgent(flow, "critic", options.n_output);
  critic.prompt = kInstruction;
  critic.edges = {{.from = "synthesizer"}};
  FlowAgent& editor = AddAgent(flow, "editor", options.n_output);
  editor.prompt = kInstruction;
  editor.edges = {{.from = "critic"}};

  RunOptions run_options;
  run_options.mode = mode;
  QKV_ASSIGN_OR_RETURN(run_options.kv, ParseCodecPair(options.kv));
  QKV_ASSIGN_OR_RETURN(const ModeResult result, RunFlow(flow, run_options));
  if (!result.ok()) return tl::unexpected(result.failures.front().error);
  Json json{{"wall_ms", result.end_to_end_ms}, {"peak_pss_bytes", result.peak_pss_bytes}};
  for (const HopResult& hop : result.hops) {
    json["agents"][hop.agent] = {{"handoff", HandoffModeName(hop.handoff)},
                                 {"ttft_ms", hop.ttft_ms},
                                 {"tokens_reused", hop.tokens_reused},
                                 {"tokens_recomputed", hop.tokens_recomputed},
                                 {"output_tokens", hop.output_tokens}};
  }
  return json;
}

// The same prompts one after the other in one libllama context.
class PeerTeam {
 public:
  PeerTeam(Peer& peer, const Model& model, const Options& options) : peer_(peer), vocab_(model), options_(options) {}

  Result<Json> Run(const std::vector<std::string>& documents) {
    PeerOptions peer_options;
    peer_options.n_ctx = kReaders * (options_.n_tokens + options_.n_output + 64) + 1024;
    peer_options.n_threads = options_.n_threads;
    QKV_RETURN_IF_ERROR(peer_.Reset(peer_options));
    MemorySampler memory;
    Json json;
    const auto start = Clock::now();
    std::vector<Token> all;
    for (int i = 0; i < kReaders; ++i) {
      QKV_ASSIGN_OR_RETURN(const auto prompt, vocab_.FirstTurn("", documents[i]));
      QKV_ASSIGN_OR_RETURN(const auto context, Turn(fmt::format("reader-{}", i + 1), prompt, json));
      all.insert(all.end(), context.begin(), context.end());
    }
    QKV_ASSIGN_OR_RETURN(std::vector<Token> context, vocab_.SystemTurn(kSystem));
    context.insert(context.end(), all.begin(), all.end());
    for (const char* name : {"synthesizer", "critic", "editor"}) {
      QKV_ASSIGN_OR_RETURN(const auto instruction, vocab_.NextTurn(kInstruction));
      context.insert(context.end(), instruction.begin(), instruction.end());
      QKV_ASSIGN_OR_RETURN(context, Turn(name, context, json));
    }
    json["wall_ms"] = MsSince(start);
    json["peak_pss_bytes"] = memory.Stop().peak_bytes;
    return json;
  }

 private:
  // Reads what is new of `prompt`, generates; returns both.
  Result<std::vector<Token>> Turn(const std::string& name, std::vector<Token> prompt, Json& json) {
    const auto differs = std::mismatch(prompt.begin(), prompt.end() - 1, cached_.begin(), cached_.end());
    const auto shared = static_cast<int>(differs.first - prompt.begin());
    QKV_RETURN_IF_ERROR(peer_.Truncate(shared));
    const auto start = Clock::now();
    QKV_RETURN_IF_ERROR(peer_.Forward(std::span(prompt).subspan(shared)));
    const double ttft_ms = MsSince(start);
    const auto n_read = static_cast<int64_t>(prompt.size()) - shared;
    Sampler sampler(Sampling{});
    int n = 0;
    for (Token token = sampler.Sample(peer_.logits()); n < options_.n_output && !vocab_.IsEndOfGeneration(token);
         token = sampler.Sample(peer_.logits())) {
      prompt.push_back(token);
      if (++n == options_.n_output) break;
      QKV_RETURN_IF_ERROR(peer_.Forward({&token, 1}));
    }
    cached_ = prompt;
    if (n == options_.n_output) cached_.pop_back();  // the last one was not read
    json["agents"][name] = {
        {"ttft_ms", ttft_ms}, {"tokens_reused", shared}, {"tokens_recomputed", n_read}, {"output_tokens", n}};
    return prompt;
  }

  Peer& peer_;
  const Vocab vocab_;
  const Options& options_;
  std::vector<Token> cached_;
};

// How many times as long the synthesizer's first token takes `other`.
void AddSpeedup(Json& json, const char* other) {
  const auto ttft = [&](const char* way) {
    return json["team"][way]["agents"]["synthesizer"]["ttft_ms"].get<double>();
  };
  json["synthesizer_ttft_times"][other] = ttft(other) / ttft("handoff");
}

Result<Json> Measure(Options options) {
  QKV_ASSIGN_OR_RETURN(options.model, FindModel(options.model));
  if (options.n_threads == 0) options.n_threads = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  QKV_ASSIGN_OR_RETURN(const auto model, Model::Load(options.model));
  const Vocab vocab(*model);
  std::vector<std::string> documents;
  for (int i = 0; i < kReaders; ++i) {
    QKV_ASSIGN_OR_RETURN(documents.emplace_back(), Document(vocab, options.n_tokens, i));
  }
  Progress progress("bench");
  const auto note = [&](const char* what) {
    if (::isatty(STDERR_FILENO)) progress.Note(fmt::format("bench: {}", what));
  };
  Json json{{"model", model->params().name},
            {"threads", options.n_threads},
            {"kv", options.kv},
            {"tokens", options.n_tokens}};
  note("gap between producer and reader");
  QKV_ASSIGN_OR_RETURN(json["gap"], MeasureGap(options, model, documents[0]));
  if (options.no_team) return json;
  note("research team, handed over");
  QKV_ASSIGN_OR_RETURN(json["team"]["handoff"], MeasureTeam(options, documents, FlowMode::kHandoff));
  note("research team, as text");
  QKV_ASSIGN_OR_RETURN(json["team"]["text"], MeasureTeam(options, documents, FlowMode::kText));
  AddSpeedup(json, "text");
  if (options.no_peer) return json;
  note("research team, libllama in one process");
  QKV_ASSIGN_OR_RETURN(const auto peer, Peer::Load(options.model));
  QKV_ASSIGN_OR_RETURN(json["team"]["libllama"], PeerTeam(*peer, *model, options).Run(documents));
  AddSpeedup(json, "libllama");
  return json;
}

void PrintTable(const Json& json) {
  const Json& gap = json["gap"];
  const double bare = gap["bare_ms"];
  fmt::print("from a producer's last token to its reader's first, context of {} tokens:\n", json["tokens"].get<int>());
  fmt::print("  {:<28} {:>10} {:>12} {:>18} {:>12}\n", "", "gap", "of the bare", "next reader's gap", "of the bare");
  fmt::print("  {:<28} {:>7.0f} ms {:>12} {:>18} {:>12}\n", "bare prefill, same sequence", bare, "1.00", "-", "-");
  for (const Way& way : kWays) {
    const double ms = gap[way.name]["gap_ms"];
    const double next_ms = gap[way.name]["next_gap_ms"];
    fmt::print("  {:<28} {:>7.0f} ms {:>12.2f} {:>15.0f} ms {:>12.2f}\n", way.name, ms, ms / bare, next_ms,
               next_ms / bare);
  }
  if (!json.contains("team")) return;
  fmt::print("\nresearch team, {} readers of {} tokens:\n", kReaders, json["tokens"].get<int>());
  fmt::print("  {:<12} {:>9} {:>12} {:>18} {:>12} {:>12}\n", "", "wall", "peak memory", "TTFT synthesizer", "critic",
             "editor");
  for (const auto& [name, team] : json["team"].items()) {
    const auto ttft = [&, &team = team](const char* agent) { return team["agents"][agent]["ttft_ms"].get<double>(); };
    fmt::print("  {:<12} {:>7.1f} s {:>8.0f} MiB {:>15.0f} ms {:>9.0f} ms {:>9.0f} ms\n", name,
               team["wall_ms"].get<double>() / 1000, team["peak_pss_bytes"].get<double>() / (1 << 20),
               ttft("synthesizer"), ttft("critic"), ttft("editor"));
  }
  const Json& synthesizer = json["team"]["handoff"]["agents"]["synthesizer"];
  fmt::print("\nthe synthesizer's contexts: {}, {} tokens reused, {} read\n", synthesizer["handoff"].get<std::string>(),
             synthesizer["tokens_reused"].get<int64_t>(), synthesizer["tokens_recomputed"].get<int64_t>());
  for (const auto& [other, times] : json["synthesizer_ttft_times"].items()) {
    fmt::print("its first token takes {:.1f} times as long by {}\n", times.get<double>(), other);
  }
}

}  // namespace

void AddBenchFlow(CLI::App& bench, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = bench.add_subcommand(
      "flow", "a flow of agents handed over, as text, and by libllama in one process; the gap between agents");
  command->add_option("-m,--model", options->model, "GGUF file (default: $QKVSHARE_MODEL, else 'make setup's)")
      ->type_name("FILE");
  command->add_option("-t,--threads", options->n_threads, "threads of all agents together (default: all cores)")
      ->check(CLI::Range(1, 256));
  command->add_option("--kv", options->kv, "codec of the pages")->capture_default_str()->type_name("CODEC");
  command->add_option("--tokens", options->n_tokens, "tokens that each reader reads")
      ->capture_default_str()
      ->check(CLI::Range(64, 1 << 18));
  command->add_option("-n,--predict", options->n_output, "tokens that each agent generates")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  command->add_option("--runs", options->runs, "runs behind each median of the gap")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  command->add_flag("--no-team", options->no_team, "only the gap");
  command->add_flag("--no-peer", options->no_peer, "do not run libllama");
  command->add_flag("--json", options->json, "print JSON");
  command->footer("Example: qkvshare bench flow --tokens 2000 --json");
  command->callback([options, &status] { status = PrintMeasured(Measure(*options), options->json, PrintTable); });
}

}  // namespace qkv::cli
