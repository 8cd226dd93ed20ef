// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include "qkv/broker/server.h"
#include "qkv/broker/test_support.h"

namespace qkv {
namespace {

using test::Outcome;
using test::Take;
using test::TestContext;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TurnReport Attached() {
  return {.context = "report",
          .mode = "attach",
          .tokens_reused = 4065,
          .tokens_recomputed = 25,
          .attach_seconds = 0.0006,
          .ttft_seconds = 0.3,
          .keys_with_refinement = 1000,
          .keys_refined = 97,
          .kv_bits_read = 4.625};
}
TurnReport Damaged() {
  return {
      .context = "report", .mode = "text", .reason = Reason::kChecksum, .tokens_recomputed = 4090, .ttft_seconds = 15};
}

TEST(Metrics, NameWhatUsersLookFor) {
  BrokerMetrics metrics;
  const std::string text = metrics.Text();
  for (const char* name :
       {"qkvshare:reused_tokens_total 0", "qkvshare:recomputed_tokens_total 0", "qkvshare:checksum_failures_total 0",
        "qkvshare:pool_bytes 0", "qkvshare:pool_budget_bytes 0", "qkvshare:contexts 0", "qkvshare:leases 0",
        "qkvshare:attach_seconds_bucket{le=\"0.0001\"} 0", "qkvshare:publish_seconds_count 0",
        "qkvshare:read_bits_per_value_count 0", "qkvshare:time_to_first_token_seconds_sum 0",
        "qkvshare:events_total{event=\"evicted\"} 0", "qkvshare:handoffs_total{mode=\"copy\"} 0",
        "qkvshare:refused_total{reason=\"pool_full\"} 0"}) {
    EXPECT_THAT(text, HasSubstr(name));
  }
  for (int i = 1; i <= static_cast<int>(Reason::kVersion); ++i) {  // before the first failure, so that a rate exists
    EXPECT_THAT(text, HasSubstr(fmt::format("qkvshare:fallback_total{{on_miss=\"text\",reason=\"{}\"}} 0",
                                            ReasonName(static_cast<Reason>(i)))));
  }
}

TEST(Metrics, CountTurnsByWhatCameOfThem) {
  BrokerMetrics metrics;
  metrics.Count(Attached());
  metrics.Count(Attached());
  metrics.Count(Damaged());
  TurnReport failed = Damaged();
  failed.mode = "none";
  failed.failed = true;
  failed.tokens_recomputed = 0;
  failed.ttft_seconds = 0;
  metrics.Count(failed);
  const std::string text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("qkvshare:handoffs_total{mode=\"attach\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:handoffs_total{mode=\"text\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:fallback_total{on_miss=\"text\",reason=\"checksum\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:fallback_total{on_miss=\"fail\",reason=\"checksum\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:checksum_failures_total 2\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:attach_seconds_count 2\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:attach_seconds_bucket{le=\"0.0005\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:attach_seconds_bucket{le=\"0.001\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:time_to_first_token_seconds_count 3\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:publish_seconds_count 0\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:refinable_keys_total 2000\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:refined_keys_total 194\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:read_bits_per_value_sum 9.25\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:read_bits_per_value_count 2\n")) << "of those who said";
  EXPECT_THAT(text, HasSubstr("qkvshare:read_bits_per_value_bucket{le=\"4.5\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("qkvshare:read_bits_per_value_bucket{le=\"5\"} 2\n"));
  const BrokerTotals totals = metrics.totals();
  EXPECT_EQ(totals.tokens_reused, 2u * 4065);
  EXPECT_EQ(totals.tokens_recomputed, 2u * 25 + 4090);
  EXPECT_EQ(totals.fallbacks, 2u);
  EXPECT_EQ(totals.checksum_failures, 2u);
}

TEST(Metrics, AreLabelledByModelAndCodecOfThoseWhoReport) {
  BrokerMetrics metrics;
  TurnReport report = Attached();
  report.model = "SmolLM2 \"135M\"\n";
  report.kv = "k=i8,v=i4";
  metrics.Count(report);
  report.mode = "copy";
  report.bytes_copied = 12288;
  metrics.Count(report);
  report.kv = "i8";
  metrics.Count(report);
  const std::string text = metrics.Text();
  const std::string labels = R"(kv_type="k=i8,v=i4",model_name="SmolLM2 _135M__")";
  EXPECT_THAT(text, HasSubstr(fmt::format("qkvshare:reused_tokens_total{{{}}} 8130\n", labels)));
  EXPECT_THAT(text, HasSubstr(fmt::format("qkvshare:copied_bytes_total{{{}}} 12288\n", labels)));
  EXPECT_THAT(text, HasSubstr(R"(qkvshare:handoffs_total{kv_type="i8",mode="copy",model_name="SmolLM2 _135M__"} 1)"));
  EXPECT_THAT(text, HasSubstr("qkvshare:reused_tokens_total 0\n")) << "nobody reported without a model";
  EXPECT_EQ(metrics.totals().tokens_reused, 3u * 4065);
}

TEST(Metrics, ClientsThatMakeUpModelsCannotFillTheMemory) {
  BrokerMetrics metrics;
  TurnReport report = Attached();
  for (int i = 0; i < 1000; ++i) {
    report.model = std::string(1000, 'm') + std::to_string(i);
    report.kv = std::to_string(i);
    metrics.Count(report);
  }
  const std::string text = metrics.Text();
  EXPECT_LT(text.size(), size_t{1} << 20);
  EXPECT_THAT(text, HasSubstr(R"(qkvshare:reused_tokens_total{kv_type="other",model_name="other"})"));
  EXPECT_EQ(metrics.totals().tokens_reused, 1000u * 4065) << "all are counted";
}

TEST(Metrics, AreOfferedOnLoopbackOnly) {
  const auto metrics = std::make_shared<BrokerMetrics>();
  for (const char* address : {"0.0.0.0:0", "192.168.1.1:9464", "[::]:0", "localhost:9464", "127.0.0.1", "127.0.0.1:",
                              "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:-1", "127.0.0.1:1,0.0.0.0:2", ":0", ""}) {
    EXPECT_EQ(Outcome(MetricsEndpoint::Start(address, metrics)), "invalid_argument") << address;
  }
}

std::string HttpGet(int port, const std::string& path) {
  const Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval patience{20, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return "";
  const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
  EXPECT_EQ(::write(fd.get(), request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t n; (n = ::read(fd.get(), buffer, sizeof buffer)) > 0;) answer.append(buffer, static_cast<size_t>(n));
  return answer;
}

TEST(Metrics, AreServedOverHttpAndTwoCannotShareAPort) {
  const auto metrics = std::make_shared<BrokerMetrics>();
  metrics->Count(Attached());
  const auto endpoint = Take(MetricsEndpoint::Start("127.0.0.1:0", metrics));
  ASSERT_GT(endpoint->port(), 0);
  EXPECT_THAT(HttpGet(endpoint->port(), "/metrics"),
              AllOf(HasSubstr(" 200 OK"), HasSubstr("text/plain"), HasSubstr("qkvshare:reused_tokens_total 4065\n")));
  EXPECT_THAT(HttpGet(endpoint->port(), "/"), Not(HasSubstr("qkvshare:")));
  EXPECT_EQ(Outcome(MetricsEndpoint::Start(fmt::format("127.0.0.1:{}", endpoint->port()), metrics)), "io");
}

TEST(Metrics, ABrokerShowsItsPoolHoldersAndHits) {
  const test::TemporaryFolder folder;
  std::string log;
  BrokerOptions options;
  options.socket_path = folder / "broker.sock";
  options.budget_bytes = 1 << 20;
  options.on_event = [&log](const std::string& line) { log += line + "\n"; };
  auto server = Take(BrokerServer::Start(options));
  const auto metrics = server->metrics();
  auto ann = Take(BrokerClient::Connect(options.socket_path));
  auto bob = Take(BrokerClient::Connect(options.socket_path));
  const TestContext context("report");
  ASSERT_TRUE(context.PublishTo(*ann));
  const uint64_t first = Take(ann->Attach("report")).lease;
  Take(bob->Attach("report"));
  Take(bob->Attach("report"));
  EXPECT_EQ(Outcome(bob->Attach("nobody")), "not_found/not_found");
  ASSERT_TRUE(bob->Report(Damaged()));
  TurnReport wrong = Damaged();
  wrong.mode = "carrier pigeon";
  EXPECT_EQ(Outcome(bob->Report(wrong)), "invalid_argument");

  const BrokerStatus status = Take(ann->List());
  ASSERT_EQ(status.contexts.size(), 1u);
  EXPECT_EQ(status.contexts[0].n_attached, 3u);
  EXPECT_EQ(status.contexts[0].n_leases, 3u);
  EXPECT_THAT(status.contexts[0].holders, ElementsAre(::getpid()));  // each process once
  EXPECT_EQ(status.totals.published, 1u);
  EXPECT_EQ(status.totals.attached, 3u);
  EXPECT_EQ(status.totals.refused, 2u);
  EXPECT_EQ(status.totals.fallbacks, 1u);
  EXPECT_EQ(status.totals.tokens_recomputed, 4090u);
  EXPECT_THAT(metrics->Text(), AllOf(HasSubstr("qkvshare:contexts 1\n"), HasSubstr("qkvshare:leases 3\n"),
                                     HasSubstr("qkvshare:clients 2\n"),
                                     HasSubstr(fmt::format("qkvshare:pool_bytes {}\n", status.used_bytes)),
                                     HasSubstr("qkvshare:pool_budget_bytes 1048576\n"),
                                     HasSubstr("qkvshare:refused_total{reason=\"not_found\"} 1\n")));
  ASSERT_TRUE(ann->ReleaseLease(first));
  // The broker answers first, and counts then.
  EXPECT_TRUE(test::Eventually([&] { return metrics->Text().find("qkvshare:leases 2\n") != std::string::npos; }));
  bob.reset();
  EXPECT_TRUE(test::Eventually([&] { return metrics->Text().find("qkvshare:leases 0\n") != std::string::npos; }));
  EXPECT_THAT(metrics->Text(), HasSubstr("qkvshare:clients 1\n"));
  server.reset();
  EXPECT_THAT(log,
              HasSubstr(R"("event":"handoff","context":"report","mode":"text","reason":"checksum","failed":false)"));
}

}  // namespace
}  // namespace qkv
