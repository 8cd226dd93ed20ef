// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/llama_graph.h"

#include <cmath>

#include "qkv/engine/calibration.h"

namespace qkv {
namespace {

constexpr int kRopeInterleaved = 0;  // ggml's mode for pairs (2i, 2i + 1), as GGUF's "llama" stores them
constexpr size_t kNodesPerLayer = 48;

void AddOffsetsOp(ggml_tensor* dst, int ith, int nth, void* userdata) {
  const ggml_tensor* x = dst->src[1];
  AddBlockOffsets(*static_cast<const BlockOffsets*>(userdata), static_cast<const float*>(x->data),
                  static_cast<int>(ggml_nrows(x)), static_cast<float*>(dst->data), ith, nth);
}

ggml_tensor* Linear(ggml_context* ctx, const Matrix& matrix, ggml_tensor* bias, ggml_tensor* x) {
  ggml_tensor* y = ggml_mul_mat(ctx, matrix.weight, x);
  if (matrix.offsets.values != nullptr) {
    y = ggml_custom_inplace(ctx, y, &x, 1, AddOffsetsOp, GGML_N_TASKS_MAX, const_cast<BlockOffsets*>(&matrix.offsets));
  }
  return bias != nullptr ? ggml_add(ctx, y, bias) : y;
}

ggml_tensor* RmsNorm(ggml_context* ctx, ggml_tensor* x, ggml_tensor* weight, float eps) {
  return ggml_mul(ctx, ggml_rms_norm(ctx, x, eps), weight);
}

// Each head of x, [head_dim, heads, n], by its KV head's matrix.
ggml_tensor* ByHead(ggml_context* ctx, std::span<const float> matrices, int n_kv_heads, ggml_tensor* x) {
  ggml_tensor* m = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[0], n_kv_heads);
  m->data = const_cast<float*>(matrices.data());  // only read
  return ggml_cont(ctx, ggml_permute(ctx, ggml_mul_mat(ctx, m, ggml_permute(ctx, x, 0, 2, 1, 3)), 0, 2, 1, 3));
}

ggml_tensor* LastRow(ggml_context* ctx, ggml_tensor* x) {
  return ggml_view_2d(ctx, x, x->ne[0], 1, x->nb[1], x->nb[1] * (x->ne[1] - 1));
}

}  // namespace

LlamaGraph::LlamaGraph(const Model::Internal& model, int n_tokens, bool all_logits, std::span<const LayerOps> ops,
                       const Calibration* calibration)
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

  const auto rope = [&](ggml_tensor* x) {
    return ggml_rope_ext(ctx, x, positions_, model.rope_factors, p.rope_dims, kRopeInterleaved, p.n_ctx_train,
                         p.rope_base, p.rope_scale, /*ext_factor=*/0, /*attn_factor=*/1, /*beta_fast=*/32,
                         /*beta_slow=*/1);
  };

  ggml_tensor* residual = ggml_get_rows(ctx, model.token_embedding, tokens_);
  for (int il = 0; il < p.n_layers; ++il) {
    const LayerWeights& layer = model.layers[il];
    ggml_tensor* x = RmsNorm(ctx, residual, layer.attn_norm, p.rms_eps);
    ggml_tensor *q, *k, *v;  // [head_dim, heads, n_tokens]
    if (layer.wqkv.weight != nullptr) {
      ggml_tensor* qkv = Linear(ctx, layer.wqkv, nullptr, x);
      const size_t head_bytes = p.head_dim * sizeof(float);
      const auto heads = [&](int first, int n, ggml_tensor* bias) {
        ggml_tensor* part = ggml_view_3d(ctx, qkv, p.head_dim, n, n_tokens, head_bytes, qkv->nb[1], head_bytes * first);
        return bias == nullptr ? part : ggml_add(ctx, part, ggml_reshape_2d(ctx, bias, p.head_dim, n));
      };
      q = heads(0, p.n_heads, layer.bq);
      k = heads(p.n_heads, p.n_kv_heads, layer.bk);
      v = heads(p.n_heads + p.n_kv_heads, p.n_kv_heads, layer.bv);
    } else {
      const auto heads = [&](const Matrix& matrix, ggml_tensor* bias, int n) {
        return ggml_reshape_3d(ctx, Linear(ctx, matrix, bias, x), p.head_dim, n, n_tokens);
      };
      q = heads(layer.wq, layer.bq, p.n_heads);
      k = heads(layer.wk, layer.bk, p.n_kv_heads);
      v = heads(layer.wv, layer.bv, p.n_kv_heads);
    }
    q = rope(q);
    k = rope(k);
    if (calibration != nullptr) {
      q = ByHead(ctx, calibration->query_matrices(il), p.n_kv_heads, q);
      k = ByHead(ctx, calibration->key_matrices(il), p.n_kv_heads, k);
    }

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
    if (layer.ffn_gate_up.weight != nullptr) {
      x = ggml_swiglu(ctx, Linear(ctx, layer.ffn_gate_up, nullptr, x));
    } else {
      ggml_tensor* up = Linear(ctx, layer.ffn_up, nullptr, x);
      x = ggml_swiglu_split(ctx, Linear(ctx, layer.ffn_gate, nullptr, x), up);
    }
    residual = ggml_add(ctx, Linear(ctx, layer.ffn_down, nullptr, x), residual);
  }
  logits_ = Linear(ctx, model.output, nullptr, RmsNorm(ctx, residual, model.output_norm, p.rms_eps));
  ggml_set_output(logits_);
  ggml_build_forward_expand(graph_, logits_);

  allocator_.reset(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
  QKV_CHECK(ggml_gallocr_alloc_graph(allocator_.get(), graph_));
}

Rope RopeOf(const Model::Internal& model) {
  const HyperParams& p = model.params;
  Rope rope{.pairs = Rope::Pairs::kInterleaved, .frequencies = {}};
  for (int i = 0; i < p.rope_dims / 2; ++i) {
    const double factor = model.rope_factors == nullptr ? 1 : static_cast<const float*>(model.rope_factors->data)[i];
    rope.frequencies.push_back(std::pow(double{p.rope_base}, -2.0 * i / p.rope_dims) * p.rope_scale / factor);
  }
  return rope;
}

}  // namespace qkv
