// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Codecs that exist for comparison only: rows go through them and back before they become f16 pages (Sequence::CopyExact),
// so that their loss is measured under the same protocol, in the same engine, as that of our own. Pure; what is returned
// may be called from one thread at a time.

#include <string_view>

#include "qkv/engine/sequence.h"

namespace qkv {

// ggml's "q8_0" or "q4_0" by ggml's own code, as libllama's cache applies it: behind a Walsh-Hadamard transform of 64
// channels (K: of the largest such power of two that divides head_dim) where head_dim allows; with ":plain" behind the name
// without the transform, as older versions did. Empty for another name.
Sequence::RowTransform LikeGgml(std::string_view type, int head_dim);
double LikeGgmlBits(std::string_view type);  // per value; 0 for another name

}  // namespace qkv
