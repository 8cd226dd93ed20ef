// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/agent_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "qkv/flow/agent_protocol.h"

namespace qkv {
namespace {

constexpr size_t kKeptStderrBytes = 2048;

// The child's ends must not be 0, 1 or 2, or one dup2 in the child would overwrite the next one's source.
Result<Fd> AboveStdio(Fd fd) {
  if (fd.get() > STDERR_FILENO) return fd;
  Fd moved(::fcntl(fd.get(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  if (!moved.valid()) return ErrnoError("fcntl");
  return moved;
}

struct Channel {
  Fd ours;
  Fd child;
};

// A socket for what we write: unlike a pipe it can be told not to raise SIGPIPE.
Result<Channel> MakeInput() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) return ErrnoError("socketpair");
  Channel channel{Fd(fds[0]), Fd(fds[1])};
  QKV_ASSIGN_OR_RETURN(channel.child, AboveStdio(std::move(channel.child)));
  return channel;
}

Result<Channel> MakeOutput() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) return ErrnoError("pipe");
  Channel channel{Fd(fds[0]), Fd(fds[1])};
  if (::fcntl(fds[0], F_SETFL, O_NONBLOCK) != 0) return ErrnoError("fcntl");
  QKV_ASSIGN_OR_RETURN(channel.child, AboveStdio(std::move(channel.child)));
  return channel;
}

// Reads all there is; closes `fd` at the end of the file.
void Drain(Fd& fd, std::string& to, size_t at_most) {
  char buffer[65536];
  while (fd.valid() && to.size() <= at_most) {
    const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
    if (n > 0) {
      to.append(buffer, static_cast<size_t>(n));
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else if (n < 0 && errno == EAGAIN) {
      return;
    } else {
      fd.Reset();
    }
  }
}

}  // namespace

Result<std::unique_ptr<AgentProcess>> AgentProcess::Start(const std::vector<std::string>& argv) {
  QKV_CHECK(!argv.empty());
  QKV_ASSIGN_OR_RETURN(Channel in, MakeInput());
  QKV_ASSIGN_OR_RETURN(Channel out, MakeOutput());
  QKV_ASSIGN_OR_RETURN(Channel err, MakeOutput());

  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  QKV_CHECK(::posix_spawn_file_actions_init(&actions) == 0 && ::posix_spawnattr_init(&attributes) == 0);
  sigset_t none, defaults;
  ::sigemptyset(&none);
  ::sigemptyset(&defaults);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGCHLD}) ::sigaddset(&defaults, signal);
  int failed = ::posix_spawn_file_actions_adddup2(&actions, in.child.get(), STDIN_FILENO);
  if (failed == 0) failed = ::posix_spawn_file_actions_adddup2(&actions, out.child.get(), STDOUT_FILENO);
  if (failed == 0) failed = ::posix_spawn_file_actions_adddup2(&actions, err.child.get(), STDERR_FILENO);
  if (failed == 0) failed = ::posix_spawnattr_setsigmask(&attributes, &none);
  if (failed == 0) failed = ::posix_spawnattr_setsigdefault(&attributes, &defaults);
  if (failed == 0) failed = ::posix_spawnattr_setpgroup(&attributes, 0);
  if (failed == 0) {
    failed =
        ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
  }
  pid_t pid = -1;
  if (failed == 0) failed = ::posix_spawn(&pid, argv[0].c_str(), &actions, &attributes, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (failed != 0) {
    errno = failed;
    return ErrnoError("cannot start " + argv[0]);
  }

  std::unique_ptr<AgentProcess> process(new AgentProcess);
  process->pid_ = pid;
  process->in_ = std::move(in.ours);
  process->out_ = std::move(out.ours);
  process->err_ = std::move(err.ours);
  // glibc has pidfd_open only since 2.36.
  process->pid_fd_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!process->pid_fd_.valid()) return ErrnoError("pidfd_open");
  return process;
}

AgentProcess::~AgentProcess() {
  if (pid_ < 0) return;
  Kill();
  // A process that even SIGKILL can't end within this time is stuck in the kernel; init will have it.
  WaitExit(std::chrono::seconds(5));
}

void AgentProcess::Send(std::string_view line) {
  QKV_CHECK(!close_input_);
  to_send_ += line;
}

void AgentProcess::CloseInput() {
  close_input_ = true;
  if (to_send_.empty()) in_.Reset();
}

void AgentProcess::AddPollFds(std::vector<pollfd>& fds) const {
  if (in_.valid() && !to_send_.empty()) fds.push_back({in_.get(), POLLOUT, 0});
  if (out_.valid()) fds.push_back({out_.get(), POLLIN, 0});
  if (err_.valid()) fds.push_back({err_.get(), POLLIN, 0});
}

Status AgentProcess::Pump() {
  size_t sent = 0;
  while (in_.valid() && sent < to_send_.size()) {
    const ssize_t n = ::send(in_.get(), to_send_.data() + sent, to_send_.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      in_.Reset();  // it reads no more; its end is seen on its stdout
    }
  }
  to_send_.erase(0, in_.valid() ? sent : std::string::npos);
  if (close_input_ && to_send_.empty()) in_.Reset();

  received_.erase(0, taken_);
  scanned_ -= std::exchange(taken_, 0);
  Drain(out_, received_, kMaxAgentLineBytes);
  Drain(err_, stderr_, 16 * kKeptStderrBytes);
  if (stderr_.size() > kKeptStderrBytes) stderr_.erase(0, stderr_.size() - kKeptStderrBytes);

  if (received_.size() > kMaxAgentLineBytes && received_.find('\n', scanned_) == std::string::npos) {
    received_.clear();
    scanned_ = 0;
    return Err(Code::kCorrupt, "a line of more than {} bytes", kMaxAgentLineBytes);
  }
  return {};
}

std::optional<std::string> AgentProcess::NextLine() {
  const size_t end = received_.find('\n', scanned_);
  if (end == std::string::npos) {
    scanned_ = received_.size();
    return std::nullopt;
  }
  std::string line = received_.substr(taken_, end - taken_);
  taken_ = scanned_ = end + 1;
  return line;
}

void AgentProcess::Kill() {
  if (pid_ > 0) ::kill(pid_, SIGKILL);
}

bool AgentProcess::WaitExit(std::chrono::milliseconds deadline) {
  const auto until = std::chrono::steady_clock::now() + deadline;
  while (pid_ > 0) {
    int status = 0;
    const pid_t reaped = ::waitpid(pid_, &status, WNOHANG);
    if (reaped == pid_ || (reaped < 0 && errno == ECHILD)) {  // ECHILD: somebody ignores SIGCHLD
      wait_status_ = status;
      pid_ = -1;
      break;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()).count();
    if (left <= 0) return false;
    pollfd fd{pid_fd_.get(), POLLIN, 0};
    ::poll(&fd, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
  }
  return true;
}

std::string AgentProcess::DescribeExit() const {
  if (!wait_status_) return "is running";
  if (WIFSIGNALED(*wait_status_)) {
    const int signal = WTERMSIG(*wait_status_);
    return fmt::format("was killed by signal {} ({})", signal, ::strsignal(signal));
  }
  return fmt::format("exited with status {}", WEXITSTATUS(*wait_status_));
}

bool AgentProcess::exited_cleanly() const {
  return wait_status_ && WIFEXITED(*wait_status_) && WEXITSTATUS(*wait_status_) == 0;
}

std::string AgentProcess::last_stderr() const {
  const size_t end = stderr_.find_last_not_of(" \n\r\t");
  return end == std::string::npos ? "" : stderr_.substr(0, end + 1);
}

}  // namespace qkv
