// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes event lines to a descriptor from a thread of its own, so that whoever emits them never waits for whoever reads
// them. Lines that find the queue full are dropped, counted, and the count is written as a line of its own as soon as
// there is room. Any thread may call Write.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

#include "qkv/base/fd.h"

namespace qkv {

class EventWriter {
 public:
  // Writes to `fd`, which must stay open. `max_lines` may wait; the oldest ones are kept.
  explicit EventWriter(int fd, size_t max_lines = 4096);
  // Writes what is queued, as long as somebody takes it within half a second.
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  void Write(std::string line);  // without its line feed; returns at once
  uint64_t n_dropped() const;    // so far

 private:
  void Main();
  bool Put(const std::string& text);  // false: nobody takes it any more

  const int fd_;
  const size_t max_lines_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::string> lines_;
  uint64_t n_dropped_ = 0;
  uint64_t n_dropped_said_ = 0;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace qkv
