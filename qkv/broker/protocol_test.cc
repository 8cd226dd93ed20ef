// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/protocol.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "qkv/broker/socket.h"
#include "qkv/broker/test_support.h"

namespace qkv {
namespace {

using test::Outcome;
using ::testing::HasSubstr;

std::string Decoded(const BrokerRequest& request, size_t n_descriptors = 0) {
  return Outcome(DecodeRequest(request.SerializeAsString(), n_descriptors));
}

BrokerRequest Publish(uint32_t n_descriptors, int64_t ttl_ms) {
  BrokerRequest request;
  request.mutable_publish()->set_n_descriptors(n_descriptors);
  request.mutable_publish()->set_ttl_ms(ttl_ms);
  return request;
}

TEST(Protocol, RefusesWhatIsNoRequest) {
  EXPECT_EQ(Outcome(DecodeRequest("", 0)), "invalid_argument");
  EXPECT_EQ(Outcome(DecodeRequest("\xff\xff\xff", 0)), "invalid_argument");
  EXPECT_EQ(Outcome(DecodeRequest(std::string(kMaxMessageBytes + 1, '\0'), 0)), "invalid_argument");
  EXPECT_EQ(Decoded(BrokerRequest()), "invalid_argument");
}

TEST(Protocol, RefusesAClientOfAnotherVersion) {
  BrokerRequest request;
  request.mutable_hello()->set_protocol(kProtocolVersion);
  EXPECT_EQ(Decoded(request), "ok");
  request.mutable_hello()->set_protocol(kProtocolVersion + 1);
  EXPECT_EQ(Decoded(request), "incompatible/version");
}

TEST(Protocol, ChecksTheNumbersOfAPublish) {
  EXPECT_EQ(Decoded(Publish(1, 0), 1), "ok");
  EXPECT_EQ(Decoded(Publish(0, 0), 1), "invalid_argument");
  EXPECT_EQ(Decoded(Publish(4097, 0), 1), "ok");
  EXPECT_EQ(Decoded(Publish(4098, 0), 1), "invalid_argument");
  EXPECT_EQ(Decoded(Publish(1, -1), 1), "invalid_argument");
  EXPECT_EQ(Decoded(Publish(1, INT64_MAX), 1), "invalid_argument");
}

TEST(Protocol, DescriptorsComeWithTheRequestsThatCarryThemAndWithNoOthers) {
  EXPECT_EQ(Decoded(Publish(2, 0), 0), "invalid_argument");
  BrokerRequest more;
  more.mutable_more_descriptors();
  EXPECT_EQ(Decoded(more, 3), "ok");
  EXPECT_EQ(Decoded(more, 0), "invalid_argument");
  BrokerRequest list;
  list.mutable_list();
  EXPECT_EQ(Decoded(list, 0), "ok");
  EXPECT_EQ(Decoded(list, 1), "invalid_argument");
}

TEST(Protocol, ChecksNamesBeforeTheyReachMessagesAndLogs) {
  for (const std::string& name : {std::string(), std::string("a/b"), std::string(".hidden"), std::string("a\0b", 3),
                                  std::string("\xff"), std::string(201, 'a'), std::string("a\nb")}) {
    BrokerRequest attach;
    attach.mutable_attach()->set_id_or_name(name);
    EXPECT_EQ(Decoded(attach), "invalid_argument") << name;
    BrokerRequest remove;
    remove.mutable_remove()->set_id_or_name(name);
    EXPECT_EQ(Decoded(remove), "invalid_argument") << name;
    if (name.empty()) continue;
    BrokerRequest list;
    list.mutable_list()->set_after_id(name);
    EXPECT_EQ(Decoded(list), "invalid_argument") << name;
  }
}

TEST(Protocol, AFailureArrivesAsItWas) {
  for (int code = 0; code <= static_cast<int>(Code::kInternal); ++code) {
    for (int reason = 0; reason <= static_cast<int>(Reason::kVersion); ++reason) {
      const Error sent{static_cast<Code>(code), "found \xff, expected \"x\"", static_cast<Reason>(reason)};
      const auto reply = DecodeReply(FailureReply(sent).SerializeAsString());
      ASSERT_TRUE(reply && reply->has_failure());
      const Error error = ErrorFrom(reply->failure());
      EXPECT_EQ(error.code, sent.code);
      EXPECT_EQ(error.reason, sent.reason);
      EXPECT_EQ(error.message, sent.message);
    }
  }
}

TEST(Protocol, AFailureOfAnotherVersionIsInternal) {
  BrokerReply::Failure failure;
  failure.set_code("on_fire");
  failure.set_reason("smoke");
  EXPECT_EQ(ErrorFrom(failure).code, Code::kInternal);
  EXPECT_EQ(ErrorFrom(failure).reason, Reason::kNone);
}

TEST(Protocol, ALongFailureStillFitsIntoAMessage) {
  const Error sent{Code::kCorrupt, std::string(10 * kMaxMessageBytes, 'x'), Reason::kChecksum};
  EXPECT_LT(FailureReply(sent).ByteSizeLong(), kMaxMessageBytes);
}

TEST(Protocol, RefusesWhatIsNoReply) {
  EXPECT_EQ(Outcome(DecodeReply("")), "incompatible/version");
  EXPECT_EQ(Outcome(DecodeReply("\xff\xff")), "incompatible/version");
}

TEST(Protocol, AContextArrivesAsItWasAndCutToSize) {
  ContextInfo info{.id = "i",
                   .name = "n",
                   .model = "m\xff",
                   .kv = "k",
                   .n_tokens = 1,
                   .bytes = 2,
                   .producer_pid = 3,
                   .created_unix_ms = 4,
                   .expires_unix_ms = 5,
                   .pinned = true,
                   .n_leases = 6,
                   .n_attached = 7,
                   .holders = std::vector<int64_t>(100, 8)};
  BrokerReply::Context wire;
  ToWire(info, &wire);
  const ContextInfo back = FromWire(wire);
  EXPECT_EQ(back.id, "i");
  EXPECT_EQ(back.name, "n");
  EXPECT_EQ(back.model, "m\xff");
  EXPECT_EQ(back.kv, "k");
  EXPECT_EQ(back.n_tokens, 1);
  EXPECT_EQ(back.bytes, 2);
  EXPECT_EQ(back.producer_pid, 3);
  EXPECT_EQ(back.created_unix_ms, 4);
  EXPECT_EQ(back.expires_unix_ms, 5);
  EXPECT_TRUE(back.pinned);
  EXPECT_EQ(back.n_leases, 6);
  EXPECT_EQ(back.n_attached, 7u);
  EXPECT_EQ(back.holders, std::vector<int64_t>(16, 8));  // the first few
  info.model.assign(100'000, 'm');
  info.kv.assign(100'000, 'k');
  ToWire(info, &wire);
  EXPECT_LT(wire.ByteSizeLong(), 1000);
}

TurnReport SomeReport() {
  return {.context = "summary",
          .mode = "text",
          .reason = Reason::kChecksum,
          .failed = true,
          .bytes_copied = 8,
          .tokens_reused = 1,
          .tokens_recomputed = 2,
          .attach_seconds = 0.25,
          .publish_seconds = 0.5,
          .ttft_seconds = 4,
          .model = "tiny",
          .kv = "i8",
          .keys_with_refinement = 1000,
          .keys_refined = 97,
          .kv_bits_read = 4.625};
}

TEST(Protocol, AReportArrivesAsItWas) {
  BrokerRequest request;
  ToWire(SomeReport(), request.mutable_report());
  const auto decoded = DecodeRequest(request.SerializeAsString(), 0);
  ASSERT_TRUE(decoded) << decoded.error().message;
  const TurnReport report = FromWire(decoded->report());
  EXPECT_EQ(report.context, "summary");
  EXPECT_EQ(report.mode, "text");
  EXPECT_EQ(report.reason, Reason::kChecksum);
  EXPECT_TRUE(report.failed);
  EXPECT_EQ(report.tokens_reused, 1u);
  EXPECT_EQ(report.tokens_recomputed, 2u);
  EXPECT_EQ(report.attach_seconds, 0.25);
  EXPECT_EQ(report.publish_seconds, 0.5);
  EXPECT_EQ(report.ttft_seconds, 4);
  EXPECT_EQ(report.bytes_copied, 8u);
  EXPECT_EQ(report.model, "tiny");
  EXPECT_EQ(report.kv, "i8");
  EXPECT_EQ(report.keys_with_refinement, 1000u);
  EXPECT_EQ(report.keys_refined, 97u);
  EXPECT_EQ(report.kv_bits_read, 4.625);
}

TEST(Protocol, AReportOfAClientThatDoesNotKnowBitsReadIsTaken) {
  BrokerRequest request;
  ToWire(SomeReport(), request.mutable_report());
  request.mutable_report()->clear_kv_bits_read();
  const auto decoded = DecodeRequest(request.SerializeAsString(), 0);
  ASSERT_TRUE(decoded) << decoded.error().message;
  EXPECT_EQ(FromWire(decoded->report()).kv_bits_read, 0);
}

TEST(Protocol, AReportCannotSpoilTheCounters) {
  const std::pair<const char*, std::function<void(BrokerRequest::Report&)>> changes[] = {
      {"mode", [](auto& r) { r.set_mode("teleport"); }},
      {"no mode", [](auto& r) { r.set_mode(""); }},
      {"reason", [](auto& r) { r.set_reason("because"); }},
      {"context", [](auto& r) { r.set_context("../x"); }},
      {"reused", [](auto& r) { r.set_tokens_reused(UINT64_MAX); }},
      {"recomputed", [](auto& r) { r.set_tokens_recomputed(uint64_t{1} << 40); }},
      {"copied", [](auto& r) { r.set_bytes_copied(UINT64_MAX); }},
      {"negative", [](auto& r) { r.set_attach_seconds(-1); }},
      {"nan", [](auto& r) { r.set_publish_seconds(std::nan("")); }},
      {"infinite", [](auto& r) { r.set_ttft_seconds(HUGE_VAL); }},
      {"more refined than there are", [](auto& r) { r.set_keys_refined(1001); }},
      {"too many keys", [](auto& r) { r.set_keys_with_refinement(UINT64_MAX); }},
      {"negative bits", [](auto& r) { r.set_kv_bits_read(-1); }},
      {"bits that are no number", [](auto& r) { r.set_kv_bits_read(std::nan("")); }},
      {"too many bits", [](auto& r) { r.set_kv_bits_read(65); }}};
  for (const auto& [what, change] : changes) {
    BrokerRequest request;
    ToWire(SomeReport(), request.mutable_report());
    change(*request.mutable_report());
    EXPECT_EQ(Decoded(request), "invalid_argument") << what;
  }
}

TEST(Protocol, SurvivesDamagedRequests) {
  std::mt19937 random(11);
  std::vector<std::string> seeds = {Publish(3, 1000).SerializeAsString()};
  BrokerRequest request;
  request.mutable_attach()->set_id_or_name("summary");
  seeds.push_back(request.SerializeAsString());
  request.mutable_fetch_descriptors()->set_lease(1234567);
  request.mutable_fetch_descriptors()->set_first(253);
  seeds.push_back(request.SerializeAsString());
  size_t n_accepted = 0;
  for (int i = 0; i < 50'000; ++i) {
    std::string bytes = seeds[random() % seeds.size()];
    for (uint32_t flips = random() % 4; flips > 0; --flips) bytes[random() % bytes.size()] ^= 1 << random() % 8;
    if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
    const auto decoded = DecodeRequest(bytes, random() % 3);
    if (!decoded) continue;
    ++n_accepted;
    EXPECT_NE(decoded->body_case(), BrokerRequest::BODY_NOT_SET);
    EXPECT_LE(decoded->publish().n_descriptors(), kMaxDescriptorsPerContext);
  }
  EXPECT_GT(n_accepted, 1000);
  EXPECT_LT(n_accepted, 45'000);
}

}  // namespace
}  // namespace qkv
