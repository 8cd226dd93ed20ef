// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/segment/segment.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <functional>
#include <thread>

#include "qkv/segment/test_support.h"

namespace qkv {
namespace {

using namespace test;  // NOLINT: helpers of these tests
using ::testing::HasSubstr;

constexpr size_t kHeadOfTwoPages = sizeof(SegmentHeader) + 2 * sizeof(PageEntry);

Bytes SmallSegmentBytes() {
  return BytesOf(*SegmentWithPages(kSmall, kF16Pair, 2));
}

// What a reader may do with whatever Open lets through, without ever leaving the mapping.
void ExpectUsable(const Segment& segment) {
  ASSERT_TRUE(ValidateGeometry(segment.geometry()));
  for (size_t i = 0; i < segment.pages().size(); ++i) {
    const PageEntry& entry = segment.pages()[i];
    ASSERT_LE(entry.offset, segment.bytes());
    ASSERT_LE(entry.bytes, segment.bytes() - entry.offset);
    ASSERT_EQ(segment.layout(i).bytes, entry.bytes);
    ASSERT_GE(entry.tokens, 1);
    ASSERT_LE(entry.tokens, 32);
    (void)segment.Verify(i);
  }
}

TEST(Segment, EveryBitFlipInHeaderAndPageTableIsAnError) {
  const Bytes valid = SmallSegmentBytes();
  ASSERT_TRUE(OpenSealed(valid));
  for (size_t bit = 0; bit < kHeadOfTwoPages * 8; ++bit) {
    Bytes bytes = valid;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    const auto opened = OpenSealed(bytes);
    ASSERT_FALSE(opened) << "bit " << bit % 8 << " of byte " << bit / 8;
    EXPECT_TRUE(opened.error().code == Code::kCorrupt || opened.error().code == Code::kIncompatible);
    EXPECT_NE(opened.error().reason, Reason::kNone);
  }
}

TEST(Segment, EveryBitFlipUnderAForgedChecksumIsRefusedOrHarmless) {
  const Bytes valid = SmallSegmentBytes();
  for (size_t bit = 0; bit < kHeadOfTwoPages * 8; ++bit) {
    Bytes bytes = valid;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    FixHeaderChecksum(bytes, 2);
    if (const auto opened = OpenSealed(bytes)) ExpectUsable(**opened);
  }
}

TEST(Segment, ExtremeNumbersUnderAForgedChecksumAreRefusedOrHarmless) {
  const Bytes valid = SmallSegmentBytes();
  const uint64_t extremes[] = {0,
                               1,
                               2,
                               31,
                               33,
                               4095,
                               4096,
                               0x7fffffff,
                               0x80000000,
                               0xffffffff,
                               0x100000000,
                               ~uint64_t{0},
                               1ull << 63,
                               (1ull << 63) - 1,
                               ~uint64_t{4095},
                               ~uint64_t{0} - 8191};
  size_t accepted = 0;
  for (size_t at = 8; at < kHeadOfTwoPages; at += 4) {
    for (const uint64_t value : extremes) {
      for (const size_t width : {4, 8}) {
        if (at + width > kHeadOfTwoPages) continue;
        Bytes bytes = valid;
        std::memcpy(bytes.data() + at, &value, width);
        FixHeaderChecksum(bytes, 2);
        if (const auto opened = OpenSealed(bytes)) {
          ExpectUsable(**opened);
          ++accepted;
        }
      }
    }
  }
  EXPECT_GT(accepted, 0u);  // model digest, page checksums and some positions are free
}

TEST(Segment, EveryTruncationIsAnError) {
  const Bytes valid = SmallSegmentBytes();
  std::vector<size_t> lengths;
  for (size_t i = 0; i <= kHeadOfTwoPages; ++i) lengths.push_back(i);
  for (const size_t length : {4095, 4096, 4097, 8191, 8192, 8193, 12287}) lengths.push_back(length);
  ASSERT_EQ(valid.size(), 12288u);
  for (const size_t length : lengths) {
    const auto opened = OpenSealed(Bytes(valid.begin(), valid.begin() + static_cast<ptrdiff_t>(length)));
    ASSERT_FALSE(opened) << length;
    EXPECT_EQ(opened.error().code, Code::kCorrupt) << length;
  }
  Bytes longer = valid;
  longer.resize(longer.size() + 1);
  EXPECT_FALSE(OpenSealed(longer));
}

struct Damage {
  const char* what;
  std::function<void(Bytes&)> apply;
  Code code;
  Reason reason;
};

// Each in a copy of two valid pages, under a forged checksum.
void ExpectRefused(std::span<const Damage> damages, const Bytes& valid) {
  for (const Damage& damage : damages) {
    Bytes bytes = valid;
    damage.apply(bytes);
    FixHeaderChecksum(bytes, 2);
    const auto opened = OpenSealed(bytes);
    ASSERT_FALSE(opened) << damage.what;
    EXPECT_THAT(opened.error().message, HasSubstr(damage.what));
    EXPECT_EQ(opened.error().code, damage.code) << opened.error().message;
    EXPECT_EQ(opened.error().reason, damage.reason) << opened.error().message;
  }
}

TEST(Segment, RefusesEveryFieldThatDoesNotFitAndSaysWhy) {
  const Damage damages[] = {
      {"QKVSEG01", [](Bytes& b) { HeaderIn(b).magic[7] = '2'; }, Code::kCorrupt, Reason::kChecksum},
      {"byte order", [](Bytes& b) { HeaderIn(b).byte_order = 0x04030201; }, Code::kIncompatible, Reason::kEndianness},
      {"byte order", [](Bytes& b) { HeaderIn(b).byte_order = 7; }, Code::kCorrupt, Reason::kChecksum},
      {"version 1, expected 2", [](Bytes& b) { HeaderIn(b).version = 1; }, Code::kIncompatible, Reason::kVersion},
      {"version 0, expected 2", [](Bytes& b) { HeaderIn(b).version = 0; }, Code::kIncompatible, Reason::kVersion},
      {"513 layers", [](Bytes& b) { HeaderIn(b).n_layers = 513; }, Code::kCorrupt, Reason::kChecksum},
      {"0 layers", [](Bytes& b) { HeaderIn(b).n_layers = 0; }, Code::kCorrupt, Reason::kChecksum},
      {"KV heads", [](Bytes& b) { HeaderIn(b).n_kv_heads = 0xffffffff; }, Code::kCorrupt, Reason::kChecksum},
      {"head dims of K 64 and V 32", [](Bytes& b) { HeaderIn(b).k_head_dim = 64; }, Code::kIncompatible,
       Reason::kVersion},
      {"head_dim 40", [](Bytes& b) { HeaderIn(b).k_head_dim = HeaderIn(b).v_head_dim = 40; }, Code::kCorrupt,
       Reason::kChecksum},
      {"pages of 64 tokens", [](Bytes& b) { HeaderIn(b).page_tokens = 64; }, Code::kIncompatible, Reason::kVersion},
      {"page table at 200", [](Bytes& b) { HeaderIn(b).table_offset = 200; }, Code::kCorrupt, Reason::kChecksum},
      {"pages at 4160", [](Bytes& b) { HeaderIn(b).data_offset = 4160; }, Code::kCorrupt, Reason::kChecksum},
      {"pages at 0", [](Bytes& b) { HeaderIn(b).data_offset = 0; }, Code::kCorrupt, Reason::kChecksum},
      {"pages at 16384", [](Bytes& b) { HeaderIn(b).data_offset = 16384; }, Code::kCorrupt, Reason::kChecksum},
      {"8192 bytes by its header, 12288 found", [](Bytes& b) { HeaderIn(b).file_bytes = 8192; }, Code::kCorrupt,
       Reason::kChecksum},
      {"rotated with seed 0x1, expected 0x0", [](Bytes& b) { HeaderIn(b).rotation_seed = 1; }, Code::kIncompatible,
       Reason::kCodecUnsupported},
      {"reserved", [](Bytes& b) { HeaderIn(b).reserved[31] = 1; }, Code::kIncompatible, Reason::kVersion},
      {"0 bytes of constants at 256", [](Bytes& b) { HeaderIn(b).constants_offset = 256; }, Code::kCorrupt,
       Reason::kChecksum},
      {"0 bytes of constants at 0", [](Bytes& b) { HeaderIn(b).constants_checksum = 1; }, Code::kCorrupt,
       Reason::kChecksum},
      {"64 bytes of constants, expected 192",
       [](Bytes& b) { HeaderIn(b).constants_offset = 256, HeaderIn(b).constants_bytes = 64; }, Code::kCorrupt,
       Reason::kChecksum},
      {"page 1 has codecs 200 and 1", [](Bytes& b) { EntryIn(b, 1).k_codec = 200; }, Code::kIncompatible,
       Reason::kCodecUnsupported},
      {"page 0 has codecs 1 and 0", [](Bytes& b) { EntryIn(b, 0).v_codec = 0; }, Code::kIncompatible,
       Reason::kCodecUnsupported},
      {"page 0 has codecs 13 and 1", [](Bytes& b) { EntryIn(b, 0).k_codec = 13; }, Code::kCorrupt, Reason::kChecksum},
      {"page 0 has codec 15 for V, which is for K only", [](Bytes& b) { EntryIn(b, 0).v_codec = 15; }, Code::kCorrupt,
       Reason::kChecksum},
      {"page 0 has codecs 8 and 13", [](Bytes& b) { EntryIn(b, 0).k_codec = 8, EntryIn(b, 0).v_codec = 13; },
       Code::kCorrupt, Reason::kChecksum},
      {"page 0 has 0 tokens", [](Bytes& b) { EntryIn(b, 0).tokens = 0; }, Code::kCorrupt, Reason::kChecksum},
      {"page 1 has 33 tokens", [](Bytes& b) { EntryIn(b, 1).tokens = 33; }, Code::kCorrupt, Reason::kChecksum},
      {"positions below", [](Bytes& b) { EntryIn(b, 1).first_position = 0xfffffff0; }, Code::kCorrupt,
       Reason::kChecksum},
      {"page 0 has 8192 bytes, expected 4096", [](Bytes& b) { EntryIn(b, 0).bytes = 8192; }, Code::kCorrupt,
       Reason::kChecksum},
      {"page 1 is at 8256", [](Bytes& b) { EntryIn(b, 1).offset = 8256; }, Code::kCorrupt, Reason::kChecksum},
      {"page 1 is at 4096", [](Bytes& b) { EntryIn(b, 1).offset = 4096; }, Code::kCorrupt,
       Reason::kChecksum},  // overlap
      {"page 1 is at 12288", [](Bytes& b) { EntryIn(b, 1).offset = 12288; }, Code::kCorrupt, Reason::kChecksum},
      {"page 0 is at 0", [](Bytes& b) { EntryIn(b, 0).offset = 0; }, Code::kCorrupt, Reason::kChecksum},  // the header
      {"page 1 is at 18446744073709547520", [](Bytes& b) { EntryIn(b, 1).offset = ~uint64_t{4095}; }, Code::kCorrupt,
       Reason::kChecksum},
      {"page 1 is at 4096", [](Bytes& b) { std::swap(EntryIn(b, 0).offset, EntryIn(b, 1).offset); }, Code::kCorrupt,
       Reason::kChecksum},
  };
  ExpectRefused(damages, SmallSegmentBytes());
}

// ---- constants ----

// Two rotated pages of kSmall: constants of 192 bytes at 256, behind the table.
Bytes RotatedSegmentBytes() {
  return BytesOf(*SegmentWithPages(kSmall, kRotatedPair, 2));
}

void FixConstantsChecksum(Bytes& bytes) {
  HeaderIn(bytes).constants_checksum = XXH3_64bits(bytes.data() + 256, 192);
  FixHeaderChecksum(bytes, 2);
}

TEST(Segment, EveryBitFlipInTheConstantsIsAnError) {
  const Bytes valid = RotatedSegmentBytes();
  ASSERT_EQ(HeaderIn(const_cast<Bytes&>(valid)).constants_offset, 256u);
  ASSERT_EQ(HeaderIn(const_cast<Bytes&>(valid)).constants_bytes, 192u);
  ASSERT_TRUE(OpenSealed(valid));
  for (size_t bit = 256 * 8; bit < (256 + 192) * 8; ++bit) {
    Bytes bytes = valid;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    const auto opened = OpenSealed(bytes);
    ASSERT_FALSE(opened) << bit;
    EXPECT_EQ(opened.error().code, Code::kCorrupt);
    EXPECT_THAT(opened.error().message, HasSubstr("constants have checksum"));
  }
}

TEST(Segment, ConstantsThatAreNotFiniteAreRefusedUnderAForgedChecksum) {
  for (const uint16_t half : {0x7c00, 0xfc00, 0x7e00, 0xffff}) {
    Bytes bytes = RotatedSegmentBytes();
    std::memcpy(&bytes[256 + 2 * 95], &half, 2);
    FixConstantsChecksum(bytes);
    const auto opened = OpenSealed(bytes);
    ASSERT_FALSE(opened) << half;
    EXPECT_THAT(opened.error().message, HasSubstr("constant 95 is not finite"));
  }
}

TEST(Segment, RefusesConstantsThatDoNotFitThePages) {
  const Damage damages[] = {
      {"rotated with seed 0x0, expected 0x6572616853564b51", [](Bytes& b) { HeaderIn(b).rotation_seed = 0; },
       Code::kIncompatible, Reason::kCodecUnsupported},
      {"rotated with seed 0x1,", [](Bytes& b) { HeaderIn(b).rotation_seed = 1; }, Code::kIncompatible,
       Reason::kCodecUnsupported},
      {"0 bytes of constants, expected 192",
       [](Bytes& b) {
         HeaderIn(b).constants_offset = HeaderIn(b).constants_bytes = HeaderIn(b).constants_checksum = 0;
       },
       Code::kCorrupt, Reason::kChecksum},
      {"128 bytes of constants, expected 192", [](Bytes& b) { HeaderIn(b).constants_bytes = 128; }, Code::kCorrupt,
       Reason::kChecksum},
      {"192 bytes of constants at 0", [](Bytes& b) { HeaderIn(b).constants_offset = 0; }, Code::kCorrupt,
       Reason::kChecksum},
      {"192 bytes of constants at 192", [](Bytes& b) { HeaderIn(b).constants_offset = 192; }, Code::kCorrupt,
       Reason::kChecksum},
      {"192 bytes of constants at 272", [](Bytes& b) { HeaderIn(b).constants_offset = 272; }, Code::kCorrupt,
       Reason::kChecksum},
      {"192 bytes of constants at 4032", [](Bytes& b) { HeaderIn(b).constants_offset = 4032; }, Code::kCorrupt,
       Reason::kChecksum},  // reaches into the pages
      {"192 bytes of constants at 18446744073709551552", [](Bytes& b) { HeaderIn(b).constants_offset = ~uint64_t{63}; },
       Code::kCorrupt, Reason::kChecksum},
      {"18446744073709551615 bytes of constants", [](Bytes& b) { HeaderIn(b).constants_bytes = ~uint64_t{0}; },
       Code::kCorrupt, Reason::kChecksum},
  };
  ExpectRefused(damages, RotatedSegmentBytes());
}

TEST(Segment, EveryBitFlipInARotatedHeadUnderAForgedChecksumIsRefusedOrHarmless) {
  const Bytes valid = RotatedSegmentBytes();
  for (size_t bit = 0; bit < kHeadOfTwoPages * 8; ++bit) {
    Bytes bytes = valid;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    FixHeaderChecksum(bytes, 2);
    if (const auto opened = OpenSealed(bytes)) {
      ExpectUsable(**opened);
      ASSERT_NE((*opened)->constants(), nullptr);
      ASSERT_LE((*opened)->header().constants_offset + 192, (*opened)->header().data_offset);
    }
  }
}

// Two pages, constants and a table of three layers.
Bytes LayeredSegmentBytes() {
  const Geometry geometry{.n_layers = 3, .n_kv_heads = 1, .head_dim = 32};
  const CodecPair pairs[] = {{CodecId::k8, CodecId::k3}, {CodecId::k4, CodecId::k7}, {CodecId::k5, CodecId::k6}};
  const auto table = Take(LayerCodecs::Create(geometry, pairs));
  const SegmentConstants constants = SomeConstants(geometry);
  auto writer = Take(SegmentWriter::Create(geometry, 2 * 8192, kModelDigest, &constants, table));
  for (uint32_t page = 0; page < 2; ++page) {
    Take(writer->Append(kLayersPair, kPageTokens, page * kPageTokens,
                        [&](std::byte* data) { FillWithPattern(data, table->block_bytes(), page); }));
  }
  return BytesOf(*Take(SegmentWriter::Seal(writer)));
}

void FixLayersChecksum(Bytes& bytes) {
  SegmentHeader& header = HeaderIn(bytes);
  header.layers_checksum = XXH3_64bits(bytes.data() + header.layers_offset, header.layers_bytes);
}

TEST(Segment, LayersCodecsAreReadBack) {
  const Bytes bytes = LayeredSegmentBytes();
  const auto segment = Take(OpenSealed(bytes));
  ASSERT_NE(segment->layers(), nullptr);
  EXPECT_EQ(segment->layers()->Bytes(), (std::vector<uint8_t>{12, 7, 8, 11, 9, 10}));
  EXPECT_EQ(segment->codecs(1), kLayersPair);
  // 33 bits of codes over 3 layers' two sides, and 6 scales; of 32 tokens.
  EXPECT_EQ(segment->layout(1).block_bytes, 33u * 32 * 32 / 8 + 6 * 64);
  EXPECT_TRUE(segment->Verify(1));
  EXPECT_EQ(segment->header().layers_offset % 64, 0u);
  EXPECT_GE(segment->header().layers_offset, segment->header().constants_offset + segment->header().constants_bytes);
  EXPECT_EQ(Take(OpenSealed(SmallSegmentBytes()))->layers(), nullptr);
}

TEST(Segment, EveryBitFlipInTheLayersCodecsIsAnErrorUnlessForged) {
  const Bytes valid = LayeredSegmentBytes();
  Bytes copy = valid;
  const size_t at = HeaderIn(copy).layers_offset;
  const std::string digest = Take(OpenSealed(valid))->digest();
  for (size_t bit = 0; bit < 6 * 8; ++bit) {
    Bytes bytes = valid;
    bytes[at + bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    const auto opened = OpenSealed(bytes);
    ASSERT_FALSE(opened) << bit;
    EXPECT_THAT(opened.error().message, HasSubstr("layers' codecs have checksum"));
    FixLayersChecksum(bytes);
    FixHeaderChecksum(bytes, 2);
    if (const auto forged = OpenSealed(bytes)) {
      ExpectUsable(**forged);  // another width, in pages of as many bytes
      EXPECT_NE((*forged)->digest(), digest);
    }
  }
}

TEST(Segment, EveryBitFlipInAHeadWithLayersUnderAForgedChecksumIsRefusedOrHarmless) {
  const Bytes valid = LayeredSegmentBytes();
  for (size_t bit = 0; bit < kHeadOfTwoPages * 8; ++bit) {
    Bytes bytes = valid;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    FixHeaderChecksum(bytes, 2);
    if (const auto opened = OpenSealed(bytes)) ExpectUsable(**opened);
  }
}

TEST(Segment, RefusesLayersCodecsThatDoNotFit) {
  const Damage damages[] = {
      {"page 0 has layers of different codecs, but the segment names none",
       [](Bytes& b) { HeaderIn(b).layers_offset = HeaderIn(b).layers_bytes = HeaderIn(b).layers_checksum = 0; },
       Code::kCorrupt, Reason::kChecksum},
      {"4 bytes of layers' codecs, expected 6", [](Bytes& b) { HeaderIn(b).layers_bytes = 4; }, Code::kCorrupt,
       Reason::kChecksum},
      {"18446744073709551615 bytes of layers' codecs", [](Bytes& b) { HeaderIn(b).layers_bytes = ~uint64_t{0}; },
       Code::kCorrupt, Reason::kChecksum},
      {"6 bytes of layers' codecs at 0", [](Bytes& b) { HeaderIn(b).layers_offset = 0; }, Code::kCorrupt,
       Reason::kChecksum},
      {"6 bytes of layers' codecs at 18446744073709551552", [](Bytes& b) { HeaderIn(b).layers_offset = ~uint64_t{63}; },
       Code::kCorrupt, Reason::kChecksum},
      {"6 bytes of layers' codecs at 4096", [](Bytes& b) { HeaderIn(b).layers_offset = 4096; }, Code::kCorrupt,
       Reason::kChecksum},
      {"0 bytes of layers' codecs at", [](Bytes& b) { HeaderIn(b).layers_bytes = 0; }, Code::kCorrupt,
       Reason::kChecksum},
      {"layer 1 has codecs 8 and 2, expected those of 3 to 8 bits",
       [](Bytes& b) {
         b[HeaderIn(b).layers_offset + 3] = std::byte{2};
         FixLayersChecksum(b);
       },
       Code::kIncompatible, Reason::kCodecUnsupported},
      {"layer 2 has codecs 18 and 10",
       [](Bytes& b) {
         b[HeaderIn(b).layers_offset + 4] = std::byte{18};
         FixLayersChecksum(b);
       },
       Code::kIncompatible, Reason::kCodecUnsupported},
      {"page 1 has 8192 bytes, expected 4096",  // three layers of 3 bits
       [](Bytes& b) {
         std::fill_n(&b[HeaderIn(b).layers_offset], 6, std::byte{7});
         FixLayersChecksum(b);
         EntryIn(b, 0).bytes = 4096;
       },
       Code::kCorrupt, Reason::kChecksum},
      {"page 1 has codecs 18 and 8, not known here", [](Bytes& b) { EntryIn(b, 1).v_codec = 8; }, Code::kIncompatible,
       Reason::kCodecUnsupported},
      {"page 1 has codecs 8 and 18, not known here", [](Bytes& b) { EntryIn(b, 1).k_codec = 8; }, Code::kIncompatible,
       Reason::kCodecUnsupported},
      {"0 bytes of constants, expected 576",
       [](Bytes& b) {
         HeaderIn(b).constants_offset = HeaderIn(b).constants_bytes = HeaderIn(b).constants_checksum = 0;
       },
       Code::kCorrupt, Reason::kChecksum},
      {"rotated with seed 0x0", [](Bytes& b) { HeaderIn(b).rotation_seed = 0; }, Code::kIncompatible,
       Reason::kCodecUnsupported},
      {"reserved bytes", [](Bytes& b) { HeaderIn(b).reserved[0] = 1; }, Code::kIncompatible, Reason::kVersion},
  };
  ExpectRefused(damages, LayeredSegmentBytes());
}

TEST(Segment, TheDigestFollowsTheConstants) {
  Bytes bytes = RotatedSegmentBytes();
  const std::string digest = Take(OpenSealed(bytes))->digest();
  bytes[256] ^= std::byte{1};
  FixConstantsChecksum(bytes);
  EXPECT_NE(Take(OpenSealed(bytes))->digest(), digest);
}

TEST(Segment, RefusesPageCountsThatDoNotFitTheFile) {
  for (const uint32_t n_pages : {0u, 1000u, kMaxPagesPerSegment, kMaxPagesPerSegment + 1, 0xffffffffu}) {
    Bytes bytes = SmallSegmentBytes();
    HeaderIn(bytes).n_pages = n_pages;
    const auto opened = OpenSealed(bytes);
    ASSERT_FALSE(opened) << n_pages;
    EXPECT_EQ(opened.error().code, Code::kCorrupt);
  }
  // As many entries as the room before the pages holds, but overlapping the pages' range by one.
  Bytes bytes = SmallSegmentBytes();
  HeaderIn(bytes).n_pages = (4096 - 192) / 32 + 1;
  FixHeaderChecksum(bytes, HeaderIn(bytes).n_pages);
  const auto opened = OpenSealed(bytes);
  ASSERT_FALSE(opened);
  EXPECT_THAT(opened.error().message, HasSubstr("pages at 4096"));
}

TEST(Segment, AHeaderOfTheOtherByteOrderIsNamedAsSuch) {
  Bytes bytes = SmallSegmentBytes();
  for (size_t at = 8; at < 40; at += 4) std::reverse(&bytes[at], &bytes[at + 4]);
  for (size_t at = 40; at < 72; at += 8) std::reverse(&bytes[at], &bytes[at + 8]);
  for (const size_t at : {104, 112, 120, 184}) std::reverse(&bytes[at], &bytes[at + 8]);
  const auto opened = OpenSealed(bytes);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, Code::kIncompatible);
  EXPECT_EQ(opened.error().reason, Reason::kEndianness);
}

TEST(Segment, AFileThatLacksOneOfTheSealsIsDenied) {
  const Bytes valid = SmallSegmentBytes();
  const int needed[] = {F_SEAL_WRITE, F_SEAL_SHRINK, F_SEAL_GROW};
  for (const int missing : {F_SEAL_WRITE, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW}) {
    Fd fd = UnsealedMemfd(valid);
    for (const int seal : needed) {
      if ((seal & missing) == 0) {
        ASSERT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seal), 0);
      }
    }
    const auto opened = Segment::Open(std::move(fd));
    ASSERT_FALSE(opened);
    EXPECT_EQ(opened.error().code, Code::kDenied);
    EXPECT_EQ(opened.error().reason, Reason::kDenied);
  }
}

