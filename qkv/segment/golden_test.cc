// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// tests/golden/segment-v2.bin, segment-v2-rotated.bin and segment-v2-layers.bin, written once by version 2 and readable ever
// since; the values here are written by hand. QKV_WRITE_GOLDEN=1 rewrites the files: only together with a new
// kSegmentVersion, under a new name.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

#include "qkv/codec/frame.h"
#include "qkv/codec/half.h"
#include "qkv/segment/test_support.h"

namespace qkv {
namespace {

using namespace test;  // NOLINT: helpers of these tests

// 32 channels; exact in f16, with another largest value in every token.
float Value(Side side, int token, int channel) {
  const float k = static_cast<float>((token + 1) * (channel - 16)) / 64;
  return side == Side::kK ? k : -k / 2;
}

Bytes MakeGoldenSegment() {
  auto writer = Take(SegmentWriter::Create(kSmall, 2 * 4096, kModelDigest));
  const auto append = [&](CodecPair codecs, int tokens, uint32_t position) {
    const PageLayout layout(kSmall, codecs);
    Take(writer->Append(codecs, tokens, position, [&](std::byte* page) {
      for (const Side side : {Side::kK, Side::kV}) {
        std::vector<float> rows;
        for (int token = 0; token < tokens; ++token) {
          for (int channel = 0; channel < 32; ++channel) rows.push_back(Value(side, token, channel));
        }
        CodecOf(side == Side::kK ? codecs.k : codecs.v)
            .encode(side, rows.data(), tokens, 32, page + layout.BlockOffset(side, 0, 0));
      }
    }));
  };
  append(kF16Pair, 32, 0);
  append(kI8Pair, 5, 32);
  return BytesOf(*Take(SegmentWriter::Seal(writer)));
}

Bytes GoldenSegment() {
  const auto path = GoldenPath("segment-v2.bin");
  if (WritesGolden()) WriteFile(path, MakeGoldenSegment());
  return ReadFile(path);
}

TEST(GoldenSegment, VersionTwoOpensAndHoldsWhatWasWritten) {
  const Bytes bytes = GoldenSegment();
  ASSERT_EQ(bytes.size(), 12288u);
  EXPECT_EQ(std::memcmp(bytes.data(), "QKVSEG01", 8), 0);
  const auto segment = Take(OpenSealed(bytes));
  ASSERT_TRUE(segment->Verify(0, 2, 1));

  const SegmentHeader& header = segment->header();
  EXPECT_EQ(header.version, 2u);
  EXPECT_EQ(header.n_layers, 1u);
  EXPECT_EQ(header.n_kv_heads, 1u);
  EXPECT_EQ(header.k_head_dim, 32u);
  EXPECT_EQ(header.v_head_dim, 32u);
  EXPECT_EQ(header.page_tokens, 32u);
  EXPECT_EQ(header.n_pages, 2u);
  EXPECT_EQ(header.table_offset, 192u);
  EXPECT_EQ(header.data_offset, 4096u);
  EXPECT_EQ(header.file_bytes, 12288u);
  EXPECT_EQ(header.rotation_seed, 0u);
  EXPECT_EQ(header.model_digest[1], 0x11);
  EXPECT_EQ(header.model_digest[15], 0xff);

  const PageEntry& f16 = segment->pages()[0];
  EXPECT_EQ(f16.k_codec, 1);
  EXPECT_EQ(f16.v_codec, 1);
  EXPECT_EQ(f16.tokens, 32);
  EXPECT_EQ(f16.first_position, 0u);
  EXPECT_EQ(f16.offset, 4096u);
  EXPECT_EQ(f16.bytes, 4096u);
  const PageEntry& i8 = segment->pages()[1];
  EXPECT_EQ(i8.k_codec, 2);
  EXPECT_EQ(i8.v_codec, 2);
  EXPECT_EQ(i8.tokens, 5);
  EXPECT_EQ(i8.first_position, 32u);
  EXPECT_EQ(i8.offset, 8192u);
  EXPECT_EQ(i8.bytes, 4096u);

  for (size_t page = 0; page < 2; ++page) {
    const int tokens = segment->pages()[page].tokens;
    const PageLayout layout(segment->geometry(), segment->codecs(page));
    for (const Side side : {Side::kK, Side::kV}) {
      std::vector<float> rows(static_cast<size_t>(tokens) * 32);
      CodecOf(segment->codecs(page).k)
          .decode(side, segment->page(page) + layout.BlockOffset(side, 0, 0), tokens, 32, rows.data());
      for (int token = 0; token < tokens; ++token) {
        // i8: half a step of 1/127 of the token's largest value (channel 0's), and a little for the f16 scale.
        const float tolerance = page == 0 ? 0 : 0.6f / 127 * std::abs(Value(side, token, 0));
        for (int channel = 0; channel < 32; ++channel) {
          ASSERT_NEAR(rows[static_cast<size_t>(token * 32 + channel)], Value(side, token, channel), tolerance)
              << "page " << page << " token " << token << " channel " << channel;
        }
      }
    }
  }
}

// Page 0: 32 tokens in 5 and 3 bits; the first is exact, by the constants. Page 1: 3 tokens in 8 bits. 10 is the mean of
// all keys.
constexpr CodecPair kGoldenPairs[] = {{CodecId::k5, CodecId::k3}, {CodecId::k8, CodecId::k8}};
constexpr int kGoldenTokens[] = {32, 3};
constexpr float kMean = 10;

float RotatedValue(Side side, int token, int channel) {
  return Value(side, token, channel) / 8 + (side == Side::kK ? kMean : 0);
}

Bytes MakeRotatedGoldenSegment() {
  const std::vector<float> mean(32, kMean);
  SegmentConstants constants(kSmall);
  for (int channel = 0; channel < 32; ++channel) {
    const auto at = [&](Constant which) -> uint16_t& {
      return constants.at(0, 0, which)[static_cast<size_t>(channel)];
    };
    at(Constant::kMeanK) = HalfFromFloat(kMean);
    at(Constant::kFirstK) = HalfFromFloat(RotatedValue(Side::kK, 0, channel));
    at(Constant::kFirstV) = HalfFromFloat(RotatedValue(Side::kV, 0, channel));
  }
  auto writer = Take(SegmentWriter::Create(kSmall, 2 * 4096, kModelDigest, &constants));
  uint32_t position = 0;
  for (size_t page = 0; page < 2; ++page) {
    const CodecPair codecs = kGoldenPairs[page];
    const PageLayout layout(kSmall, codecs);
    Take(writer->Append(codecs, kGoldenTokens[page], position, [&](std::byte* bytes) {
      for (const Side side : {Side::kK, Side::kV}) {
        std::vector<float> rows;
        for (int token = 0; token < kGoldenTokens[page]; ++token) {
          for (int channel = 0; channel < 32; ++channel) rows.push_back(RotatedValue(side, token, channel));
        }
        ToRotated(rows.data(), kGoldenTokens[page], 32, side == Side::kK ? mean.data() : nullptr, rows.data());
        if (position == 0) std::fill_n(rows.begin(), 32, 0.0f);
        CodecOf(side == Side::kK ? codecs.k : codecs.v)
            .encode(side, rows.data(), kGoldenTokens[page], 32, bytes + layout.BlockOffset(side, 0, 0));
      }
    }));
    position += 32;
  }
  return BytesOf(*Take(SegmentWriter::Seal(writer)));
}

TEST(GoldenSegment, VersionTwoHoldsRotatedPagesAndTheirConstants) {
  const auto path = GoldenPath("segment-v2-rotated.bin");
  if (WritesGolden()) WriteFile(path, MakeRotatedGoldenSegment());
  const Bytes bytes = ReadFile(path);
  ASSERT_EQ(bytes.size(), 12288u);
  const auto segment = Take(OpenSealed(bytes));
  ASSERT_TRUE(segment->Verify(0, 2, 1));
  const SegmentHeader& header = segment->header();
  EXPECT_EQ(header.rotation_seed, 0x6572616853564b51u);
  EXPECT_EQ(header.calibration_digest, (std::array<uint8_t, 16>{}));
  EXPECT_EQ(header.constants_offset, 256u);
  EXPECT_EQ(header.constants_bytes, 192u);
  std::vector<uint16_t> halves(96);
  std::memcpy(halves.data(), segment->constants(), 192);
  EXPECT_EQ(halves[0], 0x4900);  // 10
  EXPECT_EQ(halves[31], 0x4900);
  EXPECT_EQ(halves[32], 0x48fc);  // first K, channel 0: 10 - 16/512
  EXPECT_EQ(halves[64], 0x2400);  // first V, channel 0: 16/1024

  // Steps of the codes, of a rotated row's largest value at most; a third of a cell of 3 bits is the worst of it here.
  const float steps[2][2] = {{1.0f / 31, 1.0f / 7}, {0.5f / 127, 0.5f / 127}};
  for (size_t page = 0; page < 2; ++page) {
    const CodecPair codecs = segment->codecs(page);
    EXPECT_EQ(codecs, kGoldenPairs[page]);
    const PageLayout layout(segment->geometry(), codecs);
    for (const Side side : {Side::kK, Side::kV}) {
      const int tokens = kGoldenTokens[page];
      std::vector<float> rows(static_cast<size_t>(tokens) * 32), mean(32, kMean);
      CodecOf(side == Side::kK ? codecs.k : codecs.v)
          .decode(side, segment->page(page) + layout.BlockOffset(side, 0, 0), tokens, 32, rows.data());
      EXPECT_EQ(std::count(rows.begin(), rows.begin() + 32, 0.0f), page == 0 ? 32 : 0);
      FromRotated(rows.data(), tokens, 32, side == Side::kK ? mean.data() : nullptr, rows.data());
      for (int token = page == 0 ? 1 : 0; token < tokens; ++token) {
        double error = 0, energy = 0;
        for (int channel = 0; channel < 32; ++channel) {
          const double value = RotatedValue(side, token, channel);
          error += std::pow(rows[static_cast<size_t>(token * 32 + channel)] - value, 2);
          energy += std::pow(value - (side == Side::kK ? kMean : 0), 2);
        }
        // The largest of 32 rotated values is at most the row's length.
        EXPECT_LT(std::sqrt(error / 32), steps[page][side == Side::kV] * std::sqrt(energy)) << page << " " << token;
      }
    }
  }
}

// The rotated file's first page, its codecs named by the layers' table.
TEST(GoldenSegment, VersionTwoHoldsLayersOfTheirOwnCodecs) {
  const Bytes rotated = ReadFile(GoldenPath("segment-v2-rotated.bin"));
  const auto of_pairs = Take(OpenSealed(rotated));
  const auto path = GoldenPath("segment-v2-layers.bin");
  if (WritesGolden()) {
    SegmentConstants constants(kSmall);
    std::memcpy(constants.halves.data(), of_pairs->constants(), 192);
    auto writer = Take(SegmentWriter::Create(kSmall, 4096, kModelDigest, &constants,
                                             Take(LayerCodecs::Create(kSmall, std::array{kGoldenPairs[0]}))));
    Take(writer->Append(kLayersPair, 32, 0, [&](std::byte* page) { std::memcpy(page, of_pairs->page(0), 4096); }));
    WriteFile(path, BytesOf(*Take(SegmentWriter::Seal(writer))));
  }
  const Bytes bytes = ReadFile(path);
  ASSERT_EQ(bytes.size(), 8192u);
  EXPECT_EQ(bytes[192], std::byte{18});
  EXPECT_EQ(bytes[193], std::byte{18});
  EXPECT_EQ(bytes[448], std::byte{9});  // 5 bits
  EXPECT_EQ(bytes[449], std::byte{7});  // 3 bits
  const auto segment = Take(OpenSealed(bytes));
  ASSERT_TRUE(segment->Verify(0));
  EXPECT_EQ(segment->header().layers_offset, 448u);
  EXPECT_EQ(segment->header().layers_bytes, 2u);
  EXPECT_EQ(segment->codecs(0), kLayersPair);
  EXPECT_EQ(segment->layout(0).CodecsOf(0), kGoldenPairs[0]);
  EXPECT_EQ(std::memcmp(segment->page(0), of_pairs->page(0), 4096), 0);
}

// The rows of FORMAT.md's hexdump: "00000000  51 4b …  |QKV…|".
std::string HexDump(const Bytes& bytes, size_t end) {
  std::string text;
  for (size_t at = 0; at < end; at += 16) {
    text += fmt::format("{:08x} ", at);
    std::string printable;
    for (size_t i = at; i < at + 16; ++i) {
      const auto byte = std::to_integer<unsigned>(bytes[i]);
      text += fmt::format("{}{:02x}", i == at + 8 ? "  " : " ", byte);
      printable += byte >= 0x20 && byte < 0x7f ? static_cast<char>(byte) : '.';
    }
    text += fmt::format("  |{}|\n", printable);
  }
  return text;
}

TEST(GoldenSegment, TheHexdumpInFormatMdIsOfThisFile) {
  const Bytes bytes = GoldenSegment();
  const Bytes document =
      ReadFile(GoldenPath("segment-v2.bin").parent_path().parent_path().parent_path() / "docs" / "FORMAT.md");
  std::istringstream lines(std::string(reinterpret_cast<const char*>(document.data()), document.size()));
  std::string found;
  for (std::string line; std::getline(lines, line);) {
    if (line.size() > 10 && line.find("  |") != std::string::npos && line.find_first_not_of("0123456789abcdef") == 8) {
      found += line.substr(0, line.rfind('|') + 1) + "\n";  // behind it stand the notes
    }
  }
  EXPECT_EQ(found, HexDump(bytes, sizeof(SegmentHeader) + 2 * sizeof(PageEntry)));
}

}  // namespace
}  // namespace qkv
