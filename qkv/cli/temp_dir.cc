// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/temp_dir.h"

#include <cstdlib>
#include <filesystem>

namespace qkv::cli {

Result<TempDir> TempDir::Create() {
  std::error_code error;
  std::string path = (std::filesystem::temp_directory_path(error) / "qkvshare-XXXXXX").string();
  if (::mkdtemp(path.data()) == nullptr) return ErrnoError("make a temporary directory");
  return TempDir(path);
}

TempDir::~TempDir() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

}  // namespace qkv::cli
