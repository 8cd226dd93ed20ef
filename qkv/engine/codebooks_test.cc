// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/codebooks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/tiny_model_fixture.h"

namespace qkv {
namespace {

using ::qkv::testing::TinyModel;
using ::testing::HasSubstr;

class Codebooks : public testing::TinyModelTest {
 protected:
  static std::shared_ptr<const PqCodebooks> Learn(const std::shared_ptr<const Model>& model, int n = 600) {
    auto learned = LearnCodebooks(model, SomeTokens(n), 200, 1);
    EXPECT_TRUE(learned) << learned.error().message;
    return learned ? std::make_shared<const PqCodebooks>(*std::move(learned)) : nullptr;
  }
  static Result<std::unique_ptr<Sequence>> Create(const std::shared_ptr<const Model>& model, std::string_view kv,
                                                  std::shared_ptr<const PqCodebooks> codebooks = nullptr) {
    SequenceOptions options;
    options.n_ctx = 256;
    options.n_threads = 1;
    const auto choice = ParseKvChoice(kv);
    EXPECT_TRUE(choice) << choice.error().message;
    options.kv = choice->codecs;
    options.groups = choice->groups;
    options.codebooks = std::move(codebooks);
    return Sequence::Create(model, options);
  }
};

TEST_F(Codebooks, AreReadAsTheyWereWrittenByTheirModelOnly) {
  const auto model = Load({});
  const std::string path = CodebooksPath(*model);
  EXPECT_THAT(path, HasSubstr(model->identity().weights_digest()));
  const auto missing = ReadCodebooks(*model, path);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_THAT(missing.error().message, HasSubstr("qkvshare calibrate --codebooks"));
  const auto learned = Learn(model);
  ASSERT_TRUE(WriteCodebooks(*learned, path));
  const auto read = ReadCodebooks(*model, path);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ((*read)->digest(), learned->digest());
  EXPECT_EQ((*read)->shape(), (PqShape{2, 2, 32}));
  EXPECT_EQ(Learn(model)->digest(), learned->digest()) << "another result of the same text";

  const auto other = ReadCodebooks(*Load({.weights_seed = 2}), path);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, Code::kIncompatible);

