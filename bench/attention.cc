// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Attention of one decoded token, and of prefill, over 8192 tokens of each codec, in the shape of SmolLM2-135M (30 layers, 3
// query heads per KV head of 64 channels) and in that of 4 of the 32 layers of Llama-2-7B (1 per head, of 128), on one
// thread; and, in the same run, what this core can do at most (the machine drifts, so compare within a run).
//
//   bench/attention --benchmark_repetitions=5 --benchmark_report_aggregates_only=true
//
// per_token: all layers. GB/s: bytes of blocks, each counted once. GFLOP/s: 4 * keys * head_dim per query head,
// whatever the kernel multiplies (the integer kernels may exceed the fp32 peak). refined: share of the keys that were read
// again from their refinement plane (tau 0.01; it is not in GB/s). of_read, of_fma: share of the limits, which
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
#include "qkv/codec/test_support.h"

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

struct Shape {
  Geometry geometry;
  AttentionShape attention;
  int model_layers;
  float query_spread;  // such that about a tenth of the keys is within 4.6 of the largest score
};
constexpr Shape kSmall{{30, 3, 64}, {9, 3, 64, 0.125f}, 30, 3.8f};
constexpr Shape k7b{{4, 32, 128}, {32, 32, 128, 0.088388346f}, 32, 2.4f};

// A context of that codec, allocated page by page as a real one; contents repeat after kDistinctPages and in each layer,
// addresses do not.
class Context {
 public:
  Context(const Shape& shape, CodecPair codecs)
      : layout(shape.geometry, codecs),
        geometry_(shape.geometry),
        codebooks_(test::TestCodebooks({geometry_.n_layers, geometry_.n_kv_heads, geometry_.head_dim})) {
    constants_.resize(ConstantOffset(geometry_, geometry_.n_layers, 0, Constant::kMeanK));
    bytes_ = Pages(codecs, layout);
    if (codecs.refine) {
      constexpr CodecPair kRefinement{CodecId::kRefine4, CodecId::kRefine4};
      refinement_ = Pages(kRefinement, PageLayout(geometry_, kRefinement));
    }
    const bool rotated = CodecOf(codecs.k).rotated;
    for (size_t page = 0; page < kPages; ++page) {
      PageRef ref{bytes_.get() + page * layout.bytes, codecs, kPageTokens};
      if (rotated) ref.constants = constants_.data();
      ref.exact_first = rotated && page == 0;
      ref.codebooks = &codebooks_;
      if (codecs.refine) {
        ref.refinement = refinement_.get() + page * PageLayout(geometry_, {CodecId::kRefine4, CodecId::kRefine4}).bytes;
      }
      pages.push_back(ref);
    }
  }

  PageLayout layout;
  std::vector<PageRef> pages;

 private:
  static constexpr size_t kPages = kKeys / kPageTokens, kDistinctPages = 32;

  hwy::AlignedFreeUniquePtr<std::byte[]> Pages(CodecPair codecs, const PageLayout& of) const {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> rows(kPageTokens * static_cast<size_t>(geometry_.head_dim));
    auto bytes = hwy::AllocateAligned<std::byte>(of.bytes * kPages);
    for (size_t page = 0; page < kPages; ++page) {
      std::byte* to = bytes.get() + page * of.bytes;
      if (page >= kDistinctPages) {
        std::memcpy(to, to - kDistinctPages * of.bytes, of.bytes);
        continue;
      }
      for (int head = 0; head < geometry_.n_kv_heads; ++head) {
        for (Side side : {Side::kK, Side::kV}) {
          for (float& value : rows) value = normal(random) * (codecs.k == CodecId::kRefine4 ? 0.1f : 1.0f);
          const Codec& codec = CodecOf(side == Side::kK ? codecs.k : codecs.v);
          const PqBook book = codec.needs_book ? codebooks_.book(codec.id, 0, head, side) : PqBook();
          codec.encode(side, rows.data(), kPageTokens, geometry_.head_dim, to + of.BlockOffset(side, 0, head), &book);
        }
      }
      for (size_t layer = 1; layer < static_cast<size_t>(geometry_.n_layers); ++layer) {
        std::memcpy(to + layer * of.layer_stride, to, of.layer_stride);
      }
    }
    return bytes;
  }

