// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/tenant.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "qkv/base/fd.h"
#include "qkv/broker/protocol.h"
#include "qkv/card/card.h"
#include "qkv/segment/cipher.h"

namespace qkv {
namespace {

constexpr size_t kMaxFileBytes = size_t{1} << 20;

std::string_view NextWord(std::string_view& line) {
  line.remove_prefix(std::min(line.find_first_not_of(" \t\r"), line.size()));
  const std::string_view word = line.substr(0, line.find_first_of(" \t\r"));
  line.remove_prefix(word.size());
  return word;
}

}  // namespace

TenantList::Hash TenantList::HashOf(std::string_view token) const {
  Hash hash;
  ::crypto_generichash(hash.data(), hash.size(), reinterpret_cast<const unsigned char*>(token.data()), token.size(),
                       salt_.data(), salt_.size());
  return hash;
}

Result<TenantList> TenantList::Parse(std::string_view text) {
  if (::sodium_init() < 0) return Err(Code::kInternal, "libsodium does not start");
  TenantList list;
  ::randombytes_buf(list.salt_.data(), list.salt_.size());
  size_t number = 0;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    ++number;
    const std::string_view name = NextWord(line), token = NextWord(line), more = NextWord(line);
    if (name.empty() || name.starts_with('#')) continue;
    const bool printable = std::ranges::all_of(token, [](char c) { return c > 0x20 && c < 0x7f; });
    if (token.size() < kMinTokenBytes || token.size() > kMaxTokenBytes || !printable || !more.empty()) {
      return Err(Code::kInvalidArgument,
                 "tenants, line {}: expected a name and a token of {} to {} printable characters", number,
                 kMinTokenBytes, kMaxTokenBytes);
    }
    if (const Status valid = ValidateContextName(name); !valid) {
      return Err(Code::kInvalidArgument, "tenants, line {}: {}", number, valid.error().message);
    }
    if (std::ranges::find(list.names_, name) != list.names_.end() || list.Find(token)) {
      return Err(Code::kInvalidArgument, "tenants, line {}: a name or token for the second time", number);
    }
    list.names_.emplace_back(name);
    list.hashes_.push_back(list.HashOf(token));
    if (list.names_.size() > kMaxTenants) {
      return Err(Code::kInvalidArgument, "tenants: more than {}", kMaxTenants);
    }
  }
  if (list.empty()) return Err(Code::kInvalidArgument, "tenants: none, expected lines of NAME TOKEN");
  return list;
}

Result<TenantList> TenantList::Read(const std::string& path) {
  const std::string what = fmt::format("tenants file '{}'", path.c_str());
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return ErrnoError(what);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoError(what);
  if (!S_ISREG(info.st_mode) || (info.st_uid != ::geteuid() && info.st_uid != 0) || (info.st_mode & 0077) != 0) {
    return Err(Code::kDenied, Reason::kDenied, "{}: mode {:04o} of user {}, expected a file that only user {} may read",
               what, info.st_mode & 07777, info.st_uid, ::geteuid());
  }
  const auto bytes = ReadWhole(fd, kMaxFileBytes);
  if (!bytes) return Prefixed(what, bytes.error());
  std::string text(reinterpret_cast<const char*>(bytes->data()), bytes->size());
  auto list = Parse(text);
  Erase(text);
  return list;
}

std::optional<size_t> TenantList::Find(std::string_view token) const {
  const Hash hash = HashOf(token);
  std::optional<size_t> found;
  for (size_t i = 0; i < hashes_.size(); ++i) {  // all of them, always
    if (::sodium_memcmp(hashes_[i].data(), hash.data(), hash.size()) == 0) found = i;
  }
  return found;
}

}  // namespace qkv
