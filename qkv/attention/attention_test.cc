// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/attention/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "hwy/aligned_allocator.h"
#define HWY_WANT_AVX3_DL 1  // as attend.cc
#include "hwy/highway.h"
#include "qkv/attention/scratch.h"
#include "qkv/codec/frame.h"
#include "qkv/codec/half.h"
#include "qkv/codec/test_support.h"

namespace qkv {
namespace {

using ::testing::ElementsAre;
using ::testing::Le;

// fp32 all the way (half-precision pages): rounding of about head_dim + n_keys additions.
constexpr double kFloatTolerance = 2e-6;
// Integer codes: queries and weights are rounded to 14 bits and a sign or better.
constexpr double kCodesTolerance = 1e-3;

constexpr std::array kAllCodecs = {CodecId::kF16,   CodecId::kI8,        CodecId::kI8Channel, CodecId::kI8Tensor,
                                   CodecId::kI4,    CodecId::kI4Z,       CodecId::k3,         CodecId::k4,
                                   CodecId::k5,     CodecId::k6,         CodecId::k7,         CodecId::k8,
                                   CodecId::kBands, CodecId::kI4Channel, CodecId::kPq4,       CodecId::kPq2};

// V beside a K of that codec.
CodecId ForValues(CodecId k) {
  return CodecOf(k).keys_only ? CodecId::k4 : k;
}

struct PageSpec {
  CodecPair codecs;
  int tokens = kPageTokens;
  int constants = 0;    // which ones its segment has
  bool starts = false;  // a sequence starts here: its first token is exact
};

// Pages with random contents, all layers, as a writer would make them.
class Context {
 public:
  Context(const Geometry& geometry, const std::vector<PageSpec>& specs, uint32_t seed, float spread = 1)
      : geometry_(geometry),
        random_(seed),
        spread_(spread),
        codebooks_(std::make_shared<const PqCodebooks>(
            test::TestCodebooks({geometry.n_layers, geometry.n_kv_heads, geometry.head_dim}))) {
    for (const PageSpec& spec : specs) {
      const size_t set = static_cast<size_t>(spec.constants);
      while (constants_.size() <= set) constants_.push_back(RandomConstants());
      const bool rotated = CodecOf(spec.codecs.k).rotated || CodecOf(spec.codecs.v).rotated;
      std::byte* page = NewPage(spec.codecs);
      std::byte* refinement = spec.codecs.refine ? NewPage(kRefinement) : nullptr;
      for (int layer = 0; layer < geometry.n_layers; ++layer) {
        for (int head = 0; head < geometry.n_kv_heads; ++head) {
          for (Side side : {Side::kK, Side::kV}) {
            WriteBlock(spec, side, layer, head, page, refinement);
          }
        }
      }
      PageRef ref{page, spec.codecs, spec.tokens};
      if (rotated) ref.constants = reinterpret_cast<const std::byte*>(constants_[set].data());
      ref.exact_first = rotated && spec.starts;
      ref.refinement = refinement;
      ref.codebooks = codebooks_.get();
      pages_.push_back(ref);
    }
  }

  std::vector<PageRef>& pages() { return pages_; }
  const std::vector<PageRef>& pages() const { return pages_; }
  const Geometry& geometry() const { return geometry_; }
  std::byte* block(size_t page, Side side, int layer, int head) {
    return const_cast<std::byte*>(pages_[page].data) +
           PageLayout(geometry_, pages_[page].codecs).BlockOffset(side, layer, head);
  }
  std::byte* refinement_block(size_t page, Side side, int layer, int head) {
    return const_cast<std::byte*>(pages_[page].refinement) +
           PageLayout(geometry_, kRefinement).BlockOffset(side, layer, head);
  }

 private:
  static constexpr CodecPair kRefinement{CodecId::kRefine4, CodecId::kRefine4};

  std::byte* NewPage(CodecPair codecs) {
    const PageLayout layout(geometry_, codecs);
    storage_.push_back(hwy::AllocateAligned<std::byte>(layout.bytes));
    std::memset(storage_.back().get(), 0, layout.bytes);
    return storage_.back().get();
  }

  std::vector<uint16_t> RandomConstants() {
    std::vector<uint16_t> halves(ConstantOffset(geometry_, geometry_.n_layers, 0, Constant::kMeanK) / 2);
    for (uint16_t& half : halves) half = HalfFromFloat(spread_ * normal_(random_));
    return halves;
  }

