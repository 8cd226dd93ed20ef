// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The codecs with SIMD, written once with Highway: AVX2 and AVX-512 on x86-64, NEON and SVE on Arm, chosen at run time;
// codec/reference.h on anything less. Same bytes as the reference on all of them. Arguments as in codec/codec.h,
// already checked there. Only codec.cc and the tests call this.

#include <cstddef>
#include <string_view>

#include "qkv/codec/codec.h"

namespace qkv::simd {

void Encode(CodecId id, Side side, const float* rows, int tokens, int head_dim, std::byte* block);
void Unpack(CodecId id, Side side, const std::byte* block, int head_dim, float* panel);

// Of the running target, as Highway calls it: "AVX2", "AVX3", "NEON", ….
std::string_view TargetName();

}  // namespace qkv::simd
