// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// How much attention each token of a prompt gets from the prompt itself, summed over layers and heads and divided by the
// number of queries that could see it: the producer's guess at what later readers will look at (Sequence::Regroup).
//
// Computed beside a sequence's own attention, from the rows that SequenceOptions::on_rows shows, in O(tokens²) for every
// layer and head: for evaluation, not for a prefill that somebody waits for. One thread.

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "qkv/attention/attention.h"
#include "qkv/engine/sequence.h"

namespace qkv {

class AttentionMass {
 public:
  AttentionMass(const AttentionShape& shape, int n_layers);

  // An observer of a sequence that starts empty; in order of its batches.
  void Take(RowKind kind, int layer, int n_tokens, std::span<const float> rows);

  // [tokens read]: the mean weight, over layers and query heads, that a query which saw the token gave it.
  std::vector<float> importance() const;

 private:
  struct Layer {
    std::vector<float> keys;  // [n_tokens][n_kv_heads][head_dim]
    int n_tokens = 0;
  };
  AttentionShape shape_;
  std::vector<Layer> layers_;
  std::vector<double> mass_;  // [token]
};

// How to group a context's tokens: the `share` of them that `by` puts first in pages of `high`, the others in pages of
// `low`, or nowhere.
struct TokenGroups {
  enum class By : uint8_t { kAttention, kRandom };
  By by = By::kAttention;
  double share = 0.2;
  CodecPair high;
  std::optional<CodecPair> low;
};
// "attention/20/8/4", "random/20/8/drop": by, percent, high, low. Errors: kInvalidArgument.
Result<TokenGroups> ParseTokenGroups(std::string_view text);
// Stored bits per value of all n_tokens, whole pages not counted. The first token is always among the high ones.
double BitsPerValue(const TokenGroups& groups, int n_tokens, int head_dim);

// [n]: for comparison, the same numbers every time.
std::vector<float> RandomImportance(size_t n);

}  // namespace qkv
