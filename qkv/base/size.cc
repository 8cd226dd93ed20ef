// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/base/size.h"

#include <charconv>
#include <string_view>

namespace qkv {

Result<uint64_t> ParseBytes(const std::string& text, const std::string& what) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string unit(end, text.data() + text.size());
  if (unit.ends_with("iB")) unit.resize(unit.size() - 2);
  static constexpr std::string_view kUnits = "KMGT";
  int shift = 0;
  if (unit.size() == 1 && kUnits.find(unit[0]) != std::string_view::npos) {
    shift = 10 * (static_cast<int>(kUnits.find(unit[0])) + 1);
    unit.clear();
  }
  if (error != std::errc() || !unit.empty() || value == 0 || value > (uint64_t{1} << 62 >> shift)) {
    return Err(Code::kInvalidArgument, "{}: '{}' is not a size such as 512M or 4GiB", what, text);
  }
  return value << shift;
}

}  // namespace qkv
