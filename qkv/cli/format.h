// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// How tables show sizes and ages. Pure, but for the clock.

#include <cstdint>
#include <string>

namespace qkv::cli {

std::string Mib(uint64_t bytes);           // "11.6 MiB"
std::string Age(int64_t created_unix_ms);  // "35 s", "12 min"
std::string TimeUntil(int64_t unix_ms);

}  // namespace qkv::cli
