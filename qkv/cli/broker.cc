// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/server.h"

#include <sys/stat.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "qkv/cli/commands.h"
#include "qkv/cli/options.h"

namespace qkv::cli {
namespace {

struct Options {
  std::string socket;
  std::string budget = "4GiB";
  std::string metrics;
};

int Run(const Options& options) {
  auto budget = ParseBytes(options.budget, "--kv-budget");
  if (!budget) return Fail(budget.error());
  // Blocked before the server's thread starts, so that only sigwait below sees them.
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGINT);
  sigaddset(&stop, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);

  BrokerOptions server_options;
  server_options.socket_path = options.socket.empty() ? DefaultSocketPath() : options.socket;
  server_options.budget_bytes = *budget;
  server_options.on_event = [](const std::string& line) {
    fmt::print("{}\n", line);
    std::fflush(stdout);
  };
  const std::string parent = std::filesystem::path(server_options.socket_path).parent_path().string();
  struct stat info {};
  if (!parent.empty() && ::stat(parent.c_str(), &info) == 0 && !S_ISDIR(info.st_mode)) {
    return Fail(
        {Code::kInvalidArgument, fmt::format("broker: '{}' is not a directory that could hold a socket", parent), {}});
  }
  server_options.metrics = std::make_shared<BrokerMetrics>();
  std::unique_ptr<MetricsEndpoint> endpoint;
  if (!options.metrics.empty()) {
    auto started = MetricsEndpoint::Start(options.metrics, server_options.metrics);
    if (!started) return Fail(started.error());
    endpoint = *std::move(started);
  }
  auto server = BrokerServer::Start(server_options);
  if (!server) return Fail(server.error());
  fmt::print(stderr, "qkvshare: broker listens on {} (Ctrl-C ends it)\n", (*server)->socket_path());
  if (endpoint != nullptr) {
    fmt::print(stderr, "qkvshare: metrics at http://{}:{}/metrics\n",
               options.metrics.substr(0, options.metrics.rfind(':')), endpoint->port());
  }
  int signal = 0;
  sigwait(&stop, &signal);
  return 0;
}

}  // namespace

void AddBroker(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("broker", "let unrelated processes share contexts; prints one line of JSON per event");
  AddSocketOption(*command, options->socket);
  command->add_option("--kv-budget", options->budget, "bytes of KV pages it keeps at most")
      ->capture_default_str()
      ->type_name("SIZE");
  command
      ->add_option("--metrics", options->metrics,
                   "serve Prometheus metrics over HTTP at this loopback address (127.0.0.1:9464), /metrics")
      ->type_name("HOST:PORT");
  command->footer(
      "Its output must be read, or go to a file: a pipe that nobody reads would hold it up.\nExample: qkvshare broker "
      "--kv-budget 2GiB");
  command->callback([options, &status] { status = Run(*options); });
}

}  // namespace qkv::cli
