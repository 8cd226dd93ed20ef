// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/segment/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

#include "qkv/base/kill_point.h"
#include "qkv/codec/frame.h"

namespace qkv {
namespace {

template <class... Args>
tl::unexpected<Error> Corrupt(fmt::format_string<Args...> format, Args&&... args) {
  return Err(Code::kCorrupt, Reason::kChecksum, "segment: {}", fmt::format(format, std::forward<Args>(args)...));
}

Status ReadAt(const Fd& fd, uint64_t offset, void* data, size_t bytes) {
  auto* at = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd.get(), at, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError("segment: read header and page table");
    if (n == 0) return Corrupt("the file ends at byte {}, {} more expected", offset, bytes);
    at += n;
    bytes -= static_cast<size_t>(n);
    offset += static_cast<uint64_t>(n);
  }
  return {};
}

// What tells whether the rest of the header means what this version thinks it means.
Status CheckFormat(const SegmentHeader& header) {
  if (header.magic != kSegmentMagic) return Corrupt("no segment: the file does not start with QKVSEG01");
  if (header.byte_order == __builtin_bswap32(kByteOrderMark)) {
    return Err(Code::kIncompatible, Reason::kEndianness, "segment: written on a machine of the other byte order");
  }
  if (header.byte_order != kByteOrderMark) {
    return Corrupt("byte order mark {:#x}, expected {:#x}", header.byte_order, kByteOrderMark);
  }
  if (header.version != kSegmentVersion) {
    return Err(Code::kIncompatible, Reason::kVersion, "segment: version {}, expected {}", header.version,
               kSegmentVersion);
  }
  return {};
}

Status CheckHeader(const SegmentHeader& header, uint64_t size) {
  if (header.file_bytes != size) return Corrupt("{} bytes by its header, {} found", header.file_bytes, size);
  if (header.table_offset != sizeof(SegmentHeader)) {
    return Corrupt("page table at {}, expected {}", header.table_offset, sizeof(SegmentHeader));
  }
  const uint64_t table_end = header.table_offset + uint64_t{header.n_pages} * sizeof(PageEntry);
  if (header.data_offset % kPageAlignment != 0 || header.data_offset < table_end || header.data_offset > size) {
    return Corrupt("pages at {}, expected a multiple of {} from {} to {}", header.data_offset, kPageAlignment,
                   table_end, size);
  }
  if (header.page_tokens != kPageTokens) {
    return Err(Code::kIncompatible, Reason::kVersion, "segment: pages of {} tokens, expected {}", header.page_tokens,
               kPageTokens);
  }
  if (header.k_head_dim != header.v_head_dim) {
    return Err(Code::kIncompatible, Reason::kVersion, "segment: head dims of K {} and V {}, expected the same",
               header.k_head_dim, header.v_head_dim);
  }
  if (std::any_of(header.reserved.begin(), header.reserved.end(), [](uint8_t byte) { return byte != 0; })) {
    return Err(Code::kIncompatible, Reason::kVersion, "segment: reserved bytes in use, expected zeros");
  }
  return {};
}

// What stands between page table and pages. Before ValidateGeometry: no number here depends on the geometry.
Status CheckPlace(const SegmentHeader& header, std::string_view what, uint64_t offset, uint64_t bytes,
                  uint64_t checksum) {
  if (bytes == 0) {
    if (offset == 0 && checksum == 0) return {};
    return Corrupt("0 bytes of {} at {}, expected at 0", what, offset);
  }
  const uint64_t table_end = header.table_offset + uint64_t{header.n_pages} * sizeof(PageEntry);
  if (offset % 64 != 0 || offset < table_end || offset > header.data_offset || bytes > header.data_offset - offset) {
    return Corrupt("{} bytes of {} at {}, expected at a multiple of 64 from {} to {}", bytes, what, offset, table_end,
                   header.data_offset);
  }
  return {};
}

Geometry GeometryOf(const SegmentHeader& header) {
  // A number beyond int becomes a negative one, which ValidateGeometry refuses.
  return {static_cast<int>(header.n_layers), static_cast<int>(header.n_kv_heads), static_cast<int>(header.k_head_dim)};
}

// Whether the header says of the pages' frame what they need. After CheckTable.
Status CheckFrame(const SegmentHeader& header, std::span<const PageEntry> table) {
  bool rotated = false, needs_constants = false;
  for (const PageEntry& entry : table) {
    const CodecPair codecs{static_cast<CodecId>(entry.k_codec), static_cast<CodecId>(entry.v_codec)};
    rotated |= IsRotated(codecs);
    needs_constants |= NeedsConstants(codecs);
  }
  if (const uint64_t seed = rotated ? kRotationSeed : 0; header.rotation_seed != seed) {
    return Err(Code::kIncompatible, Reason::kCodecUnsupported, "segment: rotated with seed {:#x}, expected {:#x}",
               header.rotation_seed, seed);
  }
  const uint64_t bytes = ConstantsLayout(GeometryOf(header)).bytes;
  if (header.constants_bytes != bytes && (header.constants_bytes != 0 || needs_constants)) {
    return Corrupt("{} bytes of constants, expected {}", header.constants_bytes, bytes);
  }
  return {};
}

// The layers' codecs, from a copy of their bytes; null where there are none. After CheckPlace and ValidateGeometry.
Result<std::shared_ptr<const LayerCodecs>> ReadLayers(const Fd& fd, const SegmentHeader& header) {
  if (header.layers_bytes == 0) return nullptr;
  if (header.layers_bytes != 2 * uint64_t{header.n_layers}) {
    return Corrupt("{} bytes of layers' codecs, expected {}", header.layers_bytes, 2 * header.n_layers);
  }
  std::vector<uint8_t> bytes(header.layers_bytes);
  QKV_RETURN_IF_ERROR(ReadAt(fd, header.layers_offset, bytes.data(), bytes.size()));
  const uint64_t checksum = XXH3_64bits(bytes.data(), bytes.size());
  if (checksum != header.layers_checksum) {
    return Corrupt("layers' codecs have checksum {:016x}, expected {:016x}", checksum, header.layers_checksum);
  }
  return LayerCodecs::Parse(GeometryOf(header), bytes);
}

Status CheckTable(const SegmentHeader& header, std::span<const PageEntry> table, const LayerCodecs* layers) {
  const Geometry geometry = GeometryOf(header);
  uint64_t free_from = header.data_offset;
  for (size_t i = 0; i < table.size(); ++i) {
    const PageEntry& entry = table[i];
    const CodecPair codecs{static_cast<CodecId>(entry.k_codec), static_cast<CodecId>(entry.v_codec)};
    if (codecs == kLayersPair) {
      if (layers == nullptr) return Corrupt("page {} has layers of different codecs, but the segment names none", i);
    } else if (FindCodec(entry.k_codec) == nullptr || FindCodec(entry.v_codec) == nullptr) {
      return Err(Code::kIncompatible, Reason::kCodecUnsupported,
                 "segment: page {} has codecs {} and {}, not known here", i, entry.k_codec, entry.v_codec);
    }
    constexpr auto kRefinement = static_cast<uint8_t>(CodecId::kRefine4);
    if ((entry.k_codec == kRefinement) != (entry.v_codec == kRefinement)) {
      return Corrupt("page {} has codecs {} and {}, expected a refinement on both sides or neither", i, entry.k_codec,
                     entry.v_codec);
    }
    if (const Codec* v = FindCodec(entry.v_codec); v != nullptr && v->keys_only) {
      return Corrupt("page {} has codec {} for V, which is for K only", i, entry.v_codec);
    }
    if (entry.tokens < 1 || entry.tokens > kPageTokens) {
      return Corrupt("page {} has {} tokens, expected 1 to {}", i, entry.tokens, kPageTokens);
    }
    if (entry.first_position > kMaxPosition - entry.tokens) {
      return Corrupt("page {} is at position {}, expected positions below {}", i, entry.first_position, kMaxPosition);
    }
    const uint64_t bytes = PageLayout(geometry, codecs, layers).bytes;
    if (entry.bytes != bytes) return Corrupt("page {} has {} bytes, expected {}", i, entry.bytes, bytes);
    // free_from never exceeds file_bytes, and no sum is formed from entry.offset before it is known to be small.
    if (entry.offset % kPageAlignment != 0 || entry.offset < free_from || entry.offset > header.file_bytes ||
        bytes > header.file_bytes - entry.offset) {
      return Corrupt("page {} is at {} to {} bytes behind it, expected a multiple of {} from {} to {}", i, entry.offset,
                     bytes, kPageAlignment, free_from, header.file_bytes);
    }
    free_from = entry.offset + bytes;
  }
  return {};
}

}  // namespace

