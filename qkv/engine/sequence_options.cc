// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/sequence_options.h"

#include <ggml.h>

namespace qkv {

Status CheckOptions(const SequenceOptions& options, const Model& model) {
  if (options.n_ctx < 1) return Err(Code::kInvalidArgument, "context size is {}, expected at least 1", options.n_ctx);
  if (options.n_threads < 1 || options.n_threads > GGML_MAX_N_THREADS) {
    return Err(Code::kInvalidArgument, "{} threads, expected 1 to {}", options.n_threads, GGML_MAX_N_THREADS);
  }
  if (options.n_batch < 1)
    return Err(Code::kInvalidArgument, "batch of {} tokens, expected at least 1", options.n_batch);
  if (!(options.refine >= 0 && options.refine <= 1))
    return Err(Code::kInvalidArgument, "refinement of tokens from a share of {} on, expected 0 to 1", options.refine);
  if ((options.kv.pair == kLayersPair) != (options.kv.layers != nullptr) ||
      (options.kv.layers != nullptr && options.kv.layers->geometry() != model.geometry())) {
    return Err(Code::kInvalidArgument, "codecs of other layers than the model's");
  }
  if (options.kv.pair.k == CodecId::kRefine4 || options.kv.pair.v == CodecId::kRefine4)
    return Err(Code::kInvalidArgument, "a refinement plane is no codec to keep a context in");
  if (options.kv.pair.k == CodecId::kBands && options.calibration == nullptr)
    return Err(Code::kInvalidArgument, "keys in codec 5/3 need the matrices of 'qkvshare calibrate' (--bal)");
  return CheckGroups(KvChoice(options.kv, options.groups));
}

}  // namespace qkv
