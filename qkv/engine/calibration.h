// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// `bal`: a matrix A per layer and KV head, learned on a text, that moves the noise of a codec into directions that queries
// weight little. Keys are coded as A (k - mean), queries multiplied by A^-T, so that scores stay what they are:
//
//   Ck = covariance of a head's keys without the first token's, Ck = L L^T (Cholesky)
//   Cq = mean of q q^T over all queries of the head's group,    L^T Cq L = U S^2 U^T
//   A  = S^1/2 U^T L^-1,  A^-T = S^-1/2 U^T L^T
//
// (keys and queries after RoPE; both matrices with 1e-4 of their mean diagonal added). The matrices are a constant of the
// model, kept in a file beside it, and no part of a context.
//
// S, the variance of the balanced channels, falls from the first to the last. The codec 5/3 (CodecId::kBands) has the
// first half of them in 5 bits and the others in 3, under one scale per token, in which both codes reach equally far. So
// that both halves fill it, the second half of A's rows is multiplied by 1.15 times the head's spread (that of the queries'
// divided by it), with S1 and S2 the means of the halves of S. Beyond 1, since a wider step is best clipped sooner.
//
//   spread = sqrt(S1 / S2)
//
// BalanceStatistics belongs to one thread. A Calibration is immutable; any thread.

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "qkv/engine/sequence.h"

namespace qkv {

class BalanceStatistics {
 public:
  // n_heads: query heads, a multiple of the geometry's KV heads.
  BalanceStatistics(const Geometry& geometry, int n_heads);
  // Rows of one Forward's batch, as SequenceOptions::on_rows gives them; V is not looked at. `first_position`: of the
  // batch's first token; position 0 starts a new stretch of text, and its key is left out.
  void Add(RowKind kind, int layer, int first_position, int n_tokens, std::span<const float> rows);
  int64_t n_keys() const { return n_keys_; }  // per layer, the first tokens left out

 private:
  friend class Calibration;
  struct Head {
    std::vector<double> k_sum, kk, qq;  // [D], [D][D], [D][D]
  };
  Geometry geometry_;
  int group_;
  int64_t n_keys_ = 0, n_queries_ = 0;  // queries: of one query head
  std::vector<Head> heads_;             // [layer][kv_head]
};

class Calibration {
 public:
  // Error: kInvalidArgument with fewer keys than make a covariance (4 head_dim).
  static Result<Calibration> Compute(const BalanceStatistics& statistics);

  // A file beside the model: its directory, its weights' digest and ".qkvbal".
  static std::string PathFor(const Model& model);
  // Written beside the target first, so that a failure leaves nothing half done. Errors: kDenied, kIo.
  Status Write(const Model& model, const std::string& path) const;
  // Errors: kNotFound (how to make one), kIncompatible (another model's), kCorrupt.
  static Result<Calibration> Read(const Model& model, const std::string& path);

  // The same with the spread multiplied in, for keys in two bands; with a digest of its own. Not for Write.
  Calibration ForBands() const;

  // [head_dim][head_dim], row by row. A as it is stored (fp16), and the exact inverse's transpose of that.
  std::span<const float> key_matrix(int layer, int kv_head) const { return Of(keys_, layer, kv_head); }
  std::span<const float> query_matrix(int layer, int kv_head) const { return Of(queries_, layer, kv_head); }
  // rows: [tokens][head_dim] keys of a head, in place.
  void MultiplyKeys(int layer, int kv_head, int tokens, float* rows) const;
  // Of all KV heads of a layer, one behind the other.
  std::span<const float> key_matrices(int layer) const { return OfLayer(keys_, layer); }
  std::span<const float> query_matrices(int layer) const { return OfLayer(queries_, layer); }
  const Geometry& geometry() const { return geometry_; }
  // XXH3-128 of the file's numbers, seeded with 15 for keys in two bands: what a page coded with them names.
  const std::array<uint8_t, 16>& digest() const { return digest_; }
  std::string digest_text() const;  // 32 hex digits

 private:
  static Result<Calibration> FromHalves(const Geometry& geometry, std::vector<uint16_t> halves);
  std::span<const float> Of(const std::vector<float>& all, int layer, int kv_head) const {
    const size_t size = static_cast<size_t>(geometry_.head_dim) * geometry_.head_dim;
    return std::span(all).subspan((static_cast<size_t>(layer) * geometry_.n_kv_heads + kv_head) * size, size);
  }

  std::span<const float> OfLayer(const std::vector<float>& all, int layer) const {
    const size_t size = all.size() / static_cast<size_t>(geometry_.n_layers);
    return std::span(all).subspan(static_cast<size_t>(layer) * size, size);
  }

  Geometry geometry_;
  std::vector<uint16_t> halves_;  // as in the file: [layer][kv_head]{A, [D][D]; spread}
  std::vector<float> keys_, queries_;
  std::array<uint8_t, 16> digest_{};
};

// Reads `tokens` in stretches of n_stretch over exact pages. Errors: kInvalidArgument when there are too few, Forward's.
Result<Calibration> Calibrate(std::shared_ptr<const Model> model, std::span<const Token> tokens, int n_stretch,
                              int n_threads, const std::function<void(size_t done, size_t total)>& on_progress = {});

}  // namespace qkv
