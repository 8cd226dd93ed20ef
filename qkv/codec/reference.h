// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scalar twin of every codec: one value after the other, by the formulas and offsets of codec/blocks.h. It defines
// the bytes; the SIMD code must give the same. Also what runs on a CPU without a vector target. Arguments as in
// codec/codec.h (alignment does not matter here), already checked there.

#include <cstddef>

#include "qkv/codec/codec.h"

namespace qkv::reference {

void Encode(CodecId id, Side side, const float* rows, int tokens, int head_dim, std::byte* block);
void Decode(CodecId id, Side side, const std::byte* block, int tokens, int head_dim, float* rows);
void Unpack(CodecId id, Side side, const std::byte* block, int head_dim, float* panel);

}  // namespace qkv::reference
