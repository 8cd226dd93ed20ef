// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures what a codec does to a model's answers: the same tokens read over exact pages and over encoded ones, in
// steps of the same size, so that whatever else rounds (ggml rounds activations to 8 bits where weights are quantized)
// rounds alike in both. Used by `eval` and by the quality gate. One thread; all of it blocks for as long as the model
// takes.

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "qkv/engine/quality.h"
#include "qkv/engine/sequence.h"

namespace qkv {

struct ProbeOptions {
  int n_threads = 2;
  int n_batch = 512;                                           // tokens per step
  std::function<void(size_t done, size_t total)> on_progress;  // of the prefix
  double refine = kDefaultRefine;                              // of the reader, as SequenceOptions
  // HandoffProbe: scored tokens per step, their own K and V exact all the same; 0: n_batch. Tokens that are read
  // together share what they refine, so that only 1 shows what a generating reader reads.
  int score_batch = 0;
};

// What a context takes.
struct KvSize {
  // Blocks, refinement planes' too, and what its segments' pages are read with: means and exact first tokens, tables of
  // layers' codecs. So a context of n tokens in one segment of rotated pages takes 24 / n more than its codes and
  // scales.
  double bits_per_value = 0;
  double file_bits = 0;  // everything: heads of segments, page tables and the padding of pages to 4 KiB as well
  uint64_t values = 0;   // K and V of all tokens, dropped ones too
};
// The context must have at least one token.
KvSize SizeOf(const Context& context);

struct ProbeResult {
  SampleScore score;
  KvSize size;
  // While what is scored was read: the share of the keys in pages with a refinement plane that was refined (without
  // such pages 0), and the codes and scales that were read per value on average: of pages alone, as Sequence::Stats has
  // it, so that what segments hold once, which is read as well, is not in it, unlike in `size`.
  double refined_share = 0;
  double read_bits = 0;
  double encode_ns = 0;  // per value, one thread
  double decode_ns = 0;
};

// What a codec is asked for: pages of `kv`, behind a calibration's matrices if there is one; with `transform`, rows
// that went through it first (CopyExact); with `groups`, pages of two codecs (protocol `handoff` only, and no
// transform).
struct ProbeCodec {
  PageCodecs kv;
  Sequence::RowTransform transform;
  std::optional<TokenGroups> groups = {};
  std::shared_ptr<const Calibration> calibration = {};
  std::shared_ptr<const PqCodebooks> codebooks = {};  // null: as SequenceOptions has it
};

// Protocol `handoff`: a prefix is read exactly, once; published in one codec after the other; and what follows is read
// over the pages, its own K and V exact.
class HandoffProbe {
 public:
  // tokens: the prefix, then what is scored, then one more: the last scored place's answer. REQUIRES 1 <= n_prefix <=
  // tokens.size() - 2. Errors: Sequence's.
  static Result<std::unique_ptr<HandoffProbe>> Read(std::shared_ptr<const Model> model, std::span<const Token> tokens,
                                                    int n_prefix, const ProbeOptions& options);
  Result<ProbeResult> Score(const ProbeCodec& codec) const;
  // With nothing coarser than f16: the last bit of every K and V is changed at random. With fp32 weights next to
  // nothing; with quantized ones, what any change at all comes to when activations are rounded.
  Result<SampleScore> NoiseFloor() const;
  const Context& exact() const { return exact_; }

 private:
  HandoffProbe() = default;
  Result<ProbeResult> ScoreGroups(const ProbeCodec& codec) const;

  std::shared_ptr<const Model> model_;
  ProbeOptions options_;
  std::vector<Token> scored_, next_;
  Context exact_;
  std::unique_ptr<ReferenceLogits> reference_;
};

// Protocol `all`: everything is read in small steps over encoded pages, as if there was no exact prefill: the second
// half is scored. Only the newest tokens, which no page holds yet, are exact: up to a page, the encoder's lag and a
// step. tokens: as many as are read, and one more.
class PagesProbe {
 public:
  static Result<std::unique_ptr<PagesProbe>> Read(std::shared_ptr<const Model> model, std::span<const Token> tokens,
                                                  const ProbeOptions& options);
  Result<ProbeResult> Score(const ProbeCodec& codec) const;

 private:
  PagesProbe() = default;
  Result<std::vector<float>> Logits(const ProbeCodec& codec, ProbeResult* result) const;

  std::shared_ptr<const Model> model_;
  ProbeOptions options_;
  std::vector<Token> tokens_;
  std::unique_ptr<ReferenceLogits> reference_;
};

// Protocol `hops`: a context is handed on `n_hops` times; each reader attaches, reads `hop_tokens` more and publishes.
// Scored are the tokens that each reader reads: `chain` against an exact chain, and `single`, for comparison, at the
// same place over a prefix that was exact until it was handed over once.
struct HopScores {
  std::vector<SampleScore> chain, single;        // [n_hops]
  std::vector<double> refined_share, read_bits;  // [n_hops], of `chain`; as ProbeResult has them
};
class HopsProbe {
 public:
  // tokens: n_prefix + n_hops * hop_tokens + 1.
  static Result<std::unique_ptr<HopsProbe>> Read(std::shared_ptr<const Model> model, std::span<const Token> tokens,
                                                 int n_prefix, int n_hops, const ProbeOptions& options);
  Result<HopScores> Score(const ProbeCodec& codec, KvSize& size) const;

 private:
  HopsProbe() = default;
  std::span<const Token> HopTokens(int hop, size_t shift) const;

  std::shared_ptr<const Model> model_;
  ProbeOptions options_;
  std::vector<Token> tokens_;
  int n_prefix_ = 0, n_hops_ = 0, hop_tokens_ = 0;
  std::vector<Context> exact_;  // [n_hops], what each reader attaches
  std::vector<ReferenceLogits> references_;
};

// A context of f16 pages.
Result<Context> ReadExact(const std::shared_ptr<const Model>& model, std::span<const Token> tokens,
                          const ProbeOptions& options);

// What the model says greedily behind `token`, which stands behind an exact context that was handed over in `codec`: up
// to max_tokens, without the end-of-generation token.
Result<std::vector<Token>> GreedyOver(const std::shared_ptr<const Model>& model, const Context& exact, Token token,
                                      const ProbeCodec& codec, int max_tokens, const ProbeOptions& options);

}  // namespace qkv
