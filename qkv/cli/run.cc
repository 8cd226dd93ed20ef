// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include "qkv/cli/commands.h"
#include "qkv/cli/flow_gate.h"
#include "qkv/cli/flow_screen.h"
#include "qkv/cli/options.h"
#include "qkv/cli/output_file.h"
#include "qkv/flow/agent_worker.h"
#include "qkv/flow/flow_file.h"
#include "qkv/flow/report_html.h"
#include "qkv/flow/runner.h"

namespace qkv::cli {
namespace {

struct Options {
  std::string file;
  std::string model;
  int n_ctx = 0;
  int n_threads = 0;
  std::string kv;
  bool balanced = false;
  double kv_bits = 0;
  double refine = kDefaultRefine;
  QualityFlags quality;
  std::string socket;
  std::string mode = "handoff";
  std::vector<std::string> inputs;
  int jobs = 0;
  bool no_ahead = false;
  bool compare = false;
  bool quiet = false;
  std::string json_file;
  std::string report_file;
  std::string trace_file;
  std::string metrics;  // an address or a file
};

// HOST:PORT; everything else is a file.
bool IsAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  return colon != std::string::npos && colon + 1 < text.size() && text.find('/') == std::string::npos &&
         text.find_first_not_of("0123456789", colon + 1) == std::string::npos;
}

std::atomic<bool> stop_requested{false};  // a signal handler can reach nothing else
void RequestStop(int) {
  stop_requested.store(true);
}

Result<int> Run(const Options& options) {
  FlowInputs inputs;
  for (const std::string& input : options.inputs) QKV_RETURN_IF_ERROR(AddInput(input, inputs));
  QKV_ASSIGN_OR_RETURN(Flow flow, ParseFlowFile(options.file, inputs));
  if (!options.model.empty()) flow.model = options.model;
  if (flow.model.empty()) {
    QKV_ASSIGN_OR_RETURN(flow.model, FindModel(""));
  }
  if (options.n_ctx > 0) flow.n_ctx = options.n_ctx;
  if (options.n_threads > 0) flow.threads = options.n_threads;
  if (options.balanced) flow.bal = true;
  if (!options.json_file.empty()) QKV_RETURN_IF_ERROR(CheckOutputFile(options.json_file, "--json"));
  if (!options.trace_file.empty()) QKV_RETURN_IF_ERROR(CheckOutputFile(options.trace_file, "--trace"));
  if (!options.report_file.empty()) QKV_RETURN_IF_ERROR(CheckOutputFile(options.report_file, "--report"));

  RunOptions run;
  std::unique_ptr<MetricsEndpoint> endpoint;
  if (!options.metrics.empty()) {
    if (!options.socket.empty()) {
      return Err(Code::kInvalidArgument,
                 "--metrics is for the run's own broker; the one at --socket is asked by its own --metrics");
    }
    run.metrics = std::make_shared<BrokerMetrics>();
    if (IsAddress(options.metrics)) {
      QKV_ASSIGN_OR_RETURN(endpoint, MetricsEndpoint::Start(options.metrics, run.metrics));
    } else {
      QKV_RETURN_IF_ERROR(CheckOutputFile(options.metrics, "--metrics"));
    }
  }
  FlowScreen screen(options.quiet);
  run.mode = options.mode == "text" ? FlowMode::kText : FlowMode::kHandoff;
  run.refine = options.refine;
  if (!options.kv.empty()) {
    QKV_ASSIGN_OR_RETURN(const std::optional<double> bits, ParseLayerBits(options.kv));
    if (bits) {
      return Err(
          Code::kInvalidArgument,
          "--kv {}: such codecs are made for one model, and a flow may have several; --kv-bits {} takes them for "
          "each model that 'calibrate --layers' has measured",
          options.kv, *bits);
    }
    QKV_ASSIGN_OR_RETURN(run.kv, ParseKvChoice(options.kv));
  }
  const bool hands_over = options.compare || run.mode == FlowMode::kHandoff;
  if (hands_over) QKV_RETURN_IF_ERROR(CheckBalance(flow, run));
  if (options.kv_bits > 0 && run.mode == FlowMode::kHandoff) {
    QKV_RETURN_IF_ERROR(ApplyKvBits(options.kv_bits, options.quality, flow, run));
  }
  if (hands_over) QKV_RETURN_IF_ERROR(GateFlow(options.quality, flow, run));
  run.socket = options.socket;
  run.trace = !options.trace_file.empty();
  run.jobs = options.jobs;
  run.ahead = !options.no_ahead;
  run.stop = &stop_requested;
  run.on_event = [&screen](const FlowEvent& event) { screen.Show(event); };
  struct sigaction action {};
  action.sa_handler = RequestStop;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  struct sigaction before {};
  ::sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) ::sigaction(SIGHUP, &action, nullptr);  // nohup means it

