// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/kv_rows.h"

#include <algorithm>
#include <cmath>

#include "qkv/engine/page_encoder.h"

namespace qkv {

KvRows DecodeRows(const Context& context, int first, int n, const PqCodebooks* codebooks) {
  QKV_CHECK(!context.card.mask().has_groups());
  const Geometry& geometry = context.segments.front()->geometry();
  const size_t token_floats = static_cast<size_t>(geometry.n_kv_heads) * geometry.head_dim;
  const size_t layer_floats = token_floats * static_cast<size_t>(n);
  KvRows rows{std::vector<float>(layer_floats * geometry.n_layers),
              std::vector<float>(layer_floats * geometry.n_layers), geometry.n_layers};
  std::vector<float> block(static_cast<size_t>(kPageTokens) * geometry.head_dim);
  for (const auto& span : context.card.spans()) {
    const Segment& segment = *context.segments[span.segment()];
    int position = static_cast<int>(span.first_position());
    int left = static_cast<int>(span.n_tokens());
    for (size_t page = span.first_page(); page < span.first_page() + span.n_pages(); ++page) {
      const int tokens = std::min<int>(left, segment.pages()[page].tokens);
      const int from = std::max(first, position), to = std::min(first + n, position + tokens);
      for (int layer = 0; from < to && layer < geometry.n_layers; ++layer) {
        for (int head = 0; head < geometry.n_kv_heads; ++head) {
          for (const Side side : {Side::kK, Side::kV}) {
            PlainRows(segment, page, codebooks, side, layer, head, tokens, block.data());
            float* out = (side == Side::kK ? rows.k : rows.v).data() + layer_floats * static_cast<size_t>(layer) +
                         static_cast<size_t>(head) * geometry.head_dim;
            for (int token = from; token < to; ++token) {
              std::copy_n(&block[static_cast<size_t>(token - position) * geometry.head_dim], geometry.head_dim,
                          out + token_floats * static_cast<size_t>(token - first));
            }
          }
        }
      }
      position += tokens;
      left -= tokens;
    }
  }
  return rows;
}

void MoveKeys(KvRows& rows, int head_dim, const Rope& rope, int positions) {
  const size_t n = rope.frequencies.size();
  std::vector<double> cosines(n), sines(n);
  for (size_t i = 0; i < n; ++i) {
    cosines[i] = std::cos(rope.frequencies[i] * positions);
    sines[i] = std::sin(rope.frequencies[i] * positions);
  }
  const bool halves = rope.pairs == Rope::Pairs::kHalves;
  const auto row_floats = static_cast<size_t>(head_dim);
  for (size_t row = 0; row + row_floats <= rows.k.size(); row += row_floats) {
    float* key = &rows.k[row];
    for (size_t i = 0; i < n; ++i) {
      float& x = key[halves ? i : 2 * i];
      float& y = key[halves ? i + n : 2 * i + 1];
      const double turned = x * cosines[i] - y * sines[i];
      y = static_cast<float>(x * sines[i] + y * cosines[i]);
      x = static_cast<float>(turned);
    }
  }
}

}  // namespace qkv
