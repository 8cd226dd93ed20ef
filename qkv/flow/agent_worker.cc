// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/agent_worker.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "qkv/base/fd.h"
#include "qkv/broker/client.h"
#include "qkv/engine/agent.h"
#include "qkv/engine/calibration.h"
#include "qkv/engine/layer_sensitivity.h"
#include "qkv/flow/agent_protocol.h"

namespace qkv {
namespace {

using Clock = std::chrono::steady_clock;
double MsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// How long a worker keeps what its last turn left when nobody has said what comes next. Letting go takes milliseconds, which
// would be somebody else's if it were done at once: the next agent is just reading its prompt.
constexpr std::chrono::milliseconds kKeepFor{200};

class Channel {
 public:
  Channel(int in_fd, int out_fd) : in_fd_(in_fd), out_fd_(out_fd) {}

  // Whether there is more to read, or the runner has hung up, within that time.
  bool WaitForMore(std::chrono::milliseconds most) {
    if (received_.find('\n', scanned_) != std::string::npos) return true;
    pollfd fd{in_fd_, POLLIN, 0};
    return ::poll(&fd, 1, static_cast<int>(most.count())) != 0;
  }

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

 private:
  const int in_fd_;
  const int out_fd_;
  std::string received_;
  size_t scanned_ = 0;
};

class Worker {
 public:
  explicit Worker(Channel& channel) : channel_(channel) {}

  Status Serve() {
    const std::optional<std::string> line = channel_.ReadLine();
    if (!line) return Err(Code::kPeerLost, "agent worker: the runner hung up");
    QKV_ASSIGN_OR_RETURN(const AgentCommand first, ParseAgentCommand(*line));
    const auto* setup = std::get_if<AgentSetup>(&first);
    if (setup == nullptr) return Err(Code::kCorrupt, "agent worker: a command out of turn");
    socket_ = setup->socket;
    refine_ = setup->refine;
    const auto start = Clock::now();
    // If it cannot be opened, the weights are packed anew.
    PackedWeights packed{Fd(), setup->packed_digest};
    if (!setup->packed_weights.empty()) packed.fd = Fd(::open(setup->packed_weights.c_str(), O_RDONLY | O_CLOEXEC));
    QKV_ASSIGN_OR_RETURN(model_, Model::Load(setup->model, std::move(packed)));
    if (setup->balanced) {
      QKV_ASSIGN_OR_RETURN(Calibration calibration, Calibration::Read(*model_, Calibration::PathFor(*model_)));
      calibration_ = std::make_shared<const Calibration>(std::move(calibration));
    }
    // Digests are made at the first use; here nobody waits for them yet.
    const std::string tokenizer = model_->identity().tokenizer_digest();
    ConnectBroker();
    if (setup->warm_up) WarmUp();
    channel_.Send(AgentReady{.load_ms = MsSince(start), .tokenizer = tokenizer});

    for (;;) {
      if (used_ && !channel_.WaitForMore(kKeepFor)) LetGo();
      const std::optional<std::string> next = channel_.ReadLine();
      if (!next) return {};
      QKV_ASSIGN_OR_RETURN(const AgentCommand command, ParseAgentCommand(*next));
      if (const auto* prepare = std::get_if<AgentPrepare>(&command)) {
        if (used_) LetGo();
        Prepare(*prepare);
      } else if (const auto* turn = std::get_if<AgentTurn>(&command)) {
        if (used_ && turn->inherits.empty()) LetGo();
        auto result = Turn(*turn);
        used_ = true;
        if (result) {
          channel_.Send(AgentDone{*std::move(result), trace_->Take()});
          if (agent_->published() != nullptr) warm_.Keep(*agent_->published());
        } else {
          channel_.Send(AgentFailed{result.error()});
          LetGo();
        }
      } else {
        return Err(Code::kCorrupt, "agent worker: a command out of turn");
      }
    }
  }

 private:
  // What was published lives on at the broker.
  void LetGo() {
    agent_.reset();
    warm_.Clear();
    used_ = false;
  }

  // The first step of a process finds none of the model's pages in place. What comes out here is nobody's, and if it fails
  // the first turn will say so.
  void WarmUp() {
    constexpr int kPrompt = 16;  // enough for the kernels that prompts are read with
    auto sequence = Sequence::Create(model_, {.n_ctx = 2 * kPrompt, .n_threads = 1});
    if (!sequence) return;
    const std::vector<Token> tokens(kPrompt, 0);
    if ((*sequence)->Forward(tokens)) (void)(*sequence)->Forward(std::span(tokens).first(1));
  }

