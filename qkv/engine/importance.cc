// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/importance.h"

#include <cstdlib>
#include <new>

namespace qkv {
namespace {

constexpr size_t kAlignment = 64;
// Without a common divisor with kEvery: layers begin at places far apart.
constexpr int kPhaseStep = 13;

}  // namespace

void AttentionSampler::AlignedFree::operator()(std::byte* p) const {
  std::free(p);
}

AttentionSampler::AttentionSampler(const AttentionShape& shape, int n_layers, int every)
    : shape_(shape), n_layers_(n_layers), every_(every), mass_(shape.n_kv_heads) {}

int AttentionSampler::phase(int layer) const {
  return layer * kPhaseStep % every_;
}

void AttentionSampler::BeginStep(int n_queries, int n_threads) {
  n_tokens_ += n_queries;
  step_tokens_ = n_queries;
  for (std::vector<float>& mass : mass_) mass.resize(n_tokens_);
  const size_t bytes = WeighingScratchBytes(shape_, n_tokens_);
  scratch_stride_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  scratch_.reset();
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, scratch_stride_ * n_threads));
  if (data == nullptr) throw std::bad_alloc();
  scratch_.reset(data);
}

void AttentionSampler::Take(int layer, int kv_head, std::span<const PageRef> pages, const float* q, int thread) {
  const int group = shape_.n_heads / shape_.n_kv_heads;
  const int first = n_tokens_ - step_tokens_;
  std::vector<WeighingQuery> queries;
  for (int i = (phase(layer) - first % every_ + every_) % every_; i < step_tokens_; i += every_) {
    const size_t row = static_cast<size_t>(i) * shape_.n_heads + static_cast<size_t>(kv_head) * group;
    queries.push_back({q + row * shape_.head_dim, first + i + 1});
  }
  AddWeights(shape_, pages, n_layers_, layer, kv_head, queries,
             scratch_.get() + scratch_stride_ * static_cast<size_t>(thread), mass_[kv_head].data());
}

std::vector<float> AttentionSampler::importance() const {
  std::vector<int> layers_at(every_);  // how many take the queries there
  for (int layer = 0; layer < n_layers_; ++layer) layers_at[phase(layer)] += 1;
  std::vector<float> importance(n_tokens_);
  int64_t seen_by = 0;
  for (int t = n_tokens_ - 1; t >= 0; --t) {
    seen_by += layers_at[t % every_];
    double mass = 0;
    for (const std::vector<float>& of_head : mass_) mass += of_head[t];
    if (seen_by > 0) importance[t] = static_cast<float>(mass / (static_cast<double>(seen_by) * shape_.n_heads));
  }
  return importance;
}

}  // namespace qkv
