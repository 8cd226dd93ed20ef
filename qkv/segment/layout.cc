// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/segment/layout.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace qkv {

static_assert(sizeof(size_t) == 8, "offsets inside a page of the largest geometry need 64 bits");

PageLayout::PageLayout(const Geometry& geometry, CodecPair codecs)
    : k_block_bytes(CodecOf(codecs.k).block_bytes(geometry.head_dim)),
      v_block_bytes(CodecOf(codecs.v).block_bytes(geometry.head_dim)),
      head_stride(k_block_bytes + v_block_bytes),
      layer_stride(head_stride * static_cast<size_t>(geometry.n_kv_heads)),
      bytes((layer_stride * static_cast<size_t>(geometry.n_layers) + kPageAlignment - 1) / kPageAlignment *
            kPageAlignment) {}

ConstantsLayout::ConstantsLayout(const Geometry& geometry)
    : vector_bytes(2 * static_cast<size_t>(geometry.head_dim)),
      head_stride(3 * vector_bytes),
      layer_stride(head_stride * static_cast<size_t>(geometry.n_kv_heads)),
      bytes(layer_stride * static_cast<size_t>(geometry.n_layers)) {}

SegmentConstants::SegmentConstants(const Geometry& geometry) : layout(geometry), halves(layout.bytes / 2) {}

std::span<uint16_t> SegmentConstants::at(int layer, int kv_head, Constant which) {
  return std::span(halves).subspan(layout.Offset(layer, kv_head, which) / 2, layout.vector_bytes / 2);
}

bool NeedsConstants(CodecPair codecs) {
  return std::ranges::any_of(std::array{codecs.k, codecs.v},
                             [](CodecId id) { return CodecOf(id).rotated && id != CodecId::kRefine4; });
}

bool IsRotated(CodecPair codecs) {
  return CodecOf(codecs.k).rotated || CodecOf(codecs.v).rotated;
}

Status ValidateGeometry(const Geometry& geometry) {
  if (geometry.n_layers < 1 || geometry.n_layers > kMaxLayers) {
    return Err(Code::kInvalidArgument, "geometry: {} layers, expected 1 to {}", geometry.n_layers, kMaxLayers);
  }
  if (geometry.n_kv_heads < 1 || geometry.n_kv_heads > kMaxKvHeads) {
    return Err(Code::kInvalidArgument, "geometry: {} KV heads, expected 1 to {}", geometry.n_kv_heads, kMaxKvHeads);
  }
  if (geometry.head_dim < kMinHeadDim || geometry.head_dim > kMaxHeadDim || geometry.head_dim % 16 != 0) {
    return Err(Code::kInvalidArgument, "geometry: head_dim {}, expected a multiple of 16 from {} to {}",
               geometry.head_dim, kMinHeadDim, kMaxHeadDim);
  }
  return {};
}

std::vector<std::byte> HeadBytes(const SegmentHeader& header, std::span<const PageEntry> table) {
  std::vector<std::byte> bytes(sizeof(header) + table.size_bytes());
  std::memcpy(bytes.data(), &header, sizeof(header));
  if (!table.empty()) std::memcpy(bytes.data() + sizeof(header), table.data(), table.size_bytes());
  return bytes;
}

uint64_t HeaderChecksum(SegmentHeader header, std::span<const PageEntry> table) {
  header.header_checksum = 0;
  const std::vector<std::byte> head = HeadBytes(header, table);
  return XXH3_64bits(head.data(), head.size());
}

std::string ContentDigest(const SegmentHeader& header, std::span<const PageEntry> table) {
  const std::vector<std::byte> head = HeadBytes(header, table);
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(head.data(), head.size()));
  std::string hex;
  for (const unsigned char byte : canonical.digest) hex += fmt::format("{:02x}", byte);
  return hex;
}

}  // namespace qkv
