// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// One agent's turn from the outside: take over a context (or not), read the prompt, generate, publish. The ladder of
// DESIGN §8 is here: attach (or copy, where the bytes cannot be shared), splice, else text, each step down with a
// reason. Used by `generate`, `publish`, `attach` and by the worker processes of a flow. One thread; blocks; every wait on
// a broker has that client's deadline.

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "qkv/broker/client.h"
#include "qkv/engine/assemble.h"
#include "qkv/engine/sequence.h"
#include "qkv/engine/vocab.h"

namespace qkv {

enum class HandoffMode : uint8_t { kNone, kAttach, kCopy, kSplice, kText };
std::string_view HandoffModeName(HandoffMode mode);  // "none", "attach", "copy", "splice", "text"

enum class OnMiss : uint8_t { kText, kFail };

// A step of the ladder that was tried and refused.
struct StepDown {
  HandoffMode from = HandoffMode::kAttach;
  Reason reason = Reason::kNone;
  std::string detail;                     // the error behind the reason
  std::vector<FieldMismatch> mismatches;  // between card and model, if that was it
};

// A context to be used behind an own prefix.
struct ContextToRead {
  std::string context;         // id or name at the broker; empty: text is wanted
  std::vector<Token> history;  // its tokens, for the text fallback; without them it reads the card's
  OnMiss on_miss = OnMiss::kText;
  SplicePolicy splice;
  int prefix_tokens = 0;  // of history: the producer's own system message, left out behind another
};

struct TurnRequest {
  std::string system;  // only for a conversation's first turn
  std::string prompt;  // empty: go on without a new turn
  bool raw = false;    // prompt is plain text, no chat template
  // The prompt is a text for others to read: bare, behind the system message or, without one, behind the token for the
  // beginning of a text, both of which readers leave out. Nothing is generated (max_tokens is 0), nothing inherited.
  bool document = false;
  int max_tokens = 256;
  bool ignore_eos = false;     // generate max_tokens whatever comes; for benchmarks and tests
  bool digest_logits = false;  // fill in TurnResult::logits_digest
  Sampling sampling;

  // Where to go on from: a context of a broker (id or name) …
  std::string inherits;
  OnMiss on_miss = OnMiss::kText;
  // … and what was read so far as tokens of this model's vocabulary, for the text fallback (and for a text handoff when
  // `inherits` is empty). Without it the fallback reads the card's tokens.
  std::vector<Token> history;
  int prefix_tokens = 0;  // of history: the first ones, if they are a system message
  int64_t budget = 0;     // most tokens to take over; a longer context is a miss (too_long). 0: any

  // Or: contexts to read in this order behind the system message, before the prompt. Not together with `inherits`. The
  // first one is gone on from if there is no system message or it begins with the same one; the others are spliced as
  // their policies say. What begins with its producer's system message is used without it behind another.
  std::vector<ContextToRead> reads;

  std::string publish_as;                    // publish the context after the turn under this name; empty: don't
  std::chrono::milliseconds publish_ttl{0};  // 0: until removed or evicted
  bool publish_pinned = false;
  bool publish_may_fail = false;  // then the result says why, and the turn counts all the same
  bool encrypt = false;  // publish it encrypted, under a key of its own; what goes on from an encrypted one always is
  std::string agent;     // for the card

  // Called while text is generated, when more of the context has come to be in sealed segments: the beginning that is can
  // be had at the broker under this id until the whole is published, or the next one announced. Needs `publish_as`.
  std::function<void(const std::string& context_id, int64_t n_tokens)> on_announced;
};

struct TurnResult {
  std::string text;
  std::vector<Token> output_tokens;   // without the end-of-generation token
  std::vector<Token> context_tokens;  // everything read, output included
  bool stopped_by_eos = false;
  std::string logits_digest;  // XXH3-128 over the logits behind every sampled token: equal if all bits are

