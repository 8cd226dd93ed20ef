// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sizes as people write them. Pure; any thread.

#include <cstdint>
#include <string>

#include "qkv/base/error.h"

namespace qkv {

// "512M", "4GiB", "1000000": bytes, in powers of 1024. `what` names it in the message. Errors: kInvalidArgument.
Result<uint64_t> ParseBytes(const std::string& text, const std::string& what);

}  // namespace qkv
