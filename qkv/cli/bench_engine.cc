// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// bench engine: prefill and decode behind contexts of some depths, ours and libllama in turn on the same GGUF with the same
// threads, in one call. bench model: writes the models with random weights that --shape uses.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>

#include "qkv/base/fd.h"
#include "qkv/cli/bench.h"
#include "qkv/cli/eval_samples.h"
#include "qkv/cli/options.h"
#include "qkv/cli/progress.h"
#include "qkv/engine/peer.h"
#include "qkv/engine/shape_model.h"
#include "qkv/engine/vocab.h"

namespace qkv::cli {
namespace {

struct Options {
  ModelOptions model;
  std::string depths = "0,1024,8192";
  std::vector<std::string> kv = {"i8", "i4"};
  std::string shape;
  std::string weights;
  std::string peer = "none";
  std::string text;
  int n_read = 1024;
  int n_decode = 32;
  int runs = 5;
  bool json = false;
};

constexpr int kPrefillEmpty = 512;  // tokens read when nothing is before them
constexpr int kPrefillDeep = 64;

// One engine with a cache of some depth, to which every run adds and takes back.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual Status Forward(std::span<const Token> tokens) = 0;
  virtual Status Truncate(int n_tokens) = 0;
  virtual KeyCounts keys() const { return {}; }  // so far

  std::string name;
  std::vector<double> prefill_tps, decode_tps;
  KeyCounts decode_keys;  // of all runs
};

class Ours : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> Create(const ModelOptions& options, std::shared_ptr<const Model> model,
                                                int depth, std::span<const Token> read) {
    auto engine = std::make_unique<Ours>();
    engine->name = options.kv;
    QKV_ASSIGN_OR_RETURN(engine->sequence_, NewSequence(options, std::move(model)));
    if (depth > 0) {
      QKV_ASSIGN_OR_RETURN(const Context context, DeepContext(*engine->sequence_, depth, read));
      QKV_RETURN_IF_ERROR(engine->sequence_->Attach(context));
    }
    return engine;
  }
  Status Forward(std::span<const Token> tokens) override { return sequence_->Forward(tokens); }
  Status Truncate(int n_tokens) override { return sequence_->Truncate(n_tokens); }
  KeyCounts keys() const override { return {sequence_->stats().keys_with_refinement, sequence_->stats().keys_refined}; }

 private:
  std::unique_ptr<Sequence> sequence_;
};

class Theirs : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> Create(const Peer& model, const PeerOptions& options,
                                                std::span<const Token> tokens, int depth) {
    auto engine = std::make_unique<Theirs>();
    engine->name =
        fmt::format("{}, {}", options.cache_type, options.flash_attention ? "flash attention" : "no flash attention");
    engine->peer_ = model.Twin();
    QKV_RETURN_IF_ERROR(engine->peer_->Reset(options));
    if (depth > 0) QKV_RETURN_IF_ERROR(engine->peer_->FillWithCopies(tokens, depth));
    return engine;
  }
  Status Forward(std::span<const Token> tokens) override { return peer_->Forward(tokens); }
  Status Truncate(int n_tokens) override { return peer_->Truncate(n_tokens); }

 private:
  std::unique_ptr<Peer> peer_;
};

Status RunOnce(Engine& engine, std::span<const Token> prompt, int depth, int n_decode) {
  // Threads of the engine that ran before may still spin for a while.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  auto start = Clock::now();
  QKV_RETURN_IF_ERROR(engine.Forward(prompt));
  engine.prefill_tps.push_back(static_cast<double>(prompt.size()) / MsSince(start) * 1000);
  // One token at least stays, as nothing can be decoded behind nothing; the first decode is not counted.
  QKV_RETURN_IF_ERROR(engine.Truncate(depth + 1));
  QKV_RETURN_IF_ERROR(engine.Forward(prompt.first(1)));
  const KeyCounts before = engine.keys();
  start = Clock::now();
  for (int t = 1; t <= n_decode; ++t) QKV_RETURN_IF_ERROR(engine.Forward(prompt.subspan(t % prompt.size(), 1)));
  engine.decode_tps.push_back(n_decode / MsSince(start) * 1000);
  const KeyCounts after = engine.keys();
  engine.decode_keys.seen += after.seen - before.seen;
  engine.decode_keys.refined += after.refined - before.refined;
  return engine.Truncate(depth);
}

