// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/agent.h"

#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "qkv/base/kill_point.h"

namespace qkv {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kAnnounceEvery = 16;  // tokens; a segment holds hundreds
double MsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double SteadyMs(Clock::time_point time) {
  return std::chrono::duration<double, std::milli>(time.time_since_epoch()).count();
}

// What is encrypted with a context's key, and where in it: nothing can be put in another's place.
std::string CipherLabel(const std::string& id, size_t index) {
  return fmt::format("{}/{}", id, index);
}

// A card for the broker, which need not know the tokens: the real one and the segments follow, encrypted.
Result<Fd> EncryptContext(const Context& context, const SecretKey& key, std::vector<Fd>& files) {
  CacheCard outer = context.card;
  outer.clear_token_ids();
  outer.clear_spans();
  outer.clear_segments();
  outer.clear_mask();
  outer.clear_importance();
  outer.clear_turn();
  outer.mutable_format()->set_cipher(std::string(kCipherName));
  const std::vector<std::byte> card = SerializeCard(context.card);
  const auto add = [&](std::span<const std::byte> plain) -> Status {
    QKV_ASSIGN_OR_RETURN(Fd file, Encrypt(key, CipherLabel(outer.id(), files.size()), plain));
    auto* segment = outer.add_segments();
    QKV_ASSIGN_OR_RETURN(const uint64_t bytes, file.SizeBytes());
    segment->set_bytes(bytes);
    segment->set_n_pages(1);
    segment->set_digest(NewContextId());  // the AEAD vouches for the content; a digest of it would say nothing more
    files.push_back(std::move(file));
    return {};
  };
  QKV_RETURN_IF_ERROR(add(card));
  for (const auto& segment : context.segments) {
    QKV_ASSIGN_OR_RETURN(const Mapping plain,
                         Mapping::Map(segment->fd(), Mapping::Access::kReadOnly, 0, segment->bytes()));
    QKV_RETURN_IF_ERROR(add(plain.bytes()));
  }
  return SealedMemfd("qkv-card", SerializeCard(outer));
}

// The real card and segments in place of the encrypted ones.
Status DecryptContext(const CacheCard& outer, AttachedContext& attached, uint64_t& copied_bytes) {
  if (outer.format().cipher() != kCipherName) {
    return Err(Code::kIncompatible, Reason::kCodecUnsupported, "context '{}' is encrypted with '{}', expected '{}'",
               outer.id(), outer.format().cipher(), kCipherName);
  }
  if (attached.key == nullptr) {
    return Err(Code::kDenied, Reason::kDenied, "context '{}' is encrypted, and the broker gave no key", outer.id());
  }
  std::vector<Fd> plain;
  for (size_t i = 0; i < attached.segments.size(); ++i) {
    QKV_ASSIGN_OR_RETURN(plain.emplace_back(), Decrypt(*attached.key, CipherLabel(outer.id(), i), attached.segments[i],
                                                       i == 0 ? kMaxCardBytes : kMaxSegmentBytes));
  }
  if (plain.empty()) return Err(Code::kCorrupt, Reason::kChecksum, "context '{}' has nothing inside", outer.id());
  for (size_t i = 1; i < plain.size(); ++i) {
    QKV_ASSIGN_OR_RETURN(const uint64_t bytes, plain[i].SizeBytes());
    copied_bytes += bytes;
  }
  attached.card = std::move(plain.front());
  plain.erase(plain.begin());
  attached.segments = std::move(plain);
  attached.on_disk = false;
  return {};
}

// Sealed, so that nothing can change between the check and the use; or a file that only its owner could change. Another
// user's is copied first: a truncated mapping would end this process.
Result<std::shared_ptr<const Segment>> OpenSegment(Fd fd, bool may_be_on_disk, uint32_t broker_uid,
                                                   uint64_t& copied_bytes) {
  const bool on_disk = may_be_on_disk && !IsSealed(fd);
  if (on_disk && !IsReadOnlyFileOf(fd, broker_uid)) {
    return Err(Code::kDenied, Reason::kDenied, "a segment is neither sealed nor a read-only file of the broker's");
  }
  if (on_disk && IsOfAnotherUser(fd)) {
    QKV_ASSIGN_OR_RETURN(fd, SealedCopy("qkv-segment", fd, kMaxSegmentBytes));
    QKV_ASSIGN_OR_RETURN(const uint64_t bytes, fd.SizeBytes());
    copied_bytes += bytes;
    return Segment::Open(std::move(fd));
  }
  return Segment::Open(std::move(fd), /*require_seals=*/!on_disk);
}

Result<Context> OpenContext(AttachedContext attached, uint32_t broker_uid, const WarmSegments* warm) {
  Context context;
  context.lease = attached.lease;
  const auto read_card = [&]() -> Status {
    QKV_ASSIGN_OR_RETURN(const auto bytes, ReadWhole(attached.card, kMaxCardBytes));  // a copy: it cannot change
    QKV_ASSIGN_OR_RETURN(context.card, ParseCard(bytes));
    return {};
  };
  QKV_RETURN_IF_ERROR(read_card());
  if (context.card.id() != attached.id) {
    return Err(Code::kCorrupt, Reason::kChecksum, "the card of context '{}' is that of '{}'", attached.id,
               context.card.id());
  }
  if (!context.card.format().cipher().empty()) {
    QKV_RETURN_IF_ERROR(DecryptContext(context.card, attached, context.copied_bytes));
    QKV_RETURN_IF_ERROR(read_card());
    if (context.card.id() != attached.id || !context.card.format().cipher().empty()) {
      return Err(Code::kCorrupt, Reason::kChecksum, "the card inside context '{}' is another's", attached.id);
    }
    context.encrypted = true;
  }
  for (Fd& fd : attached.segments) {
    QKV_ASSIGN_OR_RETURN(auto segment, OpenSegment(std::move(fd), attached.on_disk, broker_uid, context.copied_bytes));
    // The digest covers every page's checksum, and the kept one knows which pages have been compared with theirs.
    if (warm != nullptr) {
      if (auto known = warm->Find(segment->digest())) segment = std::move(known);
    }
    context.segments.push_back(std::move(segment));
  }
  KillPoint("attach.opened");
  return context;
}

Status CheckBudget(const TurnRequest& request, const CacheCard& card) {
  if (request.budget <= 0 || card.token_ids_size() <= request.budget) return {};
  return Err(Code::kExhausted, Reason::kTooLong, "context '{}' has {} tokens, the budget is {}", request.inherits,
             card.token_ids_size(), request.budget);
}

}  // namespace

