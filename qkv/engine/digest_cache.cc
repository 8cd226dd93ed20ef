// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/digest_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string_view>

namespace qkv {
namespace {

constexpr int64_t kSettledNs = 2'000'000'000;
constexpr size_t kMaxEntryBytes = 512;

int64_t Nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

std::string EntryName(const FileVersion& version) {
  return fmt::format("{:x}-{:x}", version.device, version.inode);
}

// The whole entry but for the digest is known before it is read.
std::string EntryFor(const FileVersion& version, const FileDigest& digest) {
  std::string text = fmt::format("qkvshare digest 1\ndevice {} inode {} bytes {} modified {} changed {}\nxxh3-128 ",
                                 version.device, version.inode, version.bytes, version.modified_ns, version.changed_ns);
  for (const uint8_t byte : digest) text += fmt::format("{:02x}", byte);
  return text + fmt::format("\ncheck {:016x}\n", XXH3_64bits(text.data(), text.size()));
}

bool OnlyOursToWrite(const struct stat& info) {
  return info.st_uid == ::geteuid() && (info.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

Fd OpenDirectory(const std::string& path) {
  Fd fd(path.empty() ? -1 : ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat info {};
  if (!fd.valid() || ::fstat(fd.get(), &info) != 0 || !OnlyOursToWrite(info)) return Fd();
  return fd;
}

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

}  // namespace

Result<FileVersion> VersionOf(const Fd& fd) {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoError("fstat");
  return FileVersion{.device = info.st_dev,
                     .inode = info.st_ino,
                     .bytes = static_cast<uint64_t>(info.st_size),
                     .modified_ns = Nanoseconds(info.st_mtim),
                     .changed_ns = Nanoseconds(info.st_ctim)};
}

std::string DigestCacheDirectory() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache == '/') {
    return std::string(cache) + "/qkvshare/digests";
  }
  const char* home = std::getenv("HOME");
  return home != nullptr && *home == '/' ? std::string(home) + "/.cache/qkvshare/digests" : "";
}

std::optional<FileDigest> FindDigest(const std::string& directory, const FileVersion& version) {
  const Fd folder = OpenDirectory(directory);
  if (!folder.valid()) return std::nullopt;
  const Fd fd(
      ::openat(folder.get(), EntryName(version).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  struct stat info {};
  if (!fd.valid() || ::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode) || !OnlyOursToWrite(info)) {
    return std::nullopt;
  }
  char buffer[kMaxEntryBytes];
  const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
  const std::string_view entry(buffer, static_cast<size_t>(std::max<ssize_t>(n, 0)));
  constexpr std::string_view kBeforeDigest = "\nxxh3-128 ";
  const size_t at = entry.find(kBeforeDigest);
  FileDigest digest{};
  if (at == std::string_view::npos || entry.size() < at + kBeforeDigest.size() + 2 * digest.size()) return std::nullopt;
  for (size_t i = 0; i < digest.size(); ++i) {
    const int high = HexValue(entry[at + kBeforeDigest.size() + 2 * i]);
    const int low = HexValue(entry[at + kBeforeDigest.size() + 2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    digest[i] = static_cast<uint8_t>(16 * high + low);
  }
  if (entry != EntryFor(version, digest)) return std::nullopt;
  return digest;
}

void RememberDigest(const std::string& directory, const FileVersion& version, const FileDigest& digest) {
  const auto now =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch());
  if (std::max(version.modified_ns, version.changed_ns) > now.count() - kSettledNs) return;
  if (directory.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(directory).parent_path(), error);
  (void)::mkdir(directory.c_str(), 0700);
  const Fd folder = OpenDirectory(directory);
  if (!folder.valid()) return;
  const std::string name = EntryName(version);
  const std::string part = fmt::format(".{}.{}.part", name, ::getpid());
  (void)::unlinkat(folder.get(), part.c_str(), 0);  // of a process of our number that was killed
  const Fd fd(::openat(folder.get(), part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd.valid()) return;
  const std::string entry = EntryFor(version, digest);
  if (::write(fd.get(), entry.data(), entry.size()) != static_cast<ssize_t>(entry.size()) ||
      ::renameat(folder.get(), part.c_str(), folder.get(), name.c_str()) != 0) {
    (void)::unlinkat(folder.get(), part.c_str(), 0);
  }
}

}  // namespace qkv
