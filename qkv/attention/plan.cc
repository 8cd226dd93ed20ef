// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "qkv/attention/attention.h"
#include "qkv/attention/scratch.h"
#include "qkv/codec/blocks.h"

namespace qkv {
namespace {

// Enough items to keep 16 threads busy although they differ in length, and chunks long enough (512 tokens) that
// preparing the queries and merging do not show; or, where tokens are refined, what an item does before its first page.
constexpr int kWantedItems = 48;
constexpr int kMinChunkPages = 16;
constexpr int kMinChunkPagesOfRefined = 32;

int DivideUp(int a, int b) {
  return (a + b - 1) / b;
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionShape& shape, int n_queries, std::span<const PageRef> pages,
                             const Rope* rope, float refine_threshold)
    : shape(shape), n_queries(n_queries), n_pages(static_cast<int>(pages.size())), refine_threshold(refine_threshold) {
  QKV_CHECK(shape.n_kv_heads > 0 && shape.n_heads > 0 && shape.n_heads % shape.n_kv_heads == 0);
  QKV_CHECK(group() <= kMaxQueryGroup);
  QKV_CHECK(shape.head_dim >= kMinHeadDim && shape.head_dim <= kMaxHeadDim && shape.head_dim % 16 == 0);
  for (const PageRef& page : pages) {
    QKV_CHECK(page.tokens >= 1 && page.tokens <= kPageTokens);
    n_keys += page.tokens;
    QKV_CHECK(!page.exact_first || page.constants != nullptr);
    QKV_CHECK(page.refinement == nullptr || TakesRefinement(page.codecs));
    QKV_CHECK((page.codecs == kLayersPair) == (page.layers != nullptr));
    QKV_CHECK(!NeedsBooks(page.codecs) || page.codebooks != nullptr);
    if (page.position_offset != 0) AddTurn(page.position_offset, rope);
  }
  QKV_CHECK(n_queries >= 1 && n_queries <= n_keys);

  n_tiles = DivideUp(n_queries, attention::kTileRows / group());
  tile_queries = DivideUp(n_queries, n_tiles);
  n_tiles = DivideUp(n_queries, tile_queries);

  const bool refines = refine_threshold >= 0 &&
                       std::ranges::any_of(pages, [](const PageRef& page) { return page.refinement != nullptr; });
  const int wanted_chunks = DivideUp(kWantedItems, shape.n_kv_heads * n_tiles);
  chunk_pages = std::max(DivideUp(n_pages, wanted_chunks), refines ? kMinChunkPagesOfRefined : kMinChunkPages);
  chunk_pages = DivideUp(chunk_pages, attention::kGroupPages) * attention::kGroupPages;
  step_pages = tile_rows() <= attention::kFewRows && !refines ? 1 : attention::kGroupPages;
  partials_rotated = blocks::IsRotated(pages.front().codecs.v);
  n_chunks = DivideUp(n_pages, chunk_pages);

  chunk_first_key.reserve(static_cast<size_t>(n_chunks));
  int key = 0;
  for (int page = 0; page < n_pages; ++page) {
    if (page % chunk_pages == 0) chunk_first_key.push_back(key);
    key += pages[static_cast<size_t>(page)].tokens;
  }
}

// In double precision: at an offset of 100,000 an fp32 angle would be off by 0.004.
void AttentionPlan::AddTurn(int position_offset, const Rope* rope) {
  QKV_CHECK(rope != nullptr && 2 * rope->frequencies.size() <= static_cast<size_t>(shape.head_dim));
  const auto at = std::ranges::lower_bound(turns, position_offset, {}, &Turn::position_offset);
  if (at != turns.end() && at->position_offset == position_offset) return;
  pairs = rope->pairs;
  Turn turn{position_offset, {}, {}};
  for (const double frequency : rope->frequencies) {
    turn.cosines.push_back(static_cast<float>(std::cos(-frequency * position_offset)));
    turn.sines.push_back(static_cast<float>(std::sin(-frequency * position_offset)));
  }
  turns.insert(at, std::move(turn));
}

const AttentionPlan::Turn& AttentionPlan::TurnOf(int position_offset) const {
  return *std::ranges::lower_bound(turns, position_offset, {}, &Turn::position_offset);
}

size_t AttentionPlan::scratch_bytes() const {
  return attention::Scratch(*this, nullptr).bytes;
}

size_t AttentionPlan::partial_floats() const {
  return n_chunks == 1 ? 0 : item_partial_floats() * static_cast<size_t>(n_attend_items());
}

// KV heads innermost: threads that take neighbouring items read neighbouring blocks. Later tiles, which see more keys,
// come first, so that threads end at about the same time.
AttentionPlan::Item AttentionPlan::ItemAt(int item) const {
  const int chunk = item / shape.n_kv_heads % n_chunks;
  const int tile = n_tiles - 1 - item / (shape.n_kv_heads * n_chunks);
  Item result;
  result.kv_head = item % shape.n_kv_heads;
  result.first_query = tile * tile_queries;
  result.n_queries = std::min(tile_queries, n_queries - result.first_query);
  result.first_page = chunk * chunk_pages;
  result.n_pages = std::min(chunk_pages, n_pages - result.first_page);
  result.first_key = chunk_first_key[static_cast<size_t>(chunk)];
  return result;
}

int AttentionPlan::ItemIndex(int kv_head, int tile, int chunk) const {
  return ((n_tiles - 1 - tile) * n_chunks + chunk) * shape.n_kv_heads + kv_head;
}

}  // namespace qkv
