// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>

namespace qkv::cli {
namespace {
constexpr auto kQuiet = std::chrono::seconds(2);
}

Progress::Progress(std::string label) : label_(std::move(label)), terminal_(::isatty(STDERR_FILENO) == 1) {}
Progress::~Progress() {
  Clear();
}

void Progress::Update(size_t done, size_t total) {
  if (!terminal_) return;
  const auto now = std::chrono::steady_clock::now();
  if (!running_) {
    start_ = now;
    running_ = true;
  }
  if (done >= total) {
    Clear();
    running_ = false;
  } else if (shown_ || now - start_ >= kQuiet) {
    fmt::print(stderr, "\r{}: {}/{} ({} %)", label_, done, total, 100 * done / total);
    shown_ = true;
  }
}

void Progress::Note(const std::string& text) {
  Clear();
  fmt::print(stderr, "{}\n", text);
}

void Progress::Clear() {
  if (shown_) fmt::print(stderr, "\r\033[K");
  shown_ = false;
}

}  // namespace qkv::cli
