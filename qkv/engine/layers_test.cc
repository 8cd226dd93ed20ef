// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Pages whose layers are coded in different pairs: the same blocks, and the same attention, as pages of each layer's pair;
// handed over exactly, spliced, measured.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>

#include "qkv/attention/attention.h"
#include "qkv/engine/layer_sensitivity.h"
#include "qkv/engine/page_encoder.h"
#include "qkv/engine/preset.h"
#include "qkv/engine/quality_gate.h"
#include "qkv/engine/quality_probe.h"
#include "qkv/engine/sequence.h"
#include "qkv/engine/test_support.h"
#include "tests/tiny_model.h"

namespace qkv {
namespace {

using testing::Checksums;
using ::testing::HasSubstr;
using testing::Logits;
using testing::PublishedBy;
using testing::Read;
using testing::SourceTokens;
using testing::TestModel;

constexpr CodecPair kF16 = {CodecId::kF16, CodecId::kF16};
constexpr CodecId kCodecs[] = {CodecId::k3, CodecId::k4, CodecId::k5, CodecId::k6, CodecId::k7, CodecId::k8};

// Every codec on either side, in no order.
PageCodecs Mixed(const Geometry& geometry, int shift = 0) {
  std::vector<CodecPair> pairs;
  for (int layer = 0; layer < geometry.n_layers; ++layer) {
    pairs.push_back({kCodecs[(5 * layer + shift) % 6], kCodecs[(layer * layer + 1 + shift) % 6]});
  }
  auto table = LayerCodecs::Create(geometry, pairs);
  EXPECT_TRUE(table) << table.error().message;
  return PageCodecs(kLayersPair, *table);
}

struct AlignedFree {
  void operator()(std::byte* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<std::byte[], AlignedFree>;
Bytes NewPage(const PageLayout& layout) {
  Bytes bytes(static_cast<std::byte*>(std::aligned_alloc(kPageAlignment, layout.bytes)));
  std::fill_n(bytes.get(), layout.bytes, std::byte{0});
  return bytes;
}

// Two pages of random rows, 32 and 9 tokens, from position 0 on.
class MixedPages : public ::testing::Test {
 protected:
  static constexpr Geometry kGeometry{7, 2, 64};
  static constexpr int kTokens[] = {32, 9};

  MixedPages() {
    const PageLayout layout(kGeometry, kF16);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (const int tokens : kTokens) {
      Bytes page = NewPage(layout);
      for (int layer = 0; layer < kGeometry.n_layers; ++layer) {
        for (int head = 0; head < kGeometry.n_kv_heads; ++head) {
          for (const Side side : {Side::kK, Side::kV}) {
            std::vector<float> rows(static_cast<size_t>(tokens) * 64);
            for (float& x : rows) x = 0.5f + normal(random);
            CodecOf(CodecId::kF16)
                .encode(side, rows.data(), tokens, 64, page.get() + layout.BlockOffset(side, layer, head));
          }
        }
      }
      f16_.push_back({page.get(), tokens});
      storage_.push_back(std::move(page));
    }
    constants_.emplace(ConstantsOf(kGeometry, f16_, /*at_zero=*/true));
  }

  struct Encoded {
    PageCodecs codecs;
    std::vector<PageRef> refs;
  };
  Encoded Encode(const PageCodecs& codecs) {
    Encoded out{codecs, {}};
    const PageEncoder encoder(kGeometry, codecs);
    for (size_t i = 0; i < f16_.size(); ++i) {
      Bytes page = NewPage(encoder.layout());
      encoder.Encode(f16_[i], i == 0, &*constants_, page.get(), nullptr);
      PageRef ref{.data = page.get(), .codecs = encoder.base(), .tokens = f16_[i].tokens};
      ref.constants = reinterpret_cast<const std::byte*>(constants_->halves.data());
      ref.exact_first = i == 0;
      ref.layers = codecs.layers.get();
      out.refs.push_back(ref);
      storage_.push_back(std::move(page));
    }
    return out;
  }

  std::vector<F16Page> f16_;
  std::optional<SegmentConstants> constants_;
  std::vector<Bytes> storage_;
};

TEST_F(MixedPages, EachLayersBlocksAreThoseOfItsPair) {
  const Encoded mixed = Encode(Mixed(kGeometry));
  const PageLayout layout(kGeometry, kLayersPair, mixed.codecs.layers.get());
  for (int layer = 0; layer < kGeometry.n_layers; ++layer) {
    const CodecPair pair = mixed.codecs.layers->at(layer).codecs;
    const Encoded uniform = Encode(pair);
    const PageLayout of_pair(kGeometry, pair);
    for (size_t page = 0; page < f16_.size(); ++page) {
      for (int head = 0; head < kGeometry.n_kv_heads; ++head) {
        for (const Side side : {Side::kK, Side::kV}) {
          const size_t bytes = CodecOf(side == Side::kK ? pair.k : pair.v).block_bytes(64);
          EXPECT_EQ(std::memcmp(mixed.refs[page].data + layout.BlockOffset(side, layer, head),
                                uniform.refs[page].data + of_pair.BlockOffset(side, layer, head), bytes),
                    0)
              << "layer " << layer << ", page " << page;
        }
      }
    }
  }
}

std::vector<float> Attended(std::span<const PageRef> pages, const Geometry& geometry, int layer, int n_queries) {
  const AttentionShape shape{2 * geometry.n_kv_heads, geometry.n_kv_heads, geometry.head_dim, 0.125f};
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<size_t>(n_queries * shape.n_heads * shape.head_dim)), out(q.size());
  for (float& x : q) x = normal(random);
  const AttentionPlan plan(shape, n_queries, pages);
  std::vector<std::byte> scratch(plan.scratch_bytes() + 64);
  auto* aligned = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  std::vector<float> partials(plan.partial_floats());
  for (int item = 0; item < plan.n_attend_items(); ++item) {
    Attend(plan, pages, geometry.n_layers, layer, q.data(), item, aligned, partials.data(), out.data());
  }
  for (int item = 0; item < plan.n_merge_items(); ++item) Merge(plan, partials.data(), item, out.data());
  return out;
}

TEST_F(MixedPages, AttentionOfALayerIsThatOverPagesOfItsPair) {
  const Encoded mixed = Encode(Mixed(kGeometry)), other = Encode(Mixed(kGeometry, 2));
  for (const int n_queries : {1, 9}) {
    for (int layer = 0; layer < kGeometry.n_layers; ++layer) {
      const Encoded uniform = Encode(mixed.codecs.layers->at(layer).codecs);
      EXPECT_EQ(Attended(mixed.refs, kGeometry, layer, n_queries), Attended(uniform.refs, kGeometry, layer, n_queries));
      // Pages of two tables and of none beside each other.
      const Encoded second = Encode(other.codecs.layers->at(layer).codecs);
      const std::vector<PageRef> both = {mixed.refs[0], other.refs[0], uniform.refs[0], other.refs[1], mixed.refs[1]};
      const std::vector<PageRef> same = {uniform.refs[0], second.refs[0], uniform.refs[0], second.refs[1],
                                         uniform.refs[1]};
      EXPECT_EQ(Attended(both, kGeometry, layer, n_queries), Attended(same, kGeometry, layer, n_queries));
    }
  }
}

TEST_F(MixedPages, TheReferenceReadsThemAlike) {
  const Encoded mixed = Encode(Mixed(kGeometry));
  const AttentionShape shape{2, 2, 64, 0.125f};
  const std::vector<float> q(128, 0.3f);
  std::vector<float> a(128), b(128);
  for (int layer = 0; layer < kGeometry.n_layers; ++layer) {
    AttendReference(shape, mixed.refs, kGeometry.n_layers, layer, q.data(), 1, a.data());
    AttendReference(shape, Encode(mixed.codecs.layers->at(layer).codecs).refs, kGeometry.n_layers, layer, q.data(), 1,
                    b.data());
    EXPECT_EQ(a, b);
  }
}

std::unique_ptr<Sequence> NewSequence(const PageCodecs& kv) {
  SequenceOptions options;
  options.n_ctx = 1024;
  options.kv = kv;
  auto sequence = Sequence::Create(TestModel(), options);
  EXPECT_TRUE(sequence) << sequence.error().message;
  return *std::move(sequence);
}

TEST(Layers, AConsumerGoesOnBitForBitAsTheProducerDoes) {
  const PageCodecs kv = Mixed(TestModel()->geometry());
  for (const size_t n : {1, 100}) {
    auto producer = NewSequence(kv);
    Read(*producer, SourceTokens(50, n));
    const Context context = PublishedBy(*producer);
    EXPECT_EQ(context.card.format().kv(), "layers");
    EXPECT_EQ(context.card.format().rotation(), "hadamard");
    EXPECT_NEAR(producer->stats().base_bits, BitsPerValue(*kv.layers), 1e-12);
    // Whole pages, and once three vectors of halves per layer and head and two bytes per layer.
    const Geometry& g = TestModel()->geometry();
    const double once = 8.0 * (6 * g.head_dim * g.n_kv_heads + 2) / (2 * g.head_dim * g.n_kv_heads);
    EXPECT_NEAR(SizeOf(context).bits_per_value * n,
                BitsPerValue(*kv.layers) * 32 * static_cast<double>((n + 31) / 32) + once, 1e-9);
    auto consumer = NewSequence(kv);
    ASSERT_TRUE(consumer->Attach(context));
    for (Sequence* sequence : {producer.get(), consumer.get()}) {
      Read(*sequence, {});
      Read(*sequence, SourceTokens(300, 80));
      Read(*sequence, SourceTokens(900, 9));
    }
    EXPECT_EQ(Logits(*consumer), Logits(*producer));
    EXPECT_EQ(Checksums(PublishedBy(*consumer)), Checksums(PublishedBy(*producer)));
  }
}

// Whoever reads them needs no table of its own, and whatever is written next has one of its own.
TEST(Layers, ReadersOfOtherCodecsGoOnFromThem) {
  auto producer = NewSequence(Mixed(TestModel()->geometry()));
  Read(*producer, SourceTokens(0, 70));
  const Context context = PublishedBy(*producer);
  Read(*producer, {});
  for (const PageCodecs& kv : {PageCodecs(CodecId::kI8, CodecId::kI8), Mixed(TestModel()->geometry(), 1)}) {
    auto reader = NewSequence(kv);
    ASSERT_TRUE(reader->Attach(context));
    Read(*reader, {});
    EXPECT_EQ(Logits(*reader), Logits(*producer));
    Read(*reader, SourceTokens(300, 40));
    const Context longer = PublishedBy(*reader);
    auto last = NewSequence(kF16);
    ASSERT_TRUE(last->Attach(longer));
    for (Sequence* sequence : {reader.get(), last.get()}) Read(*sequence, SourceTokens(500, 3));
    EXPECT_EQ(Logits(*last), Logits(*reader));
  }
}

TEST(Layers, ASplicedContextIsHandedOnBitForBit) {
  const PageCodecs kv = Mixed(TestModel()->geometry());
  auto source = NewSequence(kv);
  Read(*source, SourceTokens(300, 64));
  const Context context = PublishedBy(*source);
  auto reader = NewSequence(Mixed(TestModel()->geometry(), 3));
  Read(*reader, SourceTokens(0, 40));
  const SpliceSource spliced{&context, 0};
  const auto result = reader->Splice({&spliced, 1}, {});
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_EQ(result->tokens_spliced, 64);
  const Context whole = PublishedBy(*reader);
  auto next = NewSequence(kv);
  ASSERT_TRUE(next->Attach(whole));
  for (Sequence* sequence : {reader.get(), next.get()}) Read(*sequence, SourceTokens(600, 5));
  EXPECT_EQ(Logits(*next), Logits(*reader));
}

TEST(Layers, ACardThatGivesThemARefinementIsRefused) {
  auto refined = NewSequence(PageCodecs(CodecId::k4, CodecId::k4, true));
  Read(*refined, SourceTokens(0, 40));
  const Context beside = PublishedBy(*refined);
  auto producer = NewSequence(Mixed(TestModel()->geometry()));
  Read(*producer, SourceTokens(0, 40));
  Context context = PublishedBy(*producer);
  ASSERT_TRUE(NewSequence(kF16)->Attach(context));
  const uint32_t refinement = beside.card.spans(0).refinement_segment() - 1;
  context.segments.push_back(beside.segments[refinement]);
  *context.card.add_segments() = beside.card.segments(static_cast<int>(refinement));
  context.card.mutable_spans(0)->set_refinement_segment(2);
  const Status attached = NewSequence(kF16)->Attach(context);
  ASSERT_FALSE(attached);
  EXPECT_THAT(attached.error().message, HasSubstr("does not match its refinement pages"));
}

TEST(Layers, ATableOfAnotherModelIsRefused) {
  SequenceOptions options;
  options.kv = Mixed({3, 3, 64});
  EXPECT_EQ(Sequence::Create(TestModel(), options).error().code, Code::kInvalidArgument);
  options.kv = PageCodecs(kLayersPair);
  EXPECT_EQ(Sequence::Create(TestModel(), options).error().code, Code::kInvalidArgument);
}

TEST(Layers, AndGroupsOfTokensAreNotAskedForTogether) {
  SequenceOptions options;
  options.kv = Mixed(TestModel()->geometry());
  options.groups = TokenGroups{.low = kF16};
  const auto refused = Sequence::Create(TestModel(), options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("by layer"));
}

// Pages of a context's groups, then pages with a table.
TEST(Layers, GoOnFromAGroupedPrompt) {
  SequenceOptions options;
  options.n_ctx = 1024;
  options.kv = CodecPair{CodecId::k8, CodecId::k8};
  options.groups = TokenGroups{.percent = 30, .low = CodecPair{CodecId::k4, CodecId::k4}};
  auto producer = Sequence::Create(TestModel(), options);
  ASSERT_TRUE(producer) << producer.error().message;
  Read(**producer, SourceTokens(50, 150));
  ASSERT_FALSE((*producer)->groups().empty());
  const Context context = PublishedBy(**producer);
  auto heir = NewSequence(Mixed(TestModel()->geometry()));
  ASSERT_TRUE(heir->Attach(context));
  Read(*heir, SourceTokens(300, 80));
  const Context theirs = PublishedBy(*heir);
  EXPECT_EQ(theirs.card.format().kv(), "layers");
  EXPECT_EQ(theirs.card.mask().groups().SerializeAsString(), context.card.mask().groups().SerializeAsString());
  auto last = NewSequence(kF16);
  ASSERT_TRUE(last->Attach(theirs));
  Read(*last, {});
  Read(*heir, {});
  EXPECT_EQ(Logits(*last), Logits(*heir));
}

class MeasuredLayers : public ::testing::Test {
 protected:
  MeasuredLayers() {
    testing::WriteTinyModel({.n_layers = 3, .q_scale = 4}, path_);
    auto loaded = Model::Load(path_);
    EXPECT_TRUE(loaded) << loaded.error().message;
    if (loaded) model_ = *loaded;
    std::mt19937 random(5);
    for (int stretch = 0; stretch < 2; ++stretch) {
      auto& tokens = stretches_.emplace_back();
      for (int i = 0; i < kPrefix + 12; ++i) tokens.push_back(static_cast<Token>(3 + random() % 300));
    }
  }
  ~MeasuredLayers() override { std::remove(path_.c_str()); }

