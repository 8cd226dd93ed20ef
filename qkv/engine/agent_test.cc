// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/agent.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "qkv/broker/server.h"
#include "qkv/engine/test_support.h"

namespace qkv {
namespace {

using ::qkv::testing::SourceTokens;
using ::qkv::testing::TestModel;
using ::testing::HasSubstr;

constexpr CodecPair kF16 = {CodecId::kF16, CodecId::kF16};
constexpr CodecPair kI8 = {CodecId::kI8, CodecId::kI8};

class AgentTest : public ::testing::Test {
 protected:
  AgentTest() {
    std::string path = (std::filesystem::temp_directory_path() / "agent_test.XXXXXX").string();
    EXPECT_NE(::mkdtemp(path.data()), nullptr);
    directory_ = path;
    BrokerOptions options;
    options.socket_path = directory_ + "/broker.sock";
    server_ = *BrokerServer::Start(options);
    client_ = *BrokerClient::Connect(options.socket_path);
  }
  ~AgentTest() override { std::filesystem::remove_all(directory_); }

  std::unique_ptr<Sequence> NewSequence(CodecPair kv = kI8, int n_ctx = 1024) {
    SequenceOptions options;
    options.n_ctx = n_ctx;
    options.n_threads = 2;
    options.kv = kv;
    return *Sequence::Create(TestModel(), options);
  }
  Agent NewAgent(CodecPair kv = kI8, const WarmSegments* warm = nullptr, int n_ctx = 1024) {
    return Agent(TestModel(), NewSequence(kv, n_ctx), client_.get(), warm);
  }
  // Publishes some tokens under a name; the context's id.
  std::string Published(const std::string& name, size_t first, size_t n) {
    auto sequence = NewSequence();
    EXPECT_TRUE(sequence->Forward(SourceTokens(first, n)));
    const auto context = sequence->Publish({.name = name});
    EXPECT_TRUE(context && PublishContext(*client_, *context));
    return context->card.id();
  }
  std::vector<uint64_t> Leases() {
    const auto status = client_->List();
    std::vector<uint64_t> leases;
    for (const ContextInfo& context : status->contexts) leases.push_back(context.n_leases);
    return leases;
  }
  TurnRequest ReadsTwo() {
    TurnRequest request;
    request.system = "You are brief.";
    request.prompt = "What is this about?";
    request.reads = {{.context = "one", .history = SourceTokens(0, 40)},
                     {.context = "two", .history = SourceTokens(99, 50)}};
    request.max_tokens = 6;
    request.digest_logits = true;
    return request;
  }

