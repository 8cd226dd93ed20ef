// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Broker and clients together, over real sockets.

#include "qkv/broker/server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <atomic>
#include <random>
#include <set>

#include "qkv/broker/broker_fixture.h"
#include "qkv/broker/protocol.h"
#include "qkv/broker/test_support.h"

namespace qkv::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST_F(BrokerTest, AConsumerAttachesWhatAProducerPublished) {
  const TestContext context("summary", {8192, 16384});
  const auto producer = Connect();
  const auto consumer = Connect();
  ASSERT_EQ(Outcome(context.PublishTo(*producer)), "ok");
  const AttachedContext attached = Take(consumer->Attach("summary"));
  EXPECT_EQ(attached.id, context.id());
  EXPECT_NE(attached.lease, 0);
  EXPECT_EQ(Contents(attached.card), SerializeCard(context.card));
  ASSERT_EQ(attached.segments.size(), 2);
  EXPECT_EQ(Contents(attached.segments[0]), std::vector<std::byte>(8192, std::byte{1}));
  EXPECT_EQ(Contents(attached.segments[1]), std::vector<std::byte>(16384, std::byte{2}));
  EXPECT_EQ(Take(consumer->Attach(context.id())).id, context.id());
}

TEST_F(BrokerTest, NobodyCanChangeWhatTheyAttached) {
  const TestContext context("a");
  const auto client = Connect();
  ASSERT_TRUE(context.PublishTo(*client));
  AttachedContext attached = Take(client->Attach("a"));
  attached.segments.push_back(std::move(attached.card));
  for (const Fd& fd : attached.segments) {
    EXPECT_EQ(::fcntl(fd.get(), F_GETFL) & O_ACCMODE, O_RDONLY);
    EXPECT_EQ(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    EXPECT_TRUE(IsSealed(fd));
    EXPECT_EQ(::mmap(nullptr, 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0), MAP_FAILED);
    // Reopening it for writing, where the system allows that at all, does not get past the seals.
    const Fd again(::open(fmt::format("/proc/self/fd/{}", fd.get()).c_str(), O_RDWR | O_CLOEXEC));
    if (!again.valid()) continue;
    EXPECT_EQ(::mmap(nullptr, 16, PROT_READ | PROT_WRITE, MAP_SHARED, again.get(), 0), MAP_FAILED);
    EXPECT_EQ(::pwrite(again.get(), "x", 1, 0), -1);
    EXPECT_EQ(::ftruncate(again.get(), 1), -1);
  }
}

TEST_F(BrokerTest, ListsWhatItHolds) {
  const TestContext a("first", {8192, 8192});
  TestContext b("second");
  b.card.set_created_unix_ms(1'600'000'000'000);  // older, published later
  b.SealCard();
  const auto client = Connect();
  EXPECT_THAT(Take(client->List()).contexts, IsEmpty());
  ASSERT_TRUE(a.PublishTo(*client, {.pin = true}));
  ASSERT_TRUE(b.PublishTo(*client));
  ASSERT_TRUE(client->Attach("second"));
  const BrokerStatus status = Take(client->List());
  ASSERT_THAT(status.contexts, SizeIs(2));
  EXPECT_EQ(status.contexts[0].name, "second");
  EXPECT_EQ(status.contexts[0].n_leases, 1);
  EXPECT_EQ(status.contexts[0].n_tokens, 32);
  EXPECT_FALSE(status.contexts[0].pinned);
  const ContextInfo& info = status.contexts[1];
  EXPECT_EQ(info.id, a.id());
  EXPECT_EQ(info.name, "first");
  EXPECT_EQ(info.model, "tiny");
  EXPECT_EQ(info.kv, "i8");
  EXPECT_EQ(info.n_tokens, 64);
  EXPECT_EQ(info.bytes, 2 * 8192);
  EXPECT_EQ(info.producer_pid, ::getpid());
  EXPECT_EQ(info.created_unix_ms, 1'700'000'000'000);
  EXPECT_EQ(info.expires_unix_ms, 0);
  EXPECT_TRUE(info.pinned);
  EXPECT_EQ(info.n_leases, 0);
  EXPECT_EQ(status.used_bytes, 3 * 8192 + a.card_memory() + b.card_memory());
  EXPECT_EQ(status.budget_bytes, uint64_t{1} << 30);
}

TEST_F(BrokerTest, ListsMoreThanOneMessageHolds) {
  const auto client = Connect();
  const std::string long_name(180, 'n');
  std::set<std::string> ids;
  const Fd shared = SealedBytes(5000, 1);  // so that they stay within half of even 1024 descriptors
  for (int i = 0; i < 300; ++i) {          // about 250 bytes each, of the 64 KiB of a message
    TestContext context(fmt::format("{}{}", long_name, i), {5000});
    context.segments[0] = Take(shared.Duplicate());
    ASSERT_TRUE(context.PublishTo(*client));
    ids.insert(context.id());
  }
  std::set<std::string> listed;
  const BrokerStatus status = Take(client->List());
  for (const ContextInfo& info : status.contexts) listed.insert(info.id);
  EXPECT_THAT(status.contexts, SizeIs(300));
  EXPECT_EQ(listed, ids);
}

TEST_F(BrokerTest, LeasesAreCountedAndReleased) {
  const TestContext context("a");
  const auto one = Connect();
  const auto two = Connect();
  ASSERT_TRUE(context.PublishTo(*one));
  const uint64_t lease = Take(one->Attach("a")).lease;
  ASSERT_TRUE(two->Attach("a"));
  EXPECT_EQ(Info(*one, context.id()).n_leases, 2);
  EXPECT_EQ(Outcome(two->ReleaseLease(lease)), "not_found/not_found");
  EXPECT_EQ(Outcome(one->ReleaseLease(lease)), "ok");
  EXPECT_EQ(Outcome(one->ReleaseLease(lease)), "not_found/not_found");
  EXPECT_EQ(Info(*one, context.id()).n_leases, 1);
}

TEST_F(BrokerTest, RemovingForgetsAContextButTakesItFromNobody) {
  const TestContext context("a");
  const auto client = Connect();
  ASSERT_TRUE(context.PublishTo(*client));
  const AttachedContext attached = Take(client->Attach("a"));
  EXPECT_EQ(Outcome(client->Remove("a")), "ok");
  EXPECT_EQ(Outcome(client->Remove("a")), "not_found/not_found");
  EXPECT_EQ(Outcome(client->Attach(context.id())), "not_found/not_found");
  EXPECT_EQ(Take(client->List()).used_bytes, 0);
  EXPECT_EQ(Contents(attached.segments[0]), std::vector<std::byte>(8192, std::byte{1}));
  EXPECT_EQ(Outcome(client->ReleaseLease(attached.lease)), "ok");
}

TEST_F(BrokerTest, SaysThatItDoesNotKnowAContext) {
  const auto client = Connect();
  const auto attached = client->Attach("nobody");
  ASSERT_EQ(Outcome(attached), "not_found/not_found");
  EXPECT_THAT(attached.error().message, HasSubstr("no context 'nobody'"));
  EXPECT_EQ(Outcome(client->Attach("../etc")), "invalid_argument");
  EXPECT_EQ(Outcome(client->Attach("")), "invalid_argument");
  EXPECT_FALSE(client->lost());
}

TEST_F(BrokerTest, AContextExpires) {
  const TestContext context("a");
  const auto client = Connect();
  ASSERT_TRUE(context.PublishTo(*client, {.ttl = milliseconds(40)}));
  const AttachedContext attached = Take(client->Attach("a"));
  EXPECT_GT(Info(*client, context.id()).expires_unix_ms, 0);
  // Without being asked: descriptors must not be held until somebody happens to call.
  EXPECT_TRUE(Eventually([&] { return Events().back().find("\"expired\"") != std::string::npos; }));
  EXPECT_EQ(Outcome(client->Attach("a")), "incompatible/expired");
  EXPECT_EQ(Take(client->List()).used_bytes, 0);
  EXPECT_EQ(Contents(attached.segments[0]).size(), 8192);
  EXPECT_EQ(Outcome(context.PublishTo(*client)), "ok");
  EXPECT_EQ(Outcome(client->Attach("a")), "ok");
}

TEST_F(BrokerTest, TheEarlierOfCardAndTtlCounts) {
  const auto client = Connect();
  TestContext far("far");
  far.card.set_expires_unix_ms(INT64_C(4'000'000'000'000));
  far.SealCard();
  ASSERT_TRUE(far.PublishTo(*client));
  EXPECT_EQ(Info(*client, far.id()).expires_unix_ms, INT64_C(4'000'000'000'000));
  ASSERT_TRUE(far.PublishTo(*client, {.ttl = std::chrono::hours(1)}));
  EXPECT_LT(Info(*client, far.id()).expires_unix_ms, INT64_C(4'000'000'000'000));
  TestContext past("past");
  past.card.set_expires_unix_ms(1'700'000'000'001);
  past.SealCard();
  EXPECT_EQ(Outcome(past.PublishTo(*client)), "incompatible/expired");
  EXPECT_EQ(Outcome(far.PublishTo(*client, {.ttl = milliseconds(-1)})), "invalid_argument");
}

TEST_F(BrokerTest, ASecondContextOfANameTakesItOver) {
  const TestContext old_one("summary");
  const TestContext new_one("summary");
  const auto client = Connect();
  ASSERT_TRUE(old_one.PublishTo(*client));
  ASSERT_TRUE(new_one.PublishTo(*client));
  EXPECT_EQ(Take(client->Attach("summary")).id, new_one.id());
  EXPECT_EQ(Take(client->Attach(old_one.id())).id, old_one.id());
}

TEST_F(BrokerTest, AnIdBelongsToOneCard) {
  TestContext context("a");
  const auto client = Connect();
  ASSERT_TRUE(context.PublishTo(*client));
  EXPECT_EQ(Outcome(context.PublishTo(*client)), "ok");
  EXPECT_THAT(Take(client->List()).contexts, SizeIs(1));
  context.card.set_name("b");
  context.SealCard();
  EXPECT_EQ(Outcome(context.PublishTo(*client)), "invalid_argument");
  EXPECT_EQ(Info(*client, context.id()).name, "a");
}

TEST_F(BrokerTest, SharedSegmentsAreCountedOnce) {
  const TestContext parent("parent", {8192});
  TestContext fork("fork", {8192, 12288});
  fork.segments[0] = Take(parent.segments[0].Duplicate());
  const auto client = Connect();
  ASSERT_TRUE(parent.PublishTo(*client));
  ASSERT_TRUE(fork.PublishTo(*client));
  EXPECT_EQ(Take(client->List()).used_bytes, 8192 + 12288 + parent.card_memory() + fork.card_memory());
}

TEST_F(BrokerTest, EvictsToMakeRoomAndSaysWhenItCannot) {
  const TestContext a("a", {20'000}), b("b", {20'000}), c("c", {20'000});
  Start(2 * (20'480 + 4'096) + 1);  // whole pages of 4096
  const auto client = Connect();
  ASSERT_TRUE(a.PublishTo(*client));
  ASSERT_TRUE(b.PublishTo(*client, {.pin = true}));
  const AttachedContext attached = Take(client->Attach("a"));
  EXPECT_EQ(Outcome(c.PublishTo(*client)), "exhausted/pool_full");
  EXPECT_THAT(Take(client->List()).contexts, SizeIs(2));
  ASSERT_TRUE(client->ReleaseLease(attached.lease));
  EXPECT_EQ(Outcome(c.PublishTo(*client)), "ok");
  EXPECT_EQ(Outcome(client->Attach("a")), "not_found/not_found");
  EXPECT_EQ(Outcome(client->Attach("b")), "ok");
  EXPECT_EQ(Contents(attached.segments[0]).size(), 20'000);
}

TEST_F(BrokerTest, RefusesWhatIsNotSealedOrNotAsTheCardSays) {
  const auto client = Connect();
  TestContext unsealed("a");
  unsealed.segments[0] = Take(CreateMemfd("unsealed"));
  ASSERT_EQ(::ftruncate(unsealed.segments[0].get(), 8192), 0);
  EXPECT_EQ(Outcome(unsealed.PublishTo(*client)), "denied/denied");
  TestContext fewer("b", {8192, 8192});
  fewer.segments.pop_back();
  EXPECT_EQ(Outcome(fewer.PublishTo(*client)), "invalid_argument");
  TestContext closed("c");
  closed.segments[0].Reset();
  EXPECT_EQ(Outcome(closed.PublishTo(*client)), "invalid_argument");
  EXPECT_THAT(Take(client->List()).contexts, IsEmpty());
  EXPECT_FALSE(client->lost());
}

TEST_F(BrokerTest, MovesMoreSegmentsThanOneMessageCarries) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  if (limit.rlim_max < 8000) GTEST_SKIP() << "the system allows " << limit.rlim_max << " open files";
  limit.rlim_cur = std::max<rlim_t>(limit.rlim_cur, 8000);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  Start();
  const auto client = Connect();
  for (const size_t n : {252, 253, 600}) {  // with the card: exactly one message, one more, three
    std::vector<size_t> sizes;
    for (size_t i = 0; i < n; ++i) sizes.push_back(5000 + i);
    const TestContext context(fmt::format("wide{}", n), sizes);
    ASSERT_EQ(Outcome(context.PublishTo(*client)), "ok");
    const AttachedContext attached = Take(client->Attach(context.id()));
    ASSERT_EQ(attached.segments.size(), n);
    EXPECT_EQ(Contents(attached.card), SerializeCard(context.card));
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(Contents(attached.segments[i]), std::vector<std::byte>(5000 + i, static_cast<std::byte>(i + 1)));
    }
  }
}

TEST_F(BrokerTest, AnUnfinishedPublishIsForgottenWithTheNextRequest) {
  const TestContext context("a", {8192, 8192});
  const Fd socket = ConnectRaw();
  const size_t before = OpenDescriptors();
  BrokerRequest publish;
  publish.mutable_publish()->set_n_descriptors(3);
  BrokerRequest more;
  more.mutable_more_descriptors();
  BrokerRequest list;
  list.mutable_list();

  const auto first = Ask(socket, publish.SerializeAsString(), {context.card_fd.get(), context.segments[0].get()});
  ASSERT_EQ(OutcomeOf(first), "ok");
  EXPECT_EQ(first->published().n_missing(), 1);
  ASSERT_EQ(Ask(socket, list.SerializeAsString())->listed().contexts_size(), 0);
  EXPECT_EQ(OutcomeOf(Ask(socket, more.SerializeAsString(), {context.segments[1].get()})), "invalid_argument");
  ExpectOpenDescriptors(before);

  ASSERT_EQ(OutcomeOf(Ask(socket, publish.SerializeAsString(), {context.card_fd.get()})), "ok");
  const int segment = context.segments[0].get();
  EXPECT_EQ(OutcomeOf(Ask(socket, more.SerializeAsString(), {segment, segment, segment})), "invalid_argument");
  ExpectOpenDescriptors(before);

  ASSERT_EQ(OutcomeOf(Ask(socket, publish.SerializeAsString(), {context.card_fd.get()})), "ok");
  ASSERT_EQ(Ask(socket, more.SerializeAsString(), {segment})->published().n_missing(), 1);
  ASSERT_EQ(Ask(socket, more.SerializeAsString(), {segment})->published().n_missing(), 0);
  EXPECT_EQ(Ask(socket, list.SerializeAsString())->listed().contexts_size(), 1);
}

TEST_F(BrokerTest, ALeaseHasNoDescriptorsBehindItsLast) {
  const TestContext context("a");
  const auto client = Connect();
  ASSERT_TRUE(context.PublishTo(*client));
  const Fd socket = ConnectRaw();
  BrokerRequest request;
  request.mutable_attach()->set_id_or_name("a");
  const auto attached = Ask(socket, request.SerializeAsString());
  ASSERT_EQ(OutcomeOf(attached), "ok");
  request.mutable_fetch_descriptors()->set_lease(attached->attached().lease());
  for (const auto& [first, outcome] :
       {std::pair{0u, "ok"}, {1u, "ok"}, {2u, "invalid_argument"}, {UINT32_MAX, "invalid_argument"}}) {
    request.mutable_fetch_descriptors()->set_first(first);
    EXPECT_EQ(OutcomeOf(Ask(socket, request.SerializeAsString())), outcome) << first;
  }
  request.mutable_fetch_descriptors()->set_lease(12345);
  EXPECT_EQ(OutcomeOf(Ask(socket, request.SerializeAsString())), "not_found/not_found");
}

TEST_F(BrokerTest, AClientThatHangsUpLosesItsLeasesAndNothingElse) {
  const TestContext context("a");
  auto producer = Connect();
  ASSERT_TRUE(context.PublishTo(*producer));
  auto consumer = Connect();
  const AttachedContext attached = Take(consumer->Attach("a"));
  const auto observer = Connect();
  ASSERT_EQ(Info(*observer, context.id()).n_leases, 1);
  producer.reset();
  consumer.reset();
  EXPECT_TRUE(Eventually([&] { return Info(*observer, context.id()).n_leases == 0; }));
  EXPECT_EQ(Contents(attached.segments[0]).size(), 8192);
  EXPECT_EQ(Outcome(observer->Attach("a")), "ok") << "although its producer is gone";
}

TEST_F(BrokerTest, AClientThatIsKilledLosesItsLeases) {
  const auto observer = Connect();
  const TestContext context("a");
  ASSERT_TRUE(context.PublishTo(*observer));
  std::unique_ptr<BrokerClient> client;
  const pid_t child = ForkAndWait([&] { return (client = Connect())->Attach("a").has_value(); });
  EXPECT_EQ(Info(*observer, context.id()).n_leases, 1);
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(Eventually([&] { return Info(*observer, context.id()).n_leases == 0; }));
}

TEST_F(BrokerTest, APublishBeforeAnImmediateHangUpCounts) {
  const TestContext context("a");
  Fd socket = ConnectRaw();
  BrokerRequest publish;
  publish.mutable_publish()->set_n_descriptors(2);
  const std::vector<int> fds = {context.card_fd.get(), context.segments[0].get()};
  ASSERT_TRUE(SendMessage(socket, publish.SerializeAsString(), fds, Soon()));
  socket.Reset();
  const auto observer = Connect();
  EXPECT_TRUE(Eventually([&] { return Take(observer->List()).contexts.size() == 1; }));
}

TEST_F(BrokerTest, TwoHundredCyclesLeaveNoDescriptorBehind) {
  const auto observer = Connect();
  const size_t before = OpenDescriptors();
  for (int i = 0; i < 200; ++i) {
    const TestContext context("cycle", {5000, 5000, 5000});
    const auto producer = Connect();
    const auto consumer = Connect();
    ASSERT_TRUE(context.PublishTo(*producer));
    const AttachedContext attached = Take(consumer->Attach("cycle"));
    if (i % 2 == 0) {
      ASSERT_TRUE(consumer->ReleaseLease(attached.lease));
    }
    TestContext refused("refused", {5000});
    refused.segments[0] = SealedBytes(5001, 1);
    ASSERT_FALSE(refused.PublishTo(*producer));
    ASSERT_TRUE((i % 3 == 0 ? consumer : producer)->Remove("cycle"));
  }
  ExpectOpenDescriptors(before);
  EXPECT_EQ(Take(observer->List()).used_bytes, 0);
}

TEST_F(BrokerTest, ManyClientsAtOnce) {
  std::atomic<int> n_failed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto client = Connect();
      for (int i = 0; i < 50; ++i) {
        const TestContext context(fmt::format("thread{}", t), {5000, 5000});
        const bool published = context.PublishTo(*client).has_value();
        const auto attached = client->Attach(context.id());
        const bool ok = published && attached && Contents(attached->card) == SerializeCard(context.card) &&
                        client->List() && client->ReleaseLease(attached->lease) && client->Remove(context.id());
        if (!ok) ++n_failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(n_failed, 0);
  const auto client = Connect();
  EXPECT_EQ(Take(client->List()).used_bytes, 0);
}

TEST_F(BrokerTest, AClientTooManyIsToldSo) {
  Start(1 << 20, 2);
  const auto one = Connect();
  auto two = Connect();
  const auto three = BrokerClient::Connect(server_->socket_path(), kLong);
  ASSERT_EQ(Outcome(three), "exhausted/pool_full");
  EXPECT_THAT(three.error().message, HasSubstr("serves 2 clients already"));
  EXPECT_EQ(Outcome(one->List()), "ok");
  two.reset();
  EXPECT_TRUE(Eventually([&] { return BrokerClient::Connect(server_->socket_path(), kLong).has_value(); }));
}

TEST_F(BrokerTest, ABrokerOutOfDescriptorsTakesTheClientLater) {
  const auto observer = Connect();
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const Fd highest = Take(SealedBytes(1, 1).Duplicate());
  rlimit tight = limit;
  tight.rlim_cur = static_cast<rlim_t>(highest.get()) + 1;
  std::vector<Fd> fill;  // every descriptor up to the limit but the one that the client's socket takes
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  for (auto fd = highest.Duplicate(); fd; fd = highest.Duplicate()) fill.push_back(*std::move(fd));
  if (!fill.empty()) fill.pop_back();
  const auto client = ConnectSocket(server_->socket_path(), Soon());
  BrokerRequest hello;
  hello.mutable_hello()->set_protocol(kProtocolVersion);
  const auto sent = client ? SendMessage(*client, hello.SerializeAsString(), {}, Soon()) : Status();
  const auto early = client ? Outcome(ReceiveMessage(*client, steady_clock::now() + milliseconds(30))) : "no client";
  const auto meanwhile = Outcome(observer->List());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_EQ(Outcome(client), "ok");
  ASSERT_EQ(Outcome(sent), "ok");
  EXPECT_EQ(early, "timeout");
  EXPECT_EQ(meanwhile, "ok") << "clients that are there are served";
  EXPECT_EQ(Outcome(ReceiveMessage(*client, Soon())), "ok");
}

TEST_F(BrokerTest, AClientThatNeverReadsIsDropped) {
  const auto observer = Connect();
  const TestContext context("a");
  ASSERT_TRUE(context.PublishTo(*observer));
  const Fd deaf = ConnectRaw();
  BrokerRequest request;
  request.mutable_attach()->set_id_or_name("a");
  const std::string bytes = request.SerializeAsString();
  std::string outcome = "ok";
  for (const Deadline end = Soon(); outcome == "ok" && steady_clock::now() < end;) {
    outcome = Outcome(SendMessage(deaf, bytes, {}, Soon()));
  }
  EXPECT_EQ(outcome, "peer_lost/peer_lost");
  EXPECT_TRUE(Eventually([&] { return Info(*observer, context.id()).n_leases == 0; }));
}

TEST_F(BrokerTest, GarbageGetsAnErrorAndTheConnectionGoesOn) {
  const Fd socket = ConnectRaw();
  const Fd stray = SealedBytes(10, 1);
  BrokerRequest list;
  list.mutable_list();
  const size_t before = OpenDescriptors();
  EXPECT_EQ(OutcomeOf(Ask(socket, "\xff\xff\xff\xff")), "invalid_argument");
  EXPECT_EQ(OutcomeOf(Ask(socket, std::string(kMaxMessageBytes, '\0'))), "invalid_argument");
  EXPECT_EQ(OutcomeOf(Ask(socket, list.SerializeAsString(), {stray.get()})), "invalid_argument");
  const std::string oversized(kMaxMessageBytes + 1, 'x');
  ASSERT_EQ(::send(socket.get(), oversized.data(), oversized.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(oversized.size()));
  EXPECT_TRUE(Take(DecodeReply(Take(ReceiveMessage(socket, Soon())).bytes)).has_failure());
  ExpectOpenDescriptors(before);
  EXPECT_EQ(OutcomeOf(Ask(socket, list.SerializeAsString())), "ok");
}

TEST_F(BrokerTest, SurvivesAStormOfDamagedMessages) {
  const TestContext context("a", {5000, 5000});
  const Fd stranger(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::vector<int> pool = {context.card_fd.get(), context.segments[0].get(), context.segments[1].get(),
                                 stranger.get()};
  std::vector<std::string> seeds;
  BrokerRequest request;
  request.mutable_publish()->set_n_descriptors(3);
  seeds.push_back(request.SerializeAsString());
  request.mutable_more_descriptors();
  seeds.push_back(request.SerializeAsString());
  request.mutable_attach()->set_id_or_name("a");
  seeds.push_back(request.SerializeAsString());
  request.mutable_fetch_descriptors()->set_lease(1);
  seeds.push_back(request.SerializeAsString());
  request.mutable_release_lease()->set_lease(1);
  seeds.push_back(request.SerializeAsString());
  request.mutable_remove()->set_id_or_name("a");
  seeds.push_back(request.SerializeAsString());
  request.mutable_list();
  seeds.push_back(request.SerializeAsString());

  const auto observer = Connect();
  const size_t before = OpenDescriptors();
  size_t n_ok = 0;
  size_t n_refused = 0;
  {
    std::mt19937 random(7);
    Fd socket = ConnectRaw();
    for (int i = 0; i < 5000; ++i) {
      std::string bytes = seeds[random() % seeds.size()];
      if (random() % 2 == 0) bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
      if (random() % 16 == 0) {
        for (char& c : bytes) c = static_cast<char>(random());
      }
      std::vector<int> fds;
      for (uint32_t n = random() % 4; n > 0; --n) fds.push_back(pool[random() % pool.size()]);
      if (random() % 8 == 0) fds.assign(pool.begin(), pool.begin() + 3);
      const auto reply = Ask(socket, bytes, fds);
      ASSERT_TRUE(reply) << reply.error().message;
      ++(reply->has_failure() ? n_refused : n_ok);
      if (random() % 100 == 0) socket = ConnectRaw();
    }
  }
  EXPECT_GT(n_ok, 200);
  EXPECT_GT(n_refused, 500);
  for (const ContextInfo& info : Take(observer->List()).contexts) EXPECT_TRUE(observer->Remove(info.id));
  ExpectOpenDescriptors(before);
  EXPECT_EQ(Outcome(context.PublishTo(*observer)), "ok");
}

TEST_F(BrokerTest, ARestartedBrokerTakesContextsAnnouncedAgain) {
  const TestContext context("a");
  const auto producer = Connect();
  const auto consumer = Connect();
  ASSERT_TRUE(context.PublishTo(*producer));
  const AttachedContext attached = Take(consumer->Attach("a"));
  const uint64_t generation = Take(producer->List()).generation;

  server_.reset();
  EXPECT_TRUE(producer->lost());
  EXPECT_EQ(Outcome(producer->List()), "peer_lost/peer_lost");
  EXPECT_EQ(Outcome(consumer->Attach("a")), "peer_lost/peer_lost");
  EXPECT_EQ(Outcome(consumer->ReleaseLease(attached.lease)), "peer_lost/peer_lost");
  EXPECT_EQ(Outcome(context.PublishTo(*producer)), "peer_lost/peer_lost");
  EXPECT_EQ(Outcome(BrokerClient::Connect(folder_ / "broker.sock")), "peer_lost/peer_lost");
  EXPECT_EQ(Contents(attached.segments[0]), std::vector<std::byte>(8192, std::byte{1}));

  Start();
  const auto again = Connect();
  EXPECT_NE(Take(again->List()).generation, generation);
  EXPECT_EQ(Outcome(again->Attach("a")), "not_found/not_found");
  // The consumer can announce it as well: with the read-only descriptors that it was given.
  const std::vector<const Fd*> segments = {&attached.segments[0]};
  EXPECT_EQ(Outcome(again->Publish(attached.card, segments)), "ok");
  EXPECT_EQ(Outcome(context.PublishTo(*again)), "ok");
  EXPECT_EQ(Contents(Take(again->Attach("a")).card), SerializeCard(context.card));
}

TEST_F(BrokerTest, OneBrokerPerPath) {
  const auto second = BrokerServer::Start({.socket_path = server_->socket_path()});
  ASSERT_EQ(Outcome(second), "invalid_argument");
  EXPECT_THAT(second.error().message, HasSubstr("in use by another broker"));
  EXPECT_EQ(Outcome(Connect()->List()), "ok");
}

TEST_F(BrokerTest, ReplacesTheSocketOfABrokerThatWasKilled) {
  const std::string path = folder_ / "killed.sock";
  std::unique_ptr<BrokerServer> broker;
  const pid_t child =
      ForkAndWait([&] { return (broker = Take(BrokerServer::Start({.socket_path = path}))) != nullptr; });
  EXPECT_EQ(Outcome(BrokerServer::Start({.socket_path = path})), "invalid_argument");
  const auto client = ConnectTo(path);
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(client->lost());
  ASSERT_TRUE(std::filesystem::exists(path));
  EXPECT_EQ(Outcome(BrokerServer::Start({.socket_path = path})), "ok");
}

TEST_F(BrokerTest, StoppingRemovesTheSocketAndClosesEverything) {
  server_.reset();
  const size_t before = OpenDescriptors();
  Start();
  const TestContext context("a");
  const auto client = Connect();
  ASSERT_TRUE(context.PublishTo(*client));
  server_.reset();
  EXPECT_FALSE(std::filesystem::exists(folder_ / "broker.sock"));
  EXPECT_EQ(OpenDescriptors(), before + 3) << "the client's socket, and the context as its producer holds it";
}

TEST_F(BrokerTest, StoppingWhileClientsCallLeavesNobodyHanging) {
  std::atomic<int> n_done{0};
  std::atomic<int> n_wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      const auto client = Connect();
      std::string outcome = "ok";
      for (++n_done; outcome == "ok";) outcome = Outcome(client->List());
      if (outcome != "peer_lost/peer_lost") ++n_wrong;
    });
  }
  ASSERT_TRUE(Eventually([&] { return n_done == 4; }));
  server_.reset();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(n_wrong, 0);
}

TEST_F(BrokerTest, TellsItsLifeInLinesOfJson) {
  const TestContext context("a");
  auto client = Connect();
  ASSERT_TRUE(context.PublishTo(*client));
  const uint64_t lease = Take(client->Attach("a")).lease;
  ASSERT_TRUE(client->ReleaseLease(lease));
  ASSERT_TRUE(client->Attach("a"));
  ASSERT_FALSE(client->Attach("b"));
  client.reset();
  ASSERT_TRUE(Eventually([&] { return Events().size() == 7; }));
  ASSERT_TRUE(Connect()->Remove("a"));
  ASSERT_TRUE(Eventually([&] { return Events().size() == 8; }));
  const std::string end = fmt::format(R"("pid":{}}})", ::getpid());
  const auto event = [&](std::string_view kind) {
    return AllOf(HasSubstr(fmt::format(R"("event":"{}","id":"{}","name":"a","bytes":8192)", kind, context.id())),
                 EndsWith(end));
  };
  const auto refusal =
      AllOf(HasSubstr(R"("event":"refused","request":"attach","code":"not_found","reason":"not_found")"),
            HasSubstr(R"("message":"no context 'b'")"), EndsWith(end));
  EXPECT_THAT(Events(), ElementsAre(event("created"), event("published"), event("attached"), event("released"),
                                    event("attached"), refusal, event("released"), event("removed")));
}

TEST(DefaultSocketPath, FollowsTheEnvironment) {
  const auto get = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  const std::string socket = get("QKVSHARE_SOCKET");
  const std::string runtime = get("XDG_RUNTIME_DIR");
  ::setenv("QKVSHARE_SOCKET", "/a/b", 1);
  ::setenv("XDG_RUNTIME_DIR", "/run/user/7", 1);
  EXPECT_EQ(DefaultSocketPath(), "/a/b");
  ::unsetenv("QKVSHARE_SOCKET");
  EXPECT_EQ(DefaultSocketPath(), "/run/user/7/qkvshare/broker.sock");
  ::setenv("XDG_RUNTIME_DIR", "", 1);
  EXPECT_THAT(DefaultSocketPath(), HasSubstr(fmt::format("/qkvshare-{}/broker.sock", ::geteuid())));
  if (!socket.empty()) ::setenv("QKVSHARE_SOCKET", socket.c_str(), 1);
  if (!runtime.empty()) ::setenv("XDG_RUNTIME_DIR", runtime.c_str(), 1);
}

}  // namespace
}  // namespace qkv::test
