// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a matrix in Q4_1 has beyond one in Q4_0. A Q4_1 weight is d*u + m with u of 0..15, a Q4_0 weight d*(u - 8); d and m
// belong to a block of 32 inputs of one output. So y = W x = (Q4_0 part) x + sum over blocks of (m + 8d) * (sum of the
// block's x): ggml has a fast product for the first term and none for Q4_1.
//
// Pure function; SIMD by Highway, chosen at run time. An output's bits do not depend on nth.

#include <cstddef>
#include <cstdint>

namespace qkv {

inline constexpr int kOffsetBlock = 32;  // inputs per block

struct BlockOffsets {
  const uint16_t* values = nullptr;  // IEEE halves, [n_in / 32][n_out]
  int n_in = 0;                      // a multiple of 32
  int n_out = 0;                     // a multiple of 8
};

// y [n_tokens][n_out] += offsets * block sums of x [n_tokens][n_in]; thread ith of nth does its share of the outputs.
void AddBlockOffsets(const BlockOffsets& offsets, const float* x, int n_tokens, float* y, int ith, int nth);

}  // namespace qkv