  HandoffMode mode = HandoffMode::kNone;  // kNone: nothing to take over was asked for
  Reason reason = Reason::kNone;          // why neither kAttach nor kCopy
  uint64_t bytes_copied = 0;              // kCopy: of segments, decrypted or read into memory of this process alone
  std::string reason_detail;              // the error behind the reason
  std::vector<StepDown> steps_down;       // the ladder above `mode`, from its top; of `reads`, of each context in turn
  int64_t tokens_reused = 0;
  // Of `reads`: spans that were moved, context tokens that were repaired, and the policies that was done by ("hide",
  // "repair=32, hide"; for auto the rung it stopped at, "full" for all read again). Empty: nothing was moved.
  std::string splice;
  int spans_spliced = 0;
  int64_t tokens_repaired = 0;
  double probe_kl = -1;           // of auto (assemble.h), nats; -1: it was not
  int64_t prefix_tokens = 0;      // the context's first tokens that are the agent's own system message
  int64_t tokens_recomputed = 0;  // prompt tokens read in this turn (not the generated ones)
  double attach_ms = 0;           // broker round trip, card, mapping, compatibility
  double ttft_ms = 0;             // from the start of the turn to the first token, attach included
  double prefill_ms = 0;          // of which reading the prompt, pages checked before their first use included
  double decode_ms = 0;           // from the first token to the last
  double publish_ms = 0;
  // When, by the steady clock, which all processes of a machine share; 0: no token.
  double first_token_at_ms = 0;
  double last_token_at_ms = 0;
  std::string context_id;     // of what was published; empty: nothing was, or it failed
  std::string publish_error;  // why it failed
  uint64_t kv_bytes = 0;      // all pages and tail that this context reads
  uint64_t own_kv_bytes = 0;  // of which this process wrote
  // Sequence::Stats' of the same meaning: what the pages hold and what attention read of them.
  double kv_bits_stored = 0;  // per value; 0: no pages
  double kv_bits_read = 0;
  uint64_t keys_with_refinement = 0;
  uint64_t keys_refined = 0;
  // Of the context: tokens grouped by importance, and how many of them were dropped. And what it cost this turn: CPU time of
  // all threads in sampling attention, also against all of it while the prompt was read; and time of grouping.
  int64_t tokens_grouped = 0;
  int64_t tokens_dropped = 0;
  double sample_ms = 0;
  double sample_share = 0;
  double group_ms = 0;
  double refined_share() const {
    return keys_with_refinement == 0 ? 0
                                     : static_cast<double>(keys_refined) / static_cast<double>(keys_with_refinement);
  }
};

// Segments of contexts that a later turn will go on from, mapped, checked and faulted in ahead of it. One thread.
class WarmSegments {
 public:
  // Fetches a context, keeps its segments, lets its lease go. Returns the bytes that were not here before. What cannot be
  // had, or fails its check, is not kept. Errors: FetchContext's and Segment::Verify's.
  Result<uint64_t> Add(BrokerClient& broker, const std::string& id_or_name, int threads);
  // What this process wrote and sealed: mapped and known to be whole already.
  void Keep(const Context& context);
  // The kept one of the same content, or null.
  std::shared_ptr<const Segment> Find(const std::string& digest) const;
  void Clear() { segments_.clear(); }

 private:
  std::map<std::string, std::shared_ptr<const Segment>> segments_;  // by digest; each knows which pages are checked
};

class Agent {
 public:
  // `broker` may be null when no turn inherits or publishes, `warm` when nothing was prepared. All must outlive the
  // agent.
  Agent(std::shared_ptr<const Model> model, std::unique_ptr<Sequence> sequence, BrokerClient* broker,
        const WarmSegments* warm = nullptr);
  ~Agent();  // lets its lease go

  // Asked of every context that is about to be used, beside what it is made of; an error is a step down the ladder like any
  // other. See QualityGate::Admit.
  using Admit = std::function<Status(const Context& context)>;
  void AdmitBy(Admit admit) { admit_ = std::move(admit); }

  // Ahead of a turn with `reads`: reads the system message, as Run would first. Does nothing when that is done already.
  Status ReadPrefix(const std::string& system);

