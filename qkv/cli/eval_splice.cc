// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/eval_splice.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "qkv/base/temp_dir.h"
#include "qkv/cli/eval_log.h"
#include "qkv/cli/eval_samples.h"
#include "qkv/cli/options.h"
#include "qkv/cli/progress.h"
#include "qkv/engine/peer.h"
#include "qkv/engine/splice_probe.h"

namespace qkv::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kOwn = 48;
constexpr int kProducer = 64;
constexpr int kPassage = 256;
constexpr int kPrompt = 32;
constexpr int kScored = 96;
constexpr char kBaseline[] = "rotate";
constexpr std::array<const char*, 2> kKinds = {"related", "unrelated"};

// Of a reader, or of a producer; cut to length.
constexpr std::array<const char*, 4> kSystems = {
    "You are a careful reader who compares what several colleagues have found. Weigh what each of them says, say where "
    "they disagree, and never add anything that is not in front of you. Answer in plain words, in one paragraph, and "
    "name the passage that you rely on whenever a claim could be doubted by somebody who has not seen it.",
    "You write summaries for a busy editor. Keep to the facts that matter for the question, leave out what is only "
    "colour, and keep names, places and dates exactly as they stand in the source. When two sources tell the same "
    "story "
    "in different ways, follow the one that is more precise and mention the other one briefly at the end.",
    "You are an archivist. Your notes are read years later by people who know nothing of the case, so explain every "
    "abbreviation, write out every date, and keep the order in which things happened. You do not judge and you do not "
    "guess; where the record is silent you say so, and you say where one might look for more.",
    "You help a teacher to prepare lessons. Find in the material what a pupil of fourteen can follow, put hard words "
    "into easy ones, and ask one good question after every paragraph. Keep a friendly tone, avoid lists, and never "
    "make a sentence longer than it has to be for its meaning to stay what it was in the material itself."};

constexpr std::array<const char*, 10> kColours = {"amber",  "copper",  "crimson", "ivory",  "violet",
                                                  "silver", "scarlet", "golden",  "purple", "green"};
constexpr std::array<const char*, 10> kThings = {"lantern", "anchor",  "mirror", "ladder",  "violin",
                                                 "kettle",  "compass", "saddle", "trumpet", "basket"};

// A case, and which scored places count for what.
struct Sample {
  SpliceCase what;
  std::vector<std::pair<std::string, std::vector<int>>> parts;  // name, rows; no rows: all
};

Result<std::vector<Token>> SystemTokens(const Vocab& vocab, int which, size_t n) {
  QKV_ASSIGN_OR_RETURN(auto tokens, vocab.SystemTurn(kSystems[static_cast<size_t>(which) % kSystems.size()]));
  if (tokens.size() < n) {
    return Err(Code::kInvalidArgument, "this model's vocabulary makes {} tokens of a system message, {} are needed",
               tokens.size(), n);
  }
  tokens.resize(n);
  return tokens;
}

std::vector<Token> Part(std::span<const Token> tokens, size_t first, size_t n) {
  const auto part = tokens.subspan(first, n);
  return {part.begin(), part.end()};
}

Status CheckLength(size_t has, size_t needs, const std::string& name) {
  if (has >= needs) return {};
  return Err(Code::kInvalidArgument, "'{}' has {} tokens, the samples need {}: give a longer text or fewer --samples",
             name, has, needs);
}

// Stretches at even distances: two passages and what follows them. In the unrelated cases the first passage is from half
// the text away.
Result<std::vector<Sample>> TextCases(const Vocab& vocab, std::span<const Token> text, int samples,
                                      const std::string& name) {
  constexpr size_t kLength = 2 * kPassage + kPrompt + kScored + 1;
  const auto n = static_cast<size_t>(samples);
  QKV_RETURN_IF_ERROR(CheckLength(text.size(), 2 * n * kLength, name));
  const size_t stride = text.size() / (2 * n);
  std::vector<Sample> cases;
  for (size_t i = 0; i < n; ++i) {
    for (size_t kind = 0; kind < 2; ++kind) {
      const size_t at = (2 * i + kind) * stride;
      Sample sample;
      SpliceCase& c = sample.what;
      QKV_ASSIGN_OR_RETURN(c.own, SystemTokens(vocab, static_cast<int>(i), kOwn));
      QKV_ASSIGN_OR_RETURN(c.producer, SystemTokens(vocab, static_cast<int>(i) + 1, kProducer));
      c.a = Part(text, kind == 0 ? at : (at + text.size() / 2) % (text.size() - kPassage), kPassage);
      c.b = Part(text, at + kPassage, kPassage);
      c.prompt = Part(text, at + 2 * kPassage, kPrompt);
      c.scored = Part(text, at + 2 * kPassage + kPrompt, kScored + 1);
      c.seed = 2 * i + kind;
      sample.parts = {{kKinds[kind], {}}};
      cases.push_back(std::move(sample));
    }
  }
  return cases;
}

