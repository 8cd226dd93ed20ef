// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/base/fd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace qkv {
namespace {

constexpr int kAllSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

Status WriteAll(const Fd& fd, std::span<const std::byte> bytes, const std::string& name) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoError(fmt::format("write memory file '{}'", name));
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return {};
}

// pread, not a mapping: a page that cannot be had is an error here and a SIGBUS there.
Status ReadAll(const Fd& fd, uint64_t offset, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pread(fd.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError("read");
    if (n == 0) {
      return Err(Code::kCorrupt, Reason::kChecksum, "ends after {} bytes, {} more expected", offset, bytes.size());
    }
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return {};
}

Result<uint64_t> SizeWithin(const Fd& fd, uint64_t max_bytes) {
  QKV_ASSIGN_OR_RETURN(const uint64_t size, fd.SizeBytes());
  if (size > max_bytes) return Err(Code::kInvalidArgument, "{} bytes, expected at most {}", size, max_bytes);
  return size;
}

}  // namespace

void Fd::Reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Result<Fd> Fd::Duplicate() const {
  const int fd = ::fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return ErrnoError("duplicate descriptor");
  return Fd(fd);
}

Result<Fd> Fd::ReopenReadOnly() const {
  const int fd = ::open(fmt::format("/proc/self/fd/{}", fd_).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoError("reopen descriptor read-only");
  return Fd(fd);
}

Result<uint64_t> Fd::SizeBytes() const {
  struct stat info {};
  if (::fstat(fd_, &info) != 0) return ErrnoError("fstat");
  return static_cast<uint64_t>(info.st_size);
}

Result<Mapping> Mapping::Map(const Fd& fd, Access access, uint64_t offset, size_t bytes) {
  if (bytes == 0) return Err(Code::kInvalidArgument, "map: 0 bytes");
  const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd.get(), static_cast<off_t>(offset));
  if (data == MAP_FAILED) return ErrnoError(fmt::format("map {} bytes", bytes));
  Mapping mapping;
  mapping.data_ = static_cast<std::byte*>(data);
  mapping.bytes_ = bytes;
  return mapping;
}

void Mapping::Reset() {
  if (data_ != nullptr) ::munmap(std::exchange(data_, nullptr), std::exchange(bytes_, 0));
}

Result<Fd> CreateMemfd(const std::string& name) {
  const int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return ErrnoError(fmt::format("create memory file '{}'", name));
  return Fd(fd);
}

Result<Fd> SealedMemfd(const std::string& name, std::span<const std::byte> bytes) {
  QKV_ASSIGN_OR_RETURN(Fd fd, CreateMemfd(name));
  QKV_RETURN_IF_ERROR(WriteAll(fd, bytes, name));
  QKV_RETURN_IF_ERROR(Seal(fd));
  return fd;
}

Result<Fd> SealedCopy(const std::string& name, const Fd& from, uint64_t max_bytes) {
  QKV_ASSIGN_OR_RETURN(const uint64_t size, SizeWithin(from, max_bytes));
  QKV_ASSIGN_OR_RETURN(Fd fd, CreateMemfd(name));
  std::vector<std::byte> buffer(std::min<uint64_t>(size, uint64_t{1} << 20));
  for (uint64_t done = 0; done < size;) {
    const auto part = std::span(buffer).first(std::min<uint64_t>(buffer.size(), size - done));
    QKV_RETURN_IF_ERROR(ReadAll(from, done, part));
    QKV_RETURN_IF_ERROR(WriteAll(fd, part, name));
    done += part.size();
  }
  QKV_RETURN_IF_ERROR(Seal(fd));
  return fd;
}

bool IsSealed(const Fd& fd) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  constexpr int kNeeded = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
  return seals >= 0 && (seals & kNeeded) == kNeeded;
}

Status Seal(const Fd& fd) {
  if (::fcntl(fd.get(), F_ADD_SEALS, kAllSeals) != 0) return ErrnoError("seal memory file");
  return {};
}

bool IsReadOnlyFileOf(const Fd& fd, uint32_t owner) {
  struct stat info {};
  return ::fstat(fd.get(), &info) == 0 && S_ISREG(info.st_mode) && (info.st_uid == owner || info.st_uid == 0) &&
         (info.st_mode & 0222) == 0;
}

Result<std::vector<std::byte>> ReadWhole(const Fd& fd, size_t max_bytes) {
  QKV_ASSIGN_OR_RETURN(const uint64_t size, SizeWithin(fd, max_bytes));
  std::vector<std::byte> bytes(size);
  QKV_RETURN_IF_ERROR(ReadAll(fd, 0, bytes));
  return bytes;
}

bool IsOfAnotherUser(const Fd& fd) {
  struct stat info {};
  return ::fstat(fd.get(), &info) != 0 || (info.st_uid != ::geteuid() && info.st_uid != 0);
}

size_t RaiseDescriptorLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 256;  // POSIX promises less
  if (limit.rlim_cur < limit.rlim_max) {
    rlimit raised{limit.rlim_max, limit.rlim_max};
    if (::setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  return static_cast<size_t>(std::min<rlim_t>(limit.rlim_cur, rlim_t{1} << 30));
}

}  // namespace qkv
