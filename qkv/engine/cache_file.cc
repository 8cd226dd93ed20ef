// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/cache_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "qkv/base/fd.h"

namespace qkv {
namespace {

bool OnlyOursToWrite(const struct stat& info) {
  return info.st_uid == ::geteuid() && (info.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

Fd OpenDirectory(const std::string& path) {
  Fd fd(path.empty() ? -1 : ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat info {};
  if (!fd.valid() || ::fstat(fd.get(), &info) != 0 || !OnlyOursToWrite(info)) return Fd();
  return fd;
}

}  // namespace

std::string CacheDirectory(std::string_view name) {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache == '/') {
    return fmt::format("{}/qkvshare/{}", cache, name);
  }
  const char* home = std::getenv("HOME");
  return home != nullptr && *home == '/' ? fmt::format("{}/.cache/qkvshare/{}", home, name) : "";
}

std::optional<std::string> ReadCacheFile(const std::string& directory, const std::string& name, size_t max_bytes) {
  const Fd folder = OpenDirectory(directory);
  if (!folder.valid()) return std::nullopt;
  const Fd fd(::openat(folder.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  struct stat info {};
  if (!fd.valid() || ::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode) || !OnlyOursToWrite(info) ||
      info.st_size < 0 || static_cast<size_t>(info.st_size) > max_bytes) {
    return std::nullopt;
  }
  std::string text(static_cast<size_t>(info.st_size), '\0');
  const ssize_t n = ::read(fd.get(), text.data(), text.size());
  if (n != static_cast<ssize_t>(text.size())) return std::nullopt;
  return text;
}

void WriteCacheFile(const std::string& directory, const std::string& name, std::string_view text) {
  if (directory.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(directory).parent_path(), error);
  (void)::mkdir(directory.c_str(), 0700);
  const Fd folder = OpenDirectory(directory);
  if (!folder.valid()) return;
  const std::string part = fmt::format(".{}.{}.part", name, ::getpid());
  (void)::unlinkat(folder.get(), part.c_str(), 0);  // of a process of our number that was killed
  const Fd fd(::openat(folder.get(), part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd.valid()) return;
  if (::write(fd.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()) ||
      ::renameat(folder.get(), part.c_str(), folder.get(), name.c_str()) != 0) {
    (void)::unlinkat(folder.get(), part.c_str(), 0);
  }
}

}  // namespace qkv
