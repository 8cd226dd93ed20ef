// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which CPU each of a sequence's threads computes on. For the sequence's owner.

#include <ggml-cpu.h>
#include <pthread.h>
#include <sched.h>

#include <vector>

namespace qkv {

// Keeps ggml's threads apart when there is one for every CPU. Its barriers spin, and once two of them share a CPU they
// take turns in whole time slices: two agents computing at once were then seen to be 7 times slower than with this, and a
// sequence's first step, before its threads had drawn apart, up to 30 ms. The caller's own thread has a place only during a
// step, as what it starts would inherit it.
class Placement {
 public:
  explicit Placement(int n_threads) {
    if (::sched_getaffinity(0, sizeof allowed_, &allowed_) != 0 || CPU_COUNT(&allowed_) != n_threads) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &allowed_)) cpus_.push_back(cpu);
    }
    if (cpus_.size() < 2 || cpus_.back() >= GGML_MAX_N_THREADS) cpus_.clear();
  }
  // The threads of the pool go to the first CPUs, in order, and are there before they have anything to do.
  void Assign(ggml_threadpool_params& params) const {
    for (int cpu : cpus_) params.cpumask[cpu] = true;
    params.strict_cpu = true;
  }
  // Around a step, by its caller, for whom ggml leaves the last CPU.
  void Begin() const { Place(/*in_step=*/true); }
  void End() const { Place(/*in_step=*/false); }

 private:
  void Place(bool in_step) const {
    if (cpus_.empty()) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpus_.back(), &one);
    (void)::pthread_setaffinity_np(::pthread_self(), sizeof one, in_step ? &one : &allowed_);  // if not, it is slower
  }

  cpu_set_t allowed_;
  std::vector<int> cpus_;
};

}  // namespace qkv
