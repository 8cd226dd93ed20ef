// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// inspect and verify: look into a context of the broker, or into a card or segment file.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "qkv/cli/commands.h"
#include "qkv/cli/options.h"
#include "qkv/engine/deep_verify.h"

namespace qkv::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string socket;
  std::string what;
  bool file = false;
  bool tokens = false;
  bool json = false;
  // verify only
  std::string depth = "pages";
  int sample = 64;
  ModelOptions model;
};

Json SegmentJson(const Segment& segment) {
  Json json;
  json["digest"] = segment.digest();
  json["bytes"] = segment.bytes();
  json["version"] = segment.header().version;
  json["layers"] = segment.geometry().n_layers;
  json["kv_heads"] = segment.geometry().n_kv_heads;
  json["head_dim"] = segment.geometry().head_dim;
  json["page_tokens"] = segment.header().page_tokens;
  std::string digest;
  for (const uint8_t byte : segment.header().model_digest) digest += fmt::format("{:02x}", byte);
  json["model_digest"] = digest;
  if (const auto& layers = segment.layers(); layers != nullptr) {
    json["layers_kv"] = Json::array();
    for (int i = 0; i < segment.geometry().n_layers; ++i) json["layers_kv"].push_back(ToString(layers->at(i).codecs));
  }
  json["pages"] = Json::array();
  for (size_t i = 0; i < segment.pages().size(); ++i) {
    const PageEntry& page = segment.pages()[i];
    json["pages"].push_back({{"kv", ToString(segment.codecs(i))},
                             {"tokens", page.tokens},
                             {"first_position", page.first_position},
                             {"offset", page.offset},
                             {"bytes", page.bytes},
                             {"checksum", fmt::format("{:016x}", page.checksum)}});
  }
  return json;
}

Result<Fd> OpenFile(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return ErrnoError(fmt::format("'{}'", path));
  return fd;
}

bool LooksLikeSegment(const Fd& fd) {
  std::array<char, 8> magic{};
  return ::pread(fd.get(), magic.data(), magic.size(), 0) == static_cast<ssize_t>(magic.size()) &&
         magic == kSegmentMagic;
}

Result<CacheCard> ReadCardFile(const Fd& fd) {
  QKV_ASSIGN_OR_RETURN(const uint64_t size, fd.SizeBytes());
  if (size > kMaxCardBytes) return Err(Code::kCorrupt, "{} bytes is too large for a card", size);
  std::vector<std::byte> bytes(size);
  if (::pread(fd.get(), bytes.data(), size, 0) != static_cast<ssize_t>(size)) return ErrnoError("read card");
  return ParseCard(bytes);
}

Status Inspect(const Options& options) {
  if (options.file) {
    QKV_ASSIGN_OR_RETURN(Fd fd, OpenFile(options.what));
    if (LooksLikeSegment(fd)) {
      QKV_ASSIGN_OR_RETURN(const auto segment, Segment::Open(std::move(fd), /*require_seals=*/false));
      fmt::print("{}\n", SegmentJson(*segment).dump(2));
    } else {
      QKV_ASSIGN_OR_RETURN(const CacheCard card, ReadCardFile(fd));
      fmt::print("{}\n", CardToJson(card, options.tokens));
    }
    return {};
  }
  QKV_ASSIGN_OR_RETURN(const auto broker, ConnectBroker(options.socket));
  QKV_ASSIGN_OR_RETURN(const Context context, FetchContext(*broker, options.what));
  Json json;
  json["card"] = Json::parse(CardToJson(context.card, options.tokens), nullptr, /*allow_exceptions=*/false);
  json["segments"] = Json::array();
  for (const auto& segment : context.segments) json["segments"].push_back(SegmentJson(*segment));
  fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
  return {};
}

// Reads some of the tokens again with the model. Returns how many checks failed.
Result<int> VerifyAgainstModel(const Options& options, const Context& context, Json* json) {
  QKV_ASSIGN_OR_RETURN(const auto model, LoadModel(options.model));
  const int threads = options.model.n_threads > 0 ? options.model.n_threads
                                                  : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  QKV_ASSIGN_OR_RETURN(const auto checks, VerifyDeep(model, context, options.sample, threads));
  int failed = 0;
  *json = Json::array();
  for (const DeepCheck& check : checks) {
    failed += check.ok() ? 0 : 1;
    json->push_back({{"where", check.where},
                     {"k_error", check.k_error},
                     {"k_limit", check.k_limit},
                     {"v_error", check.v_error},
                     {"v_limit", check.v_limit},
                     {"kl", check.kl < 0 ? Json() : Json(check.kl)},
                     {"kl_limit", check.kl_limit},
                     {"status", check.ok() ? "ok" : "differs"}});
    if (options.json) continue;
    fmt::print("{} read again: K error {:.1e} (limit {:.1e}), V error {:.1e} (limit {:.1e}){}: {}\n", check.where,
               check.k_error, check.k_limit, check.v_error, check.v_limit,
               check.kl < 0 ? "" : fmt::format(", KL {:.1e} (limit {:.1e})", check.kl, check.kl_limit),
               check.ok() ? "ok" : "differs");
  }
  return failed;
}

