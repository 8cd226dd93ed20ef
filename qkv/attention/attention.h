// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Causal attention of new queries over encoded pages, without ever decoding a context as a whole (DESIGN §6).
//
// A step's work is cut into items (KV head x tile of queries x chunk of pages) by a plan that depends on shapes only,
// never on the number of threads: any thread may run any item, and results are the same bits every time. Chunks of one
// row are merged in order by (maximum, sum, output): the online softmax of Milakov and Gimelshein (arXiv:1805.02867)
// and flash-decoding's split.
//
// Relocation: a page may be used at another position than the one it was encoded at. RoPE is relative, so its keys stay as
// they are and the queries are turned back by the offset instead, once per run of pages with one offset (DESIGN §6).
//
// Frames: pages of the codecs 3 to 8, 5/3, pq4 and pq2 hold their rows rotated (codec/frame.h). Queries are rotated to meet
// such keys, and outputs are kept in the frame of the values being read; both turn once per run of pages with one frame.
//
// Refinement (progressive pages): where a page has a refinement plane, a token whose score comes close to the largest so
// far is read again from there, K and V, in the same pass (AttentionPlan::refine_threshold).
//
// Everything here is a pure function over caller-owned memory. Pages are only read. Threads may run different items of
// one step at once; all attend items of a step must be done before its merge items start. Same bits on one CPU: another
// vector width (AVX2, AVX-512, NEON) sums in another order.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "qkv/codec/pq.h"
#include "qkv/segment/layout.h"

namespace qkv {

inline constexpr int kMaxQueryGroup = 16;  // query heads per KV head

struct AttentionShape {
  int n_heads = 0;
  int n_kv_heads = 0;  // divides n_heads; n_heads / n_kv_heads is 1..kMaxQueryGroup
  int head_dim = 0;    // a multiple of 16 in [kMinHeadDim, kMaxHeadDim]
  float scale = 0;     // of the scores, usually 1/sqrt(head_dim)
};

// One page of a context, K and V of all layers. Pages of a context are listed in order; the tail's pages (fp16, private
// to the process) are the last ones.
struct PageRef {
  const std::byte* data = nullptr;
  CodecPair codecs;
  int tokens = 0;           // 1..32
  int position_offset = 0;  // of use minus encoding, tokens
  bool hide_first = false;  // nobody sees the page's first token, which counts among n_keys all the same

  // Of a page with a rotated side. The constants of its segment, [layer][kv_head]{mean K, first K, first V} in halves,
  // [head_dim] each, in the plain frame and at the positions of encoding. Null: the mean is 0.
  const std::byte* constants = nullptr;
  // On each rotated side the page's first token is the constants' one, and 0 in block and refinement plane. Needs
  // constants.
  bool exact_first = false;
  // The page's refinement plane: a page of {kRefine4, kRefine4} with as many tokens. Null: none. Both codecs are rotated
  // ones then.
  const std::byte* refinement = nullptr;
  const LayerCodecs* layers = nullptr;  // of kLayersPair, of this geometry; such a page has no refinement plane
  // Of a page with a side in pq4 or pq2: the codebooks that it was encoded with.
  const PqCodebooks* codebooks = nullptr;
};

// Of a vector in PageRef::constants.
constexpr size_t ConstantOffset(const Geometry& geometry, int layer, int kv_head, Constant which) {
  const size_t head =
      static_cast<size_t>(layer) * static_cast<size_t>(geometry.n_kv_heads) + static_cast<size_t>(kv_head);
  return (3 * head + static_cast<size_t>(which)) * 2 * static_cast<size_t>(geometry.head_dim);
}

// How keys and queries were rotated: pair i of a head by position * frequencies[i] radians. frequencies.size() is half of
// the rotary dims, the first ones of a head.
struct Rope {
  enum class Pairs { kInterleaved, kHalves };  // (2i, 2i + 1), or (i, i + rotary dims / 2)
  Pairs pairs = Pairs::kInterleaved;
  std::vector<double> frequencies;
};

// Query i of n_queries stands at position n_keys - n_queries + i and sees keys 0..that position; n_keys is the sum of
// the pages' tokens. One plan serves all layers of a step. REQUIRES: 1 <= n_queries <= n_keys, and `rope` if a page has a
// position offset.
//
// Refinement: an item takes its pages in steps of step_pages. A token with a refinement plane is refined, for all rows of
// the tile, if for one of them its score without refinement is at least L - refine_threshold, where L is the largest
// score of that row among: an exact first token of the context; the newest page that the whole tile sees, without
// refinement; earlier steps of the item; this step, without refinement.
class AttentionPlan {
 public:
  // refine_threshold: natural logarithm of 1 / tau; below 0: refinement planes are not read.
  AttentionPlan(const AttentionShape& shape, int n_queries, std::span<const PageRef> pages, const Rope* rope = nullptr,
                float refine_threshold = -1);