// Each passage says something once that no other does. Asked for in either order.
Result<std::vector<Sample>> FactCases(const Vocab& vocab, std::span<const Token> text, int samples,
                                      const std::string& name) {
  const auto n = static_cast<size_t>(samples);
  QKV_RETURN_IF_ERROR(CheckLength(text.size(), n * 2 * kPassage, name));
  if (2 * n > kColours.size() * kThings.size()) {
    return Err(Code::kInvalidArgument, "--samples {}: there are {} facts, two for each sample", samples,
               kColours.size() * kThings.size());
  }
  const size_t stride = text.size() / n;
  std::mt19937_64 random(20260701);
  std::vector<Sample> cases;
  for (size_t i = 0; i < n; ++i) {
    Sample sample;
    SpliceCase& c = sample.what;
    QKV_ASSIGN_OR_RETURN(c.own, SystemTokens(vocab, static_cast<int>(i), kOwn));
    QKV_ASSIGN_OR_RETURN(c.producer, SystemTokens(vocab, static_cast<int>(i) + 1, kProducer));
    c.seed = i;
    std::array<std::vector<Token>, 2> asked;  // the sentence again
    std::array<size_t, 2> asked_for{};        // from this token of it on
    for (size_t k = 0; k < 2; ++k) {
      const size_t fact = 2 * i + k;
      const std::string key = fmt::format(" The secret code of the {} {} is", kColours[fact % kColours.size()],
                                          kThings[fact / kColours.size()]);
      const std::string sentence = fmt::format("{} {}.", key, 10000 + random() % 90000);
      QKV_ASSIGN_OR_RETURN(asked[k], vocab.Tokenize(sentence, false, false));
      QKV_ASSIGN_OR_RETURN(const auto key_tokens, vocab.Tokenize(key, false, false));
      asked_for[k] = key_tokens.size();
      std::vector<Token>& passage = k == 0 ? c.a : c.b;
      const size_t filler = kPassage - asked[k].size();
      const size_t depth = random() % (filler + 1);
      passage = Part(text, i * stride + k * kPassage, depth);
      passage.insert(passage.end(), asked[k].begin(), asked[k].end());
      const auto rest = Part(text, i * stride + k * kPassage + depth, filler - depth);
      passage.insert(passage.end(), rest.begin(), rest.end());
    }
    // Behind a full stop of the reader's own; what is scored begins with it.
    QKV_ASSIGN_OR_RETURN(c.prompt, vocab.Tokenize("\n\nTo repeat what was said above:", false, false));
    const bool swapped = random() % 2 == 1;
    for (const size_t k : {swapped ? size_t{1} : size_t{0}, swapped ? size_t{0} : size_t{1}}) {
      std::vector<int> rows;  // that predict the number, not the full stop behind it
      for (size_t t = asked_for[k]; t + 1 < asked[k].size(); ++t) {
        rows.push_back(static_cast<int>(c.scored.size() + t) - 1);
      }
      sample.parts.emplace_back(k == 0 ? "first passage" : "second passage", std::move(rows));
      c.scored.insert(c.scored.end(), asked[k].begin(), asked[k].end());
    }
    std::ranges::sort(sample.parts);
    cases.push_back(std::move(sample));
  }
  return cases;
}

class Evaluation {
 public:
  explicit Evaluation(const SpliceEvalOptions& options) : options_(options) {}