// Every page against its checksum, and more if asked. Returns how many failed.
Result<int> Verify(const Options& options) {
  const bool deep = options.depth == "deep";
  if (deep && options.file) {
    return Err(Code::kInvalidArgument, "verify: --verify=deep needs a card and its segments, not one file");
  }
  Context context;
  std::vector<std::shared_ptr<const Segment>>& segments = context.segments;
  if (options.file) {
    QKV_ASSIGN_OR_RETURN(Fd fd, OpenFile(options.what));
    if (!LooksLikeSegment(fd)) {
      QKV_ASSIGN_OR_RETURN(const CacheCard card, ReadCardFile(fd));  // checks its own checksum
      fmt::print("card {}: ok\n", card.id());
      return 0;
    }
    QKV_ASSIGN_OR_RETURN(auto segment, Segment::Open(std::move(fd), /*require_seals=*/false));
    segments.push_back(std::move(segment));
  } else {
    QKV_ASSIGN_OR_RETURN(const auto broker, ConnectBroker(options.socket));
    QKV_ASSIGN_OR_RETURN(context, FetchContext(*broker, options.what));
  }
  Json json = Json::array();
  int failed = 0;
  for (size_t s = 0; s < segments.size(); ++s) {
    for (size_t page = 0; page < segments[s]->pages().size(); ++page) {
      const Status status = segments[s]->Verify(page);
      failed += status ? 0 : 1;
      const std::string text = status ? "ok" : std::string(ReasonName(status.error().reason));
      if (options.json) {
        json.push_back(
            {{"segment", s}, {"page", page}, {"tokens", segments[s]->pages()[page].tokens}, {"status", text}});
      } else {
        fmt::print("segment {} page {} ({} tokens): {}\n", s, page, segments[s]->pages()[page].tokens, text);
      }
    }
  }
  Json checks;
  if (deep && failed == 0) {
    QKV_ASSIGN_OR_RETURN(failed, VerifyAgainstModel(options, context, &checks));
  }
  if (options.json) {
    Json report{{"pages", json}, {"failed", failed}};
    if (deep) report["read_again"] = checks;
    fmt::print("{}\n", report.dump(2));
  }
  return failed;
}

void AddTarget(CLI::App& command, Options& options) {
  command
      .add_option("what", options.what, "name or id of a context at the broker; with --file, a card or segment file")
      ->required();
  command.add_flag("--file", options.file, "look at a file instead of asking the broker");
  AddSocketOption(command, options.socket);
}

}  // namespace

void AddInspect(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("inspect", "print a context's card and segments as JSON");
  AddTarget(*command, *options);
  command->add_flag("--tokens", options->tokens, "with all token ids");
  command->footer("Example: qkvshare inspect report\n         qkvshare inspect --file tests/golden/segment-v2.bin");
  command->callback([options, &status] {
    const Status done = Inspect(*options);
    status = done ? 0 : Fail(done.error());
  });
}

void AddVerify(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("verify", "check every page of a context against its checksum");
  AddTarget(*command, *options);
  command->add_flag("--json", options->json, "print JSON");
  command
      ->add_option("--verify", options->depth,
                   "pages: checksums; deep: also read the first and last tokens again with the model, and compare")
      ->check(CLI::IsMember({"pages", "deep"}))
      ->capture_default_str();
  command->add_option("--sample", options->sample, "with --verify=deep: tokens to read again at either end")
      ->capture_default_str()
      ->check(CLI::Range(2, 1 << 16));
  command->add_option("-m,--model", options->model.model, "with --verify=deep: the GGUF file")->type_name("FILE");
  command->add_option("-t,--threads", options->model.n_threads, "with --verify=deep: threads (default: all cores)")
      ->check(CLI::Range(1, 512));
  command->footer(
      "Exit status 0 if every page is as it was written, and if the model makes the same of the tokens.\n"
      "Example: qkvshare verify report\n         qkvshare verify report --verify=deep -m MODEL.gguf");
  command->callback([options, &status] {
    const Result<int> failed = Verify(*options);
    status = !failed ? Fail(failed.error()) : *failed > 0 ? 2 : 0;
  });
}

}  // namespace qkv::cli
