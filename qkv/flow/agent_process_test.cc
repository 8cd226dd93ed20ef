// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/agent_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>

namespace qkv {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::Optional;

constexpr seconds kPatience{20};  // far more than anything here takes

std::unique_ptr<AgentProcess> Shell(const std::string& script) {
  auto process = AgentProcess::Start({"/bin/sh", "-c", script});
  EXPECT_TRUE(process) << process.error().message;
  return *std::move(process);
}

// Polls and pumps until `done` says so; false when the time is up or Pump fails.
template <class Done>
bool PumpUntil(AgentProcess& process, Done done) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < until) {
    if (!process.Pump()) return false;
    if (done()) return true;
    std::vector<pollfd> fds;
    process.AddPollFds(fds);
    ::poll(fds.data(), fds.size(), 100);
  }
  return false;
}

std::optional<std::string> Line(AgentProcess& process) {
  std::optional<std::string> line;
  PumpUntil(process, [&] {
    line = process.NextLine();
    return line || process.output_ended();
  });
  return line;
}

bool IsGone(pid_t pid) {
  return ::kill(pid, 0) < 0 && errno == ESRCH;
}

TEST(AgentProcess, IsSpokenToInLines) {
  auto process = Shell("while read line; do echo \"got $line\"; done");
  process->Send("one\n");
  process->Send("two\n");
  EXPECT_THAT(Line(*process), Optional(std::string("got one")));
  EXPECT_THAT(Line(*process), Optional(std::string("got two")));
  process->CloseInput();
  EXPECT_EQ(Line(*process), std::nullopt);
  EXPECT_TRUE(process->WaitExit(kPatience));
  EXPECT_TRUE(process->exited_cleanly());
}

TEST(AgentProcess, LinesMayComeInPiecesAndTogether) {
  auto process = Shell("printf 'a\\nb\\n\\nc'; read go; printf 'd\\ndropped'");
  EXPECT_THAT(Line(*process), Optional(std::string("a")));
  EXPECT_THAT(Line(*process), Optional(std::string("b")));
  EXPECT_THAT(Line(*process), Optional(std::string("")));
  EXPECT_EQ(process->NextLine(), std::nullopt);
  process->Send("go\n");
  EXPECT_THAT(Line(*process), Optional(std::string("cd")));
  EXPECT_EQ(Line(*process), std::nullopt);
}

TEST(AgentProcess, LargeInputArrivesWhole) {
  auto process = Shell("exec wc -c");
  process->Send(std::string(size_t{8} << 20, 'x'));
  process->CloseInput();
  EXPECT_THAT(Line(*process), Optional(std::string("8388608")));
}

TEST(AgentProcess, LargeLineArrivesWhole) {
  auto process = Shell("head -c 8388608 /dev/zero | tr '\\0' x; echo; echo end");
  EXPECT_EQ(Line(*process).value_or(""), std::string(size_t{8} << 20, 'x'));
  EXPECT_THAT(Line(*process), Optional(std::string("end")));
}

TEST(AgentProcess, ChildThatReadsNothingHoldsNobodyUp) {
  auto process = Shell("exec sleep 60");
  process->Send(std::string(size_t{8} << 20, 'x'));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(process->Pump());
  EXPECT_FALSE(process->WaitExit(milliseconds(1)));
  EXPECT_EQ(process->DescribeExit(), "is running");
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(10));
}

TEST(AgentProcess, WritingToAChildThatIsGoneDoesNotKillUs) {
  auto process = Shell("exit 0");
  ASSERT_TRUE(process->WaitExit(kPatience));
  process->Send("hello\n");
  EXPECT_TRUE(process->Pump());
  EXPECT_TRUE(process->Pump());
}

TEST(AgentProcess, CrashIsDescribed) {
  auto process = Shell("kill -9 $$");
  EXPECT_TRUE(PumpUntil(*process, [&] { return process->output_ended(); }));
  ASSERT_TRUE(process->WaitExit(kPatience));
  EXPECT_EQ(process->DescribeExit(), "was killed by signal 9 (Killed)");
  EXPECT_FALSE(process->exited_cleanly());
}