std::string_view HandoffModeName(HandoffMode mode) {
  switch (mode) {
    case HandoffMode::kNone: return "none";
    case HandoffMode::kAttach: return "attach";
    case HandoffMode::kCopy: return "copy";
    case HandoffMode::kSplice: return "splice";
    case HandoffMode::kText: return "text";
  }
  return "none";
}

Status PublishContext(BrokerClient& broker, const Context& context, const PublishOptions& options) {
  std::vector<Fd> encrypted;
  Fd card;
  std::vector<const Fd*> segments;
  if (options.key != nullptr) {
    QKV_ASSIGN_OR_RETURN(card, EncryptContext(context, *options.key, encrypted));
    for (const Fd& file : encrypted) segments.push_back(&file);
  } else {
    QKV_ASSIGN_OR_RETURN(card, SealedMemfd("qkv-card", SerializeCard(context.card)));
    for (const auto& segment : context.segments) segments.push_back(&segment->fd());
  }
  KillPoint("publish.card");
  Status published = broker.Publish(card, segments, options);
  const bool some_on_disk = std::ranges::any_of(context.segments, [](const auto& s) { return !s->sealed(); });
  if (!published && published.error().code == Code::kDenied && some_on_disk && options.key == nullptr) {
    // Files of a directory that this broker does not, or no longer, know: it takes sealed memory.
    std::vector<Fd> copies;
    copies.reserve(context.segments.size());
    for (size_t i = 0; i < context.segments.size(); ++i) {
      const Segment& segment = *context.segments[i];
      if (segment.sealed()) continue;
      QKV_RETURN_IF_ERROR(segment.Verify(0, segment.pages().size(), 1));
      QKV_ASSIGN_OR_RETURN(Fd copy, SealedCopy("qkv-segment", segment.fd(), segment.bytes()));
      copies.push_back(std::move(copy));
      segments[i] = &copies.back();
    }
    published = broker.Publish(card, segments, options);
  }
  KillPoint("publish.done");
  return published;
}

