// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <barrier>
#include <fstream>
#include <optional>

#include "qkv/broker/test_support.h"

namespace qkv::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

struct Pair {
  Fd a, b;
  Pair() {
    int fds[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) std::abort();
    a = Fd(fds[0]);
    b = Fd(fds[1]);
  }
};

// As a peer would that does not go through SendMessage.
void SendRaw(const Fd& socket, std::string bytes, const std::vector<int>& fds) {
  iovec part{bytes.data(), bytes.size()};
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
  }
  ASSERT_EQ(::sendmsg(socket.get(), &header, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

// A socket file that nobody listens on, as a broker leaves behind that was killed.
void LeaveStaleSocket(const std::string& path) {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, path.c_str());
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(socket.get(), 1), 0);
}

TEST(Socket, AMessageArrivesWithItsDescriptorsInOrder) {
  const Pair pair;
  std::vector<Fd> files;
  std::vector<int> fds;
  for (uint8_t i = 1; i <= 3; ++i) {
    files.push_back(SealedBytes(i, i));
    fds.push_back(files.back().get());
  }
  ASSERT_EQ(Outcome(SendMessage(pair.a, "hello", fds, Soon())), "ok");
  const Datagram message = Take(ReceiveMessage(pair.b, Soon()));
  EXPECT_EQ(message.bytes, "hello");
  ASSERT_EQ(message.fds.size(), 3);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(Contents(message.fds[i]), std::vector<std::byte>(i + 1, std::byte(i + 1)));
    EXPECT_EQ(::fcntl(message.fds[i].get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  }
}

TEST(Socket, AMessageOfTheGreatestSizesArrivesWhole) {
  const size_t before = OpenDescriptors();
  {
    const Pair pair;
    const Fd file = SealedBytes(10, 1);
    const std::vector<int> fds(kMaxDescriptorsPerMessage, file.get());
    std::string bytes(kMaxMessageBytes, 'x');
    bytes.back() = 'y';
    ASSERT_EQ(Outcome(SendMessage(pair.a, bytes, fds, Soon())), "ok");
    const Datagram message = Take(ReceiveMessage(pair.b, Soon()));
    EXPECT_EQ(message.bytes, bytes);
    EXPECT_EQ(message.fds.size(), kMaxDescriptorsPerMessage);
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(Socket, RefusesToSendWhatIsOverTheLimits) {
  const Pair pair;
  const std::vector<int> fds(kMaxDescriptorsPerMessage + 1, pair.a.get());
  EXPECT_EQ(Outcome(SendMessage(pair.a, "x", fds, Soon())), "invalid_argument");
  EXPECT_EQ(Outcome(SendMessage(pair.a, std::string(kMaxMessageBytes + 1, 'x'), {}, Soon())), "invalid_argument");
  EXPECT_EQ(Outcome(SendMessage(pair.a, "", {}, Soon())), "invalid_argument");
  EXPECT_EQ(Outcome(ReceiveMessage(pair.b, kDontWait)), "timeout");
}

TEST(Socket, ATruncatedMessageIsAnErrorThatLeaksNothingAndEndsNothing) {
  const Pair pair;
  const Fd file = SealedBytes(1, 1);
  const size_t before = OpenDescriptors();
  SendRaw(pair.a, std::string(kMaxMessageBytes + 1, 'x'), {file.get(), file.get()});
  SendRaw(pair.a, "next", {});
  EXPECT_EQ(Outcome(ReceiveMessage(pair.b, Soon())), "invalid_argument");
  EXPECT_EQ(OpenDescriptors(), before);
  EXPECT_EQ(Take(ReceiveMessage(pair.b, Soon())).bytes, "next");
}

TEST(Socket, AnEmptyMessageIsAHangUpEvenIfItCarriesDescriptors) {
  const Pair pair;
  const Fd file = SealedBytes(1, 1);
  const size_t before = OpenDescriptors();
  SendRaw(pair.a, "", {file.get()});
  EXPECT_EQ(Outcome(ReceiveMessage(pair.b, Soon())), "peer_lost/peer_lost");
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(Socket, DescriptorsThatOurOwnLimitCutsOffAreAnErrorThatLeaksNothing) {
  const Pair pair;
  const Fd file = SealedBytes(1, 1);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const size_t before = OpenDescriptors();
  const Fd highest = Take(file.Duplicate());
  SendRaw(pair.a, "many", std::vector<int>(20, file.get()));
  rlimit tight = limit;
  tight.rlim_cur = static_cast<rlim_t>(highest.get()) + 5;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  const auto received = ReceiveMessage(pair.b, Soon());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(Outcome(received), "exhausted/pool_full");
  EXPECT_EQ(OpenDescriptors(), before + 1);
  SendRaw(pair.a, "next", {});
  EXPECT_EQ(Take(ReceiveMessage(pair.b, Soon())).bytes, "next");
}

TEST(Socket, ReceivingEndsAtTheDeadline) {
  const Pair pair;
  const auto start = steady_clock::now();
  EXPECT_EQ(Outcome(ReceiveMessage(pair.a, start + milliseconds(30))), "timeout");
  EXPECT_GE(steady_clock::now() - start, milliseconds(30));
  EXPECT_EQ(Outcome(ReceiveMessage(pair.a, start)), "timeout");
}

TEST(Socket, SendingToSomebodyWhoDoesNotReadEndsAtTheDeadline) {
  const Pair pair;
  const std::string bytes(kMaxMessageBytes, 'x');
  std::string outcome = "ok";
  for (int i = 0; i < 1000 && outcome == "ok"; ++i) outcome = Outcome(SendMessage(pair.a, bytes, {}, kDontWait));
  ASSERT_EQ(outcome, "timeout");
  const auto start = steady_clock::now();
  EXPECT_EQ(Outcome(SendMessage(pair.a, bytes, {}, start + milliseconds(30))), "timeout");
  EXPECT_GE(steady_clock::now() - start, milliseconds(30));
  // Nothing is half sent: as soon as there is room, the next message goes out whole.
  EXPECT_EQ(Take(ReceiveMessage(pair.b, Soon())).bytes, bytes);
  EXPECT_EQ(Outcome(SendMessage(pair.a, bytes, {}, Soon())), "ok");
}

TEST(Socket, AHangUpIsPeerLostAndNoSignal) {
  Pair pair;
  ASSERT_TRUE(SendMessage(pair.b, "last words", {}, Soon()));
  ASSERT_TRUE(SendMessage(pair.a, "never read", {}, Soon()));
  pair.b.Reset();
  EXPECT_EQ(Outcome(SendMessage(pair.a, "x", {}, Soon())), "peer_lost/peer_lost");
  EXPECT_EQ(Take(ReceiveMessage(pair.a, Soon())).bytes, "last words");
  EXPECT_EQ(Outcome(ReceiveMessage(pair.a, Soon())), "peer_lost/peer_lost");
}

TEST(Socket, WhatAPeerSaidBeforeItHungUpOnUnreadMessagesStillArrives) {
  Pair pair;
  ASSERT_TRUE(SendMessage(pair.b, "why", {}, Soon()));
  ASSERT_TRUE(SendMessage(pair.a, "never read", {}, Soon()));
  pair.b.Reset();  // ECONNRESET comes first, once
  EXPECT_EQ(Take(ReceiveMessage(pair.a, Soon())).bytes, "why");
  EXPECT_EQ(Outcome(ReceiveMessage(pair.a, Soon())), "peer_lost/peer_lost");
}

TEST(Socket, MessagesInFlightDoNotLeakWhenNobodyReadsThem) {
  const size_t before = OpenDescriptors();
  {
    const Pair pair;
    const Fd file = SealedBytes(1, 1);
    for (int i = 0; i < 10; ++i) SendRaw(pair.a, "x", {file.get()});
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(Socket, KnowsWhoIsAtTheOtherEnd) {
  const Pair pair;
  const Peer peer = Take(PeerOf(pair.a));
  EXPECT_EQ(peer.pid, ::getpid());
  EXPECT_EQ(peer.uid, ::geteuid());
  EXPECT_TRUE(IsTrusted(peer));
  EXPECT_TRUE(IsTrusted({1, 0}));
  EXPECT_FALSE(IsTrusted({1, ::geteuid() + 1}));
}

TEST(Listener, MakesItsDirectoryAndASocketForItsUserOnly) {
  const TemporaryFolder folder;
  const std::string path = folder / "made/broker.sock";
  const mode_t before = ::umask(0);
  const auto listener = ListenAt(path);
  ::umask(before);
  ASSERT_EQ(Outcome(listener), "ok");
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600);
  ASSERT_EQ(::stat((folder / "made").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700);
  EXPECT_EQ(Outcome(ConnectSocket(path, Soon())), "ok");
}

TEST(Listener, RefusesAPathThatNoSocketCanHave) {
  const size_t longest = sizeof(sockaddr_un::sun_path) - 1;
  EXPECT_EQ(Outcome(ListenAt("")), "invalid_argument");
  EXPECT_EQ(Outcome(ConnectSocket("", Soon())), "invalid_argument");
  EXPECT_EQ(Outcome(ListenAt(std::string("a\0b", 3))), "invalid_argument");
  const TemporaryFolder folder;
  const std::string base = folder / "";
  const std::string fits = base + std::string(longest - base.size(), 'x');
  EXPECT_EQ(Outcome(ListenAt(fits)), "ok");
  const auto too_long = ListenAt(fits + "x");
  ASSERT_EQ(Outcome(too_long), "invalid_argument");
  EXPECT_THAT(too_long.error().message, HasSubstr("has 108 bytes, expected 1 to 107"));
  EXPECT_EQ(Outcome(ConnectSocket(fits + "x", Soon())), "invalid_argument");
}

TEST(Listener, SaysWhyItCannotListen) {
  const TemporaryFolder folder;
  const auto missing = ListenAt(folder / "a/b/broker.sock");
  ASSERT_EQ(Outcome(missing), "not_found");
  EXPECT_THAT(missing.error().message, HasSubstr("a/b'"));
  std::ofstream(folder / "file") << "precious";
  const auto under_a_file = ListenAt(folder / "file/broker.sock");
  ASSERT_EQ(Outcome(under_a_file), "not_found");
  EXPECT_THAT(under_a_file.error().message, HasSubstr("Not a directory"));
  const auto on_a_file = ListenAt(folder / "file");
  ASSERT_EQ(Outcome(on_a_file), "invalid_argument");
  EXPECT_THAT(on_a_file.error().message, HasSubstr("is not a socket"));
  std::string text;
  std::ifstream(folder / "file") >> text;
  EXPECT_EQ(text, "precious");
}

TEST(Listener, MayNotListenInSomebodyElsesDirectory) {
  const TemporaryFolder folder;
  ASSERT_EQ(::chmod(folder.path().c_str(), 0555), 0);
  const std::string path = folder / "broker.sock";
  const pid_t child = ::fork();
  if (child == 0) {  // root may write everywhere
    if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) ::_exit(1);
    const auto listener = ListenAt(path);
    ::_exit(!listener && listener.error().code == Code::kDenied ? 0 : 2);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ASSERT_EQ(::chmod(folder.path().c_str(), 0700), 0);
}

TEST(Listener, APathHasOneOwnerAtATime) {
  const TemporaryFolder folder;
  const std::string path = folder / "broker.sock";
  auto first = ListenAt(path);
  ASSERT_EQ(Outcome(first), "ok");
  const auto second = ListenAt(path);
  ASSERT_EQ(Outcome(second), "invalid_argument");
  EXPECT_THAT(second.error().message, HasSubstr("in use by another broker"));
  EXPECT_EQ(Outcome(ConnectSocket(path, Soon())), "ok");
  first = Err(Code::kInternal, "closed");
  EXPECT_EQ(Outcome(ConnectSocket(path, Soon())), "peer_lost/peer_lost");
  EXPECT_EQ(Outcome(ListenAt(path)), "ok") << "the socket left behind is stale";
}

TEST(Listener, LeavesTheSocketOfAnotherProgramAlone) {
  const TemporaryFolder folder;
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    const std::string path = folder / std::to_string(type);
    const Fd other(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path.c_str());
    ASSERT_EQ(::bind(other.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(::listen(other.get(), 1), 0);
    EXPECT_EQ(Outcome(ListenAt(path)), "invalid_argument");
    EXPECT_TRUE(std::filesystem::exists(path));
  }
}

TEST(Listener, OfManyThatStartAtOnceOneOwnsThePath) {
  const TemporaryFolder folder;
  constexpr int kRounds = 40;
  constexpr int kThreads = 4;
  for (int round = 0; round < kRounds; ++round) {
    const std::string path = folder / std::to_string(round);
    LeaveStaleSocket(path);
    std::vector<std::optional<Result<Listener>>> listeners(kThreads);
    std::barrier start(kThreads);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        start.arrive_and_wait();
        listeners[static_cast<size_t>(t)].emplace(ListenAt(path));
      });
    }
    for (std::thread& thread : threads) thread.join();
    int n_ok = 0;
    for (const auto& listener : listeners) n_ok += listener->has_value() ? 1 : 0;
    ASSERT_EQ(n_ok, 1) << "round " << round;
    EXPECT_EQ(Outcome(ConnectSocket(path, Soon())), "ok") << "the winner's socket is the one at the path";
  }
}

TEST(Connecting, SaysThatNobodyListens) {
  const TemporaryFolder folder;
  EXPECT_EQ(Outcome(ConnectSocket(folder / "nothing", Soon())), "peer_lost/peer_lost");
  LeaveStaleSocket(folder / "stale");
  EXPECT_EQ(Outcome(ConnectSocket(folder / "stale", Soon())), "peer_lost/peer_lost");
}

TEST(Connecting, ToABrokerThatDoesNotAcceptEndsAtTheDeadline) {
  const TemporaryFolder folder;
  const Listener listener = Take(ListenAt(folder / "broker.sock"));
  std::vector<Fd> waiting;
  std::string outcome = "ok";
  for (int i = 0; i < 1000 && outcome == "ok"; ++i) {
    auto socket = ConnectSocket(folder / "broker.sock", steady_clock::now() + milliseconds(20));
    outcome = Outcome(socket);
    if (socket) waiting.push_back(*std::move(socket));
  }
  EXPECT_EQ(outcome, "timeout");
}

}  // namespace
}  // namespace qkv::test