  // `on_text`: text as it becomes complete; returning false stops generating (the result is still whole). After an error
  // of taking over with OnMiss::kFail, the agent's context is what it was before. The broker, if it is there, is told how
  // the turn went.
  Result<TurnResult> Run(const TurnRequest& request, const std::function<bool(std::string_view)>& on_text = {});

  // When the broker has hung up: a new connection, and, if it is a new broker, the context that was published last
  // announced again. Called by Run; call it while waiting, too, so that others find that context. Errors: the client's.
  Status KeepAnnounced();

  // What was published last; null: nothing.
  const Context* published() const { return published_ ? &published_->context : nullptr; }

  Sequence& sequence() { return *sequence_; }
  const Vocab& vocab() const { return vocab_; }

 private:
  Result<std::vector<Token>> DocumentTokens(const TurnRequest& request) const;
  Result<std::vector<Token>> TurnTokens(const TurnRequest& request, bool first) const;
  Status CheckRoom(const TurnRequest& request, size_t n_context, size_t n_new) const;
  // Goes on from request.inherits and reads the prompt. On error the sequence is what it was. `history`
  // becomes the card's tokens if it is empty and they mean the same here.
  Status Attach(const TurnRequest& request, std::vector<Token>& history, TurnResult& result);
  // Attach, or fall back to reading history and prompt; fills in the result's handoff fields.
  Status Read(const TurnRequest& request, TurnResult& result);
  Status NotePrefix(const TurnRequest& request, std::span<const Token> history, std::span<const Token> tokens);
  void Report(const TurnRequest& request, const TurnResult& result, bool failed);
  // The same for a request with `reads`.
  struct Reading;
  Status ReadBehindPrefix(const TurnRequest& request, TurnResult& result);
  Result<Context> FetchToRead(const ContextToRead& read);
  Status FetchAll(const TurnRequest& request, std::vector<Reading>& readings, TurnResult& result);
  // The contexts that are there as pages, the others as text; *failed: the one that can't be used after all.
  Status Place(const TurnRequest& request, const std::vector<Reading>& readings, TurnResult& result, size_t* failed);
  // From here on it holds these, and those of before no more.
  void Hold(std::vector<uint64_t> leases);
  Status ReadTokens(std::span<const Token> tokens, TurnResult& result);
  Status PublishTurn(const TurnRequest& request, TurnResult& result);
  void Announce(const TurnRequest& request);

  std::shared_ptr<const Model> model_;
  std::unique_ptr<Sequence> sequence_;
  // With another try behind it when the broker hangs up.
  Result<Context> Fetch(const std::string& id_or_name);
  Status Publish(Context context, PublishOptions options);

  BrokerClient* broker_;
  const WarmSegments* warm_;
  Admit admit_;
  std::vector<uint64_t> leases_;  // of the contexts taken over last
  bool encrypted_ = false;        // what was read came encrypted
  int prefix_tokens_ = 0;         // of the context: the first ones, if they are a system message
  struct Published {
    Context context;
    PublishOptions options;
    std::chrono::system_clock::time_point expires;  // if options.ttl says so
  };
  std::optional<Published> published_;  // last
  std::string announced_;               // the context announced last; empty: none is at the broker
  int announced_tokens_ = 0;
  Vocab vocab_;
};

// The descriptors and card of a context to the broker, and back. FetchContext maps and validates; the error's reason is
// the ladder's. The lease that comes with a fetched context ends with ReleaseLease or with the connection.
// PublishContext's error is the broker's. With a key in `options`, card and segments are encrypted with it on the way
// out; FetchContext decrypts what comes encrypted, into memory of this process.
Status PublishContext(BrokerClient& broker, const Context& context, const PublishOptions& options = {});
Result<Context> FetchContext(BrokerClient& broker, const std::string& id_or_name, Trace* trace = nullptr,
                             const WarmSegments* warm = nullptr);

}  // namespace qkv