  std::string directory_;
  std::unique_ptr<BrokerServer> server_;
  std::unique_ptr<BrokerClient> client_;
};

TEST_F(AgentTest, WarmSegmentsAreUsedInPlaceOfNewMappings) {
  const std::string id = Published("x", 0, 70);
  WarmSegments warm;
  const auto bytes = warm.Add(*client_, "x", 1);
  ASSERT_TRUE(bytes) << bytes.error().message;
  EXPECT_GT(*bytes, 0u);
  EXPECT_EQ(warm.Add(*client_, id, 1).value(), 0u) << "all of it is here";
  EXPECT_EQ(client_->List()->contexts[0].n_leases, 0u) << "nobody holds it yet";

  const auto fetched = FetchContext(*client_, id, nullptr, &warm);
  ASSERT_TRUE(fetched);
  EXPECT_EQ(fetched->segments[0], warm.Find(fetched->segments[0]->digest()));
  EXPECT_NE(FetchContext(*client_, id)->segments[0], fetched->segments[0]);
  EXPECT_FALSE(warm.Add(*client_, "nobody", 1));
}

TEST_F(AgentTest, WarmPagesNeedNoSecondCheckAndGiveTheSame) {
  Published("x", 0, 70);
  WarmSegments warm;
  ASSERT_TRUE(warm.Add(*client_, "x", 1));
  TurnRequest request;
  request.inherits = "x";
  request.prompt = "Go on.";
  request.max_tokens = 5;
  request.digest_logits = true;
  Agent cold = NewAgent(), warmed = NewAgent(kI8, &warm);
  const auto a = cold.Run(request), b = warmed.Run(request);
  ASSERT_TRUE(a && b);
  EXPECT_EQ(a->logits_digest, b->logits_digest);
  EXPECT_EQ(b->mode, HandoffMode::kAttach);
}

TEST_F(AgentTest, LetsItsLeaseGo) {
  Published("x", 0, 40);
  {
    Agent agent = NewAgent();
    TurnRequest request;
    request.inherits = "x";
    request.max_tokens = 1;
    ASSERT_TRUE(agent.Run(request));
    EXPECT_EQ(client_->List()->contexts[0].n_leases, 1u);
  }
  EXPECT_EQ(client_->List()->contexts[0].n_leases, 0u);
}

// By hand: the system message in a call of its own, then the contexts and the prompt.
std::vector<Token> PrefixByHand() {
  return Vocab(*TestModel()).SystemTurn("You are brief.").value();
}
std::vector<Token> RestByHand() {
  std::vector<Token> rest = SourceTokens(0, 40);
  const auto more = SourceTokens(99, 50), prompt = Vocab(*TestModel()).NextTurn("What is this about?").value();
  rest.insert(rest.end(), more.begin(), more.end());
  rest.insert(rest.end(), prompt.begin(), prompt.end());
  return rest;
}

TEST_F(AgentTest, ContextsBehindAPrefixAreSpliced) {
  Published("one", 0, 40);
  Published("two", 99, 50);
  const auto fetched_one = FetchContext(*client_, "one"), fetched_two = FetchContext(*client_, "two");
  ASSERT_TRUE(fetched_one && fetched_two);
  const auto n_prompt = static_cast<int64_t>(RestByHand().size()) - 90;
  const auto n_prefix = static_cast<int64_t>(PrefixByHand().size());
  for (const char* policy : {"hide", "repair=32"}) {
    TurnRequest request = ReadsTwo();
    for (ContextToRead& read : request.reads) read.splice = *ParseSplicePolicy(policy);
    Agent agent = NewAgent();
    const auto result = agent.Run(request);
    ASSERT_TRUE(result) << result.error().message;
    const int64_t repaired = request.reads[0].splice.repair * 2;
    EXPECT_EQ(result->mode, HandoffMode::kSplice);
    EXPECT_EQ(result->reason, Reason::kNone) << result->reason_detail;
    EXPECT_EQ(result->splice, policy);
    EXPECT_EQ(result->spans_spliced, 2);
    EXPECT_EQ(result->tokens_repaired, repaired);
    EXPECT_EQ(result->tokens_reused, 90 - repaired);
    EXPECT_EQ(result->tokens_recomputed, n_prefix + repaired + n_prompt);
    EXPECT_EQ(result->prefix_tokens, n_prefix);
    EXPECT_EQ(Leases(), (std::vector<uint64_t>{2, 2})) << "it holds both, and so do we";

    auto by_hand = NewSequence();
    ASSERT_TRUE(by_hand->Forward(PrefixByHand()));
    const SpliceSource sources[] = {{&*fetched_one}, {&*fetched_two}};
    ASSERT_TRUE(by_hand->Splice(sources, {.repair = request.reads[0].splice.repair}));
    ASSERT_TRUE(by_hand->Forward(std::span<const Token>(RestByHand()).subspan(90)));
    EXPECT_EQ(result->output_tokens[0], Sampler(Sampling{}).Sample(by_hand->logits()));
    EXPECT_TRUE(std::equal(by_hand->tokens().begin(), by_hand->tokens().end(), result->context_tokens.begin()));
  }
  EXPECT_EQ(Leases(), (std::vector<uint64_t>{1, 1})) << "its leases are gone";
}

TEST_F(AgentTest, AutoRepairsUntilLittleChangesAndSaysWhere) {
  Published("one", 0, 40);
  Published("two", 99, 50);
  TurnRequest request = ReadsTwo();
  for (ContextToRead& read : request.reads) read.splice = *ParseSplicePolicy("auto");
  const auto result = NewAgent().Run(request);
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_GE(result->probe_kl, 0);
  TurnRequest same = ReadsTwo();
  if (result->splice == "full") {
    EXPECT_EQ(result->tokens_reused, 0);
    EXPECT_EQ(result->tokens_repaired, 90);
  } else {
    for (ContextToRead& read : same.reads) read.splice = *ParseSplicePolicy(result->splice);
    EXPECT_LE(result->probe_kl, kProbeAgreement);
    EXPECT_EQ(NewAgent().Run(same)->tokens_reused, result->tokens_reused);
  }
}

TEST_F(AgentTest, WhatCannotBeSplicedIsReadAsTextWithTheReason) {
  Published("two", 99, 50);
  const auto one_is_missing = NewAgent().Run(ReadsTwo());
  ASSERT_TRUE(one_is_missing) << one_is_missing.error().message;
  EXPECT_EQ(one_is_missing->mode, HandoffMode::kSplice) << "the other is spliced";
  EXPECT_EQ(one_is_missing->reason, Reason::kNotFound);
  EXPECT_EQ(one_is_missing->tokens_reused, 50);
  ASSERT_EQ(one_is_missing->steps_down.size(), 1u);
  EXPECT_EQ(one_is_missing->steps_down[0].from, HandoffMode::kSplice);

  Published("one", 0, 40);
  TurnRequest request = ReadsTwo();
  for (const auto& [policy, reason] :
       {std::pair("off", Reason::kDenied), std::pair("exact-only", Reason::kQualityGate)}) {
    for (ContextToRead& read : request.reads) read.splice = *ParseSplicePolicy(policy);
    const auto result = NewAgent().Run(request);
    ASSERT_TRUE(result) << result.error().message;
    EXPECT_EQ(result->mode, HandoffMode::kText);
    EXPECT_EQ(result->reason, reason);
    EXPECT_THAT(result->reason_detail, HasSubstr(policy));
    EXPECT_EQ(result->tokens_reused, 0);
    EXPECT_EQ(result->splice, "");

    // The answer is a cold run's.
    auto by_hand = NewAgent();
    ASSERT_TRUE(by_hand.sequence().Forward(PrefixByHand()));
    ASSERT_TRUE(by_hand.sequence().Forward(RestByHand()));
    TurnRequest cold = ReadsTwo();
    for (ContextToRead& read : cold.reads) read.context.clear();
    EXPECT_EQ(result->logits_digest, NewAgent().Run(cold)->logits_digest);
    EXPECT_EQ(result->output_tokens[0], Sampler(Sampling{}).Sample(by_hand.sequence().logits()));
    EXPECT_EQ(result->tokens_recomputed, static_cast<int64_t>(PrefixByHand().size() + RestByHand().size()));
  }
}

TEST_F(AgentTest, WhatIsNotAdmittedIsReadAsText) {
  Published("one", 0, 40);
  Published("two", 99, 50);
  int asked = 0;
  auto agent = NewAgent();
  agent.AdmitBy([&](const Context&) -> Status {
    ++asked;
    return Err(Code::kIncompatible, Reason::kQualityGate, "not good enough");
  });
  const auto result = agent.Run(ReadsTwo());
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(result->mode, HandoffMode::kText);
  EXPECT_EQ(result->reason, Reason::kQualityGate);
  EXPECT_EQ(result->tokens_reused, 0);
  TurnRequest cold = ReadsTwo();
  for (ContextToRead& read : cold.reads) read.context.clear();
  EXPECT_EQ(result->logits_digest, NewAgent().Run(cold)->logits_digest);
}

// What is to be admitted is measured, and may by then be anything that its producer liked.
TEST_F(AgentTest, AContextThatCannotBeAttachedIsRefusedForThatAndNeverMeasured) {
  const CodecPair progressive = {CodecId::k4, CodecId::k4, true};
  auto sequence = NewSequence(progressive);
  ASSERT_TRUE(sequence->Forward(SourceTokens(0, 64)));
  auto context = sequence->Publish({.name = "bad"});
  ASSERT_TRUE(context) << context.error().message;
  ASSERT_EQ(context->segments.size(), 2u);
  auto* const span = context->card.mutable_spans(0);
  span->set_segment(1);  // refinement pages, as if they were the context's own
  span->set_refinement_segment(0);
  ASSERT_TRUE(PublishContext(*client_, *context));

  int asked = 0;
  auto agent = NewAgent(progressive);
  agent.AdmitBy([&](const Context&) -> Status {
    ++asked;
    return {};
  });
  const auto inherited = agent.Run({.prompt = "?", .raw = true, .inherits = "bad"});
  ASSERT_TRUE(inherited) << inherited.error().message;
  EXPECT_EQ(inherited->mode, HandoffMode::kText);
  EXPECT_EQ(inherited->reason, Reason::kChecksum);
  TurnRequest reads{.prompt = "?", .raw = true};
  reads.reads = {{.context = "bad"}};
  const auto read = agent.Run(reads);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->mode, HandoffMode::kText);
  EXPECT_EQ(read->reason, Reason::kChecksum);
  context->card.clear_spans();
  context->card.clear_token_ids();
  const Status empty = sequence->CheckAttach(*context);
  ASSERT_FALSE(empty);
  EXPECT_THAT(empty.error().message, HasSubstr("no tokens"));
  EXPECT_EQ(asked, 0);
  for (const CodecPair kv : {CodecPair{CodecId::kRefine4, CodecId::kRefine4}, {CodecId::k8, CodecId::kRefine4}}) {
    EXPECT_FALSE(Sequence::Create(TestModel(), {.kv = kv}));
  }
}

TEST_F(AgentTest, AContextThatTurnsOutBadIsReadAsTextAsInAColdRun) {
  Published("one", 0, 40);
  // Its card promises a model that its segment is not of.
  auto sequence = NewSequence();
  ASSERT_TRUE(sequence->Forward(SourceTokens(99, 50)));
  auto context = sequence->Publish({.name = "two"});
  ASSERT_TRUE(context);
  context->card.mutable_model()->mutable_rope()->set_base(12345.0f);
  ASSERT_TRUE(PublishContext(*client_, *context));

  TurnRequest request = ReadsTwo();
  const auto mixed = NewAgent().Run(request);
  ASSERT_TRUE(mixed) << mixed.error().message;
  EXPECT_EQ(mixed->mode, HandoffMode::kSplice);
  EXPECT_EQ(mixed->reason, Reason::kModelMismatch);
  ASSERT_EQ(mixed->steps_down.size(), 1u);
  ASSERT_EQ(mixed->steps_down[0].mismatches.size(), 1u);
  EXPECT_EQ(mixed->steps_down[0].mismatches[0].field, "rope.base");

  request.reads.erase(request.reads.begin());
  const auto result = NewAgent().Run(request);
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_EQ(result->mode, HandoffMode::kText);
  EXPECT_EQ(result->reason, Reason::kModelMismatch);
  request.reads[0].context.clear();
  EXPECT_EQ(NewAgent().Run(request)->logits_digest, result->logits_digest);

  request.reads[0] = {.context = "two", .history = SourceTokens(99, 50), .on_miss = OnMiss::kFail};
  const auto failed = NewAgent().Run(request);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().reason, Reason::kModelMismatch);
  EXPECT_EQ(Leases(), (std::vector<uint64_t>{0, 0}));
}

