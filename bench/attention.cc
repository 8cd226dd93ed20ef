// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Attention of one decoded token, and of prefill, over 8192 tokens of each codec, in the shape of SmolLM2-135M, on one
// thread; and, in the same run, what this core can do at most (the machine drifts, so compare within a run).
//
//   bench/attention --benchmark_repetitions=5 --benchmark_report_aggregates_only=true
//
// per_token: all layers. GB/s: bytes of blocks, each counted once. GFLOP/s: 4 * keys * head_dim per query head,
// whatever the kernel multiplies (the integer kernels may exceed the fp32 peak). of_read, of_fma: share of the limits, which
// are measured first (if the filter lets them). Rates are per CPU time of this thread.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "qkv/attention/attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/attention.cc"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/aligned_allocator.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace qkv {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

template <size_t... I>
HWY_INLINE float MultiplyAdd(size_t n, float start, std::index_sequence<I...>) {
  const hn::ScalableTag<float> d;
  const auto factor = hn::Set(d, 0.999f);
  hn::Vec<decltype(d)> sum[] = {hn::Set(d, start + static_cast<float>(I))...};
  for (size_t i = 0; i < n; ++i) ((sum[I] = hn::MulAdd(sum[I], factor, factor)), ...);
  float result = 0;
  ((result += hn::GetLane(sum[I])), ...);
  return result;
}

// n multiply-adds on each of 12 independent vectors; returns the floating point operations.
double FmaPeak(size_t n, float* sink) {
  *sink = MultiplyAdd(n, *sink, std::make_index_sequence<12>());
  return 2.0 * 12 * static_cast<double>(n) * static_cast<double>(hn::Lanes(hn::ScalableTag<float>()));
}

