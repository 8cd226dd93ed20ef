// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/segment/layout.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace qkv {

static_assert(sizeof(size_t) == 8, "offsets inside a page of the largest geometry need 64 bits");

namespace {

bool IsLayerCodec(CodecId id) {
  return id >= CodecId::k3 && id <= CodecId::k8;
}

}  // namespace

Result<std::shared_ptr<const LayerCodecs>> LayerCodecs::Create(const Geometry& geometry,
                                                               std::span<const CodecPair> pairs) {
  if (pairs.size() != static_cast<size_t>(geometry.n_layers)) {
    return Err(Code::kInvalidArgument, "codecs for {} layers, expected {}", pairs.size(), geometry.n_layers);
  }
  std::shared_ptr<LayerCodecs> table(new LayerCodecs());
  table->geometry_ = geometry;
  for (const CodecPair& pair : pairs) {
    if (!IsLayerCodec(pair.k) || !IsLayerCodec(pair.v) || pair.refine) {
      return Err(Code::kInvalidArgument, "layer {}: a codec of layers that differ is one of 3 to 8, without refinement",
                 table->layers_.size());
    }
    const size_t k = CodecOf(pair.k).block_bytes(geometry.head_dim), v = CodecOf(pair.v).block_bytes(geometry.head_dim);
    table->layers_.push_back({pair, table->block_bytes_, k, k + v});
    table->block_bytes_ += (k + v) * static_cast<size_t>(geometry.n_kv_heads);
  }
  return table;
}

Result<std::shared_ptr<const LayerCodecs>> LayerCodecs::Parse(const Geometry& geometry,
                                                              std::span<const uint8_t> bytes) {
  std::vector<CodecPair> pairs;
  for (size_t i = 0; i + 1 < bytes.size(); i += 2) {
    pairs.push_back({static_cast<CodecId>(bytes[i]), static_cast<CodecId>(bytes[i + 1])});
    if (!IsLayerCodec(pairs.back().k) || !IsLayerCodec(pairs.back().v)) {
      return Err(Code::kIncompatible, Reason::kCodecUnsupported,
                 "segment: layer {} has codecs {} and {}, expected those of 3 to 8 bits", i / 2, bytes[i],
                 bytes[i + 1]);
    }
  }
  return Create(geometry, pairs);
}

std::vector<uint8_t> LayerCodecs::Bytes() const {
  std::vector<uint8_t> bytes;
  for (const Layer& layer : layers_) {
    bytes.push_back(static_cast<uint8_t>(layer.codecs.k));
    bytes.push_back(static_cast<uint8_t>(layer.codecs.v));
  }
  return bytes;
}

PageLayout::PageLayout(const Geometry& geometry, CodecPair codecs, const LayerCodecs* table)
    : codecs(codecs), layers(codecs == kLayersPair ? table : nullptr) {
  if (codecs == kLayersPair) {
    QKV_CHECK(table != nullptr && table->geometry() == geometry);
    block_bytes = table->block_bytes();
  } else {
    k_block_bytes = CodecOf(codecs.k).block_bytes(geometry.head_dim);
    v_block_bytes = CodecOf(codecs.v).block_bytes(geometry.head_dim);
    head_stride = k_block_bytes + v_block_bytes;
    layer_stride = head_stride * static_cast<size_t>(geometry.n_kv_heads);
    block_bytes = layer_stride * static_cast<size_t>(geometry.n_layers);
  }
  bytes = (block_bytes + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
}

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
  if (codecs == kLayersPair) return true;
  return std::ranges::any_of(std::array{codecs.k, codecs.v},
                             [](CodecId id) { return CodecOf(id).rotated && id != CodecId::kRefine4; });
}

bool IsRotated(CodecPair codecs) {
  if (codecs == kLayersPair) return true;
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