// A grouped prompt is gone on from exactly; one whose card says something else about the groups than its pages do, and one
// that is wanted behind something else, are read as text, as in a cold run.
TEST_F(AgentTest, GroupedTokensAreGoneOnFromOrReadAsText) {
  const std::vector<Token> tokens = SourceTokens(0, 150);
  SequenceOptions options{.n_ctx = 1024, .kv = kI8, .groups = ParseKvChoice("tokens:40/i8/4")->groups};
  auto producer = *Sequence::Create(TestModel(), options);
  ASSERT_TRUE(producer->Forward(tokens));
  auto context = producer->Publish({.name = "good"});
  ASSERT_TRUE(context && PublishContext(*client_, *context));
  // As many tokens in the first group, but others: pages begin elsewhere than it says. The card by itself is consistent.
  Context forged = *context;
  forged.card.set_id(NewContextId());
  forged.card.set_name("bad");
  std::string& high = *forged.card.mutable_mask()->mutable_groups()->mutable_high();
  ASSERT_EQ(high.size(), 12u);
  high = std::string(4, '\xff') + std::string(8, '\0');
  ASSERT_NE(high, context->card.mask().groups().high());
  ASSERT_TRUE(PublishContext(*client_, forged));

  TurnRequest request{.prompt = "What is this about?", .max_tokens = 6, .digest_logits = true, .history = tokens};
  const auto cold = NewAgent().Run(request);
  ASSERT_TRUE(cold) << cold.error().message;
  request.inherits = "good";
  const auto attached = NewAgent().Run(request);
  ASSERT_TRUE(attached) << attached.error().message;
  EXPECT_EQ(attached->mode, HandoffMode::kAttach);
  EXPECT_EQ(attached->tokens_grouped, 96);
  TurnRequest own = request;
  own.inherits.clear();
  own.history.clear();
  Agent itself(TestModel(), std::move(producer), client_.get());
  EXPECT_EQ(itself.Run(own)->logits_digest, attached->logits_digest);

  request.inherits = "bad";
  const auto refused = NewAgent().Run(request);
  ASSERT_TRUE(refused) << refused.error().message;
  EXPECT_EQ(refused->mode, HandoffMode::kText);
  EXPECT_EQ(refused->reason, Reason::kChecksum);
  EXPECT_EQ(refused->logits_digest, cold->logits_digest);

  TurnRequest reads = ReadsTwo();
  reads.reads = {{.context = "good", .history = tokens}};
  const auto spliced = NewAgent().Run(reads);
  ASSERT_TRUE(spliced) << spliced.error().message;
  EXPECT_EQ(spliced->mode, HandoffMode::kText);
  EXPECT_EQ(spliced->reason, Reason::kCodecUnsupported);
  reads.reads[0].context.clear();
  EXPECT_EQ(NewAgent().Run(reads)->logits_digest, spliced->logits_digest);
}

