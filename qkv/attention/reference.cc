// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "qkv/attention/attention.h"

namespace qkv {
namespace {

void Rotate(const Rope& rope, int positions, double* key) {
  const size_t n = rope.frequencies.size();
  for (size_t i = 0; i < n; ++i) {
    const bool halves = rope.pairs == Rope::Pairs::kHalves;
    double& x = key[halves ? i : 2 * i];
    double& y = key[halves ? i + n : 2 * i + 1];
    const double angle = rope.frequencies[i] * positions;
    const double turned = x * std::cos(angle) - y * std::sin(angle);
    y = x * std::sin(angle) + y * std::cos(angle);
    x = turned;
  }
}

}  // namespace

void AttendReference(const AttentionShape& shape, std::span<const PageRef> pages, int n_layers, int layer,
                     const float* q, int n_queries, float* out, const Rope* rope) {
  const size_t dim = static_cast<size_t>(shape.head_dim);
  const int group = shape.n_heads / shape.n_kv_heads;
  int n_keys = 0;
  for (const PageRef& page : pages) n_keys += page.tokens;

  std::vector<float> decoded(kPageTokens * dim), values(static_cast<size_t>(n_keys) * dim);
  std::vector<double> keys(values.size());
  std::vector<bool> hidden(static_cast<size_t>(n_keys));
  std::vector<double> scores(static_cast<size_t>(n_keys)), sum(dim);
  for (int kv_head = 0; kv_head < shape.n_kv_heads; ++kv_head) {
    size_t first_key = 0;
    for (const PageRef& page : pages) {
      const PageLayout layout({n_layers, shape.n_kv_heads, shape.head_dim}, page.codecs);
      CodecOf(page.codecs.k)
          .decode(Side::kK, page.data + layout.BlockOffset(Side::kK, layer, kv_head), page.tokens, shape.head_dim,
                  decoded.data());
      for (int t = 0; t < page.tokens; ++t) {
        double* key = keys.data() + (first_key + static_cast<size_t>(t)) * dim;
        std::copy_n(decoded.data() + static_cast<size_t>(t) * dim, dim, key);
        if (page.position_offset != 0) Rotate(*rope, page.position_offset, key);
        hidden[first_key + static_cast<size_t>(t)] = t == 0 && page.hide_first;
      }
      CodecOf(page.codecs.v)
          .decode(Side::kV, page.data + layout.BlockOffset(Side::kV, layer, kv_head), page.tokens, shape.head_dim,
                  values.data() + first_key * dim);
      first_key += static_cast<size_t>(page.tokens);
    }
    for (int query = 0; query < n_queries; ++query) {
      const size_t n_visible = static_cast<size_t>(n_keys - n_queries + query + 1);
      for (int member = 0; member < group; ++member) {
        const size_t row = static_cast<size_t>(query * shape.n_heads + kv_head * group + member);
        double maximum = -std::numeric_limits<double>::infinity();
        for (size_t key = 0; key < n_visible; ++key) {
          double dot = 0;
          for (size_t c = 0; c < dim; ++c) dot += q[row * dim + c] * keys[key * dim + c];
          scores[key] = hidden[key] ? -std::numeric_limits<double>::infinity() : dot * shape.scale;
          maximum = std::max(maximum, scores[key]);
        }
        double total = 0;
        std::fill(sum.begin(), sum.end(), 0.0);
        for (size_t key = 0; key < n_visible; ++key) {
          const double weight = std::exp(scores[key] - maximum);
          total += weight;
          for (size_t c = 0; c < dim; ++c) sum[c] += weight * values[key * dim + c];
        }
        for (size_t c = 0; c < dim; ++c) out[row * dim + c] = static_cast<float>(sum[c] / total);
      }
    }
  }
}

}  // namespace qkv
