// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ggml graph of one step of a Llama-family model: embeddings, per layer {norm, QKV, RoPE, our attention, FFN}, logits.
// Shapes depend on the number of tokens only, so one graph serves every step of that size: the KV cache is outside the
// graph, behind three custom operations per layer. Used by one thread; borrows the Model.

#include <ggml-alloc.h>
#include <ggml.h>

#include <functional>
#include <memory>
#include <span>

#include "qkv/attention/attention.h"
#include "qkv/engine/model_internal.h"

namespace qkv {
class Calibration;
}

namespace qkv {

// What a layer's custom operations call, each on all of ggml's threads, with a barrier between them: `append` stores the new
// K and V rows, `attend` fills in the output (or partial results), `merge` finishes it in place.
struct LayerOps {
  ggml_custom_op_t append;  // dst->src: K and V [head_dim, n_kv_heads, n]; V's tokens may lie apart
  ggml_custom_op_t attend;  // dst: [n_heads * head_dim, n]; dst->src[0]: Q [head_dim, n_heads, n]
  ggml_custom_op_t merge;   // dst: attend's
  void* userdata;
};

class LlamaGraph {
 public:
  // logits of the last token only, unless all_logits. `ops` per layer; their userdata must outlive the graph, as must
  // `calibration`, which may be null: K and Q come to the operations multiplied by its matrices.
  LlamaGraph(const Model::Internal& model, int n_tokens, bool all_logits, std::span<const LayerOps> ops,
             const Calibration* calibration = nullptr);

  int n_tokens() const { return n_tokens_; }
  bool all_logits() const { return all_logits_; }
  ggml_cgraph* graph() const { return graph_; }
  std::span<int32_t> tokens() const { return {static_cast<int32_t*>(tokens_->data), static_cast<size_t>(n_tokens_)}; }
  std::span<int32_t> positions() const {
    return {static_cast<int32_t*>(positions_->data), static_cast<size_t>(n_tokens_)};
  }
  std::span<const float> logits() const {  // [1 or n_tokens][n_vocab]
    return {static_cast<const float*>(logits_->data), static_cast<size_t>(ggml_nelements(logits_))};
  }

 private:
  struct AllocatorFree {
    void operator()(ggml_gallocr* allocator) const { ggml_gallocr_free(allocator); }
  };

  int n_tokens_;
  bool all_logits_;
  std::unique_ptr<ggml_context, GgmlDeleter> context_;
  std::unique_ptr<ggml_gallocr, AllocatorFree> allocator_;
  ggml_cgraph* graph_ = nullptr;
  ggml_tensor* tokens_ = nullptr;
  ggml_tensor* positions_ = nullptr;
  ggml_tensor* logits_ = nullptr;
};

// How the graph rotates queries and keys.
Rope RopeOf(const Model::Internal& model);

}  // namespace qkv
