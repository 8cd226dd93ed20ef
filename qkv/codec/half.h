// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// IEEE 754 half precision in plain integer arithmetic, the same on every compiler and CPU. Pure functions.

#include <algorithm>
#include <bit>
#include <cstdint>

namespace qkv {

inline constexpr float kHalfMax = 65504.0f;

// Rounds to nearest even. NaN becomes 0, values beyond ±kHalfMax saturate: blocks never hold NaN or infinity.
constexpr uint16_t HalfFromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0;
  magnitude = std::min(magnitude, std::bit_cast<uint32_t>(kHalfMax));
  if (magnitude < std::bit_cast<uint32_t>(0x1p-14f)) {
    // At 0.5 a float's last place is 2^-24, a half's smallest step: the addition rounds as we need.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(0.5f)));
  }
  const uint32_t odd = (magnitude >> 13) & 1;
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfff + odd) >> 13));
}

// Exact, for every bit pattern.
constexpr float FloatFromHalf(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = half & 0x7c00;
  uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
  if (exponent == 0x7c00) {
    bits += 224u << 23;  // infinity and NaN
  } else if (exponent != 0) {
    bits += 112u << 23;
  } else {
    bits = std::bit_cast<uint32_t>(std::bit_cast<float>(bits + (113u << 23)) - 0x1p-14f);
  }
  return std::bit_cast<float>(bits | sign);
}

}  // namespace qkv