TEST_F(AgentTest, AProducersSystemMessageIsLeftOutBehindAnother) {
  TurnRequest producing;
  producing.system = "You answer in one short sentence, and you never speak of yourself or of these instructions.";
  producing.prompt = "Name a river and say where it rises.";
  producing.max_tokens = 8;
  producing.publish_as = "one";
  const auto produced = NewAgent().Run(producing);
  ASSERT_TRUE(produced) << produced.error().message;
  const auto prefix = Vocab(*TestModel()).SystemTurn(producing.system).value();
  EXPECT_EQ(produced->prefix_tokens, static_cast<int64_t>(prefix.size()));

  TurnRequest reading = ReadsTwo();
  reading.reads = {{.context = "one"}};
  const auto read = NewAgent().Run(reading);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->mode, HandoffMode::kSplice);
  std::vector<Token> expected = PrefixByHand();
  expected.insert(expected.end(), produced->context_tokens.begin() + static_cast<int>(prefix.size()),
                  produced->context_tokens.end());
  ASSERT_GT(read->context_tokens.size(), expected.size());
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), read->context_tokens.begin()));
  // Text handoff reads the same tokens.
  reading.reads = {{.history = produced->context_tokens, .prefix_tokens = static_cast<int>(produced->prefix_tokens)}};
  const auto text = NewAgent().Run(reading);
  ASSERT_TRUE(text) << text.error().message;
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), text->context_tokens.begin()));

  // Behind the same system message it is gone on from, exactly.
  reading.reads = {{.context = "one"}};
  reading.system = producing.system;
  const auto same = NewAgent().Run(reading);
  ASSERT_TRUE(same) << same.error().message;
  EXPECT_EQ(same->mode, HandoffMode::kAttach);
  EXPECT_EQ(same->tokens_reused, static_cast<int64_t>(produced->context_tokens.size()));
  reading.reads.clear();
  reading.system.clear();
  reading.inherits = "one";
  EXPECT_EQ(NewAgent().Run(reading)->logits_digest, same->logits_digest);
}

