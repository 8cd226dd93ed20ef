// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/format.h"

#include <fmt/core.h>

#include <chrono>

namespace qkv::cli {
namespace {

int64_t NowUnixMs() {
  using std::chrono::system_clock;
  return std::chrono::duration_cast<std::chrono::milliseconds>(system_clock::now().time_since_epoch()).count();
}

std::string Seconds(int64_t ms) {
  const int64_t seconds = ms / 1000;
  return seconds < 120 ? fmt::format("{} s", seconds) : fmt::format("{} min", seconds / 60);
}

}  // namespace

std::string Mib(uint64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

std::string Age(int64_t created_unix_ms) {
  return Seconds(NowUnixMs() - created_unix_ms);
}

std::string TimeUntil(int64_t unix_ms) {
  return Seconds(unix_ms - NowUnixMs());
}

}  // namespace qkv::cli
