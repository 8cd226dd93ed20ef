// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The table of codecs. A codec turns one *block* (up to 32 tokens of one layer and one KV head, K or V) into bytes that
// attention reads directly. Callers go through the table and never name a codec's layout; only qkv/attention's fused
// kernels look inside (codec/blocks.h). A new codec is a new row here plus, if it is to be fast in decode, a kernel there.
//
// Stateless pure functions over caller-owned memory; safe from any thread and process. Every function picks the widest
// SIMD the CPU has at run time and returns the same bytes on all of them as the scalar twin in codec/reference.h.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "qkv/base/error.h"

namespace qkv {

struct PqBook;  // codec/pq.h

inline constexpr int kPageTokens = 32;  // FORMAT.md §3; a change bumps the segment version
inline constexpr int kMinHeadDim = 32;  // head_dim is a multiple of 16 in [kMinHeadDim, kMaxHeadDim]
inline constexpr int kMaxHeadDim = 256;

enum class Side : uint8_t { kK, kV };

// Written into segments and cards: numbers are never reused. FORMAT.md §3.
enum class CodecId : uint8_t {
  kF16 = 1,        // IEEE half, saturating
  kI8 = 2,         // signed 8 bits, one fp16 scale per token (and head)
  kI8Channel = 3,  // signed 8 bits, one fp16 scale per channel of the block
  kI8Tensor = 4,   // signed 8 bits, one fp16 scale per block
  kI4 = 5,         // 4 bits packed, -8..7, one fp16 scale per token and group of channels
  kI4Z = 6,        // 4 bits packed, 0..15, fp16 scale and fp16 minimum per token and group of channels
  // A group is 32 channels where head_dim is a multiple of 64, else half of head_dim.

  // Rows in the rotated frame (codec/frame.h), one fp16 scale per token: 3 to 7 bits with the scale of least squared
  // error, stored as planes; 8 bits as kI8.
  k3 = 7,
  k4 = 8,
  k5 = 9,
  k6 = 10,
  k7 = 11,
  k8 = 12,
  kRefine4 = 13,  // what a page of k3 to k8 left over, in 4 bits, token by token; only beside such a page

  // Product quantization (codec/pq.h), rotated as well: pairs of channels as the number of the nearest centroid of a
  // codebook, one fp16 scale per token.
  kPq4 = 14,  // 256 centroids, 4 bits per value

  kBands = 15,  // K behind a calibration only: 5 bits for the channels of largest variance, 3 for the others

  kI4Channel = 16,  // as kI4Z, one fp16 scale and fp16 minimum per channel of the block
  kPq2 = 17,        // as kPq4, 16 centroids, 2 bits per value

  kLayers = 18,  // no codec of a block: each layer has a pair of k3 to k8 of its own (LayerCodecs, segment/layout.h)
};

struct Codec {
  CodecId id;
  std::string_view name;         // as in --kv, cards and logs: "f16", "i8", …, "3" to "8", "pq4"
  std::string_view description;  // one line for --help and docs
  bool rotated;                  // the rows that encode takes, and decode and unpack give, are in the rotated frame
  bool needs_book;               // encode, decode and unpack need the block's codebook; other codecs do not look at it
  bool keys_only;                // V cannot be kept in it: the functions below take no other side than K

  // Exact bytes of a block of 32 tokens, a multiple of 64. A partial block takes the same room.
  size_t (*block_bytes)(int head_dim);

  // rows: [tokens][head_dim] fp32, 1 <= tokens <= 32. Writes block_bytes(head_dim) bytes; the places of absent tokens
  // are zero. With every codec NaN encodes as 0 and values beyond ±65504, the range of fp16, saturate there. `block` is
  // 64-byte aligned.
  void encode(Side side, const float* rows, int tokens, int head_dim, std::byte* block,
              const PqBook* book = nullptr) const;

  // The canonical values of the first `tokens` tokens: rows [tokens][head_dim] fp32.
  void decode(Side side, const std::byte* block, int tokens, int head_dim, float* rows,
              const PqBook* book = nullptr) const;

  // All 32 tokens as fp32 in the order that attention's micro-kernels want; the same values as decode (absent tokens:
  // 0). K: panel [head_dim][32 tokens]; V: panel [32 tokens][head_dim]. `panel` is 64-byte aligned.
  void unpack(Side side, const std::byte* block, int head_dim, float* panel, const PqBook* book = nullptr) const;
};

// All codecs that a context can be kept in (every one but kRefine4), by ascending id; static storage.
std::span<const Codec> Codecs();
// nullptr if this version does not know it. The argument may come from outside. By id kRefine4 is found as well; kLayers,
// which codes nothing, never.
const Codec* FindCodec(uint8_t id);
const Codec* FindCodec(std::string_view name);
const Codec& CodecOf(CodecId id);  // id must be one of the enumerators but kLayers

// Stored bits per K or V value, scales included.
double BitsPerValue(const Codec& codec, int head_dim);

struct CodecPair {
  CodecId k = CodecId::kF16;
  CodecId v = CodecId::kF16;
  bool refine = false;  // beside every page a page {kRefine4, kRefine4}; only if TakesRefinement
  bool operator==(const CodecPair&) const = default;
};

// Of a page whose layers differ. Always on both sides.
inline constexpr CodecPair kLayersPair = {CodecId::kLayers, CodecId::kLayers};

// Whether there may be refinement planes beside pages of these codecs: both are of 3 to 8, the same in all layers.
bool TakesRefinement(CodecPair codecs);
// Whether one side at least needs codebooks.
bool NeedsBooks(CodecPair codecs);

// A pair under a name: "exact", "safe", "balanced", "small", "tiny", from the best quality to the fewest bits.
struct Preset {
  std::string_view name;
  std::string_view description;  // one line for --help and docs
  CodecPair codecs;
};
std::span<const Preset> Presets();

// "i8" (both sides), or "k=i8,v=i4" in either order; with a refinement plane "4+4", or "k=4,v=3,+4"; or a preset's name,
// "small" or "small+4". Errors name the codecs and presets there are.
Result<CodecPair> ParseCodecPair(std::string_view text);
// "i8" if both are the same, else "k=i8,v=i4"; "4+4", "k=4,v=3,+4"; "layers". Never a preset's name: those may change
// meaning.
std::string ToString(CodecPair pair);

}  // namespace qkv
