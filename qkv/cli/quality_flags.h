// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The quality gate on the command line: which codec a command writes, and whose pages it reads. One thread.

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>

#include "qkv/cli/options.h"
#include "qkv/engine/quality_gate.h"

namespace qkv::cli {

struct QualityFlags {
  std::string gate = "enforce";
  int calibration_tokens = 0;
  double calibration_kl = 0.1;

  // --quality-gate, and, for commands that read others' pages, --calibration-tokens and --calibration-kl.
  void AddTo(CLI::App& app, bool reads_pages);
};

// One model's gate, by these flags. Says on stderr what it finds amiss, and on a terminal how far it is.
class HandoffQuality {
 public:
  // calibration: of --bal, or null. refine: of --refine.
  HandoffQuality(const QualityFlags& flags, std::shared_ptr<const Model> model, int n_threads,
                 std::shared_ptr<const Calibration> calibration, double refine = kDefaultRefine);
  ~HandoffQuality();

  // What is to be written where `kv` was asked for: itself, or with "enforce" the next better preset that is within its
  // bound. Errors: the gate's.
  Result<KvChoice> Choose(const KvChoice& kv);

  // For Agent::AdmitBy. Errors: kIncompatible/quality_gate, with the figures; the gate's.
  Status Admit(const Context& context);

  // For more than Choose says: with the same cache, and the same progress on a terminal.
  QualityGate& gate() { return gate_; }
  void Note(const std::string& text);  // a line on stderr

  // Of the last context that was admitted or refused after --calibration-tokens.
  const std::optional<QualitySummary>& calibration() const { return calibration_; }

 private:
  class Shown;
  const QualityFlags flags_;
  std::unique_ptr<Shown> shown_;
  QualityGate gate_;
  std::optional<QualitySummary> calibration_;
};

}  // namespace qkv::cli
