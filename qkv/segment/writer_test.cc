// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/segment/writer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <xxhash.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "qkv/segment/test_support.h"

namespace qkv {
namespace {

using namespace test;  // NOLINT: helpers of these tests
using ::testing::HasSubstr;

constexpr size_t kSmallPage = 4096;  // f16 and i8 pages of kSmall alike: 2 x 2048, and 2 x 1088 rounded up

void ExpectPattern(const std::byte* page, size_t bytes, size_t index) {
  for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(page[i], PatternByte(index, i)) << "page " << index << " byte " << i;
}

void ExpectNobodyCanChange(const Fd& fd, uint64_t bytes, int expected_errno) {
  const char byte = 'x';
  EXPECT_EQ(::pwrite(fd.get(), &byte, 1, 0), -1);
  EXPECT_EQ(errno, expected_errno);
  EXPECT_EQ(::pwrite(fd.get(), &byte, 1, static_cast<off_t>(bytes)), -1);
  EXPECT_EQ(::ftruncate(fd.get(), 0), -1);
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes) + 4096), -1);
  EXPECT_EQ(::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0), MAP_FAILED);
}

TEST(SegmentWriter, WritesASegmentThatOpenReadsBack) {
  const Geometry geometry{.n_layers = 2, .n_kv_heads = 3, .head_dim = 64};
  // 2 layers x 3 heads x 32 tokens x 64: f16 takes 24576 for K and as much for V.
  const size_t f16_bytes = 49152;
  const size_t i8_bytes = PageLayout(geometry, kI8Pair).bytes;
  auto writer = Take(SegmentWriter::Create(geometry, 1 << 20, kModelDigest));
  EXPECT_EQ(Take(writer->Append(kF16Pair, 32, 0, [&](std::byte* page) { FillWithPattern(page, f16_bytes, 0); })), 0u);
  EXPECT_EQ(Take(writer->Append(kI8Pair, 32, 32, [&](std::byte* page) { FillWithPattern(page, i8_bytes, 1); })), 1u);
  EXPECT_EQ(
      Take(writer->Append({CodecId::kI8, CodecId::kF16}, 5, 64, [&](std::byte* page) { page[7] = std::byte{9}; })), 2u);
  EXPECT_EQ(writer->n_pages(), 3u);
  const uint64_t bytes = writer->bytes();
  const auto sealed = Take(SegmentWriter::Seal(writer));

  const auto segment = Take(Segment::Open(Take(sealed->fd().Duplicate())));
  EXPECT_EQ(segment->geometry(), geometry);
  EXPECT_EQ(segment->header().model_digest, kModelDigest);
  EXPECT_EQ(segment->bytes(), bytes);
  EXPECT_EQ(Take(segment->fd().SizeBytes()), bytes);
  EXPECT_EQ(segment->digest(), sealed->digest());
  EXPECT_EQ(segment->digest().size(), 32u);
  ASSERT_EQ(segment->pages().size(), 3u);
  EXPECT_EQ(segment->codecs(0), kF16Pair);
  EXPECT_EQ(segment->codecs(1), kI8Pair);
  EXPECT_EQ(segment->codecs(2), (CodecPair{CodecId::kI8, CodecId::kF16}));
  EXPECT_EQ(segment->pages()[2].tokens, 5u);
  EXPECT_EQ(segment->pages()[2].first_position, 64u);
  EXPECT_EQ(segment->pages()[0].bytes, f16_bytes);
  EXPECT_EQ(segment->pages()[1].offset, segment->pages()[0].offset + f16_bytes);
  ExpectPattern(segment->page(0), f16_bytes, 0);
  ExpectPattern(segment->page(1), i8_bytes, 1);
  for (size_t i = 0; i < segment->pages()[2].bytes; ++i) {  // the room of the page is zero before it is filled
    ASSERT_EQ(segment->page(2)[i], i == 7 ? std::byte{9} : std::byte{0});
  }
  EXPECT_EQ(segment->pages()[1].checksum, XXH3_64bits(segment->page(1), i8_bytes));
  EXPECT_TRUE(segment->Verify(0, 3, 1));
}

