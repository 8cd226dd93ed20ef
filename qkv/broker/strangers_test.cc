// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Who is let in, who sees what, and what a client has after its broker died: over real sockets.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <fstream>
#include <mutex>
#include <set>

#include "qkv/broker/protocol.h"
#include "qkv/broker/server.h"
#include "qkv/broker/test_support.h"

namespace qkv::test {
namespace {

using std::chrono::steady_clock;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

constexpr char kAnn[] = "ann's very secret token";  // almost

class Strangers : public ::testing::Test {
 protected:
  void Start(const std::function<void(BrokerOptions&)>& change = {}) {
    server_.reset();
    BrokerOptions options;
    options.socket_path = folder_ / "broker.sock";
    options.on_event = [this](const std::string& line) {
      const std::lock_guard lock(mutex_);
      events_.push_back(line);
    };
    if (change) change(options);
    server_ = Take(BrokerServer::Start(std::move(options)));
  }
  void StartWithTenants(const std::string& store = "") {
    Start([&](BrokerOptions& options) {
      options.tenants = Take(TenantList::Parse("ann ann'sverysecrettoken\nbob bob'sverysecrettoken\n"));
      options.budget_bytes = 200'000;
      options.store_directory = store;
    });
  }
  Result<std::unique_ptr<BrokerClient>> TryConnect(const std::string& token = "") {
    return BrokerClient::Connect(folder_ / "broker.sock", ConnectOptions{.deadline = kLong, .token = token});
  }
  std::unique_ptr<BrokerClient> Connect(const std::string& token = "") { return Take(TryConnect(token)); }
  std::unique_ptr<BrokerClient> Ann() { return Connect("ann'sverysecrettoken"); }
  std::unique_ptr<BrokerClient> Bob() { return Connect("bob'sverysecrettoken"); }
  static AttachedContext PublishAndAttach(const TestContext& context, BrokerClient& client) {
    EXPECT_EQ(Outcome(context.PublishTo(client)), "ok");
    return Take(client.Attach(context.id()));
  }
  std::string Events() {
    const std::lock_guard lock(mutex_);
    std::string all;
    for (const std::string& line : events_) all += line + "\n";
    return all;
  }

