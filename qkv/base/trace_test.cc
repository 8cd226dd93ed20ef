// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/base/trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <set>
#include <thread>

namespace qkv {
namespace {

TEST(Trace, HoldsWhatWasAddedInOrder) {
  Trace trace("writer");
  const auto start = Trace::Clock::time_point(std::chrono::microseconds(5));
  trace.Add("seal", start, start + std::chrono::nanoseconds(2500));
  { const TraceSpan span(&trace, "verify"); }
  { const TraceSpan nothing(nullptr, "verify"); }
  const auto events = trace.Take();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].process, "writer");
  EXPECT_EQ(events[0].name, "seal");
  EXPECT_EQ(events[0].start_us, 5);
  EXPECT_EQ(events[0].duration_us, 2.5);
  EXPECT_EQ(events[0].pid, ::getpid());
  EXPECT_EQ(events[1].name, "verify");
  EXPECT_GE(events[1].duration_us, 0);
  EXPECT_TRUE(trace.Take().empty());
}

TEST(Trace, TakesFromManyThreadsAndNoMoreThanItHolds) {
  Trace trace("many");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (size_t n = 0; n < kMaxTraceEvents / 2; ++n) trace.Add("encode", {}, {});
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto events = trace.Take();
  EXPECT_EQ(events.size(), kMaxTraceEvents);
  std::set<int64_t> ids;
  for (const TraceEvent& event : events) ids.insert(event.tid);
  EXPECT_GT(ids.size(), 1u);
}

}  // namespace
}  // namespace qkv