TEST(Segment, AFileOnDiskOpensWhenSealsAreNotRequired) {
  const Bytes valid = SmallSegmentBytes();
  const std::filesystem::path path =
      std::filesystem::path(::testing::TempDir()) / fmt::format("qkv-segment-{}.seg", ::getpid());
  WriteFile(path, valid);
  const auto denied = Segment::Open(Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)));
  const auto opened = Segment::Open(Fd(::open(path.c_str(), O_RDWR | O_CLOEXEC)), /*require_seals=*/false);
  std::filesystem::remove(path);
  ASSERT_FALSE(denied);
  EXPECT_EQ(denied.error().code, Code::kDenied);
  ASSERT_TRUE(opened) << opened.error().message;
  EXPECT_TRUE((*opened)->Verify(0, 2, 1));
  EXPECT_EQ((*opened)->page(1)[100], PatternByte(1, 100));
  EXPECT_EQ(::fcntl((*opened)->fd().get(), F_GETFL) & O_ACCMODE, O_RDONLY);
}

TEST(Segment, WhatIsNoRegularFileIsAnError) {
  EXPECT_FALSE(Segment::Open(Fd(), true));
  EXPECT_FALSE(Segment::Open(Fd(), false));
  EXPECT_FALSE(Segment::Open(Fd(::open("/dev/zero", O_RDONLY | O_CLOEXEC)), false));
  EXPECT_FALSE(Segment::Open(Fd(::open("/proc", O_RDONLY | O_CLOEXEC)), false));
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Fd write_end(ends[1]);
  EXPECT_FALSE(Segment::Open(Fd(ends[0]), false));
}

