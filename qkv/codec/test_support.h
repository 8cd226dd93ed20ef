// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For tests and benches only: a block's memory, halves by their definition, codebooks, and random numbers.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "qkv/codec/codec.h"
#include "qkv/codec/pq.h"

namespace qkv::test {

inline constexpr Side kSides[] = {Side::kK, Side::kV};

inline double HalfValue(uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const double mantissa = half & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

// Of a code, for 3 to 7 and the refinement plane; 0 for all others.
inline int PlaneBits(CodecId id) {
  switch (id) {
    case CodecId::k3: return 3;
    case CodecId::k4:
    case CodecId::kRefine4: return 4;
    case CodecId::k5: return 5;
    case CodecId::k6: return 6;
    case CodecId::k7: return 7;
    default: return 0;
  }
}

struct Block {
  explicit Block(size_t n) : bytes(n), data(Allocate(n + kGuard)) { std::memset(data.get(), 0xa5, n + kGuard); }
  static std::unique_ptr<std::byte, decltype(&std::free)> Allocate(size_t n) {
    return {static_cast<std::byte*>(std::aligned_alloc(64, n)), &std::free};
  }
  std::byte* get() { return data.get(); }
  const std::byte* get() const { return data.get(); }
  int U8(size_t at) const { return std::to_integer<int>(data.get()[at]); }
  uint16_t U16(size_t at) const { return static_cast<uint16_t>(U8(at) | U8(at + 1) << 8); }
  bool GuardIntact() const {
    const std::byte* guard = data.get() + bytes;
    return std::all_of(guard, guard + kGuard, [](std::byte b) { return b == std::byte{0xa5}; });
  }
  bool operator==(const Block& other) const {
    return bytes == other.bytes && std::memcmp(get(), other.get(), bytes) == 0;
  }

  static constexpr size_t kGuard = 64;
  size_t bytes;
  std::unique_ptr<std::byte, decltype(&std::free)> data;
};

inline float Gaussian(std::mt19937_64& random) {
  return std::normal_distribution<float>()(random);
}

// Codebooks for Gaussian rows, every one with its centroids in another order.
inline PqCodebooks TestCodebooks(const PqShape& shape, const std::array<uint8_t, 16>& model_digest = {}) {
  static const auto trained = [] {
    std::mt19937_64 random(9);
    std::vector<float> points(2 * 16384);
    for (float& x : points) x = Gaussian(random);
    return std::array{TrainPq(points, 256).value(), TrainPq(points, 16).value()};
  }();
  std::vector<int8_t> all;
  for (size_t book = 0; book < 2 * shape.n_heads(); ++book) {
    for (const std::vector<int8_t>& centroids : trained) {
      const size_t n = centroids.size() / 2;
      for (size_t i = 0; i < 2 * n; ++i) all.push_back(centroids[i / n * n + (i + 7 * book) % n]);
    }
  }
  return PqCodebooks::Make(shape, model_digest, std::move(all)).value();
}

inline uint64_t Seed() {
  static const uint64_t seed = [] {
    const char* text = std::getenv("QKV_TEST_SEED");
    const uint64_t value = text != nullptr ? std::strtoull(text, nullptr, 10) : 20260101;
    std::printf("QKV_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

}  // namespace qkv::test
