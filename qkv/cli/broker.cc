// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/server.h"

#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "qkv/base/size.h"
#include "qkv/broker/event_writer.h"
#include "qkv/cli/commands.h"
#include "qkv/cli/options.h"

namespace qkv::cli {
namespace {

struct Options {
  std::string socket;
  std::string budget = "4GiB";
  std::string metrics;
  std::string store;
  std::string store_budget = "16GiB";
  std::string tenants;
  std::string seal_key;
  std::vector<uint32_t> allowed_uids;
};

int Run(const Options& options) {
  BrokerOptions server_options;
  auto budget = ParseBytes(options.budget, "--kv-budget");
  if (!budget) return Fail(budget.error());
  server_options.budget_bytes = *budget;
  auto store_budget = ParseBytes(options.store_budget, "--store-budget");
  if (!store_budget) return Fail(store_budget.error());
  server_options.store_directory = options.store;
  server_options.store_budget_bytes = *store_budget;
  server_options.allowed_uids = options.allowed_uids;
  if (!options.tenants.empty()) {
    auto tenants = TenantList::Read(options.tenants);
    if (!tenants) return Fail(tenants.error());
    server_options.tenants = *std::move(tenants);
  }
  if (!options.seal_key.empty()) {
    auto key = KeyFromFile(options.seal_key);
    if (!key) return Fail(key.error());
    server_options.seal_key = *std::move(key);
  }
  // Blocked before the server's thread starts, so that only sigwait below sees them.
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGINT);
  sigaddset(&stop, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);

  server_options.socket_path = options.socket.empty() ? DefaultSocketPath() : options.socket;
  EventWriter events(STDOUT_FILENO);
  server_options.on_event = [&events](const std::string& line) { events.Write(line); };
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
  auto server = BrokerServer::Start(std::move(server_options));
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
  command
      ->add_option("--store", options->store, "keep contexts in this directory as well, and know them after a restart")
      ->type_name("DIR");
  command->add_option("--store-budget", options->store_budget, "bytes of disk that --store takes at most")
      ->capture_default_str()
      ->type_name("SIZE");
  command
      ->add_option("--seal-key", options->seal_key,
                   "key file (made if missing) for the keys of encrypted contexts in --store; without it those stay in "
                   "memory only")
      ->type_name("FILE");
  command
      ->add_option("--tenants", options->tenants, "file of lines 'NAME TOKEN': contexts are invisible to other tenants")
      ->type_name("FILE");
  command->add_option("--allow-uid", options->allowed_uids, "serve this user as well (may be given again)")
      ->type_name("UID");
  command->footer(
      "Who may trust whom: docs/SECURITY.md.\n"
      "Example: qkvshare broker --kv-budget 2GiB --store ~/.cache/qkvshare/contexts");
  command->callback([options, &status] { status = Run(*options); });
}

}  // namespace qkv::cli
