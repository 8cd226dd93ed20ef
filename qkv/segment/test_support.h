// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For tests only: segments with known contents, and their bytes to damage.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "qkv/base/test_support.h"
#include "qkv/segment/writer.h"

namespace qkv::test {

using Bytes = std::vector<std::byte>;

inline constexpr Geometry kSmall{.n_layers = 1, .n_kv_heads = 1, .head_dim = 32};
inline constexpr CodecPair kF16Pair{CodecId::kF16, CodecId::kF16};
inline constexpr CodecPair kI8Pair{CodecId::kI8, CodecId::kI8};
inline constexpr CodecPair kRotatedPair{CodecId::k4, CodecId::k3};
inline constexpr std::array<uint8_t, 16> kModelDigest = {0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77,
                                                         0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff};

// A different value for every page and nearby byte, never constant over a page.
inline std::byte PatternByte(size_t page, size_t i) {
  return static_cast<std::byte>(page * 37 + i * 11 + i / 251 + 1);
}

inline void FillWithPattern(std::byte* page, size_t bytes, size_t index) {
  for (size_t i = 0; i < bytes; ++i) page[i] = PatternByte(index, i);
}

// A different finite value at every place.
inline SegmentConstants SomeConstants(const Geometry& geometry) {
  SegmentConstants constants(geometry);
  for (size_t i = 0; i < constants.halves.size(); ++i) constants.halves[i] = static_cast<uint16_t>(0x3000 + i % 0x4000);
  return constants;
}

// `n_pages` full pages of patterns from position 0 on; with SomeConstants where the codecs need them.
inline std::unique_ptr<SegmentWriter> WriterWithPages(const Geometry& geometry, CodecPair codecs, size_t n_pages) {
  const size_t bytes = PageLayout(geometry, codecs).bytes;
  const SegmentConstants constants = SomeConstants(geometry);
  auto writer = Take(
      SegmentWriter::Create(geometry, bytes * n_pages, kModelDigest, NeedsConstants(codecs) ? &constants : nullptr));
  for (size_t i = 0; i < n_pages; ++i) {
    Take(writer->Append(codecs, kPageTokens, static_cast<uint32_t>(i * kPageTokens),
                        [&](std::byte* page) { FillWithPattern(page, bytes, i); }));
  }
  return writer;
}

inline std::shared_ptr<const Segment> SegmentWithPages(const Geometry& geometry, CodecPair codecs, size_t n_pages) {
  auto writer = WriterWithPages(geometry, codecs, n_pages);
  return Take(SegmentWriter::Seal(writer));
}

// Duplicates of this process's writable descriptors of segments being written, by ascending number.
inline std::vector<Fd> WritableSegmentDescriptors() {
  std::vector<int> numbers;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (target.find("memfd:qkv-segment") != std::string::npos) numbers.push_back(std::stoi(entry.path().filename()));
  }
  std::vector<Fd> found;
  for (const int fd : numbers) {
    if ((::fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR) found.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  }
  return found;
}

inline Bytes BytesOf(const Segment& segment) {
  Bytes bytes(segment.bytes());
  EXPECT_EQ(::pread(segment.fd().get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  return bytes;
}

inline Fd UnsealedMemfd(const Bytes& bytes) {
  Fd fd = Take(CreateMemfd("qkv-test"));
  EXPECT_EQ(::pwrite(fd.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  return fd;
}

inline Result<std::shared_ptr<const Segment>> OpenSealed(const Bytes& bytes) {
  return Segment::Open(Take(SealedMemfd("qkv-test", bytes)));
}

// Header and page table in place, for damaging them. The buffer of a vector is aligned enough for both.
inline SegmentHeader& HeaderIn(Bytes& bytes) {
  return *reinterpret_cast<SegmentHeader*>(bytes.data());
}
inline PageEntry& EntryIn(Bytes& bytes, size_t index) {
  return reinterpret_cast<PageEntry*>(bytes.data() + sizeof(SegmentHeader))[index];
}
// What a liar would do after changing a field. `n_pages` may differ from the header's.
inline void FixHeaderChecksum(Bytes& bytes, size_t n_pages) {
  SegmentHeader& header = HeaderIn(bytes);
  header.header_checksum = HeaderChecksum(header, {&EntryIn(bytes, 0), n_pages});
}

// tests/golden of the tree that this file was compiled from.
inline std::filesystem::path GoldenPath(const char* name) {
  return std::filesystem::path(__FILE__).parent_path().parent_path().parent_path() / "tests" / "golden" / name;
}
// Golden files are rewritten only by a person who sets QKV_WRITE_GOLDEN=1 because the format version has changed.
inline bool WritesGolden() {
  return std::getenv("QKV_WRITE_GOLDEN") != nullptr;
}

inline Bytes ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}
inline void WriteFile(const std::filesystem::path& path, const Bytes& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  EXPECT_TRUE(file.good()) << path;
}

}  // namespace qkv::test