Segment::Segment(Fd fd, Mapping mapping, const SegmentHeader& header, std::vector<PageEntry> table,
                 std::shared_ptr<const LayerCodecs> layers, bool verified)
    : fd_(std::move(fd)),
      mapping_(std::move(mapping)),
      header_(header),
      geometry_(GeometryOf(header)),
      table_(std::move(table)),
      layers_(std::move(layers)),
      digest_(ContentDigest(header_, table_)),
      sealed_(IsSealed(fd_)),
      verified_(std::make_unique<std::atomic<bool>[]>(table_.size())) {
  for (size_t i = 0; i < table_.size(); ++i) verified_[i].store(verified, std::memory_order_relaxed);
}

Result<std::shared_ptr<const Segment>> Segment::Open(Fd fd, bool require_seals) {
  // Seals first: what is read afterwards can then no longer change.
  if (require_seals && !IsSealed(fd)) {
    return Err(Code::kDenied, Reason::kDenied, "segment: not sealed against writing, growing and shrinking");
  }
  const int flags = ::fcntl(fd.get(), F_GETFL);
  if (flags < 0) return ErrnoError("segment: descriptor");
  // Before Linux 6.7 a sealed file can only be mapped through a read-only descriptor; and ours may be passed on.
  if ((flags & O_ACCMODE) != O_RDONLY) {
    QKV_ASSIGN_OR_RETURN(fd, fd.ReopenReadOnly());
  }

  QKV_ASSIGN_OR_RETURN(const uint64_t size, fd.SizeBytes());
  if (size < sizeof(SegmentHeader) || size > kMaxSegmentBytes) {
    return Corrupt("{} bytes, expected {} to {}", size, sizeof(SegmentHeader), kMaxSegmentBytes);
  }
  SegmentHeader header;
  QKV_RETURN_IF_ERROR(ReadAt(fd, 0, &header, sizeof(header)));
  QKV_RETURN_IF_ERROR(CheckFormat(header));
  if (header.n_pages < 1 || header.n_pages > kMaxPagesPerSegment ||
      header.n_pages > (size - sizeof(SegmentHeader)) / sizeof(PageEntry)) {
    return Corrupt("{} pages in {} bytes, expected 1 to {}", header.n_pages, size, kMaxPagesPerSegment);
  }
  std::vector<PageEntry> table(header.n_pages);
  QKV_RETURN_IF_ERROR(ReadAt(fd, sizeof(SegmentHeader), table.data(), table.size() * sizeof(PageEntry)));
  const uint64_t checksum = HeaderChecksum(header, table);
  if (checksum != header.header_checksum) {
    return Corrupt("header and page table have checksum {:016x}, expected {:016x}", checksum, header.header_checksum);
  }
  QKV_RETURN_IF_ERROR(CheckHeader(header, size));
  QKV_RETURN_IF_ERROR(
      CheckPlace(header, "constants", header.constants_offset, header.constants_bytes, header.constants_checksum));
  QKV_RETURN_IF_ERROR(
      CheckPlace(header, "layers' codecs", header.layers_offset, header.layers_bytes, header.layers_checksum));
  if (Status status = ValidateGeometry(GeometryOf(header)); !status) return Corrupt("{}", status.error().message);
  QKV_ASSIGN_OR_RETURN(std::shared_ptr<const LayerCodecs> layers, ReadLayers(fd, header));
  QKV_RETURN_IF_ERROR(CheckTable(header, table, layers.get()));
  QKV_RETURN_IF_ERROR(CheckFrame(header, table));

  QKV_ASSIGN_OR_RETURN(Mapping mapping, Mapping::Map(fd, Mapping::Access::kReadOnly, 0, size));
  std::shared_ptr<const Segment> segment(
      new Segment(std::move(fd), std::move(mapping), header, std::move(table), std::move(layers), /*verified=*/false));
  QKV_RETURN_IF_ERROR(segment->VerifyConstants());
  return segment;
}

