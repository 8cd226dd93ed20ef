// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// ls and release: the broker's contexts.

#include <memory>
#include <nlohmann/json.hpp>

#include "qkv/cli/commands.h"
#include "qkv/cli/format.h"
#include "qkv/cli/options.h"

namespace qkv::cli {
namespace {

struct LsOptions {
  std::string socket;
  bool json = false;
};

std::string_view Where(const ContextInfo& context) {
  return context.in_memory ? context.stored ? "both" : "memory" : "disk";
}

std::string Notes(const ContextInfo& context) {
  std::string notes;
  const auto add = [&](const std::string& note) { notes += (notes.empty() ? "" : ", ") + note; };
  if (context.pinned) add("pinned");
  if (context.encrypted) add("encrypted");
  if (context.expires_unix_ms != 0) add("expires in " + TimeUntil(context.expires_unix_ms));
  return notes;
}

int Ls(const LsOptions& options) {
  auto broker = ConnectBroker(options.socket);
  if (!broker) return Fail(broker.error());
  const auto status = (*broker)->List();
  if (!status) return Fail(status.error());
  if (options.json) {
    nlohmann::ordered_json json;
    json["used_bytes"] = status->used_bytes;
    json["budget_bytes"] = status->budget_bytes;
    json["stored_bytes"] = status->stored_bytes;
    json["store_budget_bytes"] = status->store_budget_bytes;
    json["contexts"] = nlohmann::ordered_json::array();
    for (const ContextInfo& c : status->contexts) {
      json["contexts"].push_back({{"id", c.id},
                                  {"name", c.name},
                                  {"model", c.model},
                                  {"kv", c.kv},
                                  {"tokens", c.n_tokens},
                                  {"bytes", c.bytes},
                                  {"producer_pid", c.producer_pid},
                                  {"created_unix_ms", c.created_unix_ms},
                                  {"expires_unix_ms", c.expires_unix_ms},
                                  {"pinned", c.pinned},
                                  {"leases", c.n_leases},
                                  {"in_memory", c.in_memory},
                                  {"stored", c.stored},
                                  {"encrypted", c.encrypted}});
    }
    fmt::print("{}\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
    return 0;
  }
  fmt::print("{:<20} {:<32} {:>8} {:>11} {:<12} {:<7} {:>6} {:>8}  {}\n", "NAME", "ID", "TOKENS", "KV", "CODEC",
             "WHERE", "LEASES", "AGE", "NOTES");
  for (const ContextInfo& c : status->contexts) {
    fmt::print("{:<20} {:<32} {:>8} {:>11} {:<12} {:<7} {:>6} {:>8}  {}\n", c.name, c.id,
               c.encrypted ? "-" : std::to_string(c.n_tokens), Mib(c.bytes), c.kv, Where(c), c.n_leases,
               Age(c.created_unix_ms), Notes(c));
  }
  fmt::print("{} contexts, {} of {} of memory", status->contexts.size(), Mib(status->used_bytes),
             Mib(status->budget_bytes));
  if (status->store_budget_bytes > 0) {
    fmt::print(", {} of {} of disk", Mib(status->stored_bytes), Mib(status->store_budget_bytes));
  }
  fmt::print("\n");
  return 0;
}

struct ReleaseOptions {
  std::string socket;
  std::string context;
};

int Release(const ReleaseOptions& options) {
  auto broker = ConnectBroker(options.socket);
  if (!broker) return Fail(broker.error());
  if (auto removed = (*broker)->Remove(options.context); !removed) return Fail(removed.error());
  return 0;
}

}  // namespace

void AddLs(CLI::App& app, int& status) {
  auto options = std::make_shared<LsOptions>();
  CLI::App* command = app.add_subcommand("ls", "list the contexts that the broker knows");
  AddSocketOption(*command, options->socket);
  command->add_flag("--json", options->json, "print JSON");
  command->footer("Example: qkvshare ls --json");
  command->callback([options, &status] { status = Ls(*options); });
}

void AddRelease(CLI::App& app, int& status) {
  auto options = std::make_shared<ReleaseOptions>();
  CLI::App* command = app.add_subcommand("release", "forget a context; whoever has it attached keeps it");
  command->add_option("context", options->context, "name or id")->required();
  AddSocketOption(*command, options->socket);
  command->footer("Example: qkvshare release report");
  command->callback([options, &status] { status = Release(*options); });
}

}  // namespace qkv::cli
