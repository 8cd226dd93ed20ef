// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For tests of every room: values that must be there, conditions to wait for, folders that are gone afterwards.

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "qkv/base/error.h"

namespace qkv::test {

inline constexpr std::chrono::seconds kLong{20};  // only a broken test waits that long

template <class T>
T Take(Result<T> result) {
  if (!result) {
    ADD_FAILURE() << result.error().message;
    std::abort();  // nothing sensible can follow in a helper that has to return a T
  }
  return *std::move(result);
}

// Asks again, every few milliseconds, until it holds or patience ends.
inline bool Eventually(const std::function<bool()>& condition, std::chrono::milliseconds patience = kLong) {
  for (const auto end = std::chrono::steady_clock::now() + patience; std::chrono::steady_clock::now() < end;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // leaves the processor to whom we wait for
  }
  return condition();
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "qkvshare-test-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) std::abort();
    path_ = path;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace qkv::test
