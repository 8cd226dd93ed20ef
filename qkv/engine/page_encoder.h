// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Turns fp16 pages (the tail's) into pages of a codec pair and, if it has one, its refinement: rows into the codecs'
// frame, the exact first token left out, what the base lost into the plane beside it. And what the rotated pages of a
// segment need beside them: the mean keys, and the first token's own K and V.
//
// Pure functions over caller-owned memory; any thread.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "qkv/codec/pq.h"
#include "qkv/segment/segment.h"

namespace qkv {

// A page of codecs f16/f16, and how many of its tokens there are.
struct F16Page {
  const std::byte* data = nullptr;
  int tokens = 0;
};

// Of the tokens of `pages`, which are those that were not encoded yet: the mean key per layer and head, rounded to
// fp16. `at_zero`: the first page's first token is the context's first; it is left out of the mean, being unlike all
// others, and its K and V are kept as they are. With nothing to average the mean is zero. As in every codec NaN counts
// as 0, and what is beyond ±65504 as that.
SegmentConstants ConstantsOf(const Geometry& geometry, std::span<const F16Page> pages, bool at_zero);

// The first `tokens` rows of a block of a segment's page as attention understands them: [tokens][head_dim] in the plain
// frame, the exact first token included, without refinement.
// `codebooks`: those of the page, if it needs some.
void PlainRows(const Segment& segment, size_t page, const PqCodebooks* codebooks, Side side, int layer, int head,
               int tokens, float* rows);

// Of a refinement page.
inline constexpr CodecPair kRefinementCodecs = {CodecId::kRefine4, CodecId::kRefine4};

class PageEncoder {
 public:
  // `codebooks`: not null if NeedsBooks(kv.pair); must outlive this object.
  PageEncoder(const Geometry& geometry, const PageCodecs& kv, const PqCodebooks* codebooks = nullptr);

  CodecPair kv() const { return kv_.pair; }
  const std::shared_ptr<const LayerCodecs>& layers() const { return kv_.layers; }  // with kLayersPair
  // The codecs as the page table names them.
  CodecPair base() const { return {kv_.pair.k, kv_.pair.v}; }
  const PageLayout& layout() const { return layout_; }
  // Of the refinement page; only if kv().refine.
  const PageLayout& refinement_layout() const { return *refinement_layout_; }
  uint64_t page_bytes() const { return layout_.bytes + (refinement_layout_ ? refinement_layout_->bytes : 0); }

  // Writes layout().bytes to `page` and, if kv().refine, refinement_layout().bytes to `refinement`; both are zero
  // before. `constants` may be null when NeedsConstants(kv()) is false. `exact_first`: the page's first token is the
  // context's; rotated sides code it as zero.
  void Encode(const F16Page& from, bool exact_first, const SegmentConstants* constants, std::byte* page,
              std::byte* refinement) const;

 private:
  const Geometry geometry_;
  const PageCodecs kv_;
  const PqCodebooks* const codebooks_;
  const PageLayout f16_layout_;
  const PageLayout layout_;
  std::optional<PageLayout> refinement_layout_;
};

}  // namespace qkv
