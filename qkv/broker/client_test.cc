// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// What a client makes of brokers that stop, hang, talk nonsense, or are somebody else's.

#include "qkv/broker/client.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <chrono>
#include <functional>
#include <thread>

#include "qkv/broker/broker_fixture.h"

namespace qkv::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

// A stand-in for a broker: answers the first request as it should, and takes the second one as told.
class StrangeBroker {
 public:
  StrangeBroker(const std::string& path, std::function<void(Fd& client)> second)
      : listener_(Take(ListenAt(path))), thread_([this, second = std::move(second)] {
          pollfd entry{listener_.socket.get(), POLLIN, 0};
          if (::poll(&entry, 1, 20'000) <= 0) return;
          Fd client(::accept4(listener_.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
          BrokerReply done;
          done.mutable_welcome();
          if (!ReceiveMessage(client, Soon()) || !SendMessage(client, done.SerializeAsString(), {}, Soon())) return;
          if (!ReceiveMessage(client, Soon())) return;
          second(client);
        }) {}
  ~StrangeBroker() { thread_.join(); }

 private:
  Listener listener_;
  std::thread thread_;
};

TEST(BrokerClient, ABrokerThatStopsWhileAClientWaitsIsPeerLost) {
  const TemporaryFolder folder;
  const StrangeBroker broker(folder / "b", [](Fd& client) { client.Reset(); });
  const auto client = ConnectTo(folder / "b");
  EXPECT_EQ(Outcome(client->Attach("a")), "peer_lost/peer_lost");
  EXPECT_TRUE(client->lost());
  EXPECT_EQ(Outcome(client->List()), "peer_lost/peer_lost");
}

TEST(BrokerClient, ABrokerThatDoesNotAnswerIsATimeoutAndTheConnectionIsGivenUp) {
  const TemporaryFolder folder;
  const StrangeBroker broker(folder / "b", [](Fd& client) { (void)ReceiveMessage(client, Soon()); });
  const auto client = Take(BrokerClient::Connect(folder / "b", milliseconds(200)));
  const auto start = steady_clock::now();
  EXPECT_EQ(Outcome(client->Attach("a")), "timeout");
  EXPECT_GE(steady_clock::now() - start, milliseconds(200));
  EXPECT_TRUE(client->lost());
  EXPECT_EQ(Outcome(client->List()), "peer_lost/peer_lost");
}

TEST(BrokerClient, ConnectingToABrokerThatDoesNotAnswerIsATimeout) {
  const TemporaryFolder folder;
  const Listener listener = Take(ListenAt(folder / "b"));
  EXPECT_EQ(Outcome(BrokerClient::Connect(folder / "b", milliseconds(50))), "timeout");
}

TEST(BrokerClient, AReplyThatMakesNoSenseIsAnError) {
  const TemporaryFolder folder;
  BrokerReply wrong_kind;
  wrong_kind.mutable_listed();
  BrokerReply no_descriptors;
  no_descriptors.mutable_attached()->set_lease(1);
  no_descriptors.mutable_attached()->set_n_descriptors(3);
  const size_t before = OpenDescriptors();
  for (const std::string& reply : {std::string("\xff\xff"), wrong_kind.SerializeAsString()}) {
    const StrangeBroker broker(folder / "b", [&](Fd& client) { (void)SendMessage(client, reply, {}, Soon()); });
    const auto client = ConnectTo(folder / "b");
    EXPECT_EQ(Outcome(client->Attach("a")), "incompatible/version");
    EXPECT_TRUE(client->lost());
  }
  {
    const StrangeBroker broker(folder / "b", [&](Fd& client) {
      (void)SendMessage(client, no_descriptors.SerializeAsString(), {}, Soon());
      (void)ReceiveMessage(client, Soon());
    });
    const auto client = ConnectTo(folder / "b");
    EXPECT_EQ(Outcome(client->Attach("a")), "incompatible/version");
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

// Runs `body` in a child of another user; its result is the exit status.
int AsNobody(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::setgid(65534) == 0 && ::setuid(65534) == 0 ? body() : 100);
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 101;
}

TEST_F(BrokerTest, AnotherUserCanNeitherReachTheSocketNorGetAnAnswer) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0755), 0);
  const std::string path = server_->socket_path();
  const auto try_it = [&] {
    const auto client = BrokerClient::Connect(path, kLong);
    if (client) return 1;
    return client.error().code == Code::kDenied ? 0 : 2;
  };
  EXPECT_EQ(AsNobody(try_it), 0) << "the socket's mode keeps others out";
  ASSERT_EQ(::chmod(path.c_str(), 0666), 0);
  EXPECT_EQ(AsNobody(try_it), 0) << "and so does the broker";
  EXPECT_THAT(Events().back(), HasSubstr(R"("event":"refused","request":"invalid","code":"denied","reason":"denied")"));
}

TEST_F(BrokerTest, AClientDoesNotTrustABrokerOfAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  ASSERT_EQ(::chmod(folder_.path().c_str(), 01777), 0);
  int ready[2], done[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  ASSERT_EQ(::pipe2(done, O_CLOEXEC), 0);
  const std::string path = folder_ / "trap.sock";
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    ::close(done[1]);
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(1);
    const auto broker = BrokerServer::Start({.socket_path = path});
    if (!broker || ::write(ready[1], "x", 1) != 1) ::_exit(2);
    ::_exit(::read(done[0], &byte, 1) == 0 ? 0 : 3);  // until the parent has tried
  }
  Fd(ready[1]).Reset();
  Fd(done[0]).Reset();
  const Fd ready_end(ready[0]);
  char byte = 0;
  ASSERT_EQ(::read(ready_end.get(), &byte, 1), 1);
  EXPECT_EQ(Outcome(BrokerClient::Connect(path, kLong)), "denied/denied");
  Fd(done[1]).Reset();
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace qkv::test
