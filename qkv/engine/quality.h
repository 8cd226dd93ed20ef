// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// How far a model's next-token distributions over quantized pages are from those over exact ones: KL divergence, equal
// first choices, perplexity, and how sure those figures are. Pure; any thread.
//
// Tokens of one stretch of text are alike, and stretches differ by a factor of two or three. So standard errors are
// taken over the means of samples (stretches), and codecs are compared sample by sample (paired).

#include <cstddef>
#include <span>
#include <vector>

#include "qkv/engine/vocab.h"

namespace qkv {

struct TokenScore {
  double kl = 0;          // KL(reference || candidate), nats; infinity when a logit of the candidate is not a number
  bool same_top = false;  // both have the same most probable token
  bool right = false;     // the candidate's is the token that came
  bool right_ref = false;
  double nll = 0;  // -ln p(the token that came)
  double nll_ref = 0;
};

// What a sample's tokens add up to.
struct SampleScore {
  std::vector<double> kl;  // per token
  size_t same_top = 0;
  size_t right = 0;
  size_t right_ref = 0;
  double nll = 0;  // sums
  double nll_ref = 0;

  void Add(const TokenScore& token);
  size_t n() const { return kl.size(); }
  double kl_mean() const;  // n() > 0
};

// KL(p || q) of the distributions of two rows of logits of equal length, nats; infinity when something is not a number.
//
// With d = q - p, KL = ln E_p[e^d] - E_p[d] = ln(1 + E_p[e^x - 1 - x]) for x = d - E_p[d]: every term is positive, so
// that a KL of 1e-9 is as precise as one of 1. Subtracting log-probabilities would lose it.
double KlDivergence(std::span<const float> p, std::span<const float> q);

// The exact run's logits, kept to score one codec after the other.
class ReferenceLogits {
 public:
  // logits: [rows][n_vocab].
  ReferenceLogits(std::vector<float> logits, size_t n_vocab);
  size_t rows() const { return rows_.size(); }

  // candidate: [n_vocab], for the same place as row `row`. `next`: the token that came there, 0..n_vocab-1.
  TokenScore Score(size_t row, std::span<const float> candidate, Token next) const;
  // All rows: candidate [rows][n_vocab], next [rows].
  SampleScore ScoreAll(std::span<const float> candidate, std::span<const Token> next) const;

 private:
  struct Row {
    double log_sum = 0;  // of e^logit
    size_t top = 0;
  };
  std::vector<float> logits_;
  size_t n_vocab_;
  std::vector<Row> rows_;
};

struct Estimate {
  double value = 0;
  double se = 0;  // standard error over samples; 0 when there is only one
};

struct QualitySummary {
  size_t samples = 0;
  size_t tokens = 0;
  Estimate kl;  // mean over tokens
  double kl_p99 = 0;
  Estimate top1;    // share of tokens, 0..1
  Estimate recall;  // share of tokens that are the most probable ones
  double recall_ref = 0;
  double ppl = 0;
  double ppl_ref = 0;
  Estimate nll_delta;  // of the mean over tokens, paired: candidate minus reference
};

// Samples must not be empty, nor any of them.
QualitySummary Summarize(std::span<const SampleScore> samples);

// The candidate's KL as a multiple of the other's: geometric mean over samples of the ratio of their means. `se` is a
// factor: value / se to value * se is one standard error. Same samples in the same order, all with KL > 0; else {0, 0}.
Estimate PairedKlRatio(std::span<const SampleScore> candidate, std::span<const SampleScore> other);

// The smallest value that at least `q` of the values do not exceed. Values not empty, q in 0..1.
double QuantileOf(std::vector<double> values, double q);

}  // namespace qkv
