// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/quality.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "qkv/base/error.h"

namespace qkv {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// e^x - 1 - x without cancellation: the series where x is small.
double ExpMinusLinear(double x) {
  if (std::abs(x) > 0.125) return std::expm1(x) - x;
  return x * x * (1.0 / 2 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x / 5040)))));
}

double LogSumExp(std::span<const float> logits) {
  const double maximum = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - maximum);
  return maximum + std::log(sum);
}

// log_sum: LogSumExp(p).
double KlDivergence(std::span<const float> p, double log_sum, std::span<const float> q) {
  QKV_CHECK(p.size() == q.size());
  double total = 0, mean = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    const double weight = std::exp(p[i] - log_sum);
    total += weight;
    mean += weight * (static_cast<double>(q[i]) - p[i]);
  }
  mean /= total;
  double excess = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    excess += std::exp(p[i] - log_sum) * ExpMinusLinear(static_cast<double>(q[i]) - p[i] - mean);
  }
  double kl = std::log1p(excess / total);
  if (!std::isfinite(kl)) kl = LogSumExp(q) - log_sum - mean;  // differences of hundreds, where nothing cancels
  return std::isnan(kl) ? kInfinity : kl;
}

size_t TopOf(std::span<const float> logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

Estimate MeanOf(std::span<const double> values) {
  const auto n = static_cast<double>(values.size());
  double sum = 0, squares = 0;
  for (const double x : values) sum += x;
  const double mean = sum / n;
  for (const double x : values) squares += (x - mean) * (x - mean);
  return {mean, values.size() < 2 ? 0 : std::sqrt(squares / (n - 1) / n)};
}

}  // namespace

double KlDivergence(std::span<const float> p, std::span<const float> q) {
  return KlDivergence(p, LogSumExp(p), q);
}

void SampleScore::Add(const TokenScore& token) {
  kl.push_back(token.kl);
  same_top += token.same_top;
  right += token.right;
  right_ref += token.right_ref;
  nll += token.nll;
  nll_ref += token.nll_ref;
}

double SampleScore::kl_mean() const {
  double sum = 0;
  for (const double x : kl) sum += x;
  return sum / static_cast<double>(kl.size());
}

ReferenceLogits::ReferenceLogits(std::vector<float> logits, size_t n_vocab)
    : logits_(std::move(logits)), n_vocab_(n_vocab) {
  for (size_t at = 0; at + n_vocab_ <= logits_.size(); at += n_vocab_) {
    const auto row = std::span<const float>(logits_).subspan(at, n_vocab_);
    rows_.push_back({LogSumExp(row), TopOf(row)});
  }
}

TokenScore ReferenceLogits::Score(size_t row, std::span<const float> candidate, Token next) const {
  QKV_CHECK(row < rows_.size() && candidate.size() == n_vocab_ && next >= 0 && static_cast<size_t>(next) < n_vocab_);
  const auto reference = std::span<const float>(logits_).subspan(row * n_vocab_, n_vocab_);
  const Row& known = rows_[row];
  TokenScore score;
  score.kl = KlDivergence(reference, known.log_sum, candidate);
  const size_t top = TopOf(candidate);
  score.same_top = top == known.top;
  score.right = top == static_cast<size_t>(next);
  score.right_ref = known.top == static_cast<size_t>(next);
  score.nll = LogSumExp(candidate) - candidate[next];
  score.nll_ref = known.log_sum - reference[next];
  return score;
}

SampleScore ReferenceLogits::ScoreAll(std::span<const float> candidate, std::span<const Token> next) const {
  QKV_CHECK(candidate.size() == rows_.size() * n_vocab_ && next.size() == rows_.size());
  SampleScore sample;
  for (size_t i = 0; i < rows_.size(); ++i) sample.Add(Score(i, candidate.subspan(i * n_vocab_, n_vocab_), next[i]));
  return sample;
}

QualitySummary Summarize(std::span<const SampleScore> samples) {
  QKV_CHECK(!samples.empty());
  QualitySummary summary;
  summary.samples = samples.size();
  std::vector<double> all, kl, top1, recall, nll_delta;
  double nll = 0, nll_ref = 0, right_ref = 0;
  for (const SampleScore& sample : samples) {
    const auto n = static_cast<double>(sample.n());
    all.insert(all.end(), sample.kl.begin(), sample.kl.end());
    kl.push_back(sample.kl_mean());
    top1.push_back(static_cast<double>(sample.same_top) / n);
    recall.push_back(static_cast<double>(sample.right) / n);
    nll_delta.push_back((sample.nll - sample.nll_ref) / n);
    nll += sample.nll;
    nll_ref += sample.nll_ref;
    right_ref += static_cast<double>(sample.right_ref);
  }
  summary.tokens = all.size();
  const auto tokens = static_cast<double>(all.size());
  summary.kl = MeanOf(kl);
  summary.kl_p99 = QuantileOf(std::move(all), 0.99);
  summary.top1 = MeanOf(top1);
  summary.recall = MeanOf(recall);
  summary.recall_ref = right_ref / tokens;
  summary.nll_delta = MeanOf(nll_delta);
  summary.ppl = std::exp(nll / tokens);
  summary.ppl_ref = std::exp(nll_ref / tokens);
  return summary;
}

Estimate PairedKlRatio(std::span<const SampleScore> candidate, std::span<const SampleScore> other) {
  if (candidate.empty() || candidate.size() != other.size()) return {};
  std::vector<double> logs;
  for (size_t i = 0; i < candidate.size(); ++i) {
    const double ratio = candidate[i].kl_mean() / other[i].kl_mean();
    if (!(ratio > 0) || !std::isfinite(ratio)) return {};
    logs.push_back(std::log(ratio));
  }
  const Estimate mean = MeanOf(logs);
  return {std::exp(mean.value), std::exp(mean.se)};
}

double QuantileOf(std::vector<double> values, double q) {
  QKV_CHECK(!values.empty() && q >= 0 && q <= 1);
  const auto rank = static_cast<size_t>(std::ceil(q * static_cast<double>(values.size())));
  const size_t at = std::max<size_t>(rank, 1) - 1;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

}  // namespace qkv
