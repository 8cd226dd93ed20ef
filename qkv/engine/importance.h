// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// How much attention each token of a prompt gets from the prompt itself: the mean weight, over layers and query heads,
// that the queries gave it which could see it. The producer's guess at what later readers will look at
// (token_groups.h).
//
// Of a sample of the queries: in every layer one in `every`, each layer beginning at another one, so that all parts of
// a prompt are looked at from some layers. What is divided by is the number of sampled queries that could see the
// token, so early tokens get no advantage from having been seen more often. Computed in the steps of a prefill, from
// the keys in the tail, by the threads that compute the step; same numbers with any number of threads.

#include <memory>
#include <span>
#include <vector>

#include "qkv/attention/attention.h"
#include "qkv/attention/weights.h"

namespace qkv {

class AttentionSampler {
 public:
  static constexpr int kEvery = 32;  // costs less than 1 % of a prefill (docs/EVALUATION.md)

  AttentionSampler(const AttentionShape& shape, int n_layers, int every = kEvery);

  // The position within its run of `every` at which a layer's queries are taken.
  int phase(int layer) const;

  // Before a step that reads n_queries tokens behind those of the steps before.
  void BeginStep(int n_queries, int n_threads);
  // Once per step, layer (ascending) and KV head; different KV heads of a layer may come from different threads at
  // once. `pages`: all that was read, halves, the step's keys included (AddWeights). q: [n_queries][n_heads][head_dim].
  void Take(int layer, int kv_head, std::span<const PageRef> pages, const float* q, int thread);

  // [tokens read]; 0 for a token that no sampled query has seen.
  std::vector<float> importance() const;

 private:
  struct AlignedFree {
    void operator()(std::byte* p) const;
  };
  const AttentionShape shape_;
  const int n_layers_;
  const int every_;
  int n_tokens_ = 0;
  int step_tokens_ = 0;
  size_t scratch_stride_ = 0;
  std::unique_ptr<std::byte[], AlignedFree> scratch_;  // [threads][scratch_stride_]
  std::vector<std::vector<float>> mass_;               // [KV head][token]
};

}  // namespace qkv