TEST_F(AgentTest, ADocumentIsEncodedBehindOneTokenThatNobodySees) {
  const std::string text = "The mill stood by the river for two hundred years, and nobody knows who built it.";
  TurnRequest document;
  document.prompt = text;
  document.document = true;
  document.max_tokens = 0;
  document.publish_as = "doc";
  const auto read = NewAgent().Run(document);
  ASSERT_TRUE(read) << read.error().message;
  const Vocab vocab(*TestModel());
  std::vector<Token> bare = vocab.Tokenize(text, false, false).value();
  EXPECT_EQ(read->prefix_tokens, 1);
  EXPECT_EQ(read->context_tokens.front(), vocab.BeginningOfText().value());
  EXPECT_TRUE(std::equal(bare.begin(), bare.end(), read->context_tokens.begin() + 1, read->context_tokens.end()));

  TurnRequest reading = ReadsTwo();
  reading.reads = {{.context = "doc"}};
  const auto hidden = NewAgent().Run(reading);
  ASSERT_TRUE(hidden) << hidden.error().message;
  EXPECT_EQ(hidden->mode, HandoffMode::kSplice);
  EXPECT_EQ(hidden->tokens_repaired, 0) << "the token is left out for nothing";
  EXPECT_EQ(hidden->tokens_reused, static_cast<int64_t>(bare.size()) + 1);
  reading.reads[0].splice = *ParseSplicePolicy("repair=32");
  const auto repaired = NewAgent().Run(reading);
  ASSERT_TRUE(repaired) << repaired.error().message;
  EXPECT_EQ(repaired->tokens_repaired, static_cast<int64_t>(bare.size())) << "without it";

  // Behind a common system message.
  document.system = reading.system;
  document.publish_as = "behind";
  const auto behind = NewAgent().Run(document);
  ASSERT_TRUE(behind) << behind.error().message;
  EXPECT_EQ(behind->prefix_tokens, static_cast<int64_t>(PrefixByHand().size()));
  reading.reads = {{.context = "behind"}};
  const auto exact = NewAgent().Run(reading);
  ASSERT_TRUE(exact) << exact.error().message;
  EXPECT_EQ(exact->mode, HandoffMode::kAttach);
}

