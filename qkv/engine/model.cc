// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/model.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "qkv/engine/digest_cache.h"
#include "qkv/engine/model_internal.h"

namespace qkv {
namespace {

// Reads typed values of a GGUF by key; a value of the wrong type counts as absent.
class Keys {
 public:
  Keys(const gguf_context* gguf, std::string prefix) : gguf_(gguf), prefix_(std::move(prefix)) {}

  std::optional<double> Number(const std::string& key) const {
    const int64_t id = gguf_find_key(gguf_, (prefix_ + key).c_str());
    if (id < 0) return std::nullopt;
    switch (gguf_get_kv_type(gguf_, id)) {
      case GGUF_TYPE_UINT8: return gguf_get_val_u8(gguf_, id);
      case GGUF_TYPE_UINT16: return gguf_get_val_u16(gguf_, id);
      case GGUF_TYPE_UINT32: return gguf_get_val_u32(gguf_, id);
      case GGUF_TYPE_INT32: return gguf_get_val_i32(gguf_, id);
      case GGUF_TYPE_UINT64: return static_cast<double>(gguf_get_val_u64(gguf_, id));
      case GGUF_TYPE_INT64: return static_cast<double>(gguf_get_val_i64(gguf_, id));
      case GGUF_TYPE_FLOAT32: return gguf_get_val_f32(gguf_, id);
      case GGUF_TYPE_FLOAT64: return gguf_get_val_f64(gguf_, id);
      default: return std::nullopt;
    }
  }
  std::string String(const std::string& key) const {
    const int64_t id = gguf_find_key(gguf_, (prefix_ + key).c_str());
    return id >= 0 && gguf_get_kv_type(gguf_, id) == GGUF_TYPE_STRING ? gguf_get_val_str(gguf_, id) : "";
  }
  // A required whole number within [low, high].
  Result<int> Count(const std::string& key, double low, double high, std::optional<int> fallback = {}) const {
    const std::optional<double> value = Number(key);
    if (!value && fallback) return *fallback;
    if (!value) return Err(Code::kInvalidArgument, "GGUF key '{}{}' is missing or not a number", prefix_, key);
    if (!(*value >= low && *value <= high)) {
      return Err(Code::kInvalidArgument, "GGUF key '{}{}' is {}, expected {} to {}", prefix_, key, *value, low, high);
    }
    return static_cast<int>(*value);
  }

