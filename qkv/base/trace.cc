// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/base/trace.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

namespace qkv {

void Trace::Add(const char* name, Clock::time_point start, Clock::time_point end) {
  using Microseconds = std::chrono::duration<double, std::micro>;
  TraceEvent event{.process = process_,
                   .name = name,
                   .start_us = Microseconds(start.time_since_epoch()).count(),
                   .duration_us = Microseconds(end - start).count(),
                   .pid = ::getpid(),
                   .tid = ::syscall(SYS_gettid)};
  std::lock_guard lock(mutex_);
  if (events_.size() < kMaxTraceEvents) events_.push_back(std::move(event));
}

std::vector<TraceEvent> Trace::Take() {
  std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

}  // namespace qkv
