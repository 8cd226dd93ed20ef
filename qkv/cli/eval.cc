// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// eval: what codecs do to a model's answers, measured on a text against f16 pages in the same engine.

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "qkv/base/temp_dir.h"
#include "qkv/cli/commands.h"
#include "qkv/cli/eval_log.h"
#include "qkv/cli/eval_peer.h"
#include "qkv/cli/eval_samples.h"
#include "qkv/cli/eval_splice.h"
#include "qkv/cli/eval_table.h"
#include "qkv/cli/options.h"
#include "qkv/cli/progress.h"
#include "qkv/engine/calibration.h"
#include "qkv/engine/codebooks.h"
#include "qkv/engine/layer_sensitivity.h"
#include "qkv/engine/quality_codecs.h"
#include "qkv/engine/quality_probe.h"

namespace qkv::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr CodecPair kExact = {CodecId::kF16, CodecId::kF16};
constexpr char kLike[] = "like:";
constexpr char kTokens[] = "tokens:";
constexpr char kBalanced[] = "bal:";
constexpr char kPeer[] = "llama.cpp:";
constexpr char kNoise[] = "(noise)";

struct Options {
  std::string model;
  std::string text;
  std::vector<std::string> kv = {"exact", "safe", "balanced", "small", "tiny"};
  std::string protocol = "handoff";
  std::string weights = "f32";
  std::string peer = "none";
  std::string resume;
  std::string calibration;  // empty: beside the model
  std::string codebooks;    // the same
  std::string layers;       // sensitivities; empty: beside the model
  EvalShape shape;
  std::vector<std::string> arms;
  int hops = 8;
  double refine = kDefaultRefine;
  int score_batch = 0;
  int n_batch = 0;  // 0: the protocol's
  int n_threads = 0;
  int max_tokens = 256;
  bool json = false;
};

// One row of the table.
struct Column {
  enum class Kind { kOurs, kPeer, kNoise };
  Kind kind = Kind::kOurs;
  std::string name;
  std::string key;  // in the log: the name, and the digests of calibration and codebooks
  ProbeCodec codec;
  bool balanced = false;
  std::optional<double> layer_bits;
  std::string peer_type;
  double known_bits = 0;  // of codecs that are not ours

  bool NeedsCodebooks() const { return NeedsBooks(KvChoice(codec.kv, codec.groups)); }
};

class Evaluation {
 public:
  explicit Evaluation(const Options& options) : options_(options) {}

