// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Sequences whose prompt is grouped by importance: what they hand over, and what they refuse. Between processes:
// tests/handoff_exact_test.cc.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "qkv/card/card.h"
#include "qkv/engine/deep_verify.h"
#include "qkv/engine/kv_rows.h"
#include "qkv/engine/peer.h"
#include "qkv/engine/quality.h"
#include "qkv/engine/sequence.h"
#include "qkv/engine/test_support.h"

namespace qkv {
namespace {

using testing::Checksums;
using ::testing::HasSubstr;
using testing::Logits;
using testing::NewSequence;
using testing::PublishedBy;
using testing::Read;
using testing::SourceTokens;
using testing::TestModel;
using testing::TestModelPath;

std::unique_ptr<Sequence> AttachedTo(const Context& context, const std::string& kv) {
  auto sequence = NewSequence(kv);
  const Status attached = sequence->Attach(context);
  EXPECT_TRUE(attached) << attached.error().message;
  return sequence;
}

TEST(Grouped, AConsumerGoesOnBitForBitAsTheProducerDoes) {
  // Rotated and plain codecs in either group, and none.
  for (const std::string kv : {"tokens:20/8/4", "tokens:40/i8/4", "tokens:40/k=6,v=5/i8", "tokens:50/f16/i4",
                               "tokens:30/8/drop", "tokens:30/i8/drop"}) {
    for (const size_t n : {96, 170}) {
      SCOPED_TRACE(kv + ", " + std::to_string(n) + " tokens");
      auto producer = NewSequence(kv);
      Read(*producer, SourceTokens(50, n));
      ASSERT_EQ(producer->groups().size(), TokensToGroup(static_cast<int>(n)));
      const Context context = PublishedBy(*producer);
      EXPECT_EQ(context.card.token_ids_size(), static_cast<int>(n));
      EXPECT_EQ(context.card.mask().groups().n_tokens(), static_cast<uint32_t>(producer->groups().size()));
      auto consumer = AttachedTo(context, kv);
      EXPECT_EQ(consumer->groups(), producer->groups());
      Read(*producer, {});
      Read(*consumer, {});
      EXPECT_EQ(Logits(*consumer), Logits(*producer));
      // Far enough that both write pages of their own.
      for (const size_t more : {40, 9}) {
        Read(*producer, SourceTokens(300, more));
        Read(*consumer, SourceTokens(300, more));
      }
      EXPECT_EQ(Logits(*consumer), Logits(*producer));
      const Context theirs = PublishedBy(*consumer), ours = PublishedBy(*producer);
      EXPECT_EQ(Checksums(theirs), Checksums(ours));
      EXPECT_EQ(consumer->groups(), producer->groups());
      // And whoever goes on from that.
      auto last = AttachedTo(theirs, kv);
      Read(*last, SourceTokens(700, 20));
      Read(*producer, SourceTokens(700, 20));
      EXPECT_EQ(Logits(*last), Logits(*producer));
    }
  }
}

TEST(Grouped, WhatIsCutBehindAHandoffLeavesThePagesBeforeIt) {
  for (const std::string kv : {"tokens:40/i8/4", "tokens:20/8/4", "tokens:40/8/i8"}) {
    SCOPED_TRACE(kv);
    auto producer = NewSequence(kv);
    Read(*producer, SourceTokens(50, 110));
    auto consumer = AttachedTo(PublishedBy(*producer), kv);
    for (Sequence* sequence : {producer.get(), consumer.get()}) {
      Read(*sequence, SourceTokens(300, 80));  // two pages and some tokens
      ASSERT_TRUE(sequence->Truncate(110 + 70));
      Read(*sequence, {});
      Read(*sequence, SourceTokens(600, 40));
    }
    EXPECT_EQ(Logits(*consumer), Logits(*producer));
    EXPECT_EQ(Checksums(PublishedBy(*consumer)), Checksums(PublishedBy(*producer)));
  }
}

TEST(Grouped, PagesOfOneGroupAreInOneCodecAndPositionsAreThoseOfTheText) {
  auto sequence = NewSequence("tokens:20/8/4");
  Read(*sequence, SourceTokens(0, 330));
  const Context context = PublishedBy(*sequence);
  const GroupedTokens& groups = sequence->groups();
  ASSERT_EQ(groups.size(), 288);
  ASSERT_EQ(groups.n_high(), 64);
  EXPECT_EQ(groups.high, PlanGroups(sequence->importance().first(288), 20, false).high);
  std::vector<int> order = groups.Order();
  for (int t = 288; t < 330; ++t) order.push_back(t);
  size_t place = 0;
  for (const auto& span : context.card.spans()) {
    for (uint32_t i = 0; i < span.n_pages(); ++i) {
      const Segment& segment = *context.segments[span.segment()];
      const PageEntry& page = segment.pages()[span.first_page() + i];
      EXPECT_EQ(page.first_position, static_cast<uint32_t>(order[place]));
      EXPECT_EQ(ToString(segment.codecs(span.first_page() + i)), place < 64 || place >= 288 ? "8" : "4");
      place += page.tokens;
    }
  }
  EXPECT_EQ(place, 330u);
  EXPECT_EQ(context.card.format().kv(), "8");
}

TEST(Grouped, TheOrderOfKeysIsNothingToAttentionAndBitsAre) {
  // fp32 weights: with quantized ones ggml rounds activations to 8 bits, which is more than what is to be seen here.
  const std::string path = ::testing::TempDir() + "qkv-grouped-f32.gguf";
  ASSERT_TRUE(WriteRequantizedModel(TestModelPath(), "f32", path));
  const auto loaded = Model::Load(path);
  std::remove(path.c_str());  // it has it mapped
  ASSERT_TRUE(loaded) << loaded.error().message;
  const std::vector<Token> prompt = SourceTokens(100, 300), text = SourceTokens(400, 30);
  const auto logits = [&](const std::string& kv) {
    auto sequence = NewSequence(kv, {}, *loaded);
    Read(*sequence, prompt);
    PublishedBy(*sequence);
    sequence->KeepAllLogits(true);
    Read(*sequence, text);
    return std::vector<float>(sequence->all_logits().begin(), sequence->all_logits().end());
  };
  const size_t n_vocab = static_cast<size_t>((*loaded)->params().n_vocab);
  const ReferenceLogits exact(logits("f16"), n_vocab);
  const auto kl = [&](const std::string& kv) {
    const double value = exact.ScoreAll(logits(kv), std::vector<Token>(exact.rows())).kl_mean();
    std::printf("kv %s: KL %.2e\n", kv.c_str(), value);
    return value;
  };
  EXPECT_LT(kl("tokens:30/f16/f16"), 1e-6);
  const double all_8 = kl("8"), all_4 = kl("4"), mixed = kl("tokens:50/8/4");
  EXPECT_LT(all_8, mixed);
  EXPECT_LT(mixed, all_4);
  EXPECT_GT(kl("tokens:50/8/drop"), all_4);
}

TEST(Grouped, DroppedTokensAreInNoPageAndStillCount) {
  auto sequence = NewSequence("tokens:50/8/drop");
  Read(*sequence, SourceTokens(0, 200));
  EXPECT_EQ(sequence->stats().tokens_dropped, 64);  // of five pages half are kept, rounded up: three
  EXPECT_EQ(PublishedBy(*sequence).card.token_ids_size(), 200);
  const uint64_t n_pages = 3 + 2;  // 96 tokens by importance; the last 40
  EXPECT_EQ(sequence->stats().own_kv_bytes,
            n_pages * PageLayout(TestModel()->geometry(), {CodecId::k8, CodecId::k8}).bytes);
  EXPECT_EQ(sequence->tokens().size(), 200u);
}

TEST(Grouped, OnlyAPromptThatIsReadAtOnceIntoAnEmptySequence) {
  const auto plain = [](std::span<const Token> first, std::span<const Token> second) {
    auto sequence = NewSequence("8");
    Read(*sequence, first);
    if (!second.empty()) Read(*sequence, second);
    return Checksums(PublishedBy(*sequence));
  };
  // Too short; and what comes behind it is not grouped either.
  const std::vector<Token> few = SourceTokens(0, 95), many = SourceTokens(95, 150);
  auto sequence = NewSequence("tokens:20/8/4");
  Read(*sequence, few);
  Read(*sequence, many);
  EXPECT_TRUE(sequence->groups().empty());
  EXPECT_EQ(Checksums(PublishedBy(*sequence)), plain(few, many));
  // Of which pages were encoded while it was read.
  auto early = NewSequence("tokens:20/8/4", {.n_batch = 64, .tail_budget_bytes = 1 << 20});
  Read(*early, many);
  EXPECT_TRUE(early->groups().empty());
  EXPECT_TRUE(early->importance().empty());
  // A sequence that is empty again begins anew.
  sequence->Clear();
  Read(*sequence, many);
  EXPECT_EQ(sequence->groups().size(), 96);
  ASSERT_TRUE(sequence->Truncate(0));
  EXPECT_TRUE(sequence->groups().empty());
  Read(*sequence, many);
  EXPECT_EQ(sequence->groups().size(), 96);
}

TEST(Grouped, TheSameWithAnyNumberOfThreads) {
  const std::vector<Token> prompt = SourceTokens(40, 200);
  auto one = NewSequence("tokens:30/8/4", {.n_threads = 1});
  auto two = NewSequence("tokens:30/8/4", {.n_threads = 2});
  Read(*one, prompt);
  Read(*two, prompt);
  EXPECT_EQ(one->groups(), two->groups());
  EXPECT_EQ(std::vector(one->importance().begin(), one->importance().end()),
            std::vector(two->importance().begin(), two->importance().end()));
}

TEST(Grouped, IsCutBehindTheGroupsOnly) {
  auto producer = NewSequence("tokens:30/8/drop");
  Read(*producer, SourceTokens(0, 170));  // 128 of them grouped
  const Context context = PublishedBy(*producer);
  auto consumer = AttachedTo(context, "8");
  for (Sequence* sequence : {producer.get(), consumer.get()}) {
    EXPECT_THAT(sequence->Truncate(127).error().message, HasSubstr("the first 128 tokens are grouped"));
    EXPECT_EQ(sequence->tokens().size(), 170u);
    ASSERT_TRUE(sequence->Truncate(140));
    Read(*sequence, SourceTokens(500, 60));
  }
  EXPECT_EQ(Logits(*consumer), Logits(*producer));
  EXPECT_EQ(Checksums(PublishedBy(*consumer)), Checksums(PublishedBy(*producer)));
  ASSERT_TRUE(consumer->Truncate(128));
  EXPECT_THAT(consumer->Publish({}).error().message, HasSubstr("at least one behind"));
}

TEST(Grouped, IsUsedWholeOrNotAtAll) {
  auto producer = NewSequence("tokens:30/8/4");
  Read(*producer, SourceTokens(0, 170));
  const Context context = PublishedBy(*producer);
  const SpliceSource whole{&context, 0}, part{&context, 64};
  auto reader = NewSequence("8");
  for (const int before : {0, 20}) {
    if (before > 0) Read(*reader, SourceTokens(900, 20));
    const auto spliced = reader->Splice({before > 0 ? &whole : &part, 1}, {});
    ASSERT_FALSE(spliced);
    EXPECT_EQ(spliced.error().reason, Reason::kCodecUnsupported);
    EXPECT_THAT(spliced.error().message, HasSubstr("the first 128 tokens"));
    EXPECT_EQ(reader->tokens().size(), static_cast<size_t>(before));
  }
  // From its start behind nothing it is what Attach makes of it, also with others behind it.
  auto attached = AttachedTo(context, "8");
  auto other = NewSequence("8");
  Read(*other, SourceTokens(400, 70));
  const Context second = PublishedBy(*other);
  reader->Clear();
  const SpliceSource both[] = {whole, {&second, 0}};
  const auto spliced = reader->Splice(both, {});
  ASSERT_TRUE(spliced) << spliced.error().message;
  EXPECT_EQ(spliced->tokens_spliced, 240);
  ASSERT_TRUE(attached->Splice(std::span(both).subspan(1), {}));
  Read(*reader, SourceTokens(600, 9));
  Read(*attached, SourceTokens(600, 9));
  EXPECT_EQ(Logits(*reader), Logits(*attached));
  // Which can be handed on.
  auto last = AttachedTo(PublishedBy(*reader), "8");
  Read(*reader, SourceTokens(650, 5));
  Read(*last, SourceTokens(650, 5));
  EXPECT_EQ(Logits(*last), Logits(*reader));
}

TEST(Grouped, WhatNeedsTheOrderOfTheTextRefuses) {
  auto producer = NewSequence("tokens:50/f16/f16");
  Read(*producer, SourceTokens(0, 170));
  const Context context = PublishedBy(*producer);
  EXPECT_THAT(VerifyDeep(TestModel(), context, 16, 2).error().message, HasSubstr("only checksums can be verified"));
  auto copy = NewSequence("8");
  EXPECT_THAT(copy->CopyExact(context).error().message, HasSubstr("pages of grouped tokens"));
  EXPECT_EQ(producer->sealed_tokens(), 0);
}

TEST(Grouped, AnUnsuitableShareOrCodecIsRefused) {
  const CodecPair plain = {CodecId::k8, CodecId::k8}, refined = {CodecId::k4, CodecId::k4, true};
  EXPECT_FALSE(Sequence::Create(TestModel(), {.kv = plain, .groups = TokenGroups{.percent = 0}}));
  EXPECT_FALSE(Sequence::Create(TestModel(), {.kv = plain, .groups = TokenGroups{.percent = 100}}));
  EXPECT_FALSE(Sequence::Create(TestModel(), {.kv = refined, .groups = TokenGroups{}}));
  EXPECT_FALSE(Sequence::Create(TestModel(), {.kv = plain, .groups = TokenGroups{.low = refined}}));
}

// What a forged card says about the groups is refused, or makes no difference to what comes out: attention asks for no
// order among the tokens that it sees, and pages are the same.
TEST(Grouped, NoBitmapGivesAnotherAnswer) {
  auto producer = NewSequence("tokens:40/8/4");
  Read(*producer, SourceTokens(0, 150));
  const Context context = PublishedBy(*producer);
  Read(*producer, SourceTokens(300, 3));
  const std::vector<float> expected = Logits(*producer);
  const auto with = [&](const std::function<void(::qkvshare::v1::TokenGroups&)>& change) {
    Context other = context;
    change(*other.card.mutable_mask()->mutable_groups());
    return other;
  };
  int refused = 0, same = 0;
  const auto check = [&](const Context& other) {
    auto consumer = NewSequence("8");
    const auto card = ParseCard(SerializeCard(other.card));
    const Status status = card ? consumer->Attach(other) : Status(tl::unexpected(card.error()));
    if (!status) {
      EXPECT_EQ(status.error().reason, Reason::kChecksum) << status.error().message;
      ++refused;
      return;
    }
    Read(*consumer, SourceTokens(300, 3));
    EXPECT_EQ(Logits(*consumer), expected);
    ++same;
  };
  const int n = producer->groups().size();
  for (int t = 0; t < n; t += 5) {  // one more or one fewer in the first group
    check(with([t](auto& groups) { (*groups.mutable_high())[t / 8] ^= static_cast<char>(1 << t % 8); }));
  }
  EXPECT_EQ(refused, (n + 4) / 5);
  // As many, but others.
  for (int t = 1; t + 1 < n; ++t) {
    if (producer->groups().high[t] == producer->groups().high[t + 1]) continue;
    check(with([t](auto& groups) {
      for (const int flipped : {t, t + 1}) (*groups.mutable_high())[flipped / 8] ^= static_cast<char>(1 << flipped % 8);
    }));
    if (same == 3) break;
  }
  EXPECT_EQ(same, 3);
  const int before = refused;
  check(with([](auto& groups) { groups.set_dropped(true); }));
  check(with([](auto& groups) { groups.Clear(); }));
  Context plain = context;
  plain.card.mutable_mask()->clear_groups();
  check(plain);
  EXPECT_EQ(refused, before + 3);
}

}  // namespace
}  // namespace qkv