  Result<Json> Run() {
    const auto names = options_.arms.empty() ? DefaultSpliceArms(options_.protocol) : options_.arms;
    for (const std::string& name : names) {
      QKV_ASSIGN_OR_RETURN(SpliceArm arm, ParseSpliceArm(name));
      arms_.push_back(std::move(arm));
    }
    QKV_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(options_.text));
    QKV_RETURN_IF_ERROR(LoadModel());
    const Vocab vocab(*model_);
    QKV_ASSIGN_OR_RETURN(const auto tokens, vocab.Tokenize(text, false, false));
    const bool recall = options_.protocol == "recall";
    QKV_ASSIGN_OR_RETURN(cases_, recall ? FactCases(vocab, tokens, options_.samples, options_.text)
                                        : TextCases(vocab, tokens, options_.samples, options_.text));
    const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
    settings_ = Json{{"weights_digest", model_->identity().weights_digest()},
                     {"text_digest", fmt::format("{:016x}{:016x}", hash.high64, hash.low64)},
                     {"protocol", options_.protocol},
                     {"samples", options_.samples}};
    QKV_ASSIGN_OR_RETURN(log_, EvalLog::Open(options_.resume, settings_));
    Progress progress("eval");
    for (size_t i = 0; i < cases_.size(); ++i) {
      std::unique_ptr<SpliceProbe> probe;
      for (size_t arm = 0; arm < arms_.size(); ++arm) {
        QKV_RETURN_IF_ERROR(Score(i, arms_[arm], probe));
        progress.Update(i * arms_.size() + arm + 1, cases_.size() * arms_.size());
      }
    }
    return Report();
  }

 private:
  Status LoadModel() {
    QKV_ASSIGN_OR_RETURN(std::string path, FindModel(options_.model));
    TempDir temporary;
    if (options_.weights == "f32") {
      QKV_RETURN_IF_ERROR(Model::Load(path));  // errors about what was given, not about a copy of it
      QKV_ASSIGN_OR_RETURN(temporary, TempDir::Create());
      const std::string copy = temporary.path() + "/f32.gguf";
      QKV_RETURN_IF_ERROR(WriteRequantizedModel(path, "f32", copy));
      path = copy;
    }
    QKV_ASSIGN_OR_RETURN(model_, Model::Load(path));  // stays mapped when the file goes
    probe_options_.n_threads = options_.n_threads > 0
                                   ? options_.n_threads
                                   : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    return {};
  }

  Status Score(size_t i, const SpliceArm& arm, std::unique_ptr<SpliceProbe>& probe) {
    const Sample& sample = cases_[i];
    const bool known = std::ranges::all_of(sample.parts, [&](const auto& part) {
      return log_.Find(arm.name, static_cast<int>(i), part.first) != nullptr;
    });
    if (known) return {};
    if (probe == nullptr) {
      QKV_ASSIGN_OR_RETURN(probe, SpliceProbe::Read(model_, sample.what, probe_options_));
    }
    QKV_ASSIGN_OR_RETURN(const SpliceScore found, probe->Score(arm));
    for (const auto& [part, rows] : sample.parts) {
      EvalScore score;
      for (size_t row = 0; row < found.places.size(); ++row) {
        const bool counts = rows.empty() || std::ranges::find(rows, static_cast<int>(row)) != rows.end();
        if (counts) score.score.Add(found.places[row]);
      }
      score.more = {{"recomputed", static_cast<double>(found.recomputed)}, {"ms", found.ms}};
      if (found.rung >= 0) score.more["rung"] = found.rung;
      if (found.probe_kl >= 0) score.more["probe_kl"] = found.probe_kl;
      QKV_RETURN_IF_ERROR(log_.Add(arm.name, static_cast<int>(i), part, std::move(score)));
    }
    return {};
  }

  // Of all cases that have this part, in order.
  std::vector<EvalScore> All(const std::string& arm, const std::string& part) const {
    std::vector<EvalScore> all;
    for (size_t i = 0; i < cases_.size(); ++i) {
      if (const EvalScore* score = log_.Find(arm, static_cast<int>(i), part)) all.push_back(*score);
    }
    return all;
  }

  static double Mean(const std::vector<EvalScore>& scores, const std::string& figure) {
    double sum = 0;
    for (const EvalScore& score : scores) sum += score.more.at(figure);
    return sum / static_cast<double>(scores.size());
  }
  static double Median(const std::vector<EvalScore>& scores, const std::string& figure) {
    std::vector<double> values;
    for (const EvalScore& score : scores) values.push_back(score.more.at(figure));
    return QuantileOf(std::move(values), 0.5);
  }
  static std::vector<SampleScore> ScoresOf(const std::vector<EvalScore>& all) {
    std::vector<SampleScore> scores;
    for (const EvalScore& score : all) scores.push_back(score.score);
    return scores;
  }

  Json RowOf(const SpliceArm& arm, const std::string& part) const {
    const std::vector<EvalScore> all = All(arm.name, part);
    const std::vector<SampleScore> scores = ScoresOf(all);
    const QualitySummary q = Summarize(scores);
    Json row{{"arm", arm.name},         {"recomputed", Mean(all, "recomputed")},
             {"ms", Median(all, "ms")}, {"kl_mean", q.kl.value},
             {"kl_se", q.kl.se},        {"kl_p99", q.kl_p99},
             {"top1", q.top1.value},    {"samples", q.samples},
             {"tokens", q.tokens}};
    if (const std::vector<SampleScore> base = ScoresOf(All(kBaseline, part)); base.size() == scores.size()) {
      const Estimate ratio = PairedKlRatio(scores, base);
      if (ratio.value > 0) {
        row["kl_vs_rotate"] = ratio.value;
        row["kl_vs_rotate_se_factor"] = ratio.se;
      }
      size_t better = 0;
      for (size_t i = 0; i < scores.size(); ++i) better += scores[i].kl_mean() < base[i].kl_mean();
      row["better_in"] = better;
    }
    if (options_.protocol == "recall") {
      size_t whole = 0, whole_ref = 0;
      for (const SampleScore& score : scores) {
        whole += score.right == score.n();
        whole_ref += score.right_ref == score.n();
      }
      row["recalled"] = whole;
      row["recalled_in_full_prefill"] = whole_ref;
    }
    if (all.front().more.contains("rung")) {
      std::map<std::string, int> rungs;
      for (const EvalScore& score : all) ++rungs[fmt::format("{}", static_cast<int>(score.more.at("rung")))];
      row["rungs"] = rungs;
      row["probe_kl"] = Mean(all, "probe_kl");
    }
    return row;
  }

  Json Report() const {
    Json json{{"model", model_->params().name}, {"weights", options_.weights}, {"text", options_.text}};
    json.update(settings_);
    json["parts"] = Json::array();
    std::vector<std::string> parts;
    for (const Sample& sample : cases_) {
      for (const auto& [part, rows] : sample.parts) {
        if (std::ranges::find(parts, part) == parts.end()) parts.push_back(part);
      }
    }
    for (const std::string& part : parts) {
      Json rows = Json::array();
      for (const SpliceArm& arm : arms_) rows.push_back(RowOf(arm, part));
      json["parts"].push_back(Json{{"part", part}, {"results", std::move(rows)}});
    }
    return json;
  }

  const SpliceEvalOptions& options_;
  std::vector<SpliceArm> arms_;
  std::shared_ptr<const Model> model_;
  ProbeOptions probe_options_;
  std::vector<Sample> cases_;
  Json settings_;
  EvalLog log_;
};

