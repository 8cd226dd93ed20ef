// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Product quantization: a row is cut into pairs of neighbouring channels, and each pair is stored as the number of the
// nearest centroid of that pair's codebook. Codebooks belong to a layer, a KV head and a side of a model; they are learned
// from rows of a calibration text and kept beside the model. Codes only, no scales: 16 centroids take 2 bits per value,
// 256 take 4. Rows are in the plain frame, K without its mean: neighbouring channels, which RoPE turns together, have a
// shape that a codebook can follow and that a rotation would blur.
//
// A block is PqBlockBytes of codes (docs/FORMAT.md §9), the same for 1 token and 32:
//   256   K [D/2 pairs][32 t] u8          V [32 t][D/2 pairs] u8
//   16    K [D/2 pairs][16] u4 pairs:     V [32 t][D/4] u4 pairs: low nibble = pair j, high nibble = pair D/4 + j
//         low nibble = token t, high nibble = token 16 + t
//
// Pure functions and immutable values; safe from any thread. Same bytes on every CPU.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "qkv/base/error.h"
#include "qkv/codec/codec.h"

namespace qkv {

// What codebooks are for, and how many centroids each has: 16 or 256.
struct PqShape {
  int n_layers = 0;
  int n_kv_heads = 0;
  int head_dim = 0;
  int n_centroids = 0;
  bool operator==(const PqShape&) const = default;

  size_t book_values() const { return static_cast<size_t>(head_dim) * static_cast<size_t>(n_centroids); }
  size_t n_books() const { return 2 * static_cast<size_t>(n_layers) * static_cast<size_t>(n_kv_heads); }
};

constexpr size_t PqBlockBytes(int n_centroids, int head_dim) {
  return static_cast<size_t>(head_dim) * (n_centroids == 16 ? 8 : 16);
}

// One codebook, [head_dim/2][n_centroids][2], from rows [n][head_dim]: k-means of every pair of channels, deterministic.
// Rounded to fp16. Rows that are not finite are left out. Error: kInvalidArgument with fewer rows than four per centroid.
Result<std::vector<float>> TrainPq(std::span<const float> rows, int head_dim, int n_centroids);

// rows: [tokens][head_dim]; writes PqBlockBytes; absent tokens have code 0. NaN counts as 0 and infinity has code 0. The first of equally near
// centroids is taken.
void PqEncode(Side side, const float* rows, int tokens, int head_dim, int n_centroids, const float* book,
              std::byte* block);
// All 32 tokens, as Codec::unpack gives them: K [head_dim][32], V [32][head_dim].
void PqUnpack(Side side, const std::byte* block, int head_dim, int n_centroids, const float* book, float* panel);

class PqCodebooks {
 public:
  // `books`: n_books() codebooks one after the other, [layer][kv_head][K, V]. Error: kInvalidArgument (numbers outside of
  // their limits, another number of values, or one that is not finite).
  static Result<PqCodebooks> Make(const PqShape& shape, const std::array<uint8_t, 16>& model_digest,
                                  std::vector<float> books);
  // A file's bytes, docs/FORMAT.md §9. Anything may come in. Errors: kCorrupt/checksum, kIncompatible/version.
  static Result<PqCodebooks> Parse(std::span<const std::byte> bytes);
  std::vector<std::byte> Serialize() const;

  const PqShape& shape() const { return shape_; }
  const std::array<uint8_t, 16>& model_digest() const { return model_digest_; }
  const float* book(int layer, int kv_head, Side side) const;
  // XXH3-128 of Serialize(), 32 hex digits: what a card names.
  const std::string& digest() const { return digest_; }

 private:
  PqCodebooks() = default;

  PqShape shape_;
  std::array<uint8_t, 16> model_digest_{};
  std::vector<float> books_;
  std::string digest_;
};

}  // namespace qkv
