// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/deep_verify.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "qkv/engine/kv_rows.h"
#include "qkv/engine/quality.h"

namespace qkv {
namespace {

constexpr double kErrorFactor = 4;
// With quantized weights ggml rounds activations to 8 bits, and where pages are cut changes the order of additions: over
// all layers of a small model this came to 1.3e-3 even for f16 pages.
constexpr double kErrorFloor = 5e-3;
constexpr double kKlFactor = 10;
constexpr double kKlFloor = 0.02;
constexpr int kKlSamples = 8;
constexpr CodecPair kExact = {CodecId::kF16, CodecId::kF16};

// Of the layer where it is largest. Not a number counts as infinite.
double WorstLayer(const std::vector<float>& found, const std::vector<float>& expected, int n_layers) {
  double worst = 0;
  const size_t layer_floats = found.size() / static_cast<size_t>(n_layers);
  for (size_t begin = 0; begin < found.size(); begin += layer_floats) {
    double difference = 0, square = 0;
    for (size_t i = begin; i < begin + layer_floats; ++i) {
      difference += std::pow(static_cast<double>(found[i]) - expected[i], 2);
      square += std::pow(static_cast<double>(expected[i]), 2);
    }
    const double error = difference / std::max(square, 1e-30);
    worst = std::isfinite(error) ? std::max(worst, error) : HUGE_VAL;
  }
  return worst;
}

Result<std::unique_ptr<Sequence>> NewSequence(const std::shared_ptr<const Model>& model, const PageCodecs& kv,
                                              int n_ctx, int n_threads) {
  SequenceOptions options;
  options.n_ctx = n_ctx;
  options.n_threads = n_threads;
  options.kv = kv;
  return Sequence::Create(model, options);
}

struct Limits {
  double k = 0, v = 0, kl = 0;
};

// What codec and reading in pieces do to `tokens` with this model. `exact`: the rows of all of them, read at once.
Result<Limits> MeasureLimits(const std::shared_ptr<const Model>& model, std::span<const Token> tokens,
                             const PageCodecs& kv, int n_threads, KvRows* exact) {
  const int n = static_cast<int>(tokens.size());
  const int half = std::max(1, n * 2 / 5);  // no multiple of a page: how pages are cut differs as well
  const size_t n_vocab = static_cast<size_t>(model->params().n_vocab);
  QKV_ASSIGN_OR_RETURN(const auto at_once, NewSequence(model, kExact, n, n_threads));
  at_once->KeepAllLogits(true);
  QKV_RETURN_IF_ERROR(at_once->Forward(tokens));
  QKV_ASSIGN_OR_RETURN(const Context whole, at_once->Publish({}));
  *exact = DecodeRows(whole, 0, n);

  QKV_ASSIGN_OR_RETURN(const auto in_pieces, NewSequence(model, kv, n, n_threads));
  QKV_RETURN_IF_ERROR(in_pieces->Forward(tokens.first(half)));
  QKV_RETURN_IF_ERROR(in_pieces->Publish({}));
  in_pieces->KeepAllLogits(true);
  QKV_RETURN_IF_ERROR(in_pieces->Forward(tokens.subspan(half)));
  QKV_ASSIGN_OR_RETURN(const Context pieces, in_pieces->Publish({}));
  const KvRows found = DecodeRows(pieces, half, n - half, in_pieces->codebooks());
  const KvRows expected = DecodeRows(whole, half, n - half);

  double kl = 0;
  for (int i = half; i < n; ++i) {
    kl += KlDivergence(at_once->all_logits().subspan(n_vocab * static_cast<size_t>(i), n_vocab),
                       in_pieces->all_logits().subspan(n_vocab * static_cast<size_t>(i - half), n_vocab));
  }
  return Limits{.k = kErrorFactor * WorstLayer(found.k, expected.k, found.n_layers) + kErrorFloor,
                .v = kErrorFactor * WorstLayer(found.v, expected.v, found.n_layers) + kErrorFloor,
                .kl = kKlFactor * kl / (n - half) + kKlFloor};
}

DeepCheck Compare(std::string where, const KvRows& found, const KvRows& expected, const Limits& limits) {
  return {.where = std::move(where),
          .k_error = WorstLayer(found.k, expected.k, found.n_layers),
          .k_limit = limits.k,
          .v_error = WorstLayer(found.v, expected.v, found.n_layers),
          .v_limit = limits.v,
          .kl_limit = limits.kl};
}

}  // namespace

Result<std::vector<DeepCheck>> VerifyDeep(const std::shared_ptr<const Model>& model, const Context& context,
                                          int n_tokens, int n_threads) {
  const std::vector<Token> tokens(context.card.token_ids().begin(), context.card.token_ids().end());
  const int total = static_cast<int>(tokens.size());
  const int n = std::min(std::max(n_tokens, 2), total);
  if (n < 2) return Err(Code::kInvalidArgument, "context of {} tokens, expected at least 2", total);
  if (std::ranges::any_of(context.card.spans(), [](const auto& span) { return span.position_offset() != 0; })) {
    return Err(
        Code::kInvalidArgument,
        "context '{}' was spliced: its pages are not what reading its tokens gives, so that only their checksums "
        "can be verified",
        context.card.id());
  }
  if (context.card.mask().has_groups()) {
    return Err(Code::kInvalidArgument,
               "the first {} tokens of context '{}' are grouped by importance, in pages of two codecs or none, so that "
               "only checksums can be verified",
               context.card.mask().groups().n_tokens(), context.card.id());
  }
  const size_t n_vocab = static_cast<size_t>(model->params().n_vocab);

  // Card and pages first: what follows may then be decoded.
  QKV_ASSIGN_OR_RETURN(const auto reader, NewSequence(model, kExact, total, n_threads));
  QKV_RETURN_IF_ERROR(reader->Attach(context));
  QKV_RETURN_IF_ERROR(reader->Forward({}));

  const Segment& first_segment = *context.segments[context.card.spans(0).segment()];
  const PageCodecs kv(first_segment.codecs(context.card.spans(0).first_page()), first_segment.layers());
  KvRows exact;
  QKV_ASSIGN_OR_RETURN(const Limits limits, MeasureLimits(model, std::span(tokens).first(n), kv, n_threads, &exact));
  std::vector<DeepCheck> checks;
  checks.push_back(
      Compare(fmt::format("first {} tokens", n), DecodeRows(context, 0, n, reader->codebooks()), exact, limits));
  if (n == total) return checks;

  // The last tokens, read again over the pages before them.
  QKV_RETURN_IF_ERROR(reader->Attach(context));
  QKV_RETURN_IF_ERROR(reader->Truncate(total - n));
  reader->KeepAllLogits(true);
  QKV_RETURN_IF_ERROR(reader->Forward(std::span(tokens).last(n)));
  const std::vector<float> read_again(reader->all_logits().begin(), reader->all_logits().end());
  QKV_ASSIGN_OR_RETURN(const Context again, reader->Publish({}));
  DeepCheck last = Compare(fmt::format("last {} tokens", n), DecodeRows(context, total - n, n, reader->codebooks()),
                           DecodeRows(again, total - n, n, reader->codebooks()), limits);
  // And their distributions over the pages themselves, at a few of them.
  const int samples = std::min(kKlSamples, n);
  double kl = 0;
  reader->KeepAllLogits(false);
  for (int i = 0; i < samples; ++i) {
    const int at = n - 1 - i * n / samples;  // the last one, and others before it
    QKV_RETURN_IF_ERROR(reader->Attach(context));
    QKV_RETURN_IF_ERROR(reader->Truncate(total - n + at));
    QKV_RETURN_IF_ERROR(reader->Forward({&tokens[static_cast<size_t>(total - n + at)], 1}));
    kl += KlDivergence(std::span(read_again).subspan(n_vocab * static_cast<size_t>(at), n_vocab), reader->logits());
  }
  last.kl = kl / samples;
  checks.push_back(std::move(last));
  return checks;
}

}  // namespace qkv