 private:
  const gguf_context* gguf_;
  std::string prefix_;
};

std::string Hex(const XXH128_hash_t& hash) {
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::string Hex(const FileDigest& digest) {
  std::string text;
  for (const uint8_t byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

// Over keys and values of everything that decides how text becomes tokens.
std::string TokenizerDigest(const gguf_context* gguf) {
  XXH3_state_t* state = XXH3_createState();
  XXH3_128bits_reset(state);
  for (int64_t id = 0; id < gguf_get_n_kv(gguf); ++id) {
    const std::string_view key = gguf_get_key(gguf, id);
    if (!key.starts_with("tokenizer.") || key.starts_with("tokenizer.chat_template")) continue;
    XXH3_128bits_update(state, key.data(), key.size());
    const gguf_type type = gguf_get_kv_type(gguf, id);
    if (type == GGUF_TYPE_STRING) {
      const std::string_view text = gguf_get_val_str(gguf, id);
      XXH3_128bits_update(state, text.data(), text.size());
    } else if (type != GGUF_TYPE_ARRAY) {
      static constexpr size_t kScalarBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};  // by gguf_type
      XXH3_128bits_update(state, gguf_get_val_data(gguf, id), kScalarBytes[type]);
    } else {
      const size_t n = gguf_get_arr_n(gguf, id);
      const gguf_type item = gguf_get_arr_type(gguf, id);
      if (item == GGUF_TYPE_STRING) {
        for (size_t i = 0; i < n; ++i) {
          const char* text = gguf_get_arr_str(gguf, id, i);
          XXH3_128bits_update(state, text, std::strlen(text) + 1);
        }
      } else if (item == GGUF_TYPE_INT32 || item == GGUF_TYPE_UINT32 || item == GGUF_TYPE_FLOAT32) {
        XXH3_128bits_update(state, gguf_get_arr_data(gguf, id), n * 4);
      }
    }
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state);
  XXH3_freeState(state);
  return Hex(hash);
}

Result<HyperParams> ReadParams(const gguf_context* gguf) {
  HyperParams p;
  p.architecture = Keys(gguf, "").String("general.architecture");
  if (p.architecture.empty()) return Err(Code::kInvalidArgument, "GGUF key 'general.architecture' is missing");
  if (p.architecture != "llama") {
    return Err(Code::kIncompatible, "architecture '{}' is not supported (this version runs: llama)", p.architecture);
  }
  p.name = Keys(gguf, "").String("general.name");
  const Keys keys(gguf, p.architecture + ".");
  if (keys.Number("expert_count").value_or(0) > 0) {
    return Err(Code::kIncompatible, "mixture-of-experts models ({} experts) are not supported",
               *keys.Number("expert_count"));
  }
  QKV_ASSIGN_OR_RETURN(p.n_ctx_train, keys.Count("context_length", 1, 1 << 30));
  QKV_ASSIGN_OR_RETURN(p.n_embd, keys.Count("embedding_length", 32, 1 << 20));
  QKV_ASSIGN_OR_RETURN(p.n_layers, keys.Count("block_count", 1, kMaxLayers));
  QKV_ASSIGN_OR_RETURN(p.n_ff, keys.Count("feed_forward_length", 1, 1 << 24));
  QKV_ASSIGN_OR_RETURN(p.n_heads, keys.Count("attention.head_count", 1, 4096));
  QKV_ASSIGN_OR_RETURN(p.n_kv_heads, keys.Count("attention.head_count_kv", 1, kMaxKvHeads, p.n_heads));
  QKV_ASSIGN_OR_RETURN(p.head_dim, keys.Count("attention.key_length", 1, 4096, p.n_embd / p.n_heads));
  QKV_ASSIGN_OR_RETURN(const int v_dim, keys.Count("attention.value_length", 1, 4096, p.head_dim));
  QKV_ASSIGN_OR_RETURN(p.rope_dims, keys.Count("rope.dimension_count", 2, p.head_dim, p.head_dim));
  p.rms_eps = static_cast<float>(keys.Number("attention.layer_norm_rms_epsilon").value_or(1e-5));
  p.rope_base = static_cast<float>(keys.Number("rope.freq_base").value_or(10000.0));
  const std::string scaling = keys.String("rope.scaling.type");
  if (!scaling.empty() && scaling != "none" && scaling != "linear") {
    return Err(Code::kIncompatible, "RoPE scaling '{}' is not supported (this version runs: none, linear)", scaling);
  }
  double factor = keys.Number("rope.scaling.factor").value_or(keys.Number("rope.scale_linear").value_or(1.0));
  if (scaling == "none" || factor == 0) factor = 1;
  p.rope_scale = static_cast<float>(1.0 / factor);
  if (v_dim != p.head_dim) {
    return Err(Code::kIncompatible, "K and V head dims differ ({} and {}), which is not supported", p.head_dim, v_dim);
  }
  if (p.n_heads % p.n_kv_heads != 0) {
    return Err(Code::kInvalidArgument, "{} attention heads are not a multiple of {} KV heads", p.n_heads, p.n_kv_heads);
  }
  if (p.n_heads / p.n_kv_heads > 16) {
    return Err(Code::kIncompatible, "{} query heads per KV head are not supported (at most 16)",
               p.n_heads / p.n_kv_heads);
  }
  if (auto status = ValidateGeometry({p.n_layers, p.n_kv_heads, p.head_dim}); !status) {
    return Err(Code::kIncompatible, "{}", status.error().message);
  }
  return p;
}

// Finds tensors by name and checks their shape; the first problem is kept.
class Tensors {
 public:
  explicit Tensors(ggml_context* context) : context_(context) {}

  ggml_tensor* Get(const std::string& name, int64_t ne0, int64_t ne1 = 1, bool required = true) {
    ggml_tensor* tensor = ggml_get_tensor(context_, name.c_str());
    if (tensor == nullptr) {
      if (required && status_) status_ = Err(Code::kInvalidArgument, "tensor '{}' is missing", name);
      return nullptr;
    }
    if ((tensor->ne[0] != ne0 || tensor->ne[1] != ne1 || tensor->ne[2] != 1 || tensor->ne[3] != 1) && status_) {
      status_ = Err(Code::kInvalidArgument, "tensor '{}' has shape [{}, {}], expected [{}, {}]", name, tensor->ne[0],
                    tensor->ne[1], ne0, ne1);
    }
    return tensor;
  }
  const Status& status() const { return status_; }

 private:
  ggml_context* context_;
  Status status_;
};

void IgnoreLog(ggml_log_level, const char*, void*) {}

// Opens and checks that it is a regular file that begins like a GGUF, so that the errors name what a user can mend.
Result<Fd> OpenGguf(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return ErrnoError("open");
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoError("fstat");
  if (!S_ISREG(info.st_mode)) return Err(Code::kInvalidArgument, "not a regular file");
  char magic[4] = {};
  if (info.st_size < 4 || ::pread(fd.get(), magic, 4, 0) != 4 || std::memcmp(magic, "GGUF", 4) != 0) {
    return Err(Code::kInvalidArgument, "not a GGUF file (it does not begin with 'GGUF')");
  }
  return fd;
}

// Replaces matrices by packed ones, where there are any. The embedding's rows are read as they lie in the file.
Status Repack(Model::Internal& m, Fd shared) {
  std::vector<RepackedWeights::Group> groups = {{m.output.weight}};
  for (LayerWeights& layer : m.layers) {
    groups.push_back({layer.wq.weight, layer.wk.weight, layer.wv.weight});
    groups.push_back({layer.wo.weight});
    groups.push_back({layer.ffn_gate.weight, layer.ffn_up.weight});
    groups.push_back({layer.ffn_down.weight});
  }
  QKV_ASSIGN_OR_RETURN(m.repacked, RepackedWeights::Create(groups, std::move(shared)));
  size_t next = 0;
  const auto replace = [&](Matrix& matrix) {
    if (const Matrix* packed = m.repacked->Packed(next++)) matrix = *packed;
  };
  replace(m.output);
  for (LayerWeights& layer : m.layers) {
    replace(layer.wqkv);
    replace(layer.wo);
    replace(layer.ffn_gate_up);
    replace(layer.ffn_down);
  }
  // What was packed is not read from the file again; what is, such as the embedding, comes back from the page cache.
  if (m.repacked->bytes() > 0) (void)::madvise(m.file.data(), m.file.size(), MADV_DONTNEED);
  return {};
}

FileDigest Canonical(const XXH128_hash_t& hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  FileDigest digest;
  std::memcpy(digest.data(), canonical.digest, digest.size());
  return digest;
}

// Of all bytes behind the metadata, from the cache if this very version of the file is known there.
FileDigest DataDigest(const Model::Internal& m) {
  const std::string cache = DigestCacheDirectory();
  const auto version = VersionOf(m.fd);
  if (version) {
    if (const auto known = FindDigest(cache, *version)) return *known;
  }
  const size_t data_offset = gguf_get_data_offset(m.gguf.get());
  const FileDigest digest = Canonical(XXH3_128bits(m.file.data() + data_offset, m.file.size() - data_offset));
  // Not if it was written to meanwhile.
  if (const auto after = VersionOf(m.fd); version && after && *version == *after) {
    RememberDigest(cache, *version, digest);
  }
  return digest;
}

// What the bytes are is part of it: the same bytes under other names, types or shapes are other weights.
FileDigest WeightsDigest(const Model::Internal& m) {
  std::string text;
  for (const uint8_t byte : DataDigest(m)) text += static_cast<char>(byte);
  for (int64_t i = 0; i < gguf_get_n_tensors(m.gguf.get()); ++i) {
    const char* name = gguf_get_tensor_name(m.gguf.get(), i);
    const ggml_tensor* tensor = ggml_get_tensor(m.tensors.get(), name);
    text += fmt::format("\n{} {} [{}, {}, {}, {}] {}", name, ggml_type_name(tensor->type), tensor->ne[0], tensor->ne[1],
                        tensor->ne[2], tensor->ne[3], gguf_get_tensor_offset(m.gguf.get(), i));
  }
  return Canonical(XXH3_128bits(text.data(), text.size()));
}

}  // namespace

Model::Model(std::unique_ptr<Internal> internal) : internal_(std::move(internal)) {}
Model::~Model() = default;
const std::string& Model::path() const {
  return internal_->path;
}
const HyperParams& Model::params() const {
  return internal_->params;
}
Geometry Model::geometry() const {
  return {internal_->params.n_layers, internal_->params.n_kv_heads, internal_->params.head_dim};
}

Result<std::shared_ptr<const Model>> Model::Load(const std::string& path, PackedWeights packed) {
  const auto fail = [&](Error error) { return Prefixed(fmt::format("model '{}'", path), std::move(error)); };
  auto m = std::make_unique<Internal>();
  m->path = path;

  auto fd = OpenGguf(path);
  if (!fd) return fail(fd.error());
  const auto file_bytes = fd->SizeBytes();
  if (!file_bytes) return fail(file_bytes.error());
  auto mapping = Mapping::Map(*fd, Mapping::Access::kReadOnly, 0, *file_bytes);
  if (!mapping) return fail(mapping.error());
  m->file = *std::move(mapping);
  m->fd = *std::move(fd);

  // Both libraries log through these process-wide hooks; their messages repeat what our errors say better.
  ggml_log_set(IgnoreLog, nullptr);
  llama_log_set(IgnoreLog, nullptr);
  llama_backend_init();

  ggml_context* tensors = nullptr;
  m->gguf.reset(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, /*ctx=*/&tensors}));
  m->tensors.reset(tensors);
  if (!m->gguf) return fail({Code::kInvalidArgument, "the GGUF header or its metadata is broken or truncated", {}});

