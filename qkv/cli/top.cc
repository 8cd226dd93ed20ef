// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "qkv/cli/commands.h"
#include "qkv/cli/format.h"
#include "qkv/cli/options.h"

namespace qkv::cli {
namespace {

struct Options {
  std::string socket;
  double interval = 1;
  bool json = false;
};

std::string Table(const BrokerStatus& status) {
  uint64_t leases = 0;
  for (const ContextInfo& c : status.contexts) leases += c.n_leases;
  const BrokerTotals& t = status.totals;
  std::string text = fmt::format(
      "broker {:016x}: {} contexts, {} leases, {} of {} ({:.0f} %)\n"
      "published {}, attached {}, evicted {}, expired {}, refused {}\n"
      "tokens reused {}, read {}; fallbacks {}, checksum failures {}\n\n",
      status.generation, status.contexts.size(), leases, Mib(status.used_bytes), Mib(status.budget_bytes),
      status.budget_bytes == 0
          ? 0.0
          : 100 * static_cast<double>(status.used_bytes) / static_cast<double>(status.budget_bytes),
      t.published, t.attached, t.evicted, t.expired, t.refused, t.tokens_reused, t.tokens_recomputed, t.fallbacks,
      t.checksum_failures);
  text += fmt::format("{:<20} {:<9} {:>8} {:>12} {:<12} {:>7} {:>7} {:>8}  {}\n", "NAME", "ID", "TOKENS", "KV", "CODEC",
                      "HITS", "LEASES", "AGE", "HOLDERS");
  for (const ContextInfo& c : status.contexts) {
    std::string holders;
    for (const int64_t pid : c.holders) holders += fmt::format("{}{}", holders.empty() ? "" : " ", pid);
    text +=
        fmt::format("{:<20} {:<9} {:>8} {:>12} {:<12} {:>7} {:>7} {:>8}  {}\n", c.name.substr(0, 20), c.id.substr(0, 8),
                    c.n_tokens, Mib(c.bytes), c.kv, c.n_attached, c.n_leases, Age(c.created_unix_ms), holders);
  }
  return text;
}

std::string ToJson(const BrokerStatus& status) {
  nlohmann::ordered_json json;
  json["generation"] = fmt::format("{:016x}", status.generation);
  json["used_bytes"] = status.used_bytes;
  json["budget_bytes"] = status.budget_bytes;
  const BrokerTotals& t = status.totals;
  json["totals"] = {{"published", t.published},
                    {"attached", t.attached},
                    {"evicted", t.evicted},
                    {"expired", t.expired},
                    {"refused", t.refused},
                    {"fallbacks", t.fallbacks},
                    {"checksum_failures", t.checksum_failures},
                    {"tokens_reused", t.tokens_reused},
                    {"tokens_recomputed", t.tokens_recomputed}};
  json["contexts"] = nlohmann::ordered_json::array();
  for (const ContextInfo& c : status.contexts) {
    json["contexts"].push_back({{"id", c.id},
                                {"name", c.name},
                                {"tokens", c.n_tokens},
                                {"bytes", c.bytes},
                                {"kv", c.kv},
                                {"hits", c.n_attached},
                                {"leases", c.n_leases},
                                {"holders", c.holders},
                                {"pinned", c.pinned},
                                {"created_unix_ms", c.created_unix_ms}});
  }
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::atomic<bool> stop_requested{false};

int Run(const Options& options) {
  auto broker = ConnectBroker(options.socket);
  if (!broker) return Fail(broker.error());
  const bool live = !options.json && ::isatty(STDOUT_FILENO) == 1;
  if (live) std::signal(SIGINT, [](int) { stop_requested.store(true); });
  for (;;) {
    const auto status = (*broker)->List();
    if (!status) return Fail(status.error());
    // Home, the table, and away with what stood below the last one: no flicker.
    if (live) fmt::print("\033[H\033[2J");
    fmt::print("{}", options.json ? ToJson(*status) : Table(*status));
    std::fflush(stdout);
    if (!live) return 0;
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(options.interval);
    while (std::chrono::steady_clock::now() < until) {
      if (stop_requested.load()) return 0;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
}

}  // namespace

void AddTop(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("top", "watch the broker's contexts: who holds them, how often they were used");
  AddSocketOption(*command, options->socket);
  command->add_option("--interval", options->interval, "seconds between two looks")
      ->capture_default_str()
      ->check(Within(0.1, 3600.0));
  command->add_flag("--json", options->json, "print one look as JSON and end");
  command->footer("In a terminal until Ctrl-C; into a pipe or a file one look.\nExample: qkvshare top --interval 0.5");
  command->callback([options, &status] { status = Run(*options); });
}

}  // namespace qkv::cli
