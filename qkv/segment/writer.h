// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes one segment: create, append pages, seal. The memory file is written through a small window that is mapped
// read-write for one page at a time; everything else reads it through a descriptor reopened read-only, whose mapping
// does not stand in the way of F_SEAL_WRITE. Pages already appended may be read (page()) while others are appended.
//
// One thread at a time may call Append or Seal; page() of an appended page is safe from any thread. If the process dies
// before Seal, nobody else has the descriptor and the kernel frees the memory.

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "qkv/segment/segment.h"

namespace qkv {

class SegmentWriter {
 public:
  // capacity_bytes: room for the pages; the file, header, page table and constants included, never exceeds
  // kMaxSegmentBytes. Memory is taken only as pages are written. `model_digest` goes into the header. Room for the page
  // table is made for the smallest pages possible. `constants` are copied; without them pages that need some are refused,
  // and without `layers` those of kLayersPair. Errors: kInvalidArgument (geometry, or not one page fits, or constants or
  // layers of another geometry, or constants that are not finite), kExhausted.
  static Result<std::unique_ptr<SegmentWriter>> Create(const Geometry& geometry, uint64_t capacity_bytes,
                                                       const std::array<uint8_t, 16>& model_digest,
                                                       const SegmentConstants* constants = nullptr,
                                                       std::shared_ptr<const LayerCodecs> layers = nullptr);

  bool Fits(CodecPair codecs) const;  // one more page; kLayersPair only with layers

  // `fill` writes the page, PageLayout::bytes that are zero before. Returns the page's index. The checksum is taken and
  // the writable window unmapped before this returns. After an error the writer is as it was. Errors:
  // kExhausted/pool_full when the page does not fit or the system has no memory left, kInvalidArgument for tokens
  // outside 1..32, positions from kMaxPosition on, a refinement on one side only, or constants or layers that are missing.
  Result<size_t> Append(CodecPair codecs, int tokens, uint32_t first_position,
                        const std::function<void(std::byte* page)>& fill);

  // Takes back the last page, which `fill` must have left as it was: zero.
  void DropLast();

  size_t n_pages() const { return table_.size(); }
  uint64_t bytes() const { return next_offset_; }  // what the segment would take if sealed now
  // The table never moves: room for all its entries is made at the start, so Append does not disturb this.
  const std::byte* page(size_t index) const { return mapping_.data() + table_.data()[index].offset; }

  const LayerCodecs* layers() const { return layers_.get(); }  // then the sealed segment's
  const std::byte* constants() const { return constants_bytes_ == 0 ? nullptr : mapping_.data() + constants_offset_; }

  // Writes header and page table, trims the file, seals it; `writer` is null then. The returned segment keeps the
  // writer's mapping, so that page addresses stay as they were; its pages count as verified. Its descriptor is read-only;
  // the writable one is closed. At least one page must have been appended (else kInvalidArgument). After an error, of
  // which kExhausted may pass, the writer is still there: its pages may be read, and it may be sealed later, perhaps with
  // no room for more pages.
  static Result<std::shared_ptr<const Segment>> Seal(std::unique_ptr<SegmentWriter>& writer);

 private:
  SegmentWriter() = default;

  Fd fd_;  // read-write; dropped at Seal
  Fd read_only_fd_;
  Mapping mapping_;  // read-only, whole capacity
  Geometry geometry_;
  std::array<uint8_t, 16> model_digest_{};
  std::array<uint8_t, 16> calibration_digest_{};
  uint64_t constants_offset_ = 0;
  uint64_t constants_bytes_ = 0;
  uint64_t constants_checksum_ = 0;
  std::shared_ptr<const LayerCodecs> layers_;
  uint64_t layers_offset_ = 0;
  bool rotated_ = false;      // any page so far
  uint64_t data_offset_ = 0;  // of the first page
  uint64_t next_offset_ = 0;  // of the next page
  uint64_t file_bytes_ = 0;   // until it is trimmed
  size_t max_pages_ = 0;
  std::vector<PageEntry> table_;
};

}  // namespace qkv
