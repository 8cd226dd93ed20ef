// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For tests: a Llama-architecture GGUF of a megabyte, written in milliseconds, in as many variants as there are ways for
// two models to differ. Weights are random but for one thing: V and the output projection hand the embeddings of what
// was read on, so that the model says again what its context says most. A secret marker in a context comes out as its
// answer; one of another context would, if that were ever read.

#include <ggml.h>
#include <gguf.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace qkv::testing {

struct TinyModel {
  uint32_t weights_seed = 1;
  ggml_type type = GGML_TYPE_F32;  // of the matrices
  float rope_base = 10000;
  float norm_eps = 1e-5f;
  int n_layers = 2;
  int n_heads = 4;
  int n_kv_heads = 2;
  int n_embd = 128;
  int n_ff = 128;
  bool other_tokenizer = false;
  // K's first two channels of every head are this many times as large, Q's as small: the scores are the same, bit for bit
  // for a power of two, but nothing else of a row is left when few bits have to hold it.
  float k_outlier = 1;
  float q_scale = 1;  // of Q: how much attention depends on what is read
  std::string chat_template;
  std::string name = "tiny";

  static constexpr int kMarkers = 64;
  static constexpr int kFirstMarker = 3 + 256;  // behind <unk>, <s>, </s> and the bytes
  static constexpr int kVocab = 320 + kMarkers;
  // The text of marker i: one token.
  static std::string Marker(int i) { return "[marker-" + std::to_string(100 + i) + "]"; }
};

