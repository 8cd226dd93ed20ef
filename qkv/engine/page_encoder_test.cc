// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/page_encoder.h"

#include <ggml.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "qkv/codec/frame.h"

namespace qkv {
namespace {

constexpr Geometry kGeometry{2, 3, 64};
constexpr CodecPair kF16 = {CodecId::kF16, CodecId::kF16};

struct AlignedFree {
  void operator()(std::byte* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<std::byte[], AlignedFree>;
Bytes NewPage(const PageLayout& layout) {
  Bytes bytes(static_cast<std::byte*>(std::aligned_alloc(kPageAlignment, layout.bytes)));
  std::fill_n(bytes.get(), layout.bytes, std::byte{0});
  return bytes;
}

// A page whose keys stand far from zero, as a model's do; by rows [token][head_dim] in the order of blocks.
struct Page {
  explicit Page(int n_tokens, uint32_t seed) : tokens(n_tokens), bytes(NewPage(PageLayout(kGeometry, kF16))) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const PageLayout layout(kGeometry, kF16);
    for (int layer = 0; layer < kGeometry.n_layers; ++layer) {
      for (int head = 0; head < kGeometry.n_kv_heads; ++head) {
        for (const Side side : {Side::kK, Side::kV}) {
          std::vector<float> rows(static_cast<size_t>(tokens) * 64);
          for (size_t i = 0; i < rows.size(); ++i) {
            const float offset = side == Side::kK ? static_cast<float>(i % 64) / 8 - 4 : 0;
            rows[i] = ggml_fp16_to_fp32(ggml_fp32_to_fp16(offset + normal(random)));
          }
          CodecOf(CodecId::kF16)
              .encode(side, rows.data(), tokens, 64, bytes.get() + layout.BlockOffset(side, layer, head));
          blocks.push_back(std::move(rows));
        }
      }
    }
  }
  F16Page f16() const { return {bytes.get(), tokens}; }
  const std::vector<float>& rows(Side side, int layer, int head) const {
    return blocks[static_cast<size_t>((layer * kGeometry.n_kv_heads + head) * 2 + (side == Side::kV))];
  }
  int tokens;
  Bytes bytes;
  std::vector<std::vector<float>> blocks;
};

double MeanOf(std::span<const Page* const> pages, int layer, int head, int c, bool without_first) {
  double sum = 0;
  int n = 0;
  for (const Page* page : pages) {
    for (int t = 0; t < page->tokens; ++t) {
      if (without_first && page == pages.front() && t == 0) continue;
      sum += page->rows(Side::kK, layer, head)[static_cast<size_t>(t) * 64 + c];
      ++n;
    }
  }
  return n == 0 ? 0 : sum / n;
}

TEST(PageEncoder, TheMeanLeavesOutTheContextsFirstTokenWhichIsKept) {
  const Page full(32, 1), part(5, 2), single(1, 3);
  const Page* both[] = {&full, &part};
  const Page* one[] = {&single};
  for (const bool at_zero : {true, false}) {
    const F16Page pages[] = {full.f16(), part.f16()};
    const SegmentConstants constants = ConstantsOf(kGeometry, pages, at_zero);
    const SegmentConstants alone = ConstantsOf(kGeometry, {std::initializer_list<F16Page>{single.f16()}}, at_zero);
    for (int layer = 0; layer < kGeometry.n_layers; ++layer) {
      for (int head = 0; head < kGeometry.n_kv_heads; ++head) {
        const auto value = [&](const SegmentConstants& from, Constant which, int c) {
          return ggml_fp16_to_fp32(from.halves[from.layout.Offset(layer, head, which) / 2 + static_cast<size_t>(c)]);
        };
        for (int c = 0; c < 64; ++c) {
          const double mean = MeanOf(both, layer, head, c, at_zero);
          EXPECT_NEAR(value(constants, Constant::kMeanK, c), mean, 1e-5 + std::abs(mean) / 2048);
          EXPECT_EQ(value(constants, Constant::kFirstK, c), at_zero ? full.rows(Side::kK, layer, head)[c] : 0);
          EXPECT_EQ(value(constants, Constant::kFirstV, c), at_zero ? full.rows(Side::kV, layer, head)[c] : 0);
          const float of_one = value(alone, Constant::kMeanK, c);
          EXPECT_NEAR(of_one, MeanOf(one, layer, head, c, at_zero), 1e-2);  // nothing is left to average: 0
          if (at_zero) {
            EXPECT_EQ(of_one, 0);
          }
        }
      }
    }
  }
}

// Rows as attention understands the page: back in the plain frame, with what the refinement adds.
std::vector<float> Decoded(const PageEncoder& encoder, const std::byte* page, const std::byte* refinement, Side side,
                           int layer, int head, int tokens, const SegmentConstants* constants) {
  std::vector<float> rows(static_cast<size_t>(tokens) * 64), residual(rows.size()), mean(64);
  const Codec& codec = CodecOf(side == Side::kK ? encoder.kv().k : encoder.kv().v);
  codec.decode(side, page + encoder.layout().BlockOffset(side, layer, head), tokens, 64, rows.data());
  if (refinement != nullptr) {
    CodecOf(CodecId::kRefine4)
        .decode(side, refinement + encoder.refinement_layout().BlockOffset(side, layer, head), tokens, 64,
                residual.data());
    for (size_t i = 0; i < rows.size(); ++i) rows[i] += residual[i];
  }
  if (!codec.rotated) return rows;
  const size_t at = constants->layout.Offset(layer, head, Constant::kMeanK) / 2;
  ggml_fp16_to_fp32_row(constants->halves.data() + at, mean.data(), 64);
  FromRotated(rows.data(), tokens, 64, side == Side::kK ? mean.data() : nullptr, rows.data(),
              codec.id == CodecId::kBands);
  return rows;
}

struct Errors {
  double base = 0, refined = 0;  // relative to the variance, which is 1
};
Errors ErrorsOf(CodecPair kv, Side side, bool exact_first) {
  const Page page(32, 7);
  const PageEncoder encoder(kGeometry, kv);
  const F16Page pages[] = {page.f16()};
  const SegmentConstants constants = ConstantsOf(kGeometry, pages, exact_first);
  const Bytes base = NewPage(encoder.layout());
  const Bytes refinement = kv.refine ? NewPage(encoder.refinement_layout()) : nullptr;
  encoder.Encode(page.f16(), exact_first, &constants, base.get(), refinement.get());
  Errors errors;
  int n = 0;
  for (int layer = 0; layer < kGeometry.n_layers; ++layer) {
    for (int head = 0; head < kGeometry.n_kv_heads; ++head) {
      const auto rows = Decoded(encoder, base.get(), nullptr, side, layer, head, 32, &constants);
      const auto refined = Decoded(encoder, base.get(), refinement.get(), side, layer, head, 32, &constants);
      const auto& wanted = page.rows(side, layer, head);
      for (size_t i = exact_first ? 64 : 0; i < wanted.size(); ++i, ++n) {
        errors.base += (rows[i] - wanted[i]) * (rows[i] - wanted[i]);
        errors.refined += (refined[i] - wanted[i]) * (refined[i] - wanted[i]);
      }
    }
  }
  return {errors.base / n, errors.refined / n};
}

// Against the figures of Gaussian rows that the lab gives for each width (codec-lab.md §2).
TEST(PageEncoder, ErrorsAreThoseOfTheWidthOnBothSides) {
  const std::pair<CodecId, double> widths[] = {{CodecId::k8, 3.5e-5}, {CodecId::k5, 2.3e-3}, {CodecId::k4, 8.6e-3}};
  for (const auto& [id, expected] : widths) {
    for (const Side side : {Side::kK, Side::kV}) {
      for (const bool exact_first : {false, true}) {
        EXPECT_NEAR(ErrorsOf({id, id}, side, exact_first).base / expected, 1, 0.2) << CodecOf(id).name;
      }
    }
  }
}

// Those of the best uniform quantizers of 32 and of 8 levels for Gaussian values (J. Max, 1960), half of the channels each.
TEST(PageEncoder, TwoBandsOfKeysHaveTheErrorsOfFiveAndThreeBits) {
  for (const bool exact_first : {false, true}) {
    const Errors errors = ErrorsOf({CodecId::kBands, CodecId::k4, true}, Side::kK, exact_first);
    EXPECT_NEAR(errors.base / ((0.00349 + 0.03744) / 2), 1, 0.2);
    EXPECT_LT(errors.refined, errors.base / 20);
  }
}

TEST(PageEncoder, TheRefinementCodesWhatTheBaseLeftOver) {
  for (const CodecId base : {CodecId::k4, CodecId::k3}) {
    for (const Side side : {Side::kK, Side::kV}) {
      const Errors errors = ErrorsOf({base, base, true}, side, true);
      EXPECT_LT(errors.refined, errors.base / 60);  // 4 more bits: 4^4 less on paper, a uniform residual's 4-bit error
      EXPECT_GT(errors.refined, errors.base / 500);
    }
  }
}

TEST(PageEncoder, APlainSideStaysAsItIs) {
  const Page page(9, 4);
  const PageEncoder mixed(kGeometry, {CodecId::k5, CodecId::kI8}), plain(kGeometry, {CodecId::kI8, CodecId::kI8});
  const F16Page pages[] = {page.f16()};
  const SegmentConstants constants = ConstantsOf(kGeometry, pages, true);
  const Bytes a = NewPage(mixed.layout()), b = NewPage(plain.layout());
  mixed.Encode(page.f16(), true, &constants, a.get(), nullptr);
  plain.Encode(page.f16(), false, nullptr, b.get(), nullptr);
  EXPECT_EQ(Decoded(mixed, a.get(), nullptr, Side::kV, 1, 2, 9, &constants),
            Decoded(plain, b.get(), nullptr, Side::kV, 1, 2, 9, nullptr));
}

TEST(PageEncoder, TheExactFirstTokenIsZeroInTheBlocks) {
  const Page page(32, 5);
  const PageEncoder encoder(kGeometry, {CodecId::k4, CodecId::k3, true});
  const F16Page pages[] = {page.f16()};
  const SegmentConstants constants = ConstantsOf(kGeometry, pages, true);
  const Bytes base = NewPage(encoder.layout()), refinement = NewPage(encoder.refinement_layout());
  encoder.Encode(page.f16(), true, &constants, base.get(), refinement.get());
  std::vector<float> rows(32 * 64);
  for (const Side side : {Side::kK, Side::kV}) {
    const Codec& codec = CodecOf(side == Side::kK ? CodecId::k4 : CodecId::k3);
    codec.decode(side, base.get() + encoder.layout().BlockOffset(side, 1, 1), 32, 64, rows.data());
    EXPECT_TRUE(std::all_of(rows.begin(), rows.begin() + 64, [](float x) { return x == 0; }));
    EXPECT_FALSE(std::all_of(rows.begin() + 64, rows.end(), [](float x) { return x == 0; }));
    CodecOf(CodecId::kRefine4)
        .decode(side, refinement.get() + encoder.refinement_layout().BlockOffset(side, 1, 1), 32, 64, rows.data());
    EXPECT_TRUE(std::all_of(rows.begin(), rows.begin() + 64, [](float x) { return x == 0; }));
  }
}

}  // namespace
}  // namespace qkv
