// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a broker checks before it takes in a context that a client publishes. Everything that comes in is untrusted.
// Stateless; any thread.

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "qkv/base/fd.h"
#include "qkv/broker/registry.h"
#include "qkv/card/card.h"

namespace qkv {

struct AdmittedContext {
  NewContext context;  // its descriptors are read-only, opened anew: nobody else shares their file offset
  std::vector<std::byte> card_bytes;
  std::string tenant;  // as the card says; may be empty
};

// `fds`: the card, then the segments in the card's order. Each must be sealed (which a memory file with a writable
// mapping cannot be) or be known to `on_disk` as a segment of the broker's own directory; the card must parse, and
// number and sizes of the segments must be those in the card. Page contents are not looked at: who attaches verifies
// them. Expiry is the card's; pin is false; the producer is not known. Errors: kDenied/denied (not sealed),
// kInvalidArgument, kExhausted, and what ParseCard says.
using FindOnDisk = std::function<std::optional<StoredFile>(const FileKey&)>;
Result<AdmittedContext> AdmitContext(const std::vector<Fd>& fds, const FindOnDisk& on_disk = {});

// What a card says of its context.
ContextInfo InfoOf(const CacheCard& card);

}  // namespace qkv
