// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the engine's own .cc files see of a Model: ggml tensors over the mapped file, libllama's vocabulary. Not for other
// rooms. Immutable after Load, but for the identity that is computed once on demand.

#include <ggml-backend.h>
#include <ggml.h>
#include <gguf.h>
#include <llama.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "qkv/base/fd.h"
#include "qkv/engine/model.h"
#include "qkv/engine/repack.h"

namespace qkv {

struct GgufDeleter {
  void operator()(gguf_context* gguf) const { gguf_free(gguf); }
};
struct VocabModelDeleter {
  void operator()(llama_model* model) const { llama_model_free(model); }
};

// Either the matrix of several projections, whose outputs lie behind each other, or one for each.
struct LayerWeights {
  ggml_tensor* attn_norm = nullptr;
  Matrix wqkv;
  Matrix wq, wk, wv;
  Matrix wo;
  ggml_tensor *bq = nullptr, *bk = nullptr, *bv = nullptr, *bo = nullptr;  // optional
  ggml_tensor* ffn_norm = nullptr;
  Matrix ffn_gate_up;
  Matrix ffn_gate, ffn_up;
  Matrix ffn_down;
};

struct Model::Internal {
  std::string path;
  HyperParams params;
  Fd fd;
  Mapping file;
  std::unique_ptr<gguf_context, GgufDeleter> gguf;
  std::unique_ptr<ggml_context, GgmlDeleter> tensors;  // of the file; their data points into `file`
  std::unique_ptr<ggml_backend_buffer, BufferDeleter> buffer;
  std::unique_ptr<llama_model, VocabModelDeleter> vocab_model;  // vocabulary and chat template only
  const llama_vocab* vocab = nullptr;
  std::string chat_template;  // empty: none

  ggml_tensor* token_embedding = nullptr;
  ggml_tensor* output_norm = nullptr;
  Matrix output;
  ggml_tensor* rope_factors = nullptr;        // optional, [rope_dims / 2]
  std::vector<LayerWeights> layers;           // for matrix products packed ones, where there are any
  std::unique_ptr<RepackedWeights> repacked;  // nullptr: none

  mutable std::once_flag identity_once;
  mutable ModelIdentity identity;
  mutable std::array<uint8_t, 16> weights_digest{};
};

}  // namespace qkv