TEST(Segment, AFlippedByteInAPageFailsItsVerificationAndNoOther) {
  Bytes bytes = SmallSegmentBytes();
  for (const size_t at : {size_t{8192}, size_t{10000}, size_t{12287}}) {  // first, middle and last byte of page 1
    Bytes damaged = bytes;
    damaged[at] ^= std::byte{0x10};
    const auto segment = Take(OpenSealed(damaged));
    EXPECT_TRUE(segment->Verify(0));
    const Status status = segment->Verify(1);
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Code::kCorrupt);
    EXPECT_EQ(status.error().reason, Reason::kChecksum);
    EXPECT_THAT(status.error().message, HasSubstr("page 1 "));
    EXPECT_FALSE(segment->Verify(1));  // a failure is not forgotten
    EXPECT_FALSE(segment->Verify(0, 2, 2));
  }
}

TEST(Segment, AVerifiedPageIsNotReadAgain) {
  const Fd fd = UnsealedMemfd(SmallSegmentBytes());
  const auto segment = Take(Segment::Open(Take(fd.Duplicate()), /*require_seals=*/false));
  ASSERT_TRUE(segment->Verify(0));
  const std::byte changed{0x5a};
  ASSERT_EQ(::pwrite(fd.get(), &changed, 1, 5000), 1);
  ASSERT_EQ(::pwrite(fd.get(), &changed, 1, 9000), 1);
  EXPECT_TRUE(segment->Verify(0));
  EXPECT_FALSE(segment->Verify(1));
}