TEST(AgentProcess, ExitStatusAndLastWordsAreKept) {
  auto process = Shell("echo first >&2; echo 'last words' >&2; exit 3");
  ASSERT_TRUE(process->WaitExit(kPatience));
  EXPECT_TRUE(process->Pump());
  EXPECT_EQ(process->DescribeExit(), "exited with status 3");
  EXPECT_EQ(process->last_stderr(), "first\nlast words");
}

TEST(AgentProcess, OnlyTheEndOfALongStderrIsKept) {
  auto process = Shell("head -c 1000000 /dev/zero | tr '\\0' x >&2; echo END >&2");
  EXPECT_TRUE(PumpUntil(*process, [&] { return process->last_stderr().ends_with("END"); }));
  EXPECT_LE(process->last_stderr().size(), 2048u);
}

TEST(AgentProcess, EndlessLineIsRefused) {
  auto process = Shell("exec cat /dev/zero");
  Status status;
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (status && std::chrono::steady_clock::now() < until) {
    status = process->Pump();
    EXPECT_EQ(process->NextLine(), std::nullopt);
  }
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Code::kCorrupt);
}

TEST(AgentProcess, KillEndsAChildThatIgnoresEverythingElse) {
  auto process = Shell("trap '' TERM INT HUP; echo ready; while :; do read x || :; done");
  ASSERT_THAT(Line(*process), Optional(std::string("ready")));
  const pid_t pid = process->pid();
  process->Kill();
  EXPECT_TRUE(process->WaitExit(kPatience));
  EXPECT_TRUE(IsGone(pid));
}

TEST(AgentProcess, DestructorLeavesNoProcessAndNoZombie) {
  auto process = Shell("echo ready; exec sleep 60");
  ASSERT_THAT(Line(*process), Optional(std::string("ready")));
  const pid_t pid = process->pid();
  EXPECT_FALSE(IsGone(pid));
  process.reset();
  EXPECT_TRUE(IsGone(pid));
}

TEST(AgentProcess, WaitForAChildThatStaysEndsWithTheDeadline) {
  auto process = Shell("exec sleep 60");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(process->WaitExit(milliseconds(30)));
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(30));
}

TEST(AgentProcess, MissingProgramIsNotFound) {
  auto process = AgentProcess::Start({"/nowhere/to/be/found"});
  ASSERT_FALSE(process);
  EXPECT_EQ(process.error().code, Code::kNotFound);
  EXPECT_EQ(process.error().message, "cannot start /nowhere/to/be/found: No such file or directory");
}

TEST(AgentProcess, TerminalSignalsDoNotReachIt) {
  auto process = Shell("echo ready; exec sleep 60");
  ASSERT_THAT(Line(*process), Optional(std::string("ready")));
  EXPECT_EQ(::getpgid(process->pid()), process->pid());
}

TEST(AgentProcess, SignalsBlockedOrIgnoredHereAreDefaultThere) {
  sigset_t blocked, before;
  ::sigemptyset(&blocked);
  ::sigaddset(&blocked, SIGINT);
  ASSERT_EQ(::pthread_sigmask(SIG_BLOCK, &blocked, &before), 0);
  const auto old = ::signal(SIGPIPE, SIG_IGN);
  auto process = Shell("grep -E '^Sig(Blk|Ign)' /proc/self/status");
  ::signal(SIGPIPE, old);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  EXPECT_THAT(Line(*process), Optional(std::string("SigBlk:\t0000000000000000")));
  const unsigned long ignored = std::stoul(Line(*process).value_or("x:ffffffffffffffff").substr(7), nullptr, 16);
  EXPECT_EQ(ignored & (1ul << (SIGPIPE - 1)), 0ul);
}

TEST(AgentProcess, ChildrenDoNotHoldEachOthersChannels) {
  const auto sockets_seen = [] {
    auto process = Shell("ls -l /proc/self/fd | grep -c socket");
    return Line(*process).value_or("");
  };
  const std::string alone = sockets_seen();
  auto one = Shell("exec sleep 60");
  auto two = Shell("exec sleep 60");
  EXPECT_EQ(sockets_seen(), alone);
}

}  // namespace
}  // namespace qkv
