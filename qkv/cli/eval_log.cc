// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/eval_log.h"

#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>

namespace qkv::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kHeader[] = "qkvshare_eval";
constexpr int kVersion = 1;

// JSON knows no infinity: null stands for it.
double NumberOf(const Json& json) {
  return json.is_null() ? std::numeric_limits<double>::infinity() : json.get<double>();
}
Json JsonOf(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json ToJson(const std::string& kv, int sample, const std::string& part, const EvalScore& s) {
  Json json{{"kv", kv}, {"sample", sample}, {"part", part}};
  json["bits_per_value"] = s.bits_per_value;
  json["file_bits"] = s.file_bits;
  json["refined_share"] = s.refined_share;
  json["read_bits"] = s.read_bits;
  json["encode_ns"] = s.encode_ns;
  json["decode_ns"] = s.decode_ns;
  if (s.answer_right) json["answer_right"] = *s.answer_right;
  if (s.answer_right_ref) json["answer_right_ref"] = *s.answer_right_ref;
  if (!s.more.empty()) json["more"] = s.more;
  json["same_top"] = s.score.same_top;
  json["right"] = s.score.right;
  json["right_ref"] = s.score.right_ref;
  json["nll"] = JsonOf(s.score.nll);
  json["nll_ref"] = JsonOf(s.score.nll_ref);
  json["kl"] = Json::array();
  for (const double kl : s.score.kl) json["kl"].push_back(JsonOf(kl));
  return json;
}

EvalScore FromJson(const Json& json) {  // throws Json::exception
  EvalScore s;
  s.bits_per_value = json.at("bits_per_value");
  s.file_bits = json.at("file_bits");
  s.refined_share = json.at("refined_share");
  s.read_bits = json.at("read_bits");
  s.encode_ns = json.at("encode_ns");
  s.decode_ns = json.at("decode_ns");
  if (json.contains("answer_right")) s.answer_right = json.at("answer_right").get<bool>();
  if (json.contains("answer_right_ref")) s.answer_right_ref = json.at("answer_right_ref").get<bool>();
  if (json.contains("more")) s.more = json.at("more").get<std::map<std::string, double>>();
  s.score.same_top = json.at("same_top");
  s.score.right = json.at("right");
  s.score.right_ref = json.at("right_ref");
  s.score.nll = NumberOf(json.at("nll"));
  s.score.nll_ref = NumberOf(json.at("nll_ref"));
  for (const Json& kl : json.at("kl")) s.score.kl.push_back(NumberOf(kl));
  return s;
}

}  // namespace

Result<EvalLog> EvalLog::Open(const std::string& path, const Json& settings) {
  EvalLog log;
  log.path_ = path;
  if (path.empty()) return log;
  const std::string header = Json{{kHeader, kVersion}, {"settings", settings}}.dump();
  uint64_t whole = 0;  // bytes up to the last line that is complete
  if (std::ifstream in(path, std::ios::binary); in) {
    std::string line;
    bool first = true;
    while (std::getline(in, line) && !in.eof()) {
      const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (first) {
        if (!json.is_object() || !json.contains(kHeader)) {
          return Err(Code::kInvalidArgument, "--resume: '{}' was not written by eval; give a new name", path);
        }
        if (line != header) {
          return Err(Code::kInvalidArgument, "--resume: '{}' is of other settings ({}), these are {}; give a new name",
                     path, json.contains("settings") ? json["settings"].dump() : "unknown", settings.dump());
        }
        first = false;
      } else {
        try {
          log.scores_[{json.at("kv"), json.at("sample"), json.at("part")}] = FromJson(json);
        } catch (const Json::exception&) {
          return Err(Code::kInvalidArgument, "--resume: '{}' has a line that eval did not write: {:.60}", path, line);
        }
      }
      whole = static_cast<uint64_t>(in.tellg());
    }
    if (first && !line.empty()) {
      return Err(Code::kInvalidArgument, "--resume: '{}' was not written by eval; give a new name", path);
    }
  }
  log.file_.reset(std::fopen(path.c_str(), "ae"));
  if (log.file_ == nullptr) return ErrnoError(fmt::format("--resume: '{}'", path));
  if (::ftruncate(::fileno(log.file_.get()), static_cast<off_t>(whole)) != 0) {
    return ErrnoError(fmt::format("--resume: '{}'", path));
  }
  if (whole == 0) fmt::print(log.file_.get(), "{}\n", header);
  if (std::fflush(log.file_.get()) != 0) return ErrnoError(fmt::format("--resume: '{}'", path));
  return log;
}

const EvalScore* EvalLog::Find(const std::string& kv, int sample, const std::string& part) const {
  const auto found = scores_.find({kv, sample, part});
  return found == scores_.end() ? nullptr : &found->second;
}

Status EvalLog::Add(const std::string& kv, int sample, const std::string& part, EvalScore score) {
  if (file_ != nullptr) {
    const std::string line = ToJson(kv, sample, part, score).dump() + "\n";
    const bool written = std::fwrite(line.data(), 1, line.size(), file_.get()) == line.size();
    if (!written || std::fflush(file_.get()) != 0) return ErrnoError(fmt::format("--resume: '{}'", path_));
  }
  scores_[{kv, sample, part}] = std::move(score);
  return {};
}

std::optional<std::vector<EvalScore>> EvalLog::All(const std::string& kv, int samples, const std::string& part) const {
  std::vector<EvalScore> all;
  for (int i = 0; i < samples; ++i) {
    const EvalScore* score = Find(kv, i, part);
    if (score == nullptr) return std::nullopt;
    all.push_back(*score);
  }
  return all;
}

}  // namespace qkv::cli
