// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "qkv/cli/commands.h"
#include "qkv/cli/options.h"
#include "qkv/flow/flow_file.h"
#include "qkv/flow/plan_text.h"
#include "qkv/flow/runner.h"

namespace qkv::cli {
namespace {

struct Options {
  std::string file;
  std::vector<std::string> inputs;
  std::string format = "text";
  bool json = false;
  int jobs = 0;
  int64_t budget = 0;
};

Result<int> Show(const Options& options) {
  FlowInputs inputs;
  for (const std::string& input : options.inputs) QKV_RETURN_IF_ERROR(AddInput(input, inputs));
  QKV_ASSIGN_OR_RETURN(Flow flow, ParseFlowFile(options.file, inputs));
  if (options.budget > 0) flow.budget = options.budget;
  const std::vector<PlanNode> graph = flow.Graph();
  const int jobs = JobsFor(flow, options.jobs);
  const PlanForecast forecast = Forecast(graph, jobs, flow.budget);
  const PlanView view{flow, forecast, jobs};
  const std::string text = options.json                  ? PlanToJson(view)
                           : options.format == "dot"     ? PlanToDot(view)
                           : options.format == "mermaid" ? PlanToMermaid(view)
                                                         : FormatPlan(view);
  fmt::print("{}", text);
  return 0;
}

}  // namespace

void AddPlan(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("plan", "show how a flow would run: order, longest way, who needs whose context");
  command->add_option("flow", options->file, "the flow (YAML; see docs/FLOWS.md)")->required()->type_name("FILE");
  auto* format = command->add_option("--format", options->format, "text, dot (Graphviz) or mermaid")
                     ->check(CLI::IsMember({"text", "dot", "mermaid"}))
                     ->capture_default_str();
  command->add_flag("--json", options->json, "print one JSON object")->excludes(format);
  command->add_option("-i,--input", options->inputs, "text for an input of the flow, NAME=TEXT or NAME=@FILE")
      ->type_name("NAME=VALUE")
      ->allow_extra_args(false);
  command->add_option("-j,--jobs", options->jobs, "most agents at work at one time (default: as the flow allows)")
      ->check(CLI::Range(1, 256));
  command->add_option("--budget", options->budget, "tokens of KV to have at one time; overrides the flow's")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  command->footer("Example: qkvshare plan examples/research_team.yaml --format dot | dot -Tsvg > team.svg");
  command->callback([options, &status] {
    const Result<int> done = Show(*options);
    status = done ? *done : Fail(done.error());
  });
}

}  // namespace qkv::cli
