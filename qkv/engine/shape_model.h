// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Models of a known shape with random Q4_0 weights and a vocabulary of bytes and made-up words: for measuring speed on
// shapes that are too big to fetch. What they say means nothing. Pure but for the file that is written.

#include <span>
#include <string>
#include <string_view>

#include "qkv/base/error.h"

namespace qkv {

struct ModelShape {
  std::string_view name;  // as in --shape
  int n_layers, n_heads, n_kv_heads, head_dim, n_ff, n_vocab, n_ctx;
  float rope_base;
  bool tied_embedding;  // the output matrix is the embedding
};

std::span<const ModelShape> ModelShapes();
// Error: kInvalidArgument, naming the shapes there are.
Result<ModelShape> FindModelShape(std::string_view name);

// Writes a GGUF; an existing file is replaced. On error the file is removed. Errors: kNotFound, kDenied, kExhausted.
Status WriteShapeModel(const ModelShape& shape, const std::string& path);

}  // namespace qkv
