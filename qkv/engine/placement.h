// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which CPU each of a sequence's threads computes on. Begin and End are for the sequence's owner, Apply for the
// threads.

#include <pthread.h>
#include <sched.h>

#include <vector>

namespace qkv {

// Keeps ggml's threads apart when there is one for every CPU. Its barriers spin, and once two of them share a CPU they
// take turns in whole time slices: two agents computing at once were then seen to be 7 times slower than with this.
// Thread 0 is the caller's: it has a place only during a step, as what it starts would inherit it. Without one, a step
// after a pause often began on the CPU of another thread, and it took the kernel some 7 ms to move it.
class Placement {
 public:
  explicit Placement(int n_threads) : placed_(n_threads, false) {
    if (::sched_getaffinity(0, sizeof allowed_, &allowed_) != 0 || CPU_COUNT(&allowed_) != n_threads) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &allowed_)) cpus_.push_back(cpu);
    }
  }
  // Around a step, by its caller.
  void Begin() { Place(/*first=*/true); }
  void End() { Place(/*first=*/false); }
  // To be called by thread `ith` itself.
  void Apply(int ith) {
    if (ith == 0 || placed_[ith] || cpus_.empty()) return;
    placed_[ith] = true;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpus_[ith], &one);
    (void)::pthread_setaffinity_np(::pthread_self(), sizeof one, &one);  // if not, it is slower
  }

 private:
  void Place(bool first) {
    if (cpus_.size() < 2) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpus_.front(), &one);
    (void)::pthread_setaffinity_np(::pthread_self(), sizeof one, first ? &one : &allowed_);
  }

  cpu_set_t allowed_;
  std::vector<int> cpus_;
  std::vector<char> placed_;  // each thread looks at its own only
};

}  // namespace qkv
