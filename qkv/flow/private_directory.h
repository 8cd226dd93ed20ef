// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A new directory that only we may enter, gone with this object: for a socket, so its path is short. One thread.

#include <memory>
#include <string>

#include "qkv/base/error.h"

namespace qkv {

class PrivateDirectory {
 public:
  // Errors: the system's.
  static Result<std::unique_ptr<PrivateDirectory>> Make();
  ~PrivateDirectory();
  const std::string& path() const { return path_; }

 private:
  PrivateDirectory() = default;
  std::string path_;
};

}  // namespace qkv
