// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// bench handoff: what a consumer gains by attaching, against reading again, and against libllama's own ways on the same
// GGUF with the same threads, measured in turn in one call.

#include <memory>
#include <nlohmann/json.hpp>

#include "qkv/base/temp_dir.h"
#include "qkv/broker/server.h"
#include "qkv/cli/bench.h"
#include "qkv/cli/options.h"
#include "qkv/cli/progress.h"
#include "qkv/engine/peer.h"

namespace qkv::cli {
namespace {

struct Options {
  ModelOptions model;
  std::string contexts = "1024,4096,8192";
  int n_new = 32;
  int attach_runs = 100;
  int runs = 5;
  bool no_peer = false;
  bool json = false;
};

struct PeerTimes {
  double reprefill_ms = 0;
  double restore_ttft_ms = 0;
  std::string config;
};

// Both with and without flash attention; the better of each figure counts.
Result<PeerTimes> MeasurePeer(Peer& peer, const std::vector<Token>& context, const std::vector<Token>& suffix,
                              int n_threads, int n_batch, int runs) {
  PeerTimes best;
  for (const bool flash : {false, true}) {
    PeerOptions options;
    options.n_ctx = static_cast<int>(context.size() + suffix.size()) + 64;
    options.n_threads = n_threads;
    options.n_batch = n_batch;
    options.flash_attention = flash;
    QKV_RETURN_IF_ERROR(peer.Reset(options));
    const auto start = Clock::now();
    QKV_RETURN_IF_ERROR(peer.Forward(context));
    const double context_ms = MsSince(start);
    const auto save_start = Clock::now();
    QKV_ASSIGN_OR_RETURN(const auto state, peer.SaveState());
    const double save_ms = MsSince(save_start);
    const auto suffix_start = Clock::now();
    QKV_RETURN_IF_ERROR(peer.Forward(suffix));
    const double reprefill_ms = context_ms + MsSince(suffix_start);
    std::vector<double> ttft;
    for (int i = 0; i < runs; ++i) {
      QKV_RETURN_IF_ERROR(peer.Reset(options));  // another process's context; making it is not counted
      const auto restore_start = Clock::now();
      QKV_RETURN_IF_ERROR(peer.RestoreState(state));
      QKV_RETURN_IF_ERROR(peer.Forward(suffix));
      ttft.push_back(save_ms + MsSince(restore_start));
    }
    const std::string config = flash ? "f16, flash attention" : "f16, no flash attention";
    if (best.config.empty() || reprefill_ms < best.reprefill_ms) best.reprefill_ms = reprefill_ms;
    if (best.config.empty() || Median(ttft) < best.restore_ttft_ms) {
      best.restore_ttft_ms = Median(ttft);
      best.config = config;
    }
  }
  return best;
}

Result<Json> MeasureLength(const Options& options, const std::shared_ptr<const Model>& model, Peer* peer,
                           BrokerClient& broker, int length) {
  const std::vector<Token> context = SomeTokens(*model, length, 1);
  const std::vector<Token> suffix = SomeTokens(*model, options.n_new, 2);
  ModelOptions model_options = options.model;
  model_options.n_ctx = length + options.n_new + 64;

  QKV_ASSIGN_OR_RETURN(const auto producer, NewSequence(model_options, model));
  const auto start = Clock::now();
  QKV_RETURN_IF_ERROR(producer->Forward(context));
  const double context_ms = MsSince(start);
  QKV_ASSIGN_OR_RETURN(const Context published, producer->Publish({}));
  QKV_RETURN_IF_ERROR(PublishContext(broker, published));
  const Sequence::Stats producer_stats = producer->stats();
  const auto suffix_start = Clock::now();
  QKV_RETURN_IF_ERROR(producer->Forward(suffix));
  const double reprefill_ms = context_ms + MsSince(suffix_start);

  std::vector<double> attach, ttft, verify;
  Sequence::Stats stats;
  for (int i = 0; i < options.attach_runs; ++i) {
    QKV_ASSIGN_OR_RETURN(const auto consumer, NewSequence(model_options, model));
    const auto attach_start = Clock::now();
    QKV_ASSIGN_OR_RETURN(const Context fetched, FetchContext(broker, published.card.id()));
    QKV_RETURN_IF_ERROR(consumer->Attach(fetched));
    attach.push_back(MsSince(attach_start));
    QKV_RETURN_IF_ERROR(broker.ReleaseLease(fetched.lease));
    if (static_cast<int>(ttft.size()) == options.runs) continue;
    QKV_RETURN_IF_ERROR(consumer->Forward(suffix));
    ttft.push_back(MsSince(attach_start));
    stats = consumer->stats();
    verify.push_back(stats.verify_ms);
  }
  QKV_RETURN_IF_ERROR(broker.Remove(published.card.id()));

  Json row;
  row["context"] = length;
  row["kv"] = options.model.kv;
  row["attach_ms_p50"] = Quantile(attach, 0.5);
  row["attach_ms_p99"] = Quantile(attach, 0.99);
  row["ttft_handoff_ms"] = Median(ttft);
  row["verify_ms"] = Median(verify);
  row["ttft_reprefill_ms"] = reprefill_ms;
  row["peer_reprefill_ms"] = nullptr;
  row["peer_restore_ttft_ms"] = nullptr;
  row["kv_bytes"] = producer_stats.own_kv_bytes;
  row["tokens_reused"] = stats.tokens_reused;
  row["tokens_recomputed"] = stats.tokens_recomputed;
  if (peer != nullptr) {
    const int threads = options.model.n_threads;
    QKV_ASSIGN_OR_RETURN(const PeerTimes times,
                         MeasurePeer(*peer, context, suffix, threads, options.model.n_batch, options.runs));
    row["peer_reprefill_ms"] = times.reprefill_ms;
    row["peer_restore_ttft_ms"] = times.restore_ttft_ms;
    row["peer_config"] = times.config;
  }
  return row;
}

// Reading and generating with nothing before them: the ratio of handoff to re-prefill means something only if these are
// no slower than the peer's. Runs of both are interleaved; medians.
Result<Json> MeasureShort(const Options& options, const std::shared_ptr<const Model>& model, Peer& peer) {
  constexpr int kPrefill = 512, kDecode = 64;
  const std::vector<Token> prompt = SomeTokens(*model, kPrefill, 3);
  ModelOptions model_options = options.model;
  model_options.n_ctx = kPrefill + kDecode + 64;
  std::vector<double> prefill, decode, peer_prefill, peer_decode;
  for (int i = 0; i < options.runs; ++i) {
    QKV_ASSIGN_OR_RETURN(const auto sequence, NewSequence(model_options, model));
    auto start = Clock::now();
    QKV_RETURN_IF_ERROR(sequence->Forward(prompt));
    prefill.push_back(kPrefill / MsSince(start) * 1000);
    QKV_RETURN_IF_ERROR(sequence->Truncate(1));
    start = Clock::now();
    for (int t = 0; t < kDecode; ++t) QKV_RETURN_IF_ERROR(sequence->Forward({&prompt[t], 1}));
    decode.push_back(kDecode / MsSince(start) * 1000);

    PeerOptions peer_options;
    peer_options.n_ctx = model_options.n_ctx;
    peer_options.n_threads = options.model.n_threads;
    peer_options.n_batch = options.model.n_batch;
    QKV_RETURN_IF_ERROR(peer.Reset(peer_options));
    start = Clock::now();
    QKV_RETURN_IF_ERROR(peer.Forward(prompt));
    peer_prefill.push_back(kPrefill / MsSince(start) * 1000);
    QKV_RETURN_IF_ERROR(peer.Reset(peer_options));
    QKV_RETURN_IF_ERROR(peer.Forward({prompt.data(), 1}));
    start = Clock::now();
    for (int t = 0; t < kDecode; ++t) QKV_RETURN_IF_ERROR(peer.Forward({&prompt[t], 1}));
    peer_decode.push_back(kDecode / MsSince(start) * 1000);
  }
  Json json;
  json["prefill_tokens"] = kPrefill;
  json["decode_tokens"] = kDecode;
  json["prefill_tps"] = Median(prefill);
  json["peer_prefill_tps"] = Median(peer_prefill);
  json["decode_tps"] = Median(decode);
  json["peer_decode_tps"] = Median(peer_decode);
  return json;
}

Result<Json> Measure(Options options) {
  QKV_ASSIGN_OR_RETURN(const std::vector<int> lengths, ParseIntList(options.contexts, "--context", 1, 1 << 20));
  QKV_ASSIGN_OR_RETURN(options.model.model, FindModel(options.model.model));
  if (options.model.n_threads == 0) options.model.n_threads = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  QKV_ASSIGN_OR_RETURN(const auto model, Model::Load(options.model.model));
  model->identity();
  std::unique_ptr<Peer> peer;
  if (!options.no_peer) {
    QKV_ASSIGN_OR_RETURN(peer, Peer::Load(options.model.model));
  }
  QKV_ASSIGN_OR_RETURN(const TempDir dir, TempDir::Create());
  BrokerOptions broker_options;
  broker_options.socket_path = dir.path() + "/broker.sock";
  QKV_ASSIGN_OR_RETURN(const auto server, BrokerServer::Start(broker_options));
  QKV_ASSIGN_OR_RETURN(const auto broker, BrokerClient::Connect(broker_options.socket_path));

  Progress progress("bench");
  Json json;
  json["model"] = model->params().name;
  json["threads"] = options.model.n_threads;
  json["new_tokens"] = options.n_new;
  json["results"] = Json::array();
  if (peer != nullptr) {
    if (::isatty(STDERR_FILENO)) progress.Note("bench: short context, ours and libllama in turn");
    QKV_ASSIGN_OR_RETURN(json["short_context"], MeasureShort(options, model, *peer));
  }
  for (const int length : lengths) {
    if (::isatty(STDERR_FILENO)) progress.Note(fmt::format("bench: context of {} tokens", length));
    QKV_ASSIGN_OR_RETURN(Json row, MeasureLength(options, model, peer.get(), *broker, length));
    json["results"].push_back(std::move(row));
  }
  return json;
}

void PrintTable(const Json& json) {
  if (json.contains("short_context")) {
    const Json& s = json["short_context"];
    fmt::print("short context: prefill {:.0f} tok/s (libllama {:.0f}), decode {:.1f} tok/s (libllama {:.1f})\n",
               s["prefill_tps"].get<double>(), s["peer_prefill_tps"].get<double>(), s["decode_tps"].get<double>(),
               s["peer_decode_tps"].get<double>());
  }
  fmt::print("{:>8} {:>12} {:>12} {:>14} {:>14} {:>16} {:>16} {:>10}\n", "CONTEXT", "ATTACH p50", "p99", "TTFT handoff",
             "TTFT reread", "libllama restore", "libllama reread", "KV");
  const auto ms = [](const Json& value) {
    return value.is_null() ? std::string("-") : fmt::format("{:.2f} ms", value.get<double>());
  };
  for (const Json& row : json["results"]) {
    fmt::print("{:>8} {:>12} {:>12} {:>14} {:>14} {:>16} {:>16} {:>6.1f} MiB\n", row["context"].get<int>(),
               ms(row["attach_ms_p50"]), ms(row["attach_ms_p99"]), ms(row["ttft_handoff_ms"]),
               ms(row["ttft_reprefill_ms"]), ms(row["peer_restore_ttft_ms"]), ms(row["peer_reprefill_ms"]),
               row["kv_bytes"].get<double>() / (1 << 20));
  }
}

}  // namespace

void AddBenchHandoff(CLI::App& bench, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = bench.add_subcommand(
      "handoff", "attach and go on, against reading again and against libllama's save and restore");
  command->add_option("--context", options->contexts, "context lengths in tokens")
      ->capture_default_str()
      ->type_name("N,N,…");
  command->add_option("--new", options->n_new, "new tokens that the consumer reads")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  command->add_option("--attach-runs", options->attach_runs, "attaches measured per length")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  command->add_option("--runs", options->runs, "runs behind each other median")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  command->add_flag("--no-peer", options->no_peer, "do not run libllama");
  command->add_flag("--json", options->json, "print JSON");
  options->model.AddTo(*command);
  command->footer("Example: qkvshare bench handoff --context 1024,4096,8192 --json");
  command->callback([options, &status] { status = PrintMeasured(Measure(*options), options->json, PrintTable); });
}

}  // namespace qkv::cli
