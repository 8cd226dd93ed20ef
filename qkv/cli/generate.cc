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
};

int Run(const Options& options) {
  auto request = options.turn.ToRequest();
  if (!request) return Fail(request.error());
  if (request->prompt.empty())
    return Fail({Code::kInvalidArgument, "generate: no prompt given (-p TEXT or -f FILE)", {}});
  return RunTurn(options.model, options.turn, options.quality, *request, nullptr);
}

}  // namespace

void AddGenerate(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("generate", "one agent, plain: read a prompt, stream the answer");
  options->model.AddTo(*command);
  options->quality.AddTo(*command, /*reads_pages=*/false);
  options->turn.AddTo(*command);
  command->footer("Example: qkvshare generate -p 'Write one sentence about rivers.' -n 64");
  command->callback([options, &status] { status = Run(*options); });
}

}  // namespace qkv::cli
