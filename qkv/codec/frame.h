// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rotated frame, in which the codecs 3 to 8, 5/3, pq4 and pq2 work: y = H D (x - mean). D turns the signs of some
// channels, the same ones in every model, layer and head; H is the normalized Walsh-Hadamard transform of consecutive runs
// of channels. It spreads outliers over the run, so that one scale serves all channels. Dot products are the same in both
// frames:
// q.k = (H D q).y + q.mean. docs/FORMAT.md §3.6.
//
// Pure functions over caller-owned memory, with SIMD; safe from any thread and process. The same bits on every CPU.

#include <cstddef>
#include <cstdint>

namespace qkv {

// In the header of every segment with a rotated page. "QKVShare" as it stands in memory.
inline constexpr uint64_t kRotationSeed = 0x65726168'53564b51;

// Channels that H mixes: the largest power of two that divides head_dim. With `bands` (keys of the codec 5/3), that
// divides half of head_dim, so that neither half of the channels sees anything of the other.
constexpr int RotationRun(int head_dim, bool bands = false) {
  const int channels = bands ? head_dim / 2 : head_dim;
  return channels & -channels;
}

// Whether D turns channel `channel` (0..255): bit channel % 64 of number channel / 64 of splitmix64(kRotationSeed).
constexpr bool RotationFlips(int channel) {
  uint64_t z = kRotationSeed + 0x9e3779b97f4a7c15 * (static_cast<uint64_t>(channel) / 64 + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  z ^= z >> 31;
  return (z >> (channel % 64) & 1) != 0;
}

// rows, out: [n][head_dim] fp32, the same memory or apart. mean: [head_dim], or null for none. head_dim as in codec.h. In
// ToRotated, NaN counts as 0 and values beyond ±65504 as that, as in every encoder.
void ToRotated(const float* rows, int n, int head_dim, const float* mean, float* out, bool bands = false);
void FromRotated(const float* rows, int n, int head_dim, const float* mean, float* out, bool bands = false);

// H D x, and back (D H x), of one vector in place; no clamping. For queries and outputs of attention.
void Rotate(float* vector, int head_dim, bool bands = false);
void RotateBack(float* vector, int head_dim);

}  // namespace qkv
