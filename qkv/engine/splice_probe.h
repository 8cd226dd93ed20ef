// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures what splicing does to a model's answers: two passages, each read apart from the other, behind a reader's own
// prefix, against the same tokens read in one go. Used by `eval`. One thread; blocks for as long as the model takes.

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/engine/assemble.h"
#include "qkv/engine/quality_probe.h"

namespace qkv {

// own | a | b | prompt | scored, and the last scored place's answer.
struct SpliceCase {
  std::vector<Token> own;       // the reader's prefix
  std::vector<Token> producer;  // another prefix, behind which passages may be read
  std::vector<Token> a, b;
  std::vector<Token> prompt;
  std::vector<Token> scored;  // one more than places that are scored
  uint64_t seed = 0;          // of what is picked at random
};

// One way to put the passages behind the prefix.
struct SpliceArm {
  // Behind what the passages were read.
  enum class Encoding : uint8_t {
    kAlone,     // nothing
    kBos,       // the model's token for the beginning of a text, which readers don't see
    kProducer,  // a prefix of the producer's own, which is left out
    kCommon,    // the reader's prefix: the first passage then stands where it was made
  };
  enum class Method : uint8_t {
    kNone,    // keys as they were encoded, though they stand elsewhere: a control
    kRotate,  // the position is mended, nothing else
    kSplice,  // as `policy` says
    kRandom,  // the position is mended, and some tokens picked at random are read again: a control
  };
  std::string name;
  Encoding encoding = Encoding::kAlone;
  Method method = Method::kRotate;
  SplicePolicy policy;
  int n_random = 0;  // of each passage
  CodecPair kv;      // of the passages' pages
};

// "none", "rotate", "hide", "repair=N", "full" (all read again), "auto", "random=N"; behind "bos:", "own:" (the
// producer's own prefix) or "common:" if not alone; "@KV" behind it: passages in pages of this codec, else f16. Error:
// kInvalidArgument.
Result<SpliceArm> ParseSpliceArm(std::string_view text);

struct SpliceScore {
  std::vector<TokenScore> places;  // of SpliceCase::scored
  int64_t recomputed = 0;          // tokens of the passages
  double ms = 0;         // from the prefix to where the prompt can be read; for auto, with its probes. 0: a control
  double rung = -1;      // of auto: where it stopped: 0 hide, else tokens of repair (all: the passages' length)
  double probe_kl = -1;  // of auto
};

class SpliceProbe {
 public:
  // Errors: Sequence's.
  static Result<std::unique_ptr<SpliceProbe>> Read(std::shared_ptr<const Model> model, SpliceCase what,
                                                   const ProbeOptions& options);
  Result<SpliceScore> Score(const SpliceArm& arm);

 private:
  struct Encoded {
    Context a, b;
    int left_out = 0;  // tokens before the passage
  };
  SpliceProbe() = default;
  Result<std::unique_ptr<Sequence>> NewSequence(CodecPair kv) const;
  Result<Context> ReadBehind(std::span<const Token> prefix, std::span<const Token> passage) const;
  Result<const Encoded*> Encode(SpliceArm::Encoding encoding);
  Status AppendMoved(Sequence& sequence, const Context& context, int first, int n, bool rotate) const;
  Status PlaceRandom(Sequence& sequence, const Context& context, int n_random, uint64_t seed) const;
  Result<std::vector<float>> LogitsOfScored(Sequence& sequence) const;

  std::shared_ptr<const Model> model_;
  ProbeOptions options_;
  SpliceCase case_;
  std::unique_ptr<ReferenceLogits> reference_;
  std::map<SpliceArm::Encoding, Encoded> encoded_;  // f16
};

}  // namespace qkv
