// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// bench scale: what a decoded token costs as the context grows, with more threads, and with more agents on one context.

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "qkv/base/fd.h"
#include "qkv/cli/bench.h"
#include "qkv/cli/options.h"
#include "qkv/cli/progress.h"

namespace qkv::cli {
namespace {

struct Options {
  ModelOptions model;
  std::string depths = "1024,2048,4096,8192,16384,32768";
  std::string threads;  // empty: 1 to all
  std::string agents = "1,4,16";
  int agents_depth = 4096;
  int n_decode = 16;
  int runs = 5;
  bool json = false;
};

constexpr int kRead = 1024;  // tokens; deeper contexts are filled with copies

struct Decoded {
  double ms_per_token = 0;    // median over runs
  uint64_t suffix_bytes = 0;  // of the KV of the decoded tokens
};

Result<Decoded> Decode(Sequence& sequence, int n_decode, int runs) {
  const std::vector<Token> tokens = SomeTokens(sequence.model(), n_decode + 1, 2);
  const int depth = static_cast<int>(sequence.tokens().size());
  std::vector<double> ms;
  uint64_t suffix_bytes = 0;
  for (int run = 0; run < runs; ++run) {
    // Threads of the sequence that ran before may still spin for a while.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    QKV_RETURN_IF_ERROR(sequence.Forward({tokens.data(), 1}));  // verifies attached pages, wakes threads
    const auto start = Clock::now();
    for (int t = 1; t <= n_decode; ++t) QKV_RETURN_IF_ERROR(sequence.Forward({&tokens[t], 1}));
    ms.push_back(MsSince(start) / n_decode);
    suffix_bytes = sequence.stats().own_kv_bytes + sequence.stats().tail_bytes;
    QKV_RETURN_IF_ERROR(sequence.Truncate(depth));
  }
  return Decoded{Median(ms), suffix_bytes};
}

Result<Json> Measure(Options options) {
  QKV_ASSIGN_OR_RETURN(const std::vector<int> depths, ParseIntList(options.depths, "--depth", 1, 1 << 20));
  QKV_ASSIGN_OR_RETURN(const std::vector<int> agents, ParseIntList(options.agents, "--agents", 1, 1024));
  const int n_cpus = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  std::vector<int> threads;
  if (options.threads.empty()) {
    for (int n = 1; n < n_cpus; n *= 2) threads.push_back(n);
    threads.push_back(n_cpus);
  } else {
    QKV_ASSIGN_OR_RETURN(threads, ParseIntList(options.threads, "--scale-threads", 1, 512));
  }
  if (options.model.n_threads == 0) options.model.n_threads = n_cpus;
  QKV_ASSIGN_OR_RETURN(options.model.model, FindModel(options.model.model));
  QKV_ASSIGN_OR_RETURN(const auto model, Model::Load(options.model.model));
  Progress progress("bench");
  const auto note = [&](const std::string& text) {
    if (::isatty(STDERR_FILENO)) progress.Note("bench: " + text);
  };
  const auto make = [&](int depth, int n_threads) {
    ModelOptions with = options.model;
    with.n_threads = n_threads;
    with.n_ctx = depth + options.n_decode + 64;
    return NewSequence(with, model);
  };

  Json json;
  json["model"] = model->params().name;
  json["kv"] = options.model.kv;
  json["threads"] = options.model.n_threads;
  json["depth"] = Json::array();
  QKV_ASSIGN_OR_RETURN(const auto empty, make(1, options.model.n_threads));
  QKV_RETURN_IF_ERROR(empty->Forward(SomeTokens(*model, 1, 1)));
  QKV_ASSIGN_OR_RETURN(const Decoded base, Decode(*empty, options.n_decode, options.runs));
  json["decode_ms_at_depth_0"] = base.ms_per_token;
  // Encoding: what the encoder thread computes, and how long decoding waits for it, over some pages' worth of tokens.
  {
    constexpr int kTokens = 512;
    QKV_ASSIGN_OR_RETURN(const auto sequence, make(kTokens, options.model.n_threads));
    const std::vector<Token> tokens = SomeTokens(*model, kTokens, 3);
    const auto start = Clock::now();
    for (const Token& token : tokens) QKV_RETURN_IF_ERROR(sequence->Forward({&token, 1}));
    const double ms = MsSince(start);
    json["encode_percent_of_decode"] = 100 * sequence->stats().encode_ms / ms;
    json["encode_wait_percent_of_decode"] = 100 * sequence->stats().encode_wait_ms / ms;
  }
  const std::vector<Token> read = SomeTokens(*model, kRead, 1);
  for (const int depth : depths) {
    note(fmt::format("depth {}", depth));
    QKV_ASSIGN_OR_RETURN(const auto sequence, make(depth, options.model.n_threads));
    QKV_ASSIGN_OR_RETURN(const Context context, DeepContext(*sequence, depth, read));
    QKV_RETURN_IF_ERROR(sequence->Attach(context));
    QKV_ASSIGN_OR_RETURN(const Decoded deep, Decode(*sequence, options.n_decode, options.runs));
    json["depth"].push_back({{"depth", depth},
                             {"decode_ms", deep.ms_per_token},
                             {"ns_per_token_of_depth", (deep.ms_per_token - base.ms_per_token) * 1e6 / depth}});
  }

  const int depth = options.agents_depth;
  QKV_ASSIGN_OR_RETURN(const auto producer, make(depth, options.model.n_threads));
  QKV_ASSIGN_OR_RETURN(const Context context, DeepContext(*producer, depth, read));
  json["threads_at_depth"] = depth;
  json["by_threads"] = Json::array();
  for (const int n : threads) {
    note(fmt::format("{} threads", n));
    QKV_ASSIGN_OR_RETURN(const auto sequence, make(depth, n));
    QKV_RETURN_IF_ERROR(sequence->Attach(context));
    QKV_ASSIGN_OR_RETURN(const Decoded decoded, Decode(*sequence, options.n_decode, options.runs));
    json["by_threads"].push_back({{"threads", n}, {"decode_ms", decoded.ms_per_token}});
  }
  // Agents of one process that take turns: what grows is each one's suffix, not the context.
  json["by_agents"] = Json::array();
  for (const int n : agents) {
    note(fmt::format("{} agents", n));
    std::vector<std::unique_ptr<Sequence>> sequences;
    std::vector<double> ms;
    uint64_t shared = 0, own = 0;
    for (int i = 0; i < n; ++i) {
      sequences.emplace_back();
      QKV_ASSIGN_OR_RETURN(sequences.back(), make(depth, options.model.n_threads));
      QKV_RETURN_IF_ERROR(sequences.back()->Attach(context));
    }
    for (auto& sequence : sequences) {
      QKV_ASSIGN_OR_RETURN(const Decoded each, Decode(*sequence, options.n_decode, 1));
      ms.push_back(each.ms_per_token);
      shared = std::max(shared, sequence->stats().shared_kv_bytes);
      own += each.suffix_bytes;
    }
    json["by_agents"].push_back(
        {{"agents", n}, {"decode_ms", Median(ms)}, {"shared_kv_bytes", shared}, {"suffix_kv_bytes", own}});
  }
  return json;
}

void PrintTable(const Json& json) {
  constexpr double kMiB = 1 << 20;
  fmt::print("{}, {} pages, {} threads: {:.2f} ms per token with nothing before it\n", json["model"].get<std::string>(),
             json["kv"].get<std::string>(), json["threads"].get<int>(), json["decode_ms_at_depth_0"].get<double>());
  fmt::print("encoding pages takes {:.2f} % of decode time on its own thread; decoding waits for it {:.2f} %\n",
             json["encode_percent_of_decode"].get<double>(), json["encode_wait_percent_of_decode"].get<double>());
  fmt::print("{:>8} {:>12} {:>24}\n", "DEPTH", "DECODE ms", "ns per token of depth");
  for (const Json& row : json["depth"]) {
    fmt::print("{:>8} {:>12.2f} {:>24.0f}\n", row["depth"].get<int>(), row["decode_ms"].get<double>(),
               row["ns_per_token_of_depth"].get<double>());
  }
  fmt::print("at depth {}:\n{:>8} {:>12}\n", json["threads_at_depth"].get<int>(), "THREADS", "DECODE ms");
  for (const Json& row : json["by_threads"]) {
    fmt::print("{:>8} {:>12.2f}\n", row["threads"].get<int>(), row["decode_ms"].get<double>());
  }
  fmt::print("{:>8} {:>12} {:>16} {:>20}\n", "AGENTS", "DECODE ms", "shared KV", "all suffixes' KV");
  for (const Json& row : json["by_agents"]) {
    fmt::print("{:>8} {:>12.2f} {:>12.1f} MiB {:>16.1f} MiB\n", row["agents"].get<int>(),
               row["decode_ms"].get<double>(), row["shared_kv_bytes"].get<double>() / kMiB,
               row["suffix_kv_bytes"].get<double>() / kMiB);
  }
}

}  // namespace

void AddBenchScale(CLI::App& bench, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = bench.add_subcommand("scale", "decode against depth, threads and agents on one context");
  command->add_option("--depth", options->depths, "context lengths in tokens")
      ->capture_default_str()
      ->type_name("N,N,…");
  command->add_option("--scale-threads", options->threads, "numbers of threads; default: 1, 2, 4 … all")
      ->type_name("N,N,…");
  command->add_option("--agents", options->agents, "agents on one context")->capture_default_str()->type_name("N,N,…");
  command->add_option("--agents-depth", options->agents_depth, "tokens of that context, and of the threads' one")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--runs", options->runs, "runs behind each median")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  command->add_flag("--json", options->json, "print JSON");
  options->model.AddTo(*command);
  command->footer("Example: qkvshare bench scale --depth 1024,8192,32768 --kv i8");
  command->callback([options, &status] { status = PrintMeasured(Measure(*options), options->json, PrintTable); });
}

}  // namespace qkv::cli
