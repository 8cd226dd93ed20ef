// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A child process that is spoken to in lines: ours on its stdin, its on its stdout; what it writes to stderr is kept
// for error messages. Knows nothing of what the lines mean.
//
// Passive: no thread, no call that waits unless it says so. The owner polls the descriptors of AddPollFds, then calls
// Pump, then takes lines. Only this object reaps its child (its pid stays valid until then); the destructor kills and
// reaps whatever is left. The child is in a process group of its own, so that a terminal's Ctrl-C reaches only the
// runner, which then decides. One thread at a time.

#include <poll.h>
#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/base/fd.h"

namespace qkv {

class AgentProcess {
 public:
  // argv[0] is the program's path. Errors: as the system gives them (kNotFound, kDenied, kExhausted, kIo).
  static Result<std::unique_ptr<AgentProcess>> Start(const std::vector<std::string>& argv);
  ~AgentProcess();
  AgentProcess(const AgentProcess&) = delete;
  AgentProcess& operator=(const AgentProcess&) = delete;

  pid_t pid() const { return pid_; }

  void Send(std::string_view line);  // queued; Pump writes what the child takes
  void CloseInput();                 // after what is queued; the child sees the end of its stdin

  void AddPollFds(std::vector<pollfd>& fds) const;
  // Moves bytes in all three directions until nothing moves. kCorrupt when a line is longer than the protocol's limit.
  // A child that is gone is no error here: see output_ended().
  Status Pump();
  std::optional<std::string> NextLine();               // without its newline; what follows the last newline is dropped
  bool output_ended() const { return !out_.valid(); }  // the child closed its stdout, mostly by ending

  void Kill();  // SIGKILL; needs no cooperation
  // True once the child has ended and is reaped. Waits at most that long.
  bool WaitExit(std::chrono::milliseconds deadline);
  // "exited with status 3", "was killed by signal 9 (Killed)", "is running"
  std::string DescribeExit() const;
  bool exited_cleanly() const;

  std::string last_stderr() const;  // the last lines, at most 2 KiB

 private:
  AgentProcess() = default;

  pid_t pid_ = -1;  // -1 once reaped
  Fd pid_fd_;
  Fd in_, out_, err_;
  std::string to_send_;
  bool close_input_ = false;
  std::string received_;
  size_t taken_ = 0;    // bytes at its start that NextLine has handed out
  size_t scanned_ = 0;  // bytes at its start, those included, that need no second look for a newline
  std::string stderr_;
  std::optional<int> wait_status_;
};

}  // namespace qkv
