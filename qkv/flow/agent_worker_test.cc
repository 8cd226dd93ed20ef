// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/agent_worker.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <optional>
#include <string>

#include "qkv/base/fd.h"
#include "qkv/flow/agent_protocol.h"

namespace qkv {
namespace {

using ::testing::HasSubstr;

struct Pipe {
  Fd read, write;
  static Pipe Make() {
    int fds[2];
    EXPECT_EQ(::pipe2(fds, O_CLOEXEC), 0);
    return {Fd(fds[0]), Fd(fds[1])};
  }
};

// All until the last writer is gone, or nothing if that takes too long.
std::optional<std::string> ReadToEnd(const Fd& fd) {
  std::string text;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (std::chrono::steady_clock::now() < until) {
    pollfd poll_fd{fd.get(), POLLIN, 0};
    if (::poll(&poll_fd, 1, 100) <= 0) continue;
    char buffer[4096];
    const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
    if (n <= 0) return text;
    text.append(buffer, static_cast<size_t>(n));
  }
  return std::nullopt;
}

// The worker in a process of its own.
struct Outcome {
  int exit_status = -1;
  std::string output;
};
Outcome RunWorker(const std::string& input, bool on_stdout = false) {
  Pipe in = Pipe::Make(), out = Pipe::Make();
  const pid_t pid = ::fork();
  if (pid == 0) {
    in.write.Reset();
    out.read.Reset();
    int out_fd = out.write.get();
    if (on_stdout) out_fd = ::dup2(out_fd, STDOUT_FILENO);
    ::_exit(RunAgentWorker(in.read.get(), out_fd));
  }
  in.read.Reset();
  out.write.Reset();
  EXPECT_EQ(::write(in.write.get(), input.data(), input.size()), static_cast<ssize_t>(input.size()));
  in.write.Reset();
  Outcome outcome;
  const auto output = ReadToEnd(out.read);
  EXPECT_TRUE(output.has_value()) << "the worker stays";
  if (!output) ::kill(pid, SIGKILL);
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  outcome.output = output.value_or("");
  if (WIFEXITED(status)) outcome.exit_status = WEXITSTATUS(status);
  return outcome;
}

Error ErrorIn(const std::string& output) {
  const auto event = ParseAgentEvent(output.substr(0, output.find('\n')));
  EXPECT_TRUE(event && std::holds_alternative<AgentFailed>(*event)) << output;
  return event && std::holds_alternative<AgentFailed>(*event) ? std::get<AgentFailed>(*event).error : Error{};
}

TEST(AgentWorker, ReportsAModelThatIsNotThere) {
  for (const bool on_stdout : {false, true}) {
    const Outcome outcome = RunWorker(ToLine(AgentSetup{.model = "/nowhere/model.gguf"}), on_stdout);
    EXPECT_EQ(outcome.exit_status, 1);
    const Error error = ErrorIn(outcome.output);
    EXPECT_EQ(error.code, Code::kNotFound);
    EXPECT_THAT(error.message, HasSubstr("/nowhere/model.gguf"));
  }
}

TEST(AgentWorker, ReportsGarbageAndCommandsOutOfTurn) {
  EXPECT_EQ(ErrorIn(RunWorker("garbage\n").output).code, Code::kCorrupt);
  EXPECT_EQ(ErrorIn(RunWorker(ToLine(AgentTurn{})).output).message, "agent worker: a command out of turn");
}

TEST(AgentWorker, EndsWhenTheRunnerHangsUp) {
  const Outcome outcome = RunWorker("");
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_EQ(ErrorIn(outcome.output).code, Code::kPeerLost);
}

TEST(AgentWorker, DiesWithTheProcessThatStartedIt) {
  Pipe in = Pipe::Make(), out = Pipe::Make();  // `in` stays open here: no hang-up tells the worker
  const pid_t starter = ::fork();
  if (starter == 0) {
    in.write.Reset();
    out.read.Reset();
    const pid_t worker = ::fork();
    if (worker == 0) ::_exit(RunAgentWorker(in.read.get(), out.write.get()));
    // Until it sleeps, which it does in reading its input only.
    for (std::string stat; stat.find(") S ") == std::string::npos;) {
      std::ifstream file("/proc/" + std::to_string(worker) + "/stat");
      std::getline(file, stat);
    }
    ::_exit(0);
  }
  out.write.Reset();
  ASSERT_EQ(::waitpid(starter, nullptr, 0), starter);
  EXPECT_EQ(ReadToEnd(out.read), "") << "its end of the pipe closes, and it said nothing";
}

}  // namespace
}  // namespace qkv