  auto params = ReadParams(m->gguf.get());
  if (!params) return fail(params.error());
  m->params = *std::move(params);
  HyperParams& p = m->params;

  const size_t data_offset = gguf_get_data_offset(m->gguf.get());
  m->buffer.reset(ggml_backend_cpu_buffer_from_ptr(m->file.data(), m->file.size()));
  for (int64_t i = 0; i < gguf_get_n_tensors(m->gguf.get()); ++i) {
    ggml_tensor* tensor = ggml_get_tensor(tensors, gguf_get_tensor_name(m->gguf.get(), i));
    const size_t offset = gguf_get_tensor_offset(m->gguf.get(), i);
    const size_t bytes = ggml_nbytes(tensor);
    if (offset > m->file.size() || data_offset > m->file.size() - offset ||
        bytes > m->file.size() - offset - data_offset) {
      return fail({Code::kInvalidArgument,
                   fmt::format("truncated: tensor '{}' ends at byte {}, the file has {}", tensor->name,
                               data_offset + offset + bytes, m->file.size()),
                   {}});
    }
    ggml_backend_tensor_alloc(m->buffer.get(), tensor, m->file.data() + data_offset + offset);
  }

  Tensors get(tensors);
  const int64_t n_q = int64_t{p.n_heads} * p.head_dim;
  const int64_t n_kv = int64_t{p.n_kv_heads} * p.head_dim;
  ggml_tensor* embedding = ggml_get_tensor(tensors, "token_embd.weight");
  p.n_vocab = embedding != nullptr ? static_cast<int>(embedding->ne[1]) : 0;
  m->token_embedding = get.Get("token_embd.weight", p.n_embd, p.n_vocab);
  m->output_norm = get.Get("output_norm.weight", p.n_embd);
  m->output.weight = get.Get("output.weight", p.n_embd, p.n_vocab, false);
  if (m->output.weight == nullptr) m->output.weight = m->token_embedding;
  m->rope_factors = get.Get("rope_freqs.weight", p.rope_dims / 2, 1, false);
  m->layers.resize(p.n_layers);
  for (int il = 0; il < p.n_layers; ++il) {
    LayerWeights& layer = m->layers[il];
    const auto name = [il](const char* suffix) { return fmt::format("blk.{}.{}", il, suffix); };
    layer.attn_norm = get.Get(name("attn_norm.weight"), p.n_embd);
    layer.wq.weight = get.Get(name("attn_q.weight"), p.n_embd, n_q);
    layer.wk.weight = get.Get(name("attn_k.weight"), p.n_embd, n_kv);
    layer.wv.weight = get.Get(name("attn_v.weight"), p.n_embd, n_kv);
    layer.wo.weight = get.Get(name("attn_output.weight"), n_q, p.n_embd);
    layer.bq = get.Get(name("attn_q.bias"), n_q, 1, false);
    layer.bk = get.Get(name("attn_k.bias"), n_kv, 1, false);
    layer.bv = get.Get(name("attn_v.bias"), n_kv, 1, false);
    layer.bo = get.Get(name("attn_output.bias"), p.n_embd, 1, false);
    layer.ffn_norm = get.Get(name("ffn_norm.weight"), p.n_embd);
    layer.ffn_gate.weight = get.Get(name("ffn_gate.weight"), p.n_embd, p.n_ff);
    layer.ffn_up.weight = get.Get(name("ffn_up.weight"), p.n_embd, p.n_ff);
    layer.ffn_down.weight = get.Get(name("ffn_down.weight"), p.n_ff, p.n_embd);
  }
  if (!get.status()) return fail(get.status().error());
  const bool same = packed.fd.valid() && Hex(WeightsDigest(*m)) == packed.weights_digest;
  if (auto status = Repack(*m, same ? std::move(packed.fd) : Fd()); !status) return fail(status.error());

