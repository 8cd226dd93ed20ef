// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// What a codec does to the answers: prefixes of a text are read, published in the codec, and the next tokens are read
// over the published pages. Their distributions are compared with those over f16 pages of the same prefix (mean and p99
// of KL(f16 || codec), share of equal top-1), and the perplexity of the text's own next tokens with f16's. Prints the
// table of docs/EVALUATION.md.
//
// With quantized weights ggml rounds activations to 8 bits, and any change at all comes out as noise of the size of i8's
// own error. --exact-weights first has libllama write the weights as fp32, so that the codec is all that differs.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "qkv/engine/peer.h"
#include "qkv/engine/sequence.h"

namespace qkv {
namespace {

struct Options {
  std::string model, text;
  bool exact_weights = false;
  int samples = 12, prefix = 1024, scored = 128, threads = 2;
  std::vector<std::string> kv = {"i8", "i8-channel", "i8-tensor", "k=i8,v=i4", "i4z", "i4"};
};

struct Quality {
  std::vector<double> kl;
  size_t same_top = 0;
  double log_ratio = 0;  // sum of log p_f16(next) - log p(next)
};

// log softmax of a row, in place of the logits.
std::vector<double> LogProbabilities(std::span<const float> logits) {
  const double maximum = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - maximum);
  std::vector<double> out(logits.begin(), logits.end());
  for (double& x : out) x -= maximum + std::log(sum);
  return out;
}

Result<std::vector<float>> LogitsOver(const std::shared_ptr<const Model>& model, const Options& options, CodecPair kv,
                                      std::span<const Token> tokens) {
  SequenceOptions sequence_options;
  sequence_options.n_ctx = options.prefix + options.scored;
  sequence_options.n_threads = options.threads;
  sequence_options.kv = kv;
  QKV_ASSIGN_OR_RETURN(const auto sequence, Sequence::Create(model, sequence_options));
  QKV_RETURN_IF_ERROR(sequence->Forward(tokens.first(options.prefix)));
  QKV_RETURN_IF_ERROR(sequence->Publish({}));
  sequence->KeepAllLogits(true);
  QKV_RETURN_IF_ERROR(sequence->Forward(tokens.subspan(options.prefix, options.scored)));
  return std::vector<float>(sequence->all_logits().begin(), sequence->all_logits().end());
}

void Score(const std::vector<float>& reference, const std::vector<float>& logits, std::span<const Token> scored,
           size_t n_vocab, Quality& quality) {
  for (size_t i = 0; i < scored.size(); ++i) {
    const auto p = LogProbabilities(std::span(reference).subspan(i * n_vocab, n_vocab));
    const auto q = LogProbabilities(std::span(logits).subspan(i * n_vocab, n_vocab));
    double kl = 0;
    for (size_t v = 0; v < n_vocab; ++v) kl += std::exp(p[v]) * (p[v] - q[v]);
    quality.kl.push_back(kl);
    quality.same_top +=
        std::max_element(p.begin(), p.end()) - p.begin() == std::max_element(q.begin(), q.end()) - q.begin();
    if (i + 1 < scored.size()) quality.log_ratio += p[scored[i + 1]] - q[scored[i + 1]];
  }
}

Result<std::shared_ptr<const Model>> LoadModel(const Options& options) {
  if (!options.exact_weights) return Model::Load(options.model);
  const std::string path =
      fmt::format("{}/qkv-quality-{}.gguf", std::filesystem::temp_directory_path().string(), ::getpid());
  QKV_RETURN_IF_ERROR(WriteRequantizedModel(options.model, "f32", path));
  auto model = Model::Load(path);
  std::remove(path.c_str());  // it stays mapped
  return model;
}

Status Run(const Options& options) {
  QKV_ASSIGN_OR_RETURN(const auto model, LoadModel(options));
  std::ifstream in(options.text, std::ios::binary);
  if (!in) return ErrnoError(fmt::format("'{}'", options.text));
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  QKV_ASSIGN_OR_RETURN(const std::vector<Token> all, Vocab(*model).Tokenize(text, false, false));
  const size_t length = options.prefix + options.scored;
  if (all.size() < length * options.samples) {
    return Err(Code::kInvalidArgument, "'{}' has {} tokens, {} samples need {}", options.text, all.size(),
               options.samples, length * options.samples);
  }
  std::vector<Quality> results(options.kv.size());
  for (int sample = 0; sample < options.samples; ++sample) {
    const auto tokens = std::span(all).subspan(all.size() / options.samples * sample, length);
    QKV_ASSIGN_OR_RETURN(const auto reference, LogitsOver(model, options, {CodecId::kF16, CodecId::kF16}, tokens));
    for (size_t i = 0; i < options.kv.size(); ++i) {
      QKV_ASSIGN_OR_RETURN(const CodecPair kv, ParseCodecPair(options.kv[i]));
      QKV_ASSIGN_OR_RETURN(const auto logits, LogitsOver(model, options, kv, tokens));
      Score(reference, logits, tokens.subspan(options.prefix), model->params().n_vocab, results[i]);
    }
  }
  fmt::print("| codec | bits per value | mean KL | p99 KL | top-1 | perplexity |\n|---|---:|---:|---:|---:|---:|\n");
  for (size_t i = 0; i < options.kv.size(); ++i) {
    const CodecPair kv = *ParseCodecPair(options.kv[i]);
    Quality& q = results[i];
    std::sort(q.kl.begin(), q.kl.end());
    double sum = 0;
    for (const double kl : q.kl) sum += kl;
    const int head_dim = model->params().head_dim;
    const double scored = static_cast<double>(options.samples) * (options.scored - 1);
    fmt::print("| `{}` | {:.2f} | {:.2e} | {:.2e} | {:.1f} % | {:+.2f} % |\n", options.kv[i],
               (BitsPerValue(CodecOf(kv.k), head_dim) + BitsPerValue(CodecOf(kv.v), head_dim)) / 2,
               sum / static_cast<double>(q.kl.size()),
               q.kl[static_cast<size_t>(0.99 * static_cast<double>(q.kl.size()))],
               100.0 * static_cast<double>(q.same_top) / static_cast<double>(q.kl.size()),
               100.0 * std::expm1(q.log_ratio / scored));
  }
  return {};
}

}  // namespace
}  // namespace qkv

int main(int argc, char** argv) {
  qkv::Options options;
  CLI::App app{"Quality of the KV codecs on a text, against f16 pages."};
  app.add_option("-m,--model", options.model, "GGUF file")->required();
  app.add_option("text", options.text, "a text file")->required();
  app.add_flag("--exact-weights", options.exact_weights, "with the weights as fp32");
  app.add_option("--samples", options.samples)->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--prefix", options.prefix, "tokens that are handed over")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--scored", options.scored, "tokens read over them")
      ->capture_default_str()
      ->check(CLI::Range(2, 1 << 16));
  app.add_option("-t,--threads", options.threads)->capture_default_str()->check(CLI::Range(1, 512));
  app.add_option("--kv", options.kv, "codecs");
  app.footer("Example: build/bench/quality -m MODEL.gguf wikitext-2-test.txt");
  CLI11_PARSE(app, argc, argv);
  const qkv::Status done = qkv::Run(options);
  if (!done) fmt::print(stderr, "quality: {}\n", done.error().message);
  return done ? 0 : qkv::ExitStatus(done.error().code);
}
