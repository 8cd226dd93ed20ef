// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "qkv/attention/attention.h"

namespace qkv {

void AttendReference(const AttentionShape& shape, std::span<const PageRef> pages, int n_layers, int layer,
                     const float* q, int n_queries, float* out) {
  const size_t dim = static_cast<size_t>(shape.head_dim);
  const int group = shape.n_heads / shape.n_kv_heads;
  int n_keys = 0;
  for (const PageRef& page : pages) n_keys += page.tokens;

  std::vector<float> keys(static_cast<size_t>(n_keys) * dim), values(keys.size());
  std::vector<double> scores(static_cast<size_t>(n_keys)), sum(dim);
  for (int kv_head = 0; kv_head < shape.n_kv_heads; ++kv_head) {
    size_t first_key = 0;
    for (const PageRef& page : pages) {
      const PageLayout layout({n_layers, shape.n_kv_heads, shape.head_dim}, page.codecs);
      CodecOf(page.codecs.k)
          .decode(Side::kK, page.data + layout.BlockOffset(Side::kK, layer, kv_head), page.tokens, shape.head_dim,
                  keys.data() + first_key * dim);
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
          for (size_t c = 0; c < dim; ++c) dot += static_cast<double>(q[row * dim + c]) * keys[key * dim + c];
          scores[key] = dot * shape.scale;
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
