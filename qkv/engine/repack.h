// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Matrices in the order that ggml's fastest products of this CPU want (its CPU_REPACK buffer type: Q4_0, Q4_K and others;
// Q4_1 as Q4_0 and block_offsets.h). Matrices that read the same input are one, their outputs behind each other. All lie in
// one sealed memory file, so that other processes that run the same model can map the same bytes instead of packing their
// own. Always used where ggml has it: results of packed and unpacked weights differ in the last bits, and a handoff is
// exact only when both sides compute alike.

#include <ggml-backend.h>
#include <ggml.h>

#include <memory>
#include <span>
#include <vector>

#include "qkv/base/fd.h"
#include "qkv/engine/block_offsets.h"

namespace qkv {

struct GgmlDeleter {
  void operator()(ggml_context* context) const { ggml_free(context); }
};
struct BufferDeleter {
  void operator()(ggml_backend_buffer* buffer) const { ggml_backend_buffer_free(buffer); }
};

// A matrix as the graph uses it.
struct Matrix {
  ggml_tensor* weight = nullptr;  // [n_in, n_out]
  BlockOffsets offsets;           // no values: none
};

class RepackedWeights {
 public:
  // Weights of the file that read the same input.
  using Group = std::vector<ggml_tensor*>;

  // Packs the groups that ggml has a packed form for, with all cores, or maps `shared` (valid: the fd() of another
  // process's object made of the same weights by the same build on the same CPU; sealed, of the right size, else kCorrupt).
  // Weights of the file stay as they are. Errors: kExhausted.
  static Result<std::unique_ptr<RepackedWeights>> Create(std::span<const Group> groups, Fd shared);

  // Of a group given to Create; nullptr when it could not be packed.
  const Matrix* Packed(size_t group) const;
  const Fd& fd() const { return fd_; }
  size_t bytes() const { return mapping_.size(); }  // 0: nothing was packed

 private:
  struct Item {
    Group group;
    Matrix packed;
    size_t bytes = 0;         // of the weight, padded; 0: not packed
    size_t offset_bytes = 0;  // of the offsets behind it, padded
  };
  RepackedWeights() = default;
  void PlaceAt(std::byte* base);
  void PackAll();

  Fd fd_;
  Mapping mapping_;                                             // read-only
  std::unique_ptr<ggml_backend_buffer, BufferDeleter> buffer_;  // empty; says of which type the tensors are
  std::unique_ptr<ggml_context, GgmlDeleter> context_;          // of the packed tensors, whose data is in mapping_
  std::vector<Item> items_;
};

}  // namespace qkv