TEST(Segment, ManyThreadsReportTheFirstPageThatFails) {
  // Pages so large that other threads are still at work on later bad pages when the first one is found.
  const Geometry geometry{.n_layers = 32, .n_kv_heads = 16, .head_dim = 128};
  const size_t page_bytes = PageLayout(geometry, kI8Pair).bytes;
  Bytes bytes = BytesOf(*SegmentWithPages(geometry, kI8Pair, 7));
  const uint64_t data_offset = HeaderIn(bytes).data_offset;
  for (size_t page = 2; page < 6; ++page) bytes[data_offset + page * page_bytes + 17] ^= std::byte{1};
  const auto segment = Take(OpenSealed(bytes));
  for (const int threads : {-1, 0, 1, 2, 3, 8, 1000}) {
    for (int repetition = 0; repetition < 10; ++repetition) {  // threads meet failures in another order every time
      const Status status = segment->Verify(1, 6, threads);
      ASSERT_FALSE(status) << threads;
      ASSERT_THAT(status.error().message, HasSubstr("page 2 ")) << threads;
    }
    EXPECT_TRUE(segment->Verify(0, 2, threads));
    EXPECT_TRUE(segment->Verify(6, 1, threads));
    EXPECT_FALSE(segment->Verify(5, 1, threads));
  }
}

