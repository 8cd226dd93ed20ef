// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a broker checks before it takes in a context that a client publishes. Everything that comes in is untrusted.
// Stateless; any thread.

#include <cstddef>
#include <vector>

#include "qkv/base/fd.h"
#include "qkv/broker/registry.h"

namespace qkv {

struct AdmittedContext {
  NewContext context;  // its descriptors are read-only, opened anew: nobody else shares their file offset
  std::vector<std::byte> card_bytes;
};

// `fds`: the card, then the segments in the card's order. Each must be sealed (which a memory file with a writable
// mapping cannot be), the card must parse, and number and sizes of the segments must be those in the card. Page
// contents are not looked at: who attaches verifies them. Expiry is the card's; pin is false; the producer is not
// known. Errors: kDenied/denied (not sealed), kInvalidArgument, kExhausted, and what ParseCard says.
Result<AdmittedContext> AdmitContext(const std::vector<Fd>& fds);

// The whole of a memory file of at most `max_bytes`.
Result<std::vector<std::byte>> ReadFile(const Fd& fd, size_t max_bytes);

}  // namespace qkv