// Of paired runs, so that a slow spell of the machine hits both sides.
double MedianRatio(const std::vector<double>& ours, const std::vector<double>& theirs) {
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / theirs[i]);
  return Median(ratios);
}

std::string_view SameWidth(std::string_view kv) {
  return kv.starts_with("i8") ? "q8_0" : kv.starts_with("i4") ? "q4_0" : kv == "f16" ? "f16" : "";
}

const Engine* Best(const std::vector<std::unique_ptr<Engine>>& peers, std::string_view type,
                   std::vector<double> Engine::*tps) {
  const Engine* best = nullptr;
  for (const auto& peer : peers) {
    if (!peer->name.starts_with(type)) continue;
    if (best == nullptr || Median((*peer).*tps) > Median((*best).*tps)) best = peer.get();
  }
  return best;
}

// What is in a context, and what is read behind it.
struct Tokens {
  std::vector<Token> context, prompt;
};
Result<Tokens> TokensOf(const Options& options, const Model& model) {
  const size_t n_read = static_cast<size_t>(options.n_read);
  if (options.text.empty()) return Tokens{SomeTokens(model, n_read, 1), SomeTokens(model, kPrefillEmpty, 2)};
  QKV_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(options.text));
  QKV_ASSIGN_OR_RETURN(const auto tokens, Vocab(model).Tokenize(text, false, false));
  if (tokens.size() < n_read + kPrefillEmpty) {
    return Err(Code::kInvalidArgument, "'{}' has {} tokens, expected at least {} (--read and {} behind)", options.text,
               tokens.size(), n_read + kPrefillEmpty, kPrefillEmpty);
  }
  const auto behind = tokens.begin() + options.n_read;
  return Tokens{{tokens.begin(), behind}, {behind, behind + kPrefillEmpty}};
}