TEST(SegmentWriter, KeepsPagesReadableAtTheirAddressWhileOthersAreAppendedAndAfterSealing) {
  constexpr size_t kPages = 200;
  auto writer = Take(SegmentWriter::Create(kSmall, kPages * kSmallPage, kModelDigest));
  std::atomic<size_t> appended{0};
  std::atomic<bool> stop{false};
  std::atomic<size_t> wrong{0};
  SegmentWriter* const shared = writer.get();
  std::jthread reader([&] {
    while (!stop) {
      const size_t n = appended.load();
      for (size_t i = 0; i < n; ++i) {
        if (shared->page(i)[4000] != PatternByte(i, 4000)) ++wrong;
      }
    }
  });
  std::vector<const std::byte*> addresses;
  for (size_t i = 0; i < kPages; ++i) {
    Take(writer->Append(kF16Pair, 32, static_cast<uint32_t>(32 * i),
                        [&](std::byte* page) { FillWithPattern(page, kSmallPage, i); }));
    addresses.push_back(writer->page(i));
    appended = i + 1;
  }
  stop = true;
  reader.join();
  EXPECT_EQ(wrong, 0u);
  const auto segment = Take(SegmentWriter::Seal(writer));
  for (size_t i = 0; i < kPages; ++i) {
    ASSERT_EQ(segment->page(i), addresses[i]);
    ExpectPattern(segment->page(i), kSmallPage, i);
  }
  EXPECT_TRUE(segment->Verify(0, kPages, 2));
}

