// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/quality_gate.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include "qkv/engine/cache_file.h"
#include "qkv/engine/calibration.h"
#include "qkv/engine/codebooks.h"
#include "qkv/engine/context_card.h"
#include "qkv/engine/quality_probe.h"

namespace qkv {
namespace {

constexpr CodecPair kExact = {CodecId::kF16, CodecId::kF16};
constexpr int kVersion = 3;  // of the text and of how it is read; another one measures anew
constexpr GateReading kReading = {.samples = 2, .prefix = 384, .scored = 96};
constexpr GateReading kShortReading = {.samples = 1, .prefix = 128, .scored = 64};
// Multiply-adds with weights, about 15 s of two cores: a model that needs more for kReading gets kShortReading.
constexpr double kMaxWork = 2e12;
constexpr size_t kMinScored = 8;
constexpr size_t kScoredSingly = 64;  // of all stretches
constexpr size_t kMaxEntryBytes = 512;
// How much more noise than the floor's a healthy codec may show: it is measured on few tokens.
constexpr double kNoiseFactor = 3;

// By preset's name.
constexpr std::array<std::pair<std::string_view, QualityBound>, 5> kBounds = {{
    {"exact", {.kl = 1e-3, .top1_loss = 0.03}},
    {"safe", {.kl = 5e-3, .top1_loss = 0.05}},
    {"balanced", {.kl = 2e-2, .top1_loss = 0.08}},
    {"small", {.kl = 6e-2, .top1_loss = 0.12}},
    {"tiny", {.kl = 1e-1, .top1_loss = 0.15}},
}};

// With heads of 64 channels: which preset a codec is compared with must not depend on the model.
double BitsOf(KvChoice kv) {
  constexpr int kHeadDim = 64;
  kv.codecs.pair.refine = false;
  return BitsPerValue(kv, kHeadDim);
}

// Index of the preset whose bound holds for `kv`; they go from the best to the fewest bits.
size_t PresetOf(const KvChoice& kv) {
  const auto presets = Presets();
  for (size_t i = 0; i < presets.size(); ++i) {
    if (kv.codecs.pair.refine ? presets[i].name == "safe" : BitsOf(presets[i].codecs) <= BitsOf(kv) + 1e-9) return i;
  }
  return presets.size() - 1;
}

QualityBound BoundOfPreset(std::string_view name) {
  for (const auto& [preset, bound] : kBounds) {
    if (preset == name) return bound;
  }
  return kBounds.back().second;
}

double MultiplyAddsPerToken(const HyperParams& params) {
  const double embd = params.n_embd;
  const double attention = 2.0 * (params.n_heads + params.n_kv_heads) * params.head_dim * embd;  // Q and out, K and V
  return params.n_layers * (attention + 3.0 * embd * params.n_ff) + embd * params.n_vocab;
}

}  // namespace

GateReading ReadingOf(const HyperParams& params, size_t n_tokens) {
  const double work = MultiplyAddsPerToken(params) * static_cast<double>(kReading.tokens());
  GateReading reading = work <= kMaxWork ? kReading : kShortReading;
  // Small vocabularies make more tokens of the text, small contexts take fewer.
  const size_t room =
      std::min<size_t>(n_tokens / reading.samples, static_cast<size_t>(std::max(params.n_ctx_train, 0)));
  reading.scored = std::min(reading.scored, room / 4);
  if (reading.scored < kMinScored) return {};
  reading.prefix = std::min(reading.prefix, room - reading.scored - 1);
  return reading;
}

QualityBound BoundOf(const KvChoice& kv) {
  return kv == kExact ? QualityBound{} : BoundOfPreset(Presets()[PresetOf(kv)].name);
}

std::vector<CodecPair> LadderAbove(const KvChoice& kv) {
  std::vector<CodecPair> ladder;
  if (kv == kExact) return ladder;
  for (size_t i = PresetOf(kv); i-- > 0;) ladder.push_back(Presets()[i].codecs);
  ladder.push_back(kExact);
  return ladder;
}

bool QualityVerdict::Within() const {
  if (kv == kExact) return true;
  const QualityBound bound = BoundOf(kv);
  return kl <= bound.kl + kNoiseFactor * noise_kl && 1 - top1 <= bound.top1_loss + kNoiseFactor * (1 - noise_top1);
}

std::string QualityVerdict::Describe() const {
  const QualityBound bound = BoundOf(kv);
  return fmt::format("KL {:.2g} (at most {:.2g}), top-1 {:.1f} % (at least {:.1f} %)", kl,
                     bound.kl + kNoiseFactor * noise_kl, 100 * top1,
                     100 * (1 - bound.top1_loss - kNoiseFactor * (1 - noise_top1)));
}

QualityGate::QualityGate(std::shared_ptr<const Model> model, QualityGateOptions options)
    : model_(std::move(model)), options_(std::move(options)) {}

std::string QualityGate::EntryName(const KvChoice& kv) const {
  std::string name = fmt::format("{}-{}", model_->identity().weights_digest(), ToString(kv));
  if (kv.codecs.layers != nullptr) {
    const std::vector<uint8_t> bytes = kv.codecs.layers->Bytes();
    name += fmt::format("-{:016x}", XXH3_64bits(bytes.data(), bytes.size()));
  }
  if (options_.calibration != nullptr) name += "-" + options_.calibration->digest_text();
  if (kv.codecs.pair.refine) name += fmt::format("-{:g}", options_.refine);
  if (NeedsBooks(kv)) {  // other ones are another codec; without any, measuring says so
    if (options_.codebooks != nullptr) {
      name += "-" + options_.codebooks->digest();
    } else if (const auto beside = ReadCodebooks(*model_, CodebooksPath(*model_))) {
      name += "-" + (*beside)->digest();
    }
  }
  std::ranges::replace(name, '/', '_');  // it is a file's
  return name;
}

namespace {
std::string EntryText(const std::string& name, const QualityVerdict& v) {
  std::string text = fmt::format("qkvshare quality {}\n{}\nkl {:.9g} top1 {:.9g} noise-kl {:.9g} noise-top1 {:.9g}\n",
                                 kVersion, name, v.kl, v.top1, v.noise_kl, v.noise_top1);
  return text + fmt::format("check {:016x}\n", XXH3_64bits(text.data(), text.size()));
}
}  // namespace

std::optional<QualityVerdict> QualityGate::Recall(const KvChoice& kv) const {
  const std::string name = EntryName(kv);
  const auto text = ReadCacheFile(options_.directory, name, kMaxEntryBytes);
  if (!text) return std::nullopt;
  QualityVerdict verdict;
  verdict.kv = kv;
  verdict.known = true;
  const size_t at = text->find("\nkl ");
  if (at == std::string::npos) return std::nullopt;
  if (std::sscanf(text->c_str() + at, "\nkl %lf top1 %lf noise-kl %lf noise-top1 %lf", &verdict.kl, &verdict.top1,
                  &verdict.noise_kl, &verdict.noise_top1) != 4) {
    return std::nullopt;
  }
  if (*text != EntryText(name, verdict)) return std::nullopt;  // whole, and of this model, codec and version
  return verdict;
}

void QualityGate::Remember(const QualityVerdict& verdict) const {
  const std::string name = EntryName(verdict.kv);
  WriteCacheFile(options_.directory, name, EntryText(name, verdict));
}

Result<QualityVerdict> QualityGate::Measure(const KvChoice& kv) {
  QKV_ASSIGN_OR_RETURN(const auto tokens, Vocab(*model_).Tokenize(QualityText(), false, false));
  GateReading reading = ReadingOf(model_->params(), tokens.size());
  if (reading.scored == 0) {
    return Err(Code::kInvalidArgument,
               "the quality gate's text has {} tokens with this vocabulary, and the context "
               "size is {}: too few to measure (--quality-gate off)",
               tokens.size(), model_->params().n_ctx_train);
  }
  // Tokens that are read together share what they refine: here each is read by itself, and fewer are.
  const bool singly = kv.codecs.pair.refine;
  if (singly) reading.scored = std::min(reading.scored, kScoredSingly / reading.samples);
  size_t done = 0;
  const auto report = [&](size_t more) {
    if (options_.on_progress) options_.on_progress(done + more, reading.tokens());
  };
  const auto read = [&](size_t n) {
    done += n;
    report(0);
  };
  read(0);
  ProbeOptions probe_options;
  probe_options.n_threads = options_.n_threads;
  probe_options.n_batch = static_cast<int>(reading.scored);  // short steps, so that progress shows
  probe_options.on_progress = [&](size_t n, size_t) { report(n); };
  probe_options.refine = options_.refine;
  if (singly) probe_options.score_batch = 1;
  std::vector<SampleScore> scores, noise;
  for (size_t i = 0; i < reading.samples; ++i) {
    const auto stretch =
        std::span(tokens).subspan(i * (tokens.size() / reading.samples), reading.prefix + reading.scored + 1);
    QKV_ASSIGN_OR_RETURN(const auto probe,
                         HandoffProbe::Read(model_, stretch, static_cast<int>(reading.prefix), probe_options));
    read(reading.prefix + reading.scored);
    QKV_ASSIGN_OR_RETURN(ProbeResult result, probe->Score({.kv = kv.codecs,
                                                           .transform = {},
                                                           .groups = kv.groups,
                                                           .calibration = options_.calibration,
                                                           .codebooks = options_.codebooks}));
    scores.push_back(std::move(result.score));
    read(reading.scored);
    QKV_ASSIGN_OR_RETURN(SampleScore floor, probe->NoiseFloor());
    noise.push_back(std::move(floor));
    read(reading.scored);
  }
  const QualitySummary summary = Summarize(scores), floor = Summarize(noise);
  return QualityVerdict{.kv = kv,
                        .kl = summary.kl.value,
                        .top1 = summary.top1.value,
                        .noise_kl = floor.kl.value,
                        .noise_top1 = floor.top1.value};
}

KvChoice QualityGate::AsRead(KvChoice kv) const {
  kv.codecs.pair.refine = kv.codecs.pair.refine && options_.refine > 0;
  return kv;
}

Result<QualityVerdict> QualityGate::Check(const KvChoice& written) {
  const KvChoice kv = AsRead(written);
  if (kv == kExact) return QualityVerdict{.kv = kv, .top1 = 1, .noise_top1 = 1, .known = true};
  const std::string text = EntryName(kv);
  if (const auto found = known_.find(text); found != known_.end()) return found->second;
  if (auto recalled = Recall(kv)) {
    known_[text] = *recalled;
    return *recalled;
  }
  QKV_ASSIGN_OR_RETURN(QualityVerdict verdict, Measure(kv));
  Remember(verdict);
  known_[text] = verdict;
  known_[text].known = true;
  return verdict;
}

Result<QualityGate::Choice> QualityGate::Choose(const KvChoice& kv) {
  Choice choice;
  std::vector<KvChoice> rungs = {kv};
  for (const CodecPair better : LadderAbove(AsRead(kv))) rungs.emplace_back(better);
  for (const KvChoice& rung : rungs) {
    QKV_ASSIGN_OR_RETURN(const QualityVerdict verdict, Check(rung));
    choice.kv = rung;
    choice.verdicts.push_back(verdict);
    if (verdict.Within()) break;  // the last one is exact
  }
  return choice;
}

Status QualityGate::Admit(const Context& context) {
  std::vector<KvChoice> seen;
  const auto check = [&](const KvChoice& kv) -> Status {
    if (std::ranges::find(seen, kv) != seen.end()) return {};
    seen.push_back(kv);
    QKV_ASSIGN_OR_RETURN(const QualityVerdict verdict, Check(kv));
    if (verdict.Within()) return {};
    return Err(Code::kIncompatible, Reason::kQualityGate, "pages of codec '{}' are beyond the bound for this model: {}",
               ToString(verdict.kv), verdict.Describe());
  };
  const auto choice_of = [&](const auto& span, size_t page) {
    const Segment& segment = *context.segments[span.segment()];
    KvChoice kv = PageCodecs(segment.codecs(page), segment.layers());
    kv.codecs.pair.refine = span.refinement_segment() != 0;
    return kv;
  };
  const auto& spans = context.card.spans();
  for (const auto& span : spans) {
    for (size_t i = 0; i < span.n_pages(); ++i) QKV_RETURN_IF_ERROR(check(choice_of(span, span.first_page() + i)));
  }
  const GroupedTokens groups = GroupsOf(context.card);
  if (!groups.dropped || spans.empty()) return {};
  KvChoice dropping = choice_of(spans[0], spans[0].first_page());
  dropping.groups = TokenGroups{.percent = std::clamp(100 * groups.n_high() / groups.size(), 1, 99)};
  return check(dropping);
}

Result<SampleScore> QualityGate::CompareContinuation(const Context& context, int n_tokens) const {
  SequenceOptions options;
  options.n_ctx = context.card.token_ids_size() + n_tokens;
  options.n_threads = options_.n_threads;
  options.kv = kExact;
  options.codebooks = options_.codebooks;
  options.on_progress = options_.on_progress;
  QKV_ASSIGN_OR_RETURN(const auto exact, Sequence::Create(model_, options));
  options.on_progress = {};
  options.refine = options_.refine;
  options.calibration = options_.calibration;
  const auto has_bands = [](const auto& segment) {
    return segment->codecs(0).k == CodecId::kBands;  // no segment is without a page
  };
  if (std::ranges::any_of(context.segments, has_bands))
    options.kv.pair.k = CodecId::kBands;  // whose matrices are others
  QKV_ASSIGN_OR_RETURN(const auto attached, Sequence::Create(model_, options));
  QKV_RETURN_IF_ERROR(attached->Attach(context));
  const std::vector<Token> tokens(context.card.token_ids().begin(), context.card.token_ids().end());
  // The last token by itself in both, so that both compute it in the same way.
  if (tokens.size() > 1) QKV_RETURN_IF_ERROR(exact->Forward(std::span(tokens).first(tokens.size() - 1)));
  QKV_RETURN_IF_ERROR(exact->Forward(std::span(tokens).last(1)));
  QKV_RETURN_IF_ERROR(attached->Forward({}));
  const auto n_vocab = static_cast<size_t>(model_->params().n_vocab);
  SampleScore score;
  for (int i = 0; i < n_tokens; ++i) {
    const ReferenceLogits reference({exact->logits().begin(), exact->logits().end()}, n_vocab);
    const auto next = static_cast<Token>(std::ranges::max_element(exact->logits()) - exact->logits().begin());
    score.Add(reference.Score(0, attached->logits(), next));
    if (i + 1 == n_tokens) break;
    QKV_RETURN_IF_ERROR(exact->Forward({&next, 1}));
    QKV_RETURN_IF_ERROR(attached->Forward({&next, 1}));
  }
  return score;
}

}  // namespace qkv