  Result<Json> Run() {
    QKV_RETURN_IF_ERROR(MakeColumns());  // what is wrong with the flags is said before anything takes time
    QKV_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(options_.text));
    QKV_RETURN_IF_ERROR(LoadModels());
    QKV_RETURN_IF_ERROR(MakeSamples(text));
    const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
    settings_ = Json{{"weights_digest", model_->identity().weights_digest()},
                     {"text_digest", fmt::format("{:016x}{:016x}", hash.high64, hash.low64)},
                     {"protocol", options_.protocol},
                     {"samples", options_.shape.samples},
                     {"prefix", options_.shape.prefix},
                     {"score", options_.shape.score},
                     {"batch", probe_options_.n_batch},
                     {"refine", options_.refine}};
    if (options_.score_batch > 0) settings_["score_batch"] = options_.score_batch;
    if (options_.protocol == "hops") settings_["hops"] = options_.hops;
    if (options_.protocol == "gsm8k") settings_["predict"] = options_.max_tokens;
    QKV_ASSIGN_OR_RETURN(log_, EvalLog::Open(options_.resume, settings_));
    total_ = samples_.size() * columns_.size();
    for (size_t i = 0; i < samples_.size(); ++i) {
      if (options_.protocol == "hops") {
        QKV_RETURN_IF_ERROR(ScoreHops(static_cast<int>(i)));
      } else if (options_.protocol == "gsm8k") {
        QKV_RETURN_IF_ERROR(ScoreQuestion(static_cast<int>(i)));
      } else {
        QKV_RETURN_IF_ERROR(ScoreSample(static_cast<int>(i)));
      }
    }
    return Report();
  }

 private:
  Status MakeColumns() {
    for (const std::string& kv : options_.kv) {
      Column column;
      column.name = kv;
      if (kv.starts_with(kLike)) {
        const std::string type = kv.substr(std::size(kLike) - 1);
        column.known_bits = LikeGgmlBits(type);
        column.codec.kv = kExact;
        if (column.known_bits == 0) {
          return Err(Code::kInvalidArgument, "--kv: '{}' is not one of like:q8_0, like:q4_0, and those with :plain",
                     kv);
        }
        if (options_.protocol == "all") {
          return Err(Code::kInvalidArgument, "--kv {} goes with protocols that read a prefix exactly, not with 'all'",
                     kv);
        }
      } else if (kv.starts_with(kTokens)) {
        QKV_ASSIGN_OR_RETURN(const KvChoice choice, ParseKvChoice(kv));
        column.codec.kv = choice.codecs;
        column.codec.groups = choice.groups;
        if (options_.protocol != "handoff") {
          return Err(Code::kInvalidArgument, "--kv {} goes with the protocol handoff, not with '{}'", kv,
                     options_.protocol);
        }
      } else {
        column.balanced = kv.starts_with(kBalanced);
        const std::string codec = column.balanced ? kv.substr(std::size(kBalanced) - 1) : kv;
        QKV_ASSIGN_OR_RETURN(column.layer_bits, ParseLayerBits(codec));
        if (!column.layer_bits) {
          QKV_ASSIGN_OR_RETURN(column.codec.kv, ParseCodecPair(codec));
          if (CodecOf(column.codec.kv.pair.k).keys_only && !column.balanced) {
            return Err(Code::kInvalidArgument, "--kv: '{}' needs a calibration: {}{}", kv, kBalanced, kv);
          }
        }
      }
      columns_.push_back(std::move(column));
    }
    if (options_.peer != "none") {
      if (options_.protocol == "hops" || options_.protocol == "gsm8k") {
        return Err(Code::kInvalidArgument,
                   "--peer goes with the protocols handoff, all, copy and passkey, not with '{}'", options_.protocol);
      }
      for (const char* type : {"q8_0", "q4_0"}) {
        columns_.push_back({.kind = Column::Kind::kPeer,
                            .name = std::string(kPeer) + type,
                            .peer_type = type,
                            .known_bits = LikeGgmlBits(type)});
      }
    }
    if (options_.protocol == "handoff") {
      columns_.push_back({.kind = Column::Kind::kNoise, .name = kNoise});
    }
    return {};
  }

  Status LoadModels() {
    QKV_ASSIGN_OR_RETURN(std::string path, FindModel(options_.model));
    TempDir temporary;
    // Errors about what was given, not about a copy of it; and calibration and codebooks are the given one's.
    QKV_ASSIGN_OR_RETURN(model_, Model::Load(path));
    if (std::ranges::any_of(columns_, &Column::balanced)) {
      QKV_ASSIGN_OR_RETURN(Calibration calibration,
                           Calibration::Read(*model_, options_.calibration.empty() ? Calibration::PathFor(*model_)
                                                                                   : options_.calibration));
      calibration_ = std::make_shared<const Calibration>(std::move(calibration));
    }
    std::shared_ptr<const PqCodebooks> codebooks;
    if (std::ranges::any_of(columns_, &Column::NeedsCodebooks)) {
      QKV_ASSIGN_OR_RETURN(
          codebooks, ReadCodebooks(*model_, options_.codebooks.empty() ? CodebooksPath(*model_) : options_.codebooks));
    }
    QKV_RETURN_IF_ERROR(ChooseLayers());
    if (options_.weights == "f32") {
      QKV_ASSIGN_OR_RETURN(temporary, TempDir::Create());
      const std::string copy = temporary.path() + "/f32.gguf";
      QKV_RETURN_IF_ERROR(WriteRequantizedModel(path, "f32", copy));
      path = copy;
    }
    if (options_.weights == "f32") {
      QKV_ASSIGN_OR_RETURN(model_, Model::Load(path));  // stays mapped when the file goes
    }
    if (options_.peer != "none") {
      QKV_ASSIGN_OR_RETURN(peer_, Peer::Load(path));
    }
    for (Column& column : columns_) {
      column.key = column.name;
      if (column.layer_bits) {
        const std::vector<uint8_t> table = column.codec.kv.layers->Bytes();
        column.key += fmt::format("@{:016x}", XXH3_64bits(table.data(), table.size()));
      }
      if (column.balanced) {
        column.codec.calibration = calibration_;
        column.key += "@" + calibration_->digest_text();
      }
      if (column.NeedsCodebooks()) {
        column.codec.codebooks = codebooks;
        column.key += "@" + codebooks->digest();
      }
      if (!column.name.starts_with(kLike)) continue;
      column.codec.transform = LikeGgml(column.name.substr(std::size(kLike) - 1), model_->params().head_dim);
      if (!column.codec.transform) {
        return Err(Code::kInvalidArgument, "--kv: '{}' does not fit heads of {} channels", column.name,
                   model_->params().head_dim);
      }
    }
    probe_options_.refine = options_.refine;
    probe_options_.score_batch = options_.score_batch;
    probe_options_.n_threads = options_.n_threads > 0
                                   ? options_.n_threads
                                   : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    probe_options_.n_batch = options_.n_batch > 0 ? options_.n_batch : options_.protocol == "all" ? 16 : 512;
    return {};
  }

  // By the sensitivities of the model that was given.
  Status ChooseLayers() {
    if (std::ranges::none_of(columns_, [](const Column& column) { return column.layer_bits.has_value(); })) return {};
    const std::string path = options_.layers.empty() ? LayerSensitivityPath(*model_) : options_.layers;
    QKV_ASSIGN_OR_RETURN(const LayerSensitivity sensitivity, ReadLayerSensitivity(*model_, path));
    for (Column& column : columns_) {
      if (!column.layer_bits) continue;
      QKV_ASSIGN_OR_RETURN(auto layers, LayersWithinBits(sensitivity, model_->geometry(), *column.layer_bits));
      column.codec.kv = PageCodecs(kLayersPair, std::move(layers));
    }
    return {};
  }

  Status MakeSamples(const std::string& text) {
    const Vocab vocab(*model_);
    if (options_.protocol == "gsm8k") {
      auto questions = ParseQuestions(text);
      if (!questions) {
        return Err(Code::kInvalidArgument, "'{}' is not a file of questions: {}", options_.text,
                   questions.error().message);
      }
      if (questions->size() < static_cast<size_t>(options_.shape.samples)) {
        return Err(Code::kInvalidArgument, "'{}' has {} questions, --samples asks for {}", options_.text,
                   questions->size(), options_.shape.samples);
      }
      for (int i = 0; i < options_.shape.samples; ++i) {
        const Question& question = (*questions)[i];
        EvalSample sample;
        QKV_ASSIGN_OR_RETURN(sample.tokens,
                             vocab.FirstTurn("", question.text + "\n\nThink step by step, and end with '#### ' and the "
                                                                 "number that is the answer."));
        sample.answer = question.answer;
        samples_.push_back(std::move(sample));
      }
      return {};
    }
    QKV_ASSIGN_OR_RETURN(const auto tokens, vocab.Tokenize(text, false, false));
    if (options_.protocol == "copy") {
      QKV_ASSIGN_OR_RETURN(samples_, CopySamples(tokens, options_.shape, options_.text));
    } else if (options_.protocol == "passkey") {
      QKV_ASSIGN_OR_RETURN(samples_, PasskeySamples(vocab, tokens, options_.shape, options_.text));
    } else {
      EvalShape shape = options_.shape;
      if (options_.protocol == "all") shape.score = 0;  // the second half of the prefix is scored
      if (options_.protocol == "hops") shape.score *= options_.hops;
      QKV_ASSIGN_OR_RETURN(samples_, TextSamples(tokens, shape, options_.text));
    }
    return {};
  }

  void Step(size_t n = 1) {
    done_ += n;
    progress_.Update(done_, total_);
  }

  // Handoff, all, copy, passkey: all but how our engine reads is one.
  Status ScoreSample(int i) {
    const EvalSample& sample = samples_[i];
    const bool all = options_.protocol == "all";
    std::unique_ptr<HandoffProbe> handoff;
    std::unique_ptr<PagesProbe> pages;
    std::unique_ptr<PeerProbe> peer;
    for (const Column& column : columns_) {
      Step();
      if (log_.Find(column.key, i, "") != nullptr) continue;
      EvalScore score;
      if (column.kind == Column::Kind::kPeer) {
        if (peer == nullptr) {
          const int n_first = all ? static_cast<int>(sample.tokens.size() - 1) / 2 : sample.n_prefix;
          QKV_ASSIGN_OR_RETURN(peer, PeerProbe::Read(*peer_, sample.tokens, n_first, model_->params().n_vocab,
                                                     probe_options_.n_threads));
        }
        QKV_ASSIGN_OR_RETURN(score.score, peer->Score(column.peer_type));
      } else {
        if (all && pages == nullptr) {
          QKV_ASSIGN_OR_RETURN(pages, PagesProbe::Read(model_, sample.tokens, probe_options_));
        } else if (!all && handoff == nullptr) {
          QKV_ASSIGN_OR_RETURN(handoff, HandoffProbe::Read(model_, sample.tokens, sample.n_prefix, probe_options_));
        }
        if (column.kind == Column::Kind::kNoise) {
          QKV_ASSIGN_OR_RETURN(score.score, handoff->NoiseFloor());
        } else {
          QKV_ASSIGN_OR_RETURN(auto result, all ? pages->Score(column.codec) : handoff->Score(column.codec));
          score = Measured(column, std::move(result));
        }
      }
      if (column.known_bits > 0) score.bits_per_value = score.file_bits = column.known_bits;
      QKV_RETURN_IF_ERROR(log_.Add(column.key, i, "", std::move(score)));
    }
    return {};
  }

  static EvalScore Measured(const Column& column, ProbeResult result) {
    EvalScore score;
    score.score = std::move(result.score);
    score.bits_per_value = result.size.bits_per_value;
    score.file_bits = result.size.file_bits;
    score.refined_share = result.refined_share;
    score.read_bits = result.read_bits;
    if (column.known_bits == 0) {  // else the time is that of f16 pages
      score.encode_ns = result.encode_ns;
      score.decode_ns = result.decode_ns;
    }
    return score;
  }

  Status ScoreHops(int i) {
    std::unique_ptr<HopsProbe> probe;
    for (const Column& column : columns_) {
      Step();
      bool known = true;
      for (int hop = 0; hop < options_.hops; ++hop) {
        known =
            known && log_.Find(column.key, i, HopName("chain", hop)) && log_.Find(column.key, i, HopName("once", hop));
      }
      if (known) continue;
      if (probe == nullptr) {
        QKV_ASSIGN_OR_RETURN(
            probe, HopsProbe::Read(model_, samples_[i].tokens, samples_[i].n_prefix, options_.hops, probe_options_));
      }
      KvSize size;
      QKV_ASSIGN_OR_RETURN(HopScores scores, probe->Score(column.codec, size));
      for (int hop = 0; hop < options_.hops; ++hop) {
        EvalScore score;
        score.bits_per_value = column.known_bits > 0 ? column.known_bits : size.bits_per_value;
        score.file_bits = column.known_bits > 0 ? column.known_bits : size.file_bits;
        score.score = std::move(scores.single[hop]);
        QKV_RETURN_IF_ERROR(log_.Add(column.key, i, HopName("once", hop), score));
        score.score = std::move(scores.chain[hop]);
        score.refined_share = scores.refined_share[hop];
        score.read_bits = scores.read_bits[hop];
        QKV_RETURN_IF_ERROR(log_.Add(column.key, i, HopName("chain", hop), std::move(score)));
      }
    }
    return {};
  }
  static std::string HopName(const char* what, int hop) { return fmt::format("{} {}", what, hop + 1); }

  // The model's own answer over exact pages is the text that the codecs are scored on; and each answers for itself.
  Status ScoreQuestion(int i) {
    const EvalSample& sample = samples_[i];
    const Vocab vocab(*model_);
    std::unique_ptr<HandoffProbe> probe;
    Context prompt;  // all but its last token
    bool right_ref = false;
    for (const Column& column : columns_) {
      Step();
      if (log_.Find(column.key, i, "") != nullptr) continue;
      const auto answer_over = [&](const ProbeCodec& codec) {
        return GreedyOver(model_, prompt, sample.tokens.back(), codec, options_.max_tokens, probe_options_);
      };
      if (probe == nullptr) {
        const int n_prefix = static_cast<int>(sample.tokens.size()) - 1;
        QKV_ASSIGN_OR_RETURN(prompt, ReadExact(model_, std::span(sample.tokens).first(n_prefix), probe_options_));
        QKV_ASSIGN_OR_RETURN(auto answer, answer_over({kExact, {}}));
        right_ref = LastNumber(vocab.Text(answer)) == sample.answer;
        if (answer.empty()) answer.push_back(sample.tokens.back());  // it ended at once; score one token all the same
        std::vector<Token> tokens = sample.tokens;
        tokens.insert(tokens.end(), answer.begin(), answer.end());
        QKV_ASSIGN_OR_RETURN(probe, HandoffProbe::Read(model_, tokens, n_prefix, probe_options_));
      }
      QKV_ASSIGN_OR_RETURN(auto result, probe->Score(column.codec));
      EvalScore score = Measured(column, std::move(result));
      if (column.known_bits > 0) score.bits_per_value = score.file_bits = column.known_bits;
      QKV_ASSIGN_OR_RETURN(const auto answer, answer_over(column.codec));
      score.answer_right = LastNumber(vocab.Text(answer)) == sample.answer;
      score.answer_right_ref = right_ref;
      QKV_RETURN_IF_ERROR(log_.Add(column.key, i, "", std::move(score)));
    }
    return {};
  }

  Json RowOf(const std::vector<EvalScore>& scores, const std::vector<EvalScore>* first) const {
    std::vector<SampleScore> samples, firsts;
    double bits = 0, file_bits = 0, encode = 0, decode = 0, refined = 0, read = 0;
    size_t whole = 0, whole_ref = 0, right = 0, right_ref = 0;
    for (const EvalScore& score : scores) {
      samples.push_back(score.score);
      bits += score.bits_per_value;
      file_bits += score.file_bits;
      refined += score.refined_share;
      read += score.read_bits;
      encode += score.encode_ns;
      decode += score.decode_ns;
      whole += score.score.right == score.score.n();
      whole_ref += score.score.right_ref == score.score.n();
      right += score.answer_right.value_or(false);
      right_ref += score.answer_right_ref.value_or(false);
    }
    const auto n = static_cast<double>(scores.size());
    const QualitySummary q = Summarize(samples);
    Json row{{"bits_per_value", bits / n},
             {"file_bits_per_value", file_bits / n},
             {"kl_mean", q.kl.value},
             {"kl_se", q.kl.se},
             {"kl_p99", q.kl_p99},
             {"top1", q.top1.value},
             {"top1_se", q.top1.se},
             {"ppl", q.ppl},
             {"ppl_ref", q.ppl_ref},
             {"nll_delta", q.nll_delta.value},
             {"nll_delta_se", q.nll_delta.se},
             {"samples", q.samples},
             {"tokens", q.tokens}};
    if (refined > 0) {
      row["refined_share"] = refined / n;
      row["read_bits_per_value"] = read / n;
    }
    if (encode > 0) row["encode_ns_per_value"] = encode / n;
    if (decode > 0) row["decode_ns_per_value"] = decode / n;
    if (first != nullptr) {
      for (const EvalScore& score : *first) firsts.push_back(score.score);
      const Estimate ratio = PairedKlRatio(samples, firsts);
      if (ratio.value > 0) {
        row["kl_vs_first"] = ratio.value;
        row["kl_vs_first_se_factor"] = ratio.se;
      }
    }
    if (options_.protocol == "copy" || options_.protocol == "passkey") {
      row["recall"] = q.recall.value;
      row["recall_se"] = q.recall.se;
      row["recall_ref"] = q.recall_ref;
      row["whole"] = static_cast<double>(whole) / n;
      row["whole_ref"] = static_cast<double>(whole_ref) / n;
    }
    if (options_.protocol == "gsm8k") {
      row["accuracy"] = static_cast<double>(right) / n;
      row["accuracy_ref"] = static_cast<double>(right_ref) / n;
    }
    return row;
  }

  Json Report() const {
    Json json{{"model", model_->params().name}, {"weights", options_.weights}, {"text", options_.text}};
    json.update(settings_);
    json["results"] = Json::array();
    const int n = options_.shape.samples;
    const bool hops = options_.protocol == "hops";
    for (int hop = 0; hop < (hops ? options_.hops : 1); ++hop) {
      std::optional<std::vector<EvalScore>> first;
      for (const Column& column : columns_) {
        const auto scores = log_.All(column.key, n, hops ? HopName("chain", hop) : "");
        QKV_CHECK(scores.has_value());
        Json row{{"kv", column.name}};
        if (hops) {
          const auto once = log_.All(column.key, n, HopName("once", hop));
          row["hop"] = hop + 1;
          row.update(RowOf(*scores, &*once));
          const Json alone = RowOf(*once, nullptr);
          row["kl_mean_once"] = alone["kl_mean"];
          row["kl_se_once"] = alone["kl_se"];
        } else {
          row.update(RowOf(*scores, first ? &*first : nullptr));
          if (column.kind == Column::Kind::kNoise) row.erase("bits_per_value"), row.erase("file_bits_per_value");
        }
        if (!first) first = scores;
        json["results"].push_back(std::move(row));
      }
    }
    return json;
  }

  const Options& options_;
  std::vector<Column> columns_;
  std::shared_ptr<const Model> model_;
  std::shared_ptr<const Calibration> calibration_;
  std::unique_ptr<Peer> peer_;
  ProbeOptions probe_options_;
  std::vector<EvalSample> samples_;
  Json settings_;
  EvalLog log_;
  Progress progress_{"eval"};
  size_t done_ = 0, total_ = 0;
};

