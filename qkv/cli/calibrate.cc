// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// calibrate: learns the matrices of `bal` for a model on a text, the codebooks of pq4 and pq2, or how sensitive its layers
// are, and keeps that beside the model.

#include <cmath>
#include <memory>
#include <optional>

#include "qkv/base/temp_dir.h"
#include "qkv/cli/commands.h"
#include "qkv/cli/eval_samples.h"
#include "qkv/cli/options.h"
#include "qkv/cli/output_file.h"
#include "qkv/cli/progress.h"
#include "qkv/engine/calibration.h"
#include "qkv/engine/codebooks.h"
#include "qkv/engine/layer_sensitivity.h"
#include "qkv/engine/peer.h"
#include "qkv/engine/quality_gate.h"

namespace qkv::cli {
namespace {

struct Options {
  ModelOptions model;
  std::string text;
  std::string output;
  bool codebooks = false;
  bool layers = false;
  int tokens = 0;  // 0: as below
  int stretch = 0;

  // Of layers much less text is read: it is read some seventy times for a model of thirty.
  int n_tokens() const { return tokens > 0 ? tokens : layers ? 2048 : 4096; }
  int n_stretch() const { return stretch > 0 ? stretch : layers ? 512 : 1024; }
};

// Tokens that no text has many of: pieces of bytes, which is what a vocabulary makes of what is not text in its languages.
double ShareOfBytes(const Vocab& vocab, std::span<const Token> tokens) {
  size_t bytes = 0;
  for (const Token token : tokens) {
    const std::string piece = vocab.Piece(token);
    const bool control = !piece.empty() && static_cast<unsigned char>(piece[0]) < 0x20 && piece[0] != '\n' &&
                         piece[0] != '\r' && piece[0] != '\t';
    bytes += control || (piece.size() == 1 && static_cast<unsigned char>(piece[0]) >= 0x80);
  }
  return static_cast<double>(bytes) / static_cast<double>(tokens.size());
}

// An eighth of each stretch is scored, the others are handed over. On fp32 weights: with packed ones rounding of activations
// drowns what a single layer does.
Status RunLayers(const Options& options, const Model& given, std::span<const Token> tokens, const std::string& path) {
  const auto n_tokens = static_cast<int>(tokens.size());
  const int stretch = std::min({options.n_stretch(), given.params().n_ctx_train, n_tokens});
  constexpr int kFewest = 16;
  if (stretch < kFewest) {
    return Err(Code::kInvalidArgument, "stretches of {} tokens, with --layers at least {} are needed", stretch,
               kFewest);
  }
  const int score = stretch / 8;
  const EvalShape shape{n_tokens / stretch, stretch - score - 1, score};
  QKV_ASSIGN_OR_RETURN(const std::vector<EvalSample> samples, TextSamples(tokens, shape, options.text));
  std::vector<std::vector<Token>> stretches;
  for (const EvalSample& sample : samples) stretches.push_back(sample.tokens);
  QKV_ASSIGN_OR_RETURN(const TempDir temporary, TempDir::Create());
  const std::string copy = temporary.path() + "/f32.gguf";
  QKV_RETURN_IF_ERROR(WriteRequantizedModel(given.path(), "f32", copy));
  QKV_ASSIGN_OR_RETURN(const auto model, Model::Load(copy));
  Progress progress("measuring layers");
  QKV_ASSIGN_OR_RETURN(const LayerSensitivity found,
                       MeasureLayers(model, stretches, shape.prefix, ThreadsOf(options.model),
                                     [&](size_t done, size_t total) { progress.Update(done, total); }));
  QKV_RETURN_IF_ERROR(WriteOutputFile(path, ToJson(found, given.identity().weights_digest())));
  fmt::print("{}: {} tokens, {} layers\n", path, found.tokens, found.k.layer.size());
  return {};
}

// How far `kv` is from exact pages on the gate's text; nothing for a model that makes too little of that.
Result<std::optional<QualityVerdict>> Try(const std::shared_ptr<const Model>& model, CodecPair kv,
                                          QualityGateOptions options, int n_threads) {
  Progress progress("trying");
  options.n_threads = n_threads;
  options.on_progress = [&](size_t done, size_t total) { progress.Update(done, total); };
  auto verdict = QualityGate(model, std::move(options)).Check(kv);
  if (!verdict && verdict.error().code == Code::kInvalidArgument) return std::nullopt;
  if (!verdict) return tl::unexpected(std::move(verdict).error());
  return *verdict;
}

// A text unlike what the model will read makes matrices that are worse than none, and codebooks that fit nothing: such
// are not kept. `kv`, behind what was made, may have `most_worse` times the KL of plain 4-bit pages, and the noise on
// top, for few tokens are read. Returns what is to be said of good ones.
Result<std::string> Tried(const Options& options, const std::shared_ptr<const Model>& model, CodecPair kv,
                          const QualityGateOptions& made, double most_worse) {
  constexpr CodecPair kPlain = {CodecId::k4, CodecId::k4};
  const int n_threads = ThreadsOf(options.model);
  QKV_ASSIGN_OR_RETURN(const auto with, Try(model, kv, made, n_threads));
  QKV_ASSIGN_OR_RETURN(const auto plain, Try(model, kPlain, {}, n_threads));
  if (!with || !plain) return "";
  const std::string figures =
      fmt::format("mean KL over another text {:.2g}, of plain 4 bits {:.2g}", with->kl, plain->kl);
  if (std::isfinite(with->kl) && with->kl <= most_worse * plain->kl + with->noise_kl) return "; " + figures;
  return Err(
      Code::kInvalidArgument,
      "what was learned from '{}' hurts this model, and is not kept ({}): give it text like what the model will read",
      options.text, figures);
}

Status Run(const Options& options) {
  constexpr double kMostBytes = 0.2;
  QKV_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(options.text));
  if (text.find('\0') != std::string::npos) {
    return Err(Code::kInvalidArgument, "'{}' has zero bytes: it is not a text", options.text);
  }
  QKV_ASSIGN_OR_RETURN(const auto model, LoadModel(options.model));
  const std::string path = !options.output.empty() ? options.output
                           : options.codebooks     ? CodebooksPath(*model)
                           : options.layers        ? LayerSensitivityPath(*model)
                                                   : Calibration::PathFor(*model);
  QKV_RETURN_IF_ERROR(CheckOutputFile(path, options.output.empty() ? "calibrate" : "--output"));
  const Vocab vocab(*model);
  QKV_ASSIGN_OR_RETURN(auto tokens, vocab.Tokenize(text, false, false));
  const size_t needed = size_t{4} * model->params().head_dim + 1;
  if (tokens.size() < needed) {
    return Err(Code::kInvalidArgument, "'{}' has {} tokens, at least {} are needed; some thousands are better",
               options.text, tokens.size(), needed);
  }
  if (const double share = ShareOfBytes(vocab, tokens); share > kMostBytes) {
    return Err(
        Code::kInvalidArgument,
        "{:.0f} % of the tokens of '{}' are single bytes to this model: it is not a text in a script that it knows",
        100 * share, options.text);
  }
  tokens.resize(std::min<size_t>(tokens.size(), static_cast<size_t>(options.n_tokens())));
  if (options.layers) return RunLayers(options, *model, tokens, path);
  Progress progress(options.codebooks ? "learning" : "calibrating");
  const auto on_progress = [&](size_t done, size_t total) { progress.Update(done, total); };
  const int stretch = std::min(options.n_stretch(), model->params().n_ctx_train);
  if (options.codebooks) {
    QKV_ASSIGN_OR_RETURN(PqCodebooks learned,
                         LearnCodebooks(model, tokens, stretch, ThreadsOf(options.model), on_progress));
    const auto codebooks = std::make_shared<const PqCodebooks>(std::move(learned));
    QKV_ASSIGN_OR_RETURN(const std::string tried,
                         Tried(options, model, {CodecId::kPq4, CodecId::kPq4}, {.codebooks = codebooks}, 2));
    QKV_RETURN_IF_ERROR(WriteCodebooks(*codebooks, path));
    fmt::print("{}: {} tokens, {} layers x {} heads, codebooks {}{}\n", path, tokens.size(),
               codebooks->shape().n_layers, codebooks->shape().n_kv_heads, codebooks->digest(), tried);
    return {};
  }
  QKV_ASSIGN_OR_RETURN(Calibration learned, Calibrate(model, tokens, stretch, ThreadsOf(options.model), on_progress));
  const auto calibration = std::make_shared<const Calibration>(std::move(learned));
  QKV_ASSIGN_OR_RETURN(const std::string tried,
                       Tried(options, model, {CodecId::k4, CodecId::k4}, {.calibration = calibration}, 1.25));
  QKV_RETURN_IF_ERROR(calibration->Write(*model, path));
  fmt::print("{}: {} tokens, {} layers x {} heads{}\n", path, tokens.size(), calibration->geometry().n_layers,
             calibration->geometry().n_kv_heads, tried);
  return {};
}

}  // namespace

