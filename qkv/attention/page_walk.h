// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The pages of an item, as the blocks of one layer and KV head; private to this room.

#include <cstddef>
#include <span>

#include "qkv/attention/attention.h"
#include "qkv/codec/blocks.h"

namespace qkv::attention {

// One page as an item sees it.
struct PageBlocks {
  CodecId codec(Side side) const { return side == Side::kK ? codecs.k : codecs.v; }
  const std::byte* block(Side side) const { return side == Side::kK ? k : v; }
  const PqBook& book(Side side) const { return side == Side::kK ? k_book : v_book; }

  CodecPair codecs;
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  int first_key = 0;
  int tokens = 0;
  int position_offset = 0;
  bool hide_first = false;
  bool exact_first = false;
  const std::byte* constants = nullptr;  // three vectors of [head_dim] halves, as Constant counts them
  const std::byte* k_refinement = nullptr;
  const std::byte* v_refinement = nullptr;
  PqBook k_book, v_book;  // of pq4 and pq2
};

// What queries must be turned into to meet a page's keys.
struct KeyFrame {
  int position_offset = 0;
  bool rotated = false;
  bool bands = false;               // each half of the channels on its own
  const std::byte* mean = nullptr;  // [head_dim] halves; null: 0
  bool operator==(const KeyFrame&) const = default;
};
inline KeyFrame FrameOf(const PageBlocks& page) {
  if (!blocks::IsRotated(page.codecs.k)) return {page.position_offset};
  return {page.position_offset, true, page.codecs.k == CodecId::kBands, page.constants};
}

class PageWalk {
 public:
  PageWalk(std::span<const PageRef> pages, const Geometry& geometry, int layer, const AttentionPlan::Item& item)
      : pages_(pages),
        geometry_(geometry),
        layer_(layer),
        item_(item),
        page_(static_cast<size_t>(item.first_page)),
        first_key_(item.first_key) {}

  // The next page of the chunk that begins before key `none_sees`; false at the end.
  bool Next(int none_sees, PageBlocks& result) {
    if (page_ == static_cast<size_t>(item_.first_page + item_.n_pages) || first_key_ >= none_sees) return false;
    result = At(page_, first_key_);
    first_key_ += result.tokens;
    ++page_;
    return true;
  }

  // Any page of the context.
  PageBlocks At(size_t index, int first_key) {
    const PageRef& page = pages_[index];
    if (page.codecs != layout_.codecs || page.layers != layout_.layers) {
      layout_ = PageLayout(geometry_, page.codecs, page.layers);
    }
    PageBlocks result{layout_.CodecsOf(layer_),
                      page.data + layout_.BlockOffset(Side::kK, layer_, item_.kv_head),
                      page.data + layout_.BlockOffset(Side::kV, layer_, item_.kv_head),
                      first_key,
                      page.tokens,
                      page.position_offset,
                      page.hide_first,
                      page.exact_first};
    if (page.constants != nullptr) {
      result.constants = page.constants + ConstantOffset(geometry_, layer_, item_.kv_head, Constant::kMeanK);
    }
    if (page.refinement != nullptr) {
      result.k_refinement = page.refinement + refinement_layout_.BlockOffset(Side::kK, layer_, item_.kv_head);
      result.v_refinement = page.refinement + refinement_layout_.BlockOffset(Side::kV, layer_, item_.kv_head);
    }
    if (blocks::IsPq(page.codecs.k)) {
      result.k_book = page.codebooks->book(page.codecs.k, layer_, item_.kv_head, Side::kK);
    }
    if (blocks::IsPq(page.codecs.v)) {
      result.v_book = page.codebooks->book(page.codecs.v, layer_, item_.kv_head, Side::kV);
    }
    return result;
  }

 private:
  std::span<const PageRef> pages_;
  Geometry geometry_;
  int layer_;
  AttentionPlan::Item item_;
  size_t page_;
  int first_key_;
  PageLayout layout_{geometry_, CodecPair{}};  // of the last page
  PageLayout refinement_layout_{geometry_, {CodecId::kRefine4, CodecId::kRefine4}};
};

}  // namespace qkv::attention
