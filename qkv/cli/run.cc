// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>

#include "qkv/cli/commands.h"
#include "qkv/cli/options.h"
#include "qkv/cli/output_file.h"
#include "qkv/cli/progress.h"
#include "qkv/flow/agent_worker.h"
#include "qkv/flow/flow_file.h"
#include "qkv/flow/runner.h"

namespace qkv::cli {
namespace {

struct Options {
  std::string file;
  std::string model;
  int n_ctx = 0;
  int n_threads = 0;
  std::string kv;
  std::string socket;
  std::string mode = "handoff";
  bool compare = false;
  bool quiet = false;
  std::string json_file;
  std::string trace_file;
};

std::atomic<bool> stop_requested{false};  // a signal handler can reach nothing else
void RequestStop(int) {
  stop_requested.store(true);
}

// Streamed text goes to stdout, who is speaking to stderr; agents that speak at the same time are kept on lines of their own.
class Screen {
 public:
  explicit Screen(bool quiet) : quiet_(quiet) {}

  void Heading(const std::string& text) {
    EndLine();
    if (!quiet_) fmt::print(stderr, "== {}\n", text);
  }

  void Show(const FlowEvent& event) {
    if (quiet_) return;
    switch (event.kind) {
      case FlowEvent::Kind::kReady: break;
      case FlowEvent::Kind::kStarted: Say("{} starts", event.agent); break;
      case FlowEvent::Kind::kProgress:
        reading_.Update(static_cast<size_t>(event.done), static_cast<size_t>(event.total));
        break;
      case FlowEvent::Kind::kText:
        if (speaker_ != event.agent) {
          EndLine();
          fmt::print("[{}] ", event.agent);
          speaker_ = event.agent;
        }
        std::fwrite(event.text.data(), 1, event.text.size(), stdout);
        std::fflush(stdout);
        at_line_start_ = event.text.ends_with('\n');
        break;
      case FlowEvent::Kind::kFinished: {
        const TurnResult& r = *event.result;
        Say("{}: {} tokens reused, {} read, first token after {:.0f} ms, {} tokens at {:.1f} tok/s{}", event.agent,
            r.tokens_reused, r.tokens_recomputed, r.ttft_ms, r.output_tokens.size(),
            r.decode_ms > 0 ? 1000.0 * static_cast<double>(r.output_tokens.size()) / r.decode_ms : 0.0,
            r.reason == Reason::kNone ? ""
                                      : fmt::format("; read as text ({}): {}", ReasonName(r.reason), r.reason_detail));
        break;
      }
      case FlowEvent::Kind::kFailed: Say("{} failed: {}", event.agent, event.error->message); break;
      case FlowEvent::Kind::kSkipped: Say("{} is not run: something it needs failed", event.agent); break;
      case FlowEvent::Kind::kReleased: break;
    }
  }

  void EndLine() {
    if (!at_line_start_) fmt::print("\n");
    std::fflush(stdout);
    at_line_start_ = true;
    speaker_.clear();
  }

 private:
  template <class... Args>
  void Say(fmt::format_string<Args...> format, Args&&... args) {
    EndLine();
    fmt::print(stderr, "-- {}\n", fmt::format(format, std::forward<Args>(args)...));
  }

  const bool quiet_;
  Progress reading_{"reading"};
  std::string speaker_;
  bool at_line_start_ = true;
};

Result<int> Run(const Options& options) {
  QKV_ASSIGN_OR_RETURN(Flow flow, ParseFlowFile(options.file));
  if (!options.model.empty()) flow.model = options.model;
  if (flow.model.empty()) {
    QKV_ASSIGN_OR_RETURN(flow.model, FindModel(""));
  }
  if (options.n_ctx > 0) flow.n_ctx = options.n_ctx;
  if (options.n_threads > 0) flow.threads = options.n_threads;
  if (!options.json_file.empty()) QKV_RETURN_IF_ERROR(CheckOutputFile(options.json_file, "--json"));
  if (!options.trace_file.empty()) QKV_RETURN_IF_ERROR(CheckOutputFile(options.trace_file, "--trace"));

  Screen screen(options.quiet);
  RunOptions run;
  run.mode = options.mode == "text" ? FlowMode::kText : FlowMode::kHandoff;
  if (!options.kv.empty()) {
    QKV_ASSIGN_OR_RETURN(run.kv, ParseCodecPair(options.kv));
  }
  run.socket = options.socket;
  run.trace = !options.trace_file.empty();
  run.stop = &stop_requested;
  run.on_event = [&screen](const FlowEvent& event) { screen.Show(event); };
  struct sigaction action {};
  action.sa_handler = RequestStop;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);

