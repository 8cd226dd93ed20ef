// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/llama_graph.h"

namespace qkv {
namespace {

constexpr int kRopeInterleaved = 0;  // ggml's mode for pairs (2i, 2i + 1), as GGUF's "llama" stores them
constexpr size_t kNodesPerLayer = 40;

ggml_tensor* Linear(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* bias, ggml_tensor* x) {
  ggml_tensor* y = ggml_mul_mat(ctx, weight, x);
  return bias != nullptr ? ggml_add(ctx, y, bias) : y;
}

ggml_tensor* RmsNorm(ggml_context* ctx, ggml_tensor* x, ggml_tensor* weight, float eps) {
  return ggml_mul(ctx, ggml_rms_norm(ctx, x, eps), weight);
}

ggml_tensor* LastRow(ggml_context* ctx, ggml_tensor* x) {
  return ggml_view_2d(ctx, x, x->ne[0], 1, x->nb[1], x->nb[1] * (x->ne[1] - 1));
}

}  // namespace

LlamaGraph::LlamaGraph(const Model::Internal& model, int n_tokens, bool all_logits, std::span<const LayerOps> ops)
    : n_tokens_(n_tokens), all_logits_(all_logits) {
  const HyperParams& p = model.params;
  const size_t max_nodes = kNodesPerLayer * p.n_layers + 64;
  context_.reset(ggml_init({ggml_tensor_overhead() * max_nodes + ggml_graph_overhead_custom(max_nodes, false), nullptr,
                            /*no_alloc=*/true}));
  ggml_context* ctx = context_.get();
  graph_ = ggml_new_graph_custom(ctx, max_nodes, false);

  tokens_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_tokens);
  positions_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_tokens);
  ggml_set_input(tokens_);
  ggml_set_input(positions_);

  const auto rope = [&](ggml_tensor* x, int n_heads) {
    x = ggml_reshape_3d(ctx, x, p.head_dim, n_heads, n_tokens);
    return ggml_rope_ext(ctx, x, positions_, model.rope_factors, p.rope_dims, kRopeInterleaved, p.n_ctx_train,
                         p.rope_base, p.rope_scale, /*ext_factor=*/0, /*attn_factor=*/1, /*beta_fast=*/32,
                         /*beta_slow=*/1);
  };

  ggml_tensor* residual = ggml_get_rows(ctx, model.token_embedding, tokens_);
  for (int il = 0; il < p.n_layers; ++il) {
    const LayerWeights& layer = model.layers[il];
    ggml_tensor* x = RmsNorm(ctx, residual, layer.attn_norm, p.rms_eps);
    ggml_tensor* q = rope(Linear(ctx, layer.wq, layer.bq, x), p.n_heads);
    ggml_tensor* k = rope(Linear(ctx, layer.wk, layer.bk, x), p.n_kv_heads);
    ggml_tensor* v = Linear(ctx, layer.wv, layer.bv, x);

    ggml_tensor* append_args[] = {k, v};
    ggml_tensor* appended = ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, append_args, 2, ops[il].append,
                                           GGML_N_TASKS_MAX, ops[il].userdata);
    ggml_tensor* attend_args[] = {q, appended};
    x = ggml_custom_4d(ctx, GGML_TYPE_F32, int64_t{p.n_heads} * p.head_dim, n_tokens, 1, 1, attend_args, 2,
                       ops[il].attend, GGML_N_TASKS_MAX, ops[il].userdata);
    x = ggml_custom_inplace(ctx, x, nullptr, 0, ops[il].merge, GGML_N_TASKS_MAX, ops[il].userdata);

    if (il == p.n_layers - 1 && !all_logits && n_tokens > 1) {  // nobody reads the other rows any more
      x = LastRow(ctx, x);
      residual = LastRow(ctx, residual);
    }
    residual = ggml_add(ctx, Linear(ctx, layer.wo, layer.bo, x), residual);

    x = RmsNorm(ctx, residual, layer.ffn_norm, p.rms_eps);
    ggml_tensor* up = ggml_mul_mat(ctx, layer.ffn_up, x);
    ggml_tensor* gate = ggml_mul_mat(ctx, layer.ffn_gate, x);
    x = ggml_mul_mat(ctx, layer.ffn_down, ggml_swiglu_split(ctx, gate, up));
    residual = ggml_add(ctx, x, residual);
  }
  logits_ = ggml_mul_mat(ctx, model.output, RmsNorm(ctx, residual, model.output_norm, p.rms_eps));
  ggml_set_output(logits_);
  ggml_build_forward_expand(graph_, logits_);

  allocator_.reset(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
  QKV_CHECK(ggml_gallocr_alloc_graph(allocator_.get(), graph_));
}

}  // namespace qkv