Status Segment::VerifyConstants() const {
  if (constants() == nullptr) return {};
  if (!sealed_) QKV_RETURN_IF_ERROR(Populate(header_.constants_offset, header_.constants_bytes));
  const uint64_t checksum = XXH3_64bits(constants(), header_.constants_bytes);
  if (checksum != header_.constants_checksum) {
    return Corrupt("constants have checksum {:016x}, expected {:016x}", checksum, header_.constants_checksum);
  }
  // One that is not finite would spoil every score that it takes part in.
  for (size_t i = 0; i < header_.constants_bytes; i += 2) {
    uint16_t half;
    std::memcpy(&half, constants() + i, sizeof half);
    if ((half & 0x7c00) == 0x7c00) return Corrupt("constant {} is not finite", i / 2);
  }
  return {};
}

CodecPair Segment::codecs(size_t index) const {
  return {static_cast<CodecId>(table_[index].k_codec), static_cast<CodecId>(table_[index].v_codec)};
}

// Reading a mapped page that a disk cannot give, or that was truncated away, raises SIGBUS; asking the kernel to read it
// first makes that an error. Where the kernel does not know how (before Linux 5.14), nothing is asked.
Status Segment::Populate(uint64_t offset, uint64_t bytes) const {
#ifdef MADV_POPULATE_READ
  const auto system_page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t skew = offset % system_page;
  if (::madvise(mapping_.data() + offset - skew, bytes + skew, MADV_POPULATE_READ) != 0 &&
      (errno == EFAULT || errno == EHWPOISON || errno == EIO)) {
    return Corrupt("{}: the page at {} cannot be read", digest_, offset);
  }
#endif
  return {};
}