TEST(Segment, SeveralCallersMayVerifyAtOnce) {
  constexpr size_t kPages = 300;
  const Bytes bytes = BytesOf(*SegmentWithPages(kSmall, kI8Pair, kPages));
  const auto segment = Take(OpenSealed(bytes));
  std::atomic<int> failed{0};
  {
    std::vector<std::jthread> callers;
    for (int i = 0; i < 4; ++i) {
      callers.emplace_back([&] {
        if (!segment->Verify(0, kPages, 2)) ++failed;
      });
    }
  }
  EXPECT_EQ(failed, 0);
}

TEST(Segment, PagesThatDoNotExistCannotBeVerified) {
  const auto segment = SegmentWithPages(kSmall, kF16Pair, 2);
  EXPECT_TRUE(segment->Verify(2, 0, 1));
  EXPECT_FALSE(segment->Verify(2));
  EXPECT_FALSE(segment->Verify(1, 2, 1));
  EXPECT_FALSE(segment->Verify(3, 0, 1));
  EXPECT_FALSE(segment->Verify(1, ~size_t{0}, 1));
}

TEST(Segment, TheDigestFollowsTheContent) {
  const Bytes valid = SmallSegmentBytes();
  const auto first = Take(OpenSealed(valid));
  const auto second = Take(OpenSealed(valid));
  EXPECT_EQ(first->digest(), second->digest());
  EXPECT_EQ(first->digest().find_first_not_of("0123456789abcdef"), std::string::npos);
  Bytes other = valid;
  EntryIn(other, 1).checksum ^= 1;  // stands for another content of page 1
  FixHeaderChecksum(other, 2);
  EXPECT_NE(Take(OpenSealed(other))->digest(), first->digest());
}

TEST(Segment, StaysReadableWhenItsDescriptorsAreGone) {
  std::shared_ptr<const Segment> consumer;
  {
    const auto producer = SegmentWithPages(kSmall, kF16Pair, 2);
    consumer = Take(Segment::Open(Take(producer->fd().Duplicate())));
  }
  EXPECT_EQ(consumer->page(1)[77], PatternByte(1, 77));
  EXPECT_TRUE(consumer->Verify(0, 2, 1));
}

}  // namespace
}  // namespace qkv
