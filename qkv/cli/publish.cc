// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <poll.h>

#include <memory>

#include "qkv/cli/commands.h"
#include "qkv/cli/turn.h"

namespace qkv::cli {
namespace {

constexpr int kRetryMs = 200;

struct Options {
  ModelOptions model;
  TurnOptions turn;
  QualityFlags quality;
  PublishFlags publish;
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
  options.publish.ApplyTo(*request);
  request->agent = options.name;
  // As long as this process holds the pages, a broker that starts anew learns of them.
  const auto hold = [&](Agent& agent) {
    for (;;) {
      pollfd hang_up{(*broker)->poll_fd(), POLLIN, 0};
      ::poll(&hang_up, 1, (*broker)->lost() ? kRetryMs : -1);
      (void)agent.KeepAnnounced();  // nobody may be there yet
    }
  };
  return RunTurn(options.model, options.turn, options.quality, *request, broker->get(),
                 options.hold ? hold : std::function<void(Agent&)>{});
}

}  // namespace

void AddPublish(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("publish", "read a prompt (and answer it), then hand the context to the broker under a name");
  command->add_option("--name", options->name, "name of the context")->required();
  command->add_flag("--hold", options->hold,
                    "stay until a signal ends it (the context lives on without it all the same), and announce the "
                    "context again to a broker that was restarted");
  options->publish.AddTo(*command);
  AddSocketOption(*command, options->socket);
  options->turn.max_tokens = 0;
  options->model.AddTo(*command);
  options->quality.AddTo(*command, /*reads_pages=*/false);
  options->turn.AddTo(*command);
  command->footer(
      "Example: qkvshare publish --name report -f report.txt\n"
      "         qkvshare attach report -p 'What does the report recommend?'");
  command->callback([options, &status] { status = Run(*options); });
}

}  // namespace qkv::cli
