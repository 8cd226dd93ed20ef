// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A progress line on stderr, shown only on a terminal and only once something has taken two seconds. One thread.

#include <chrono>
#include <cstddef>
#include <string>

namespace qkv::cli {

class Progress {
 public:
  explicit Progress(std::string label);
  ~Progress();  // clears the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Update(size_t done, size_t total);  // done == total clears the line and starts anew
  void Note(const std::string& text);      // a line of its own, terminal or not

 private:
  void Clear();

  const std::string label_;
  const bool terminal_;
  std::chrono::steady_clock::time_point start_;
  bool shown_ = false;
  bool running_ = false;
};

}  // namespace qkv::cli
