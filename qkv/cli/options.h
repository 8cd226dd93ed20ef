// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Flags that several commands share, and what they open. One thread (main).

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>

#include "qkv/broker/client.h"
#include "qkv/engine/agent.h"
#include "qkv/engine/sequence.h"

namespace qkv::cli {

struct ModelOptions {
  std::string model;  // empty: $QKVSHARE_MODEL, else the model that `make setup` fetched
  int n_ctx = 0;      // 0: what the model was trained for
  int n_threads = 0;  // 0: all cores
  int n_batch = 512;
  std::string kv = "i8";
  bool balanced = false;           // with the calibration beside the model
  double kv_bits = 0;              // > 0: the best pair within it, instead of `kv`
  std::optional<KvChoice> chosen;  // instead of both
  double refine = kDefaultRefine;

  void AddTo(CLI::App& app);
};

struct TurnOptions {
  std::string system;
  std::string prompt;
  std::string prompt_file;  // "-": standard input
  bool raw = false;
  int max_tokens = 256;
  bool ignore_eos = false;
  bool logits_digest = false;
  Sampling sampling;
  bool json = false;
  bool stats = false;
  std::string trace_file;

  void AddTo(CLI::App& app);
  Result<TurnRequest> ToRequest() const;  // reads the prompt file
};

// How a context is published.
struct PublishFlags {
  int64_t ttl_seconds = 0;
  bool pin = false;
  bool encrypt = false;

  void AddTo(CLI::App& app);
  void ApplyTo(TurnRequest& request) const;
};

// Adds --socket.
void AddSocketOption(CLI::App& app, std::string& socket);
// `socket` empty: DefaultSocketPath(). With $QKVSHARE_TOKEN as a tenant's token, and $QKVSHARE_BROKER_UID as a user whose
// broker is to be trusted besides our own. The error says how to start a broker.
Result<std::unique_ptr<BrokerClient>> ConnectBroker(const std::string& socket);

int ThreadsOf(const ModelOptions& options);  // all cores where nothing was said
Result<std::string> FindModel(const std::string& given);
// A number in [low, high]. CLI::Range lets NaN through.
CLI::Validator Within(double low, double high);
// Adds --refine, of a reader of pages with refinement planes.
void AddRefineOption(CLI::App& app, double& refine);

// BITS of "layers:BITS", the codecs by layer that take no more per value; nothing: other codecs. Error: kInvalidArgument.
Result<std::optional<double>> ParseLayerBits(const std::string& kv);
// The codecs to write: those named, or the best within --kv-bits of this model. Without a model only the flags are checked.
Result<KvChoice> ChooseCodecs(const ModelOptions& options, const Model* model);

// Loads the model and makes a sequence; shows prefill progress on a terminal.
Result<std::shared_ptr<const Model>> LoadModel(const ModelOptions& options);
// Of --bal: the file beside the model. Null without it. Errors: Calibration::Read's.
Result<std::shared_ptr<const Calibration>> CalibrationOf(const ModelOptions& options, const Model& model);
Result<std::unique_ptr<Sequence>> NewSequence(const ModelOptions& options, std::shared_ptr<const Model> model,
                                              Trace* trace = nullptr);

// "1024,4096" → numbers, each within [low, high].
Result<std::vector<int>> ParseIntList(const std::string& text, const std::string& flag, int low, int high);

// One line on stderr ("qkvshare: …"), and the exit status.
int Fail(const Error& error);

}  // namespace qkv::cli
