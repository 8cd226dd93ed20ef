// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Any bytes as a card: ParseCard refuses them, or what it returns can be used, and parses again from its own bytes.

#include <cstdint>

#include "qkv/card/card.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto card = qkv::ParseCard({reinterpret_cast<const std::byte*>(data), size});
  if (!card) return 0;
  (void)qkv::CheckCompatible(*card, qkv::ModelIdentity());
  (void)qkv::CardToJson(*card, /*with_token_ids=*/true);
  QKV_CHECK(qkv::ParseCard(qkv::SerializeCard(*card)).has_value());
  return 0;
}
