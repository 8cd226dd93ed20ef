// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Owners of kernel resources: a file descriptor and a memory mapping. Move-only; the last owner closes or unmaps.
// Not synchronised: one thread at a time may move or reset an object; reading mapped bytes is safe from any thread.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "qkv/base/error.h"

namespace qkv {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { Reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release() { return std::exchange(fd_, -1); }
  void Reset();

  Result<Fd> Duplicate() const;       // shares the open file description; close-on-exec
  Result<Fd> ReopenReadOnly() const;  // a new, read-only open file description of the same file; close-on-exec
  Result<uint64_t> SizeBytes() const;

 private:
  int fd_ = -1;
};

class Mapping {
 public:
  enum class Access { kReadOnly, kReadWrite };

  Mapping() = default;
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    if (this != &other) {
      Reset();
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { Reset(); }

  // MAP_SHARED over [offset, offset + bytes); offset must be a multiple of the system's page size, bytes > 0.
  static Result<Mapping> Map(const Fd& fd, Access access, uint64_t offset, size_t bytes);

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }
  std::span<const std::byte> bytes() const { return {data_, bytes_}; }
  void Reset();

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// A new anonymous memory file that can be sealed; close-on-exec. `name` shows up in /proc/<pid>/fd, for people.
Result<Fd> CreateMemfd(const std::string& name);

// Sealed against writing, shrinking, growing and further seals. `bytes` are copied in.
Result<Fd> SealedMemfd(const std::string& name, std::span<const std::byte> bytes);

// The bytes of `from` as they are now, in a sealed memory file of this process. Errors: as ReadWhole, CreateMemfd.
Result<Fd> SealedCopy(const std::string& name, const Fd& from, uint64_t max_bytes);

// Whether the kernel guarantees that nobody can change or truncate this memory file any more.
bool IsSealed(const Fd& fd);
// Adds those seals; fails with EBUSY while a writable mapping exists.
Status Seal(const Fd& fd);

// Whether this is a file of a filesystem that belongs to `owner` (or root) and that nobody's permissions let write. The
// kernel promises less for it than for a sealed one: its owner can still change or truncate it (docs/SECURITY.md).
bool IsReadOnlyFileOf(const Fd& fd, uint32_t owner);

// Whether the file is another user's, neither this process's nor root's. True also when the kernel does not say.
bool IsOfAnotherUser(const Fd& fd);

// The whole of a file of at most `max_bytes`, into a buffer of ours. Errors: kInvalidArgument (longer),
// kCorrupt/checksum (shorter than its size), kExhausted, kIo.
Result<std::vector<std::byte>> ReadWhole(const Fd& fd, size_t max_bytes);

// Lets this process open as many descriptors as the system allows it (the soft limit becomes the hard one). Returns the
// limit that holds then. For a program's start; libraries don't.
size_t RaiseDescriptorLimit();

}  // namespace qkv