Status RunEval(const Options& options) {
  if (options.protocol == "splice" || options.protocol == "recall") {
    return RunSpliceEval({.model = options.model,
                          .text = options.text,
                          .weights = options.weights,
                          .protocol = options.protocol,
                          .arms = options.arms,
                          .resume = options.resume,
                          .samples = options.shape.samples,
                          .n_threads = options.n_threads},
                         options.json);
  }
  QKV_ASSIGN_OR_RETURN(const Json json, Evaluation(options).Run());
  if (options.json) {
    fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    PrintEvalTable(json);
  }
  return {};
}

// What a protocol would take no notice of is refused.
Status CheckFlags(const CLI::App& command, const std::string& protocol) {
  const bool spliced = protocol == "splice" || protocol == "recall";
  const std::vector<const char*> others = spliced ? std::vector{"--kv", "--prefix", "--score"} : std::vector{"--arm"};
  for (const char* flag : others) {
    if (command.count(flag) > 0)
      return Err(Code::kInvalidArgument, "{} has no meaning for protocol '{}'", flag, protocol);
  }
  return {};
}

}  // namespace

void AddEval(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("eval", "measure what the KV codecs do to a model's answers");
  command
      ->add_option(
          "-m,--model", options->model,
          "GGUF file of a Llama-family model (default: $QKVSHARE_MODEL, else the one that 'make setup' fetched)")
      ->type_name("FILE");
  command->add_option("--text", options->text, "a text to read; for gsm8k, its questions as JSON lines")
      ->required()
      ->type_name("FILE");
  command
      ->add_option(
          "--kv", options->kv,
          "codecs to measure, as elsewhere; also like:q8_0 and like:q4_0, libllama's cache types simulated in "
          "this engine (with :plain behind, without its rotation); bal:CODEC, behind the matrices that "
          "'calibrate' made; layers:BITS, each layer in its own width; and beside tokens:20/8/4, which goes by "
          "a sample of the prompt's queries, tokens:all-queries/20/8/4 and tokens:random/20/8/4")
      ->capture_default_str()
      ->type_name("CODEC");
  AddRefineOption(*command, options->refine);
  command
      ->add_option(
          "--score-batch", options->score_batch,
          "protocol handoff: tokens per step of what is scored; 1 reads refinement planes as a generating reader "
          "does, token by token (default: all in one step, which refines for all of them together)")
      ->check(CLI::Range(1, 1 << 16));
  command
      ->add_option("--calibration", options->calibration,
                   "for bal: the file that 'calibrate' made (default: beside the model)")
      ->type_name("FILE");
  command
      ->add_option("--layers", options->layers,
                   "for layers: the file that 'calibrate --layers' made (default: beside the model)")
      ->type_name("FILE");
  command
      ->add_option("--codebooks", options->codebooks,
                   "for pq4 and pq2: the file that 'calibrate --codebooks' made (default: beside the model)")
      ->type_name("FILE");
  command
      ->add_option(
          "--protocol", options->protocol,
          "handoff: a prefix is read exactly and handed over, what follows is scored; all: everything is read "
          "over encoded pages, the second half of the prefix is scored; hops: handed on again and again; copy, "
          "passkey: is what was read found again; gsm8k: answers to questions; splice: two passages that were read "
          "apart, behind a prefix; recall: facts planted in them")
      ->check(CLI::IsMember({"handoff", "all", "hops", "copy", "passkey", "gsm8k", "splice", "recall"}))
      ->capture_default_str();
  command->add_option("--samples", options->shape.samples, "stretches of the text, or questions")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  command->add_option("--prefix", options->shape.prefix, "tokens that are handed over")
      ->capture_default_str()
      ->check(CLI::Range(2, 1 << 20));
  command->add_option("--score", options->shape.score, "tokens that are scored behind them; for hops, per hop")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 16));
  command
      ->add_option("--arm", options->arms,
                   "splice, recall: ways to put the passages behind the prefix: rotate, hide, repair=N, full (read "
                   "again), auto; behind 'own:', 'bos:' or 'common:' for passages read behind another prefix, the "
                   "beginning-of-text token or the same prefix; none and random=N as controls; '@i8' for the codec of "
                   "their pages (default: those of docs/EVALUATION.md)")
      ->type_name("ARM");
  command->add_option("--hops", options->hops, "handoffs, one after the other")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  command->add_option("-n,--predict", options->max_tokens, "gsm8k: tokens of an answer at most")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 16));
  command
      ->add_option("--weights", options->weights,
                   "f32: of a temporary fp32 copy of the model, so that only the codec rounds (4 bytes per weight); "
                   "as-is: of the model itself, where rounding of activations adds noise (row '(noise)': the last bit "
                   "of f16 changed)")
      ->check(CLI::IsMember({"f32", "as-is"}))
      ->capture_default_str();
  command->add_option("--peer", options->peer, "libllama's quantized caches on the same text, against its own f16 one")
      ->check(CLI::IsMember({"none", "llama.cpp"}))
      ->capture_default_str();
  command
      ->add_option(
          "--resume", options->resume,
          "keep scores in this file, and don't measure again what is there (it does not know about another build)")
      ->type_name("FILE");
  command->add_option("-t,--threads", options->n_threads, "threads (default: all cores)")->check(CLI::Range(1, 512));
  command->add_option("-b,--batch-size", options->n_batch, "tokens per step (default: 512; for all: 16)")
      ->check(CLI::Range(1, 1 << 16));
  command->add_flag("--json", options->json, "print one JSON object instead of a table");
  command->footer("Example: qkvshare eval --text wikitext-2-test.txt --kv balanced --kv small --samples 4 --json");
  command->callback([options, command, &status] {
    Status done = CheckFlags(*command, options->protocol);
    if (done) done = RunEval(*options);
    status = done ? 0 : Fail(done.error());
  });
}

}  // namespace qkv::cli