  FlowReport report;
  if (options.compare) {
    QKV_ASSIGN_OR_RETURN(report, CompareModes(flow, run, [&](FlowMode mode, const KvChoice& kv) {
                           screen.Heading(mode == FlowMode::kText ? "independent agents, text handed over"
                                                                  : fmt::format("{} pages handed over", ToString(kv)));
                         }));
  } else {
    report.flow = flow.name;
    report.graph = flow.Graph();
    QKV_ASSIGN_OR_RETURN(ModeResult result, RunFlow(flow, run));
    report.modes.push_back(std::move(result));
  }
  screen.End();
  fmt::print("{}{}", options.quiet ? "" : "\n", FormatTable(report));
  std::fflush(stdout);
  if (!options.json_file.empty()) QKV_RETURN_IF_ERROR(WriteOutputFile(options.json_file, ToJson(report)));
  if (!options.trace_file.empty()) {
    std::vector<TraceEvent> events;
    for (const ModeResult& mode : report.modes) events.insert(events.end(), mode.trace.begin(), mode.trace.end());
    QKV_RETURN_IF_ERROR(WriteOutputFile(options.trace_file, TraceToJson(events)));
  }
  if (run.metrics != nullptr && endpoint == nullptr) {
    QKV_RETURN_IF_ERROR(WriteOutputFile(options.metrics, run.metrics->Text()));
  }
  if (!options.report_file.empty()) QKV_RETURN_IF_ERROR(WriteOutputFile(options.report_file, ToHtml(report)));
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
  CLI::App* command = app.add_subcommand("run", "run a flow of agents");
  command->add_option("flow", options->file, "the flow (YAML; see docs/FLOWS.md)")->required()->type_name("FILE");
  command
      ->add_option("-i,--input", options->inputs,
                   "text for an input of the flow, NAME=TEXT or NAME=@FILE; again for another, or for a list")
      ->type_name("NAME=VALUE")
      ->allow_extra_args(false);
  auto* compare_flag = command->add_flag("--compare", options->compare,
                                         "run it with text handoff as well, then with each codec, and print both");
  command->add_option("--mode", options->mode, "without --compare: how contexts go from agent to agent")
      ->check(CLI::IsMember({"handoff", "text"}))
      ->capture_default_str();
  command->add_option("--json", options->json_file, "write everything that the table shows to a file")
      ->type_name("FILE");
  command
      ->add_option("--trace", options->trace_file, "write when each stage of each turn was, in Chrome's trace format")
      ->type_name("FILE");
  command->add_option("--report", options->report_file, "write a page for a browser: graph, timeline, memory")
      ->type_name("FILE");
  command
      ->add_option("--metrics", options->metrics,
                   "Prometheus metrics of the handoffs: write them to a file at the end, or serve them meanwhile over "
                   "HTTP at this loopback address (127.0.0.1:9464), /metrics")
      ->type_name("FILE|HOST:PORT");
  command->add_option("-j,--jobs", options->jobs, "most agents at work at one time (default: as the flow allows)")
      ->check(CLI::Range(1, 256));
  command->add_flag("--no-ahead", options->no_ahead,
                    "start each agent only when its turn comes, nothing ahead of time; for comparison");
  command->add_flag("-q,--quiet", options->quiet, "only the closing table");
  command->add_option("-m,--model", options->model, "GGUF file; overrides the flow's")->type_name("FILE");
  command->add_option("-c,--ctx-size", options->n_ctx, "context size in tokens; overrides the flow's")
      ->check(CLI::Range(1, 1 << 24));
  command->add_option("-t,--threads", options->n_threads, "threads of all agents together; overrides the flow's")
      ->check(CLI::Range(1, 256));
  auto* kv_option = command
                        ->add_option("--kv", options->kv,
                                     "without --compare: codec of the pages, as of generate but for layers:BITS, whose "
                                     "place --kv-bits takes")
                        ->type_name("CODEC")
                        ->excludes(compare_flag);
  command
      ->add_option("--kv-bits", options->kv_bits,
                   "without --compare, instead of --kv: the best codecs that take at most this many bits per value, by "
                   "layer where 'calibrate --layers' has measured the model")
      ->type_name("BITS")
      ->check(Within(1.0, 16.0))
      ->excludes(kv_option)
      ->excludes(compare_flag);
  AddRefineOption(*command, options->refine);
  command->add_flag("--bal", options->balanced,
                    "multiply keys that are handed over by the matrices that 'qkvshare calibrate' made for each model "
                    "(as 'bal: true' in the flow does); what 'reads' names is then read as text");
  options->quality.AddTo(*command, /*reads_pages=*/false);
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
