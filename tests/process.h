// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For tests: a child process whose output is collected. The destructor kills and reaps what is still running, so that no
// test leaves a process behind.

#include <gtest/gtest.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "qkv/base/fd.h"
#include "qkv/base/test_support.h"

namespace qkv::testing {

using test::Eventually;
using test::TemporaryFolder;

class Process {
 public:
  // argv[0] is the program. Failing to start is a test failure.
  static std::unique_ptr<Process> Start(const std::vector<std::string>& argv) {
    auto process = std::unique_ptr<Process>(new Process);
    int out[2], err[2];
    if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) {
      ADD_FAILURE() << "pipe2 failed";
      return process;
    }
    process->out_ = Fd(out[0]);
    process->err_ = Fd(err[0]);
    const Fd out_end(out[1]), err_end(err[1]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out_end.get(), STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, err_end.get(), STDERR_FILENO);
    std::vector<char*> args;
    for (const std::string& arg : argv) args.push_back(const_cast<char*>(arg.c_str()));
    args.push_back(nullptr);
    if (::posix_spawn(&process->pid_, args[0], &actions, nullptr, args.data(), environ) != 0) {
      ADD_FAILURE() << "cannot start " << argv[0];
      process->pid_ = -1;
    }
    posix_spawn_file_actions_destroy(&actions);
    return process;
  }
  ~Process() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  // Exit status, 128 + signal if killed, or -1 (and a kill) when it takes longer.
  int Wait(std::chrono::milliseconds deadline) {
    const auto end = std::chrono::steady_clock::now() + deadline;
    bool killed = false;
    while (out_.valid() || err_.valid()) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
      if (left.count() <= 0 && !killed) {
        ::kill(pid_, SIGKILL);
        killed = true;
      }
      pollfd fds[] = {{out_.get(), POLLIN, 0}, {err_.get(), POLLIN, 0}};
      ::poll(fds, 2, killed ? 1000 : static_cast<int>(left.count()));
      if (fds[0].revents != 0) Drain(out_, output_);
      if (fds[1].revents != 0) Drain(err_, errors_);
    }
    int status = 0;
    if (pid_ <= 0 || ::waitpid(pid_, &status, 0) != pid_) return -1;
    pid_ = -1;
    if (killed) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  pid_t pid() const { return pid_; }
  const std::string& output() const { return output_; }
  const std::string& errors() const { return errors_; }

 private:
  static void Drain(Fd& fd, std::string& into) {
    char buffer[4096];
    const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
    if (n > 0) {
      into.append(buffer, static_cast<size_t>(n));
    } else {
      fd.Reset();
    }
  }

  pid_t pid_ = -1;
  Fd out_, err_;
  std::string output_, errors_;
};

}  // namespace qkv::testing
