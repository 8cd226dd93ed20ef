// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys and values of a context as fp32 rows, for checks and measurements. Pure; any thread.

#include <vector>

#include "qkv/engine/sequence.h"

namespace qkv {

// Of consecutive tokens: [layer][token][kv_head][head_dim].
struct KvRows {
  std::vector<float> k, v;
  int n_layers = 0;
};

// Of tokens [first, first + n) of a context, keys as they were encoded: a moved page's are those of its old position.
// `codebooks`: those that its card names, if it names some. REQUIRES: the context's tokens are not grouped.
KvRows DecodeRows(const Context& context, int first, int n, const PqCodebooks* codebooks = nullptr);

// Turns the keys of `rows` by that many positions, in double precision.
void MoveKeys(KvRows& rows, int head_dim, const Rope& rope, int positions);

}  // namespace qkv
