// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/event_writer.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string_view>

#include "qkv/broker/event_line.h"

namespace qkv {
namespace {

constexpr int kLookEveryMs = 100;  // whether to stop, while nobody reads
constexpr auto kLastWords = std::chrono::milliseconds(500);
// A pipe that polls as writable takes so much without blocking. The descriptor itself is left as it is: others may
// share it, and its non-blocking flag with it.
constexpr size_t kAtOnce = 512;

int64_t NowUnixMs() {
  using std::chrono::system_clock;
  return std::chrono::duration_cast<std::chrono::milliseconds>(system_clock::now().time_since_epoch()).count();
}

}  // namespace

EventWriter::EventWriter(int fd, size_t max_lines) : fd_(fd), max_lines_(max_lines) {
  sigset_t all, before;  // signals are the business of the program; a closed pipe is an error here, not a SIGPIPE
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { Main(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

EventWriter::~EventWriter() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void EventWriter::Write(std::string line) {
  {
    const std::lock_guard lock(mutex_);
    if (lines_.size() >= max_lines_) {
      ++n_dropped_;
      return;
    }
    lines_.push_back(std::move(line));
  }
  changed_.notify_all();
}

uint64_t EventWriter::n_dropped() const {
  const std::lock_guard lock(mutex_);
  return n_dropped_;
}

void EventWriter::Main() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !lines_.empty() || n_dropped_said_ < n_dropped_; });
    std::string text;
    if (!lines_.empty()) {
      text = std::move(lines_.front());
      lines_.pop_front();
    } else if (n_dropped_said_ < n_dropped_) {
      text = DroppedLine(n_dropped_ - n_dropped_said_, NowUnixMs());
      n_dropped_said_ = n_dropped_;
    } else {
      return;
    }
    lock.unlock();
    const bool taken = Put(text + "\n");
    lock.lock();
    if (taken) continue;
    lines_.clear();
    n_dropped_said_ = n_dropped_;
    if (stop_) return;
  }
}

bool EventWriter::Put(const std::string& text) {
  std::string_view rest = text;
  std::chrono::steady_clock::time_point give_up{};
  while (!rest.empty()) {
    pollfd entry{fd_, POLLOUT, 0};
    const int n = ::poll(&entry, 1, kLookEveryMs);
    if (n < 0 && errno != EINTR) return false;
    if (n > 0 && (entry.revents & POLLOUT) == 0) return false;  // the reader is gone
    if (n > 0) {
      const ssize_t written = ::write(fd_, rest.data(), std::min(rest.size(), kAtOnce));
      if (written < 0 && errno != EINTR && errno != EAGAIN) return false;
      if (written > 0) rest.remove_prefix(static_cast<size_t>(written));
      continue;
    }
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (stop_ && give_up == std::chrono::steady_clock::time_point{}) give_up = now + kLastWords;
    if (stop_ && now >= give_up) return false;
  }
  return true;
}

}  // namespace qkv
