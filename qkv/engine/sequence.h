// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A live context: what an agent has read so far, and the means to read more (DESIGN §3, §7).
//
//   spans of sealed pages (shared)  |  own pages in an open segment  |  tail: newest tokens, fp16 blocks, private
//
// Forward() appends tokens and leaves the logits of the last one. Within one call K and V of that call stay fp16; when
// it ends, full pages go to an encoder thread and are read as pages from a position on that depends on the sequence of
// calls only, never on timing. Publish() turns the rest of the tail into a page and seals: from then on this sequence
// and every consumer read the same bytes, so going on is bit for bit the same in either.
//
// Owned by one thread at a time. Its segments are shared by shared_ptr; the Model must outlive it.

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "qkv/attention/attention.h"
#include "qkv/base/trace.h"
#include "qkv/engine/model.h"
#include "qkv/engine/splice.h"
#include "qkv/engine/token_groups.h"
#include "qkv/engine/vocab.h"
#include "qkv/segment/segment.h"

namespace qkv {

class Calibration;
class PqCodebooks;

// Rows as they are computed, RoPE applied to Q and K: [n_tokens][heads][head_dim], heads of queries for kQ, else KV
// heads. For calibration. Called on the caller's thread within Forward, layer by layer, Q last.
enum class RowKind : uint8_t { kQ, kK, kV };
using RowObserver = std::function<void(RowKind kind, int layer, int n_tokens, std::span<const float> rows)>;
// At it a tenth of the tokens is refined (docs/EVALUATION.md).
inline constexpr double kDefaultRefine = 0.012;

struct SequenceOptions {
  int n_ctx = 4096;  // tokens; beyond it Forward refuses
  int n_threads = 2;
  int n_batch = 512;  // tokens per graph in prefill
  PageCodecs kv;      // of the pages that this sequence writes
  // The tokens of the first Forward into an empty sequence, but for the newest ones, are grouped by importance when it
  // ends (token_groups.h): those with most attention into pages of `kv`, the others into pages of groups->low, or
  // nowhere. A prompt of which tail_budget_bytes made pages already, or of fewer than 96 tokens, is not grouped; nor is
  // anything else. Not with codecs by layer.
  std::optional<TokenGroups> groups = {};
  // Of pages with a refinement plane, the tokens whose weight may reach this share of the largest are read at full
  // width. 0 reads the base plane alone; in 0..1.
  double refine = kDefaultRefine;
  // K and V of one Forward call stay fp16 until it ends, up to this many bytes; beyond it older pages are encoded
  // early. 0: every page is used encoded from the batch on that follows the one that filled it, as if nothing were ever
  // exact.
  uint64_t tail_budget_bytes = uint64_t{1} << 30;
  // Called on the caller's thread after every batch of a Forward that takes more than one.
  std::function<void(size_t done, size_t total)> on_progress;
  RowObserver on_rows;
  // `bal`: K is kept, and Q read, multiplied by these matrices. Contexts are then for readers with the same ones, and
  // can't be spliced. May be null.
  std::shared_ptr<const Calibration> calibration;
  // Of pages in the codecs pq4 and pq2. Null: those beside the model (engine/codebooks.h), if there are any.
  std::shared_ptr<const PqCodebooks> codebooks;
  Trace* trace = nullptr;  // stages are recorded here; must outlive the sequence
};

// A context as it is handed over: the card, and the segments it names.
struct Context {
  CacheCard card;
  std::vector<std::shared_ptr<const Segment>> segments;  // in the card's order
  uint64_t lease = 0;                                    // the broker's record of a fetched context; 0: none
  bool encrypted = false;                                // it was, at the broker: these are our private copies
  uint64_t copied_bytes = 0;  // of segments, brought into memory of this process alone; 0: mapped where they lie
};

class Sequence {
 public:
  // Errors: kInvalidArgument; kIncompatible (a calibration or codebooks of another model); ReadCodebooks' when the
  // codec needs codebooks; kExhausted.
  static Result<std::unique_ptr<Sequence>> Create(std::shared_ptr<const Model> model, const SequenceOptions& options);
  ~Sequence();

  // Goes on from `context`, which replaces whatever was here. The card must be compatible with the model
  // (CheckCompatible) and its segments must match it; otherwise nothing changes. Pages are verified before the next
  // Forward reads them. O(spans + tokens of the card), independent of the bytes. What was here before is kept until a
  // Forward succeeds.
  Status Attach(const Context& context);
  // What Attach would say to it, with nothing changed: whether card and segments are what they must be.
  Status CheckAttach(const Context& context) const;
  // What a context's card must agree with: the model's identity, and the digests of calibration and codebooks if there
  // are any.
  const ModelIdentity& identity() const;
  const PqCodebooks* codebooks() const;  // null: there are none