  std::ofstream(path, std::ios::binary) << "no codebooks";
  const auto damaged = ReadCodebooks(*model, path);
  ASSERT_FALSE(damaged);
  EXPECT_EQ(damaged.error().code, Code::kCorrupt);
  EXPECT_THAT(damaged.error().message, HasSubstr(path));
}

TEST_F(Codebooks, NothingIsLeftWhereTheyCannotBeWritten) {
  const auto learned = Learn(Load({}));
  const std::string folder = dir_.path() + "/folder";
  std::filesystem::create_directory(folder);
  std::filesystem::create_directory(folder + "/taken");  // cannot be replaced by a file
  EXPECT_FALSE(WriteCodebooks(*learned, folder + "/taken"));
  EXPECT_FALSE(WriteCodebooks(*learned, folder + "/missing/x"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
}

TEST_F(Codebooks, ThreeTokensAreTooFew) {
  const auto learned = LearnCodebooks(Load({}), SomeTokens(3), 200, 1);
  ASSERT_FALSE(learned);
  EXPECT_EQ(learned.error().code, Code::kInvalidArgument);
}

TEST_F(Codebooks, ASequenceFindsThemBesideTheModelAndSaysSoIfItNeedsThem) {
  const auto model = Load({});
  for (const char* kv : {"pq4", "k=i8,v=pq2"}) {
    const auto without = Create(model, kv);
    ASSERT_FALSE(without);
    EXPECT_EQ(without.error().code, Code::kNotFound);
    EXPECT_THAT(without.error().message, HasSubstr("qkvshare calibrate --codebooks"));
  }
  const auto plain = Create(model, "i8");
  ASSERT_TRUE(plain);
  EXPECT_EQ((*plain)->codebooks(), nullptr);

  const auto learned = Learn(model);
  ASSERT_TRUE(WriteCodebooks(*learned, CodebooksPath(*model)));
  for (const char* kv : {"pq4", "i8"}) {
    const auto found = Create(model, kv);
    ASSERT_TRUE(found) << found.error().message;
    EXPECT_EQ((*found)->identity().codebooks_digest(), learned->digest());
  }
  // What only those need who ask for it may be damaged.
  std::ofstream(CodebooksPath(*model), std::ios::binary) << "damaged";
  EXPECT_TRUE(Create(model, "i8"));
  const auto damaged = Create(model, "pq4");
  ASSERT_FALSE(damaged);
  EXPECT_EQ(damaged.error().code, Code::kCorrupt);
  const auto of_others = Create(Load({.n_layers = 3}), "pq4", learned);
  ASSERT_FALSE(of_others);
  EXPECT_EQ(of_others.error().code, Code::kIncompatible);
}

TEST_F(Codebooks, ProducerAndReaderGoOnBitForBit) {
  const auto model = Load({.q_scale = 16});
  const auto codebooks = Learn(model);
  for (const char* kv : {"pq4", "pq2", "k=pq4,v=pq2", "k=pq4,v=4", "k=i8,v=pq2"}) {
    SCOPED_TRACE(kv);
    const auto producer = *Create(model, kv, codebooks), reader = *Create(model, kv, codebooks);
    ASSERT_TRUE(producer->Forward(SomeTokens(70)));
    const auto context = producer->Publish({});
    ASSERT_TRUE(context) << context.error().message;
    EXPECT_EQ(context->card.model().codebooks_digest(), codebooks->digest());
    ASSERT_TRUE(reader->Attach(*context));
    // Across the end of a page, so that both write pages of their own, and on to a second hop.
    for (Token token = 5; token < 80; ++token) {
      ASSERT_TRUE(producer->Forward({&token, 1}));
      ASSERT_TRUE(reader->Forward({&token, 1}));
      ASSERT_TRUE(std::ranges::equal(producer->logits(), reader->logits())) << token;
    }
    const auto second = reader->Publish({});
    ASSERT_TRUE(second) << second.error().message;
    const auto last = *Create(model, kv, codebooks);
    ASSERT_TRUE(last->Attach(*second));
    ASSERT_TRUE(last->Forward({}));
    ASSERT_TRUE(producer->Publish({}));
    ASSERT_TRUE(producer->Forward({}));
    EXPECT_TRUE(std::ranges::equal(producer->logits(), last->logits()));
  }
}

TEST_F(Codebooks, OnlyContextsThatNeedThemNameThem) {
  const auto model = Load({});
  const auto codebooks = Learn(model);
  const auto producer = *Create(model, "i8", codebooks);
  ASSERT_TRUE(producer->Forward(SomeTokens(70)));
  const auto context = producer->Publish({});
  ASSERT_TRUE(context) << context.error().message;
  EXPECT_EQ(context->card.model().codebooks_digest(), "");
  EXPECT_TRUE((*Create(model, "i8"))->Attach(*context));
  EXPECT_TRUE((*Create(model, "pq4", codebooks))->Attach(*context));

  // Who goes on from pages that need them needs them, whatever its own pages are in.
  const auto quantized = *Create(model, "pq4", codebooks);
  ASSERT_TRUE(quantized->Forward(SomeTokens(70)));
  const auto needing = quantized->Publish({});
  ASSERT_TRUE(needing) << needing.error().message;
  const auto heir = *Create(model, "i8", codebooks);
  ASSERT_TRUE(heir->Attach(*needing));
  ASSERT_TRUE(heir->Forward(SomeTokens(40)));
  EXPECT_EQ(heir->Publish({})->card.model().codebooks_digest(), codebooks->digest());
}

TEST_F(Codebooks, NobodyWithOtherOnesReadsTheirPages) {
  const auto model = Load({});
  const auto codebooks = Learn(model);
  const auto producer = *Create(model, "pq4", codebooks);
  ASSERT_TRUE(producer->Forward(SomeTokens(70)));
  auto context = producer->Publish({});
  ASSERT_TRUE(context) << context.error().message;
  const auto others = Learn(model, 500);
  ASSERT_NE(others->digest(), codebooks->digest());
  for (const auto& reader : {*Create(model, "i8"), *Create(model, "pq4", others)}) {
    const Status attached = reader->Attach(*context);
    ASSERT_FALSE(attached);
    EXPECT_EQ(attached.error().reason, Reason::kModelMismatch);
    EXPECT_THAT(attached.error().message, HasSubstr("codebooks_digest"));
  }
  // A card that forgets to name them, which anybody could make.
  context->card.mutable_model()->clear_codebooks_digest();
  for (const auto& reader : {*Create(model, "i8"), *Create(model, "pq4", codebooks)}) {
    const Status attached = reader->Attach(*context);
    ASSERT_FALSE(attached);
    EXPECT_EQ(attached.error().code, Code::kCorrupt);
    EXPECT_THAT(attached.error().message, HasSubstr("need codebooks"));
  }
}

// Of either group; the other's pages need none.
TEST_F(Codebooks, GroupsOfAPromptMayNeedThem) {
  const auto model = Load({.q_scale = 16});
  const auto codebooks = Learn(model);
  for (const char* kv : {"tokens:40/8/pq2", "tokens:40/pq4/i8", "tokens:40/pq4/drop"}) {
    SCOPED_TRACE(kv);
    const auto without = Create(model, kv);
    ASSERT_FALSE(without);
    EXPECT_THAT(without.error().message, HasSubstr("calibrate --codebooks"));
    const auto producer = *Create(model, kv, codebooks), reader = *Create(model, "i8", codebooks);
    const auto twin = *Create(model, kv, codebooks);
    ASSERT_TRUE(producer->Forward(SomeTokens(140)));
    ASSERT_FALSE(producer->groups().empty());
    const auto context = producer->Publish({});
    ASSERT_TRUE(context) << context.error().message;
    EXPECT_EQ(context->card.model().codebooks_digest(), codebooks->digest());
    ASSERT_TRUE(twin->Attach(*context));
    ASSERT_TRUE(reader->Attach(*context));
    for (Sequence* sequence : {producer.get(), twin.get(), reader.get()}) ASSERT_TRUE(sequence->Forward({}));
    EXPECT_TRUE(std::ranges::equal(reader->logits(), producer->logits()));
    for (Sequence* sequence : {producer.get(), twin.get()}) ASSERT_TRUE(sequence->Forward(SomeTokens(50)));
    EXPECT_TRUE(std::ranges::equal(twin->logits(), producer->logits()));
  }
}

TEST_F(Codebooks, TheirPagesCanBeSpliced) {
  const auto model = Load({});
  const auto codebooks = Learn(model);
  const auto producer = *Create(model, "pq4", codebooks), reader = *Create(model, "pq4", codebooks);
  ASSERT_TRUE(producer->Forward(SomeTokens(70)));
  const auto context = producer->Publish({});
  ASSERT_TRUE(context) << context.error().message;
  ASSERT_TRUE(reader->Forward(SomeTokens(10)));
  const SpliceSource source{.context = &*context};
  const auto spliced = reader->Splice({&source, 1}, {});
  ASSERT_TRUE(spliced) << spliced.error().message;
  const std::vector<Token> more = {5, 6, 7};
  ASSERT_TRUE(reader->Forward(more));
  const auto whole = reader->Publish({});
  ASSERT_TRUE(whole) << whole.error().message;
  const auto second = *Create(model, "pq4", codebooks);
  ASSERT_TRUE(second->Attach(*whole));
  ASSERT_TRUE(second->Forward({}));
  ASSERT_TRUE(reader->Forward({}));
  EXPECT_TRUE(std::ranges::equal(reader->logits(), second->logits()));
}

}  // namespace
}  // namespace qkv
