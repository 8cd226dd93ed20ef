// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/event_line.h"

#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include "qkvshare/v1/broker.pb.h"

namespace qkv {
namespace {

// Syntax only, by a parser that is not ours.
bool IsJson(const std::string& line) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  ::qkvshare::v1::BrokerReply::Done nothing;
  return google::protobuf::util::JsonStringToMessage(line, &nothing, options).ok();
}

TEST(EventLine, HasTheFieldsOfTheProtocol) {
  EXPECT_EQ(EventLine({Event::Kind::kAttached, "0af", "summary", 4096}, 1700, 42),
            R"({"unix_ms":1700,"event":"attached","id":"0af","name":"summary","bytes":4096,"pid":42})");
  EXPECT_EQ(RefusalLine("publish", {Code::kExhausted, "too much", Reason::kPoolFull}, 1700, 42),
            R"({"unix_ms":1700,"event":"refused","request":"publish","code":"exhausted","reason":"pool_full",)"
            R"("message":"too much","pid":42})");
  EXPECT_EQ(
      EventLine({Event::Kind::kEvicted, "0af", "", 4096, "budget"}, 1700, 42, "ann"),
      R"({"unix_ms":1700,"event":"evicted","id":"0af","name":"","bytes":4096,"reason":"budget","tenant":"ann","pid":42})");
  EXPECT_EQ(EventLine({Event::Kind::kAlarm, "", "", 950, "", 95}, 1700, 42),
            R"({"unix_ms":1700,"event":"alarm","percent":95,"bytes":950,"pid":42})");
  using Kind = ContextStore::Outcome::Kind;
  EXPECT_EQ(StoreLine({Kind::kStored, "0af", "summary", 4096, {}}, 1700),
            R"({"unix_ms":1700,"event":"stored","id":"0af","name":"summary","bytes":4096,"pid":0})");
  EXPECT_EQ(StoreLine({Kind::kFailed, "0af", "", 1, {Code::kExhausted, "no", Reason::kPoolFull}}, 1700, "ann"),
            R"({"unix_ms":1700,"event":"store_failed","id":"0af","name":"","bytes":1,"code":"exhausted",)"
            R"("reason":"pool_full","message":"no","tenant":"ann","pid":0})");
  EXPECT_EQ(DroppedLine(7, 1700), R"({"unix_ms":1700,"event":"dropped","lines":7})");
}

TEST(EventLine, TellsHowATurnWent) {
  const TurnReport report{.context = "summary",
                          .mode = "text",
                          .reason = Reason::kChecksum,
                          .tokens_recomputed = 70,
                          .attach_seconds = 0.0005,
                          .ttft_seconds = 1.25};
  const std::string line = HandoffLine(report, 1700, 42);
  EXPECT_EQ(
      line,
      R"({"unix_ms":1700,"event":"handoff","context":"summary","mode":"text","reason":"checksum","failed":false,)"
      R"("bytes_copied":0,"tokens_reused":0,"tokens_recomputed":70,"attach_ms":0.500,"ttft_ms":1250.000,"pid":42})");
  EXPECT_TRUE(IsJson(line));
}

TEST(EventLine, NamesEveryKind) {
  using Kind = Event::Kind;
  const std::pair<Kind, std::string> kinds[] = {{Kind::kCreated, "created"},   {Kind::kPublished, "published"},
                                                {Kind::kAttached, "attached"}, {Kind::kReleased, "released"},
                                                {Kind::kRemoved, "removed"},   {Kind::kExpired, "expired"},
                                                {Kind::kEvicted, "evicted"},   {Kind::kRestored, "restored"},
                                                {Kind::kAlarm, "alarm"},       {Kind::kAlarmEnded, "alarm_ended"}};
  for (const auto& [kind, name] : kinds) {
    EXPECT_NE(EventLine({kind, "", "", 0}, 0, 0).find(fmt::format(R"("event":"{}")", name)), std::string::npos) << name;
  }
}

TEST(EventLine, IsOneLineOfJsonWhateverBytesComeIn) {
  std::string all;
  for (int c = 0; c < 256; ++c) {
    all += static_cast<char>(c);
    const std::string alone(1, static_cast<char>(c));
    EXPECT_TRUE(IsJson(EventLine({Event::Kind::kRemoved, alone, alone, 1}, 2, 3))) << c;
  }
  const std::string line = RefusalLine("attach", {Code::kCorrupt, all, Reason::kNone}, 1, 2);
  EXPECT_TRUE(IsJson(line));
  for (const char c : line) EXPECT_TRUE(c >= 0x20 && c <= 0x7e) << static_cast<int>(c);
  EXPECT_FALSE(IsJson("{\"a\":\"\"\"}")) << "the parser would notice";
}

}  // namespace
}  // namespace qkv
