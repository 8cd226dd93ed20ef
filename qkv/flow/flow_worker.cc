// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/flow_worker.h"

#include <algorithm>
#include <utility>

namespace qkv {
namespace {
constexpr std::chrono::milliseconds kExitDeadline{500};
constexpr int kKeptLines = 3;  // of what it said last
}  // namespace

Result<std::unique_ptr<FlowWorker>> FlowWorker::Start(const std::vector<std::string>& argv, const AgentSetup& setup,
                                                      int for_agent, Clock::time_point load_deadline) {
  auto worker = std::make_unique<FlowWorker>();
  QKV_ASSIGN_OR_RETURN(worker->process, AgentProcess::Start(argv));
  worker->process->Send(ToLine(setup));
  worker->model = setup.model;
  worker->for_agent = for_agent;
  worker->deadline = load_deadline;
  return worker;
}

Error FlowWorker::Death() {
  const bool exited = process->WaitExit(kExitDeadline);
  (void)process->Pump();  // its last words
  std::string message = "its process " + (exited ? process->DescribeExit() : "closed its output");
  message += loading ? " while loading the model" : " before its answer was complete";
  if (std::string words = process->last_stderr(); !words.empty()) {
    // A few lines are enough, and an error is one line.
    size_t start = words.size();
    for (int lines = 0; lines < kKeptLines && start != std::string::npos && start > 0; ++lines) {
      start = words.rfind('\n', start - 1);
    }
    if (start != std::string::npos && start > 0) words.erase(0, start + 1);
    std::replace(words.begin(), words.end(), '\n', '|');
    message += "; it said: " + words;
  }
  return Error{Code::kPeerLost, std::move(message), Reason::kPeerLost};
}

}  // namespace qkv
