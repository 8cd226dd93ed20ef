// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Any bytes as a segment: Open refuses them, or every page may be read.

#include <cstdint>

#include "qkv/segment/segment.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto fd = qkv::SealedMemfd("qkv-fuzz", {reinterpret_cast<const std::byte*>(data), size});
  if (!fd) return 0;
  const auto segment = qkv::Segment::Open(*std::move(fd), /*require_seals=*/false);
  if (!segment) return 0;
  for (size_t i = 0; i < (*segment)->pages().size(); ++i) (void)(*segment)->Verify(i);
  return 0;
}
