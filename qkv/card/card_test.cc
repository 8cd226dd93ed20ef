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

#include "qkv/segment/test_support.h"

namespace qkv {
namespace {

using ::qkvshare::v1::LayerDims;
using ::qkvshare::v1::MaskState;
using ::qkvshare::v1::Rope;
using test::Bytes;
using test::Take;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr size_t kEnvelopeBytes = 24;

// Every field that a card carried when the golden file was made; 70 tokens in two segments.
CacheCard ExampleCard() {
  CacheCard card;
  card.set_id("000102030405060708090a0b0c0d0e0f");
  card.set_name("research.notes-1");
  card.set_tenant("team_a");
  card.add_parents("ffeeddccbbaa99887766554433221100");
  card.set_created_unix_ms(1700000000000);
  card.set_expires_unix_ms(1700000600000);
  card.mutable_producer()->set_pid(4242);
  card.mutable_producer()->set_program("qkvshare 0.1.0");
  card.mutable_producer()->set_agent("researcher");
  ModelIdentity& model = *card.mutable_model();
  model.set_architecture("llama");
  model.set_name("SmolLM2 135M");
  model.set_n_vocab(49152);
  model.set_n_embd(576);
  for (int i = 0; i < 2; ++i) {
    LayerDims& layer = *model.add_layers();
    layer.set_n_heads(9);
    layer.set_n_kv_heads(3);
    layer.set_k_head_dim(64);
    layer.set_v_head_dim(64);
  }
  model.mutable_layers(1)->set_kind(LayerDims::SLIDING);
  model.mutable_layers(1)->set_window(1024);
  Rope& rope = *model.mutable_rope();
  rope.set_base(10000);
  rope.set_scaling("yarn");
  rope.set_scaling_factor(4);
  rope.set_layout(Rope::INTERLEAVED);
  rope.set_rotary_dims(64);
  rope.set_factors_digest("0123456789abcdef0123456789abcdef");
  rope.set_original_context(8192);
  model.set_weights_digest("00112233445566778899aabbccddeeff");
  model.set_tokenizer_digest("11111111111111111111111111111111");
  model.set_chat_template_digest("22222222222222222222222222222222");
  auto& adapter = *model.add_adapters();
  adapter.set_digest("33333333333333333333333333333333");
  adapter.set_scale(0.5f);
  auto& format = *card.mutable_format();
  format.set_segment_version(kSegmentVersion);
  format.set_page_tokens(32);
  format.set_rotation("none");
  format.set_byte_order("little");
  format.set_cpu_features("avx2 f16c");
  format.set_kv("i8");
  for (const char* digest : {"44444444444444444444444444444444", "55555555555555555555555555555555"}) {
    auto& segment = *card.add_segments();
    segment.set_digest(digest);
    segment.set_bytes(1 << 20);
    segment.set_n_pages(3);
  }
  auto& first = *card.add_spans();
  first.set_n_pages(2);
  first.set_n_tokens(60);
  auto& second = *card.add_spans();
  second.set_segment(1);
  second.set_first_page(2);
  second.set_n_pages(1);
  second.set_n_tokens(10);
  second.set_first_position(60);
  second.set_position_offset(-100);
  for (uint32_t i = 0; i < 70; ++i) card.add_token_ids(i * 700);
  card.mutable_importance()->add_top_tokens(69);
  card.mutable_turn()->set_open_turn(true);
  card.mutable_turn()->set_sampler("temp=0.8 top_k=40");
  card.mutable_turn()->set_seed(7);
  return card;
}

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