Result<Context> FetchContext(BrokerClient& broker, const std::string& id_or_name, Trace* trace,
                             const WarmSegments* warm) {
  Result<AttachedContext> attached = [&] {
    const TraceSpan span(trace, "fetch");
    return broker.Attach(id_or_name);
  }();
  if (!attached) return tl::unexpected(std::move(attached).error());
  const TraceSpan span(trace, "map");
  const uint64_t lease = attached->lease;
  auto context = OpenContext(*std::move(attached), broker.broker_uid(), warm);
  if (!context) (void)broker.ReleaseLease(lease);
  return context;
}

Result<uint64_t> WarmSegments::Add(BrokerClient& broker, const std::string& id_or_name, int threads) {
  QKV_ASSIGN_OR_RETURN(const Context context, FetchContext(broker, id_or_name, nullptr, this));
  (void)broker.ReleaseLease(context.lease);
  uint64_t bytes = 0;
  for (const auto& segment : context.segments) {
    if (segments_.contains(segment->digest())) continue;
    QKV_RETURN_IF_ERROR(segment->Verify(0, segment->pages().size(), threads));  // touches all of it
    bytes += segment->bytes();
    segments_[segment->digest()] = segment;
  }
  return bytes;
}

void WarmSegments::Keep(const Context& context) {
  for (const auto& segment : context.segments) segments_[segment->digest()] = segment;
}

std::shared_ptr<const Segment> WarmSegments::Find(const std::string& digest) const {
  const auto found = segments_.find(digest);
  return found == segments_.end() ? nullptr : found->second;
}

Agent::Agent(std::shared_ptr<const Model> model, std::unique_ptr<Sequence> sequence, BrokerClient* broker,
             const WarmSegments* warm)
    : model_(std::move(model)), sequence_(std::move(sequence)), broker_(broker), warm_(warm), vocab_(*model_) {}

Agent::~Agent() {
  if (!announced_.empty() && !broker_->lost()) (void)broker_->Remove(announced_);  // of a turn that failed
  Hold({});
}

Status Agent::KeepAnnounced() {
  if (broker_ == nullptr || !broker_->lost()) return {};
  const uint64_t before = broker_->generation();
  QKV_RETURN_IF_ERROR(broker_->Reconnect());
  leases_.clear();  // they ended with the connection
  if (broker_->generation() == before || !published_) return {};
  PublishOptions options = published_->options;
  if (options.ttl.count() > 0) {  // it does not live longer for having been announced twice
    options.ttl = std::chrono::ceil<std::chrono::milliseconds>(published_->expires - std::chrono::system_clock::now());
    if (options.ttl.count() <= 0) return {};
  }
  return PublishContext(*broker_, published_->context, options);
}

Result<Context> Agent::Fetch(const std::string& id_or_name) {
  QKV_RETURN_IF_ERROR(KeepAnnounced());
  auto context = FetchContext(*broker_, id_or_name, sequence_->trace(), warm_);
  if (context || context.error().code != Code::kPeerLost) return context;
  QKV_RETURN_IF_ERROR(KeepAnnounced());
  return FetchContext(*broker_, id_or_name, sequence_->trace(), warm_);
}

// Twice is as good as once: the same card under the same id.
Status Agent::Publish(Context context, PublishOptions options) {
  QKV_RETURN_IF_ERROR(KeepAnnounced());
  Status status = PublishContext(*broker_, context, options);
  if (!status && status.error().code == Code::kPeerLost) {
    QKV_RETURN_IF_ERROR(KeepAnnounced());
    status = PublishContext(*broker_, context, options);
  }
  if (status) published_ = {std::move(context), options, std::chrono::system_clock::now() + options.ttl};
  return status;
}

// Encoded behind one token that readers don't see, a text's own first token is no sink (ARCHITECTURE.md).
Result<std::vector<Token>> Agent::DocumentTokens(const TurnRequest& request) const {
  std::vector<Token> tokens;
  if (!request.system.empty()) {
    QKV_ASSIGN_OR_RETURN(tokens, vocab_.SystemTurn(request.system));
  } else if (const std::optional<Token> bos = vocab_.BeginningOfText()) {
    tokens = {*bos};
  }
  QKV_ASSIGN_OR_RETURN(const auto text, vocab_.Tokenize(request.prompt, false, false));
  tokens.insert(tokens.end(), text.begin(), text.end());
  return tokens;
}

Result<std::vector<Token>> Agent::TurnTokens(const TurnRequest& request, bool first) const {
  if (request.document) return DocumentTokens(request);
  if (request.raw) return vocab_.Tokenize(request.prompt, first, false);
  if (request.prompt.empty() && !first) return std::vector<Token>{};
  return first ? vocab_.FirstTurn(request.system, request.prompt) : vocab_.NextTurn(request.prompt);
}

