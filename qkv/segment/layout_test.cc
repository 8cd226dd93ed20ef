// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/segment/layout.h"

#include <gtest/gtest.h>

#include <cstddef>

namespace qkv {
namespace {

TEST(Layout, HeaderFieldsStandWhereFormatMdSays) {
  EXPECT_EQ(offsetof(SegmentHeader, magic), 0u);
  EXPECT_EQ(offsetof(SegmentHeader, version), 8u);
  EXPECT_EQ(offsetof(SegmentHeader, byte_order), 12u);
  EXPECT_EQ(offsetof(SegmentHeader, n_layers), 16u);
  EXPECT_EQ(offsetof(SegmentHeader, n_kv_heads), 20u);
  EXPECT_EQ(offsetof(SegmentHeader, k_head_dim), 24u);
  EXPECT_EQ(offsetof(SegmentHeader, v_head_dim), 28u);
  EXPECT_EQ(offsetof(SegmentHeader, page_tokens), 32u);
  EXPECT_EQ(offsetof(SegmentHeader, n_pages), 36u);
  EXPECT_EQ(offsetof(SegmentHeader, table_offset), 40u);
  EXPECT_EQ(offsetof(SegmentHeader, data_offset), 48u);
  EXPECT_EQ(offsetof(SegmentHeader, file_bytes), 56u);
  EXPECT_EQ(offsetof(SegmentHeader, rotation_seed), 64u);
  EXPECT_EQ(offsetof(SegmentHeader, model_digest), 72u);
  EXPECT_EQ(offsetof(SegmentHeader, calibration_digest), 88u);
  EXPECT_EQ(offsetof(SegmentHeader, constants_offset), 104u);
  EXPECT_EQ(offsetof(SegmentHeader, constants_bytes), 112u);
  EXPECT_EQ(offsetof(SegmentHeader, constants_checksum), 120u);
  EXPECT_EQ(offsetof(SegmentHeader, layers_offset), 128u);
  EXPECT_EQ(offsetof(SegmentHeader, layers_bytes), 136u);
  EXPECT_EQ(offsetof(SegmentHeader, layers_checksum), 144u);
  EXPECT_EQ(offsetof(SegmentHeader, reserved), 152u);
  EXPECT_EQ(offsetof(SegmentHeader, header_checksum), 184u);
  EXPECT_EQ(offsetof(PageEntry, k_codec), 0u);
  EXPECT_EQ(offsetof(PageEntry, v_codec), 1u);
  EXPECT_EQ(offsetof(PageEntry, tokens), 2u);
  EXPECT_EQ(offsetof(PageEntry, first_position), 4u);
  EXPECT_EQ(offsetof(PageEntry, offset), 8u);
  EXPECT_EQ(offsetof(PageEntry, bytes), 16u);
  EXPECT_EQ(offsetof(PageEntry, checksum), 24u);
}

TEST(Layout, BlocksFollowOneAnotherByLayerThenHeadThenKAndV) {
  const Geometry geometry{.n_layers = 3, .n_kv_heads = 2, .head_dim = 80};
  for (const Codec& k : Codecs()) {
    for (const Codec& v : Codecs()) {
      const PageLayout layout(geometry, {k.id, v.id});
      size_t at = 0;
      for (int layer = 0; layer < 3; ++layer) {
        for (int head = 0; head < 2; ++head) {
          EXPECT_EQ(layout.BlockOffset(Side::kK, layer, head), at);
          at += k.block_bytes(80);
          EXPECT_EQ(layout.BlockOffset(Side::kV, layer, head), at);
          at += v.block_bytes(80);
        }
      }
      EXPECT_GE(layout.bytes, at) << k.name << " " << v.name;
      EXPECT_LT(layout.bytes, at + 4096);
      EXPECT_EQ(layout.bytes % 4096, 0u);
    }
  }
}

TEST(Layout, LayersOfDifferentCodecsFollowOneAnotherLikewise) {
  const Geometry geometry{.n_layers = 3, .n_kv_heads = 2, .head_dim = 80};
  const CodecPair pairs[] = {{CodecId::k8, CodecId::k3}, {CodecId::k4, CodecId::k7}, {CodecId::k5, CodecId::k6}};
  const auto table = LayerCodecs::Create(geometry, pairs);
  ASSERT_TRUE(table) << table.error().message;
  const PageLayout layout(geometry, kLayersPair, table->get());
  size_t at = 0;
  for (int layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(layout.CodecsOf(layer), pairs[layer]);
    for (int head = 0; head < 2; ++head) {
      EXPECT_EQ(layout.BlockOffset(Side::kK, layer, head), at);
      at += CodecOf(pairs[layer].k).block_bytes(80);
      EXPECT_EQ(layout.BlockOffset(Side::kV, layer, head), at);
      at += CodecOf(pairs[layer].v).block_bytes(80);
    }
  }
  EXPECT_EQ(layout.block_bytes, at);
  EXPECT_EQ(layout.bytes, (at + 4095) / 4096 * 4096);
  EXPECT_EQ((*table)->Bytes(), (std::vector<uint8_t>{12, 7, 8, 11, 9, 10}));  // as FORMAT.md §3 numbers them
  const std::vector<uint8_t> bytes = (*table)->Bytes();
  EXPECT_EQ(**LayerCodecs::Parse(geometry, bytes), **table);
}

TEST(Layout, OnlyCodecsOf3To8BitsDifferByLayer) {
  const Geometry geometry{.n_layers = 2, .n_kv_heads = 1, .head_dim = 64};
  const auto create = [&](std::vector<CodecPair> pairs) { return LayerCodecs::Create(geometry, pairs); };
  const CodecPair four{CodecId::k4, CodecId::k4};
  EXPECT_TRUE(create({four, four}));
  for (const CodecPair bad :
       {CodecPair{CodecId::k4, CodecId::kI8}, CodecPair{CodecId::kF16, CodecId::k4},
        CodecPair{CodecId::kRefine4, CodecId::kRefine4}, CodecPair{CodecId::k4, CodecId::k4, true}, kLayersPair}) {
    const auto refused = create({four, bad});
    ASSERT_FALSE(refused) << ToString(bad);
    EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
  }
  EXPECT_FALSE(create({four}));
  EXPECT_FALSE(create({four, four, four}));
  for (int id = 0; id < 256; ++id) {
    const uint8_t bytes[] = {8, 8, 8, static_cast<uint8_t>(id)};
    const auto parsed = LayerCodecs::Parse(geometry, bytes);
    EXPECT_EQ(parsed.has_value(), id >= 7 && id <= 12) << id;
    if (!parsed) {
      EXPECT_EQ(parsed.error().reason, Reason::kCodecUnsupported);
    }
  }
}

TEST(Layout, AnF16PageTakesTwoBytesPerValue) {
  // SmolLM2-135M: 30 layers, 3 KV heads of 64; 32 tokens, K and V, 2 bytes: 737280, a multiple of 4096.
  const PageLayout layout({.n_layers = 30, .n_kv_heads = 3, .head_dim = 64}, {CodecId::kF16, CodecId::kF16});
  EXPECT_EQ(layout.bytes, 30u * 3 * 64 * 32 * 2 * 2);
}

TEST(Layout, ThePageOfTheLargestGeometryDoesNotOverflow) {
  const PageLayout layout({.n_layers = kMaxLayers, .n_kv_heads = kMaxKvHeads, .head_dim = kMaxHeadDim},
                          {CodecId::kF16, CodecId::kF16});
  EXPECT_EQ(layout.bytes, uint64_t{512} * 512 * 256 * 32 * 2 * 2);
}

TEST(Layout, ConstantsAreThreeVectorsPerLayerAndHead) {
  const Geometry geometry{.n_layers = 3, .n_kv_heads = 2, .head_dim = 80};
  SegmentConstants constants(geometry);
  EXPECT_EQ(constants.layout.bytes, 3u * 2 * 3 * 80 * 2);
  ASSERT_EQ(constants.halves.size(), 3u * 2 * 3 * 80);
  size_t at = 0;
  for (int layer = 0; layer < 3; ++layer) {
    for (int head = 0; head < 2; ++head) {
      for (const Constant which : {Constant::kMeanK, Constant::kFirstK, Constant::kFirstV}) {
        EXPECT_EQ(constants.layout.Offset(layer, head, which), at);
        const auto vector = constants.at(layer, head, which);
        EXPECT_EQ(vector.size(), 80u);
        EXPECT_EQ(vector.data(), constants.halves.data() + at / 2);
        at += 160;
      }
    }
  }
}

TEST(Layout, PagesOfThreeToEightBitsNeedConstantsRefinementsOnlyTheSeed) {
  for (const Codec& k : Codecs()) {
    for (const Codec& v : Codecs()) {
      EXPECT_EQ(NeedsConstants({k.id, v.id}), k.rotated || v.rotated);
      EXPECT_EQ(IsRotated({k.id, v.id}), k.rotated || v.rotated);
    }
  }
  EXPECT_FALSE(NeedsConstants({CodecId::kRefine4, CodecId::kRefine4}));
  EXPECT_TRUE(IsRotated({CodecId::kRefine4, CodecId::kRefine4}));
}

TEST(Layout, GeometryBeyondALimitIsRefused) {
  EXPECT_TRUE(ValidateGeometry({.n_layers = 1, .n_kv_heads = 1, .head_dim = 32}));
  EXPECT_TRUE(ValidateGeometry({.n_layers = 512, .n_kv_heads = 512, .head_dim = 256}));
  for (const Geometry& bad : {Geometry{0, 1, 64}, Geometry{513, 1, 64}, Geometry{-1, 1, 64}, Geometry{1, 0, 64},
                              Geometry{1, 513, 64}, Geometry{1, -7, 64}, Geometry{1, 1, 0}, Geometry{1, 1, 16},
                              Geometry{1, 1, 72}, Geometry{1, 1, 272}, Geometry{1, 1, -64}}) {
    const Status status = ValidateGeometry(bad);
    ASSERT_FALSE(status) << bad.n_layers << " " << bad.n_kv_heads << " " << bad.head_dim;
    EXPECT_EQ(status.error().code, Code::kInvalidArgument);
  }
}

TEST(Layout, TheHeaderChecksumCoversHeaderAndTableButNotItself) {
  SegmentHeader header{};
  PageEntry entry{};
  const uint64_t checksum = HeaderChecksum(header, {&entry, 1});
  header.header_checksum = 12345;
  EXPECT_EQ(HeaderChecksum(header, {&entry, 1}), checksum);
  header.rotation_seed = 1;
  EXPECT_NE(HeaderChecksum(header, {&entry, 1}), checksum);
  header.rotation_seed = 0;
  entry.checksum = 1;
  EXPECT_NE(HeaderChecksum(header, {&entry, 1}), checksum);
}

}  // namespace
}  // namespace qkv
