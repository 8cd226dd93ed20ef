// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/whole_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "qkv/base/fd.h"

namespace qkv {
namespace {

Status WriteAll(int fd, std::span<const std::byte> bytes, const std::string& path) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::write(fd, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError(fmt::format("'{}'", path));
    done += static_cast<size_t>(n);
  }
  return {};
}

}  // namespace

Status WriteWholeFile(const std::string& path, std::initializer_list<std::span<const std::byte>> parts) {
  const std::string part = fmt::format("{}.{}.part", path, ::getpid());
  (void)::unlink(part.c_str());  // of a process of our number that was killed
  const Fd fd(::open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!fd.valid()) return ErrnoError(fmt::format("'{}'", path));
  Status written;
  for (const std::span<const std::byte> bytes : parts) {
    if (written) written = WriteAll(fd.get(), bytes, path);
  }
  if (written && (::fsync(fd.get()) != 0 || ::rename(part.c_str(), path.c_str()) != 0)) {
    written = ErrnoError(fmt::format("'{}'", path));
  }
  if (!written) (void)::unlink(part.c_str());
  return written;
}

Result<std::vector<std::byte>> ReadWholeFile(const std::string& path, size_t max_bytes) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  struct stat info {};
  if (!fd.valid() || ::fstat(fd.get(), &info) != 0) return ErrnoError(fmt::format("'{}'", path));
  if (!S_ISREG(info.st_mode)) return Err(Code::kCorrupt, "'{}' is not a regular file", path);
  if (static_cast<uint64_t>(info.st_size) > max_bytes) {
    return Err(Code::kCorrupt, "'{}' has {} bytes, expected at most {}", path, info.st_size, max_bytes);
  }
  std::vector<std::byte> bytes(static_cast<size_t>(info.st_size));
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::read(fd.get(), bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError(fmt::format("'{}'", path));
    if (n == 0) return Err(Code::kCorrupt, "'{}' cannot be read to its end", path);
    done += static_cast<size_t>(n);
  }
  return bytes;
}

}  // namespace qkv
