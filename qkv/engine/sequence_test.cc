// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/sequence.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "qkv/engine/peer.h"
#include "qkv/engine/test_support.h"

namespace qkv {
namespace {

using testing::Logits;
using testing::PublishedBy;
using testing::Read;
using testing::SourceTokens;
using testing::TestModel;
using testing::TestModelPath;

constexpr CodecPair kF16 = {CodecId::kF16, CodecId::kF16};
constexpr CodecPair kI8 = {CodecId::kI8, CodecId::kI8};

std::unique_ptr<Sequence> NewSequence(CodecPair kv, int n_ctx = 2048, int n_threads = 2, int n_batch = 512) {
  SequenceOptions options;
  options.n_ctx = n_ctx;
  options.kv = kv;
  options.n_threads = n_threads;
  options.n_batch = n_batch;
  auto sequence = Sequence::Create(TestModel(), options);
  EXPECT_TRUE(sequence) << sequence.error().message;
  return *std::move(sequence);
}

Token Best(std::span<const float> logits) {
  return static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

std::vector<Token> Greedy(Sequence& sequence, int n) {
  std::vector<Token> out;
  for (int i = 0; i < n; ++i) {
    out.push_back(Best(sequence.logits()));
    Read(sequence, {&out.back(), 1});
  }
  return out;
}

// The oracle is libllama on the same GGUF, with weights in fp32 (written by libllama itself from the shipped model). With
// quantized weights, ggml rounds activations to 8 bits before every product, and the least difference in attention comes
// out as noise: libllama then differs from itself (flash attention on and off, batch of 1 and of 512) by more than 1.0.
// In fp32 what is left is that it rounds Q and the attention weights to fp16, which we do not.
constexpr float kOracleTolerance = 0.05f;

double Rms(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * static_cast<double>(a[i] - b[i]);
  return std::sqrt(sum / static_cast<double>(a.size()));
}
float Worst(std::span<const float> a, std::span<const float> b) {
  float worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

TEST(Oracle, AgreesWithLibllamaOnPrefillAndOnGreedyTokens) {
  const std::string path = ::testing::TempDir() + "qkv-oracle-f32.gguf";
  ASSERT_TRUE(WriteRequantizedModel(TestModelPath(), "f32", path));
  const auto model = Model::Load(path);
  const auto peer = Peer::Load(path);
  std::remove(path.c_str());  // both have it mapped
  ASSERT_TRUE(model) << model.error().message;
  ASSERT_TRUE(peer) << peer.error().message;

  const struct { size_t first, n; } prompts[] = {{0, 20}, {100, 130}, {700, 400}, {1500, 800}, {2200, 1500}};
  for (const auto& [first, n] : prompts) {
    SCOPED_TRACE(n);
    const std::vector<Token> prompt = SourceTokens(first, n);
    ASSERT_TRUE((*peer)->Reset({.n_ctx = 2048, .n_threads = 2, .n_batch = 512}));
    ASSERT_TRUE((*peer)->Forward(prompt, /*all_logits=*/true));

    SequenceOptions options;
    options.n_ctx = 2048;
    options.kv = kF16;
    options.n_batch =
        300;  // no multiple of a page: partial pages and page edges are crossed in the middle of a prefill
    const auto sequence = Sequence::Create(*model, options);
    ASSERT_TRUE(sequence);
    (*sequence)->KeepAllLogits(true);
    Read(**sequence, prompt);
    ASSERT_EQ((*sequence)->all_logits().size(), (*peer)->all_logits().size());
    EXPECT_LE(Worst((*sequence)->all_logits(), (*peer)->all_logits()), kOracleTolerance);

    (*sequence)->KeepAllLogits(false);
    for (int i = 0; i < 64; ++i) {
      const Token ours = Best((*sequence)->logits());
      ASSERT_EQ(ours, Best((*peer)->logits())) << "at token " << i;
      Read(**sequence, {&ours, 1});
      ASSERT_TRUE((*peer)->Forward({&ours, 1}));
      ASSERT_LE(Worst((*sequence)->logits(), (*peer)->logits()), kOracleTolerance) << "at token " << i;
    }
  }
}

TEST(Oracle, DiffersFromLibllamaNoMoreThanLibllamaFromItselfOnQuantizedWeights) {
  const std::vector<Token> prompt = SourceTokens(700, 200);
  const auto peer = Peer::Load(TestModelPath());
  ASSERT_TRUE(peer) << peer.error().message;
  std::vector<float> without, with;
  for (const bool flash : {false, true}) {
    ASSERT_TRUE((*peer)->Reset({.n_ctx = 1024, .n_threads = 2, .n_batch = 512, .flash_attention = flash}));
    ASSERT_TRUE((*peer)->Forward(prompt, true));
    const auto logits = (*peer)->all_logits();
    (flash ? with : without).assign(logits.begin(), logits.end());
  }
  auto sequence = NewSequence(kF16);
  sequence->KeepAllLogits(true);
  Read(*sequence, prompt);
  EXPECT_LE(Rms(sequence->all_logits(), without), 1.3 * Rms(with, without));
}

TEST(Sequence, ConsumerGoesOnBitForBitAsTheProducerDoes) {
  for (const size_t n : {1, 2, 31, 32, 33, 100}) {
    auto producer = NewSequence(kI8);
    Read(*producer, SourceTokens(50, n));
    const Context context = PublishedBy(*producer);
    auto consumer = NewSequence(kI8);
    ASSERT_TRUE(consumer->Attach(context));
    EXPECT_EQ(consumer->tokens(), producer->tokens());
    Read(*producer, {});
    Read(*consumer, {});
    EXPECT_EQ(Logits(*consumer), Logits(*producer)) << n << " tokens";
    EXPECT_EQ(Greedy(*consumer, 40), Greedy(*producer, 40)) << n << " tokens";
    EXPECT_EQ(Logits(*consumer), Logits(*producer)) << n << " tokens";
    EXPECT_EQ(consumer->stats().tokens_reused, static_cast<int64_t>(n) - 1);
    EXPECT_EQ(consumer->stats().tokens_recomputed, 1 + 40);
  }
}

TEST(Sequence, ResultsDoNotDependOnTheNumberOfThreads) {
  const auto prompt = SourceTokens(10, 700);
  auto one = NewSequence(kI8, 2048, 1);
  auto two = NewSequence(kI8, 2048, 2);
  Read(*one, prompt);
  Read(*two, prompt);
  EXPECT_EQ(Logits(*one), Logits(*two));
  EXPECT_EQ(Greedy(*one, 48), Greedy(*two, 48));
  EXPECT_EQ(Logits(*one), Logits(*two));
}

TEST(Sequence, PackedWeightsOfAnotherProcessGiveTheSameBits) {
  auto shared = TestModel()->ShareWeights();
  ASSERT_TRUE(shared) << shared.error().message;
  ASSERT_TRUE(shared->fd.valid()) << "the test's model has no packed form on this CPU";
  const std::vector<Token> prompt = SourceTokens(0, 70);
  const auto original = NewSequence(kI8);
  Read(*original, prompt);
  for (const bool same : {true, false}) {
    auto offered = TestModel()->ShareWeights();
    ASSERT_TRUE(offered) << offered.error().message;
    if (!same) offered->weights_digest[0] ^= 1;  // of other weights: not used
    const auto model = Model::Load(TestModelPath(), *std::move(offered));
    ASSERT_TRUE(model) << model.error().message;
    struct stat theirs, ours;
    const auto fd = (*model)->ShareWeights();
    ASSERT_EQ(::fstat(shared->fd.get(), &theirs), 0);
    ASSERT_EQ(::fstat(fd->fd.get(), &ours), 0);
    EXPECT_EQ(ours.st_ino == theirs.st_ino, same);
    SequenceOptions options;
    options.kv = kI8;
    auto sequence = Sequence::Create(*model, options);
    ASSERT_TRUE(sequence) << sequence.error().message;
    Read(**sequence, prompt);
    EXPECT_EQ(Logits(**sequence), Logits(*original));
  }
}

TEST(Sequence, F16PagesChangeNothing) {
  // Encoding f16 to f16 keeps every value, so publishing must not change what comes next. (The order of additions stays
  // as well: the same keys stand in pages of the same size.)
  const auto prompt = SourceTokens(300, 96);
  auto plain = NewSequence(kF16);
  Read(*plain, prompt);
  auto published = NewSequence(kF16);
  Read(*published, prompt);
  PublishedBy(*published);
  EXPECT_EQ(Greedy(*plain, 40), Greedy(*published, 40));
  EXPECT_EQ(Logits(*plain), Logits(*published));
}

TEST(Sequence, ForksShareTheParentsPagesAndDoNotDisturbEachOther) {
  auto parent = NewSequence(kI8);
  Read(*parent, SourceTokens(0, 200));
  const Context context = PublishedBy(*parent);
  auto left = NewSequence(kI8);
  auto right = NewSequence(kI8);
  ASSERT_TRUE(left->Attach(context));
  ASSERT_TRUE(right->Attach(context));
  Read(*left, SourceTokens(500, 40));
  Read(*right, SourceTokens(900, 40));
  Read(*parent, SourceTokens(500, 40));
  EXPECT_EQ(Logits(*left), Logits(*parent));
  EXPECT_NE(Logits(*left), Logits(*right));
  EXPECT_EQ(left->stats().own_kv_bytes, 0u);  // 40 tokens: one page submitted, none settled yet
  EXPECT_GT(left->stats().shared_kv_bytes, 0u);

  const Context child = PublishedBy(*left);
  EXPECT_EQ(child.card.parents(0), context.card.id());
  EXPECT_EQ(child.segments[0], context.segments[0]);  // the same memory
  EXPECT_EQ(child.card.token_ids_size(), 240);
}

TEST(Sequence, TruncatingAndReadingAgainGivesTheSameAnswer) {
  const auto prompt = SourceTokens(40, 150);
  auto sequence = NewSequence(kI8);
  Read(*sequence, prompt);
  const Context context = PublishedBy(*sequence);
  Read(*sequence, SourceTokens(400, 10));
  const std::vector<float> first = Logits(*sequence);
  Read(*sequence, SourceTokens(800, 70));
  ASSERT_TRUE(sequence->Truncate(150));
  Read(*sequence, SourceTokens(400, 10));
  EXPECT_EQ(Logits(*sequence), first);
  EXPECT_EQ(sequence->tokens().size(), 160u);
}

TEST(Sequence, PublishesAgainWithoutNewPages) {
  auto sequence = NewSequence(kI8);
  Read(*sequence, SourceTokens(0, 70));
  const Context first = PublishedBy(*sequence);
  const Context second = PublishedBy(*sequence);
  EXPECT_NE(first.card.id(), second.card.id());
  EXPECT_EQ(first.segments, second.segments);
}

TEST(Sequence, RefusesMoreTokensThanTheContextHoldsAndNamesBothNumbers) {
  auto sequence = NewSequence(kI8, 64);
  Read(*sequence, SourceTokens(0, 60));
  const std::vector<float> before = Logits(*sequence);
  const Status status = sequence->Forward(SourceTokens(0, 5));
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().reason, Reason::kTooLong);
  EXPECT_THAT(status.error().message, ::testing::AllOf(::testing::HasSubstr("60"), ::testing::HasSubstr("64")));
  EXPECT_EQ(sequence->tokens().size(), 60u);
  EXPECT_EQ(Logits(*sequence), before);
}

TEST(Sequence, RefusesTokensOutsideTheVocabulary) {
  auto sequence = NewSequence(kI8);
  for (const Token bad : {-1, TestModel()->params().n_vocab}) {
    const Status status = sequence->Forward({&bad, 1});
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Code::kInvalidArgument);
  }
  EXPECT_FALSE(sequence->Forward({}));
  EXPECT_FALSE(sequence->Publish({}));
}

TEST(Sequence, RefusesAContextOfAnotherModelAndKeepsItsOwn) {
  auto producer = NewSequence(kI8);
  Read(*producer, SourceTokens(0, 40));
  Context context = PublishedBy(*producer);
  auto consumer = NewSequence(kI8);
  Read(*consumer, SourceTokens(200, 33));
  const auto tokens = consumer->tokens();

  context.card.mutable_model()->mutable_rope()->set_base(12345.0f);
  const Status other_rope = consumer->Attach(context);
  ASSERT_FALSE(other_rope);
  EXPECT_EQ(other_rope.error().reason, Reason::kModelMismatch);
  EXPECT_THAT(other_rope.error().message, ::testing::HasSubstr("rope.base"));

  *context.card.mutable_model() = TestModel()->identity();
  context.card.mutable_model()->set_tokenizer_digest(std::string(32, '0'));
  EXPECT_EQ(consumer->Attach(context).error().reason, Reason::kTokenizerMismatch);

  *context.card.mutable_model() = TestModel()->identity();
  context.card.mutable_segments(0)->set_digest(std::string(32, '0'));
  EXPECT_EQ(consumer->Attach(context).error().reason, Reason::kChecksum);
  EXPECT_EQ(consumer->tokens(), tokens);

  auto small = NewSequence(kI8, 39);
  context = PublishedBy(*producer);
  EXPECT_EQ(small->Attach(context).error().reason, Reason::kTooLong);
}

TEST(Sequence, ATailOverItsBudgetIsEncodedEarlyAndStaysRight) {
  SequenceOptions options;
  options.n_ctx = 2048;
  options.kv = kF16;
  options.n_batch = 128;
  options.tail_budget_bytes = 1;
  auto tight = Sequence::Create(TestModel(), options);
  ASSERT_TRUE(tight);
  auto roomy = NewSequence(kF16, 2048, 2, 128);
  Read(**tight, SourceTokens(0, 600));
  Read(*roomy, SourceTokens(0, 600));
  EXPECT_GT((*tight)->stats().own_kv_bytes, 0u);
  EXPECT_EQ(roomy->stats().own_kv_bytes, 0u);
  EXPECT_EQ(Logits(**tight), Logits(*roomy));  // f16 pages hold the same values
}

}  // namespace
}  // namespace qkv