  FlowReport report;
  if (options.compare) {
    QKV_ASSIGN_OR_RETURN(report, CompareModes(flow, run, [&](FlowMode mode, CodecPair kv) {
                           screen.Heading(mode == FlowMode::kText ? "independent agents, text handed over"
                                                                  : fmt::format("{} pages handed over", ToString(kv)));
                         }));
  } else {
    report.flow = flow.name;
    QKV_ASSIGN_OR_RETURN(ModeResult result, RunFlow(flow, run));
    report.modes.push_back(std::move(result));
  }
  screen.EndLine();
  fmt::print("{}{}", options.quiet ? "" : "\n", FormatTable(report));
  std::fflush(stdout);
  if (!options.json_file.empty()) QKV_RETURN_IF_ERROR(WriteOutputFile(options.json_file, ToJson(report)));
  if (!options.trace_file.empty()) {
    std::vector<TraceEvent> events;
    for (const ModeResult& mode : report.modes) events.insert(events.end(), mode.trace.begin(), mode.trace.end());
    QKV_RETURN_IF_ERROR(WriteOutputFile(options.trace_file, TraceToJson(events)));
  }
  for (const ModeResult& mode : report.modes) {
    for (const AgentFailure& failure : mode.failures) {
      fmt::print(stderr, "qkvshare: agent '{}': {}\n", failure.agent, failure.error.message);
    }
  }
  return FlowExitStatus(report);
}

}  // namespace

void AddRun(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("run", "run a flow of agents, one process each");
  command->add_option("flow", options->file, "the flow (YAML; see docs/FLOWS.md)")->required()->type_name("FILE");
  command->add_flag("--compare", options->compare,
                    "run it with text handoff as well, then with each codec, and print both");
  command->add_option("--mode", options->mode, "without --compare: how contexts go from agent to agent")
      ->check(CLI::IsMember({"handoff", "text"}))
      ->capture_default_str();
  command->add_option("--json", options->json_file, "write everything that the table shows to a file")
      ->type_name("FILE");
  command
      ->add_option("--trace", options->trace_file,
                   "write when each stage of each handoff was, in Chrome's trace format")
      ->type_name("FILE");
  command->add_flag("-q,--quiet", options->quiet, "only the closing table");
  command->add_option("-m,--model", options->model, "GGUF file; overrides the flow's")->type_name("FILE");
  command->add_option("-c,--ctx-size", options->n_ctx, "context size in tokens; overrides the flow's")
      ->check(CLI::Range(1, 1 << 24));
  command->add_option("-t,--threads", options->n_threads, "threads per agent; overrides the flow's")
      ->check(CLI::Range(1, 512));
  command->add_option("--kv", options->kv, "without --compare: codec of the pages")->type_name("CODEC");
  command->add_option("--socket", options->socket, "an existing broker's socket (default: one of its own)")
      ->type_name("PATH");
  command->footer("Example: qkvshare run examples/writer_editor.yaml --compare --json report.json");
  command->callback([options, &status] {
    const Result<int> done = Run(*options);
    status = done ? *done : Fail(done.error());
  });
}

void AddAgentWorker(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("agent-worker", "one agent of a running flow");
  command->group("");  // not for people
  command->callback([&status] { status = RunAgentWorker(STDIN_FILENO, STDOUT_FILENO); });
}

}  // namespace qkv::cli
