// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A private directory that goes with everything in it. One thread.

#include <string>
#include <utility>

#include "qkv/base/error.h"

namespace qkv {

class TempDir {
 public:
  // Where $TMPDIR says. Errors: the system's.
  static Result<TempDir> Create();
  // With a path that leaves room for a Unix socket's name, of which the whole may have 107 bytes.
  static Result<TempDir> CreateForSocket();
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
  static Result<TempDir> CreateIn(const std::string& base);
  std::string path_;
};

}  // namespace qkv
