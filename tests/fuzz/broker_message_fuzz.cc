// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// The decoders that see what a peer of the broker's socket sends. The first byte is the number of descriptors beside it.
// What is let through keeps within the limits of docs/PROTOCOL.md §4 and means the same when it is sent on.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "qkv/broker/protocol.h"
#include "qkv/broker/socket.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t n_descriptors = data[0];
  if (const auto request = qkv::DecodeRequest(bytes, n_descriptors)) {
    QKV_CHECK(request->publish().n_descriptors() <= qkv::kMaxDescriptorsPerContext);
    QKV_CHECK(request->publish().ttl_ms() <= qkv::kMaxTtlMs);
    const auto again = qkv::DecodeRequest(request->SerializeAsString(), n_descriptors);
    QKV_CHECK(again.has_value() && again->body_case() == request->body_case());
  }
  if (const auto reply = qkv::DecodeReply(bytes)) {
    const qkv::Error error = qkv::ErrorFrom(reply->failure());
    QKV_CHECK(qkv::FailureReply(error).ByteSizeLong() <= qkv::kMaxMessageBytes);
    for (const auto& context : reply->listed().contexts()) {
      qkv::BrokerReply::Context wire;
      qkv::ToWire(qkv::FromWire(context), &wire);
    }
  }
  return 0;
}
