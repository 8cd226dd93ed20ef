// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/card/card.h"

#include <gmock/gmock.h>
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <set>

#include "qkv/card/test_support.h"
#include "qkv/segment/test_support.h"

namespace qkv {
namespace {

using ::qkvshare::v1::LayerDims;
using ::qkvshare::v1::MaskState;
using ::qkvshare::v1::Rope;
using test::Bytes;
using test::ExampleCard;
using test::Take;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr size_t kEnvelopeBytes = 24;

// The envelope by hand, around any message.
Bytes Envelope(const std::string& payload, uint32_t version = 1) {
  Bytes bytes(kEnvelopeBytes + payload.size());
  const auto length = static_cast<uint32_t>(payload.size());
  const uint64_t checksum = XXH3_64bits(payload.data(), payload.size());
  std::memcpy(&bytes[0], "QKVCARD1", 8);
  std::memcpy(&bytes[8], &version, 4);
  std::memcpy(&bytes[12], &length, 4);
  std::memcpy(&bytes[16], &checksum, 8);
  std::memcpy(bytes.data() + kEnvelopeBytes, payload.data(), payload.size());
  return bytes;
}

TEST(Card, SurvivesARoundTripFieldByField) {
  const CacheCard card = ExampleCard();
  const CacheCard parsed = Take(ParseCard(SerializeCard(card)));
  EXPECT_EQ(parsed.DebugString(), card.DebugString());
  EXPECT_EQ(parsed.token_ids_size(), 70);
}

TEST(Card, StartsWithTheEnvelopeOfFormatMd) {
  const CacheCard card = ExampleCard();
  EXPECT_EQ(SerializeCard(card), Envelope(card.SerializeAsString()));
}

TEST(Card, KeepsFieldsOfNewerVersions) {
  CacheCard card = ExampleCard();
  card.GetReflection()->MutableUnknownFields(&card)->AddVarint(900, 77);
  auto* producer = card.mutable_producer();
  producer->GetReflection()->MutableUnknownFields(producer)->AddLengthDelimited(901, "new");
  const Bytes bytes = SerializeCard(card);
  const CacheCard parsed = Take(ParseCard(bytes));
  ASSERT_EQ(parsed.GetReflection()->GetUnknownFields(parsed).field_count(), 1);
  EXPECT_EQ(parsed.GetReflection()->GetUnknownFields(parsed).field(0).varint(), 77u);
  EXPECT_EQ(SerializeCard(parsed), bytes);
  EXPECT_TRUE(CheckCompatible(parsed, ExampleCard().model()));
}

TEST(Card, EveryBitFlipIsAnError) {
  const Bytes valid = SerializeCard(ExampleCard());
  for (size_t bit = 0; bit < valid.size() * 8; ++bit) {
    Bytes bytes = valid;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    const auto parsed = ParseCard(bytes);
    ASSERT_FALSE(parsed) << "bit " << bit % 8 << " of byte " << bit / 8;
    EXPECT_NE(parsed.error().reason, Reason::kNone);
  }
}

TEST(Card, EveryTruncationAndAnyBytesBehindAreErrors) {
  Bytes bytes = SerializeCard(ExampleCard());
  for (size_t length = 0; length < bytes.size(); ++length) {
    ASSERT_FALSE(ParseCard({bytes.data(), length})) << length;
  }
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(ParseCard(bytes));
}

// What a reader may do with whatever ParseCard lets through.
void ExpectConsistent(const CacheCard& card) {
  (void)CheckCompatible(card, ExampleCard().model());
  EXPECT_FALSE(CardToJson(card, true).empty());
  uint64_t in_spans = 0;
  for (const auto& span : card.spans()) {
    ASSERT_LT(span.segment(), static_cast<uint32_t>(card.segments_size()));
    ASSERT_LE(uint64_t{span.first_page()} + span.n_pages(), card.segments(static_cast<int>(span.segment())).n_pages());
    in_spans += span.n_tokens();
  }
  ASSERT_EQ(in_spans + static_cast<uint64_t>(card.mask().absent_tokens_size()),
            static_cast<uint64_t>(card.token_ids_size()));
  for (const uint32_t token : card.token_ids()) ASSERT_LT(token, card.model().n_vocab());
}

TEST(Card, MutationsUnderAForgedChecksumAreRefusedOrConsistent) {
  const std::string valid = ExampleCard().SerializeAsString();
  size_t accepted = 0;
  const auto feed = [&](const std::string& payload) {
    if (const auto parsed = ParseCard(Envelope(payload))) {
      ++accepted;
      ExpectConsistent(*parsed);
    }
  };
  for (size_t bit = 0; bit < valid.size() * 8; ++bit) {
    std::string payload = valid;
    payload[bit / 8] = static_cast<char>(payload[bit / 8] ^ (1 << (bit % 8)));
    feed(payload);
  }
  for (size_t length = 0; length < valid.size(); ++length) feed(valid.substr(0, length));
  EXPECT_GT(accepted, 0u);  // a letter of a name may change
}

TEST(Card, OtherVersionsAndByteOrdersAreNamed) {
  const std::string payload = ExampleCard().SerializeAsString();
  const auto newer = ParseCard(Envelope(payload, 2));
  ASSERT_FALSE(newer);
  EXPECT_EQ(newer.error().code, Code::kIncompatible);
  EXPECT_EQ(newer.error().reason, Reason::kVersion);
  EXPECT_THAT(newer.error().message, HasSubstr("version 2, expected 1"));
  const auto swapped = ParseCard(Envelope(payload, 0x01000000));
  ASSERT_FALSE(swapped);
  EXPECT_EQ(swapped.error().code, Code::kIncompatible);
  EXPECT_EQ(swapped.error().reason, Reason::kEndianness);
}

struct Lie {
  const char* message;
  std::function<void(CacheCard&)> apply;
};

TEST(Card, IsRefusedWhenItContradictsItselfOrALimit) {
  const std::string digest(32, 'a');
  const Lie lies[] = {
      {"id", [](CacheCard& c) { c.set_id(""); }},
      {"id", [](CacheCard& c) { c.set_id("000102030405060708090A0B0C0D0E0F"); }},
      {"id", [](CacheCard& c) { c.set_id("../../etc/passwd"); }},
      {"id of a parent", [](CacheCard& c) { c.add_parents("x"); }},
      {"65 parents, limit 64",
       [&](CacheCard& c) {
         for (int i = 0; i < 64; ++i) c.add_parents(digest);
       }},
      {"name has byte 0x2f", [](CacheCard& c) { c.set_name("a/b"); }},
      {"name has byte 0x00", [](CacheCard& c) { c.set_name(std::string("a\0b", 3)); }},
      {"name has byte 0xc3", [](CacheCard& c) { c.set_name("caf\xc3\xa9"); }},
      {"name of 300 bytes", [](CacheCard& c) { c.set_name(std::string(300, 'a')); }},
      {"name starts with a dot", [](CacheCard& c) { c.set_name(".."); }},
      {"tenant", [](CacheCard& c) { c.set_tenant("a b"); }},
      {"before 1970", [](CacheCard& c) { c.set_created_unix_ms(-1); }},
      {"before 1970", [](CacheCard& c) { c.set_expires_unix_ms(std::numeric_limits<int64_t>::min()); }},
      {"producer.program has 4097 bytes",
       [](CacheCard& c) { c.mutable_producer()->set_program(std::string(4097, 'x')); }},
      {"producer.agent has control", [](CacheCard& c) { c.mutable_producer()->set_agent("a\nb"); }},
      {"sampler has control", [](CacheCard& c) { c.mutable_turn()->set_sampler("\x1b[2J"); }},
      {"model.architecture", [](CacheCard& c) { c.mutable_model()->set_architecture("llama\n"); }},
      {"model.architecture", [](CacheCard& c) { c.mutable_model()->set_architecture(std::string(65, 'x')); }},
      {"model has no layers", [](CacheCard& c) { c.clear_model(); }},
      {"513 layers, limit 512",
       [](CacheCard& c) {
         while (c.model().layers_size() < 513) c.mutable_model()->add_layers();
       }},
      {"65 adapters",
       [](CacheCard& c) {
         while (c.model().adapters_size() < 65) c.mutable_model()->add_adapters();
       }},
      {"n_vocab is", [](CacheCard& c) { c.mutable_model()->set_n_vocab(0xffffffff); }},
      {"n_embd is", [](CacheCard& c) { c.mutable_model()->set_n_embd(1 << 21); }},
      {"n_heads of a layer", [](CacheCard& c) { c.mutable_model()->mutable_layers(1)->set_n_heads(~0u); }},
      {"a window of 0", [](CacheCard& c) { c.mutable_model()->mutable_layers(1)->set_window(0); }},
      {"a window of 5", [](CacheCard& c) { c.mutable_model()->mutable_layers(0)->set_window(5); }},
      {"rope.base", [](CacheCard& c) { c.mutable_model()->mutable_rope()->set_base(std::nanf("")); }},
      {"rope.scaling_factor", [](CacheCard& c) { c.mutable_model()->mutable_rope()->set_scaling_factor(INFINITY); }},
      {"scale of an adapter", [](CacheCard& c) { c.mutable_model()->mutable_adapters(0)->set_scale(INFINITY); }},
      {"weights_digest", [](CacheCard& c) { c.mutable_model()->clear_weights_digest(); }},
      {"tokenizer_digest", [](CacheCard& c) { c.mutable_model()->set_tokenizer_digest("short"); }},
      {"chat_template_digest", [](CacheCard& c) { c.mutable_model()->set_chat_template_digest("short"); }},
      {"format.rotation", [](CacheCard& c) { c.mutable_format()->set_rotation("none none"); }},
      {"format.kv", [](CacheCard& c) { c.mutable_format()->set_kv(std::string(65, 'i')); }},
      {"4097 segments",
       [&](CacheCard& c) {
         while (c.segments_size() < 4097) *c.add_segments() = c.segments(0);
       }},
      {"digest of segment 1", [](CacheCard& c) { c.mutable_segments(1)->set_digest("zz"); }},
      {"segment 0 has 0 pages", [](CacheCard& c) { c.mutable_segments(0)->set_n_pages(0); }},
      {"segment 0 has 1048577 pages", [](CacheCard& c) { c.mutable_segments(0)->set_n_pages((1 << 20) + 1); }},
      {"pages in 12288 bytes",
       [](CacheCard& c) { c.mutable_segments(0)->set_bytes(3 * 4096); }},  // no room for a header
      {"segment 0 has 3 pages in", [](CacheCard& c) { c.mutable_segments(0)->set_bytes(~uint64_t{0}); }},
      {"65537 spans",
       [](CacheCard& c) {
         while (c.spans_size() < 65537) c.add_spans();
       }},
      {"in segment 2 of 2", [](CacheCard& c) { c.mutable_spans(1)->set_segment(2); }},
      {"in segment 4294967295", [](CacheCard& c) { c.mutable_spans(1)->set_segment(~0u); }},
      {"span 0 has 0 pages", [](CacheCard& c) { c.mutable_spans(0)->set_n_pages(0); }},
      {"span 0 has 4 pages", [](CacheCard& c) { c.mutable_spans(0)->set_n_pages(4); }},
      {"from page 4294967295", [](CacheCard& c) { c.mutable_spans(0)->set_first_page(~0u); }},  // + 2 would wrap around
      {"span 0 has 4294967295 pages", [](CacheCard& c) { c.mutable_spans(0)->set_n_pages(~0u); }},
      {"pages from page 2 on",
       [](CacheCard& c) {
         c.mutable_spans(0)->set_first_page(2);
         c.mutable_spans(0)->set_n_pages(~0u);
       }},
      {"span 0 has 1 tokens in 2", [](CacheCard& c) { c.mutable_spans(0)->set_n_tokens(1); }},
      {"span 1 has 33 tokens in 1", [](CacheCard& c) { c.mutable_spans(1)->set_n_tokens(33); }},
      {"from position 59 on", [](CacheCard& c) { c.mutable_spans(1)->set_first_position(59); }},
      {"from position 61 on", [](CacheCard& c) { c.mutable_spans(1)->set_first_position(61); }},
      {"from position 4294967295", [](CacheCard& c) { c.mutable_spans(1)->set_first_position(~0u); }},
      {"refinement of span 1 is in segment 2 of 2",
       [](CacheCard& c) { c.mutable_spans(1)->set_refinement_segment(3); }},
      {"in segment 4294967294 of 2", [](CacheCard& c) { c.mutable_spans(1)->set_refinement_segment(~0u); }},
      {"refinement of span 0 is 2 pages from page 1 on",
       [](CacheCard& c) {
         c.mutable_segments(1)->set_n_pages(2);
         c.mutable_spans(0)->set_refinement_segment(2);
         c.mutable_spans(0)->set_refinement_first_page(1);
       }},
      {"from page 4294967295 on, its segment has",  // + 2 would wrap around
       [](CacheCard& c) {
         c.mutable_spans(0)->set_refinement_segment(2);
         c.mutable_spans(0)->set_refinement_first_page(~0u);
       }},
      {"span 0 has refinement pages of no segment",
       [](CacheCard& c) { c.mutable_spans(0)->set_refinement_first_page(1); }},
      {"offset 61", [](CacheCard& c) { c.mutable_spans(1)->set_position_offset(61); }},
      {"no token is seen that was encoded at the start",
       [](CacheCard& c) { c.mutable_spans(0)->set_position_offset(-1); }},
      {"hides its first token", [](CacheCard& c) { c.mutable_spans(0)->set_hide_first(true); }},
      {"hides its first token, encoded at 160", [](CacheCard& c) { c.mutable_spans(1)->set_hide_first(true); }},
      {"hides its first token",
       [](CacheCard& c) {
         for (auto& span : *c.mutable_spans()) {
           span.set_position_offset(span.first_position());
           span.set_hide_first(true);
         }
       }},
      {"71 tokens of a system message", [](CacheCard& c) { c.mutable_turn()->set_prefix_tokens(71); }},
      {"offset -9223372036854775808",
       [](CacheCard& c) { c.mutable_spans(1)->set_position_offset(std::numeric_limits<int64_t>::min()); }},
      {"71 token ids, expected 70", [](CacheCard& c) { c.add_token_ids(1); }},
      {"expected 60 to 69", [](CacheCard& c) { c.mutable_token_ids()->RemoveLast(); }},
      {"70 token ids, expected 60", [](CacheCard& c) { c.mutable_spans()->RemoveLast(); }},
      {"70 token ids, expected 71", [](CacheCard& c) { c.mutable_mask()->add_absent_tokens(3); }},
      {"token id 49152 of a vocabulary of 49152", [](CacheCard& c) { c.set_token_ids(69, 49152); }},
      {"absent token 70",
       [](CacheCard& c) {
         c.mutable_spans(1)->set_n_tokens(9);
         c.mutable_mask()->add_absent_tokens(70);
       }},
      {"absent token 5, expected 6",
       [](CacheCard& c) {
         c.mutable_spans(1)->set_n_tokens(8);
         for (int i = 0; i < 2; ++i) c.mutable_mask()->add_absent_tokens(5);
       }},
      {"top token 70 of 70", [](CacheCard& c) { c.mutable_importance()->add_top_tokens(70); }},
      {"65537 top tokens", [](CacheCard& c) { c.mutable_importance()->mutable_top_tokens()->Resize(65537, 0); }},
      {"absent tokens, limit",
       [](CacheCard& c) { c.mutable_mask()->mutable_absent_tokens()->Resize((1 << 20) + 1, 0); }},
      {"token ids, limit 16777216", [](CacheCard& c) { c.mutable_token_ids()->Resize((16 << 20) + 1, 0); }},
  };
  for (const Lie& lie : lies) {
    CacheCard card = ExampleCard();
    lie.apply(card);
    const auto parsed = ParseCard(SerializeCard(card));
    ASSERT_FALSE(parsed) << lie.message;
    EXPECT_EQ(parsed.error().code, Code::kCorrupt) << lie.message;
    EXPECT_EQ(parsed.error().reason, Reason::kChecksum) << lie.message;
    EXPECT_THAT(parsed.error().message, HasSubstr(lie.message));
    EXPECT_EQ(parsed.error().message.find('\n'), std::string::npos) << lie.message;
  }
}

TEST(Card, MayOmitWhatIsOptional) {
  CacheCard card = ExampleCard();
  card.clear_name();
  card.clear_tenant();
  card.clear_parents();
  card.clear_producer();
  card.clear_importance();
  card.clear_turn();
  card.mutable_model()->clear_chat_template_digest();
  card.mutable_model()->mutable_rope()->clear_factors_digest();
  card.mutable_model()->clear_adapters();
  EXPECT_TRUE(ParseCard(SerializeCard(card)));
  CacheCard hidden = ExampleCard();  // a moved span from position 0
  hidden.mutable_spans(1)->set_position_offset(60);
  hidden.mutable_spans(1)->set_hide_first(true);
  hidden.mutable_turn()->set_prefix_tokens(70);
  const auto parsed_hidden = ParseCard(SerializeCard(hidden));
  ASSERT_TRUE(parsed_hidden) << parsed_hidden.error().message;
  EXPECT_TRUE(parsed_hidden->spans(1).hide_first());
  CacheCard gaps = ExampleCard();  // with absent tokens, spans need not touch
  gaps.mutable_spans(1)->set_first_position(62);
  gaps.mutable_spans(1)->set_n_tokens(8);
  gaps.mutable_mask()->add_absent_tokens(60);
  gaps.mutable_mask()->add_absent_tokens(61);
  EXPECT_TRUE(ParseCard(SerializeCard(gaps)));
}

// Of 70 tokens the first 60 are grouped, 20 in the first group; the groups and the others in a span each.
CacheCard GroupedCard(bool dropped) {
  CacheCard card = ExampleCard();
  auto& groups = *card.mutable_mask()->mutable_groups();
  groups.set_n_tokens(60);
  groups.set_dropped(dropped);
  groups.mutable_high()->assign(8, '\0');
  for (int t = 0; t < 60; t += 3) (*groups.mutable_high())[t / 8] |= static_cast<char>(1 << t % 8);
  card.clear_spans();
  int first = 0;
  for (const int n : {20, 40, 10}) {
    if (!(dropped && n == 40)) {
      auto& span = *card.add_spans();
      span.set_n_pages(static_cast<uint32_t>(n + 31) / 32);
      span.set_n_tokens(n);
      span.set_first_position(first);
    }
    first += n;
  }
  return card;
}

TEST(Card, TokensMayBeGroupedAndOneGroupDropped) {
  for (const bool dropped : {false, true}) {
    const CacheCard card = GroupedCard(dropped);
    const auto parsed = ParseCard(SerializeCard(card));
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed->mask().groups().high(), card.mask().groups().high());
    EXPECT_TRUE(CheckCompatible(*parsed, card.model()));
  }
}

TEST(Card, GroupsThatAreNotConsistentAreRefused) {
  struct Lie {
    const char* message;
    std::function<void(CacheCard&, ::qkvshare::v1::TokenGroups&)> apply;
    bool dropped = false;
  };
  const auto set = [](::qkvshare::v1::TokenGroups& groups, size_t byte, int value) {
    (*groups.mutable_high())[byte] = static_cast<char>(value);
  };
  const Lie lies[] = {
      {"0 of 70 tokens are grouped", [](auto&, auto& g) { g.set_n_tokens(0); }},
      {"1 of 70 tokens are grouped", [](auto&, auto& g) { g.set_n_tokens(1); }},
      {"70 of 70 tokens are grouped", [](auto&, auto& g) { g.set_n_tokens(70); }},
      {"4294967295 of 70 tokens", [](auto&, auto& g) { g.set_n_tokens(~0u); }},
      {"8 bytes for 65 grouped", [](auto&, auto& g) { g.set_n_tokens(65); }},
      {"8 bytes for 56 grouped", [](auto&, auto& g) { g.set_n_tokens(56); }},
      {"0 bytes for 60 grouped", [](auto&, auto& g) { g.clear_high(); }},
      {"bits beyond 60", [&](auto&, auto& g) { set(g, 7, 0x12); }},
      {"expected the first token", [&](auto&, auto& g) { set(g, 0, 0x48); }},
      {"60 of 60 grouped tokens are in the first group",
       [&](auto&, auto& g) {
         for (size_t i = 0; i < 8; ++i) set(g, i, i < 7 ? 0xff : 0x0f);
       }},
      // One more, one fewer.
      {"span 1 has grouped tokens 20 to 60, of 21 and 39", [&](auto&, auto& g) { set(g, 0, 0x4b); }},
      {"span 0 has grouped tokens 0 to 20, of 19 and 41", [&](auto&, auto& g) { set(g, 0, 0x09); }},
      {"the second one dropped", [](auto&, auto& g) { g.set_dropped(true); }},
      {"expected 30: 30 in spans and 0 absent", [](auto&, auto& g) { g.set_dropped(false); }, true},
      {"span 0 has grouped tokens 0 to 21",
       [](auto& c, auto&) {
         c.mutable_spans(0)->set_n_tokens(21);
         c.mutable_spans(1)->set_first_position(21);
         c.mutable_spans(1)->set_n_tokens(39);
       }},
      {"span 1 has grouped tokens 20 to 61",
       [](auto& c, auto&) {
         c.mutable_spans(1)->set_n_tokens(41);
         c.mutable_spans(2)->set_first_position(61);
         c.mutable_spans(2)->set_n_tokens(9);
       }},
      {"expected 69", [](auto& c, auto&) { c.mutable_spans(1)->set_n_tokens(39); }},
      {"span 1 of grouped tokens is moved", [](auto& c, auto&) { c.mutable_spans(1)->set_position_offset(20); }},
      {"span 1 of grouped tokens is moved",
       [](auto& c, auto&) {
         c.mutable_spans(1)->set_position_offset(20);
         c.mutable_spans(1)->set_hide_first(true);
       }},
      {"or has a refinement", [](auto& c, auto&) { c.mutable_spans(1)->set_refinement_segment(2); }},
      {"mask of kind 1", [](auto& c, auto&) { c.mutable_mask()->set_kind(MaskState::CAUSAL_SLIDING); }},
      {"with 1 absent tokens", [](auto& c, auto&) { c.mutable_mask()->add_absent_tokens(25); }, true},
  };
  for (const Lie& lie : lies) {
    CacheCard card = GroupedCard(lie.dropped);
    lie.apply(card, *card.mutable_mask()->mutable_groups());
    const auto parsed = ParseCard(SerializeCard(card));
    ASSERT_FALSE(parsed) << lie.message;
    EXPECT_EQ(parsed.error().code, Code::kCorrupt) << lie.message;
    EXPECT_EQ(parsed.error().reason, Reason::kChecksum) << lie.message;
    EXPECT_THAT(parsed.error().message, HasSubstr(lie.message));
  }
}

// Messages of two bytes that would each take many in memory.
TEST(Card, RefusesAFloodOfEmptyMessagesBeforeBuildingThem) {
  std::string payload = ExampleCard().SerializeAsString();
  const std::string empty_span = {static_cast<char>(CacheCard::kSpansFieldNumber << 3 | 2), 0};
  for (int i = 0; i < 5 << 20; ++i) payload += empty_span;
  const auto parsed = ParseCard(Envelope(payload));
  ASSERT_FALSE(parsed);
  EXPECT_THAT(parsed.error().message, HasSubstr("beside the token ids"));
}

TEST(Card, RefusesMoreBytesThanTheLimit) {
  const Bytes bytes(kMaxCardBytes + 1);
  const auto parsed = ParseCard(bytes);
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code, Code::kCorrupt);
  EXPECT_THAT(parsed.error().message, HasSubstr("67108865 bytes"));
}

