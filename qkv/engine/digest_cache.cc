// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/digest_cache.h"

#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <string_view>

#include "qkv/engine/cache_file.h"

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
  return CacheDirectory("digests");
}

std::optional<FileDigest> FindDigest(const std::string& directory, const FileVersion& version) {
  const auto text = ReadCacheFile(directory, EntryName(version), kMaxEntryBytes);
  if (!text) return std::nullopt;
  const std::string_view entry = *text;
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
  WriteCacheFile(directory, EntryName(version), EntryFor(version, digest));
}

}  // namespace qkv
