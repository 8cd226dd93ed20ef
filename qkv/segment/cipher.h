// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Encrypted files (docs/FORMAT.md §8): XChaCha20-Poly1305 in chunks (libsodium's secretstream), one key per context. A
// change, a truncation, a chunk in another place, or a file in another's place is found; contents can be read with the
// key only, and by nobody once the last copy of the key is gone. Stateless; any thread.

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "qkv/base/fd.h"

namespace qkv {

inline constexpr size_t kSecretKeyBytes = 32;
inline constexpr std::string_view kCipherName = "xchacha20poly1305";

// In memory that is locked, left out of core dumps, and overwritten when the last owner goes. Immutable.
class SecretKey {
 public:
  // From the kernel's random generator. Errors: kExhausted (no memory that could be locked).
  static Result<std::shared_ptr<const SecretKey>> Generate();
  // Errors: kInvalidArgument unless there are kSecretKeyBytes; kExhausted.
  static Result<std::shared_ptr<const SecretKey>> From(std::string_view bytes);
  ~SecretKey();
  SecretKey(const SecretKey&) = delete;
  SecretKey& operator=(const SecretKey&) = delete;

  std::string_view bytes() const { return {reinterpret_cast<const char*>(bytes_), kSecretKeyBytes}; }
  const unsigned char* data() const { return bytes_; }

 private:
  explicit SecretKey(unsigned char* bytes) : bytes_(bytes) {}
  unsigned char* const bytes_;
};

// `label` says what this is (context and place in it): decrypting needs the same. `plain` is not empty. The result is
// sealed; it takes as much memory as `plain`, and a little more. Errors: kInvalidArgument, kExhausted/pool_full.
Result<Fd> Encrypt(const SecretKey& key, std::string_view label, std::span<const std::byte> plain);

// Into a sealed memory file that nobody else has. `encrypted` may change meanwhile: it is read once. Errors:
// kCorrupt/checksum (not this key, not this label, changed, truncated), kIncompatible/version,
// kInvalidArgument (longer than `max_bytes`), kExhausted/pool_full.
Result<Fd> Decrypt(const SecretKey& key, std::string_view label, const Fd& encrypted, uint64_t max_bytes);

// A key under another one, with what it is for (`label`); and back. Errors of Unwrap: kCorrupt/checksum.
Result<std::string> WrapKey(const SecretKey& with, std::string_view label, const SecretKey& key);
Result<std::shared_ptr<const SecretKey>> UnwrapKey(const SecretKey& with, std::string_view label,
                                                   std::string_view wrapped);

// The key in a file of kSecretKeyBytes bytes that only we may read; made, if it is missing, with a new key. Errors:
// kDenied (others may read or write it), kInvalidArgument (another size), kNotFound, kIo.
Result<std::shared_ptr<const SecretKey>> KeyFromFile(const std::string& path);

// Overwrites a text that held a secret, and empties it.
void Erase(std::string& secret);

}  // namespace qkv