std::string SpliceTable(const Json& json) {
  const bool recall = json["protocol"] == "recall";
  std::string text = fmt::format("{}, weights {}, protocol {}\n", json["model"].get<std::string>(),
                                 json["weights"].get<std::string>(), json["protocol"].get<std::string>());
  for (const Json& part : json["parts"]) {
    const Json& rows = part["results"];
    text += fmt::format(
        "\n{}, {} cases:\n\n| arm | read again | ms | mean KL | p99 KL | top-1 | vs rotate | better in |{}\n",
        part["part"].get<std::string>(), rows.front()["samples"].get<int>(),
        recall ? " recalled | by full prefill |" : "");
    text += fmt::format("|---|---:|---:|---:|---:|---:|---:|---:|{}\n", recall ? "---:|---:|" : "");
    for (const Json& row : rows) {
      const double ms = row["ms"].get<double>();
      text += fmt::format(
          "| `{}` | {:.0f} | {} | {:.2e} ± {:.0e} | {:.1e} | {:.1f} % | {} | {} |", row["arm"].get<std::string>(),
          row["recomputed"].get<double>(), ms > 0 ? fmt::format("{:.1f}", ms) : "", row["kl_mean"].get<double>(),
          row["kl_se"].get<double>(), row["kl_p99"].get<double>(), 100 * row["top1"].get<double>(),
          row.contains("kl_vs_rotate") ? fmt::format("{:.3f} x/÷ {:.2f}", row["kl_vs_rotate"].get<double>(),
                                                     row["kl_vs_rotate_se_factor"].get<double>())
                                       : "",
          row.contains("better_in") ? std::to_string(row["better_in"].get<int>()) : "");
      if (recall) {
        text += fmt::format(" {} | {} |", row["recalled"].get<int>(), row["recalled_in_full_prefill"].get<int>());
      }
      text += '\n';
    }
  }
  return text;
}

}  // namespace

std::vector<std::string> DefaultSpliceArms(const std::string& protocol) {
  if (protocol == "recall") return {"none", "rotate", "hide", "repair=32", "repair=64", "full", "own:hide"};
  return {"none",      "rotate", "hide",       "repair=32", "repair=64",     "random=38",
          "rotate@i8", "full",   "own:rotate", "own:hide",  "own:repair=32", "auto"};
}

Status RunSpliceEval(const SpliceEvalOptions& options, bool json) {
  QKV_ASSIGN_OR_RETURN(const Json found, Evaluation(options).Run());
  fmt::print("{}", json ? found.dump(2, ' ', false, Json::error_handler_t::replace) + "\n" : SpliceTable(found));
  return {};
}

}  // namespace qkv::cli
