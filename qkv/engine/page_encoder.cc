// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/page_encoder.h"

#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "qkv/codec/frame.h"

namespace qkv {
namespace {

constexpr CodecPair kF16Pair = {CodecId::kF16, CodecId::kF16};

float Finite(float value) {
  constexpr float kMost = 65504;
  return std::isnan(value) ? 0 : std::clamp(value, -kMost, kMost);
}

PqBook BookOf(const PqCodebooks* codebooks, const Codec& codec, int layer, int head, Side side) {
  return codec.needs_book ? codebooks->book(codec.id, layer, head, side) : PqBook();
}

}  // namespace

SegmentConstants ConstantsOf(const Geometry& geometry, std::span<const F16Page> pages, bool at_zero) {
  const PageLayout layout(geometry, kF16Pair);
  const int head_dim = geometry.head_dim;
  SegmentConstants constants(geometry);
  int counted = at_zero ? -1 : 0;
  for (const F16Page& page : pages) counted += page.tokens;
  // Only of tokens that are there: others may be written at this moment, and what was truncated may still stand behind.
  // f16 blocks (FORMAT.md §3): K [head_dim][32], V [32][head_dim].
  const auto halves = [&](const F16Page& page, Side side, int layer, int head) {
    return reinterpret_cast<const ggml_fp16_t*>(page.data + layout.BlockOffset(side, layer, head));
  };
  std::vector<float> sums(head_dim);
  const auto set = [&](int layer, int head, Constant which, int c, float value) {
    constants.at(layer, head, which)[c] = ggml_fp32_to_fp16(Finite(value));
  };
  for (int layer = 0; layer < geometry.n_layers; ++layer) {
    for (int head = 0; head < geometry.n_kv_heads; ++head) {
      std::ranges::fill(sums, 0.0f);
      for (size_t i = 0; i < pages.size(); ++i) {
        const ggml_fp16_t* const k = halves(pages[i], Side::kK, layer, head);
        for (int c = 0; c < head_dim; ++c) {
          float keys[kPageTokens];
          ggml_fp16_to_fp32_row(k + c * kPageTokens, keys, pages[i].tokens);
          if (at_zero && i == 0) set(layer, head, Constant::kFirstK, c, keys[0]);
          for (int t = at_zero && i == 0 ? 1 : 0; t < pages[i].tokens; ++t) sums[c] += keys[t];
        }
      }
      for (int c = 0; counted > 0 && c < head_dim; ++c) {
        set(layer, head, Constant::kMeanK, c, sums[c] / static_cast<float>(counted));
      }
      if (!at_zero) continue;
      const ggml_fp16_t* const v = halves(pages.front(), Side::kV, layer, head);
      for (int c = 0; c < head_dim; ++c) set(layer, head, Constant::kFirstV, c, ggml_fp16_to_fp32(v[c]));
    }
  }
  return constants;
}

void PlainRows(const Segment& segment, size_t page, const PqCodebooks* codebooks, Side side, int layer, int head,
               int tokens, float* rows) {
  const Geometry& geometry = segment.geometry();
  const PageLayout layout = segment.layout(page);
  const Codec& codec = CodecOf(side == Side::kK ? layout.CodecsOf(layer).k : layout.CodecsOf(layer).v);
  const PqBook book = BookOf(codebooks, codec, layer, head, side);
  codec.decode(side, segment.page(page) + layout.BlockOffset(side, layer, head), tokens, geometry.head_dim, rows,
               &book);
  if (!codec.rotated) return;
  const ConstantsLayout constants(geometry);
  const auto read = [&](Constant which, float* out) {
    const std::byte* const halves = segment.constants() + constants.Offset(layer, head, which);
    ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(halves), out, geometry.head_dim);
  };
  float mean[kMaxHeadDim];
  if (side == Side::kK) read(Constant::kMeanK, mean);
  FromRotated(rows, tokens, geometry.head_dim, side == Side::kK ? mean : nullptr, rows, codec.id == CodecId::kBands);
  if (segment.pages()[page].first_position == 0) read(side == Side::kK ? Constant::kFirstK : Constant::kFirstV, rows);
}

PageEncoder::PageEncoder(const Geometry& geometry, const PageCodecs& kv, const PqCodebooks* codebooks)
    : geometry_(geometry),
      kv_(kv),
      codebooks_(codebooks),
      f16_layout_(geometry, kF16Pair),
      layout_(geometry, base(), kv_.layers.get()) {
  QKV_CHECK(!NeedsBooks(kv_.pair) || codebooks != nullptr);
  if (kv_.pair.refine) refinement_layout_.emplace(geometry, kRefinementCodecs);
}

void PageEncoder::Encode(const F16Page& from, bool exact_first, const SegmentConstants* constants, std::byte* page,
                         std::byte* refinement) const {
  const Codec& f16 = CodecOf(CodecId::kF16);
  const Codec& refine = CodecOf(CodecId::kRefine4);
  const int head_dim = geometry_.head_dim;
  const size_t n = static_cast<size_t>(from.tokens) * head_dim;
  std::vector<float> plain(n), rows(n), mean(head_dim);
  for (int layer = 0; layer < geometry_.n_layers; ++layer) {
    for (int head = 0; head < geometry_.n_kv_heads; ++head) {
      for (const Side side : {Side::kK, Side::kV}) {
        const Codec& codec = CodecOf(side == Side::kK ? layout_.CodecsOf(layer).k : layout_.CodecsOf(layer).v);
        std::byte* const block = page + layout_.BlockOffset(side, layer, head);
        f16.decode(side, from.data + f16_layout_.BlockOffset(side, layer, head), from.tokens, head_dim, plain.data());
        if (!codec.rotated) {
          codec.encode(side, plain.data(), from.tokens, head_dim, block);
          continue;
        }
        if (side == Side::kK) {
          const size_t at = constants->layout.Offset(layer, head, Constant::kMeanK) / sizeof(uint16_t);
          ggml_fp16_to_fp32_row(constants->halves.data() + at, mean.data(), head_dim);
        }
        ToRotated(plain.data(), from.tokens, head_dim, side == Side::kK ? mean.data() : nullptr, rows.data(),
                  codec.id == CodecId::kBands);
        if (exact_first) std::fill_n(rows.begin(), head_dim, 0.0f);
        const PqBook book = BookOf(codebooks_, codec, layer, head, side);
        codec.encode(side, rows.data(), from.tokens, head_dim, block, &book);
        if (refinement == nullptr) continue;
        codec.decode(side, block, from.tokens, head_dim, plain.data());
        for (size_t i = 0; i < n; ++i) rows[i] -= plain[i];
        refine.encode(side, rows.data(), from.tokens, head_dim,
                      refinement + refinement_layout_->BlockOffset(side, layer, head));
      }
    }
  }
}

}  // namespace qkv
