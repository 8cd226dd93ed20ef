// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keeps a lossy codec from hurting a model unnoticed. On first use of a model with a codec, a short text is read over
// exact pages and over the codec's (a second or two for a small model, some seconds for a large one); how far apart the
// answers are is kept in the user's cache by model, codec and version of the measurement. What is beyond its bound is to
// be replaced by the next better preset, or not to be handed over.
//
// One thread. Measuring makes sequences of its own beside whoever's; nothing of it changes what a sequence computes.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/engine/quality.h"
#include "qkv/engine/sequence.h"

namespace qkv {

// What a codec may cost on the gate's text, beyond the noise that any change at all brings with this model's weights.
struct QualityBound {
  double kl = 0;         // mean, nats
  double top1_loss = 0;  // share of tokens whose first choice changes
};
// Of the best preset that spends no more bits than `kv` does (of grouped tokens: on average); of "safe" for one with
// refinement; of "tiny" below it. About ten times what a healthy model shows. f16: {0, 0}.
QualityBound BoundOf(const KvChoice& kv);

// Up from `kv`: the presets with stricter bounds, the least strict first, then f16.
std::vector<CodecPair> LadderAbove(const KvChoice& kv);

struct QualityVerdict {
  KvChoice kv;
  double kl = 0;
  double top1 = 0;
  double noise_kl = 0;  // of f16 pages with their last bit changed
  double noise_top1 = 0;
  bool known = false;            // from the cache, or the memory of this object
  bool Within() const;           // its bound
  std::string Describe() const;  // "KL 0.31 (at most 0.05), top-1 61.0 % (at least 88.0 %)"
};

// What is read of the gate's text: `samples` stretches of `prefix` tokens, handed over, and `scored` ones behind each.
struct GateReading {
  size_t samples = 0;
  size_t prefix = 0;
  size_t scored = 0;  // 0: too few tokens to measure
  // Which the model has to read: the prefix once (grouped tokens: twice), and what is scored exactly, over the codec's
  // pages, and for the noise.
  size_t tokens() const { return samples * (prefix + 3 * scored); }
};
// Of a text of n_tokens. Models of billions of weights read a quarter of what others do. It depends on the model alone,
// not on how fast this machine is, so that a codec is judged alike everywhere.
GateReading ReadingOf(const HyperParams& params, size_t n_tokens);

struct QualityGateOptions {
  std::string directory;  // of the cache; empty: remember nothing beyond this object. See CacheDirectory("quality")
  int n_threads = 2;
  std::function<void(size_t done, size_t total)> on_progress;  // while measuring, of tokens
  std::shared_ptr<const Calibration> calibration = {};         // `bal`: pages behind these matrices; may be null
  std::shared_ptr<const PqCodebooks> codebooks = {};           // of pq4 and pq2; null: those beside the model
  double refine = kDefaultRefine;  // of the reader, as SequenceOptions; 0: of progressive pages it has the base alone
};

class QualityGate {
 public:
  QualityGate(std::shared_ptr<const Model> model, QualityGateOptions options);

  // Errors: the Sequence's; kInvalidArgument when the vocabulary makes next to nothing of the gate's text.
  Result<QualityVerdict> Check(const KvChoice& kv);

  // `kv` itself if it is within its bound, else the first of LadderAbove that is. `verdicts`: of all that were looked at,
  // the chosen one last.
  struct Choice {
    KvChoice kv;
    std::vector<QualityVerdict> verdicts;
  };
  Result<Choice> Choose(const KvChoice& kv);

  // Whether a context may be read: every codec of its pages is within its bound, and dropping as many tokens, if it did.
  // Error: kIncompatible/quality_gate, and Check's. REQUIRES: a reader's Sequence::CheckAttach has nothing against it.
  Status Admit(const Context& context);

  // Calibration generation: what the model says first behind a context, token by token, over its pages and over exact K
  // and V of the same tokens, which are read again for it (as long as a text handoff takes). The exact run chooses the
  // tokens. Errors: Attach's and Forward's.
  Result<SampleScore> CompareContinuation(const Context& context, int n_tokens) const;

 private:
  KvChoice AsRead(KvChoice kv) const;  // by this reader
  Result<QualityVerdict> Measure(const KvChoice& kv);
  std::optional<QualityVerdict> Recall(const KvChoice& kv) const;
  void Remember(const QualityVerdict& verdict) const;
  std::string EntryName(const KvChoice& kv) const;

  std::shared_ptr<const Model> model_;
  QualityGateOptions options_;
  std::map<std::string, QualityVerdict> known_;  // by EntryName
};

// The gate's text, about 4 KB.
std::string_view QualityText();

}  // namespace qkv
