// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which codec pair to take when a limit is given instead of a name. Pure functions, any thread.

#include <cstdint>
#include <span>

#include "qkv/codec/codec.h"
#include "qkv/segment/layout.h"

namespace qkv {

// From the best, by mean KL against f16 pages as docs/EVALUATION.md has it (protocol handoff), to the smallest; every
// one is smaller than those before it for every head dim.
std::span<const CodecPair> MeasuredPairs();

// Stored bits per K or V value of a full page: codes and scales, refinement planes as well.
double BitsPerValue(CodecPair codecs, int head_dim);
double BitsPerValue(const LayerCodecs& layers);

// The best measured pair of at most `bits` per value. Error: kInvalidArgument, naming the fewest bits there are.
Result<CodecPair> BestWithinBits(double bits, int head_dim);
// The best one with which a context of n_tokens takes at most max_bytes, whole pages counted.
Result<CodecPair> BestWithinBytes(uint64_t max_bytes, int n_tokens, const Geometry& geometry);

}  // namespace qkv
