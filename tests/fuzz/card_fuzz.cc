// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Any bytes as a card: ParseCard refuses them, or what it returns can be used, and parses again from its own bytes. Then
// the same message under an envelope that is right, as a liar would send it: the checksum alone must not be what holds.

#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "qkv/card/card.h"

namespace {

void Use(std::span<const std::byte> bytes) {
  const auto card = qkv::ParseCard(bytes);
  if (!card) {
    QKV_CHECK(card.error().reason != qkv::Reason::kNone);
    return;
  }
  (void)qkv::CheckCompatible(*card, qkv::ModelIdentity());
  QKV_CHECK(qkv::CompareIdentity(card->model(), card->model()).empty() ||
            !qkv::CheckCompatible(*card, card->model()).has_value());
  (void)qkv::CardToJson(*card, /*with_token_ids=*/true);
  QKV_CHECK(qkv::ParseCard(qkv::SerializeCard(*card)).has_value());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kLength = 12, kChecksum = 16, kEnvelope = 24;  // FORMAT.md §4
  Use({reinterpret_cast<const std::byte*>(data), size});
  if (size < kEnvelope) return 0;
  std::vector<std::byte> forged(size);
  std::memcpy(forged.data(), data, size);
  std::memcpy(forged.data(), "QKVCARD1\x01\0\0\0", kLength);
  const auto length = static_cast<uint32_t>(size - kEnvelope);
  const uint64_t checksum = XXH3_64bits(data + kEnvelope, length);
  std::memcpy(&forged[kLength], &length, sizeof length);
  std::memcpy(&forged[kChecksum], &checksum, sizeof checksum);
  Use(forged);
  return 0;
}