Result<Json> MeasureDepth(const Options& options, const std::shared_ptr<const Model>& model, const Peer* peer,
                          const Tokens& tokens, int depth, Progress& progress) {
  const int n_prefill = depth == 0 ? kPrefillEmpty : kPrefillDeep;
  const auto prompt = std::span(tokens.prompt).first(static_cast<size_t>(n_prefill));
  const int n_ctx = depth + std::max(n_prefill, options.n_decode) + 64;
  std::vector<std::unique_ptr<Engine>> ours, theirs;
  for (const std::string& kv : options.kv) {
    ModelOptions engine_options = options.model;
    engine_options.kv = kv;
    engine_options.n_ctx = n_ctx;
    ours.emplace_back();
    QKV_ASSIGN_OR_RETURN(ours.back(), Ours::Create(engine_options, model, depth, tokens.context));
  }
  if (peer != nullptr) {
    const std::pair<const char*, bool> configs[] = {{"f16", false}, {"f16", true}, {"q8_0", true}, {"q4_0", true}};
    for (const auto& [type, flash] : configs) {
      PeerOptions peer_options;
      peer_options.n_ctx = n_ctx + options.n_read;  // copies come whole before they are cut
      peer_options.n_threads = options.model.n_threads;
      peer_options.n_batch = options.model.n_batch;
      peer_options.flash_attention = flash;
      peer_options.cache_type = type;
      theirs.emplace_back();
      QKV_ASSIGN_OR_RETURN(theirs.back(), Theirs::Create(*peer, peer_options, tokens.context, depth));
    }
  }
  for (int run = 0; run < options.runs; ++run) {
    for (auto* engines : {&ours, &theirs}) {
      for (auto& engine : *engines) QKV_RETURN_IF_ERROR(RunOnce(*engine, prompt, depth, options.n_decode));
    }
    progress.Update(run + 1, options.runs);
  }

  Json rows = Json::array();
  for (const auto& engine : ours) {
    Json row;
    row["depth"] = depth;
    row["kv"] = engine->name;
    row["prefill_tokens"] = n_prefill;
    row["decode_tokens"] = options.n_decode;
    row["prefill_tps"] = Median(engine->prefill_tps);
    row["decode_tps"] = Median(engine->decode_tps);
    const KeyCounts& keys = engine->decode_keys;
    row["decode_refined_share"] =
        keys.seen == 0 ? Json() : Json(static_cast<double>(keys.refined) / static_cast<double>(keys.seen));
    const auto compare = [&](std::string_view phase, std::vector<double> Engine::*tps, std::string_view label,
                             std::string_view type) {
      const Engine* other = peer == nullptr ? nullptr : Best(theirs, type, tps);
      const std::string of = fmt::format("peer_{}_{}_", label, phase);
      row[of + "tps"] = other == nullptr ? Json() : Json(Median((*other).*tps));
      row[of + "config"] = other == nullptr ? Json() : Json(other->name);
      row[fmt::format("ratio_{}_{}", phase, label)] =
          other == nullptr ? Json() : Json(MedianRatio((*engine).*tps, (*other).*tps));
    };
    for (const auto& [label, type] :
         {std::pair<std::string_view, std::string_view>{"best", ""}, {"same_width", SameWidth(engine->name)}}) {
      compare("prefill", &Engine::prefill_tps, label, type);
      compare("decode", &Engine::decode_tps, label, type);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

// "i8,i4" is two codecs, "k=i8,v=i4" one pair.
std::vector<std::string> SplitNames(const std::vector<std::string>& given) {
  std::vector<std::string> names;
  for (const std::string& text : given) {
    std::istringstream parts(text);
    const bool is_pair = text.find('=') != std::string::npos;
    for (std::string part; std::getline(parts, part, is_pair ? '\n' : ',');) names.push_back(part);
  }
  return names;
}

// A model file in memory that libraries can open by name; gone with the process.
struct MemoryFile {
  Fd fd;
  std::string path;

  static Result<MemoryFile> Create(const std::string& name) {
    QKV_ASSIGN_OR_RETURN(Fd fd, CreateMemfd(name));
    std::string path = fmt::format("/proc/self/fd/{}", fd.get());
    return MemoryFile{std::move(fd), std::move(path)};
  }
};

Result<Json> Measure(Options options) {
  QKV_ASSIGN_OR_RETURN(const std::vector<int> depths, ParseIntList(options.depths, "--depth", 0, 1 << 20));
  options.kv = SplitNames(options.kv);
  for (const std::string& kv : options.kv) {
    ModelOptions named;
    named.kv = kv;
    QKV_RETURN_IF_ERROR(ChooseCodecs(named, nullptr));
  }
  if (options.model.n_threads == 0) options.model.n_threads = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  Progress progress("bench");
  MemoryFile file;
  if (!options.shape.empty()) {
    QKV_ASSIGN_OR_RETURN(const ModelShape shape, FindModelShape(options.shape));
    QKV_ASSIGN_OR_RETURN(file, MemoryFile::Create("qkvshare-model"));
    if (::isatty(STDERR_FILENO)) progress.Note("bench: writing random weights");
    QKV_RETURN_IF_ERROR(WriteShapeModel(shape, file.path));
    options.model.model = file.path;
  } else {
    QKV_ASSIGN_OR_RETURN(options.model.model, FindModel(options.model.model));
    if (!options.weights.empty()) {
      QKV_ASSIGN_OR_RETURN(file, MemoryFile::Create("qkvshare-model"));
      QKV_RETURN_IF_ERROR(WriteRequantizedModel(options.model.model, options.weights, file.path));
      options.model.model = file.path;
    }
  }
  QKV_ASSIGN_OR_RETURN(const auto model, Model::Load(options.model.model));
  std::unique_ptr<Peer> peer;
  if (options.peer == "llama.cpp") {
    QKV_ASSIGN_OR_RETURN(peer, Peer::Load(options.model.model));
  }

  QKV_ASSIGN_OR_RETURN(const Tokens tokens, TokensOf(options, *model));
  Json json;
  json["model"] = model->params().name;
  json["text"] = options.text.empty() ? Json() : Json(options.text);
  json["weights"] = options.weights.empty() ? Json() : Json(options.weights);
  json["threads"] = options.model.n_threads;
  json["runs"] = options.runs;
  json["read_tokens"] = options.n_read;
  json["results"] = Json::array();
  for (const int depth : depths) {
    if (::isatty(STDERR_FILENO)) progress.Note(fmt::format("bench: depth {}", depth));
    QKV_ASSIGN_OR_RETURN(Json rows, MeasureDepth(options, model, peer.get(), tokens, depth, progress));
    for (Json& row : rows) json["results"].push_back(std::move(row));
  }
  return json;
}

void PrintTable(const Json& json) {
  fmt::print("{}{}, {} threads; depth beyond {} tokens is filled with copies; medians of {} runs, tokens per second\n",
             json["model"].get<std::string>(),
             json["weights"].is_null() ? std::string() : " as " + json["weights"].get<std::string>(),
             json["threads"].get<int>(), json["read_tokens"].get<int>(), json["runs"].get<int>());
  fmt::print("{:>7} {:<12} {:>9} {:>9} {:>9} {:>8} {:>9} {:>9} {:>8} {:>8} {:>8}  {}\n", "DEPTH", "KV", "PREFILL",
             "BEST", "SAME", "DECODE", "BEST", "SAME", "x BEST", "x SAME", "REFINED", "libllama's best for decode");
  const auto number = [](const Json& value, const char* format) {
    return value.is_null() ? std::string("-") : fmt::format(fmt::runtime(format), value.get<double>());
  };
  for (const Json& row : json["results"]) {
    fmt::print("{:>7} {:<12} {:>9} {:>9} {:>9} {:>8} {:>9} {:>9} {:>8} {:>8} {:>8}  {}\n", row["depth"].get<int>(),
               row["kv"].get<std::string>(), number(row["prefill_tps"], "{:.0f}"),
               number(row["ratio_prefill_best"], "{:.2f}x"), number(row["ratio_prefill_same_width"], "{:.2f}x"),
               number(row["decode_tps"], "{:.1f}"), number(row["peer_best_decode_tps"], "{:.1f}"),
               number(row["peer_same_width_decode_tps"], "{:.1f}"), number(row["ratio_decode_best"], "{:.2f}x"),
               number(row["ratio_decode_same_width"], "{:.2f}x"), number(row["decode_refined_share"], "{:.3f}"),
               row["peer_best_decode_config"].is_null() ? "-" : row["peer_best_decode_config"].get<std::string>());
  }
}

std::string ShapeNames() {
  std::string names;
  for (const ModelShape& shape : ModelShapes()) names.append(names.empty() ? "" : ", ").append(shape.name);
  return names;
}

}  // namespace

void AddBenchEngine(CLI::App& bench, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      bench.add_subcommand("engine", "prefill and decode behind contexts of some depths, beside libllama");
  command->add_option("--depth", options->depths, "tokens in the context before the measured ones")
      ->capture_default_str()
      ->type_name("N,N,…");
  options->model.AddTo(*command);
  command->remove_option(command->get_option("--kv"));
  command
      ->add_option("--kv", options->kv, "codecs of the pages: i8,i4, or a pair k=i8,v=i4; may be given several times")
      ->capture_default_str()
      ->type_name("CODEC");
  command->add_option("--shape", options->shape, "instead of a model, random weights of this shape: " + ShapeNames());
  command->add_option("--weights", options->weights, "requantize the weights first: f32, q4_0, q4_1, q8_0");
  command->add_option("--peer", options->peer, "measured in turn with ours")
      ->capture_default_str()
      ->check(CLI::IsMember({"none", "llama.cpp"}));
  command->add_option("--text", options->text, "read this file's tokens instead of random ones")->type_name("FILE");
  command
      ->add_option("--read", options->n_read,
                   "tokens really read; deeper contexts are filled with copies of their cache")
      ->capture_default_str()
      ->check(CLI::Range(32, 1 << 20));
  command->add_option("--decode", options->n_decode, "tokens decoded per run")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  command->add_option("--runs", options->runs, "runs behind each median")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  command->add_flag("--json", options->json, "print JSON");
  command->footer("Example: qkvshare bench engine --depth 0,8192 --kv i8 --kv i4 --peer llama.cpp");
  command->callback([options, &status] { status = PrintMeasured(Measure(*options), options->json, PrintTable); });
}

void AddBenchModel(CLI::App& bench, int& status) {
  struct ModelFile {
    std::string shape, out;
  };
  auto options = std::make_shared<ModelFile>();
  CLI::App* command = bench.add_subcommand("model", "write a GGUF of a known shape with random weights");
  command->add_option("--shape", options->shape, ShapeNames())->required();
  command->add_option("-o,--output", options->out, "the file")->required()->type_name("FILE");
  command->footer("Example: qkvshare bench model --shape llama-2-7b -o 7b.gguf");
  command->callback([options, &status] {
    const auto write = [&]() -> Status {
      QKV_ASSIGN_OR_RETURN(const ModelShape shape, FindModelShape(options->shape));
      if (std::filesystem::exists(options->out)) {
        return Err(Code::kInvalidArgument, "'{}' exists; name another file or remove it", options->out);
      }
      return WriteShapeModel(shape, options->out);
    };
    if (const Status written = write(); !written) status = Fail(written.error());
  });
}

}  // namespace qkv::cli