  void WriteBlock(const PageSpec& spec, Side side, int layer, int head, std::byte* page, std::byte* refinement) {
    const size_t dim = static_cast<size_t>(geometry_.head_dim), n = static_cast<size_t>(spec.tokens) * dim;
    std::vector<float> rows(n);
    for (size_t i = 0; i < n; ++i) {
      // Channels 3, 20, 37… are outliers in K, and V has a mean, as in real models.
      rows[i] = normal_(random_) * (side == Side::kK ? spread_ * (i % dim % 17 == 3 ? 3.0f : 1.0f) : 1.0f) +
                (side == Side::kV ? 0.25f : 0.0f);
    }
    const Codec& codec = CodecOf(side == Side::kK ? spec.codecs.k : spec.codecs.v);
    std::byte* block = page + PageLayout(geometry_, spec.codecs).BlockOffset(side, layer, head);
    if (codec.rotated) {
      std::vector<float> mean(dim);
      const uint16_t* halves = constants_[static_cast<size_t>(spec.constants)].data() +
                               ConstantOffset(geometry_, layer, head, Constant::kMeanK) / 2;
      for (size_t c = 0; c < dim; ++c) mean[c] = FloatFromHalf(halves[c]);
      for (size_t i = 0; i < n && side == Side::kK; ++i) rows[i] += mean[i % dim];
      ToRotated(rows.data(), spec.tokens, geometry_.head_dim, side == Side::kK ? mean.data() : nullptr, rows.data(),
                codec.id == CodecId::kBands);
      if (spec.starts) std::fill_n(rows.data(), dim, 0.0f);
    }
    const PqBook book = codec.needs_book ? codebooks_->book(codec.id, layer, head, side) : PqBook();
    codec.encode(side, rows.data(), spec.tokens, geometry_.head_dim, block, &book);
    if (refinement == nullptr) return;
    std::vector<float> coarse(n);
    codec.decode(side, block, spec.tokens, geometry_.head_dim, coarse.data());
    for (size_t i = 0; i < n; ++i) rows[i] -= coarse[i];
    CodecOf(CodecId::kRefine4)
        .encode(side, rows.data(), spec.tokens, geometry_.head_dim,
                refinement + PageLayout(geometry_, kRefinement).BlockOffset(side, layer, head));
  }

  Geometry geometry_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  float spread_;
  std::shared_ptr<const PqCodebooks> codebooks_;
  std::vector<hwy::AlignedFreeUniquePtr<std::byte[]>> storage_;
  std::vector<std::vector<uint16_t>> constants_;
  std::vector<PageRef> pages_;
};

// The first token starts a sequence.
std::vector<PageSpec> PagesOf(int n_keys, CodecPair codecs) {
  std::vector<PageSpec> specs;
  for (; n_keys > 0; n_keys -= kPageTokens) specs.push_back({codecs, std::min(n_keys, kPageTokens)});
  specs.front().starts = true;
  return specs;
}

AttentionShape ShapeOf(const Geometry& geometry, int group) {
  return {geometry.n_kv_heads * group, geometry.n_kv_heads, geometry.head_dim,
          1 / std::sqrt(static_cast<float>(geometry.head_dim))};
}

std::vector<float> RandomQueries(const AttentionShape& shape, int n_queries, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<size_t>(n_queries * shape.n_heads * shape.head_dim));
  for (float& value : q) value = normal(random);
  return q;
}

// Runs a step in the given order of items. Output and partials start as NaN, so that what no item writes shows.
std::vector<float> RunStep(const AttentionPlan& plan, const Context& context, int layer, const std::vector<float>& q,
                           const std::vector<int>& order, KeyCounts* counts = nullptr) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> out(q.size(), nan), partials(plan.partial_floats(), nan);
  auto scratch = hwy::AllocateAligned<std::byte>(plan.scratch_bytes());
  std::memset(scratch.get(), 0xff, plan.scratch_bytes());
  for (int item : order) {
    Attend(plan, context.pages(), context.geometry().n_layers, layer, q.data(), item, scratch.get(), partials.data(),
           out.data(), counts);
  }
  for (int item = 0; item < plan.n_merge_items(); ++item) Merge(plan, partials.data(), item, out.data());
  return out;
}

