// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// How much memory some processes have together, over time: PSS, which divides shared pages among their users. Looks from
// a thread of its own, which ends with the object. The owner's thread calls everything.

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace qkv {

struct MemorySample {
  double at_ms = 0;  // since the sampler was made
  uint64_t pss_bytes = 0;
};

class MemorySampler {
 public:
  MemorySampler();
  ~MemorySampler();
  MemorySampler(const MemorySampler&) = delete;
  MemorySampler& operator=(const MemorySampler&) = delete;

  // Whom to look at from now on; this process is always among them.
  void SetPids(std::vector<pid_t> pids);

  // Looks once more, then no further. At most kMostSamples, evenly spread; the peak is never left out.
  struct Record {
    uint64_t peak_bytes = 0;  // 0: the system doesn't tell
    std::vector<MemorySample> samples;
  };
  Record Stop();

  static constexpr size_t kMostSamples = 1000;

 private:
  void Loop();

  const std::chrono::steady_clock::time_point start_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<pid_t> pids_;
  Record record_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace qkv