void AddCalibrate(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "calibrate",
      "learn, on a text, which directions of a model's keys matter to its queries (--bal), codebooks for its keys and "
      "values (--kv pq4), or which of its layers matter (--kv layers:BITS)");
  command
      ->add_option(
          "-m,--model", options->model.model,
          "GGUF file of a Llama-family model (default: $QKVSHARE_MODEL, else the one that 'make setup' fetched)")
      ->type_name("FILE");
  command->add_option("--text", options->text, "text like what the model will read")->required()->type_name("FILE");
  command->add_option("-o,--output", options->output, "where to (default: beside the model, under its weights' digest)")
      ->type_name("FILE")
      ->check(CLI::Validator(
          [](const std::string& path) { return path.empty() ? std::string("no file is named") : std::string(); }, ""));
  command
      ->add_option("--tokens", options->tokens, "tokens of the text that are read (default: 4096; with --layers 2048)")
      ->check(CLI::Range(1, 1 << 24));
  command
      ->add_option("--stretch", options->stretch, "tokens that are read in one go (default: 1024; with --layers 512)")
      ->check(CLI::Range(2, 1 << 20));
  auto* codebooks =
      command->add_flag("--codebooks", options->codebooks, "instead: learn the codebooks of the codecs pq4 and pq2");
  command
      ->add_flag("--layers", options->layers,
                 "instead: measure what coarse keys or values of each layer do to the model's answers, for --kv "
                 "layers:BITS; takes two short runs per layer and stretch, and 4 bytes of temporary disk per weight")
      ->excludes(codebooks);
  command->add_option("-t,--threads", options->model.n_threads, "threads (default: all cores)")
      ->check(CLI::Range(1, 512));
  command->footer(
      "Examples: qkvshare calibrate --text notes.txt\n          qkvshare calibrate --text notes.txt --codebooks");
  command->callback([options, &status] {
    const Status done = Run(*options);
    status = done ? 0 : Fail(done.error());
  });
}

}  // namespace qkv::cli
