// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For tests and benches only: a block's memory, halves by their definition, codebooks, random numbers, and rows of all
// kinds.

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "qkv/codec/codec.h"
#include "qkv/codec/pq.h"

namespace qkv::test {

inline constexpr Side kSides[] = {Side::kK, Side::kV};
inline std::span<const Side> SidesOf(CodecId id) {
  return std::span(kSides).first(id == CodecId::kBands ? 1 : 2);
}

inline double HalfValue(uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const double mantissa = half & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

// Of a code, for 3 to 7, 5/3 and the refinement plane; 0 for all others.
inline int PlaneBits(CodecId id) {
  switch (id) {
    case CodecId::k3: return 3;
    case CodecId::k4:
    case CodecId::kBands:  // on average
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

// Rows that codecs meet, and some that they should survive.
struct Data {
  const char* name;
  std::function<float(std::mt19937_64&, int t, int c)> value;
};

inline std::vector<Data> AllData() {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  return {
      {"zeros", [](auto&, int, int) { return 0.0f; }},
      {"signed zeros", [](auto&, int t, int c) { return (t + c) % 3 == 0 ? -0.0f : 0.0f; }},
      {"constant", [](auto&, int, int) { return 0.7f; }},
      {"gaussian", [](auto& random, int, int) { return Gaussian(random); }},
      {"far from zero", [](auto& random, int, int) { return -31.5f + 0.01f * Gaussian(random); }},
      {"outlier channel", [](auto& random, int, int c) { return Gaussian(random) * (c == 5 ? 120.0f : 1.0f); }},
      {"both extremes", [](auto&, int t, int c) { return (c % 2 == 0 ? 1.0f : -1.0f) * static_cast<float>(1 + t); }},
      {"ties",
       [](auto& random, int, int c) { return c % 16 == 0 ? -127.0f : static_cast<float>(random() % 254) * 0.5f; }},
      {"half denormals", [](auto& random, int, int) { return Gaussian(random) * 0x1p-20f; }},
      {"denormals", [](auto& random, int, int) { return Gaussian(random) * 0x1p-130f; }},
      {"largest floats", [](auto& random, int, int) { return random() % 2 == 0 ? FLT_MAX : -FLT_MAX; }},
      {"largest halves", [](auto& random, int, int) { return random() % 2 == 0 ? 65504.0f : -65504.0f; }},
      {"NaN and infinity",
       [](auto& random, int, int) {
         const uint64_t kind = random() % 8;
         return kind == 0 ? kNan : kind == 1 ? kInf : kind == 2 ? -kInf : kind == 3 ? -kNan : Gaussian(random);
       }},
      {"any bits", [](auto& random, int, int) { return std::bit_cast<float>(static_cast<uint32_t>(random())); }},
  };
}

inline std::vector<float> Rows(const Data& data, int tokens, int head_dim) {
  std::mt19937_64 random(Seed() + static_cast<uint64_t>(head_dim));
  std::vector<float> rows;
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < head_dim; ++c) rows.push_back(data.value(random, t, c));
  }
  return rows;
}

}  // namespace qkv::test
