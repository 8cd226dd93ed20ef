// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/agent_protocol.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

namespace qkv {
namespace {

using ::testing::HasSubstr;

// What a receiver gets: one line, its newline taken off.
template <class Value, class Parse>
Value There(const Value& value, Parse parse) {
  std::string line = ToLine(value);
  EXPECT_EQ(line.find('\n'), line.size() - 1) << "one line: " << line;
  line.pop_back();
  auto parsed = parse(line);
  EXPECT_TRUE(parsed) << parsed.error().message;
  EXPECT_TRUE(std::holds_alternative<Value>(*parsed));
  return std::get<Value>(*parsed);
}

std::string EventError(std::string_view line) {
  auto event = ParseAgentEvent(line);
  if (event) return "no error";
  EXPECT_EQ(event.error().code, Code::kCorrupt);
  return event.error().message;
}

TEST(AgentProtocol, SetupArrivesWhole) {
  const AgentSetup got = There(AgentSetup{.model = "/m/x.gguf",
                                          .socket = "/tmp/s",
                                          .refine = 0.25,
                                          .balanced = true,
                                          .warm_up = true,
                                          .packed_weights = "/proc/1/fd/2",
                                          .packed_digest = "00ff"},
                               ParseAgentCommand);
  EXPECT_EQ(got.packed_weights, "/proc/1/fd/2");
  EXPECT_EQ(got.packed_digest, "00ff");
  EXPECT_EQ(got.model, "/m/x.gguf");
  EXPECT_EQ(got.socket, "/tmp/s");
  EXPECT_EQ(got.refine, 0.25);
  EXPECT_TRUE(got.balanced);
  EXPECT_TRUE(got.warm_up);
}

TEST(AgentProtocol, PrepareArrivesWhole) {
  const AgentPrepare sent{.agent = "writer",
                          .kv = CodecPair{CodecId::kI8, CodecId::kI4},
                          .max_bytes = 123456789,
                          .kv_bits = 4.3,
                          .n_ctx = 1234,
                          .threads = 7,
                          .prefix = true,
                          .system = "be brief",
                          .context = "0123",
                          .trace = true};
  const AgentPrepare got = There(sent, ParseAgentCommand);
  EXPECT_EQ(got.agent, sent.agent);
  EXPECT_EQ(got.kv, sent.kv);
  EXPECT_EQ(got.max_bytes, sent.max_bytes);
  EXPECT_EQ(got.kv_bits, 4.3);
  EXPECT_EQ(got.n_ctx, sent.n_ctx);
  EXPECT_EQ(got.threads, sent.threads);
  EXPECT_TRUE(got.prefix);
  EXPECT_EQ(got.system, sent.system);
  EXPECT_EQ(got.context, sent.context);
  EXPECT_TRUE(got.trace);
}

TEST(AgentProtocol, PreparedArrivesWhole) {
  const AgentPrepared got =
      There(AgentPrepared{.ms = 1.5, .prefix_tokens = 40, .bytes = uint64_t{5} << 32}, ParseAgentEvent);
  EXPECT_EQ(got.ms, 1.5);
  EXPECT_EQ(got.prefix_tokens, 40);
  EXPECT_EQ(got.bytes, uint64_t{5} << 32);
}

TEST(AgentProtocol, TurnArrivesWhole) {
  AgentTurn sent;
  sent.system = "sys\ntem \"quoted\"";
  sent.prompt = "grüße\t✓ \x01";
  sent.max_tokens = 99;
  sent.sampling = {.temperature = 0.7f, .top_k = 3, .top_p = 0.8f, .min_p = 0.01f, .seed = 4294967295u};
  sent.inherits = "0123";
  sent.on_miss = OnMiss::kFail;
  sent.history = {0, 1, 2147483647};
  sent.publish_as = "flow-1.writer";
  sent.agent = "writer";
  sent.kv = *ParseKvChoice("tokens:20/8/4");
  sent.max_bytes = 77;
  sent.kv_bits = 3.75;
  sent.n_ctx = 1234;
  sent.threads = 7;
  sent.budget = 99;
  sent.announce = true;
  sent.trace = true;
  sent.digest_logits = true;
  sent.prefix_tokens = 3;
  sent.document = true;
  sent.reads = {{"4567", {4, 5}, OnMiss::kFail, *ParseSplicePolicy("repair=64"), 1}, {"", {6}, OnMiss::kText}};
  const AgentTurn got = There(sent, ParseAgentCommand);
  EXPECT_EQ(got.system, sent.system);
  EXPECT_EQ(got.prompt, sent.prompt);
  EXPECT_EQ(got.max_tokens, sent.max_tokens);
  EXPECT_EQ(got.sampling.temperature, sent.sampling.temperature);
  EXPECT_EQ(got.sampling.top_k, sent.sampling.top_k);
  EXPECT_EQ(got.sampling.top_p, sent.sampling.top_p);
  EXPECT_EQ(got.sampling.min_p, sent.sampling.min_p);
  EXPECT_EQ(got.sampling.seed, sent.sampling.seed);
  EXPECT_EQ(got.inherits, sent.inherits);
  EXPECT_EQ(got.on_miss, sent.on_miss);
  EXPECT_EQ(got.history, sent.history);
  EXPECT_EQ(got.publish_as, sent.publish_as);
  EXPECT_EQ(got.agent, sent.agent);
  EXPECT_EQ(got.max_bytes, 77u);
  EXPECT_EQ(got.kv_bits, 3.75);
  EXPECT_EQ(got.kv, sent.kv);
  EXPECT_EQ(got.n_ctx, sent.n_ctx);
  EXPECT_EQ(got.threads, sent.threads);
  EXPECT_EQ(got.budget, sent.budget);
  EXPECT_TRUE(got.announce);
  EXPECT_TRUE(got.trace);
  EXPECT_TRUE(got.digest_logits);
  ASSERT_EQ(got.reads.size(), 2u);
  EXPECT_EQ(got.reads[0].context, "4567");
  EXPECT_EQ(got.reads[0].history, sent.reads[0].history);
  EXPECT_EQ(got.reads[0].on_miss, OnMiss::kFail);
  EXPECT_EQ(got.reads[0].splice, sent.reads[0].splice);
  EXPECT_EQ(got.reads[0].prefix_tokens, 1);
  EXPECT_EQ(got.reads[1].on_miss, OnMiss::kText);
  EXPECT_EQ(got.reads[1].splice, SplicePolicy{});
  EXPECT_EQ(got.prefix_tokens, 3);
  EXPECT_TRUE(got.document);
}

TEST(AgentProtocol, AnnouncedArrivesWhole) {
  const AgentAnnounced got = There(AgentAnnounced{.context = "0123", .tokens = 1400}, ParseAgentEvent);
  EXPECT_EQ(got.context, "0123");
  EXPECT_EQ(got.tokens, 1400);
}

TEST(AgentProtocol, DoneArrivesWhole) {
  TurnResult sent;
  sent.text = "hello\nthere";
  sent.output_tokens = {5, 6};
  sent.context_tokens = {1, 2, 3, 5, 6};
  sent.stopped_by_eos = true;
  sent.logits_digest = "0f";
  sent.mode = HandoffMode::kText;
  sent.reason = Reason::kChecksum;
  sent.reason_detail = "page 3";
  sent.bytes_copied = 4096;
  sent.tokens_reused = 1;
  sent.tokens_recomputed = 2;
  sent.splice = "repair=32, hide";
  sent.spans_spliced = 3;
  sent.tokens_repaired = 64;
  sent.probe_kl = 0.0078125;
  sent.prefix_tokens = 17;
  sent.attach_ms = 0.25;
  sent.ttft_ms = 12.5;
  sent.prefill_ms = 11.5;
  sent.decode_ms = 100;
  sent.first_token_at_ms = 123456789.25;
  sent.last_token_at_ms = 123456999.75;
  sent.publish_error = "the broker is gone";
  sent.publish_ms = 1.0 / 3;
  sent.context_id = "abc";
  sent.kv_bytes = uint64_t{1} << 40;
  sent.own_kv_bytes = 77;
  const TurnResult got = There(AgentDone{sent}, ParseAgentEvent).result;
  EXPECT_EQ(got.text, sent.text);
  EXPECT_EQ(got.output_tokens, sent.output_tokens);
  EXPECT_EQ(got.context_tokens, sent.context_tokens);
  EXPECT_EQ(got.stopped_by_eos, sent.stopped_by_eos);
  EXPECT_EQ(got.logits_digest, sent.logits_digest);
  EXPECT_EQ(got.mode, sent.mode);
  EXPECT_EQ(got.reason, sent.reason);
  EXPECT_EQ(got.reason_detail, sent.reason_detail);
  EXPECT_EQ(got.bytes_copied, sent.bytes_copied);
  EXPECT_EQ(got.tokens_reused, sent.tokens_reused);
  EXPECT_EQ(got.tokens_recomputed, sent.tokens_recomputed);
  EXPECT_EQ(got.splice, sent.splice);
  EXPECT_EQ(got.spans_spliced, sent.spans_spliced);
  EXPECT_EQ(got.tokens_repaired, sent.tokens_repaired);
  EXPECT_EQ(got.probe_kl, sent.probe_kl);
  EXPECT_EQ(got.prefix_tokens, sent.prefix_tokens);
  EXPECT_EQ(got.attach_ms, sent.attach_ms);
  EXPECT_EQ(got.ttft_ms, sent.ttft_ms);
  EXPECT_EQ(got.prefill_ms, sent.prefill_ms);
  EXPECT_EQ(got.decode_ms, sent.decode_ms);
  EXPECT_EQ(got.first_token_at_ms, sent.first_token_at_ms);
  EXPECT_EQ(got.last_token_at_ms, sent.last_token_at_ms);
  EXPECT_EQ(got.publish_error, sent.publish_error);
  EXPECT_EQ(got.publish_ms, sent.publish_ms);
  EXPECT_EQ(got.context_id, sent.context_id);
  EXPECT_EQ(got.kv_bytes, sent.kv_bytes);
  EXPECT_EQ(got.own_kv_bytes, sent.own_kv_bytes);
}

TEST(AgentProtocol, StagesArriveWhole) {
  const TraceEvent sent{
      .process = "writer", .name = "seal", .start_us = 1e12 + 0.25, .duration_us = 7.5, .pid = 3, .tid = 4};
  const AgentDone got = There(AgentDone{{}, {sent, sent}}, ParseAgentEvent);
  ASSERT_EQ(got.trace.size(), 2u);
  EXPECT_EQ(got.trace[1].process, sent.process);
  EXPECT_EQ(got.trace[1].name, sent.name);
  EXPECT_EQ(got.trace[1].start_us, sent.start_us);
  EXPECT_EQ(got.trace[1].duration_us, sent.duration_us);
  EXPECT_EQ(got.trace[1].pid, sent.pid);
  EXPECT_EQ(got.trace[1].tid, sent.tid);
  std::string line = ToLine(AgentDone{{}, {sent}});
  line.replace(line.find("\"seal\""), 6, "[]");
  EXPECT_THAT(EventError(line), HasSubstr("'trace' has a stage that is not understood"));
}

TEST(AgentProtocol, SmallEventsArriveWhole) {
  const AgentReady ready = There(AgentReady{.load_ms = 31.5, .tokenizer = "d1"}, ParseAgentEvent);
  EXPECT_EQ(ready.load_ms, 31.5);
  EXPECT_EQ(ready.tokenizer, "d1");
  EXPECT_EQ(There(AgentProgress{512, 4000}, ParseAgentEvent).total, 4000);
  EXPECT_EQ(There(AgentText{"a\n\"b\""}, ParseAgentEvent).piece, "a\n\"b\"");
}

TEST(AgentProtocol, EveryCodeModeAndReasonHasItsWayThere) {
  for (int i = 0; i <= static_cast<int>(Code::kInternal); ++i) {
    const Error error{static_cast<Code>(i), "m", Reason::kNone};
    EXPECT_EQ(There(AgentFailed{error}, ParseAgentEvent).error.code, error.code);
  }
  for (int i = 0; i <= static_cast<int>(Reason::kVersion); ++i) {
    const Error error{Code::kIo, "m", static_cast<Reason>(i)};
    EXPECT_EQ(There(AgentFailed{error}, ParseAgentEvent).error.reason, error.reason);
  }
  for (int i = 0; i <= static_cast<int>(HandoffMode::kText); ++i) {
    TurnResult result;
    result.mode = static_cast<HandoffMode>(i);
    EXPECT_EQ(There(AgentDone{result}, ParseAgentEvent).result.mode, result.mode);
  }
}

TEST(AgentProtocol, BytesThatAreNotTextAreReplaced) {
  EXPECT_EQ(There(AgentText{"a\xff"}, ParseAgentEvent).piece, "a\xEF\xBF\xBD");
}

TEST(AgentProtocol, RefusesWhatIsNoObject) {
  for (const char* line :
       {"", "garbage", "[1]", "\"text\"", "null", R"({"type":"text","piece":"x")", "{} {}", "{'a':1}"}) {
    EXPECT_THAT(EventError(line), HasSubstr("expected a JSON object")) << line;
  }
}

TEST(AgentProtocol, RefusesUnknownTypesAndTheOtherSidesMessages) {
  EXPECT_THAT(EventError(R"({"type":"dance"})"), HasSubstr("'dance'"));
  EXPECT_THAT(EventError(R"({"piece":"x"})"), HasSubstr("'type' is missing"));
  EXPECT_THAT(EventError(ToLine(AgentSetup{})), HasSubstr("'setup'"));
  EXPECT_FALSE(ParseAgentCommand(ToLine(AgentText{"x"})));
}

TEST(AgentProtocol, RefusesMissingAndMistypedFields) {
  EXPECT_THAT(EventError(R"({"type":"text"})"), HasSubstr("text: 'piece' is missing"));
  EXPECT_THAT(EventError(R"({"type":"text","piece":5})"), HasSubstr("text: 'piece' must be text"));
  EXPECT_THAT(EventError(R"({"type":"ready","load_ms":"x","tokenizer":""})"), HasSubstr("'load_ms' must be a number"));
  EXPECT_THAT(EventError(R"({"type":"error","code":"?","message":"","reason":""})"),
              HasSubstr("'code' has an unknown value"));
  EXPECT_THAT(EventError(R"({"type":"error","code":"io","message":"","reason":"whim"})"),
              HasSubstr("'reason' has an unknown value"));
}

TEST(AgentProtocol, RefusesNumbersOutOfRange) {
  EXPECT_THAT(EventError(R"({"type":"ready","load_ms":-1,"tokenizer":""})"), HasSubstr("'load_ms' is out of range"));
  EXPECT_THAT(EventError(R"({"type":"ready","load_ms":1e999,"tokenizer":""})"), HasSubstr("expected a JSON object"));
  const auto done_with = [](const std::string& key, const std::string& value) {
    std::string line = ToLine(AgentDone{});
    const size_t at = line.find("\"" + key + "\":") + key.size() + 3;
    return EventError(line.replace(at, line.find_first_of(",}", at) - at, value));
  };
  EXPECT_EQ(done_with("kv_bytes", "1"), "no error") << "the replacement itself works";
  EXPECT_THAT(done_with("kv_bytes", "-1"), HasSubstr("'kv_bytes' is out of range"));
  EXPECT_THAT(done_with("kv_bytes", "18446744073709551615"), HasSubstr("'kv_bytes' is out of range"));
  EXPECT_THAT(done_with("kv_bytes", "1.5"), HasSubstr("'kv_bytes' must be a whole number"));
  EXPECT_THAT(done_with("output_tokens", "[2147483648]"), HasSubstr("'output_tokens' is out of range"));
  EXPECT_THAT(done_with("output_tokens", "[-1]"), HasSubstr("'output_tokens' is out of range"));
  EXPECT_THAT(done_with("output_tokens", "[\"1\"]"), HasSubstr("'output_tokens' must be a list of tokens"));
}

TEST(AgentProtocol, RefusesDepthWithoutBuildingIt) {
  EXPECT_THAT(EventError(std::string(kMaxAgentLineBytes, '[')), HasSubstr("nested deeper"));
  EXPECT_THAT(EventError(R"({"type":"text","piece":"[[[[[[[[[[[[[["})"), "no error") << "brackets in text are text";
  EXPECT_THAT(EventError(R"({"type":"text","piece":"\"[[[[[[[[[[[[[["})"), "no error");
}

TEST(AgentProtocol, RefusesLongLines) {
  EXPECT_THAT(EventError(std::string(kMaxAgentLineBytes + 1, ' ')), HasSubstr("a line of"));
}

TEST(AgentProtocol, ErrorsQuoteAtMostAStartOfWhatWasFound) {
  EXPECT_LT(EventError(std::string(1000000, 'x')).size(), 200u);
  EXPECT_EQ(EventError("a\x1b[31m\nb").find('\n'), std::string::npos);
}

TEST(AgentProtocol, SurvivesArbitraryAndDamagedLines) {
  EXPECT_TRUE(rc::check("arbitrary bytes", [](const std::string& line) {
    (void)ParseAgentEvent(line);
    (void)ParseAgentCommand(line);
  }));
  const std::string lines[] = {ToLine(AgentDone{}), ToLine(AgentTurn{.reads = {{"x", {1}, OnMiss::kFail}}}),
                               ToLine(AgentPrepare{}), ToLine(AgentSetup{}), ToLine(AgentFailed{})};
  for (const std::string& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      for (char c : {'"', '{', '[', '9', '-', '\0', '\xff', ','}) {
        std::string bad = line;
        bad[i] = c;
        (void)ParseAgentEvent(bad);
        (void)ParseAgentCommand(bad);
      }
    }
  }
}

}  // namespace
}  // namespace qkv
