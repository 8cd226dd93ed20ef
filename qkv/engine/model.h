// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A Llama-architecture GGUF model: hyperparameters, weights, vocabulary. Weights are mapped from the file, which all
// processes that load it share, but for those that are packed for this CPU (repack.h): they can be handed on.
//
// Immutable after Load; one Model may serve many Sequences and threads of its process. Third-party types stay in the .cc
// files (model_internal.h is for this room only).

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "qkv/base/fd.h"
#include "qkv/card/card.h"
#include "qkv/segment/layout.h"

namespace qkv {

struct HyperParams {
  std::string architecture;
  std::string name;
  int n_vocab = 0;
  int n_ctx_train = 0;
  int n_embd = 0;
  int n_layers = 0;
  int n_heads = 0;
  int n_kv_heads = 0;
  int head_dim = 0;
  int n_ff = 0;
  float rms_eps = 0;
  int rope_dims = 0;
  float rope_base = 0;
  float rope_scale = 1;  // multiplies positions: 1 / the GGUF's linear scaling factor
};

// The packed form of a model's weights, for other processes (engine/repack.h). Whoever offers it is trusted: only a process
// that runs the same program should be.
struct PackedWeights {
  Fd fd;                       // sealed memory; not valid: none
  std::string weights_digest;  // identity().weights_digest() of the model that it was made from
};

class Model {
 public:
  // Errors: kNotFound, kDenied, kInvalidArgument (not a GGUF, truncated, a tensor missing or of the wrong shape),
  // kIncompatible (an architecture or feature that this engine does not run, named).
  // `packed` is used if it is of these very weights, else they are packed anew.
  static Result<std::shared_ptr<const Model>> Load(const std::string& path, PackedWeights packed = {});
  ~Model();

  const std::string& path() const;
  const HyperParams& params() const;
  Geometry geometry() const;

  // What a card must agree with. Computed at the first call, then kept. The weights digest is over the file's tensor data
  // (about 0.1 s per GB when the file is in memory, unless digest_cache.h knows it) and the tensors' names, types and
  // shapes.
  const ModelIdentity& identity() const;
  const std::array<uint8_t, 16>& weights_digest() const;

  // To be handed to Load in another process; its fd is not valid when ggml has no packed form of these weights.
  Result<PackedWeights> ShareWeights() const;

  struct Internal;
  const Internal& internal() const { return *internal_; }

 private:
  explicit Model(std::unique_ptr<Internal> internal);
  std::unique_ptr<Internal> internal_;
};

}  // namespace qkv
