// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A private directory that goes with everything in it. One thread.

#include <string>
#include <utility>

#include "qkv/base/error.h"

namespace qkv::cli {

class TempDir {
 public:
  static Result<TempDir> Create();
  TempDir() = default;  // none
  TempDir(TempDir&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  TempDir& operator=(TempDir&& other) noexcept {
    std::swap(path_, other.path_);
    return *this;
  }
  ~TempDir();
  const std::string& path() const { return path_; }

 private:
  explicit TempDir(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

}  // namespace qkv::cli