TEST_F(AgentTest, APrefixThatWasReadAheadGivesTheSame) {
  Agent at_once = NewAgent(), ahead = NewAgent(), other = NewAgent();
  ASSERT_TRUE(ahead.ReadPrefix("You are brief."));
  ASSERT_TRUE(other.ReadPrefix("You are somebody else."));
  const auto a = at_once.Run(ReadsTwo()), b = ahead.Run(ReadsTwo()), c = other.Run(ReadsTwo());
  ASSERT_TRUE(a && b && c);
  EXPECT_EQ(a->logits_digest, b->logits_digest);
  EXPECT_EQ(a->logits_digest, c->logits_digest) << "another prefix does not stay";
}

TEST_F(AgentTest, ContextsBehindAPrefixFailWhereTextIsNotWanted) {
  Agent agent = NewAgent();
  TurnRequest request = ReadsTwo();
  request.reads[1].on_miss = OnMiss::kFail;
  request.reads[1].splice = *ParseSplicePolicy("off");
  const auto result = agent.Run(request);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, Code::kIncompatible);
  EXPECT_EQ(result.error().reason, Reason::kDenied);
}

TEST_F(AgentTest, TheOnlyContextBehindNoPrefixIsGoneOnFrom) {
  Published("one", 0, 40);
  TurnRequest request = ReadsTwo();
  request.system.clear();
  request.reads.pop_back();
  const auto read = NewAgent().Run(request);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->mode, HandoffMode::kAttach);
  EXPECT_EQ(read->reason, Reason::kNone);
  EXPECT_EQ(read->tokens_reused, 40);
  request.inherits = "one";
  request.reads.clear();
  EXPECT_EQ(NewAgent().Run(request)->logits_digest, read->logits_digest);
}

TEST_F(AgentTest, TheFirstOfSeveralContextsBehindNoPrefixIsGoneOnFrom) {
  Published("one", 0, 40);
  Published("two", 99, 50);
  TurnRequest request = ReadsTwo();
  request.system.clear();
  const auto both = NewAgent().Run(request);
  ASSERT_TRUE(both) << both.error().message;
  EXPECT_EQ(both->mode, HandoffMode::kSplice);
  EXPECT_EQ(both->spans_spliced, 1) << "the second";
  EXPECT_EQ(both->tokens_reused, 90);
  const size_t n_read = both->context_tokens.size() - both->output_tokens.size();

  for (ContextToRead& read : request.reads) read.splice = *ParseSplicePolicy("exact-only");
  const auto read = NewAgent().Run(request);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->mode, HandoffMode::kText) << "the second is read again";
  EXPECT_EQ(read->reason, Reason::kQualityGate);
  EXPECT_EQ(read->tokens_reused, 40);
  EXPECT_EQ(read->tokens_recomputed, static_cast<int64_t>(n_read) - 40);
  ASSERT_EQ(read->steps_down.size(), 1u);
  EXPECT_EQ(read->steps_down[0].from, HandoffMode::kSplice);

  ASSERT_TRUE(client_->Remove("one"));
  const auto text = NewAgent().Run(request);
  ASSERT_TRUE(text) << text.error().message;
  EXPECT_EQ(text->reason, Reason::kNotFound) << "the first step down";
  EXPECT_EQ(text->steps_down[0].from, HandoffMode::kAttach);
  EXPECT_EQ(text->tokens_reused, 0);
  EXPECT_TRUE(std::equal(both->context_tokens.begin(), both->context_tokens.begin() + static_cast<int>(n_read),
                         text->context_tokens.begin()))
      << "the same tokens are read";
}

