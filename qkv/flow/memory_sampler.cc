// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/memory_sampler.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string>
#include <utility>

namespace qkv {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kTick{50};

uint64_t PssBytes(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/smaps_rollup", pid));
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("Pss:")) continue;
    const size_t digits = line.find_first_of("0123456789");
    uint64_t kib = 0;
    if (digits != std::string::npos) std::from_chars(line.data() + digits, line.data() + line.size(), kib);
    return kib * 1024;
  }
  return 0;
}

}  // namespace

MemorySampler::MemorySampler() : start_(Clock::now()), pids_{::getpid()}, thread_([this] { Loop(); }) {}
MemorySampler::~MemorySampler() {
  Stop();
}

void MemorySampler::SetPids(std::vector<pid_t> pids) {
  pids.push_back(::getpid());
  std::lock_guard lock(mutex_);
  pids_ = std::move(pids);
}

MemorySampler::Record MemorySampler::Stop() {
  if (thread_.joinable()) {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  return record_;
}

void MemorySampler::Loop() {
  std::unique_lock lock(mutex_);
  for (bool last = false;; last = stop_) {
    const auto start = Clock::now();
    const std::vector<pid_t> pids = pids_;
    lock.unlock();
    uint64_t sum = 0;
    for (pid_t pid : pids) sum += PssBytes(pid);
    lock.lock();
    record_.peak_bytes = std::max(record_.peak_bytes, sum);
    record_.samples.push_back({std::chrono::duration<double, std::milli>(start - start_).count(), sum});
    if (record_.samples.size() == kMostSamples) {
      // Every second one goes; of each pair the larger stays.
      for (size_t i = 0; i < kMostSamples / 2; ++i) {
        const MemorySample &a = record_.samples[2 * i], &b = record_.samples[2 * i + 1];
        record_.samples[i] = a.pss_bytes >= b.pss_bytes ? a : b;
      }
      record_.samples.resize(kMostSamples / 2);
    }
    if (last) return;
    // The kernel walks page tables for each look, some milliseconds for every process, and whoever computes on that CPU is
    // waited for by the others of its sequence: spend at most a hundredth of one CPU on it.
    wake_.wait_for(lock, std::max<Clock::duration>(kTick, 100 * (Clock::now() - start)), [this] { return stop_; });
  }
}

}  // namespace qkv
