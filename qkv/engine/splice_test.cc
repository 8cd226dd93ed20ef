// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/splice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "qkv/engine/sequence.h"
#include "qkv/engine/test_support.h"
#include "qkv/segment/test_support.h"
#include "tests/tiny_model.h"

namespace qkv {
namespace {

using ::qkv::testing::SourceTokens;
using ::qkv::testing::TestModel;
using ::qkv::testing::TinyModel;
using ::testing::HasSubstr;

constexpr CodecPair kF16 = {CodecId::kF16, CodecId::kF16};
constexpr CodecPair kI8 = {CodecId::kI8, CodecId::kI8};

// --- the policy -------------------------------------------------------------------------------------------------------

TEST(SplicePolicyText, GoesThereAndBack) {
  for (const char* text : {"off", "exact-only", "hide", "repair=32", "repair=256", "auto"}) {
    const auto policy = ParseSplicePolicy(text);
    ASSERT_TRUE(policy) << text;
    EXPECT_EQ(ToString(*policy), text);
  }
  for (const char* text : {"", "Hide", "repair", "repair=", "repair=0", "repair=16", "repair=33", "repair=-32",
                           "repair=32x", "repair=99999999999", "hide "}) {
    const auto policy = ParseSplicePolicy(text);
    ASSERT_FALSE(policy) << text;
    EXPECT_EQ(policy.error().code, Code::kInvalidArgument);
  }
  EXPECT_THAT(ParseSplicePolicy("repair=40").error().message, HasSubstr("multiple of 32"));
  EXPECT_THAT(ParseSplicePolicy("of").error().message, HasSubstr("exact-only"));
}

// --- the plan ---------------------------------------------------------------------------------------------------------

// A segment of pages with these numbers of tokens, encoded from position `first` on.
std::shared_ptr<const Segment> SegmentOf(const std::vector<int>& tokens, int first) {
  const size_t bytes = PageLayout(test::kSmall, kI8).bytes;
  auto writer = test::Take(SegmentWriter::Create(test::kSmall, bytes * tokens.size(), test::kModelDigest));
  for (const int n : tokens) {
    test::Take(writer->Append(kI8, n, static_cast<uint32_t>(first), [](std::byte*) {}));
    first += n;
  }
  return test::Take(SegmentWriter::Seal(writer));
}

// A context as contexts come to be: pieces that were made here or moved here, some with partial pages.
struct SomeContext {
  std::vector<SegmentSpan> spans;
  int tokens = 0;
};
SomeContext Some() {
  SomeContext context;
  const int n_spans = *rc::gen::inRange(1, 5);
  for (int i = 0; i < n_spans; ++i) {
    const auto pages = *rc::gen::container<std::vector<int>>(
        static_cast<size_t>(*rc::gen::inRange(1, 5)),
        rc::gen::weightedOneOf<int>({{3, rc::gen::just(kPageTokens)}, {1, rc::gen::inRange(1, kPageTokens)}}));
    // Partial pages end a span: of all but the last page all tokens are used, but spans may follow one another anywhere.
    const bool moved = i > 0 && *rc::gen::arbitrary<bool>();
    const int encoded_at = !moved ? context.tokens : *rc::gen::elementOf(std::vector<int>{0, 7, 64, 1000});
    const auto segment = SegmentOf(pages, encoded_at);
    const int offset = context.tokens - encoded_at;
    SegmentSpan span{segment, 0,      pages.size(),
                     0,       offset, encoded_at == 0 && offset != 0 && *rc::gen::arbitrary<bool>()};
    for (const int n : pages) span.n_tokens += n;
    span.n_tokens -= *rc::gen::inRange(0, pages.back());  // of the last page perhaps not all
    context.tokens += span.n_tokens;
    context.spans.push_back(std::move(span));
  }
  return context;
}

RC_GTEST_PROP(PlanSplice, PutsEveryTokenInItsPlaceOnce, ()) {
  const SomeContext context = Some();
  const int first = *rc::gen::inRange(0, context.tokens);
  const int position = *rc::gen::inRange(0, 3000);
  const SpliceOptions options{.repair = *rc::gen::element(0, 32, 64, 128, kRepairAll),
                              .hide_first = *rc::gen::arbitrary<bool>()};
  const bool exact = position == first && *rc::gen::arbitrary<bool>();
  const SplicePlan plan = PlanSplice(context.spans, first, position, exact, options);

  const int available = context.tokens - first;
  RC_ASSERT(plan.n_recompute + plan.n_spliced == available);
  const int wanted = exact ? 0 : std::min(options.repair, available);
  RC_ASSERT(plan.n_recompute >= wanted);
  RC_ASSERT(plan.n_recompute < wanted + kPageTokens);

  // Where each page of the source stands in it.
  std::map<std::pair<const Segment*, size_t>, std::pair<int, bool>> places;
  int at = 0;
  for (const SegmentSpan& span : context.spans) {
    int left = span.n_tokens;
    for (size_t i = 0; i < span.n_pages; ++i) {
      places[{span.segment.get(), span.first_page + i}] = {at, span.hide_first && i == 0};
      const int n = std::min<int>(left, span.segment->pages()[span.first_page + i].tokens);
      at += n;
      left -= n;
    }
  }
  int next = position + plan.n_recompute;
  int spliced = 0;
  for (const SegmentSpan& span : plan.spans) {
    RC_ASSERT(span.n_pages > 0u);
    int left = span.n_tokens;
    for (size_t i = 0; i < span.n_pages; ++i) {
      const size_t page = span.first_page + i;
      const auto [place, was_hidden] = places.at({span.segment.get(), page});
      RC_ASSERT(next - position == place - first);
      const int encoded_at = static_cast<int>(span.segment->pages()[page].first_position);
      RC_ASSERT(encoded_at + span.position_offset == next);
      const bool hidden = span.hide_first && i == 0;
      RC_ASSERT(!was_hidden || hidden);
      RC_ASSERT(!hidden || encoded_at == 0);
      if (options.hide_first && !exact && encoded_at == 0 && span.position_offset != 0) RC_ASSERT(hidden);
      const int n = std::min<int>(left, span.segment->pages()[page].tokens);
      RC_ASSERT(n > 0);
      next += n;
      left -= n;
    }
    RC_ASSERT(left == 0);
    spliced += span.n_tokens;
  }
  RC_ASSERT(spliced == plan.n_spliced);
}

// --- sequences --------------------------------------------------------------------------------------------------------

std::unique_ptr<Sequence> NewSequence(CodecPair kv, const std::shared_ptr<const Model>& model = TestModel(),
                                      int n_ctx = 2048) {
  SequenceOptions options;
  options.n_ctx = n_ctx;
  options.kv = kv;
  auto sequence = Sequence::Create(model, options);
  EXPECT_TRUE(sequence) << sequence.error().message;
  return *std::move(sequence);
}

void Read(Sequence& sequence, std::span<const Token> tokens) {
  const Status status = sequence.Forward(tokens);
  ASSERT_TRUE(status) << status.error().message;
}

std::vector<float> Logits(Sequence& sequence, std::span<const Token> tokens) {
  Read(sequence, tokens);
  return {sequence.logits().begin(), sequence.logits().end()};
}

Context Made(std::span<const Token> tokens, CodecPair kv, const std::shared_ptr<const Model>& model = TestModel()) {
  auto sequence = NewSequence(kv, model);
  Read(*sequence, tokens);
  auto context = sequence->Publish({});
  EXPECT_TRUE(context) << context.error().message;
  return *std::move(context);
}

SpliceResult Splice(Sequence& sequence, std::vector<SpliceSource> sources, const SpliceOptions& options = {}) {
  const auto result = sequence.Splice(sources, options);
  EXPECT_TRUE(result) << result.error().message;
  return result.value_or(SpliceResult{});
}

std::vector<Token> Joined(std::initializer_list<std::vector<Token>> parts) {
  std::vector<Token> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

double Kl(std::span<const float> p, std::span<const float> q) {
  const auto log_total = [](std::span<const float> x) {
    const double top = *std::max_element(x.begin(), x.end());
    double sum = 0;
    for (const float v : x) sum += std::exp(v - top);
    return top + std::log(sum);
  };
  const double p_total = log_total(p), q_total = log_total(q);
  double kl = 0;
  for (size_t i = 0; i < p.size(); ++i) kl += std::exp(p[i] - p_total) * ((p[i] - p_total) - (q[i] - q_total));
  return kl;
}

// The tiny model is too sure of itself for distributions to tell much.
double RelativeError(std::span<const float> found, std::span<const float> expected) {
  double difference = 0, square = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    difference += (found[i] - expected[i]) * static_cast<double>(found[i] - expected[i]);
    square += expected[i] * static_cast<double>(expected[i]);
  }
  return std::sqrt(difference / square);
}
constexpr double kF16Noise = 1e-3;  // keys are rounded to fp16 at one position and used at another

std::shared_ptr<const Model> Tiny(const TinyModel& tiny) {
  const std::string path = ::testing::TempDir() + fmt::format("splice-{}-{}.gguf", ::getpid(), tiny.n_layers);
  testing::WriteTinyModel(tiny, path);
  auto model = Model::Load(path);
  std::remove(path.c_str());
  EXPECT_TRUE(model) << model.error().message;
  return *model;
}

std::vector<Token> TinyTokens(uint32_t seed, size_t n) {
  std::mt19937 random(seed);
  std::vector<Token> tokens;
  for (size_t i = 0; i < n; ++i) tokens.push_back(static_cast<Token>(3 + random() % (TinyModel::kVocab - 3)));
  return tokens;
}

TEST(Splice, ASingleContextBehindNothingIsTheContextItself) {
  const Context context = Made(SourceTokens(0, 150), kI8);
  auto attached = NewSequence(kI8), spliced = NewSequence(kI8);
  ASSERT_TRUE(attached->Attach(context));
  const SpliceResult result = Splice(*spliced, {{&context}}, {.repair = 64});
  EXPECT_EQ(result.spans, 0) << "nothing is moved";
  EXPECT_EQ(result.tokens_recomputed, 0) << "and nothing needs repair";
  EXPECT_EQ(result.tokens_spliced, 150);
  const auto suffix = SourceTokens(500, 20);
  EXPECT_EQ(Logits(*spliced, suffix), Logits(*attached, suffix));
}

// In the first layer keys and values depend on token and position alone. With a single layer, therefore, pages may stand
// behind anything, if only the position is mended.
TEST(Splice, IsExactInAModelOfOneLayer) {
  const auto model = Tiny({.n_layers = 1});
  const auto own = TinyTokens(1, 45), a = TinyTokens(2, 150), b = TinyTokens(3, 77), suffix = TinyTokens(4, 9);
  const Context of_a = Made(a, kF16, model), of_b = Made(b, kF16, model);
  auto full = NewSequence(kF16, model), spliced = NewSequence(kF16, model), hiding = NewSequence(kF16, model);
  const auto expected = Logits(*full, Joined({own, a, b, suffix}));
  Read(*spliced, own);
  const SpliceResult result = Splice(*spliced, {{&of_a}, {&of_b}}, {.hide_first = false});
  EXPECT_EQ(result.spans, 2);
  EXPECT_EQ(result.hidden, 0);
  const auto found = Logits(*spliced, suffix);
  EXPECT_LT(RelativeError(found, expected), kF16Noise);

  Read(*hiding, own);
  EXPECT_EQ(Splice(*hiding, {{&of_a}, {&of_b}}).hidden, 2);
  EXPECT_GT(RelativeError(Logits(*hiding, suffix), expected), 2 * kF16Noise) << "two tokens fewer are seen";
}

TEST(Splice, RepairOfAllIsFullPrefill) {
  const auto model = Tiny({.n_layers = 4});
  const auto own = TinyTokens(1, 45), a = TinyTokens(2, 150), b = TinyTokens(3, 77), suffix = TinyTokens(4, 9);
  const Context of_a = Made(a, kF16, model), of_b = Made(b, kF16, model);
  auto full = NewSequence(kF16, model);
  const auto expected = Logits(*full, Joined({own, a, b, suffix}));
  std::vector<double> kl, error;
  for (const int repair : {0, 32, 64, 160, kRepairAll}) {
    auto spliced = NewSequence(kF16, model);
    Read(*spliced, own);
    const SpliceResult result = Splice(*spliced, {{&of_a}, {&of_b}}, {.repair = repair, .hide_first = false});
    EXPECT_EQ(result.tokens_recomputed, std::min(repair, 150) + std::min(repair, 77));
    EXPECT_EQ(spliced->tokens(), Joined({own, a, b}));
    const auto found = Logits(*spliced, suffix);
    kl.push_back(Kl(expected, found));
    error.push_back(RelativeError(found, expected));
  }
  EXPECT_GT(kl[0], 1e-5) << "else this shows nothing";
  EXPECT_LT(kl[3], 1e-6) << "a repair longer than every span";
  EXPECT_LT(kl[4], 1e-6);
  EXPECT_GT(error[0], 1e-2);
  EXPECT_LT(error[3], 1e-5);
  EXPECT_LT(error[4], 1e-5);
}

TEST(Splice, RepairedTokensSeeWhatIsBeforeThemAndNothingElse) {
  // So they are the same whatever the pages behind them hold.
  const auto own = SourceTokens(40, 20), a = SourceTokens(300, 96), b = SourceTokens(700, 96);
  const auto head = std::vector<Token>(a.begin(), a.begin() + 32);
  const Context of_a = Made(a, kF16), of_other = Made(Joined({head, SourceTokens(900, 64)}), kF16);
  std::vector<std::vector<std::byte>> pages;
  for (const Context* context : {&of_a, &of_other}) {
    auto sequence = NewSequence(kF16);
    Read(*sequence, own);
    Splice(*sequence, {{context}}, {.repair = 32});
    const auto published = sequence->Publish({});
    ASSERT_TRUE(published);
    ASSERT_EQ(published->card.spans_size(), 2);
    const auto& private_span = published->card.spans(0);
    EXPECT_EQ(private_span.n_tokens(), 20u + 32u);
    EXPECT_EQ(private_span.position_offset(), 0);
    const Segment& segment = *published->segments[private_span.segment()];
    const std::byte* page = segment.page(private_span.first_page() + 1);
    pages.emplace_back(page, page + PageLayout(segment.geometry(), kF16).bytes);
  }
  EXPECT_EQ(pages[0], pages[1]);
}

TEST(Splice, PagesStaySharedAndTheCardSaysWhereTheyStand) {
  const Context of_a = Made(SourceTokens(0, 100), kI8), of_b = Made(SourceTokens(200, 70), kI8);
  auto sequence = NewSequence(kI8);
  Read(*sequence, SourceTokens(400, 40));
  Splice(*sequence, {{&of_a}, {&of_b}});
  EXPECT_EQ(sequence->stats().tokens_recomputed, 40);
  EXPECT_EQ(sequence->stats().tokens_spliced, 170);
  Read(*sequence, SourceTokens(600, 10));
  const auto published = sequence->Publish({.prefix_tokens = 40});
  ASSERT_TRUE(published) << published.error().message;
  const auto card = ParseCard(SerializeCard(published->card));
  ASSERT_TRUE(card) << card.error().message;
  ASSERT_EQ(card->spans_size(), 4);
  EXPECT_EQ(card->turn().prefix_tokens(), 40u);
  EXPECT_EQ(published->segments[card->spans(1).segment()], of_a.segments[0]) << "the very same memory";
  EXPECT_EQ(published->segments[card->spans(2).segment()], of_b.segments[0]);
  EXPECT_EQ(card->spans(1).position_offset(), 40);
  EXPECT_TRUE(card->spans(1).hide_first());
  EXPECT_EQ(card->spans(2).position_offset(), 140);
  EXPECT_EQ(card->spans(3).position_offset(), 0);
  EXPECT_THAT(card->parents(), ::testing::ElementsAre(of_a.card.id(), of_b.card.id()));
}

TEST(Splice, ASplicedContextIsHandedOnBitForBit) {
  const Context of_a = Made(SourceTokens(0, 100), kI8), of_b = Made(SourceTokens(200, 70), kI8);
  for (const int repair : {0, 32}) {
    auto producer = NewSequence(kI8);
    Read(*producer, SourceTokens(400, 40));
    Splice(*producer, {{&of_a}, {&of_b}}, {.repair = repair});
    Read(*producer, SourceTokens(600, 50));
    // A chain: each goes on from what the one before published; the producer does the same all by itself.
    for (int hop = 0; hop < 3; ++hop) {
      const auto published = producer->Publish({});
      ASSERT_TRUE(published);
      auto left = NewSequence(kI8), right = NewSequence(kI8);
      ASSERT_TRUE(left->Attach(*published));
      ASSERT_TRUE(right->Attach(*published));
      const auto suffix = SourceTokens(static_cast<size_t>(800 + 100 * hop), 45);
      const auto expected = Logits(*producer, suffix);
      EXPECT_EQ(Logits(*left, suffix), expected) << "hop " << hop;
      EXPECT_EQ(Logits(*right, suffix), expected) << "hop " << hop;
      producer = std::move(left);
    }
  }
}

TEST(Splice, ASplicedContextCanBeSplicedAgain) {
  const auto model = Tiny({.n_layers = 1});  // where it must be exact, see above
  const auto own = TinyTokens(1, 45), a = TinyTokens(2, 70), b = TinyTokens(3, 64), c = TinyTokens(5, 33);
  const Context of_a = Made(a, kF16, model), of_b = Made(b, kF16, model);
  auto first = NewSequence(kF16, model), second = NewSequence(kF16, model), full = NewSequence(kF16, model);
  Read(*first, own);
  Splice(*first, {{&of_a}, {&of_b}}, {.hide_first = false});
  const auto published = first->Publish({});
  ASSERT_TRUE(published);
  Read(*second, c);
  const SpliceResult result = Splice(*second, {{&*published, 40}}, {.hide_first = false});
  EXPECT_EQ(result.tokens_recomputed, 5) << "up to the end of the page that is cut";
  const auto suffix = TinyTokens(4, 9);
  const auto expected = Logits(*full, Joined({c, {own.begin() + 40, own.end()}, a, b, suffix}));
  EXPECT_LT(RelativeError(Logits(*second, suffix), expected), kF16Noise);
}

TEST(Splice, BehindTheVeryTokensThatItWasMadeBehindNothingIsMovedOrRepaired) {
  const auto own = SourceTokens(40, 64), a = SourceTokens(300, 96), b = SourceTokens(700, 50);
  const Context of_a = Made(Joined({own, a}), kI8), of_b = Made(b, kI8);
  auto sequence = NewSequence(kI8);
  Read(*sequence, own);
  const SpliceResult result = Splice(*sequence, {{&of_a, 64}, {&of_b}}, {.repair = 32});
  EXPECT_EQ(result.spans, 1) << "the second";
  EXPECT_EQ(result.tokens_recomputed, 32) << "of the second";

  auto other = NewSequence(kI8);
  Read(*other, SourceTokens(41, 64));
  EXPECT_EQ(Splice(*other, {{&of_a, 64}}, {.repair = 32}).tokens_recomputed, 32) << "the place alone is not enough";
}

TEST(Splice, LeavesNoContextWithoutASink) {
  const Context context = Made(SourceTokens(0, 150), kI8);
  auto sequence = NewSequence(kI8);
  const SpliceSource lifted{&context, 64};
  const auto refused = sequence->Splice({&lifted, 1}, {});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().reason, Reason::kQualityGate);
  EXPECT_TRUE(sequence->tokens().empty());
  // Repaired, it has one of its own.
  EXPECT_EQ(Splice(*sequence, {lifted}, {.repair = 32}).tokens_recomputed, 32);
  Read(*sequence, SourceTokens(500, 3));