  Geometry geometry_;
  PqCodebooks codebooks_;
  std::vector<std::byte> constants_;
  hwy::AlignedFreeUniquePtr<std::byte[]> bytes_, refinement_;
};

// Of this core, measured before anything else; 0: not measured.
double g_fma_flops = 0;
double g_read_bytes = 0;

// n_queries new tokens at the end of the context, through the first n_layers layers.
void BM_Attention(benchmark::State& state, const Shape& shape, CodecPair codecs, int n_queries, int n_layers) {
  const Context context(shape, codecs);
  const AttentionShape& of = shape.attention;
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, shape.query_spread);
  std::vector<float> q(static_cast<size_t>(n_queries * of.n_heads * of.head_dim)), out(q.size());
  for (float& value : q) value = normal(random);
  const float threshold = codecs.refine ? std::log(100.0f) : -1;
  const AttentionPlan sizes(of, n_queries, context.pages, nullptr, threshold);
  auto scratch = hwy::AllocateAligned<std::byte>(sizes.scratch_bytes());
  std::vector<float> partials(sizes.partial_floats());
  KeyCounts counts;

  for (auto _ : state) {
    const AttentionPlan plan(of, n_queries, context.pages, nullptr, threshold);
    for (int layer = 0; layer < n_layers; ++layer) {
      for (int item = 0; item < plan.n_attend_items(); ++item) {
        Attend(plan, context.pages, shape.geometry.n_layers, layer, q.data(), item, scratch.get(), partials.data(),
               out.data(), &counts);
      }
      for (int item = 0; item < plan.n_merge_items(); ++item) Merge(plan, partials.data(), item, out.data());
    }
    benchmark::DoNotOptimize(out.data());
  }
  const double steps = static_cast<double>(state.iterations());
  const double keys = kKeys - (n_queries - 1) / 2.0;  // that the average query sees
  using benchmark::Counter;
  const double tokens = steps * n_queries * n_layers / shape.model_layers;
  state.counters["per_token"] = Counter(tokens, Counter::kIsRate | Counter::kInvert);
  const double bytes =
      steps * n_layers * static_cast<double>(context.layout.layer_stride) * static_cast<double>(context.pages.size());
  const double flops = steps * n_layers * n_queries * of.n_heads * 4.0 * keys * of.head_dim;
  state.counters["GB/s"] = Counter(bytes * 1e-9, Counter::kIsRate);
  state.counters["GFLOP/s"] = Counter(flops * 1e-9, Counter::kIsRate);
  if (g_read_bytes > 0) state.counters["of_read"] = Counter(bytes / g_read_bytes, Counter::kIsRate);
  if (g_fma_flops > 0) state.counters["of_fma"] = Counter(flops / g_fma_flops, Counter::kIsRate);
  if (counts.seen > 0)
    state.counters["refined"] = static_cast<double>(counts.refined) / static_cast<double>(counts.seen);
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
  const CodecPair pairs[] = {{kF16, kF16},
                             {kI8, kI8},
                             {kI8, kI4},
                             {kI4, kI4},
                             {kI4Z, kI4Z},
                             {kI4Channel, kI4Z},
                             {kI4Channel, kI4Channel},
                             {kI8Channel, kI8Channel},
                             {kI8Tensor, kI8Tensor},
                             {k8, k8},
                             {k7, k7},
                             {k6, k6},
                             {k5, k5},
                             {k4, k4},
                             {k3, k3},
                             {kPq4, kPq4},
                             {kPq2, kPq2},
                             {k5, k4},
                             {kBands, k4},
                             {k4, k4, /*refine=*/true},
                             {k4, k3, /*refine=*/true}};
  const auto add = [&](const char* name, const Shape& shape, int n_queries, int n_layers) {
    for (const CodecPair pair : pairs) {
      benchmark::RegisterBenchmark((name + ToString(pair)).c_str(), BM_Attention, shape, pair, n_queries, n_layers)
          ->Unit(benchmark::kMillisecond);
    }
  };
  add("decode/", kSmall, 1, 30);
  add("prefill/", kSmall, 128, 3);
  add("decode-7b/", k7b, 1, 4);
  add("prefill-7b/", k7b, 64, 1);
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
