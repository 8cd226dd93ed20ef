// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/format.h"

#include <fmt/core.h>

#include <chrono>

namespace qkv::cli {

std::string Mib(uint64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

std::string Age(int64_t created_unix_ms) {
  const auto now =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch());
  const int64_t seconds = (now.count() - created_unix_ms) / 1000;
  return seconds < 120 ? fmt::format("{} s", seconds) : fmt::format("{} min", seconds / 60);
}

}  // namespace qkv::cli