Status Agent::CheckRoom(const TurnRequest& request, size_t n_context, size_t n_new) const {
  const size_t needed = n_context + n_new + static_cast<size_t>(std::max(request.max_tokens, 0));
  if (needed <= static_cast<size_t>(sequence_->n_ctx())) return {};
  return Err(
      Code::kInvalidArgument, Reason::kTooLong,
      "{} tokens of context, {} of prompt and up to {} of output are {}, the context size is {}; raise it (-c) or "
      "shorten the prompt",
      n_context, n_new, request.max_tokens, needed, sequence_->n_ctx());
}

Status Agent::ReadTokens(std::span<const Token> tokens, TurnResult& result) {
  const auto start = Clock::now();
  const TraceSpan span(sequence_->trace(), "read");
  const double sampled = sequence_->stats().sample_ms, grouped = sequence_->stats().group_ms;
  QKV_RETURN_IF_ERROR(sequence_->Forward(tokens));
  result.prefill_ms = MsSince(start);
  result.sample_ms = sequence_->stats().sample_ms - sampled;
  result.sample_share = result.sample_ms / (result.prefill_ms * sequence_->n_threads());
  result.group_ms = sequence_->stats().group_ms - grouped;
  return {};
}

Status Agent::ReadPrefix(const std::string& system) {
  QKV_ASSIGN_OR_RETURN(const auto prefix, vocab_.SystemTurn(system));
  if (sequence_->tokens() == prefix) return {};
  sequence_->Clear();
  if (prefix.empty()) return {};
  return sequence_->Forward(prefix);
}

void Agent::Hold(std::vector<uint64_t> leases) {
  std::swap(leases_, leases);
  for (const uint64_t ended : leases) {
    if (ended != 0 && broker_ != nullptr && !broker_->lost()) (void)broker_->ReleaseLease(ended);
  }
}

Status Agent::Attach(const TurnRequest& request, std::vector<Token>& history, TurnResult& result) {
  const auto start = Clock::now();
  if (broker_ == nullptr) {
    return Err(Code::kPeerLost, Reason::kPeerLost, "there is no broker to attach '{}' from", request.inherits);
  }
  QKV_ASSIGN_OR_RETURN(const Context context, Fetch(request.inherits));
  encrypted_ |= context.encrypted;  // also its tokens, which a fallback reads
  const auto read = [&]() -> Status {
    // For the text fallback, tokens are as good as text if both sides mean the same by them.
    const CacheCard& card = context.card;
    const bool same_tokens = card.model().tokenizer_digest() == model_->identity().tokenizer_digest();
    if (history.empty() && same_tokens) history.assign(card.token_ids().begin(), card.token_ids().end());
    QKV_ASSIGN_OR_RETURN(const auto tokens, TurnTokens(request, false));
    Status attached = CheckBudget(request, card);
    if (attached) attached = sequence_->CheckAttach(context);  // first: what is admitted is read to find out
    if (attached && admit_) attached = admit_(context);
    if (attached) attached = sequence_->Attach(context);
    result.attach_ms = MsSince(start);
    if (!attached) {
      result.steps_down.front().mismatches = CompareCard(card, sequence_->identity());
      return attached;
    }
    QKV_RETURN_IF_ERROR(CheckRoom(request, sequence_->tokens().size(), tokens.size()));
    return ReadTokens(tokens, result);  // verifies the pages first
  };
  const Status status = read();
  // The lease says what this agent holds: of contexts that it goes on from one after the other, the last.
  if (status) {
    result.bytes_copied = context.copied_bytes;
    Hold({context.lease});
    encrypted_ = context.encrypted;
    prefix_tokens_ = static_cast<int>(context.card.turn().prefix_tokens());
  } else {
    if (context.lease != 0) (void)broker_->ReleaseLease(context.lease);
    sequence_->Revert();
  }
  return status;
}