TEST(SegmentWriter, NobodyCanChangeASealedSegmentNotEvenItsProducer) {
  auto writer = WriterWithPages(kSmall, kF16Pair, 2);
  const std::vector<Fd> own = WritableSegmentDescriptors();
  ASSERT_EQ(own.size(), 1u);
  const auto segment = Take(SegmentWriter::Seal(writer));
  const uint64_t bytes = segment->bytes();

  ExpectNobodyCanChange(own[0], bytes, EPERM);  // a writable descriptor from before the sealing
  {
    const Fd reopened(::open(fmt::format("/proc/self/fd/{}", segment->fd().get()).c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_TRUE(reopened.valid());
    ExpectNobodyCanChange(reopened, bytes, EPERM);
  }
  EXPECT_EQ(::fcntl(segment->fd().get(), F_GETFL) & O_ACCMODE, O_RDONLY);
  ExpectNobodyCanChange(segment->fd(), bytes, EBADF);
  auto* const address = const_cast<std::byte*>(segment->page(0));
  EXPECT_EQ(::mprotect(address, 4096, PROT_READ | PROT_WRITE), -1);

  ExpectPattern(segment->page(0), kSmallPage, 0);
  ExpectPattern(segment->page(1), kSmallPage, 1);
  EXPECT_EQ(WritableSegmentDescriptors().size(), 1u);  // the duplicate made above: the writer's own is closed
}

TEST(SegmentWriter, SealsWhatSomebodyHadMappedWritableOnlyWhenNobodyHasAndIsReadUntilThen) {
  auto writer = WriterWithPages(kSmall, kF16Pair, 1);
  const std::byte* const page = writer->page(0);
  {
    const std::vector<Fd> own = WritableSegmentDescriptors();
    ASSERT_EQ(own.size(), 1u);
    const Mapping writable = Take(Mapping::Map(own[0], Mapping::Access::kReadWrite, 0, 4096));
    EXPECT_FALSE(SegmentWriter::Seal(writer));
  }
  ASSERT_NE(writer, nullptr);
  EXPECT_EQ(writer->page(0), page);
  ExpectPattern(page, kSmallPage, 0);
  EXPECT_FALSE(writer->Fits(kF16Pair));  // the file is trimmed
  EXPECT_FALSE(writer->Append(kF16Pair, 32, 32, [](std::byte*) {}));
  const auto segment = Take(SegmentWriter::Seal(writer));
  EXPECT_EQ(writer, nullptr);
  EXPECT_EQ(segment->page(0), page);
  EXPECT_TRUE(segment->Verify(0, 1, 1));
}

TEST(SegmentWriter, RefusesAPageThatDoesNotFitAndStaysAsItWas) {
  const size_t page_bytes = PageLayout({1, 2, 64}, kF16Pair).bytes;
  const size_t i8_bytes = PageLayout({1, 2, 64}, kI8Pair).bytes;
  ASSERT_LT(i8_bytes, page_bytes);
  auto writer = Take(SegmentWriter::Create({1, 2, 64}, page_bytes + i8_bytes, kModelDigest));
  Take(writer->Append(kF16Pair, 32, 0, [&](std::byte* page) { FillWithPattern(page, page_bytes, 0); }));
  const uint64_t bytes = writer->bytes();
  EXPECT_FALSE(writer->Fits(kF16Pair));
  bool called = false;
  const auto refused = writer->Append(kF16Pair, 32, 32, [&](std::byte*) { called = true; });
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kExhausted);
  EXPECT_EQ(refused.error().reason, Reason::kPoolFull);
  EXPECT_FALSE(called);
  EXPECT_EQ(writer->bytes(), bytes);
  EXPECT_EQ(writer->n_pages(), 1u);
  EXPECT_TRUE(writer->Fits(kI8Pair));  // a smaller one still does
  EXPECT_EQ(Take(writer->Append(kI8Pair, 32, 32, [](std::byte*) {})), 1u);
  EXPECT_FALSE(writer->Fits(kI8Pair));
  EXPECT_TRUE(SegmentWriter::Seal(writer));
}

TEST(SegmentWriter, WhatIsTakenBackMakesRoomForAnother) {
  auto writer = Take(SegmentWriter::Create(kSmall, 2 * kSmallPage, kModelDigest));
  const auto fill = [](size_t index) { return [=](std::byte* page) { FillWithPattern(page, kSmallPage, index); }; };
  Take(writer->Append(kF16Pair, 32, 0, fill(0)));
  Take(writer->Append(kF16Pair, 32, 32, [](std::byte*) {}));
  EXPECT_FALSE(writer->Fits(kF16Pair));
  writer->DropLast();
  EXPECT_EQ(writer->n_pages(), 1u);
  EXPECT_EQ(Take(writer->Append(kF16Pair, 32, 32, fill(1))), 1u);
  EXPECT_EQ(BytesOf(*Take(SegmentWriter::Seal(writer))), BytesOf(*SegmentWithPages(kSmall, kF16Pair, 2)));
}

TEST(SegmentWriter, ReportsMemoryThatCannotBeTakenBeforeFilling) {
  auto writer = Take(SegmentWriter::Create(kSmall, 4 * kSmallPage, kModelDigest));
  // The file is cut down to the head and may not grow: taking a page's memory fails, touching it would raise SIGBUS.
  const std::vector<Fd> own = WritableSegmentDescriptors();
  ASSERT_EQ(own.size(), 1u);
  ASSERT_EQ(::ftruncate(own[0].get(), 4096), 0);
  ASSERT_EQ(::fcntl(own[0].get(), F_ADD_SEALS, F_SEAL_GROW), 0);
  bool called = false;
  const auto refused = writer->Append(kF16Pair, 32, 0, [&](std::byte* page) {
    called = true;
    page[0] = std::byte{1};
  });
  ASSERT_FALSE(refused);
  EXPECT_FALSE(called);
  EXPECT_EQ(writer->n_pages(), 0u);
  EXPECT_EQ(writer->bytes(), 4096u);
}

// In a child, because the limit on address space is the whole process's.
TEST(SegmentWriter, ReportsExhaustionWhenTheSystemGivesNoMemoryAndGoesOnWhenItDoes) {
  const Geometry geometry{.n_layers = 32, .n_kv_heads = 32, .head_dim = 128};  // pages of 16 MiB
  auto writer = Take(SegmentWriter::Create(geometry, 64 << 20, kModelDigest));
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit tight{.rlim_cur = 1 << 20, .rlim_max = RLIM_INFINITY};
    const rlimit roomy{.rlim_cur = RLIM_INFINITY, .rlim_max = RLIM_INFINITY};
    if (::setrlimit(RLIMIT_AS, &tight) != 0) ::_exit(2);
    const auto refused = writer->Append(kF16Pair, 32, 0, [](std::byte*) {});
    if (::setrlimit(RLIMIT_AS, &roomy) != 0) ::_exit(3);
    if (refused || refused.error().code != Code::kExhausted || refused.error().reason != Reason::kPoolFull) ::_exit(4);
    if (writer->n_pages() != 0) ::_exit(5);
    if (!writer->Append(kF16Pair, 32, 0, [](std::byte* page) { page[0] = std::byte{1}; })) ::_exit(6);
    ::_exit(SegmentWriter::Seal(writer) ? 0 : 7);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(SegmentWriter, TakesMemoryOnlyAsPagesAreWritten) {
  auto writer = Take(SegmentWriter::Create(kSmall, uint64_t{1} << 30, kModelDigest));
  const std::vector<Fd> own = WritableSegmentDescriptors();
  ASSERT_EQ(own.size(), 1u);
  struct stat info {};
  ASSERT_EQ(::fstat(own[0].get(), &info), 0);
  EXPECT_EQ(info.st_blocks, 0);
  Take(writer->Append(kF16Pair, 32, 0, [](std::byte*) {}));
  ASSERT_EQ(::fstat(own[0].get(), &info), 0);
  EXPECT_GE(info.st_blocks * 512, 4096);
  EXPECT_LE(info.st_blocks * 512, 4 << 20);  // one page, or one huge page where the system gives those
}

TEST(SegmentWriter, RefusesUnusableArguments) {
  const auto code = [](const auto& result) { return result ? Code::kInternal : result.error().code; };
  EXPECT_EQ(code(SegmentWriter::Create({0, 1, 64}, 1 << 20, kModelDigest)), Code::kInvalidArgument);
  EXPECT_EQ(code(SegmentWriter::Create({1, 1, 65}, 1 << 20, kModelDigest)), Code::kInvalidArgument);
  EXPECT_EQ(code(SegmentWriter::Create(kSmall, 0, kModelDigest)), Code::kInvalidArgument);
  EXPECT_EQ(code(SegmentWriter::Create(kSmall, 4095, kModelDigest)), Code::kInvalidArgument);
  EXPECT_EQ(code(SegmentWriter::Create(kSmall, kMaxSegmentBytes + 1, kModelDigest)), Code::kInvalidArgument);

  auto writer = Take(SegmentWriter::Create(kSmall, 4096, kModelDigest));
  EXPECT_EQ(code(writer->Append(kF16Pair, 0, 0, [](std::byte*) {})), Code::kInvalidArgument);
  EXPECT_EQ(code(writer->Append(kF16Pair, 33, 0, [](std::byte*) {})), Code::kInvalidArgument);
  EXPECT_EQ(code(writer->Append(kF16Pair, 2, kMaxPosition - 1, [](std::byte*) {})), Code::kInvalidArgument);
  EXPECT_EQ(code(SegmentWriter::Seal(writer)), Code::kInvalidArgument);  // no page yet
  EXPECT_NE(writer, nullptr);
}

TEST(SegmentWriter, CarriesConstantsThatOpenReadsBackAndKeepsTheirAddress) {
  const Geometry geometry{.n_layers = 3, .n_kv_heads = 2, .head_dim = 80};
  SegmentConstants constants = SomeConstants(geometry);
  constants.calibration_digest = {1, 2, 3};
  const CodecPair pairs[] = {
      kRotatedPair, {CodecId::k8, CodecId::kF16}, {CodecId::kRefine4, CodecId::kRefine4}, kI8Pair};
  auto writer = Take(SegmentWriter::Create(geometry, 1 << 20, kModelDigest, &constants));
  for (const CodecPair pair : pairs) Take(writer->Append(pair, 32, 0, [](std::byte*) {}));
  const std::byte* const while_open = writer->constants();
  const auto sealed = Take(SegmentWriter::Seal(writer));
  EXPECT_EQ(sealed->constants(), while_open);

  const auto segment = Take(Segment::Open(Take(sealed->fd().Duplicate())));
  EXPECT_EQ(segment->header().rotation_seed, 0x6572616853564b51u);
  EXPECT_EQ(segment->header().calibration_digest, constants.calibration_digest);
  EXPECT_EQ(segment->header().constants_bytes, 2880u);  // 3 layers x 2 heads x 3 vectors x 80 halves
  EXPECT_EQ(reinterpret_cast<uintptr_t>(segment->constants()) % 64, 0u);
  EXPECT_EQ(std::memcmp(segment->constants(), constants.halves.data(), 2880), 0);
  for (size_t i = 0; i < std::size(pairs); ++i) EXPECT_EQ(segment->codecs(i), pairs[i]);
}

TEST(SegmentWriter, HasNeitherSeedNorConstantsForPlainPages) {
  const auto segment = SegmentWithPages(kSmall, kI8Pair, 1);
  EXPECT_EQ(segment->constants(), nullptr);
  EXPECT_EQ(segment->header().rotation_seed, 0u);
  EXPECT_EQ(segment->header().constants_offset, 0u);
}

TEST(SegmentWriter, ARefinementSegmentNeedsNoConstants) {
  const auto segment = SegmentWithPages(kSmall, {CodecId::kRefine4, CodecId::kRefine4}, 2);
  const auto opened = Take(Segment::Open(Take(segment->fd().Duplicate())));
  EXPECT_EQ(opened->constants(), nullptr);
  EXPECT_NE(opened->header().rotation_seed, 0u);
}

TEST(SegmentWriter, RefusesRotatedPagesWithoutConstantsAndConstantsThatDoNotFit) {
  const auto code = [](const auto& result) { return result ? Code::kInternal : result.error().code; };
  auto writer = Take(SegmentWriter::Create(kSmall, 1 << 16, kModelDigest));
  EXPECT_EQ(code(writer->Append(kRotatedPair, 32, 0, [](std::byte*) {})), Code::kInvalidArgument);
  EXPECT_EQ(code(writer->Append({CodecId::kF16, CodecId::k4}, 32, 0, [](std::byte*) {})), Code::kInvalidArgument);
  EXPECT_EQ(code(writer->Append({CodecId::kRefine4, CodecId::kF16}, 32, 0, [](std::byte*) {})), Code::kInvalidArgument);
  EXPECT_EQ(writer->n_pages(), 0u);

  const SegmentConstants other = SomeConstants({1, 1, 64});
  EXPECT_EQ(code(SegmentWriter::Create(kSmall, 1 << 16, kModelDigest, &other)), Code::kInvalidArgument);
  SegmentConstants infinite = SomeConstants(kSmall);
  infinite.halves[95] = 0xfc00;
  EXPECT_EQ(code(SegmentWriter::Create(kSmall, 1 << 16, kModelDigest, &infinite)), Code::kInvalidArgument);
}

TEST(SegmentWriter, RefusesPagesOfLayersWithoutTheirCodecsAndThoseThatDoNotFit) {
  const CodecPair pairs[] = {kRotatedPair};
  const auto table = Take(LayerCodecs::Create(kSmall, pairs));
  const SegmentConstants constants = SomeConstants(kSmall);
  const auto nothing = [](std::byte*) { FAIL(); };
  const auto append = [&](SegmentWriter& writer, CodecPair codecs) {
    const auto page = writer.Append(codecs, 1, 0, nothing);
    EXPECT_FALSE(page);
    return page ? Code::kInternal : page.error().code;
  };
  const auto without = Take(SegmentWriter::Create(kSmall, 8192, kModelDigest, &constants));
  EXPECT_EQ(append(*without, kLayersPair), Code::kInvalidArgument);
  const auto with = Take(SegmentWriter::Create(kSmall, 8192, kModelDigest, &constants, table));
  EXPECT_EQ(append(*with, {CodecId::kLayers, CodecId::k4}), Code::kInvalidArgument);
  EXPECT_EQ(append(*with, {CodecId::k4, CodecId::kLayers}), Code::kInvalidArgument);
  const auto no_constants = Take(SegmentWriter::Create(kSmall, 8192, kModelDigest, nullptr, table));
  EXPECT_EQ(append(*no_constants, kLayersPair), Code::kInvalidArgument);
  const Geometry other{.n_layers = 1, .n_kv_heads = 2, .head_dim = 32};
  EXPECT_EQ(SegmentWriter::Create(other, 8192, kModelDigest, nullptr, table).error().code, Code::kInvalidArgument);
}

TEST(SegmentWriter, NeverMakesAFileBeyondTheLimitThatReadersSet) {
  auto writer = Take(SegmentWriter::Create(kSmall, kMaxSegmentBytes, kModelDigest));
  const std::vector<Fd> own = WritableSegmentDescriptors();
  ASSERT_EQ(own.size(), 1u);
  EXPECT_EQ(Take(own[0].SizeBytes()), kMaxSegmentBytes);
}

TEST(SegmentWriter, WritesThousandsOfPages) {
  constexpr size_t kPages = 3000;  // a page table of 96 kB
  const auto sealed = SegmentWithPages(kSmall, kI8Pair, kPages);
  const auto segment = Take(Segment::Open(Take(sealed->fd().Duplicate())));
  ASSERT_EQ(segment->pages().size(), kPages);
  EXPECT_EQ(segment->header().data_offset, 98304u);  // 192 + 3000 * 32, up to the next multiple of 4096
  EXPECT_TRUE(segment->Verify(0, kPages, 4));
  ExpectPattern(segment->page(kPages - 1), kSmallPage, kPages - 1);
}

TEST(SegmentWriter, LeavesNoDescriptorBehindWhenDropped) {
  { auto writer = WriterWithPages(kSmall, kF16Pair, 1); }
  EXPECT_TRUE(WritableSegmentDescriptors().empty());
}

}  // namespace
}  // namespace qkv