  llama_model_params vocab_params = llama_model_default_params();
  vocab_params.vocab_only = true;
  m->vocab_model.reset(llama_model_load_from_file(path.c_str(), vocab_params));
  if (!m->vocab_model) return fail({Code::kInvalidArgument, "libllama cannot read its vocabulary", {}});
  m->vocab = llama_model_get_vocab(m->vocab_model.get());
  if (llama_vocab_n_tokens(m->vocab) > p.n_vocab) {
    return fail(
        {Code::kInvalidArgument,
         fmt::format("the vocabulary has {} tokens, the embedding table {}", llama_vocab_n_tokens(m->vocab), p.n_vocab),
         {}});
  }
  if (const char* text = llama_model_chat_template(m->vocab_model.get(), nullptr)) m->chat_template = text;
  return std::shared_ptr<const Model>(new Model(std::move(m)));
}

const ModelIdentity& Model::identity() const {
  const Internal& m = *internal_;
  std::call_once(m.identity_once, [&m] {
    const HyperParams& p = m.params;
    ModelIdentity& id = m.identity;
    id.set_architecture(p.architecture);
    id.set_name(p.name);
    id.set_n_vocab(p.n_vocab);
    id.set_n_embd(p.n_embd);
    for (int il = 0; il < p.n_layers; ++il) {
      auto* layer = id.add_layers();
      layer->set_n_heads(p.n_heads);
      layer->set_n_kv_heads(p.n_kv_heads);
      layer->set_k_head_dim(p.head_dim);
      layer->set_v_head_dim(p.head_dim);
      layer->set_kind(::qkvshare::v1::LayerDims::FULL);
    }
    auto* rope = id.mutable_rope();
    rope->set_base(p.rope_base);
    rope->set_scaling(p.rope_scale == 1 ? "none" : "linear");
    rope->set_scaling_factor(1 / p.rope_scale);
    rope->set_layout(::qkvshare::v1::Rope::INTERLEAVED);
    rope->set_rotary_dims(p.rope_dims);
    rope->set_original_context(p.n_ctx_train);
    if (m.rope_factors != nullptr) {
      rope->set_factors_digest(Hex(XXH3_128bits(m.rope_factors->data, ggml_nbytes(m.rope_factors))));
    }
    m.weights_digest = WeightsDigest(m);
    id.set_weights_digest(Hex(m.weights_digest));
    id.set_norm_eps(p.rms_eps);
    id.set_tokenizer_digest(TokenizerDigest(m.gguf.get()));
    id.set_chat_template_digest(Hex(XXH3_128bits(m.chat_template.data(), m.chat_template.size())));
  });
  return m.identity;
}

const std::array<uint8_t, 16>& Model::weights_digest() const {
  identity();
  return internal_->weights_digest;
}

Result<PackedWeights> Model::ShareWeights() const {
  if (internal_->repacked->bytes() == 0) return PackedWeights{};
  QKV_ASSIGN_OR_RETURN(Fd fd, internal_->repacked->fd().Duplicate());
  return PackedWeights{std::move(fd), identity().weights_digest()};
}

}  // namespace qkv
