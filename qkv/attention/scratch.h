// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// One thread's working memory for one item, carved from the caller's buffer; private to this room. "Rows" are the
// queries of a tile times the query heads of a KV group, query-major. Blocks of rows that a micro-kernel takes at once
// lie behind each other: the block that starts at row r begins at element r * head_dim.

#include <cstddef>
#include <cstdint>

#include "qkv/attention/attention.h"

namespace qkv::attention {

// Rows per tile of a prefill: enough to pay for unpacking a block, few enough for scores and outputs to stay in L2.
inline constexpr int kTileRows = 96;
// Up to this many rows attention goes page by page, in the order in which the pages lie. Above, it takes four pages at a
// time, so that softmax and outputs are touched less often, and unpacks codecs that have no kernel for their codes (and
// halves) to fp32, once for all rows.
inline constexpr int kFewRows = 32;
inline constexpr int kGroupPages = 4;
inline constexpr int kRefinedSlot = kGroupPages;  // behind the scores of a step's pages: those of tokens read again
inline constexpr int kScoreStride = (kGroupPages + 1) * kPageTokens;
inline constexpr int kMaxI4Groups = kMaxHeadDim / 32;
inline constexpr int kMaxLanes = 16;  // fp32 lanes of the widest vector

struct Scratch {
  // With a null buffer only `bytes` is meaningful.
  Scratch(const AttentionPlan& plan, std::byte* buffer) {
    const size_t rows = static_cast<size_t>(plan.tile_rows());
    const size_t dim = static_cast<size_t>(plan.shape.head_dim);
    const bool few = plan.tile_rows() <= kFewRows;
    const size_t padded_rows = (rows + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
    const auto carve = [&]<class T>(T*& pointer, size_t count) {
      pointer = buffer == nullptr ? nullptr : reinterpret_cast<T*>(buffer + bytes);
      bytes += (count * sizeof(T) + 63) / 64 * 64;
    };
    carve(q, rows * dim);
    carve(scores, 2 * rows * kScoreStride);
    carve(outputs, rows * dim);
    carve(sums, rows * kMaxLanes);
    for (float** row_values : {&maxima, &group_maxima, &keep, &gain, &weight_scale, &base, &ones}) {
      carve(*row_values, padded_rows);
    }
    carve(k_panel, dim * kPageTokens);
    carve(v_panel, dim * kPageTokens * kGroupPages);  // few rows, too, take so many pages where some are refined
    carve(q_rows, rows * dim);
    carve(q_i8, rows * dim);
    carve(q_i8_scale, padded_rows);
    carve(q_channel, rows * dim);
    carve(q_channel_scale, padded_rows);
    carve(q_i4, rows * dim);
    carve(q_i4_quads, rows * dim / 2);
    carve(q_i4_scale, padded_rows);
    carve(q_i4_sums, rows * kMaxI4Groups);
    carve(q_line, dim);
    carve(token_scale, kPageTokens);
    carve(weights, rows * kPageTokens);
    carve(weight_quads, rows * kPageTokens / 2);
    carve(channel_scale, dim);
    carve(line, dim);
    carve(q_mean, padded_rows);
    carve(limits, padded_rows);
    carve(q_bytes, rows * dim / 2);
    carve(q_bytes_scale, padded_rows);
    carve(q_bytes_sum, padded_rows);
    carve(weight_sum, padded_rows);
    carve(expanded, kPageTokens * dim + 64);
    carve(refined, kScoreStride);
    carve(refined_scale, kScoreStride);
    carve(q_sums, padded_rows);
    carve(zeros, padded_rows);
    carve(refined_rows, few ? 0 : kPageTokens * dim);
  }

  size_t bytes = 0;

  float* q = nullptr;             // times the shape's scale and log2(e): [head_dim][rows of the block] per block
  float* scores = nullptr;        // [2][rows][kScoreStride]; after the softmax, weights relative to the group's maximum
  float* outputs = nullptr;       // [rows][head_dim], not yet divided by the sum
  float* sums = nullptr;          // [rows][kMaxLanes], one partial sum per vector lane
  float* maxima = nullptr;        // [rows], so far
  float* group_maxima = nullptr;  // [rows], of the current group of pages
  float* keep = nullptr;          // [rows], what earlier outputs are multiplied with
  float* gain = nullptr;          // [rows], what this group's outputs are multiplied with
  float* weight_scale = nullptr;  // [rows], gain times the step of the quantized weights
  float* base = nullptr;          // [rows], added to this group's outputs
  float* ones = nullptr;          // [rows], 1
  float* k_panel = nullptr;       // [head_dim][32]
  float* v_panel = nullptr;       // [4 * 32][head_dim]

  // For kernels on the codes. Quantized queries are signed 16-bit pairs of channels, in the order in which the codes lie.
  float* q_rows = nullptr;           // as q, [rows][head_dim]
  int32_t* q_i8 = nullptr;           // [head_dim / 2][rows of the block] per block
  float* q_i8_scale = nullptr;       // [rows]
  int32_t* q_channel = nullptr;      // as q_i8, with the current block's channel scales folded in
  float* q_channel_scale = nullptr;  // [rows]
  int32_t* q_i4 = nullptr;           // [head_dim / 8][4 nibbles][rows of the block] per block
  int32_t* q_i4_quads = nullptr;     // [head_dim / 8][2 nibbles][2 digits][rows of the block] per block, four s8 each
  float* q_i4_scale = nullptr;       // [rows]
  float* q_i4_sums = nullptr;        // [rows][kMaxI4Groups], sums of the 16-bit values
  int16_t* q_line = nullptr;         // [head_dim]
  float* token_scale = nullptr;      // [32]
  int16_t* weights = nullptr;        // [rows][32]
  int32_t* weight_quads = nullptr;   // [rows][4 groups of 8 tokens][2 nibbles][2 digits], four s8 each
  float* channel_scale = nullptr;    // [head_dim]

  // For rotated pages and refinement planes.
  float* line = nullptr;           // [head_dim], some row
  float* q_mean = nullptr;         // [rows], queries times the mean of the keys
  float* limits = nullptr;         // [rows], the largest scores so far, without refinement of the step at hand
  int32_t* q_bytes = nullptr;      // [head_dim / 4][2 digits][rows of the block] per block, four s8 each
  float* q_bytes_scale = nullptr;  // [rows]
  int32_t* q_bytes_sum = nullptr;  // [rows]
  int32_t* weight_sum = nullptr;   // [rows]
  int8_t* expanded = nullptr;  // [32 * head_dim] codes of a block, a byte each, in the order of i8; and 64 bytes more
  uint8_t* refined = nullptr;  // [kScoreStride], the step's refined tokens, each as 32 * slot + token
  float* refined_scale = nullptr;  // [kScoreStride], of the step's tokens with a refinement plane
  float* q_sums = nullptr;         // [rows], of q_rows
  float* zeros = nullptr;          // [rows], 0
  int8_t* refined_rows = nullptr;  // [32][head_dim], codes of refined tokens, where there are many rows
};

}  // namespace qkv::attention
