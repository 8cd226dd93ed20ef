// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// When the stages of a handoff began and ended, for people to look at (--trace). A recorder belongs to whoever made it;
// any thread may add to it. Times are of the machine's monotonic clock, so those of several processes fit together.

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace qkv {

struct TraceEvent {
  std::string process;  // what the process is, for people: an agent's name
  std::string name;  // "encode", "seal", "publish", "fetch", "map", "verify", "first_attention", "read", "first_token"
  double start_us = 0;
  double duration_us = 0;
  int64_t pid = 0;
  int64_t tid = 0;
};

inline constexpr size_t kMaxTraceEvents = 1 << 16;  // of one recorder; what comes later is left out

class Trace {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Trace(std::string process) : process_(std::move(process)) {}
  void Add(const char* name, Clock::time_point start, Clock::time_point end);
  std::vector<TraceEvent> Take();

 private:
  const std::string process_;
  std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

// From here to the end of the scope. Without a recorder it costs nothing.
class TraceSpan {
 public:
  TraceSpan(Trace* trace, const char* name) : trace_(trace), name_(name) {
    if (trace_ != nullptr) start_ = Trace::Clock::now();
  }
  ~TraceSpan() {
    if (trace_ != nullptr) trace_->Add(name_, start_, Trace::Clock::now());
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  Trace* const trace_;
  const char* const name_;
  Trace::Clock::time_point start_;
};

}  // namespace qkv
