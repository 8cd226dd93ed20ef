// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Bytes of a segment: header, page table, constants, pages (docs/FORMAT.md §1 and §2). The structs are copied out of shared
// memory, never used in place: bytes from another process are copied, the copy is validated, and only the copy is used.
// Pure arithmetic and plain data; safe from anywhere.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "qkv/codec/codec.h"

namespace qkv {

// What a page's size depends on. Same for all pages of a context.
struct Geometry {
  int n_layers = 0;    // layers that have a KV cache
  int n_kv_heads = 0;  // per layer
  int head_dim = 0;    // of K and of V
  bool operator==(const Geometry&) const = default;
};

// FORMAT.md §5: limits of every number that comes from outside.
inline constexpr int kMaxLayers = 512;
inline constexpr int kMaxKvHeads = 512;
inline constexpr uint64_t kMaxSegmentBytes = uint64_t{4} << 30;
inline constexpr uint32_t kMaxPagesPerSegment = 1u << 20;
inline constexpr uint32_t kMaxPosition = 1u << 30;  // of any token; positions are below it
inline constexpr size_t kPageAlignment = 4096;      // pages start on it, so that one page can be mapped alone
inline constexpr uint32_t kSegmentVersion = 2;      // any change below or in a codec's block layout bumps it
inline constexpr std::array<char, 8> kSegmentMagic = {'Q', 'K', 'V', 'S', 'E', 'G', '0', '1'};
inline constexpr uint32_t kByteOrderMark = 0x01020304;

struct SegmentHeader {  // FORMAT.md §1.1
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t byte_order;  // kByteOrderMark as the writer's CPU stores it
  uint32_t n_layers;
  uint32_t n_kv_heads;
  uint32_t k_head_dim;
  uint32_t v_head_dim;
  uint32_t page_tokens;
  uint32_t n_pages;                            // entries used in the page table; written at sealing
  uint64_t table_offset;                       // sizeof(SegmentHeader)
  uint64_t data_offset;                        // of the first page
  uint64_t file_bytes;                         // of the whole sealed segment
  uint64_t rotation_seed;                      // kRotationSeed if a page is rotated, else 0
  std::array<uint8_t, 16> model_digest;        // XXH3-128 of the weights
  std::array<uint8_t, 16> calibration_digest;  // of the matrices that keys were multiplied with; zero: none
  uint64_t constants_offset;                   // 0: none
  uint64_t constants_bytes;                    // exactly ConstantsLayout::bytes, or 0
  uint64_t constants_checksum;                 // XXH3-64 of them, or 0
  uint64_t layers_offset;                      // of LayerCodecs::Bytes(); 0: none
  uint64_t layers_bytes;                       // exactly 2 n_layers, or 0
  uint64_t layers_checksum;                    // XXH3-64 of them, or 0
  std::array<uint8_t, 32> reserved;            // zero
  uint64_t header_checksum;                    // HeaderChecksum()
};
static_assert(sizeof(SegmentHeader) == 192 && std::is_trivially_copyable_v<SegmentHeader>);

struct PageEntry {  // FORMAT.md §1.2
  uint8_t k_codec;  // CodecId
  uint8_t v_codec;
  uint16_t tokens;          // 1..32
  uint32_t first_position;  // of the page's first token in the context it was written for
  uint64_t offset;          // from the start of the file; a multiple of kPageAlignment
  uint64_t bytes;           // exactly PageLayout::bytes
  uint64_t checksum;        // XXH3-64 of those bytes
};
static_assert(sizeof(PageEntry) == 32 && std::is_trivially_copyable_v<PageEntry>);

// One codec pair per layer, for pages of kLayersPair, and where it puts their blocks. Immutable; shared by those who write
// or read such pages. FORMAT.md §1.4.
class LayerCodecs {
 public:
  // As many pairs as layers, of k3 to k8 and without refinement: all others need more than a table to be read with.
  // Error: kInvalidArgument.
  static Result<std::shared_ptr<const LayerCodecs>> Create(const Geometry& geometry, std::span<const CodecPair> pairs);
  // From bytes as a segment has them. Errors: kIncompatible/codec_unsupported.
  static Result<std::shared_ptr<const LayerCodecs>> Parse(const Geometry& geometry, std::span<const uint8_t> bytes);
  std::vector<uint8_t> Bytes() const;  // [layer]{K's CodecId, V's}

  struct Layer {
    CodecPair codecs;
    size_t offset;  // of the layer's first block, from the start of the page
    size_t k_block_bytes;
    size_t head_stride;
  };
  const Layer& at(int layer) const { return layers_[static_cast<size_t>(layer)]; }
  const Geometry& geometry() const { return geometry_; }
  size_t block_bytes() const { return block_bytes_; }  // of all blocks of a page
  bool operator==(const LayerCodecs& other) const { return geometry_ == other.geometry_ && Bytes() == other.Bytes(); }

