// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>
#include <vector>

#include "qkv/cli/commands.h"
#include "qkv/cli/turn.h"

namespace qkv::cli {
namespace {

struct Options {
  ModelOptions model;
  TurnOptions turn;
  QualityFlags quality;
  PublishFlags publish;
  std::string socket;
  std::string context;
  std::string publish_as;
  std::string on_miss = "text";
  std::vector<std::string> reads;
  std::string splice = "hide";
};

int Run(const Options& options) {
  auto request = options.turn.ToRequest();
  if (!request) return Fail(request.error());
  const auto splice = ParseSplicePolicy(options.splice);
  if (!splice) return Fail({splice.error().code, "--splice: " + splice.error().message, {}});
  if (!options.publish_as.empty()) {
    if (auto valid = ValidateContextName(options.publish_as); !valid) return Fail(valid.error());
  }
  auto broker = ConnectBroker(options.socket);
  if (!broker) return Fail(broker.error());
  request->on_miss = options.on_miss == "fail" ? OnMiss::kFail : OnMiss::kText;
  if (request->system.empty() && options.reads.empty()) {
    request->inherits = options.context;
  } else {
    request->reads.push_back({.context = options.context, .on_miss = request->on_miss, .splice = *splice});
    for (const std::string& other : options.reads) {
      request->reads.push_back({.context = other, .on_miss = request->on_miss, .splice = *splice});
    }
  }
  request->publish_as = options.publish_as;
  options.publish.ApplyTo(*request);
  request->agent = options.publish_as;
  return RunTurn(options.model, options.turn, options.quality, *request, broker->get());
}

}  // namespace

void AddAttach(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("attach", "go on from a published context without reading it again");
  command->add_option("context", options->context, "name or id of the context")->required();
  command->add_option("--publish", options->publish_as, "publish the context that comes of it under this name")
      ->type_name("NAME");
  command
      ->add_option("--on-miss", options->on_miss,
                   "when the pages cannot be used: read the card's tokens as text, or fail")
      ->check(CLI::IsMember({"text", "fail"}))
      ->capture_default_str();
  command
      ->add_option("--reads", options->reads,
                   "another context to use behind the first, at a place that it was not made for (may be repeated)")
      ->type_name("NAME");
  command
      ->add_option("--splice", options->splice,
                   "how contexts may be used behind --system or one another, which is an approximation: off or "
                   "exact-only (read the rest as text), hide, repair=N (read the first N tokens of each again), auto")
      ->type_name("MODE")
      ->capture_default_str();
  options->publish.AddTo(*command);
  AddSocketOption(*command, options->socket);
  options->model.AddTo(*command);
  options->quality.AddTo(*command, /*reads_pages=*/true);
  options->turn.AddTo(*command);
  command->footer(
      "Without a prompt it goes on generating where the producer stopped. With --system or --reads the contexts are\n"
      "spliced: --json says how many tokens were taken over and how many read again.\n"
      "Example: qkvshare attach report -p 'What does the report recommend?' --json");
  command->callback([options, &status] { status = Run(*options); });
}

}  // namespace qkv::cli
