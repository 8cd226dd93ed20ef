// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Digests of large files that were computed before, so that loading a model does not hash all of its weights again. A
// file is known by what the kernel says of the open descriptor, never by a name. The cache is a help and nothing more: what is
// not there, not ours, damaged or not writable counts as not known, and no error leaves. Any thread, any process.

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "qkv/base/fd.h"

namespace qkv {

using FileDigest = std::array<uint8_t, 16>;

// Any write changes one of these; the times may be older than the clock's last tick, see RememberDigest.
struct FileVersion {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
  int64_t modified_ns = 0;
  int64_t changed_ns = 0;  // of the inode: a user cannot set it back
  bool operator==(const FileVersion&) const = default;
};
Result<FileVersion> VersionOf(const Fd& fd);

// $XDG_CACHE_HOME/qkvshare/digests, else ~/.cache/qkvshare/digests; empty when neither variable is set.
std::string DigestCacheDirectory();

// A directory or file that belongs to another user, or that others may write to, is not believed.
std::optional<FileDigest> FindDigest(const std::string& directory, const FileVersion& version);

// Does nothing for a file that was changed within the last two seconds: a second change within the same tick of the
// filesystem's clock would not show. The entry is replaced whole or not at all.
void RememberDigest(const std::string& directory, const FileVersion& version, const FileDigest& digest);

}  // namespace qkv