std::vector<int> InOrder(int n) {
  std::vector<int> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

std::vector<float> RunStep(const AttentionPlan& plan, const Context& context, int layer, const std::vector<float>& q) {
  return RunStep(plan, context, layer, q, InOrder(plan.n_attend_items()));
}

std::vector<float> Reference(const AttentionShape& shape, const Context& context, int layer,
                             const std::vector<float>& q, int n_queries) {
  std::vector<float> out(q.size());
  AttendReference(shape, context.pages(), context.geometry().n_layers, layer, q.data(), n_queries, out.data());
  return out;
}

double RelativeRms(const std::vector<float>& found, const std::vector<float>& expected) {
  double error = 0, power = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double difference = static_cast<double>(found[i]) - expected[i];
    error += difference * difference;
    power += static_cast<double>(expected[i]) * expected[i];
  }
  return std::sqrt(error / power);  // NaN if anything is, and NaN is not <= a tolerance
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// As the plan would be with chunks of that many pages.
AttentionPlan Rechunked(AttentionPlan plan, const Context& context, int chunk_pages) {
  plan.chunk_pages = chunk_pages;
  plan.n_chunks = (plan.n_pages + chunk_pages - 1) / chunk_pages;
  plan.chunk_first_key.clear();
  int key = 0;
  for (int page = 0; page < plan.n_pages; ++page) {
    if (page % chunk_pages == 0) plan.chunk_first_key.push_back(key);
    key += context.pages()[static_cast<size_t>(page)].tokens;
  }
  return plan;
}

// ---- The reference itself

TEST(Reference, WeighsTwoTokensAsTheFormulaSays) {
  Context context({1, 1, 32}, {{{CodecId::kF16, CodecId::kF16}, 2}}, 1);
  std::vector<float> k(2 * 32, 0.0f), v(2 * 32, 0.0f);
  k[0] = 1;       // token 0: (1, 0, …)
  k[32 + 1] = 2;  // token 1: (0, 2, 0, …)
  v[5] = 10;
  v[32 + 5] = -6;
  v[32 + 31] = 1;
  CodecOf(CodecId::kF16).encode(Side::kK, k.data(), 2, 32, context.block(0, Side::kK, 0, 0));
  CodecOf(CodecId::kF16).encode(Side::kV, v.data(), 2, 32, context.block(0, Side::kV, 0, 0));

  // Two queries: the first sees token 0 only. The second has scores 0.5 * 4 = 2 and 0.5 * 2 * 3 = 3.
  const AttentionShape shape{1, 1, 32, 0.5f};
  std::vector<float> q(2 * 32, 0.0f);
  q[0] = q[1] = 7;
  q[32] = 4;
  q[32 + 1] = 3;
  const std::vector<float> out = Reference(shape, context, 0, q, 2);
  const double second = 1 / (1 + std::exp(-1.0));  // weight of token 1
  EXPECT_FLOAT_EQ(out[5], 10);
  EXPECT_FLOAT_EQ(out[31], 0);
  EXPECT_FLOAT_EQ(out[32 + 5], static_cast<float>(10 * (1 - second) - 6 * second));
  EXPECT_FLOAT_EQ(out[32 + 31], static_cast<float>(second));
}

TEST(Reference, GivesEachQueryHeadOfAGroupItsKvHead) {
  const Geometry geometry{2, 2, 32};
  Context context(geometry, PagesOf(1, {CodecId::kF16, CodecId::kF16}), 2);
  std::vector<float> v(32);
  for (int head = 0; head < 2; ++head) {
    std::fill(v.begin(), v.end(), head == 0 ? 3.0f : -5.0f);
    CodecOf(CodecId::kF16).encode(Side::kV, v.data(), 1, 32, context.block(0, Side::kV, 1, head));
  }
  const AttentionShape shape = ShapeOf(geometry, 2);
  const std::vector<float> out = Reference(shape, context, 1, RandomQueries(shape, 1, 3), 1);
  EXPECT_THAT((std::vector<float>{out[0], out[32], out[64], out[96]}), ElementsAre(3, 3, -5, -5));
}

// ---- The plan

struct PlanCase {
  int group, n_kv_heads, n_queries, n_pages;
};

TEST(Plan, CoversEveryHeadQueryAndPageExactlyOnce) {
  for (const PlanCase& c : {PlanCase{3, 3, 1, 1}, PlanCase{3, 3, 1, 256}, PlanCase{3, 3, 512, 300},
                            PlanCase{1, 8, 97, 33}, PlanCase{16, 1, 70, 50}, PlanCase{7, 2, 13, 17}}) {
    const AttentionShape shape{c.group * c.n_kv_heads, c.n_kv_heads, 64, 1};
    const std::vector<PageRef> pages(static_cast<size_t>(c.n_pages), PageRef{nullptr, {}, kPageTokens});
    const AttentionPlan plan(shape, c.n_queries, pages);
    std::vector<int> hits(static_cast<size_t>(c.n_kv_heads * c.n_queries * c.n_pages));
    for (int i = 0; i < plan.n_attend_items(); ++i) {
      const AttentionPlan::Item item = plan.ItemAt(i);
      EXPECT_EQ(item.first_key, item.first_page * kPageTokens);
      const int tile = item.first_query / plan.tile_queries;
      EXPECT_EQ(plan.ItemIndex(item.kv_head, tile, item.first_page / plan.chunk_pages), i);
      for (int query = item.first_query; query < item.first_query + item.n_queries; ++query) {
        for (int page = item.first_page; page < item.first_page + item.n_pages; ++page) {
          ++hits[static_cast<size_t>((item.kv_head * c.n_queries + query) * c.n_pages + page)];
        }
      }
    }
    EXPECT_EQ(std::count(hits.begin(), hits.end(), 1), static_cast<std::ptrdiff_t>(hits.size()));
  }
}

TEST(Plan, KeepsShortContextsInOneChunkAndSplitsLongOnesForManyThreads) {
  const AttentionShape shape{9, 3, 64, 0.125f};
  const auto plan_of = [&](int n_queries, int n_keys) {
    const size_t n_pages = static_cast<size_t>(n_keys / kPageTokens);
    return AttentionPlan(shape, n_queries, std::vector<PageRef>(n_pages, PageRef{nullptr, {}, kPageTokens}));
  };
  EXPECT_EQ(plan_of(1, 512).n_merge_items(), 0);
  EXPECT_EQ(plan_of(1, 512).partial_floats(), 0u);
  EXPECT_EQ(plan_of(1, 8192).n_attend_items(), 48);
  EXPECT_EQ(plan_of(1, 8192).n_merge_items(), 3);
  EXPECT_EQ(plan_of(512, 8192).n_chunks, 1);
  EXPECT_THAT(plan_of(512, 8192).tile_rows(), Le(96));
}

// ---- The kernels, on every target that this CPU has

std::string TargetName(const testing::TestParamInfo<int64_t>& info) {
  return hwy::TargetName(info.param);
}

class Attention : public testing::TestWithParam<int64_t> {
 protected:
  Attention() { Use(GetParam()); }
  ~Attention() override { Use(0); }

  // The scalar code is slow; it needs fewer cases, since it has only one path.
  bool slow() const { return GetParam() == HWY_SCALAR; }

 private:
  static void Use(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

std::vector<int64_t> Targets() {
  std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
#if HWY_ARCH_X86
  std::erase_if(targets, [](int64_t t) { return (t & (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3)) != 0; });  // see attend.cc
#endif
  return targets;
}
INSTANTIATE_TEST_SUITE_P(On, Attention, testing::ValuesIn(Targets()), TargetName);

bool IsHalf(const Context& context) {
  return std::all_of(context.pages().begin(), context.pages().end(), [](const PageRef& page) {
    return page.codecs == CodecPair{CodecId::kF16, CodecId::kF16};
  });
}

void ExpectAsReference(const Context& context, int group, int n_queries, int layer, uint32_t seed) {
  const AttentionShape shape = ShapeOf(context.geometry(), group);
  const std::vector<float> q = RandomQueries(shape, n_queries, seed);
  const AttentionPlan plan(shape, n_queries, context.pages());
  EXPECT_THAT(RelativeRms(RunStep(plan, context, layer, q), Reference(shape, context, layer, q, n_queries)),
              Le(IsHalf(context) ? kFloatTolerance : kCodesTolerance))
      << "head_dim " << shape.head_dim << ", " << shape.n_heads << " heads, " << shape.n_kv_heads << " KV heads, "
      << n_queries << " queries, " << plan.n_keys << " keys, layer " << layer << ", seed " << seed;
}

TEST_P(Attention, EqualsTheReferenceForEveryCodecPair) {
  for (CodecId k : kAllCodecs) {
    for (CodecId v : kAllCodecs) {
      // Of the rotated ones each with each, and with one that is not.
      const bool mixed = CodecOf(k).rotated != CodecOf(v).rotated;
      if (CodecOf(v).keys_only || (mixed && k != CodecId::kI8 && v != CodecId::kI4)) continue;
      for (int head_dim : {64, 80, 128}) {
        if (slow() && head_dim != 80) continue;
        SCOPED_TRACE(ToString(CodecPair{k, v}));
        const Context context({1, 2, head_dim}, PagesOf(150, {k, v}), 7);
        ExpectAsReference(context, 3, 1, 0, 8);
        ExpectAsReference(context, 3, 20, 0, 9);
      }
    }
  }
}

TEST_P(Attention, EqualsTheReferenceForRandomShapesAndMixedPages) {
  const int n_cases = slow() ? 10 : 40;
  for (int i = 0; i < n_cases; ++i) {
    const uint32_t seed = 1000u + static_cast<uint32_t>(i);
    std::mt19937 random(seed);
    const auto between = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    constexpr std::array kHeadDims = {64, 80, 96, 128, 256};
    const Geometry geometry{between(1, 3), between(1, 4), kHeadDims[static_cast<size_t>(between(0, 4))]};
    const int n_keys = between(1, i % 4 == 0 ? 1500 : 300);
    std::vector<PageSpec> specs;
    for (int keys = 0; keys < n_keys;) {
      const int tokens = std::min(between(0, 2) == 0 ? between(1, kPageTokens) : kPageTokens, n_keys - keys);
      const CodecId k = kAllCodecs[static_cast<size_t>(between(0, static_cast<int>(kAllCodecs.size()) - 1))];
      const CodecId v = kAllCodecs[static_cast<size_t>(between(0, static_cast<int>(kAllCodecs.size()) - 1))];
      specs.push_back({{k, ForValues(v)}, tokens, between(0, 2), keys == 0 || between(0, 9) == 0});
      keys += tokens;
    }
    const Context context(geometry, specs, seed);
    const int n_queries = std::min(i % 2 == 0 ? between(1, 4) : between(1, 70), n_keys);
    ExpectAsReference(context, between(1, kMaxQueryGroup), n_queries, between(0, geometry.n_layers - 1), seed);
  }
}

// Moved spans: the queries are turned back here, the keys forward in the reference.
TEST_P(Attention, EqualsTheReferenceForMovedSpansAndHiddenTokens) {
  const int n_cases = slow() ? 6 : 30;
  for (int i = 0; i < n_cases; ++i) {
    const uint32_t seed = 5000u + static_cast<uint32_t>(i);
    std::mt19937 random(seed);
    const auto between = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    constexpr std::array kHeadDims = {64, 80, 96, 128, 256};
    const Geometry geometry{1, between(1, 2), kHeadDims[static_cast<size_t>(between(0, 4))]};
    const bool half = i % 2 == 0;
    const CodecPair codecs =
        half ? CodecPair{CodecId::kF16, CodecId::kF16}
             : CodecPair{kAllCodecs[static_cast<size_t>(between(1, static_cast<int>(kAllCodecs.size()) - 1))],
                         CodecId::kI8};
    const int n_keys = between(33, 400);
    std::vector<PageSpec> specs = PagesOf(n_keys, codecs);
    for (PageSpec& spec : specs) {
      spec.constants = between(0, 2);
      spec.starts = between(0, 2) == 0;
    }
    Context context(geometry, specs, seed);
    Rope rope;
    rope.pairs = between(0, 1) == 0 ? Rope::Pairs::kInterleaved : Rope::Pairs::kHalves;
    const int rotary_dims = between(0, 3) == 0 ? geometry.head_dim / 2 : geometry.head_dim;
    for (int pair = 0; pair < rotary_dims / 2; ++pair) {
      rope.frequencies.push_back(std::pow(10000.0, -2.0 * pair / rotary_dims));
    }
    int offset = 0;
    for (size_t page = 0; page < context.pages().size(); ++page) {
      const bool new_span = page == 0 || between(0, 2) == 0;
      if (new_span) offset = between(0, 3) == 0 ? 0 : between(-100000, 100000);
      context.pages()[page].position_offset = offset;
      context.pages()[page].hide_first = new_span && offset != 0 && page + 1 < context.pages().size();
    }
    const int n_queries = std::min(between(0, 1) == 0 ? 1 : between(2, 60), context.pages().back().tokens);
    const AttentionShape shape = ShapeOf(geometry, between(1, 4));
    const std::vector<float> q = RandomQueries(shape, n_queries, seed);
    const AttentionPlan plan(shape, n_queries, context.pages(), &rope);
    std::vector<float> expected(q.size());
    AttendReference(shape, context.pages(), 1, 0, q.data(), n_queries, expected.data(), &rope);
    EXPECT_THAT(RelativeRms(RunStep(plan, context, 0, q), expected), Le(half ? 1e-4 : kCodesTolerance))
        << ToString(codecs) << ", head_dim " << geometry.head_dim << ", seed " << seed;
  }
}

// Every count of rows has a kernel of its own.
TEST_P(Attention, EqualsTheReferenceForEveryNumberOfRows) {
  for (CodecId codec : kAllCodecs) {
    SCOPED_TRACE(CodecOf(codec).name);
    const Context context({1, 1, 64}, PagesOf(70, {codec, ForValues(codec)}), 11);
    for (int rows = 1; rows <= attention::kFewRows + 12; ++rows) ExpectAsReference(context, 1, rows, 0, 12);
  }
}

TEST_P(Attention, KeepsItsPrecisionWhenScoresAreFarApart) {
  for (CodecId codec :
       {CodecId::kI8, CodecId::kI4, CodecId::kI4Z, CodecId::k3, CodecId::k5, CodecId::k8, CodecId::kBands}) {
    SCOPED_TRACE(CodecOf(codec).name);
    const Context context({1, 1, 64}, PagesOf(500, {codec, ForValues(codec)}), 21, /*spread=*/4);
    ExpectAsReference(context, 4, 1, 0, 22);
  }
}

TEST_P(Attention, MergesChunksToWhatOneChunkGives) {
  const Geometry geometry{1, 2, 64};
  const Context context(geometry, PagesOf(700, {CodecId::kI8, CodecId::kI4}), 31);
  for (int n_queries : {1, 40}) {
    const AttentionShape shape = ShapeOf(geometry, 3);
    const std::vector<float> q = RandomQueries(shape, n_queries, 32);
    const AttentionPlan plan(shape, n_queries, context.pages());
    const AttentionPlan whole = Rechunked(plan, context, plan.n_pages);
    ASSERT_EQ(whole.n_merge_items(), 0);
    // With chunks of 1 page the last queries' chunk is invisible to the first queries.
    for (int chunk_pages : {1, 4, 16}) {
      const AttentionPlan split = Rechunked(plan, context, chunk_pages);
      ASSERT_GT(split.n_merge_items(), 0);
      EXPECT_THAT(RelativeRms(RunStep(split, context, 0, q), RunStep(whole, context, 0, q)), Le(kCodesTolerance));
    }
  }
}

TEST_P(Attention, GivesTheSameBitsInAnyOrderAndOnAnyNumberOfThreads) {
  const Geometry geometry{1, 3, 64};
  const Context plain(geometry, PagesOf(1500, {CodecId::kI8, CodecId::kI8}), 41);
  const Context progressive(geometry, PagesOf(1500, {CodecId::k4, CodecId::k4, /*refine=*/true}), 41);
  for (const Context* of : {&plain, &progressive})
    for (int n_queries : {1, 50}) {
      const Context& context = *of;
      const AttentionShape shape = ShapeOf(geometry, 3);
      const std::vector<float> q = RandomQueries(shape, n_queries, 42);
      const AttentionPlan plan(shape, n_queries, context.pages(), nullptr, /*refine_threshold=*/3);
      ASSERT_GT(plan.n_attend_items(), 5);
      const std::vector<float> expected = RunStep(plan, context, 0, q);

      std::vector<int> order = InOrder(plan.n_attend_items());
      std::shuffle(order.begin(), order.end(), std::mt19937(43));
      EXPECT_TRUE(SameBits(RunStep(plan, context, 0, q, order), expected));

      for (int n_threads : {2, 5}) {
        std::vector<float> out(q.size()), partials(plan.partial_floats());
        std::atomic<int> next_item{0};
        std::vector<std::thread> threads;
        for (int i = 0; i < n_threads; ++i) {
          threads.emplace_back([&] {
            auto scratch = hwy::AllocateAligned<std::byte>(plan.scratch_bytes());
            for (int item; (item = next_item++) < plan.n_attend_items();) {
              Attend(plan, context.pages(), 1, 0, q.data(), item, scratch.get(), partials.data(), out.data());
            }
          });
        }
        for (std::thread& thread : threads) thread.join();
        for (int item = 0; item < plan.n_merge_items(); ++item) Merge(plan, partials.data(), item, out.data());
        EXPECT_TRUE(SameBits(out, expected));
      }
    }
}

// Each key's value is its own position, and a query's score with a key grows steeply with the key's position: a query
// that sees one key too many or too few answers another position than its own.
TEST_P(Attention, ShowsEachQueryExactlyTheKeysUpToItsPosition) {
  constexpr int kDim = 32;
  for (int n_queries : {1, 2, 5, 31, 32, 33, 64, 65, 100}) {
    for (int older : {0, 1, 30, 31, 32, 33, 130}) {
      const Geometry geometry{1, 1, kDim};
      const int n_keys = older + n_queries;
      Context context(geometry, PagesOf(n_keys, {CodecId::kF16, CodecId::kF16}), 51);
      for (size_t page = 0; page < context.pages().size(); ++page) {
        std::vector<float> k(kPageTokens * kDim, 0.0f), v(kPageTokens * kDim, 0.0f);
        for (int t = 0; t < kPageTokens; ++t) {
          const float position = static_cast<float>(page) * kPageTokens + static_cast<float>(t);
          k[static_cast<size_t>(t) * kDim] = v[static_cast<size_t>(t) * kDim + 7] = position;
        }
        // All 32 tokens have contents here, also those beyond what PageRef shows.
        CodecOf(CodecId::kF16).encode(Side::kK, k.data(), kPageTokens, kDim, context.block(page, Side::kK, 0, 0));
        CodecOf(CodecId::kF16).encode(Side::kV, v.data(), kPageTokens, kDim, context.block(page, Side::kV, 0, 0));
      }
      const AttentionShape shape{3, 1, kDim, 1.0f};
      std::vector<float> q(static_cast<size_t>(n_queries) * 3 * kDim, 0.0f);
      for (size_t i = 0; i < q.size(); i += kDim) q[i] = 30;
      const std::vector<float> out = RunStep(AttentionPlan(shape, n_queries, context.pages()), context, 0, q);
      for (int query = 0; query < n_queries; ++query) {
        for (int head = 0; head < 3; ++head) {
          ASSERT_FLOAT_EQ(out[static_cast<size_t>((query * 3 + head) * kDim + 7)], static_cast<float>(older + query))
              << n_queries << " queries after " << older;
        }
      }
    }
  }
}

// ---- Progressive pages

struct RefinedCase {
  Context context;
  AttentionShape shape;
  int n_queries;
  std::vector<float> q;
};

// Random pages, most of them with a refinement plane, and fp16 ones behind them.
RefinedCase RandomRefinedCase(uint32_t seed, bool many_rows) {
  std::mt19937 random(seed);
  const auto between = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  constexpr std::array kHeadDims = {64, 80, 96, 128, 256};
  const Geometry geometry{between(1, 2), between(1, 2), kHeadDims[static_cast<size_t>(between(0, 4))]};
  constexpr std::array kCodecs = {CodecId::k3, CodecId::k4, CodecId::k5, CodecId::kBands};
  const CodecId k = kCodecs[static_cast<size_t>(between(0, 3))], v = kCodecs[static_cast<size_t>(between(0, 2))];
  const int n_keys = many_rows ? between(50, 100) : between(33, 500);
  std::vector<PageSpec> specs;
  for (int keys = 0; keys < n_keys;) {
    const int tokens = std::min(between(0, 3) == 0 ? between(1, kPageTokens) : kPageTokens, n_keys - keys);
    const bool refine = between(0, 5) != 0;
    specs.push_back({{k, v, refine}, tokens, keys > n_keys / 2 ? 1 : 0, keys == 0});
    keys += tokens;
  }
  if (between(0, 1) == 0) specs.push_back({{CodecId::kF16, CodecId::kF16}, between(1, kPageTokens)});
  const int group = between(1, 3);
  const int n_queries = many_rows ? 33 / group + 1 : between(1, 2);
  Context context(geometry, specs, seed);
  const AttentionShape shape = ShapeOf(geometry, group);
  return {std::move(context), shape, n_queries, RandomQueries(shape, n_queries, seed)};
}

TEST_P(Attention, RefinesTheTokensThatTheRuleNames) {
  const int n_cases = slow() ? 8 : 40;
  int64_t total_refined = 0, total_seen = 0;
  for (int i = 0; i < n_cases; ++i) {
    SCOPED_TRACE(i);
    const uint32_t seed = 7000u + static_cast<uint32_t>(i);
    const RefinedCase c = RandomRefinedCase(seed, i % 2 == 1);
    const int layer = c.context.geometry().n_layers - 1, n_layers = c.context.geometry().n_layers;
    // A threshold that no score is so close to that rounding decides.
    std::optional<AttentionPlan> plan;
    Refined refined;
    double margin = 0;
    for (int attempt = 0; attempt < 30; ++attempt) {
      const float threshold = 0.5f + 0.13f * static_cast<float>(attempt);
      AttentionPlan at(c.shape, c.n_queries, c.context.pages(), nullptr, threshold);
      if (i % 3 == 0) at = Rechunked(at, c.context, 4);
      double margin_at;
      const Refined refined_at =
          RefinedByReference(at, c.context.pages(), n_layers, layer, c.q.data(), nullptr, &margin_at);
      if (margin_at <= margin) continue;
      margin = margin_at;
      refined = refined_at;
      plan = at;
    }
    ASSERT_GT(margin, 3e-4);
    std::vector<float> expected(c.q.size());
    AttendReference(c.shape, c.context.pages(), n_layers, layer, c.q.data(), c.n_queries, expected.data(), nullptr,
                    &refined);
    KeyCounts counts;
    const std::vector<float> found = RunStep(*plan, c.context, layer, c.q, InOrder(plan->n_attend_items()), &counts);
    EXPECT_THAT(RelativeRms(found, expected), Le(kCodesTolerance));
    uint64_t n_refined = 0;
    for (uint32_t tokens : refined.tokens) n_refined += static_cast<uint64_t>(std::popcount(tokens));
    EXPECT_EQ(counts.refined, n_refined);
    total_refined += static_cast<int64_t>(counts.refined);
    total_seen += static_cast<int64_t>(counts.seen);
  }
  EXPECT_GT(total_refined, total_seen / 50);  // or it would test nothing
  EXPECT_LT(total_refined, total_seen);
}

TEST_P(Attention, RefinesNothingOrEverythingAtTheEndsOfTheThreshold) {
  for (bool many_rows : {false, true}) {
    const RefinedCase c = RandomRefinedCase(7100, many_rows);
    const int n_layers = c.context.geometry().n_layers;
    for (float threshold : {-1.0f, 1e6f}) {
      const AttentionPlan plan(c.shape, c.n_queries, c.context.pages(), nullptr, threshold);
      double margin;
      const Refined refined = RefinedByReference(plan, c.context.pages(), n_layers, 0, c.q.data(), nullptr, &margin);
      std::vector<float> expected(c.q.size());
      AttendReference(c.shape, c.context.pages(), n_layers, 0, c.q.data(), c.n_queries, expected.data(), nullptr,
                      threshold < 0 ? nullptr : &refined);
      KeyCounts counts;
      EXPECT_THAT(RelativeRms(RunStep(plan, c.context, 0, c.q, InOrder(plan.n_attend_items()), &counts), expected),
                  Le(kCodesTolerance));
      EXPECT_EQ(counts.refined, threshold < 0 ? 0 : counts.seen);
      EXPECT_EQ(counts.seen > 0, threshold > 0);
    }
  }
}

TEST_P(Attention, SurvivesBytesThatNoWriterMakesAndSpoilsOnlyTheirHead) {
  const Geometry geometry{1, 2, 64};
  for (CodecId codec : kAllCodecs) {
    for (int n_queries : {1, 30}) {
      SCOPED_TRACE(CodecOf(codec).name);
      Context context(geometry, PagesOf(100, {codec, ForValues(codec), TakesRefinement({codec, ForValues(codec)})}),
                      61);
      const AttentionShape shape = ShapeOf(geometry, 3);
      const std::vector<float> q = RandomQueries(shape, n_queries, 62);
      const AttentionPlan plan(shape, n_queries, context.pages(), nullptr, /*refine_threshold=*/3);
      const std::vector<float> before = RunStep(plan, context, 0, q);
      for (uint8_t fill : {uint8_t{0xff}, uint8_t{0x7c}, uint8_t{0x80}}) {  // halves: NaN, huge, tiny negative
        const size_t bytes = CodecOf(codec).block_bytes(64);
        std::memset(context.block(1, Side::kK, 0, 0), fill, bytes);
        std::memset(context.block(1, Side::kV, 0, 0), fill, CodecOf(ForValues(codec)).block_bytes(64));
        if (context.pages()[1].refinement != nullptr) {
          const size_t more = CodecOf(CodecId::kRefine4).block_bytes(64);
          std::memset(context.refinement_block(1, Side::kK, 0, 0), fill, more);
          std::memset(context.refinement_block(1, Side::kV, 0, 0), fill, more);
        }
        const std::vector<float> after = RunStep(plan, context, 0, q);
        for (int query = 0; query < n_queries; ++query) {
          const size_t other_head = static_cast<size_t>((query * shape.n_heads + 3) * 64);
          ASSERT_EQ(std::memcmp(&before[other_head], &after[other_head], 3 * 64 * sizeof(float)), 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace qkv
