// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// The decoders that see what a peer of the broker's socket sends. The first byte is the number of descriptors beside
// it.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "qkv/broker/protocol.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  (void)qkv::DecodeRequest(bytes, data[0]);
  (void)qkv::DecodeReply(bytes);
  return 0;
}
