// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/peer.h"

#include <llama.h>

#include <algorithm>

namespace qkv {
namespace {

void IgnoreLog(ggml_log_level, const char*, void*) {}

Result<ggml_type> CacheType(const std::string& name) {
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
    if (name == ggml_type_name(type)) return type;
  }
  return Err(Code::kInvalidArgument, "peer cache type '{}' is not one of f16, q8_0, q4_0", name);
}

}  // namespace

struct Peer::Impl {
  std::shared_ptr<llama_model> model;
  llama_context* context = nullptr;
  int n_batch = 0;
  int n_vocab = 0;
  std::vector<float> logits;
  std::vector<float> all_logits;

  ~Impl() {
    if (context != nullptr) llama_free(context);
  }
};

Peer::Peer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Peer::~Peer() = default;
std::span<const float> Peer::logits() const {
  return impl_->logits;
}
std::span<const float> Peer::all_logits() const {
  return impl_->all_logits;
}

Result<std::unique_ptr<Peer>> Peer::Load(const std::string& path) {
  llama_log_set(IgnoreLog, nullptr);
  llama_backend_init();
  auto impl = std::make_unique<Impl>();
  impl->model.reset(llama_model_load_from_file(path.c_str(), llama_model_default_params()), [](llama_model* model) {
    if (model != nullptr) llama_model_free(model);
  });
  if (impl->model == nullptr) return Err(Code::kInvalidArgument, "libllama cannot load '{}'", path);
  impl->n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(impl->model.get()));
  return std::unique_ptr<Peer>(new Peer(std::move(impl)));
}

std::unique_ptr<Peer> Peer::Twin() const {
  auto impl = std::make_unique<Impl>();
  impl->model = impl_->model;
  impl->n_vocab = impl_->n_vocab;
  return std::unique_ptr<Peer>(new Peer(std::move(impl)));
}

Status Peer::Reset(const PeerOptions& options) {
  QKV_ASSIGN_OR_RETURN(const ggml_type type, CacheType(options.cache_type));
  llama_context_params params = llama_context_default_params();
  params.n_ctx = options.n_ctx;
  params.n_batch = options.n_batch;
  params.n_ubatch = options.n_batch;
  params.n_threads = options.n_threads;
  params.n_threads_batch = options.n_threads;
  params.type_k = type;
  params.type_v = type;
  params.flash_attn_type = options.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.no_perf = true;
  params.n_seq_max = 2;  // FillWithCopies needs a second one; both in one buffer, so that it costs nothing
  params.kv_unified = true;
  if (impl_->context != nullptr) llama_free(std::exchange(impl_->context, nullptr));
  impl_->context = llama_init_from_model(impl_->model.get(), params);
  if (impl_->context == nullptr)
    return Err(Code::kExhausted, "libllama cannot make a context of {} tokens", options.n_ctx);
  impl_->n_batch = options.n_batch;
  return {};
}

Status Peer::Forward(std::span<const Token> tokens, bool all_logits) {
  Impl& p = *impl_;
  p.all_logits.clear();
  const llama_pos first = llama_memory_seq_pos_max(llama_get_memory(p.context), 0) + 1;
  llama_batch batch = llama_batch_init(p.n_batch, 0, 1);
  int32_t failed = 0;
  for (size_t done = 0; done < tokens.size() && failed == 0; done += batch.n_tokens) {
    batch.n_tokens = static_cast<int32_t>(std::min<size_t>(tokens.size() - done, p.n_batch));
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
      batch.token[i] = tokens[done + i];
      batch.pos[i] = first + static_cast<llama_pos>(done) + i;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = all_logits || done + i + 1 == tokens.size();
    }
    failed = llama_decode(p.context, batch);
    if (failed != 0) break;
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
      if (!batch.logits[i]) continue;
      const float* row = llama_get_logits_ith(p.context, i);
      if (all_logits) p.all_logits.insert(p.all_logits.end(), row, row + p.n_vocab);
      if (done + i + 1 == tokens.size()) p.logits.assign(row, row + p.n_vocab);
    }
  }
  llama_batch_free(batch);
  if (failed != 0) return Err(Code::kInternal, "llama_decode failed with {}", failed);
  return {};
}

Result<std::vector<uint8_t>> Peer::SaveState() {
  std::vector<uint8_t> state(llama_state_seq_get_size(impl_->context, 0));
  const size_t n = llama_state_seq_get_data(impl_->context, state.data(), state.size(), 0);
  if (n == 0) return Err(Code::kInternal, "libllama could not save its state");
  state.resize(n);
  return state;
}

Status Peer::RestoreState(std::span<const uint8_t> state) {
  if (llama_state_seq_set_data(impl_->context, state.data(), state.size(), 0) == 0) {
    return Err(Code::kInternal, "libllama could not restore its state");
  }
  return {};
}

Status Peer::FillWithCopies(std::span<const Token> tokens, int depth) {
  constexpr llama_seq_id kCopy = 1;
  const int n_copied = static_cast<int>(tokens.size());
  QKV_RETURN_IF_ERROR(Forward(tokens.first(std::min(n_copied, depth))));
  if (depth <= n_copied) return {};
  QKV_ASSIGN_OR_RETURN(const std::vector<uint8_t> state, SaveState());
  llama_memory_t memory = llama_get_memory(impl_->context);
  for (int position = n_copied; position < depth; position += n_copied) {
    if (llama_state_seq_set_data(impl_->context, state.data(), state.size(), kCopy) == 0) {
      return Err(Code::kInternal, "libllama could not restore its state at token {}", position);
    }
    llama_memory_seq_rm(memory, kCopy, std::min(n_copied, depth - position), -1);
    llama_memory_seq_add(memory, kCopy, 0, -1, position);
    llama_memory_seq_cp(memory, kCopy, 0, -1, -1);
    llama_memory_seq_rm(memory, kCopy, -1, -1);
  }
  return {};
}

Status Peer::Truncate(int n_tokens) {
  if (!llama_memory_seq_rm(llama_get_memory(impl_->context), 0, n_tokens, -1)) {
    return Err(Code::kInternal, "libllama could not drop tokens from {} on", n_tokens);
  }
  return {};
}

Status WriteRequantizedModel(const std::string& path, const std::string& type, const std::string& to) {
  static constexpr std::pair<std::string_view, llama_ftype> kTypes[] = {{"f32", LLAMA_FTYPE_ALL_F32},
                                                                        {"q4_0", LLAMA_FTYPE_MOSTLY_Q4_0},
                                                                        {"q4_1", LLAMA_FTYPE_MOSTLY_Q4_1},
                                                                        {"q8_0", LLAMA_FTYPE_MOSTLY_Q8_0}};
  const auto* known = std::ranges::find(kTypes, type, &std::pair<std::string_view, llama_ftype>::first);
  if (known == std::end(kTypes)) {
    return Err(Code::kInvalidArgument, "weights '{}', expected f32, q4_0, q4_1 or q8_0", type);
  }
  llama_log_set(IgnoreLog, nullptr);
  llama_backend_init();
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = known->second;
  params.allow_requantize = true;
  if (llama_model_quantize(path.c_str(), to.c_str(), &params) != 0) {
    return Err(Code::kInternal, "libllama could not write '{}' as {}", path, type);
  }
  return {};
}

}  // namespace qkv