  TemporaryFolder folder_;
  std::mutex mutex_;
  std::vector<std::string> events_;
  std::unique_ptr<BrokerServer> server_;
};

TEST_F(Strangers, OnlyATokenOpensABrokerWithTenants) {
  StartWithTenants();
  for (const std::string& token : {std::string(), std::string(kAnn), std::string("ann"), std::string(256, 'x')}) {
    EXPECT_EQ(Outcome(TryConnect(token)), "denied/denied") << token;
  }
  EXPECT_EQ(Outcome(TryConnect(std::string(257, 'x'))), "invalid_argument");
  EXPECT_EQ(Outcome(TryConnect("ann'sverysecrettoken")), "ok");
  EXPECT_THAT(Events(), Not(HasSubstr("secret"))) << "tokens are in no log";

  // Who does not say hello, or the wrong one, is told nothing at all.
  const Fd socket = Take(ConnectSocket(folder_ / "broker.sock", Soon()));
  BrokerRequest requests[4];
  requests[0].mutable_list();
  requests[1].mutable_attach()->set_id_or_name("a");
  requests[2].mutable_hello()->set_protocol(kProtocolVersion);
  requests[3].mutable_remove()->set_id_or_name("a");
  for (const BrokerRequest& request : requests) {
    ASSERT_TRUE(SendMessage(socket, request.SerializeAsString(), {}, Soon()));
    const auto reply = Take(DecodeReply(Take(ReceiveMessage(socket, Soon())).bytes));
    EXPECT_EQ(reply.failure().code(), "denied");
  }
}

TEST_F(Strangers, ATokenMeansNothingWithoutTenants) {
  Start();
  EXPECT_EQ(Outcome(TryConnect("ann'sverysecrettoken")), "invalid_argument");
  EXPECT_EQ(Outcome(TryConnect()), "ok");
}

TEST_F(Strangers, AnotherTenantsContextIsNotThere) {
  StartWithTenants();
  const auto ann = Ann(), bob = Bob();
  const TestContext context("report");
  const AttachedContext attached = PublishAndAttach(context, *ann);
  for (const std::string& what : {std::string("report"), context.id()}) {
    const auto denied = bob->Attach(what);
    ASSERT_EQ(Outcome(denied), "not_found/not_found");
    EXPECT_EQ(denied.error().message, fmt::format("no context '{}'", what)) << "as for what does not exist at all";
    EXPECT_EQ(Outcome(bob->Remove(what)), "not_found/not_found");
  }
  EXPECT_EQ(Outcome(bob->ReleaseLease(attached.lease)), "not_found/not_found");
  const BrokerStatus seen = Take(bob->List());
  EXPECT_THAT(seen.contexts, IsEmpty());
  EXPECT_EQ(seen.used_bytes, 0u);
  EXPECT_EQ(seen.budget_bytes, 100'000u);

  // The same id and the same name are another context to bob.
  TestContext same("report");
  same.card.set_id(context.id());
  same.SealCard();
  EXPECT_EQ(Outcome(same.PublishTo(*bob)), "ok");
  EXPECT_EQ(Contents(Take(bob->Attach("report")).card), SerializeCard(same.card));
  EXPECT_EQ(Contents(Take(ann->Attach("report")).card), SerializeCard(context.card));
  // Bob's lack of room is not ann's loss.
  for (int i = 0; i < 5; ++i) ASSERT_EQ(Outcome(TestContext("b", {40'960}).PublishTo(*bob)), "ok");
  EXPECT_EQ(Outcome(ann->Attach("report")), "ok");
  EXPECT_THAT(Events(), HasSubstr(R"("tenant":"ann")"));
}

TEST_F(Strangers, ACardThatNamesAnotherTenantIsDenied) {
  StartWithTenants();
  TestContext context("a");
  context.card.set_tenant("ann");
  context.SealCard();
  EXPECT_EQ(Outcome(context.PublishTo(*Bob())), "denied/denied");
  EXPECT_EQ(Outcome(context.PublishTo(*Ann())), "ok");
}

TEST_F(Strangers, DeniedTakesAsLongAsNotThere) {
  StartWithTenants();
  const auto ann = Ann(), bob = Bob();
  const TestContext context("report");
  ASSERT_TRUE(context.PublishTo(*ann));
  const std::string nowhere(32, '0');
  std::vector<double> denied, absent;
  for (int i = 0; i < 400; ++i) {  // in turn, so that what else the machine does hits both
    for (const bool other : {false, true}) {
      const auto start = steady_clock::now();
      ASSERT_FALSE(bob->Attach(other ? context.id() : nowhere));
      (other ? denied : absent).push_back(std::chrono::duration<double>(steady_clock::now() - start).count());
    }
  }
  const auto median = [](std::vector<double>& times) {
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  };
  const double a = median(denied), b = median(absent);
  EXPECT_LT(a, 1.5 * b) << "the same code runs: a lookup among bob's own contexts";
  EXPECT_LT(b, 1.5 * a);
}

TEST_F(Strangers, TenantsHaveDirectoriesOfTheirOwn) {
  StartWithTenants(folder_ / "store");
  const TestContext context("report");
  {
    const auto ann = Ann();
    ASSERT_TRUE(context.PublishTo(*ann));
    ASSERT_TRUE(Eventually([&] { return Take(ann->List()).contexts.at(0).stored; }));
  }
  StartWithTenants(folder_ / "store");
  EXPECT_EQ(Outcome(Bob()->Attach("report")), "not_found/not_found");
  EXPECT_EQ(Outcome(Ann()->Attach("report")), "ok");
  EXPECT_THAT(test::FilesIn(folder_ / "store"), ::testing::ElementsAre("tenant-ann", "tenant-bob"));
}

// Runs in a child that is user nobody; its exit status.
int AsNobody(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(99);
    ::_exit(body());
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(Strangers, AnAllowedUserIsServedAndOthersAreNot) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0711), 0);
  const std::string path = folder_ / "broker.sock";
  const TestContext context("report");
  const auto attach = [&] {  // root's broker is trusted by all
    const auto client = BrokerClient::Connect(path, kLong);
    if (!client) return client.error().code == Code::kDenied ? 1 : 2;
    const auto attached = (*client)->Attach("report");
    if (!attached) return 3;
    const auto again = attached->segments.at(0).ReopenReadOnly();
    return Contents(attached->segments.at(0)) == Contents(context.segments[0]) && again ? 0 : 4;
  };
  Start([](BrokerOptions& options) { options.allowed_uids = {65534}; });
  ASSERT_TRUE(context.PublishTo(*Connect()));
  EXPECT_EQ(AsNobody(attach), 0);
  Start([](BrokerOptions& options) { options.allowed_uids = {65533}; });
  EXPECT_EQ(AsNobody(attach), 1) << "the socket is open, the list is not";
  Start();
  EXPECT_EQ(AsNobody(attach), 1);
}

TEST_F(Strangers, ASocketWhereOthersCouldPutTheirsIsNotMade) {
  ASSERT_EQ(::mkdir((folder_ / "open").c_str(), 0700), 0);
  ASSERT_EQ(::chmod((folder_ / "open").c_str(), 0777), 0);
  EXPECT_EQ(Outcome(BrokerServer::Start({.socket_path = folder_ / "open" + "/s"})), "denied/denied");
  ASSERT_EQ(::chmod((folder_ / "open").c_str(), 01777), 0);
  EXPECT_EQ(Outcome(BrokerServer::Start({.socket_path = folder_ / "open" + "/s"})), "ok") << "as in /tmp";
  const auto made = BrokerServer::Start({.socket_path = folder_ / "made" + "/s"});
  ASSERT_EQ(Outcome(made), "ok");
  struct stat info {};
  ASSERT_EQ(::stat((folder_ / "made").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

// --- a broker that dies ----------------------------------------------------------------------------------

TEST_F(Strangers, AClientOutlivesItsBrokerAndFindsTheNextOne) {
  Start();
  const auto client = Connect();
  const TestContext context("report");
  const AttachedContext attached = PublishAndAttach(context, *client);
  const uint64_t generation = client->generation();
  EXPECT_EQ(Take(client->List()).generation, generation);

  server_.reset();
  EXPECT_TRUE(client->lost());
  EXPECT_EQ(Contents(attached.segments[0]), Contents(context.segments[0])) << "mapped or not, it stays";
  const auto start = steady_clock::now();
  EXPECT_EQ(Outcome(client->Attach("report")), "peer_lost/peer_lost");
  EXPECT_EQ(Outcome(client->Reconnect()), "peer_lost/peer_lost");
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(2));
  EXPECT_TRUE(client->lost());
  EXPECT_EQ(client->poll_fd(), -1);

  Start();
  ASSERT_EQ(Outcome(client->Reconnect()), "ok");
  EXPECT_NE(client->generation(), generation);
  EXPECT_EQ(Outcome(client->Attach("report")), "not_found/not_found") << "a new broker knows nothing";
  EXPECT_EQ(Outcome(client->ReleaseLease(attached.lease)), "not_found/not_found");
  // Whoever attached it can announce it as well as who made it.
  std::vector<const Fd*> segments = {&attached.segments[0]};
  ASSERT_EQ(Outcome(client->Publish(attached.card, segments)), "ok");
  const AttachedContext again = Take(client->Attach("report"));
  EXPECT_EQ(Contents(again.card), SerializeCard(context.card));
  EXPECT_NE(again.lease, attached.lease) << "a number of the broker before must not mean another lease now";
  EXPECT_EQ(Outcome(client->ReleaseLease(attached.lease)), "not_found/not_found");
  EXPECT_EQ(Outcome(client->ReleaseLease(again.lease)), "ok");
}

TEST_F(Strangers, ALostConnectionToTheSameBrokerLosesLeasesOnly) {
  Start();
  const auto client = Connect();
  const TestContext context("report");
  const AttachedContext attached = PublishAndAttach(context, *client);
  const uint64_t generation = client->generation();
  ASSERT_EQ(Outcome(client->Reconnect()), "ok");
  EXPECT_EQ(client->generation(), generation);
  EXPECT_EQ(Outcome(client->ReleaseLease(attached.lease)), "not_found/not_found");
  EXPECT_EQ(Outcome(client->Attach("report")), "ok");
}

// --- memory ----------------------------------------------------------------------------------------------

TEST_F(Strangers, TheBudgetCountsWhatTheKernelCounts) {
  Start();
  const auto client = Connect();
  for (const size_t bytes : {5000, 8192, 100'001}) {
    ASSERT_TRUE(TestContext(fmt::format("c{}", bytes), {bytes}).PublishTo(*client));
  }
  uint64_t kernel = 0;
  std::set<ino_t> seen;
  for (const auto& link : std::filesystem::directory_iterator("/proc/self/fd")) {
    struct stat info {};
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(link.path(), error);
    if (target.find("memfd:qkv") == std::string::npos || ::stat(link.path().c_str(), &info) != 0) continue;
    if (seen.insert(info.st_ino).second) kernel += static_cast<uint64_t>(info.st_blocks) * 512;
  }
  EXPECT_EQ(Take(client->List()).used_bytes, kernel);
}

TEST_F(Strangers, FewDescriptorsAreMetWithPoolFull) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit tight{std::min<rlim_t>(test::OpenDescriptors() + 60, limit.rlim_max), limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  Start();
  const auto client = Connect();
  std::string outcome = "ok";
  for (int i = 0; i < 60 && outcome == "ok"; ++i) outcome = Outcome(TestContext("a").PublishTo(*client, {.pin = true}));
  const auto listed = client->List();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(outcome, "exhausted/pool_full");
  ASSERT_TRUE(listed) << listed.error().message;
  EXPECT_THAT(listed->contexts, Not(IsEmpty()));
}

}  // namespace
}  // namespace qkv::test
