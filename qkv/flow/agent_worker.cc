// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/agent_worker.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "qkv/base/fd.h"
#include "qkv/broker/client.h"
#include "qkv/engine/agent.h"
#include "qkv/flow/agent_protocol.h"

namespace qkv {
namespace {

class Channel {
 public:
  Channel(int in_fd, int out_fd) : in_fd_(in_fd), out_fd_(out_fd) {}

  // The next line; nothing once the runner has hung up. Waits as long as the runner lives, which ends this process too.
  std::optional<std::string> ReadLine() {
    for (;;) {
      if (const size_t end = received_.find('\n', scanned_); end != std::string::npos) {
        std::string line = received_.substr(0, end);
        received_.erase(0, end + 1);
        scanned_ = 0;
        return line;
      }
      scanned_ = received_.size();
      if (received_.size() > kMaxAgentLineBytes) return std::nullopt;
      char buffer[65536];
      const ssize_t n = ::read(in_fd_, buffer, sizeof buffer);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return std::nullopt;
      received_.append(buffer, static_cast<size_t>(n));
    }
  }

  bool Send(const AgentEvent& event) {
    const std::string line = ToLine(event);
    for (size_t sent = 0; sent < line.size();) {
      const ssize_t n = ::write(out_fd_, line.data() + sent, line.size() - sent);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      sent += static_cast<size_t>(n);
    }
    return true;
  }

  template <class Command>
  Result<Command> ReadCommand() {
    const std::optional<std::string> line = ReadLine();
    if (!line) return Err(Code::kPeerLost, "agent worker: the runner hung up");
    QKV_ASSIGN_OR_RETURN(AgentCommand command, ParseAgentCommand(*line));
    if (auto* wanted = std::get_if<Command>(&command)) return std::move(*wanted);
    return Err(Code::kCorrupt, "agent worker: a command out of turn");
  }

 private:
  const int in_fd_;
  const int out_fd_;
  std::string received_;
  size_t scanned_ = 0;
};

Status Serve(Channel& channel) {
  QKV_ASSIGN_OR_RETURN(const AgentSetup setup, channel.ReadCommand<AgentSetup>());
  const auto start = std::chrono::steady_clock::now();
  QKV_ASSIGN_OR_RETURN(const std::shared_ptr<const Model> model, Model::Load(setup.model));
  SequenceOptions options = {.n_ctx = setup.n_ctx, .n_threads = setup.threads, .kv = setup.kv};
  Trace trace(setup.agent);
  if (setup.trace) options.trace = &trace;
  options.on_progress = [&channel](size_t done, size_t total) {
    channel.Send(AgentProgress{static_cast<int64_t>(done), static_cast<int64_t>(total)});
  };
  QKV_ASSIGN_OR_RETURN(auto sequence, Sequence::Create(model, options));
  std::unique_ptr<BrokerClient> broker;
  if (!setup.socket.empty()) {
    QKV_ASSIGN_OR_RETURN(broker, BrokerClient::Connect(setup.socket));
  }
  // Digests are made at the first use; here nobody waits for them yet.
  const std::string tokenizer = model->identity().tokenizer_digest();
  Agent agent(model, std::move(sequence), broker.get());
  const std::chrono::duration<double, std::milli> load = std::chrono::steady_clock::now() - start;
  channel.Send(AgentReady{.load_ms = load.count(), .tokenizer = tokenizer});

  QKV_ASSIGN_OR_RETURN(const AgentTurn turn, channel.ReadCommand<AgentTurn>());
  TurnRequest request;
  request.system = turn.system;
  request.prompt = turn.prompt;
  request.max_tokens = turn.max_tokens;
  request.sampling = turn.sampling;
  request.inherits = turn.inherits;
  request.on_miss = turn.on_miss;
  request.history = turn.history;
  request.publish_as = turn.publish_as;
  request.agent = setup.agent;
  QKV_ASSIGN_OR_RETURN(TurnResult result, agent.Run(request, [&](std::string_view piece) {
    return channel.Send(AgentText{std::string(piece)});
  }));
  channel.Send(AgentDone{std::move(result), trace.Take()});
  while (channel.ReadLine()) {
  }
  return {};
}

}  // namespace

int RunAgentWorker(int in_fd, int out_fd) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  Fd out;
  if (out_fd == STDOUT_FILENO) {
    out = Fd(::fcntl(out_fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
    if (!out.valid() || ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0) return 1;
    out_fd = out.get();
  }
  Channel channel(in_fd, out_fd);
  const Status status = Serve(channel);
  if (status) return 0;
  channel.Send(AgentFailed{status.error()});
  return 1;
}

}  // namespace qkv