  static constexpr int kPrefix = 70;
  const std::string path_ = ::testing::TempDir() + "qkv-layers-tiny.gguf";
  std::shared_ptr<const Model> model_;
  std::vector<std::vector<Token>> stretches_;
};

// Real pages say the same: `widths` those with one side in f16, a layer's own figure those where the other layers are in 8
// bits, which hardly matters beside 3.
TEST_F(MeasuredLayers, AgreeWithPages) {
  size_t steps = 0;
  const auto measured = MeasureLayers(model_, stretches_, kPrefix, 1, [&](size_t done, size_t total) {
    EXPECT_EQ(done, ++steps);
    EXPECT_EQ(total, 2u * (2 * 3 + 2 * 6 + 1));
  });
  ASSERT_TRUE(measured) << measured.error().message;
  EXPECT_EQ(measured->tokens, 2 * (kPrefix + 12));
  ProbeOptions options;
  options.n_threads = 1;
  const auto over_pages = [&](const PageCodecs& kv) {
    double kl = 0;
    for (const auto& tokens : stretches_) {
      kl += (*HandoffProbe::Read(model_, tokens, kPrefix, options))->Score({kv, {}})->score.kl_mean() / 2;
    }
    return kl;
  };
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(measured->k.widths[i] / over_pages({kCodecs[i], CodecId::kF16}), 1, 0.05) << i;
    EXPECT_NEAR(measured->v.widths[i] / over_pages({CodecId::kF16, kCodecs[i]}), 1, 0.05) << i;
  }
  for (size_t layer = 0; layer < 3; ++layer) {
    std::vector<CodecPair> k(3, {CodecId::k8, CodecId::k8}), v = k;
    k[layer].k = v[layer].v = CodecId::k3;
    EXPECT_NEAR(measured->k.layer[layer] / over_pages({kLayersPair, *LayerCodecs::Create(model_->geometry(), k)}), 1,
                0.1);
    EXPECT_NEAR(measured->v.layer[layer] / over_pages({kLayersPair, *LayerCodecs::Create(model_->geometry(), v)}), 1,
                0.1);
  }
}

TEST_F(MeasuredLayers, AreFoundBesideTheModelOrNot) {
  const std::string path = LayerSensitivityPath(*model_);
  EXPECT_THAT(path, HasSubstr(model_->identity().weights_digest() + ".qkvlayers"));
  const auto none = CodecsByLayer(*model_, 4);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Code::kNotFound);
  EXPECT_THAT(none.error().message, HasSubstr("calibrate --layers"));
  EXPECT_EQ(ReadLayerSensitivity(*model_, ::testing::TempDir()).error().code, Code::kCorrupt);
}

TEST_F(MeasuredLayers, ALimitIsKeptByTheTableWhereItIsPredictedBetter) {
  // 3.5 bits at 3 everywhere with heads of 32; pairs begin at k=4,v=3: 4 bits.
  const auto within = [&](double bits) {
    const auto kv = BestWithinBits(*model_, bits);
    return kv ? *kv : PageCodecs(CodecId::kRefine4, CodecId::kRefine4);
  };
  EXPECT_EQ(within(4.5).pair, (CodecPair{CodecId::k4, CodecId::k4}));
  EXPECT_FALSE(BestWithinBits(*model_, 3.9));
  LayerSensitivity s;
  s.k = {{1, 9, 2}, {1e-2, 3e-3, 8e-4, 2e-4, 5e-5, 1e-5}};
  s.v = {{1, 1, 1}, {1e-3, 3e-4, 8e-5, 2e-5, 5e-6, 1e-6}};
  const std::string path = LayerSensitivityPath(*model_);
  std::ofstream(path) << ToJson(s, model_->identity().weights_digest());
  EXPECT_EQ(within(4.5), *CodecsByLayer(*model_, 4.5));
  EXPECT_EQ(within(3.9).pair, kLayersPair);
  EXPECT_LE(BitsPerValue(*within(3.9).layers), 3.9);
  EXPECT_EQ(within(16).pair, kF16);
  EXPECT_EQ(within(8.5).pair, (CodecPair{CodecId::k8, CodecId::k8}));  // as a table it would be the same
  EXPECT_FALSE(BestWithinBits(*model_, 3.4));
  // 70 tokens are three pages of 4096 bytes' multiples.
  for (const uint64_t page_bytes : {8192u, 12288u, 16384u}) {
    const auto kv = BestWithinBytes(*model_, 3 * page_bytes + 4095, 70);
    ASSERT_TRUE(kv) << kv.error().message;
    EXPECT_LE(PageLayout(model_->geometry(), kv->pair, kv->layers.get()).bytes, page_bytes);
  }
  EXPECT_EQ(BestWithinBytes(*model_, 1000, 70).error().reason, Reason::kPoolFull);
  std::ofstream(path) << "{}";
  EXPECT_EQ(BestWithinBits(*model_, 4.5).error().code, Code::kCorrupt);  // not silently something else
  std::remove(path.c_str());
}

TEST_F(MeasuredLayers, TheGateMeasuresATableAsItIs) {
  QualityGate gate(model_, {.directory = "", .n_threads = 1});
  const PageCodecs one = Mixed(model_->geometry()), other = Mixed(model_->geometry(), 1);
  const auto a = gate.Check(one), b = gate.Check(other), again = gate.Check(one);
  ASSERT_TRUE(a) << a.error().message;
  EXPECT_NE(a->kl, b->kl);  // not taken for one another
  EXPECT_FALSE(a->known);
  EXPECT_TRUE(again->known);
  EXPECT_EQ(again->kl, a->kl);
  SequenceOptions options;
  options.kv = one;
  auto sequence = Sequence::Create(model_, options);
  ASSERT_TRUE(sequence);
  Read(**sequence, stretches_[0]);
  EXPECT_EQ(gate.Admit(PublishedBy(**sequence)).has_value(), a->Within());
}

}  // namespace
}  // namespace qkv