  // Without a broker nothing can be taken over or published; the ladder knows what to do then.
  void ConnectBroker() {
    if (socket_.empty() || (broker_ != nullptr && !broker_->lost())) return;
    agent_.reset();  // it holds the old connection
    auto connected = BrokerClient::Connect(socket_);
    broker_ = connected ? *std::move(connected) : nullptr;
  }

  // The agent that was made ahead, if it is the one, or a new one. Command: AgentPrepare or AgentTurn.
  template <class Command>
  Status MakeAgent(const Command& command) {
    ConnectBroker();
    KvChoice kv = command.kv;
    if (command.max_bytes > 0) {
      QKV_ASSIGN_OR_RETURN(kv, BestWithinBytes(*model_, command.max_bytes, command.n_ctx));
    } else if (command.kv_bits > 0) {
      QKV_ASSIGN_OR_RETURN(kv, BestWithinBits(*model_, command.kv_bits));
    }
    const auto key = std::tuple(kv, command.n_ctx, command.threads, command.trace);
    // What was read ahead for one agent is nobody else's; what a turn left is replaced by what the next one inherits.
    const bool may_stay = used_ || made_for_ == command.agent;
    if (agent_ != nullptr && may_stay && key == agent_key_) return {};
    agent_.reset();
    made_for_ = command.agent;
    trace_ = std::make_unique<Trace>("");  // the runner knows whose it is
    SequenceOptions options = {.n_ctx = command.n_ctx, .n_threads = command.threads, .kv = kv.codecs};
    options.groups = kv.groups;
    options.refine = refine_;
    options.calibration = calibration_;
    if (command.trace) options.trace = trace_.get();
    options.on_progress = [this](size_t done, size_t total) {
      if (in_turn_) channel_.Send(AgentProgress{static_cast<int64_t>(done), static_cast<int64_t>(total)});
    };
    QKV_ASSIGN_OR_RETURN(auto sequence, Sequence::Create(model_, options));
    agent_ = std::make_unique<Agent>(model_, std::move(sequence), broker_.get(), &warm_);
    agent_key_ = key;
    return {};
  }

  // Whatever fails here fails, or is got round, in the turn itself.
  void Prepare(const AgentPrepare& prepare) {
    const auto start = Clock::now();
    AgentPrepared prepared;
    if (MakeAgent(prepare) && prepare.prefix && agent_->ReadPrefix(prepare.system)) {
      prepared.prefix_tokens = static_cast<int64_t>(agent_->sequence().tokens().size());
    }
    if (!prepare.context.empty() && broker_ != nullptr) {
      prepared.bytes = warm_.Add(*broker_, prepare.context, 1).value_or(0);
    }
    prepared.ms = MsSince(start);
    channel_.Send(prepared);
  }

  Result<TurnResult> Turn(const AgentTurn& turn) {
    QKV_RETURN_IF_ERROR(MakeAgent(turn));
    TurnRequest request;
    request.system = turn.system;
    request.prompt = turn.prompt;
    request.document = turn.document;
    request.max_tokens = turn.max_tokens;
    request.sampling = turn.sampling;
    request.inherits = turn.inherits;
    request.on_miss = turn.on_miss;
    request.budget = turn.budget;
    request.history = turn.history;
    request.prefix_tokens = static_cast<int>(turn.prefix_tokens);
    request.reads = turn.reads;
    request.publish_as = turn.publish_as;
    request.digest_logits = turn.digest_logits;
    request.publish_may_fail = true;
    request.agent = turn.agent;
    if (turn.announce) {
      request.on_announced = [this](const std::string& context, int64_t tokens) {
        channel_.Send(AgentAnnounced{context, tokens});
      };
    }
    in_turn_ = true;
    auto result =
        agent_->Run(request, [this](std::string_view piece) { return channel_.Send(AgentText{std::string(piece)}); });
    in_turn_ = false;
    return result;
  }

  Channel& channel_;
  std::string socket_;
  double refine_ = kDefaultRefine;
  std::shared_ptr<const Model> model_;
  std::shared_ptr<const Calibration> calibration_;  // null: keys are kept as they are
  // In this order: the agent ends before what it uses.
  std::unique_ptr<BrokerClient> broker_;
  WarmSegments warm_;
  std::unique_ptr<Trace> trace_ = std::make_unique<Trace>("");  // of the agent
  std::unique_ptr<Agent> agent_;
  std::tuple<KvChoice, int, int, bool> agent_key_;
  std::string made_for_;
  bool used_ = false;  // the agent has had a turn; what it holds is kept for whoever goes on from it at once
  bool in_turn_ = false;
};

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
  const Status status = Worker(channel).Serve();
  if (status) return 0;
  channel.Send(AgentFailed{status.error()});
  return 1;
}

}  // namespace qkv
