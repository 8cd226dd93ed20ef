// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A sealed segment, mapped read-only. The object owns its descriptor and its mapping: pages stay valid while a
// shared_ptr to it lives, whatever happens to the process that wrote them (the kernel keeps the memory).
//
// Immutable after construction except for the record of which pages have been verified, which is atomic: any thread of
// the process may use it. Nothing in it is shared between processes but the sealed bytes.

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "qkv/base/fd.h"
#include "qkv/segment/layout.h"

namespace qkv {

class Segment {
 public:
  // Takes a sealed memory file (or a file on disk, with `require_seals` false), copies header and page table, validates
  // the copies against the limits and the real size, maps the whole file read-only and verifies the constants. A
  // descriptor that could write is replaced by a read-only one. O(pages of the table + constants); page contents are not
  // read. Errors: kCorrupt/checksum,
  // kIncompatible/version or endianness or codec_unsupported, kDenied/denied when it is not sealed, kExhausted.
  //
  // A file on disk can be truncated or changed by whoever may write to it: open only files that nobody but this user can
  // write. Verify finds what was truncated before it; afterwards a read of what is gone raises SIGBUS.
  static Result<std::shared_ptr<const Segment>> Open(Fd fd, bool require_seals = true);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const Geometry& geometry() const { return geometry_; }
  const SegmentHeader& header() const { return header_; }
  std::span<const PageEntry> pages() const { return table_; }
  uint64_t bytes() const { return header_.file_bytes; }
  const Fd& fd() const { return fd_; }
  bool sealed() const { return sealed_; }  // else a file on disk
  const std::byte* page(size_t index) const { return mapping_.data() + table_[index].offset; }
  CodecPair codecs(size_t index) const;  // refine is false: only the card knows of another segment
  // Of the pages of kLayersPair; null where there are none.
  const std::shared_ptr<const LayerCodecs>& layers() const { return layers_; }
  PageLayout layout(size_t index) const { return PageLayout(geometry_, codecs(index), layers_.get()); }
  // ConstantsLayout::bytes, on 64 bytes; nullptr where there are none, which is where no page needs them. All finite.
  const std::byte* constants() const {
    return header_.constants_bytes == 0 ? nullptr : mapping_.data() + header_.constants_offset;
  }

  // Identifies the content: XXH3-128 of header and page table (which hold a checksum of every page), 32 hex digits.
  const std::string& digest() const { return digest_; }

  // Compares the page with its checksum; the answer is remembered, so that asking again is free.
  // Errors: kCorrupt with Reason::kChecksum, naming the page (also when a disk cannot give it); kInvalidArgument when
  // there is no such page.
  Status Verify(size_t index) const;
  // Pages [first, first + count) with up to `threads` threads, the caller's included; the first page that fails is
  // reported.
  Status Verify(size_t first, size_t count, int threads) const;

 private:
  friend class SegmentWriter;
  Segment(Fd fd, Mapping mapping, const SegmentHeader& header, std::vector<PageEntry> table,
          std::shared_ptr<const LayerCodecs> layers, bool verified);
  Status Populate(uint64_t offset, uint64_t bytes) const;
  Status VerifyConstants() const;

  Fd fd_;
  Mapping mapping_;
  SegmentHeader header_;
  Geometry geometry_;
  std::vector<PageEntry> table_;
  std::shared_ptr<const LayerCodecs> layers_;
  std::string digest_;
  const bool sealed_;
  std::unique_ptr<std::atomic<bool>[]> verified_;
};

}  // namespace qkv