TEST(ContextName, TakesWhatCanBePartOfAFileName) {
  for (const char* good : {"a", "A.b-c_9", "0", "a..b", "-x"}) EXPECT_TRUE(ValidateContextName(good)) << good;
  EXPECT_TRUE(ValidateContextName(std::string(200, 'a')));
  for (const char* bad : {"", ".", "..", ".a", "a/b", "a b", "a\nb", "caf\xc3\xa9", "a:b", "a\\b"}) {
    const Status status = ValidateContextName(bad);
    ASSERT_FALSE(status) << bad;
    EXPECT_EQ(status.error().code, Code::kInvalidArgument);
  }
  EXPECT_FALSE(ValidateContextName(std::string(201, 'a')));
  EXPECT_FALSE(ValidateContextName(std::string_view("a\0", 2)));
}

TEST(CardJson, HasTheFieldsUnderTheirNamesInTheProto) {
  const std::string json = CardToJson(ExampleCard(), /*with_token_ids=*/true);
  for (const char* part :
       {"\"id\": \"000102030405060708090a0b0c0d0e0f\"", "\"name\": \"research.notes-1\"", "\"n_kv_heads\": 3",
        "\"layout\": \"INTERLEAVED\"", "\"base\": 10000", "\"position_offset\": \"-100\"", "\"first_page\": 0",
        "\"weights_digest\": \"00112233445566778899aabbccddeeff\"", "48300"}) {
    EXPECT_THAT(json, HasSubstr(part));
  }
}