// Any failure is a test failure.
inline void WriteTinyModel(const TinyModel& m, const std::string& path) {
  const int head_dim = m.n_embd / m.n_heads;
  const int n_kv = m.n_kv_heads * head_dim;
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> gguf(gguf_init_empty(), gguf_free);
  gguf_set_val_str(gguf.get(), "general.architecture", "llama");
  gguf_set_val_str(gguf.get(), "general.name", m.name.c_str());
  gguf_set_val_u32(gguf.get(), "llama.context_length", 8192);
  gguf_set_val_u32(gguf.get(), "llama.embedding_length", m.n_embd);
  gguf_set_val_u32(gguf.get(), "llama.block_count", m.n_layers);
  gguf_set_val_u32(gguf.get(), "llama.feed_forward_length", m.n_ff);
  gguf_set_val_u32(gguf.get(), "llama.attention.head_count", m.n_heads);
  gguf_set_val_u32(gguf.get(), "llama.attention.head_count_kv", m.n_kv_heads);
  gguf_set_val_u32(gguf.get(), "llama.rope.dimension_count", head_dim);
  gguf_set_val_f32(gguf.get(), "llama.rope.freq_base", m.rope_base);
  gguf_set_val_f32(gguf.get(), "llama.attention.layer_norm_rms_epsilon", m.norm_eps);
  gguf_set_val_u32(gguf.get(), "llama.vocab_size", TinyModel::kVocab);

  // A SentencePiece vocabulary: control tokens, bytes, markers, filler words.
  std::vector<std::string> pieces = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> types = {2, 3, 3};  // unknown, control
  for (int i = 0; i < 256; ++i) {
    char text[8];
    std::snprintf(text, sizeof text, "<0x%02X>", i);
    pieces.emplace_back(text);
    types.push_back(6);  // byte
  }
  for (int i = 0; i < TinyModel::kMarkers; ++i) {
    pieces.push_back(TinyModel::Marker(i));
    types.push_back(4);  // user-defined: found whole wherever it stands
  }
  while (static_cast<int>(pieces.size()) < TinyModel::kVocab) {
    pieces.push_back((m.other_tokenizer ? "\xe2\x96\x81term" : "\xe2\x96\x81word") + std::to_string(pieces.size()));
    types.push_back(1);  // normal
  }
  std::vector<const char*> pointers;
  std::vector<float> scores;
  for (size_t i = 0; i < pieces.size(); ++i) {
    pointers.push_back(pieces[i].c_str());
    scores.push_back(-static_cast<float>(i));
  }
  gguf_set_val_str(gguf.get(), "tokenizer.ggml.model", "llama");
  gguf_set_arr_str(gguf.get(), "tokenizer.ggml.tokens", pointers.data(), pointers.size());
  gguf_set_arr_data(gguf.get(), "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), scores.size());
  gguf_set_arr_data(gguf.get(), "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
  gguf_set_val_u32(gguf.get(), "tokenizer.ggml.bos_token_id", 1);
  gguf_set_val_u32(gguf.get(), "tokenizer.ggml.eos_token_id", 2);
  gguf_set_val_u32(gguf.get(), "tokenizer.ggml.unknown_token_id", 0);
  if (!m.chat_template.empty()) gguf_set_val_str(gguf.get(), "tokenizer.chat_template", m.chat_template.c_str());

  const size_t room = size_t{16} << 20;
  const std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors(ggml_init({room, nullptr, false}), ggml_free);
  ASSERT_NE(tensors, nullptr);
  std::mt19937 random(m.weights_seed);
  const auto add = [&](const std::string& name, int64_t ne0, int64_t ne1, auto value) {
    std::vector<float> values(static_cast<size_t>(ne0 * ne1));
    for (int64_t row = 0; row < ne1; ++row) {
      for (int64_t column = 0; column < ne0; ++column) values[row * ne0 + column] = value(row, column);
    }
    const ggml_type type = ne1 == 1 ? GGML_TYPE_F32 : m.type;
    ggml_tensor* tensor =
        ne1 == 1 ? ggml_new_tensor_1d(tensors.get(), type, ne0) : ggml_new_tensor_2d(tensors.get(), type, ne0, ne1);
    ggml_set_name(tensor, name.c_str());
    if (type == GGML_TYPE_F32) {
      std::memcpy(tensor->data, values.data(), values.size() * sizeof(float));
    } else {
      ggml_quantize_chunk(type, values.data(), tensor->data, 0, ne1, ne0, nullptr);
    }
    gguf_add_tensor(gguf.get(), tensor);
  };
  const auto noise = [&](float scale) {
    return [&random, scale](int64_t, int64_t) {
      return scale * (static_cast<float>(random() >> 8) / (1 << 23) - 1);  // the same on every machine
    };
  };
  const auto ones = [](int64_t, int64_t) { return 1.0f; };
  add("token_embd.weight", m.n_embd, TinyModel::kVocab, noise(1));
  add("output_norm.weight", m.n_embd, 1, ones);
  for (int il = 0; il < m.n_layers; ++il) {
    const std::string blk = "blk." + std::to_string(il) + ".";
    add(blk + "attn_norm.weight", m.n_embd, 1, ones);
    const auto scaled = [&, weight = noise(0.05f)](float scale, float outlier) {
      return
          [=](int64_t row, int64_t column) { return scale * (row % head_dim < 2 ? outlier : 1) * weight(row, column); };
    };
    add(blk + "attn_q.weight", m.n_embd, m.n_embd, scaled(m.q_scale, 1 / m.k_outlier));
    add(blk + "attn_k.weight", m.n_embd, n_kv, scaled(1, m.k_outlier));
    // V: the first n_kv channels of what was read. Output: each goes back to where it came from, three times as loud.
    add(blk + "attn_v.weight", m.n_embd, n_kv,
        [&](int64_t row, int64_t column) { return row == column ? 1.0f : 0.0f; });
    const int group = m.n_heads / m.n_kv_heads;
    add(blk + "attn_output.weight", m.n_embd, m.n_embd, [&](int64_t row, int64_t column) {
      const int64_t head = column / head_dim;
      const bool speaks = head % group == 0 && row == head / group * head_dim + column % head_dim;
      return speaks ? 3.0f : 0.0f;
    });
    add(blk + "ffn_norm.weight", m.n_embd, 1, ones);
    add(blk + "ffn_gate.weight", m.n_embd, m.n_ff, noise(0.05f));
    add(blk + "ffn_up.weight", m.n_embd, m.n_ff, noise(0.05f));
    add(blk + "ffn_down.weight", m.n_ff, m.n_embd, noise(0.05f));
  }
  ASSERT_TRUE(gguf_write_to_file(gguf.get(), path.c_str(), false)) << path;
}

}  // namespace qkv::testing