  // A spliced context from its hidden token on.
  auto behind = NewSequence(kI8);
  Read(*behind, SourceTokens(400, 32));
  Splice(*behind, {{&context}});
  const auto published = behind->Publish({});
  ASSERT_TRUE(published);
  const SpliceSource hidden{&*published, 32};
  EXPECT_EQ(NewSequence(kI8)->Splice({&hidden, 1}, {}).error().reason, Reason::kQualityGate);
}

TEST(Splice, RefusesWhatDoesNotFitAndChangesNothing) {
  const Context context = Made(SourceTokens(0, 100), kI8);
  auto sequence = NewSequence(kI8, TestModel(), 150);
  const auto own = SourceTokens(400, 60);
  Read(*sequence, own);
  const auto refused = [&](const Context& what, int first, SpliceOptions options) {
    const SpliceSource source{&what, first};
    const auto result = sequence->Splice({&source, 1}, options);
    EXPECT_EQ(sequence->tokens(), own);
    return result ? Error{Code::kInternal, "it was taken"} : result.error();
  };
  EXPECT_EQ(refused(context, 0, {}).reason, Reason::kTooLong);
  EXPECT_EQ(refused(context, 100, {}).code, Code::kInvalidArgument);
  EXPECT_EQ(refused(context, -1, {}).code, Code::kInvalidArgument);
  EXPECT_EQ(refused(context, 32, {.repair = 16}).code, Code::kInvalidArgument);
  EXPECT_EQ(refused(context, 32, {.repair = -32}).code, Code::kInvalidArgument);
  Context other = context;
  other.card.mutable_model()->mutable_rope()->set_base(12345.0f);
  EXPECT_EQ(refused(other, 32, {}).reason, Reason::kModelMismatch);
  other = context;
  other.card.mutable_spans(0)->set_position_offset(3);  // the pages say otherwise
  EXPECT_EQ(refused(other, 32, {}).reason, Reason::kChecksum);
  EXPECT_EQ(Splice(*sequence, {{&context, 32}}).tokens_spliced, 68) << "and it goes on";
}

}  // namespace
}  // namespace qkv
