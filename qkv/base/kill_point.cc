// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/base/kill_point.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <optional>

namespace qkv {
namespace {

struct Spec {
  std::string_view name;
  uint64_t passage = 1;
};

std::optional<Spec> ParseSpec(std::string_view text) {
  Spec spec{text.substr(0, text.find(':'))};
  if (spec.name.size() < text.size()) {
    const std::string_view number = text.substr(spec.name.size() + 1);
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), spec.passage);
    if (error != std::errc() || end != number.data() + number.size() || spec.passage == 0) return std::nullopt;
  }
  if (spec.name != "*" && std::ranges::find(kKillPoints, spec.name) == std::end(kKillPoints)) return std::nullopt;
  return spec;
}

// Read once, while nothing else runs.
const std::optional<Spec> kSpec = [] {
  const char* text = std::getenv("QKV_KILL_AT");
  return text == nullptr ? std::optional<Spec>() : ParseSpec(text);
}();
std::atomic<uint64_t> passages{0};

}  // namespace

namespace internal {

const bool kill_point_armed = kSpec.has_value();

void PassKillPoint(std::string_view name) {
  if (kSpec->name != "*" && kSpec->name != name) return;
  if (passages.fetch_add(1) + 1 == kSpec->passage) std::raise(SIGKILL);
}

}  // namespace internal

bool IsKillSpec(std::string_view spec) {
  return ParseSpec(spec).has_value();
}

}  // namespace qkv