uint64_t ReadStream(const uint64_t* from, size_t n) {
  const hn::ScalableTag<uint64_t> d;
  const size_t lanes = hn::Lanes(d);
  auto a = hn::Zero(d), b = hn::Zero(d);
  for (size_t i = 0; i < n; i += 2 * lanes) {
    a = hn::Or(a, hn::Load(d, from + i));
    b = hn::Or(b, hn::Load(d, from + i + lanes));
  }
  return hn::GetLane(hn::Or(a, b));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace qkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv {
HWY_EXPORT(FmaPeak);
HWY_EXPORT(ReadStream);
namespace {

constexpr int kKeys = 8192;
constexpr Geometry kGeometry{30, 3, 64};
constexpr AttentionShape kShape{9, 3, 64, 0.125f};

// A context of that codec, allocated page by page as a real one; contents repeat, addresses do not.
struct Context {
  explicit Context(CodecPair codecs) : layout(kGeometry, codecs) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> rows(kPageTokens * 64);
    bytes = hwy::AllocateAligned<std::byte>(layout.bytes * (kKeys / kPageTokens));
    for (int head = 0; head < kGeometry.n_kv_heads; ++head) {
      for (Side side : {Side::kK, Side::kV}) {
        for (float& value : rows) value = normal(random);
        CodecOf(side == Side::kK ? codecs.k : codecs.v)
            .encode(side, rows.data(), kPageTokens, 64, bytes.get() + layout.BlockOffset(side, 0, head));
      }
    }
    for (size_t layer = 1; layer < 30; ++layer) {
      std::memcpy(bytes.get() + layer * layout.layer_stride, bytes.get(), layout.layer_stride);
    }
    for (size_t page = 0; page < kKeys / kPageTokens; ++page) {
      if (page > 0) std::memcpy(bytes.get() + page * layout.bytes, bytes.get(), layout.layer_stride * 30);
      pages.push_back({bytes.get() + page * layout.bytes, codecs, kPageTokens});
    }
  }

  PageLayout layout;
  hwy::AlignedFreeUniquePtr<std::byte[]> bytes;
  std::vector<PageRef> pages;
};

// Of this core, measured before anything else; 0: not measured.
double g_fma_flops = 0;
double g_read_bytes = 0;

// n_queries new tokens at the end of the context, through the first n_layers layers.
void BM_Attention(benchmark::State& state, CodecPair codecs, int n_queries, int n_layers) {
  const Context context(codecs);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<size_t>(n_queries * kShape.n_heads * kShape.head_dim)), out(q.size());
  for (float& value : q) value = normal(random);
  const AttentionPlan sizes(kShape, n_queries, context.pages);
  auto scratch = hwy::AllocateAligned<std::byte>(sizes.scratch_bytes());
  std::vector<float> partials(sizes.partial_floats());

  for (auto _ : state) {
    const AttentionPlan plan(kShape, n_queries, context.pages);
    for (int layer = 0; layer < n_layers; ++layer) {
      for (int item = 0; item < plan.n_attend_items(); ++item) {
        Attend(plan, context.pages, kGeometry.n_layers, layer, q.data(), item, scratch.get(), partials.data(),
               out.data());
      }
      for (int item = 0; item < plan.n_merge_items(); ++item) Merge(plan, partials.data(), item, out.data());
    }
    benchmark::DoNotOptimize(out.data());
  }
  const double steps = static_cast<double>(state.iterations());
  const double keys = kKeys - (n_queries - 1) / 2.0;  // that the average query sees
  using benchmark::Counter;
  const double tokens = steps * n_queries * n_layers / kGeometry.n_layers;
  state.counters["per_token"] = Counter(tokens, Counter::kIsRate | Counter::kInvert);
  const double bytes =
      steps * n_layers * static_cast<double>(context.layout.layer_stride) * static_cast<double>(context.pages.size());
  const double flops = steps * n_layers * n_queries * kShape.n_heads * 4.0 * keys * kShape.head_dim;
  state.counters["GB/s"] = Counter(bytes * 1e-9, Counter::kIsRate);
  state.counters["GFLOP/s"] = Counter(flops * 1e-9, Counter::kIsRate);
  if (g_read_bytes > 0) state.counters["of_read"] = Counter(bytes / g_read_bytes, Counter::kIsRate);
  if (g_fma_flops > 0) state.counters["of_fma"] = Counter(flops / g_fma_flops, Counter::kIsRate);
}

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void BM_LimitFma(benchmark::State& state) {
  float sink = 1;
  double operations = 0;
  const auto start = std::chrono::steady_clock::now();
  for (auto _ : state) operations += HWY_DYNAMIC_DISPATCH(FmaPeak)(100000, &sink);
  g_fma_flops = std::max(g_fma_flops, operations / SecondsSince(start));
  benchmark::DoNotOptimize(sink);
  state.counters["GFLOP/s"] = benchmark::Counter(operations * 1e-9, benchmark::Counter::kIsRate);
}

void BM_LimitRead(benchmark::State& state) {
  constexpr size_t kBytes = size_t{256} << 20;
  auto buffer = hwy::AllocateAligned<uint64_t>(kBytes / 8);
  std::memset(buffer.get(), 1, kBytes);
  const auto start = std::chrono::steady_clock::now();
  for (auto _ : state) benchmark::DoNotOptimize(HWY_DYNAMIC_DISPATCH(ReadStream)(buffer.get(), kBytes / 8));
  const double bytes = static_cast<double>(state.iterations()) * kBytes;
  g_read_bytes = std::max(g_read_bytes, bytes / SecondsSince(start));
  state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, benchmark::Counter::kIsRate);
}

void Register() {
  using enum CodecId;
  benchmark::RegisterBenchmark("limit/fma", BM_LimitFma)->Unit(benchmark::kMillisecond);
  benchmark::RegisterBenchmark("limit/read", BM_LimitRead)->Unit(benchmark::kMillisecond);
  const CodecPair pairs[] = {
      {kF16, kF16}, {kI8, kI8}, {kI8, kI4}, {kI4, kI4}, {kI4Z, kI4Z}, {kI8Channel, kI8Channel}, {kI8Tensor, kI8Tensor}};
  for (const CodecPair pair : pairs) {
    benchmark::RegisterBenchmark(("decode/" + ToString(pair)).c_str(), BM_Attention, pair, 1, 30)
        ->Unit(benchmark::kMillisecond);
  }
  for (const CodecPair pair : pairs) {
    benchmark::RegisterBenchmark(("prefill/" + ToString(pair)).c_str(), BM_Attention, pair, 128, 3)
        ->Unit(benchmark::kMillisecond);
  }
}

}  // namespace
}  // namespace qkv

int main(int argc, char** argv) {
  qkv::Register();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
#endif  // HWY_ONCE
