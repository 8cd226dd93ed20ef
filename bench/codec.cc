// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// What encoding and unpacking a block costs, per codec, and what the rotated frame and the expanding of planes and of
// centroids' numbers do, on one thread and in the cache. per_value: CPU time per value of K or V. A token has 2 * layers *
// KV heads * head_dim of them (SmolLM2-135M: 11,520), so encode's figure, and that of to_rotated where the codec is a
// rotated one, times that is what a token costs the encoder thread.
//
//   bench/codec --benchmark_filter=/64

#include <benchmark/benchmark.h>

#include <random>
#include <string>
#include <vector>

#include "hwy/aligned_allocator.h"
#include "qkv/codec/blocks.h"
#include "qkv/codec/codec.h"
#include "qkv/codec/frame.h"
#include "qkv/codec/test_support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/codec.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "qkv/codec/planes-inl.h"
#include "qkv/codec/pq-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv {
namespace HWY_NAMESPACE {
void Expand(CodecId id, const uint8_t* block, int head_dim, int8_t* out) {
  if (id == CodecId::kBands) return planes::HWY_NAMESPACE::ExpandBands(block, head_dim, out);
  planes::HWY_NAMESPACE::ExpandPlanes(blocks::RotatedBits(id), block, kPageTokens * blocks::Size(head_dim), out);
}
void LookUp(const PqBook& book, const uint8_t* block, size_t dim, int8_t* out) {
  pq::HWY_NAMESPACE::ExpandPq(book, Side::kK, block, dim, out);
}
}  // namespace HWY_NAMESPACE
}  // namespace qkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv {
namespace {

HWY_EXPORT(Expand);
HWY_EXPORT(LookUp);

// Blocks of many heads, more than the innermost cache holds, as an encoder meets them.
constexpr int kBlocks = 64;

struct Blocks {
  Blocks(const Codec& codec, int head_dim)
      : codec(codec),
        head_dim(head_dim),
        values(static_cast<size_t>(kPageTokens * head_dim)),
        bytes(codec.block_bytes(head_dim)),
        rows(hwy::AllocateAligned<float>(kBlocks * values)),
        blocks(hwy::AllocateAligned<uint8_t>(kBlocks * bytes)),
        panel(hwy::AllocateAligned<float>(values)),
        codebooks(test::TestCodebooks({1, 1, head_dim})),
        book(codec.needs_book ? codebooks.book(codec.id, 0, 0, Side::kK) : PqBook()) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < kBlocks * values; ++i) rows[i] = normal(random);
  }
  std::byte* block(size_t i) { return reinterpret_cast<std::byte*>(blocks.get() + i * bytes); }
  void Encode(Side side, size_t i) {
    codec.encode(side, rows.get() + i * values, kPageTokens, head_dim, block(i), &book);
  }
  void Count(benchmark::State& state) const {
    const auto n = static_cast<double>(state.iterations()) * static_cast<double>(kBlocks * values);
    state.counters["per_value"] = benchmark::Counter(n, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  }

  const Codec& codec;
  const int head_dim;
  const size_t values, bytes;
  hwy::AlignedFreeUniquePtr<float[]> rows;
  hwy::AlignedFreeUniquePtr<uint8_t[]> blocks;
  hwy::AlignedFreeUniquePtr<float[]> panel;
  PqCodebooks codebooks;
  PqBook book;
};

void BM_Encode(benchmark::State& state, const Codec& codec, Side side, int head_dim) {
  Blocks blocks(codec, head_dim);
  for (auto _ : state) {
    for (size_t i = 0; i < kBlocks; ++i) blocks.Encode(side, i);
    benchmark::ClobberMemory();
  }
  blocks.Count(state);
}

void BM_Unpack(benchmark::State& state, const Codec& codec, Side side, int head_dim) {
  Blocks blocks(codec, head_dim);
  for (size_t i = 0; i < kBlocks; ++i) blocks.Encode(side, i);
  for (auto _ : state) {
    for (size_t i = 0; i < kBlocks; ++i)
      codec.unpack(side, blocks.block(i), head_dim, blocks.panel.get(), &blocks.book);
    benchmark::ClobberMemory();
  }
  blocks.Count(state);
}

void BM_Expand(benchmark::State& state, const Codec& codec, int head_dim) {
  Blocks blocks(codec, head_dim);
  for (size_t i = 0; i < kBlocks; ++i) blocks.Encode(Side::kK, i);
  const auto out = hwy::AllocateAligned<int8_t>(blocks.values + 64);
  for (auto _ : state) {
    for (size_t i = 0; i < kBlocks; ++i) {
      if (codec.needs_book) {
        HWY_DYNAMIC_DISPATCH(LookUp)
        (blocks.book, blocks.blocks.get() + i * blocks.bytes, static_cast<size_t>(head_dim), out.get());
        continue;
      }
      HWY_DYNAMIC_DISPATCH(Expand)
      (codec.id, blocks.blocks.get() + i * blocks.bytes, head_dim, out.get());
    }
    benchmark::ClobberMemory();
  }
  blocks.Count(state);
}

void BM_ToRotated(benchmark::State& state, int head_dim) {
  Blocks blocks(CodecOf(CodecId::k4), head_dim);
  const std::vector<float> mean(static_cast<size_t>(head_dim), 0.1f);
  for (auto _ : state) {
    for (size_t i = 0; i < kBlocks; ++i) {
      ToRotated(blocks.rows.get() + i * blocks.values, kPageTokens, head_dim, mean.data(), blocks.panel.get());
    }
    benchmark::ClobberMemory();
  }
  blocks.Count(state);
}

void Register() {
  for (const int head_dim : {64, 128}) {
    const std::string at = "/" + std::to_string(head_dim);
    const auto with = [&](const Codec& codec) {
      const std::string name(codec.name);
      for (const Side side : {Side::kK, Side::kV}) {
        if (side == Side::kV && codec.keys_only) continue;
        const std::string of = name + (side == Side::kK ? "/K" : "/V") + at;
        benchmark::RegisterBenchmark(("encode/" + of).c_str(), BM_Encode, codec, side, head_dim);
        benchmark::RegisterBenchmark(("unpack/" + of).c_str(), BM_Unpack, codec, side, head_dim);
      }
      if (codec.needs_book || (codec.rotated && codec.id <= CodecId::k7) || codec.id == CodecId::kBands) {
        benchmark::RegisterBenchmark(("expand/" + name + at).c_str(), BM_Expand, codec, head_dim);
      }
    };
    for (const Codec& codec : Codecs()) with(codec);
    with(CodecOf(CodecId::kRefine4));
    benchmark::RegisterBenchmark(("to_rotated" + at).c_str(), BM_ToRotated, head_dim);
  }
}

}  // namespace
}  // namespace qkv

int main(int argc, char** argv) {
  qkv::Register();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
#endif  // HWY_ONCE