Status Agent::Read(const TurnRequest& request, TurnResult& result) {
  if (!request.reads.empty()) return ReadBehindPrefix(request, result);
  std::vector<Token> history = request.history;
  if (!request.inherits.empty()) {
    result.steps_down.emplace_back();
    const auto start = Clock::now();
    const Status attached = Attach(request, history, result);
    if (result.attach_ms == 0) result.attach_ms = MsSince(start);  // it did not get that far
    if (attached) {
      result.steps_down.clear();
      result.mode = result.bytes_copied > 0 ? HandoffMode::kCopy : HandoffMode::kAttach;
      result.tokens_reused = sequence_->stats().tokens_reused;
      result.tokens_recomputed = sequence_->stats().tokens_recomputed;
      return {};
    }
    result.reason = attached.error().reason;
    result.reason_detail = attached.error().message;
    if (result.reason == Reason::kNone) result.reason = Reason::kPeerLost;  // the system, not the context, refused
    result.steps_down.front().reason = result.reason;
    result.steps_down.front().detail = result.reason_detail;
    if (request.on_miss == OnMiss::kFail) return attached;
    if (history.empty()) {
      return Err(attached.error().code, result.reason, "{}; and there is no text to fall back to",
                 result.reason_detail);
    }
    result.mode = HandoffMode::kText;
  } else if (!history.empty()) {
    result.mode = HandoffMode::kText;
  }

  const size_t kept = result.mode == HandoffMode::kText ? 0 : sequence_->tokens().size();
  QKV_ASSIGN_OR_RETURN(const auto tokens, TurnTokens(request, history.empty() && kept == 0));
  QKV_RETURN_IF_ERROR(CheckRoom(request, kept + history.size(), tokens.size()));
  if (result.mode == HandoffMode::kText) sequence_->Clear();
  if (kept == 0) QKV_RETURN_IF_ERROR(NotePrefix(request, history, tokens));
  history.insert(history.end(), tokens.begin(), tokens.end());
  const int64_t before = sequence_->stats().tokens_recomputed;
  QKV_RETURN_IF_ERROR(ReadTokens(history, result));
  result.tokens_recomputed = sequence_->stats().tokens_recomputed - before;
  return {};
}

// How much of what is about to be read is the agent's own system message.
Status Agent::NotePrefix(const TurnRequest& request, std::span<const Token> history, std::span<const Token> tokens) {
  prefix_tokens_ = history.empty() ? 0 : request.prefix_tokens;
  if (request.document && request.system.empty() && vocab_.BeginningOfText()) prefix_tokens_ = 1;
  if (!history.empty() || request.raw || request.system.empty()) return {};
  QKV_ASSIGN_OR_RETURN(const auto own, vocab_.SystemTurn(request.system));
  if (own.size() < tokens.size() && std::equal(own.begin(), own.end(), tokens.begin())) {
    prefix_tokens_ = static_cast<int>(own.size());
  }
  return {};
}

void Agent::Report(const TurnRequest& request, const TurnResult& result, bool failed) {
  if (broker_ == nullptr || broker_->lost()) return;
  // Best effort: the turn is what counts.
  (void)broker_->Report({.context = request.inherits,
                         .mode = std::string(HandoffModeName(failed ? HandoffMode::kNone : result.mode)),
                         .reason = result.reason,
                         .failed = failed,
                         .bytes_copied = result.bytes_copied,
                         .tokens_reused = static_cast<uint64_t>(result.tokens_reused),
                         .tokens_recomputed = static_cast<uint64_t>(result.tokens_recomputed),
                         .attach_seconds = result.mode == HandoffMode::kAttach || result.mode == HandoffMode::kSplice
                                               ? result.attach_ms / 1e3
                                               : 0,
                         .publish_seconds = result.publish_ms / 1e3,
                         .ttft_seconds = result.ttft_ms / 1e3,
                         .model = model_->params().name,
                         .kv = ToString(sequence_->kv().pair),
                         .keys_with_refinement = result.keys_with_refinement,
                         .keys_refined = result.keys_refined,
                         .kv_bits_read = result.kv_bits_read});
}

Status Agent::PublishTurn(const TurnRequest& request, TurnResult& result) {
  const auto start = Clock::now();
  const TraceSpan span(sequence_->trace(), "publish");
  if (broker_ == nullptr) {
    return Err(Code::kInvalidArgument, "there is no broker to publish '{}' to", request.publish_as);
  }
  Sequence::PublishInfo info;
  info.name = request.publish_as;
  info.agent = request.agent;
  info.sampler = request.sampling.Describe();
  info.seed = request.sampling.seed;
  info.prefix_tokens = prefix_tokens_;
  QKV_ASSIGN_OR_RETURN(Context context, sequence_->Publish(info));
  const std::string id = context.card.id();
  PublishOptions options{.ttl = request.publish_ttl, .pin = request.publish_pinned};
  if (request.encrypt || encrypted_) {
    QKV_ASSIGN_OR_RETURN(options.key, SecretKey::Generate());
  }
  QKV_RETURN_IF_ERROR(Publish(std::move(context), std::move(options)));
  result.context_id = id;
  if (!announced_.empty()) (void)broker_->Remove(std::exchange(announced_, ""));
  result.publish_ms = MsSince(start);
  return {};
}