Status Segment::Verify(size_t index) const {
  if (index >= table_.size()) {
    return Err(Code::kInvalidArgument, "segment {}: page {} of {}", digest_, index, table_.size());
  }
  // Relaxed: the flag guards nothing but the sealed bytes. Two threads may both verify a page; they find the same.
  if (verified_[index].load(std::memory_order_relaxed)) return {};
  const PageEntry& entry = table_[index];
  if (!sealed_) QKV_RETURN_IF_ERROR(Populate(entry.offset, entry.bytes));
  const uint64_t checksum = XXH3_64bits(page(index), entry.bytes);
  if (checksum != entry.checksum) {
    return Err(Code::kCorrupt, Reason::kChecksum, "segment {}: page {} has checksum {:016x}, expected {:016x}", digest_,
               index, checksum, entry.checksum);
  }
  verified_[index].store(true, std::memory_order_relaxed);
  KillPoint("segment.verified");
  return {};
}

Status Segment::Verify(size_t first, size_t count, int threads) const {
  if (first > table_.size() || count > table_.size() - first) {
    return Err(Code::kInvalidArgument, "segment {}: pages {} to {} behind it, of {}", digest_, first, count,
               table_.size());
  }
  const size_t end = first + count;
  while (first < end && verified_[first].load(std::memory_order_relaxed)) ++first;

  std::atomic<size_t> next{first};
  std::atomic<size_t> first_bad{end};
  // Indices are taken in ascending order, so every page before the first bad one has been taken when it is found.
  const auto work = [&] {
    for (size_t i = next++; i < first_bad; i = next++) {
      if (Verify(i)) continue;
      size_t seen = first_bad;
      while (i < seen && !first_bad.compare_exchange_weak(seen, i)) {
      }
    }
  };
  std::vector<std::jthread> helpers;
  const size_t useful = std::min<size_t>(static_cast<size_t>(std::max(threads, 1)), end - first);
  try {
    while (helpers.size() + 1 < useful) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads to be had: those there are do it
  }
  work();
  helpers.clear();  // joins
  return first_bad < end ? Verify(first_bad) : Status{};
}

}  // namespace qkv
