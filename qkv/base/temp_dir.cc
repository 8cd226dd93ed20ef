// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/base/temp_dir.h"

#include <cstdlib>
#include <filesystem>

namespace qkv {

Result<TempDir> TempDir::CreateIn(const std::string& base) {
  std::string path = base + "/qkvshare-XXXXXX";
  if (::mkdtemp(path.data()) == nullptr) return ErrnoError("make a temporary directory in " + base);
  return TempDir(std::move(path));
}

Result<TempDir> TempDir::Create() {
  std::error_code ignored;
  return CreateIn(std::filesystem::temp_directory_path(ignored).string());
}

Result<TempDir> TempDir::CreateForSocket() {
  std::error_code ignored;
  const std::string base = std::filesystem::temp_directory_path(ignored).string();
  return CreateIn(base.empty() || base.size() > 70 ? "/tmp" : base);
}

TempDir::~TempDir() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

}  // namespace qkv