  int n_attend_items() const { return shape.n_kv_heads * n_tiles * n_chunks; }
  int n_merge_items() const { return n_chunks == 1 ? 0 : shape.n_kv_heads * n_tiles; }
  size_t scratch_bytes() const;   // per thread, 64-byte aligned
  size_t partial_floats() const;  // for the whole step; 0 when there is nothing to merge

  // The rest is for the kernels and their tests.
  struct Item {
    int kv_head;
    int first_query, n_queries;
    int first_page, n_pages;  // may reach beyond what the tile's queries see
    int first_key;            // of first_page
  };
  Item ItemAt(int item) const;
  // What turns a query back by an offset: cosine and sine per pair of channels.
  struct Turn {
    int position_offset;
    std::vector<float> cosines, sines;
  };
  const Turn& TurnOf(int position_offset) const;  // of a page of this plan
  int ItemIndex(int kv_head, int tile, int chunk) const;
  int group() const { return shape.n_heads / shape.n_kv_heads; }
  // Query heads of one KV group times queries of one tile: the rows that share every load of a block.
  int tile_rows() const { return tile_queries * group(); }
  // One item's share of the partials: [tile_rows] maxima, [tile_rows] sums, [tile_rows][head_dim] outputs.
  size_t item_partial_floats() const { return static_cast<size_t>(tile_rows()) * (shape.head_dim + 2); }

  AttentionShape shape;
  int n_queries = 0;
  int n_keys = 0;
  int n_pages = 0;
  float refine_threshold = -1;
  int tile_queries = 0;
  int n_tiles = 0;
  int chunk_pages = 0;  // a multiple of step_pages
  int step_pages = 0;   // per step of the softmax
  int n_chunks = 0;
  bool partials_rotated = false;     // the frame of the partials' outputs
  std::vector<int> chunk_first_key;  // [n_chunks]
  Rope::Pairs pairs = Rope::Pairs::kInterleaved;
  std::vector<Turn> turns;  // by offset, one each

 private:
  void AddTurn(int position_offset, const Rope* rope);
};

// Keys of pages with a refinement plane, each counted once per KV head and tile of queries that came by.
struct KeyCounts {
  uint64_t seen = 0;
  uint64_t refined = 0;
};

// q, out: [n_queries][n_heads][head_dim] fp32, q after RoPE. `pages` as given to the plan; `layer` of 0..n_layers-1
// picks their blocks. Runs item `item` of 0..n_attend_items()-1. With one chunk it writes `out` itself, else
// `partials`. Adds to `counts` unless it is null; one per thread.
// NaN or infinity in a block or a query spoils that KV head's rows and nothing else.
void Attend(const AttentionPlan& plan, std::span<const PageRef> pages, int n_layers, int layer, const float* q,
            int item, std::byte* scratch, float* partials, float* out, KeyCounts* counts = nullptr);
void Merge(const AttentionPlan& plan, const float* partials, int item, float* out);

// Which tokens are refined: bit t of tokens[(kv_head * n_tiles + tile) * n_pages + page].
struct Refined {
  int tile_queries = 0;
  int n_tiles = 0;
  std::vector<uint32_t> tokens;
};

// The same in double precision over decoded blocks, one row at a time, with the keys of moved pages rotated instead of the
// queries; for tests. out as above. Without `refined` no refinement plane is read.
void AttendReference(const AttentionShape& shape, std::span<const PageRef> pages, int n_layers, int layer,
                     const float* q, int n_queries, float* out, const Rope* rope = nullptr,
                     const Refined* refined = nullptr);
// The plan's rule in double precision. `margin`: how far the nearest score is from its threshold.
Refined RefinedByReference(const AttentionPlan& plan, std::span<const PageRef> pages, int n_layers, int layer,
                           const float* q, const Rope* rope, double* margin);

}  // namespace qkv
