// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Product quantization, the codecs pq4 and pq2: channels m and D/2 + m of a row in the rotated frame are a pair, and each
// pair is stored as the number of a centroid of its codebook: 256 of them take 4 bits per value, 16 take 2. A row has one
// fp16 scale besides. Codebooks belong to a layer, a KV head and a side of a model; they are learned on a text
// (engine/codebooks.h), kept beside the model, and named by digest in the cards of contexts that need them.
//
// The rotation makes all pairs of a head alike, which is why one codebook serves them all. It fits into registers, or nearly;
// and centroids are signed bytes, so that a block is one of i8 once its numbers have been looked up (codec/pq-inl.h).
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

// One codebook, a view. Bytes are -127 to 127; 32 stands for the root mean square of a row.
struct PqBook {
  int n_centroids = 0;             // 16 or 256
  const int8_t* first = nullptr;   // [n_centroids], of channel m of a pair
  const int8_t* second = nullptr;  // of channel D/2 + m
};

// k-means of points [n][2] in units of their rows' root mean square, deterministic: the centroids' first coordinates, then
// the second ones. Points that are not finite are left out. Error: kInvalidArgument with fewer than four per centroid.
Result<std::vector<int8_t>> TrainPq(std::span<const float> points, int n_centroids);

// As Codec::encode and Codec::unpack of the codec that has so many centroids.
void PqEncode(Side side, const float* rows, int tokens, int head_dim, const PqBook& book, std::byte* block);
void PqUnpack(Side side, const std::byte* block, int head_dim, const PqBook& book, float* panel);

// What codebooks are for.
struct PqShape {
  int n_layers = 0;
  int n_kv_heads = 0;
  int head_dim = 0;
  bool operator==(const PqShape&) const = default;

  size_t n_heads() const { return static_cast<size_t>(n_layers) * static_cast<size_t>(n_kv_heads); }
};

// All codebooks of a model, of both codecs.
class PqCodebooks {
 public:
  // Bytes of one layer, KV head and side: 256 first coordinates, 256 second ones; 16 and 16.
  static constexpr size_t kSideBytes = 2 * (256 + 16);

  // `centroids`: kSideBytes per [layer][kv_head][K, V]. Error: kInvalidArgument (numbers outside of their limits, another
  // number of bytes, or -128 among them).
  static Result<PqCodebooks> Make(const PqShape& shape, const std::array<uint8_t, 16>& model_digest,
                                  std::vector<int8_t> centroids);
  // A file's bytes, docs/FORMAT.md §9. Anything may come in. Errors: kCorrupt/checksum, kIncompatible/version.
  static Result<PqCodebooks> Parse(std::span<const std::byte> bytes);
  std::vector<std::byte> Serialize() const;

  const PqShape& shape() const { return shape_; }
  const std::array<uint8_t, 16>& model_digest() const { return model_digest_; }
  // codec: kPq4 or kPq2. As long as this object lives where it is.
  PqBook book(CodecId codec, int layer, int kv_head, Side side) const;
  // XXH3-128 of Serialize(), 32 hex digits: what a card names.
  const std::string& digest() const { return digest_; }

 private:
  PqCodebooks() = default;

  PqShape shape_;
  std::array<uint8_t, 16> model_digest_{};
  std::vector<int8_t> centroids_;
  std::string digest_;
};

}  // namespace qkv
