// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The softmax weights themselves, where Attend gives only what comes of them: how much attention each key gets from a
// few queries. Pure functions over caller-owned memory; threads may work on different KV heads and layers at once.

#include <cstddef>
#include <span>

#include "qkv/attention/attention.h"

namespace qkv {

// The query heads of one KV head at one position, [group][head_dim] fp32 after RoPE, which see the first n_keys keys.
struct WeighingQuery {
  const float* q = nullptr;
  int n_keys = 0;
};

// Adds to mass[t], for every key t that a query sees, the weights that the query's heads give it: 1 in all per query
// and head. `pages`: of halves on both sides, where they were encoded, nothing hidden, all full but the last; mass[]
// has room for their tokens. `scratch`: WeighingScratchBytes, 64-byte aligned. Same bits on one CPU, whoever calls.
void AddWeights(const AttentionShape& shape, std::span<const PageRef> pages, int n_layers, int layer, int kv_head,
                std::span<const WeighingQuery> queries, std::byte* scratch, float* mass);
// For pages of n_keys tokens in all.
size_t WeighingScratchBytes(const AttentionShape& shape, int n_keys);

}  // namespace qkv