 private:
  LayerCodecs() = default;

  Geometry geometry_;
  std::vector<Layer> layers_;
  size_t block_bytes_ = 0;
};

// What pages are written in: a pair for all layers, or a table. A value; copies share the table.
struct PageCodecs {
  PageCodecs() = default;
  PageCodecs(CodecPair pair, std::shared_ptr<const LayerCodecs> table = nullptr)  // NOLINT: a pair says all there is
      : pair(pair), layers(pair == kLayersPair ? std::move(table) : nullptr) {}
  PageCodecs(CodecId k, CodecId v, bool refine = false) : pair{k, v, refine} {}

  CodecPair pair;
  std::shared_ptr<const LayerCodecs> layers;  // exactly with kLayersPair

  bool operator==(const PageCodecs& other) const {
    return pair == other.pair &&
           (layers == other.layers || (layers != nullptr && other.layers != nullptr && *layers == *other.layers));
  }
};

// Where a page's blocks are: [layer][kv_head]{K block, V block}. FORMAT.md §2.
struct PageLayout {
  // `layers`: of kLayersPair, else not looked at; must outlive this.
  PageLayout(const Geometry& geometry, CodecPair codecs, const LayerCodecs* layers = nullptr);

  CodecPair codecs;
  const LayerCodecs* layers;  // null: one pair for all
  size_t k_block_bytes = 0;   // these four: where layers do not differ
  size_t v_block_bytes = 0;
  size_t head_stride = 0;   // k_block_bytes + v_block_bytes
  size_t layer_stride = 0;  // head_stride * n_kv_heads
  size_t block_bytes;       // of all blocks
  size_t bytes;             // of the page, rounded up to kPageAlignment

  CodecPair CodecsOf(int layer) const { return layers == nullptr ? codecs : layers->at(layer).codecs; }
  size_t BlockOffset(Side side, int layer, int kv_head) const {
    if (layers != nullptr) {
      const LayerCodecs::Layer& at = layers->at(layer);
      return at.offset + at.head_stride * static_cast<size_t>(kv_head) + (side == Side::kV ? at.k_block_bytes : 0);
    }
    return layer_stride * static_cast<size_t>(layer) + head_stride * static_cast<size_t>(kv_head) +
           (side == Side::kV ? k_block_bytes : 0);
  }
};

// What rotated pages (3 to 8, 5/3, pq4, pq2) are read with, once per segment, [layer][kv_head]{mean K, first K, first V},
// halves in the plain frame: the mean that was taken off keys, and the exact K and V of the token at position 0, which its
// page leaves out. FORMAT.md §1.3.
enum class Constant : uint8_t { kMeanK, kFirstK, kFirstV };

struct ConstantsLayout {
  explicit ConstantsLayout(const Geometry& geometry);

  size_t vector_bytes;  // head_dim halves
  size_t head_stride;   // three vectors
  size_t layer_stride;  // head_stride * n_kv_heads
  size_t bytes;

  size_t Offset(int layer, int kv_head, Constant which) const {
    return layer_stride * static_cast<size_t>(layer) + head_stride * static_cast<size_t>(kv_head) +
           vector_bytes * static_cast<size_t>(which);
  }
};

// For a writer. All finite.
struct SegmentConstants {
  explicit SegmentConstants(const Geometry& geometry);  // zeros
  std::span<uint16_t> at(int layer, int kv_head, Constant which);

  ConstantsLayout layout;
  std::vector<uint16_t> halves;
  std::array<uint8_t, 16> calibration_digest{};
};

// A page that needs constants: one side at least is rotated, and no refinement.
bool NeedsConstants(CodecPair codecs);
// A page that needs the header's rotation_seed: such a page, or a refinement page.
bool IsRotated(CodecPair codecs);

// Every number within its limit, head_dim a size that the codecs take. Error: kInvalidArgument.
Status ValidateGeometry(const Geometry& geometry);

// The start of a file: header, then the used part of the page table.
std::vector<std::byte> HeadBytes(const SegmentHeader& header, std::span<const PageEntry> table);
// XXH3-64 of the head with header_checksum zero.
uint64_t HeaderChecksum(SegmentHeader header, std::span<const PageEntry> table);
// Segment::digest(): XXH3-128 of the head, 32 hex digits in canonical (big-endian) order.
std::string ContentDigest(const SegmentHeader& header, std::span<const PageEntry> table);

}  // namespace qkv