TEST_F(AgentTest, ABudgetTurnsALongContextIntoText) {
  Published("x", 0, 70);
  TurnRequest request;
  request.inherits = "x";
  request.max_tokens = 1;
  request.prompt = "Go on.";
  request.budget = 69;
  const auto result = NewAgent().Run(request);
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_EQ(result->mode, HandoffMode::kText);
  EXPECT_EQ(result->reason, Reason::kTooLong);
  request.budget = 70;
  EXPECT_EQ(NewAgent().Run(request)->mode, HandoffMode::kAttach);
}

TEST_F(AgentTest, FailingToPublishCostsNotTheAnswerIfThatIsAllowed) {
  TurnRequest request;
  request.prompt = "Name a river.";
  request.max_tokens = 3;
  request.publish_as = "x";
  Agent agent = NewAgent();
  server_.reset();
  EXPECT_FALSE(NewAgent().Run(request));
  request.publish_may_fail = true;
  const auto result = agent.Run(request);
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_NE(result->text, "");
  EXPECT_EQ(result->context_id, "");
  EXPECT_NE(result->publish_error, "");
}

TEST_F(AgentTest, AnnouncesWhatIsSealedAndChangesNothing) {
  // In f16 a first segment of 16 MiB holds some 700 tokens of this model.
  TurnRequest request;
  request.history = SourceTokens(0, 900);
  request.prompt = "Go on.";
  request.max_tokens = 40;
  request.ignore_eos = true;
  request.digest_logits = true;
  request.publish_as = "whole";
  Agent silent = NewAgent(kF16), telling = NewAgent(kF16);
  const auto a = silent.Run(request);
  ASSERT_TRUE(a) << a.error().message;

  int64_t announced = 0;
  request.on_announced = [&](const std::string& id, int64_t n_tokens) {
    announced = n_tokens;
    const auto context = FetchContext(*client_, id);
    ASSERT_TRUE(context) << context.error().message;
    EXPECT_EQ(context->card.token_ids_size(), n_tokens);
    const std::vector<Token> tokens(context->card.token_ids().begin(), context->card.token_ids().end());
    EXPECT_EQ(tokens, SourceTokens(0, static_cast<size_t>(n_tokens)));
    auto reader = NewSequence(kF16);
    EXPECT_TRUE(reader->Attach(*context)) << "a context like any other";
    (void)client_->ReleaseLease(context->lease);
  };
  const auto b = telling.Run(request);
  ASSERT_TRUE(b) << b.error().message;
  EXPECT_GE(announced, 512);
  EXPECT_LT(announced, 900);
  EXPECT_EQ(a->logits_digest, b->logits_digest);
  std::set<std::string> ids;
  const auto status = client_->List();
  ASSERT_TRUE(status);
  for (const ContextInfo& context : status->contexts) ids.insert(context.id);
  EXPECT_EQ(ids, (std::set<std::string>{a->context_id, b->context_id})) << "what was announced is gone";
}

TEST(SystemTurn, IsHowAConversationBegins) {
  const Vocab vocab(*TestModel());
  const auto system = vocab.SystemTurn("You are brief.").value(),
             first = vocab.FirstTurn("You are brief.", "Hello").value();
  ASSERT_LT(system.size(), first.size());
  ASSERT_GT(system.size(), 5u);
  EXPECT_TRUE(std::equal(system.begin(), system.end(), first.begin()));
}

}  // namespace
}  // namespace qkv
