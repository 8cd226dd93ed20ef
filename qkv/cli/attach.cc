// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <memory>

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
};

int Run(const Options& options) {
  auto request = options.turn.ToRequest();
  if (!request) return Fail(request.error());
  if (!request->system.empty()) {
    return Fail({Code::kInvalidArgument,
                 "attach: --system belongs to a conversation's first turn, not to one that goes on",
                 {}});
  }
  if (!options.publish_as.empty()) {
    if (auto valid = ValidateContextName(options.publish_as); !valid) return Fail(valid.error());
  }
  auto broker = ConnectBroker(options.socket);
  if (!broker) return Fail(broker.error());
  request->inherits = options.context;
  request->on_miss = options.on_miss == "fail" ? OnMiss::kFail : OnMiss::kText;
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
  options->publish.AddTo(*command);
  AddSocketOption(*command, options->socket);
  options->model.AddTo(*command);
  options->quality.AddTo(*command, /*reads_pages=*/true);
  options->turn.AddTo(*command);
  command->footer(
      "Without a prompt it goes on generating where the producer stopped.\n"
      "Example: qkvshare attach report -p 'What does the report recommend?' --json");
  command->callback([options, &status] { status = Run(*options); });
}

}  // namespace qkv::cli