TEST(CardJson, NamesTheNumberOfTokenIdsWhenTheyAreLeftOut) {
  CacheCard card = ExampleCard();
  card.mutable_turn()->set_sampler("\"token_ids\": []");  // text that looks like the field
  const std::string json = CardToJson(card, /*with_token_ids=*/false);
  EXPECT_THAT(json, HasSubstr(" \"n_token_ids\": 70"));
  EXPECT_EQ(json.find("48300"), std::string::npos);
  EXPECT_EQ(json.find(" \"token_ids\""), std::string::npos);
  EXPECT_THAT(json, HasSubstr("\\\"token_ids\\\": []"));
}

TEST(ContextId, IsThirtyTwoHexDigitsAndNeverTheSame) {
  std::set<std::string> ids;
  for (int i = 0; i < 1000; ++i) ids.insert(NewContextId());
  EXPECT_EQ(ids.size(), 1000u);
  for (const std::string& id : ids) {
    ASSERT_EQ(id.size(), 32u);
    ASSERT_EQ(id.find_first_not_of("0123456789abcdef"), std::string::npos);
  }
}

// tests/golden/card-v1.bin, written once by version 1 and readable ever since; it describes segment-v2.bin. The values
// are written by hand. QKV_WRITE_GOLDEN=1 rewrites it: only together with a new envelope version, under a new name.
CacheCard MakeGoldenCard(const Segment& segment) {
  CacheCard card = ExampleCard();
  ModelIdentity& model = *card.mutable_model();
  model.clear_layers();
  LayerDims& layer = *model.add_layers();
  layer.set_n_heads(2);
  layer.set_n_kv_heads(1);
  layer.set_k_head_dim(32);
  layer.set_v_head_dim(32);
  model.mutable_rope()->set_rotary_dims(32);
  card.clear_segments();
  auto& described = *card.add_segments();
  described.set_digest(segment.digest());
  described.set_bytes(segment.bytes());
  described.set_n_pages(static_cast<uint32_t>(segment.pages().size()));
  card.clear_spans();
  auto& span = *card.add_spans();
  span.set_n_pages(2);
  span.set_n_tokens(36);
  card.mutable_token_ids()->Truncate(36);
  card.mutable_importance()->set_top_tokens(0, 35);
  return card;
}

