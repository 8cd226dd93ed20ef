// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Weights in the order that ggml's fastest matrix products of this CPU want (its CPU_REPACK buffer type; Q4_0, Q4_K and
// others, not Q4_1). They lie in one sealed memory file, so that other processes that run the same model can map the same
// bytes instead of packing their own. Always used where ggml has it: results of packed and unpacked weights differ in the
// last bits, and a handoff is exact only when both sides compute alike.

#include <ggml-backend.h>
#include <ggml.h>

#include <memory>
#include <span>

#include "qkv/base/fd.h"
#include "qkv/engine/model_internal.h"

namespace qkv {

class RepackedWeights {
 public:
  // Packs those of `weights` that ggml has a packed form for, with all cores, or maps `shared` (not empty: the fd() of
  // another process's object made of the same weights by the same build on the same CPU; sealed, of the right size, else
  // kCorrupt). Tensors of the file stay as they are. nullptr if there is nothing to pack. Errors: kExhausted.
  static Result<std::unique_ptr<RepackedWeights>> Create(std::span<ggml_tensor* const> weights, Fd shared);

  // The packed twin of a weight given to Create, or that weight itself.
  ggml_tensor* Packed(ggml_tensor* weight) const;
  const Fd& fd() const { return fd_; }
  size_t bytes() const { return mapping_.size(); }

 private:
  RepackedWeights() = default;

  Fd fd_;
  Mapping mapping_;                                             // read-only
  std::unique_ptr<ggml_backend_buffer, BufferDeleter> buffer_;  // empty; says of which type the tensors are
  std::unique_ptr<ggml_context, GgmlDeleter> context_;          // of packed_'s tensors, whose data is in mapping_
  std::vector<std::pair<ggml_tensor*, ggml_tensor*>> packed_;   // weight and twin, sorted by weight
};

}  // namespace qkv
