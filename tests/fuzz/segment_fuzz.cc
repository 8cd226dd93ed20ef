// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Any bytes as a segment's header, page table, constants and pages: Open refuses them, or every page may be read. Then the
// same under checksums that are right, as a liar would send it.

#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "qkv/segment/segment.h"

namespace {

using qkv::PageEntry;
using qkv::SegmentHeader;

void Use(std::span<const std::byte> bytes) {
  auto fd = qkv::SealedMemfd("qkv-fuzz", bytes);
  if (!fd) return;
  const auto segment = qkv::Segment::Open(*std::move(fd));
  if (!segment) {
    QKV_CHECK(segment.error().reason != qkv::Reason::kNone);
    return;
  }
  if (const std::byte* constants = (*segment)->constants()) {
    const auto& header = (*segment)->header();
    QKV_CHECK(header.constants_bytes == qkv::ConstantsLayout((*segment)->geometry()).bytes);
    QKV_CHECK(header.constants_offset + header.constants_bytes <= header.data_offset);
    QKV_CHECK(XXH3_64bits(constants, header.constants_bytes) == header.constants_checksum);
  }
  for (size_t i = 0; i < (*segment)->pages().size(); ++i) {
    const PageEntry& page = (*segment)->pages()[i];
    QKV_CHECK(page.bytes == (*segment)->layout(i).bytes);
    QKV_CHECK(page.offset + page.bytes <= bytes.size());
    (void)(*segment)->Verify(i);  // reads the whole page
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Use({reinterpret_cast<const std::byte*>(data), size});
  if (size < sizeof(SegmentHeader)) return 0;
  SegmentHeader header;
  std::memcpy(&header, data, sizeof header);
  const size_t room = (size - sizeof header) / sizeof(PageEntry);
  if (header.n_pages > room) header.n_pages %= room + 1;
  header.file_bytes = size;
  std::vector<PageEntry> table(header.n_pages);
  if (!table.empty()) std::memcpy(table.data(), data + sizeof header, table.size() * sizeof(PageEntry));
  if (header.constants_offset <= size && header.constants_bytes <= size - header.constants_offset) {
    header.constants_checksum =
        header.constants_bytes == 0 ? 0 : XXH3_64bits(data + header.constants_offset, header.constants_bytes);
  }
  header.header_checksum = qkv::HeaderChecksum(header, table);
  std::vector<std::byte> forged(size);
  std::memcpy(forged.data(), data, size);
  std::memcpy(forged.data(), &header, sizeof header);
  Use(forged);
  return 0;
}
