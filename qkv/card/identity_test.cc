// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Whether a context fits a model: field by field, with names and reasons.

#include <gmock/gmock.h>
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "qkv/card/card.h"
#include "qkv/card/test_support.h"

namespace qkv {
namespace {

using ::qkvshare::v1::LayerDims;
using ::qkvshare::v1::MaskState;
using ::qkvshare::v1::Rope;
using test::ExampleCard;
using ::testing::HasSubstr;

struct IdentityChange {
  const char* field;
  std::function<void(ModelIdentity&)> apply;
  Reason reason = Reason::kModelMismatch;
};

const std::vector<IdentityChange>& IdentityChanges() {
  static const auto* const changes = new std::vector<IdentityChange>{
      {"architecture", [](ModelIdentity& m) { m.set_architecture("qwen2"); }},
      {"n_vocab", [](ModelIdentity& m) { m.set_n_vocab(50000); }},
      {"n_embd", [](ModelIdentity& m) { m.set_n_embd(577); }},
      {"layers", [](ModelIdentity& m) { *m.add_layers() = m.layers(0); }},
      {"layers[0].n_heads", [](ModelIdentity& m) { m.mutable_layers(0)->set_n_heads(10); }},
      {"layers[1].n_kv_heads", [](ModelIdentity& m) { m.mutable_layers(1)->set_n_kv_heads(9); }},
      {"layers[0].k_head_dim", [](ModelIdentity& m) { m.mutable_layers(0)->set_k_head_dim(128); }},
      {"layers[0].v_head_dim", [](ModelIdentity& m) { m.mutable_layers(0)->set_v_head_dim(128); }},
      {"layers[1].kind", [](ModelIdentity& m) { m.mutable_layers(1)->set_kind(LayerDims::FULL); }},
      {"layers[1].window", [](ModelIdentity& m) { m.mutable_layers(1)->set_window(512); }},
      {"rope.base", [](ModelIdentity& m) { m.mutable_rope()->set_base(10000.001f); }},
      {"rope.scaling", [](ModelIdentity& m) { m.mutable_rope()->set_scaling("linear"); }},
      {"rope.scaling_factor", [](ModelIdentity& m) { m.mutable_rope()->set_scaling_factor(4.0000005f); }},
      {"rope.layout", [](ModelIdentity& m) { m.mutable_rope()->set_layout(Rope::HALF_SPLIT); }},
      {"rope.rotary_dims", [](ModelIdentity& m) { m.mutable_rope()->set_rotary_dims(32); }},
      {"rope.factors_digest", [](ModelIdentity& m) { m.mutable_rope()->clear_factors_digest(); }},
      {"rope.original_context", [](ModelIdentity& m) { m.mutable_rope()->set_original_context(0); }},
      {"weights_digest", [](ModelIdentity& m) { m.set_weights_digest(std::string(32, '9')); }},
      {"tokenizer_digest", [](ModelIdentity& m) { m.set_tokenizer_digest(std::string(32, '9')); },
       Reason::kTokenizerMismatch},
      {"chat_template_digest", [](ModelIdentity& m) { m.clear_chat_template_digest(); }, Reason::kTokenizerMismatch},
      {"adapters", [](ModelIdentity& m) { m.clear_adapters(); }},
      {"adapters[0].digest", [](ModelIdentity& m) { m.mutable_adapters(0)->set_digest(std::string(32, '9')); }},
      {"adapters[0].scale", [](ModelIdentity& m) { m.mutable_adapters(0)->set_scale(0.25f); }},
      {"norm_eps", [](ModelIdentity& m) { m.set_norm_eps(1e-6f); }},
      {"calibration_digest", [](ModelIdentity& m) { m.set_calibration_digest(std::string(32, 'c')); }},
      {"codebooks_digest", [](ModelIdentity& m) { m.set_codebooks_digest(std::string(32, 'c')); }},
  };
  return *changes;
}

TEST(Identity, AReaderMayHaveCodebooksThatTheContextDoesNotNeed) {
  CacheCard card = ExampleCard();
  ModelIdentity reader = card.model();
  reader.set_codebooks_digest(std::string(32, 'a'));
  EXPECT_TRUE(CompareIdentity(card.model(), reader).empty());
  EXPECT_TRUE(CheckCompatible(card, reader));
  const auto mismatches = CompareIdentity(reader, card.model());
  ASSERT_EQ(mismatches.size(), 1u);
  EXPECT_EQ(mismatches[0].field, "codebooks_digest");
}

TEST(Identity, EveryFieldChangedAloneIsReportedByNameAndReason) {
  CacheCard card = ExampleCard();
  card.mutable_model()->set_codebooks_digest(std::string(32, 'a'));
  EXPECT_TRUE(CompareIdentity(card.model(), card.model()).empty());
  EXPECT_TRUE(CheckCompatible(card, card.model()));
  for (const IdentityChange& change : IdentityChanges()) {
    ModelIdentity model = card.model();
    change.apply(model);
    for (const bool changed_in_card : {false, true}) {
      CacheCard other = card;
      if (changed_in_card) *other.mutable_model() = model;
      const ModelIdentity& consumer = changed_in_card ? card.model() : model;
      const auto mismatches = CompareIdentity(other.model(), consumer);
      ASSERT_EQ(mismatches.size(), 1u) << change.field;
      EXPECT_EQ(mismatches[0].field, change.field);
      EXPECT_NE(mismatches[0].found, mismatches[0].expected);
      const Status status = CheckCompatible(other, consumer);
      ASSERT_FALSE(status) << change.field;
      EXPECT_EQ(status.error().code, Code::kIncompatible);
      EXPECT_EQ(status.error().reason, change.reason) << change.field;
      EXPECT_THAT(status.error().message, HasSubstr(change.field));
    }
  }
}

TEST(Identity, TheListAboveHasEveryFieldOfTheMessage) {
  std::set<std::string> expected;
  const std::function<void(const google::protobuf::Descriptor&, const std::string&)> walk = [&](const auto& type,
                                                                                                const auto& prefix) {
    for (int i = 0; i < type.field_count(); ++i) {
      const auto* field = type.field(i);
      const std::string path = prefix + std::string(field->name());
      if (field->is_repeated() || field->message_type() == nullptr) expected.insert(path);
      if (field->message_type() != nullptr) walk(*field->message_type(), path + ".");
    }
  };
  walk(*ModelIdentity::descriptor(), "");
  expected.erase("name");
  std::set<std::string> listed;
  for (const IdentityChange& change : IdentityChanges()) {
    std::string field = change.field;
    if (const size_t at = field.find('['); at != std::string::npos) field.erase(at, field.find(']') - at + 1);
    listed.insert(field);
  }
  EXPECT_EQ(listed, expected);
}

TEST(Identity, TheNameForPeopleIsNotCompared) {
  ModelIdentity model = ExampleCard().model();
  model.set_name("my favourite");
  EXPECT_TRUE(CompareIdentity(ExampleCard().model(), model).empty());
}

TEST(Identity, NamesFoundAndExpected) {
  ModelIdentity model = ExampleCard().model();
  model.mutable_rope()->set_base(500000);
  model.set_architecture("qwen2");
  const auto mismatches = CompareIdentity(ExampleCard().model(), model);
  ASSERT_EQ(mismatches.size(), 2u);
  EXPECT_EQ(mismatches[0].found, "\"llama\"");
  EXPECT_EQ(mismatches[0].expected, "\"qwen2\"");
  EXPECT_EQ(mismatches[1].found, "10000");
  EXPECT_EQ(mismatches[1].expected, "500000");
  EXPECT_THAT(CheckCompatible(ExampleCard(), model).error().message,
              HasSubstr("architecture \"llama\", expected \"qwen2\"; rope.base 10000, expected 500000"));
}

TEST(Identity, ATokenizerMismatchBesideAnotherIsAModelMismatch) {
  ModelIdentity model = ExampleCard().model();
  model.set_tokenizer_digest(std::string(32, '9'));
  model.set_chat_template_digest(std::string(32, '9'));
  EXPECT_EQ(CheckCompatible(ExampleCard(), model).error().reason, Reason::kTokenizerMismatch);
  model.set_n_vocab(7);
  EXPECT_EQ(CheckCompatible(ExampleCard(), model).error().reason, Reason::kModelMismatch);
}

TEST(Identity, AFieldThatThisVersionDoesNotKnowIsAMismatch) {
  ModelIdentity card = ExampleCard().model();
  auto* rope = card.mutable_rope();
  rope->GetReflection()->MutableUnknownFields(rope)->AddVarint(99, 1);
  const auto mismatches = CompareIdentity(card, ExampleCard().model());
  ASSERT_EQ(mismatches.size(), 1u);
  EXPECT_EQ(mismatches[0].field, "rope.field 99");
}

TEST(Identity, ALongListEndsInTheNumberOfTheRest) {
  ModelIdentity model;
  ModelIdentity card;
  for (uint32_t i = 0; i < 40; ++i) {
    model.add_layers()->set_n_heads(i + 1);
    card.add_layers()->set_n_heads(i + 2);
  }
  const auto mismatches = CompareIdentity(card, model);
  ASSERT_EQ(mismatches.size(), 16u);
  EXPECT_EQ(mismatches[14].field, "layers[14].n_heads");
  EXPECT_EQ(mismatches[15].field, "and 25 more fields");
  // What is left out of the list still counts: 16 layers differ before the tokenizer does.
  model.set_tokenizer_digest("x");
  CacheCard whole = ExampleCard();
  *whole.mutable_model() = card;
  EXPECT_EQ(CheckCompatible(whole, model).error().reason, Reason::kModelMismatch);
}

TEST(Compatible, AFormatThatThisVersionCannotReadIsRefusedWithItsReason) {
  struct Row {
    const char* message;
    Reason reason;
    std::function<void(CacheCard&)> apply;
  };
  const auto add_unknown = [](google::protobuf::Message* message) {
    message->GetReflection()->MutableUnknownFields(message)->AddVarint(99, 1);
  };
  const Row rows[] = {
      {"segment version 1, expected 2", Reason::kVersion,
       [](CacheCard& c) { c.mutable_format()->set_segment_version(1); }},
      {"pages of 64 tokens", Reason::kVersion, [](CacheCard& c) { c.mutable_format()->set_page_tokens(64); }},
      {"byte order 'big', expected 'little'", Reason::kEndianness,
       [](CacheCard& c) { c.mutable_format()->set_byte_order("big"); }},
      {"rotation 'givens'", Reason::kCodecUnsupported,
       [](CacheCard& c) { c.mutable_format()->set_rotation("givens"); }},
      {"codecs 'q9'", Reason::kCodecUnsupported, [](CacheCard& c) { c.mutable_format()->set_kv("q9"); }},
      {"mask of kind 9", Reason::kVersion,
       [](CacheCard& c) { c.mutable_mask()->set_kind(static_cast<MaskState::Kind>(9)); }},
      {"1 absent tokens", Reason::kVersion, [](CacheCard& c) { c.mutable_mask()->add_absent_tokens(1); }},
      {"does not know", Reason::kVersion, [&](CacheCard& c) { add_unknown(c.mutable_format()); }},
      {"does not know", Reason::kVersion, [&](CacheCard& c) { add_unknown(c.mutable_mask()); }},
      {"does not know", Reason::kVersion, [&](CacheCard& c) { add_unknown(c.mutable_mask()->mutable_groups()); }},
      {"does not know", Reason::kVersion, [&](CacheCard& c) { add_unknown(c.mutable_spans(1)); }},
      {"does not know", Reason::kVersion, [&](CacheCard& c) { add_unknown(c.mutable_segments(0)); }},
      {"byte order ''", Reason::kEndianness, [](CacheCard& c) { c.clear_format(); }},
  };
  for (const Row& row : rows) {
    CacheCard card = ExampleCard();
    row.apply(card);
    const Status status = CheckCompatible(card, card.model());
    ASSERT_FALSE(status) << row.message;
    EXPECT_EQ(status.error().code, Code::kIncompatible);
    EXPECT_EQ(status.error().reason, row.reason) << row.message;
    EXPECT_THAT(status.error().message, HasSubstr(row.message));
    EXPECT_FALSE(CompareCard(card, card.model()).empty()) << row.message;
  }
  CacheCard sliding = ExampleCard();
  sliding.mutable_mask()->set_kind(MaskState::CAUSAL_SLIDING);
  EXPECT_TRUE(CheckCompatible(sliding, sliding.model()));
}

TEST(Compatible, TheListHoldsEveryFieldOfFormatAndModelThatDiffers) {
  CacheCard card = ExampleCard();
  const ModelIdentity model = card.model();
  EXPECT_TRUE(CompareCard(card, model).empty());
  card.mutable_format()->set_kv("q9");
  card.mutable_format()->set_byte_order("big");
  card.mutable_model()->mutable_rope()->set_base(77);
  const auto mismatches = CompareCard(card, model);
  ASSERT_EQ(mismatches.size(), 3u);
  EXPECT_EQ(mismatches[0].field, "format.byte_order");
  EXPECT_EQ(mismatches[0].found, "\"big\"");
  EXPECT_EQ(mismatches[0].expected, "\"little\"");
  EXPECT_EQ(mismatches[1].field, "format.kv");
  EXPECT_EQ(mismatches[2].field, "rope.base");
  EXPECT_EQ(CheckCompatible(card, model).error().reason, Reason::kEndianness);
}

}  // namespace
}  // namespace qkv
