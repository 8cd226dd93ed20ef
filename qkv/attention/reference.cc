// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "qkv/attention/attention.h"
#include "qkv/codec/blocks.h"
#include "qkv/codec/frame.h"
#include "qkv/codec/half.h"

namespace qkv {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

void Turn(const Rope& rope, int positions, double* key) {
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

// Keys and values of one layer and KV head in the plain frame, keys at the positions of use: [n_keys][head_dim].
struct Rows {
  std::vector<double> k, v;
};

// One side of a page: [tokens][head_dim] fp32, plain, at the positions of encoding.
std::vector<float> DecodePage(const PageRef& page, const Geometry& geometry, int layer, int kv_head, Side side,
                              bool refined) {
  const size_t dim = static_cast<size_t>(geometry.head_dim);
  const PageLayout blocks_of(geometry, page.codecs, page.layers);
  const CodecId codec = side == Side::kK ? blocks_of.CodecsOf(layer).k : blocks_of.CodecsOf(layer).v;
  std::vector<float> rows(static_cast<size_t>(page.tokens) * dim);
  const PqBook book = blocks::IsPq(codec) ? page.codebooks->book(codec, layer, kv_head, side) : PqBook();
  CodecOf(codec).decode(side, page.data + blocks_of.BlockOffset(side, layer, kv_head), page.tokens, geometry.head_dim,
                        rows.data(), &book);
  if (!blocks::IsRotated(codec)) return rows;
  if (refined && page.refinement != nullptr) {
    std::vector<float> residual(rows.size());
    const PageLayout layout(geometry, {CodecId::kRefine4, CodecId::kRefine4});
    CodecOf(CodecId::kRefine4)
        .decode(side, page.refinement + layout.BlockOffset(side, layer, kv_head), page.tokens, geometry.head_dim,
                residual.data());
    for (size_t i = 0; i < rows.size(); ++i) rows[i] += residual[i];
  }
  const auto constant = [&](Constant which) {
    std::vector<float> values(dim);
    for (size_t c = 0; c < dim && page.constants != nullptr; ++c) {
      uint16_t half;
      std::memcpy(&half, page.constants + ConstantOffset(geometry, layer, kv_head, which) + 2 * c, sizeof half);
      values[c] = FloatFromHalf(half);
    }
    return values;
  };
  const std::vector<float> mean = constant(Constant::kMeanK);
  FromRotated(rows.data(), page.tokens, geometry.head_dim, side == Side::kK ? mean.data() : nullptr, rows.data(),
              codec == CodecId::kBands);
  if (page.exact_first) {
    const std::vector<float> first = constant(side == Side::kK ? Constant::kFirstK : Constant::kFirstV);
    std::copy(first.begin(), first.end(), rows.begin());
  }
  return rows;
}

Rows DecodeAll(std::span<const PageRef> pages, const Geometry& geometry, int layer, int kv_head, const Rope* rope,
               bool refined) {
  const size_t dim = static_cast<size_t>(geometry.head_dim);
  Rows all;
  for (const PageRef& page : pages) {
    const std::vector<float> k = DecodePage(page, geometry, layer, kv_head, Side::kK, refined);
    const std::vector<float> v = DecodePage(page, geometry, layer, kv_head, Side::kV, refined);
    const size_t first = all.k.size();
    all.k.insert(all.k.end(), k.begin(), k.end());
    all.v.insert(all.v.end(), v.begin(), v.end());
    for (size_t at = first; at < all.k.size() && page.position_offset != 0; at += dim) {
      Turn(*rope, page.position_offset, all.k.data() + at);
    }
  }
  return all;
}

double Score(const AttentionShape& shape, const float* q, const double* k) {
  double dot = 0;
  for (int c = 0; c < shape.head_dim; ++c) dot += q[c] * k[c];
  return dot * shape.scale;
}

}  // namespace

void AttendReference(const AttentionShape& shape, std::span<const PageRef> pages, int n_layers, int layer,
                     const float* q, int n_queries, float* out, const Rope* rope, const Refined* refined) {
  const Geometry geometry{n_layers, shape.n_kv_heads, shape.head_dim};
  const size_t dim = static_cast<size_t>(shape.head_dim);
  const int group = shape.n_heads / shape.n_kv_heads;
  int n_keys = 0;
  for (const PageRef& page : pages) n_keys += page.tokens;
  std::vector<double> scores(static_cast<size_t>(n_keys)), sum(dim);
  for (int kv_head = 0; kv_head < shape.n_kv_heads; ++kv_head) {
    const Rows base = DecodeAll(pages, geometry, layer, kv_head, rope, false);
    const Rows fine = refined == nullptr ? Rows() : DecodeAll(pages, geometry, layer, kv_head, rope, true);
    for (int query = 0; query < n_queries; ++query) {
      // Per key: whether it is hidden, and which rows hold it.
      std::vector<const Rows*> rows;
      for (size_t p = 0; p < pages.size(); ++p) {
        uint32_t tokens = 0;
        if (refined != nullptr) {
          const size_t tile = static_cast<size_t>(kv_head * refined->n_tiles + query / refined->tile_queries);
          tokens = refined->tokens[tile * pages.size() + p];
        }
        for (int t = 0; t < pages[p].tokens; ++t) {
          rows.push_back(t == 0 && pages[p].hide_first ? nullptr : (tokens >> t & 1) != 0 ? &fine : &base);
        }
      }
      const size_t n_visible = static_cast<size_t>(n_keys - n_queries + query + 1);
      for (int member = 0; member < group; ++member) {
        const size_t row = static_cast<size_t>(query * shape.n_heads + kv_head * group + member);
        double maximum = kHidden;
        for (size_t key = 0; key < n_visible; ++key) {
          scores[key] = rows[key] == nullptr ? kHidden : Score(shape, q + row * dim, rows[key]->k.data() + key * dim);
          maximum = std::max(maximum, scores[key]);
        }
        double total = 0;
        std::fill(sum.begin(), sum.end(), 0.0);
        for (size_t key = 0; key < n_visible; ++key) {
          if (rows[key] == nullptr) continue;
          const double weight = std::exp(scores[key] - maximum);
          total += weight;
          for (size_t c = 0; c < dim; ++c) sum[c] += weight * rows[key]->v[key * dim + c];
        }
        for (size_t c = 0; c < dim; ++c) out[row * dim + c] = static_cast<float>(sum[c] / total);
      }
    }
  }
}

Refined RefinedByReference(const AttentionPlan& plan, std::span<const PageRef> pages, int n_layers, int layer,
                           const float* q, const Rope* rope, double* margin) {
  const AttentionShape& shape = plan.shape;
  const Geometry geometry{n_layers, shape.n_kv_heads, shape.head_dim};
  const size_t dim = static_cast<size_t>(shape.head_dim), n_pages = pages.size();
  std::vector<int> first_key(n_pages);
  for (size_t p = 1; p < n_pages; ++p) first_key[p] = first_key[p - 1] + pages[p - 1].tokens;
  Refined result{
      plan.tile_queries, plan.n_tiles,
      std::vector<uint32_t>(static_cast<size_t>(shape.n_kv_heads) * static_cast<size_t>(plan.n_tiles) * n_pages)};
  *margin = std::numeric_limits<double>::infinity();
  if (plan.refine_threshold < 0) return result;
  for (int kv_head = 0; kv_head < shape.n_kv_heads; ++kv_head) {
    const Rows base = DecodeAll(pages, geometry, layer, kv_head, rope, false);
    const Rows fine = DecodeAll(pages, geometry, layer, kv_head, rope, true);
    for (int i = 0; i < plan.n_attend_items(); ++i) {
      const AttentionPlan::Item item = plan.ItemAt(i);
      if (item.kv_head != kv_head) continue;
      const size_t tile = static_cast<size_t>(kv_head * plan.n_tiles + item.first_query / plan.tile_queries);
      const int n_rows = item.n_queries * plan.group();
      // kHidden where a row does not see a key.
      const auto score = [&](const Rows& rows, int row, size_t page, int t) {
        const int query = item.first_query + row / plan.group();
        const int key = first_key[page] + t;
        if (key > plan.n_keys - plan.n_queries + query || (t == 0 && pages[page].hide_first)) return kHidden;
        const int head = kv_head * plan.group() + row % plan.group();
        return Score(shape, q + static_cast<size_t>(query * shape.n_heads + head) * dim,
                     rows.k.data() + static_cast<size_t>(key) * dim);
      };
      std::vector<double> largest(static_cast<size_t>(n_rows), kHidden);  // so far, per row
      const auto take = [&](std::vector<double>& to, const Rows& rows, size_t page, int t) {
        for (int row = 0; row < n_rows; ++row) {
          to[static_cast<size_t>(row)] = std::max(to[static_cast<size_t>(row)], score(rows, row, page, t));
        }
      };
      if (pages[0].exact_first && blocks::IsRotated(pages[0].codecs.k)) take(largest, base, 0, 0);
      const int newest = plan.n_keys - plan.n_queries + item.first_query;  // key that the whole tile sees
      for (size_t p = 0; p < n_pages; ++p) {
        const bool peeked = first_key[p] <= newest && (p + 1 == n_pages || first_key[p + 1] > newest);
        for (int t = 0; t < pages[p].tokens && peeked && first_key[p] + t <= newest; ++t) take(largest, base, p, t);
      }
      const size_t end = static_cast<size_t>(item.first_page + item.n_pages);
      const size_t step_pages = static_cast<size_t>(plan.step_pages);
      for (size_t step = static_cast<size_t>(item.first_page); step < end; step += step_pages) {
        const size_t step_end = std::min(end, step + step_pages);
        std::vector<double> limit = largest;
        for (size_t p = step; p < step_end; ++p) {
          for (int t = 0; t < pages[p].tokens; ++t) take(limit, base, p, t);
        }
        for (size_t p = step; p < step_end; ++p) {
          uint32_t& tokens = result.tokens[tile * n_pages + p];
          for (int t = 0; t < pages[p].tokens; ++t) {
            for (int row = 0; row < n_rows && pages[p].refinement != nullptr; ++row) {
              const double above = score(base, row, p, t) - (limit[static_cast<size_t>(row)] - plan.refine_threshold);
              if (above >= 0) tokens |= 1u << t;
              *margin = std::min(*margin, std::abs(above));
            }
            take(largest, (tokens >> t & 1) != 0 ? fine : base, p, t);
          }
        }
      }
    }
  }
  return result;
}

}  // namespace qkv