// Whatever fails here is only not ready ahead of time.
void Agent::Announce(const TurnRequest& request) {
  const int n_tokens = sequence_->sealed_tokens();
  // What will be encrypted is not shown before.
  if (broker_ == nullptr || request.encrypt || encrypted_ || n_tokens <= announced_tokens_) return;
  announced_tokens_ = n_tokens;
  Sequence::PublishInfo info;
  info.agent = request.agent;
  info.prefix_tokens = prefix_tokens_;
  const Context context = sequence_->Sealed(info);
  if (!PublishContext(*broker_, context)) return;
  if (!announced_.empty()) (void)broker_->Remove(announced_);
  announced_ = context.card.id();
  request.on_announced(announced_, n_tokens);
}

Result<TurnResult> Agent::Run(const TurnRequest& request, const std::function<bool(std::string_view)>& on_text) {
  const auto start = Clock::now();
  TurnResult result;
  announced_tokens_ = 0;
  if (Status status = Read(request, result); !status) {
    if (!request.inherits.empty() || !request.reads.empty()) Report(request, result, /*failed=*/true);
    return tl::unexpected(std::move(status).error());
  }

  Sampler sampler(request.sampling);
  TextStream stream(vocab_);
  bool going_on = true;
  const auto emit = [&](const std::string& text) {
    result.text += text;
    if (!text.empty() && on_text && !on_text(text)) going_on = false;
  };
  Clock::time_point first_token = start;
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> digest(XXH3_createState(), XXH3_freeState);
  XXH3_128bits_reset(digest.get());
  bool pending = false;  // the last output token has not been read yet
  for (int i = 0; i < request.max_tokens && going_on; ++i) {
    if (pending) QKV_RETURN_IF_ERROR(sequence_->Forward({&result.output_tokens.back(), 1}));
    pending = false;
    if (request.digest_logits) {
      XXH3_128bits_update(digest.get(), sequence_->logits().data(), sequence_->logits().size_bytes());
    }
    const Token token = sampler.Sample(sequence_->logits());
    if (i == 0) {
      first_token = Clock::now();
      result.ttft_ms = MsSince(start);
      if (sequence_->trace() != nullptr) sequence_->trace()->Add("first_token", start, first_token);
      result.first_token_at_ms = SteadyMs(first_token);
    }
    result.last_token_at_ms = SteadyMs(Clock::now());
    if (vocab_.IsEndOfGeneration(token) && !request.ignore_eos) {
      result.stopped_by_eos = true;
      break;
    }
    result.output_tokens.push_back(token);
    pending = true;
    emit(stream.Push(token));
    if (request.on_announced && i % kAnnounceEvery == 0) Announce(request);
  }
  emit(stream.Finish());
  if (request.digest_logits) {
    const XXH128_hash_t hash = XXH3_128bits_digest(digest.get());
    result.logits_digest = fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
  }
  result.decode_ms = request.max_tokens > 0 ? MsSince(first_token) : 0;

  result.prefix_tokens = prefix_tokens_;
  result.context_tokens = sequence_->tokens();
  if (pending) result.context_tokens.push_back(result.output_tokens.back());
  if (!request.publish_as.empty()) {
    if (pending) QKV_RETURN_IF_ERROR(sequence_->Forward({&result.output_tokens.back(), 1}));
    if (const Status published = PublishTurn(request, result); !published) {
      if (!request.publish_may_fail) return tl::unexpected(published.error());
      result.publish_error = published.error().message;
    }
  }
  const Sequence::Stats& stats = sequence_->stats();
  result.own_kv_bytes = stats.own_kv_bytes + stats.tail_bytes;
  result.kv_bytes = result.own_kv_bytes + stats.shared_kv_bytes;
  result.kv_bits_stored = stats.stored_bits;
  result.kv_bits_read = stats.read_bits();
  result.keys_with_refinement = stats.keys_with_refinement;
  result.keys_refined = stats.keys_refined;
  result.tokens_grouped = sequence_->groups().size();
  result.tokens_dropped = stats.tokens_dropped;
  Report(request, result, /*failed=*/false);
  return result;
}

}  // namespace qkv
