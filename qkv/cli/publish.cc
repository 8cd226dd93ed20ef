// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <memory>

#include "qkv/cli/commands.h"
#include "qkv/cli/turn.h"

namespace qkv::cli {
namespace {

struct Options {
  ModelOptions model;
  TurnOptions turn;
  std::string socket;
  std::string name;
  bool hold = false;
};

int Run(const Options& options) {
  auto request = options.turn.ToRequest();
  if (!request) return Fail(request.error());
  if (request->prompt.empty())
    return Fail({Code::kInvalidArgument, "publish: no prompt given (-p TEXT or -f FILE)", {}});
  if (auto valid = ValidateContextName(options.name); !valid) return Fail(valid.error());
  auto broker = ConnectBroker(options.socket);
  if (!broker) return Fail(broker.error());
  request->publish_as = options.name;
  request->agent = options.name;
  const int status = RunTurn(options.model, options.turn, *request, broker->get());
  if (status == 0 && options.hold) ::pause();
  return status;
}

}  // namespace

void AddPublish(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("publish", "read a prompt (and answer it), then hand the context to the broker under a name");
  command->add_option("--name", options->name, "name of the context")->required();
  command->add_flag("--hold", options->hold,
                    "stay until a signal ends it (the context lives on without it all the same)");
  AddSocketOption(*command, options->socket);
  options->turn.max_tokens = 0;
  options->model.AddTo(*command);
  options->turn.AddTo(*command);
  command->footer(
      "Example: qkvshare publish --name report -f report.txt\n"
      "         qkvshare attach report -p 'What does the report recommend?'");
  command->callback([options, &status] { status = Run(*options); });
}

}  // namespace qkv::cli
