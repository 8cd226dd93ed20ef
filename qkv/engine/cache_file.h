// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Small files of what was computed before, in a user's cache. A cache is a help and nothing more: what is not there, not
// ours, damaged or not writable counts as not known, and no error leaves. Any thread, any process.

#include <optional>
#include <string>
#include <string_view>

namespace qkv {

// $XDG_CACHE_HOME/qkvshare/NAME, else ~/.cache/qkvshare/NAME; empty when neither variable is set.
std::string CacheDirectory(std::string_view name);

// A directory or file that belongs to another user, or that others may write to, is not believed; nor is a file of more
// than max_bytes.
std::optional<std::string> ReadCacheFile(const std::string& directory, const std::string& name, size_t max_bytes);

// Replaced whole or not at all; the directory is made. `name` is a plain file name.
void WriteCacheFile(const std::string& directory, const std::string& name, std::string_view text);

}  // namespace qkv
