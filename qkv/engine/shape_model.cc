// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/shape_model.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "qkv/base/fd.h"
#include "qkv/codec/half.h"
#include "qkv/engine/model_internal.h"

namespace qkv {
namespace {

// Llama 2 7B: Touvron et al., arXiv:2307.09288; Llama 3.2 1B: its model card. "tiny" is for tests.
constexpr std::array kShapes = {
    ModelShape{"llama-2-7b", 32, 32, 32, 128, 11008, 32000, 4096, 10000.0f, false},
    ModelShape{"llama-3.2-1b", 16, 32, 8, 64, 8192, 128256, 131072, 500000.0f, true},
    ModelShape{"tiny", 2, 4, 2, 32, 128, 512, 4096, 10000.0f, true},
};

struct Q4_0Block {  // of ggml: 32 weights
  uint16_t scale;
  uint8_t codes[16];
};
static_assert(sizeof(Q4_0Block) == 18);

void SetVocabulary(gguf_context* gguf, int n_vocab) {
  enum : int32_t { kNormal = 1, kUnknown = 2, kControl = 3, kByte = 6 };  // llama_token_type
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> types = {kUnknown, kControl, kControl};
  for (int byte = 0; byte < 256; ++byte) {
    tokens.push_back(fmt::format("<0x{:02X}>", byte));
    types.push_back(kByte);
  }
  while (static_cast<int>(tokens.size()) < n_vocab) {
    tokens.push_back(fmt::format("\u2581w{}", tokens.size()));
    types.push_back(kNormal);
  }
  std::vector<const char*> names;
  for (const std::string& token : tokens) names.push_back(token.c_str());
  const std::vector<float> scores(tokens.size(), 0.0f);
  gguf_set_val_str(gguf, "tokenizer.ggml.model", "llama");
  gguf_set_arr_str(gguf, "tokenizer.ggml.tokens", names.data(), names.size());
  gguf_set_arr_data(gguf, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), scores.size());
  gguf_set_arr_data(gguf, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
  gguf_set_val_u32(gguf, "tokenizer.ggml.unknown_token_id", 0);
  gguf_set_val_u32(gguf, "tokenizer.ggml.bos_token_id", 1);
  gguf_set_val_u32(gguf, "tokenizer.ggml.eos_token_id", 2);
  gguf_set_val_bool(gguf, "tokenizer.ggml.add_bos_token", true);
}

Status WriteTensor(int fd, const ggml_tensor* tensor, size_t padding, std::mt19937_64& random) {
  const size_t bytes = ggml_nbytes(tensor);
  std::vector<std::byte> data(GGML_PAD(bytes, padding));
  if (tensor->type == GGML_TYPE_F32) {
    std::fill_n(reinterpret_cast<float*>(data.data()), bytes / sizeof(float), 1.0f);
  } else {
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
      const uint64_t bits = random();
      std::memcpy(data.data() + i, &bits, 8);
    }
    // Codes are uniform over -8..7, whose RMS is 4.64, so outputs have about the size of the inputs.
    const uint16_t scale = HalfFromFloat(1.0f / (4.64f * std::sqrt(static_cast<float>(tensor->ne[0]))));
    for (size_t i = 0; i < bytes; i += sizeof(Q4_0Block)) std::memcpy(data.data() + i, &scale, sizeof scale);
  }
  for (size_t done = 0; done < data.size();) {
    const ssize_t n = ::write(fd, data.data() + done, data.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError("write");
    done += static_cast<size_t>(n);
  }
  return {};
}

}  // namespace

std::span<const ModelShape> ModelShapes() {
  return kShapes;
}

Result<ModelShape> FindModelShape(std::string_view name) {
  std::string known;
  for (const ModelShape& shape : kShapes) {
    if (shape.name == name) return shape;
    known.append(known.empty() ? "" : ", ").append(shape.name);
  }
  return Err(Code::kInvalidArgument, "unknown shape '{}', expected one of {}", name, known);
}

Status WriteShapeModel(const ModelShape& shape, const std::string& path) {
  const int64_t n_embd = int64_t{shape.n_heads} * shape.head_dim;
  const int64_t n_kv = int64_t{shape.n_kv_heads} * shape.head_dim;
  std::unique_ptr<gguf_context, GgufDeleter> gguf(gguf_init_empty());
  const size_t max_tensors = static_cast<size_t>(shape.n_layers) * 9 + 3;
  std::unique_ptr<ggml_context, GgmlDeleter> context(ggml_init({ggml_tensor_overhead() * max_tensors, nullptr, true}));

  gguf_set_val_str(gguf.get(), "general.architecture", "llama");
  gguf_set_val_str(gguf.get(), "general.name", fmt::format("{} shape, random weights", shape.name).c_str());
  gguf_set_val_u32(gguf.get(), "llama.context_length", shape.n_ctx);
  gguf_set_val_u32(gguf.get(), "llama.embedding_length", static_cast<uint32_t>(n_embd));
  gguf_set_val_u32(gguf.get(), "llama.block_count", shape.n_layers);
  gguf_set_val_u32(gguf.get(), "llama.feed_forward_length", shape.n_ff);
  gguf_set_val_u32(gguf.get(), "llama.attention.head_count", shape.n_heads);
  gguf_set_val_u32(gguf.get(), "llama.attention.head_count_kv", shape.n_kv_heads);
  gguf_set_val_u32(gguf.get(), "llama.rope.dimension_count", shape.head_dim);
  gguf_set_val_u32(gguf.get(), "llama.vocab_size", shape.n_vocab);
  gguf_set_val_f32(gguf.get(), "llama.attention.layer_norm_rms_epsilon", 1e-5f);
  gguf_set_val_f32(gguf.get(), "llama.rope.freq_base", shape.rope_base);
  gguf_set_val_u32(gguf.get(), "general.file_type", LLAMA_FTYPE_MOSTLY_Q4_0);
  SetVocabulary(gguf.get(), shape.n_vocab);

  std::vector<ggml_tensor*> tensors;
  const auto add = [&](const std::string& name, ggml_type type, int64_t ne0, int64_t ne1) {
    ggml_tensor* tensor =
        ne1 == 1 ? ggml_new_tensor_1d(context.get(), type, ne0) : ggml_new_tensor_2d(context.get(), type, ne0, ne1);
    ggml_set_name(tensor, name.c_str());
    gguf_add_tensor(gguf.get(), tensor);
    tensors.push_back(tensor);
  };
  add("token_embd.weight", GGML_TYPE_Q4_0, n_embd, shape.n_vocab);
  add("output_norm.weight", GGML_TYPE_F32, n_embd, 1);
  if (!shape.tied_embedding) add("output.weight", GGML_TYPE_Q4_0, n_embd, shape.n_vocab);
  for (int il = 0; il < shape.n_layers; ++il) {
    const auto name = [il](const char* part) { return fmt::format("blk.{}.{}.weight", il, part); };
    add(name("attn_norm"), GGML_TYPE_F32, n_embd, 1);
    add(name("attn_q"), GGML_TYPE_Q4_0, n_embd, n_embd);
    add(name("attn_k"), GGML_TYPE_Q4_0, n_embd, n_kv);
    add(name("attn_v"), GGML_TYPE_Q4_0, n_embd, n_kv);
    add(name("attn_output"), GGML_TYPE_Q4_0, n_embd, n_embd);
    add(name("ffn_norm"), GGML_TYPE_F32, n_embd, 1);
    add(name("ffn_gate"), GGML_TYPE_Q4_0, n_embd, shape.n_ff);
    add(name("ffn_up"), GGML_TYPE_Q4_0, n_embd, shape.n_ff);
    add(name("ffn_down"), GGML_TYPE_Q4_0, shape.n_ff, n_embd);
  }

  const auto write = [&]() -> Status {
    if (!gguf_write_to_file(gguf.get(), path.c_str(), /*only_meta=*/true)) return ErrnoError("create");
    const Fd fd(::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
    if (!fd.valid()) return ErrnoError("open");
    std::mt19937_64 random(1);
    for (const ggml_tensor* tensor : tensors) {
      QKV_RETURN_IF_ERROR(WriteTensor(fd.get(), tensor, gguf_get_alignment(gguf.get()), random));
    }
    return {};
  };
  if (auto status = write(); !status) {
    ::unlink(path.c_str());
    return tl::unexpected(Prefixed(fmt::format("write '{}'", path), status.error()));
  }
  return {};
}

}  // namespace qkv
