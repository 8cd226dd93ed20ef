// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/quality_flags.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "qkv/cli/progress.h"
#include "qkv/engine/cache_file.h"

namespace qkv::cli {

void QualityFlags::AddTo(CLI::App& app, bool reads_pages) {
  app.add_option(
         "--quality-gate", gate,
         "on first use of a model with a lossy codec, compare it with exact pages on a short text: warn when it is "
         "beyond its bound, or enforce the next better preset (and don't read such pages of others), or off")
      ->check(CLI::IsMember({"off", "warn", "enforce"}))
      ->capture_default_str();
  if (!reads_pages) return;
  app.add_option(
         "--calibration-tokens", calibration_tokens,
         "before going on from a context, compare what the model says first over its pages and over exact ones, "
         "which takes as long as reading it again (0: don't)")
      ->capture_default_str()
      ->check(CLI::Range(0, 4096));
  app.add_option("--calibration-kl", calibration_kl, "read the context as text when their mean KL is beyond this")
      ->capture_default_str()
      ->check(Within(0.0, 1e6));
}

class HandoffQuality::Shown {
 public:
  void Update(size_t done, size_t total) { progress_.Update(done, total); }
  void Note(const std::string& text) { progress_.Note("qkvshare: " + text); }

 private:
  Progress progress_{"quality gate"};
};

HandoffQuality::HandoffQuality(const QualityFlags& flags, std::shared_ptr<const Model> model, int n_threads,
                               std::shared_ptr<const Calibration> calibration, double refine)
    : flags_(flags),
      shown_(std::make_unique<Shown>()),
      gate_(std::move(model), {.directory = CacheDirectory("quality"),
                               .n_threads = n_threads,
                               .on_progress = [this](size_t done, size_t total) { shown_->Update(done, total); },
                               .calibration = std::move(calibration),
                               .refine = refine}) {}
HandoffQuality::~HandoffQuality() = default;

void HandoffQuality::Note(const std::string& text) {
  shown_->Note(text);
}

Result<KvChoice> HandoffQuality::Choose(const KvChoice& kv) {
  if (flags_.gate == "off") return kv;
  if (flags_.gate == "warn") {
    QKV_ASSIGN_OR_RETURN(const QualityVerdict verdict, gate_.Check(kv));
    if (!verdict.Within()) {
      Note(fmt::format("codec '{}' hurts this model: {}", ToString(kv), verdict.Describe()));
    }
    return kv;
  }
  QKV_ASSIGN_OR_RETURN(const QualityGate::Choice choice, gate_.Choose(kv));
  if (!(choice.kv == kv)) {
    Note(fmt::format("codec '{}' hurts this model: {}; using '{}' instead (--quality-gate)", ToString(kv),
                     choice.verdicts.front().Describe(), ToString(choice.kv)));
  }
  return choice.kv;
}

Status HandoffQuality::Admit(const Context& context) {
  calibration_.reset();
  if (flags_.gate != "off") {
    if (Status admitted = gate_.Admit(context); !admitted) {
      if (flags_.gate == "enforce" || admitted.error().reason != Reason::kQualityGate) return admitted;
      Note(fmt::format("context '{}': {}", context.card.id(), admitted.error().message));
    }
  }
  if (flags_.calibration_tokens == 0) return {};
  QKV_ASSIGN_OR_RETURN(const SampleScore score, gate_.CompareContinuation(context, flags_.calibration_tokens));
  calibration_ = Summarize(std::span(&score, 1));
  const std::string figures = fmt::format(
      "{} tokens over its pages and over exact ones: mean KL {:.2g} (at most {:.2g}), "
      "same first choice {:.1f} %",
      score.n(), calibration_->kl.value, flags_.calibration_kl, 100 * calibration_->top1.value);
  Note(fmt::format("context '{}': {}", context.card.id(), figures));
  if (calibration_->kl.value <= flags_.calibration_kl) return {};
  return Err(Code::kIncompatible, Reason::kQualityGate, "{}", figures);
}

}  // namespace qkv::cli
