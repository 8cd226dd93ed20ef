// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tenants of a broker, told apart by a secret token. Immutable after it was read; any thread.

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/base/error.h"

namespace qkv {

class TenantList {
 public:
  static constexpr size_t kMaxTenants = 64;
  static constexpr size_t kMinTokenBytes = 16;

  // One tenant per line, "NAME TOKEN"; empty lines and lines that start with '#' are skipped. Tokens are 16 to 256
  // printable characters. Errors: kInvalidArgument with the line's number, never with its text.
  static Result<TenantList> Parse(std::string_view text);
  // Errors: as Parse; kDenied when others may read or write the file.
  static Result<TenantList> Read(const std::string& path);

  // Which tenant this is the token of. Takes the same time whatever the token has in common with others.
  std::optional<size_t> Find(std::string_view token) const;
  const std::vector<std::string>& names() const { return names_; }
  bool empty() const { return names_.empty(); }

 private:
  using Hash = std::array<unsigned char, 32>;
  Hash HashOf(std::string_view token) const;

  Hash salt_{};  // random, so that hashes are of equal length and nobody knows which token makes which
  std::vector<std::string> names_;
  std::vector<Hash> hashes_;
};

}  // namespace qkv