  // For evaluation: as if one Forward had read the tokens of `exact`, a context whose pages are all f16, into an empty
  // sequence. Its rows are copied into the tail, each [tokens][head_dim] of a page, side, layer and KV head by way of
  // `transform` where there is one (and then of the calibration's matrices; `exact` is without). So a prefix is read
  // once, and Publish gives it in any codec. Errors: Attach's, and kInvalidArgument for pages of another codec or of
  // grouped tokens.
  using RowTransform =
      std::function<void(Side side, int layer, int kv_head, int first_position, int tokens, float* rows)>;
  Status CopyExact(const Context& exact, const RowTransform& transform = {});
  // For evaluation: tokens whose keys and values were computed elsewhere, behind what is here, as fp16: [layer][token]
  // [kv_head][head_dim], keys rotated to where they now stand. Errors: kInvalidArgument (sizes),
  // kInvalidArgument/too_long.
  Status AppendRows(std::span<const Token> tokens, std::span<const float> k, std::span<const float> v);
  const Rope& rope() const;  // as keys are rotated

  // Uses contexts behind what was read so far, in this order: an approximation (splice.h), unless a context's left out
  // beginning is exactly what stands here, or it is used from its start behind nothing. What is here becomes pages;
  // tokens that are to be repaired are read behind all that comes before them. Afterwards there are no logits until the
  // next Forward. Errors: Attach's, for each context; kInvalidArgument (a token out of range, repair no multiple of a
  // page); kIncompatible/codec_unsupported for a context of grouped tokens, unless it is used whole, from position 0
  // on; kIncompatible/quality_gate when no token would be seen that was encoded at the start; kExhausted;
  // kCorrupt/checksum. On error the tokens are what they were.
  Result<SpliceResult> Splice(std::span<const SpliceSource> sources, const SpliceOptions& options);

  // Back to what was here before the last Attach, as long as no Forward has succeeded since; else nothing happens.
  void Revert();

  // Appends tokens and computes the last one's logits. With no tokens, the last token is dropped and read again, which
  // is how a consumer that has nothing new to say gets logits. Errors: kInvalidArgument/too_long with both numbers
  // (nothing changed), kCorrupt/checksum when a page fails its verification (nothing changed), kExhausted (the last
  // token is gone if it was to be read again, else nothing changed).
  Status Forward(std::span<const Token> tokens);

  // [n_vocab], of the last token of the last Forward; valid until the next call.
  std::span<const float> logits() const;
  // [tokens of the last Forward][n_vocab]; only when Forward was preceded by KeepAllLogits(true). For evaluation.
  void KeepAllLogits(bool keep);
  std::span<const float> all_logits() const;

  // Everything read so far as sealed pages and a card (id, token ids, spans, model identity; name as given). Idempotent
  // as long as nothing was appended: the same pages, a new card. Errors: kInvalidArgument when the context is empty.
  struct PublishInfo {
    std::string name;
    std::string agent;
    std::string sampler;
    uint64_t seed = 0;
    bool open_turn = true;
    int prefix_tokens = 0;  // the first tokens, if they are the agent's own system message
  };
  Result<Context> Publish(const PublishInfo& info);

  // The beginning of this context that is in sealed segments already, as a context of its own, for readers that want to
  // have it mapped before the whole is published. Changes nothing: what comes later is the same whether asked or not.
  // Without tokens when nothing is sealed.
  Context Sealed(const PublishInfo& info) const;
  int sealed_tokens() const;

  // Forgets everything; attached segments are let go.
  void Clear();

  // Drops the newest tokens, so that n_tokens are left; pages are cut by reference, never rewritten. Error:
  // kInvalidArgument for tokens that were grouped with others that would stay.
  Status Truncate(int n_tokens);

  // Which of the first tokens stand in which group; nothing: all are in the order of the text.
  const GroupedTokens& groups() const;
  // [tokens of the first Forward], what they were grouped by; empty where nothing was.
  std::span<const float> importance() const;

  const std::vector<Token>& tokens() const;
  int n_ctx() const;
  int n_threads() const;
  const PageCodecs& kv() const;  // of the pages that it writes
  Trace* trace() const;          // may be null
  const Model& model() const;

  struct Stats {
    int64_t tokens_reused = 0;      // taken over by Attach
    int64_t tokens_spliced = 0;     // used by Splice as they are
    int64_t tokens_recomputed = 0;  // read by Forward, or repaired by Splice, since Create or the last Attach
    uint64_t shared_kv_bytes = 0;   // pages of attached segments
    uint64_t own_kv_bytes = 0;      // pages written here
    uint64_t tail_bytes = 0;
    int64_t tokens_dropped = 0;  // of the context, by who grouped it
    double sample_ms = 0;        // CPU time of all threads in sampling attention for SequenceOptions::groups
    double group_ms = 0;         // of grouping behind it
    double verify_ms = 0;        // checksums of attached pages
    double encode_ms = 0;        // CPU time of the encoder thread
    double encode_wait_ms = 0;   // of which Forward had to wait for
    // Keys seen in pages with a refinement plane, per layer, KV head and tile of queries, and how many of them were
    // refined; since Create or the last Attach.
    uint64_t keys_with_refinement = 0;
    uint64_t keys_refined = 0;
    // Stored bits of the pages per value, without and with all of the refinement planes; the tail is not counted.
    double base_bits = 0;
    double stored_bits = 0;
    // Of the keys that could be, and what was read per value on average.
    double refined_share() const {
      return keys_with_refinement == 0 ? 0
                                       : static_cast<double>(keys_refined) / static_cast<double>(keys_with_refinement);
    }
    double read_bits() const { return base_bits + refined_share() * (stored_bits - base_bits); }
  };
  const Stats& stats() const;

 private:
  struct Impl;
  explicit Sequence(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkv
