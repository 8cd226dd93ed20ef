// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/private_directory.h"

#include <stdlib.h>

#include <filesystem>
#include <system_error>
#include <utility>

namespace qkv {

Result<std::unique_ptr<PrivateDirectory>> PrivateDirectory::Make() {
  std::error_code ignored;
  std::string base = std::filesystem::temp_directory_path(ignored).string();
  // A Unix socket's path has at most 107 bytes.
  if (base.empty() || base.size() > 70) base = "/tmp";
  std::unique_ptr<PrivateDirectory> directory(new PrivateDirectory);
  std::string path = base + "/qkvshare-XXXXXX";
  if (::mkdtemp(path.data()) == nullptr) return ErrnoError("cannot make a directory in " + base);
  directory->path_ = std::move(path);
  return directory;
}

PrivateDirectory::~PrivateDirectory() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

}  // namespace qkv