TEST(GoldenCard, VersionOneParsesAndHoldsWhatWasWritten) {
  const auto segment = Take(test::OpenSealed(test::ReadFile(test::GoldenPath("segment-v2.bin"))));
  const auto path = test::GoldenPath("card-v1.bin");
  if (test::WritesGolden()) test::WriteFile(path, SerializeCard(MakeGoldenCard(*segment)));
  const Bytes bytes = test::ReadFile(path);
  EXPECT_EQ(std::memcmp(bytes.data(), "QKVCARD1\x01\0\0\0", 12), 0);
  const CacheCard card = Take(ParseCard(bytes));

  EXPECT_EQ(card.id(), "000102030405060708090a0b0c0d0e0f");
  EXPECT_EQ(card.name(), "research.notes-1");
  EXPECT_EQ(card.tenant(), "team_a");
  EXPECT_THAT(card.parents(), ElementsAre("ffeeddccbbaa99887766554433221100"));
  EXPECT_EQ(card.created_unix_ms(), 1700000000000);
  EXPECT_EQ(card.expires_unix_ms(), 1700000600000);
  EXPECT_EQ(card.producer().pid(), 4242);
  EXPECT_EQ(card.producer().agent(), "researcher");
  EXPECT_EQ(card.model().architecture(), "llama");
  EXPECT_EQ(card.model().n_vocab(), 49152u);
  EXPECT_EQ(card.model().n_embd(), 576u);
  ASSERT_EQ(card.model().layers_size(), 1);
  EXPECT_EQ(card.model().layers(0).n_heads(), 2u);
  EXPECT_EQ(card.model().layers(0).k_head_dim(), 32u);
  EXPECT_EQ(card.model().rope().base(), 10000.0f);
  EXPECT_EQ(card.model().rope().scaling(), "yarn");
  EXPECT_EQ(card.model().rope().layout(), Rope::INTERLEAVED);
  EXPECT_EQ(card.model().rope().original_context(), 8192u);
  EXPECT_EQ(card.model().weights_digest(), "00112233445566778899aabbccddeeff");
  EXPECT_EQ(card.model().tokenizer_digest(), "11111111111111111111111111111111");
  EXPECT_EQ(card.model().chat_template_digest(), "22222222222222222222222222222222");
  ASSERT_EQ(card.model().adapters_size(), 1);
  EXPECT_EQ(card.model().adapters(0).scale(), 0.5f);
  EXPECT_EQ(card.format().segment_version(), 2u);
  EXPECT_EQ(card.format().page_tokens(), 32u);
  EXPECT_EQ(card.format().kv(), "i8");
  ASSERT_EQ(card.segments_size(), 1);
  EXPECT_EQ(card.segments(0).digest(), segment->digest());
  EXPECT_EQ(card.segments(0).bytes(), 12288u);
  EXPECT_EQ(card.segments(0).n_pages(), 2u);
  ASSERT_EQ(card.spans_size(), 1);
  EXPECT_EQ(card.spans(0).n_tokens(), 36u);
  ASSERT_EQ(card.token_ids_size(), 36);
  EXPECT_EQ(card.token_ids(35), 24500u);
  EXPECT_THAT(card.importance().top_tokens(), ElementsAre(35u));
  EXPECT_TRUE(card.turn().open_turn());
  EXPECT_EQ(card.turn().seed(), 7u);
}

}  // namespace
}  // namespace qkv
