// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/agent.h"

#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace qkv {
namespace {

using Clock = std::chrono::steady_clock;
double MsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// The bytes of a card's descriptor. Sealed, so that they can't change between the check and the use; the copy is what is
// parsed all the same.
Result<std::vector<std::byte>> ReadSealed(const Fd& fd) {
  if (!IsSealed(fd)) return Err(Code::kDenied, Reason::kDenied, "the card is not sealed");
  QKV_ASSIGN_OR_RETURN(const uint64_t size, fd.SizeBytes());
  if (size > kMaxCardBytes) {
    return Err(Code::kCorrupt, Reason::kChecksum, "the card has {} bytes, at most {} are allowed", size, kMaxCardBytes);
  }
  std::vector<std::byte> bytes(size);
  for (size_t done = 0; done < size;) {
    const ssize_t n = ::pread(fd.get(), bytes.data() + done, size - done, static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoError("read card");
    done += static_cast<size_t>(n);
  }
  return bytes;
}

Result<Context> OpenContext(AttachedContext attached) {
  QKV_ASSIGN_OR_RETURN(const auto bytes, ReadSealed(attached.card));
  Context context;
  context.lease = attached.lease;
  QKV_ASSIGN_OR_RETURN(context.card, ParseCard(bytes));
  for (Fd& fd : attached.segments) {
    QKV_ASSIGN_OR_RETURN(auto segment, Segment::Open(std::move(fd)));
    context.segments.push_back(std::move(segment));
  }
  return context;
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
  QKV_ASSIGN_OR_RETURN(const Fd card, SealedMemfd("qkv-card", SerializeCard(context.card)));
  std::vector<const Fd*> segments;
  for (const auto& segment : context.segments) segments.push_back(&segment->fd());
  return broker.Publish(card, segments, options);
}

Result<Context> FetchContext(BrokerClient& broker, const std::string& id_or_name, Trace* trace) {
  Result<AttachedContext> attached = [&] {
    const TraceSpan span(trace, "fetch");
    return broker.Attach(id_or_name);
  }();
  if (!attached) return tl::unexpected(std::move(attached).error());
  const TraceSpan span(trace, "map");
  const uint64_t lease = attached->lease;
  auto context = OpenContext(*std::move(attached));
  if (!context) (void)broker.ReleaseLease(lease);
  return context;
}

Agent::Agent(std::shared_ptr<const Model> model, std::unique_ptr<Sequence> sequence, BrokerClient* broker)
    : model_(std::move(model)), sequence_(std::move(sequence)), broker_(broker), vocab_(*model_) {}

Result<std::vector<Token>> Agent::TurnTokens(const TurnRequest& request, bool first) const {
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

Status Agent::Attach(const TurnRequest& request, std::vector<Token>& history, TurnResult& result) {
  const auto start = Clock::now();
  if (broker_ == nullptr) {
    return Err(Code::kPeerLost, Reason::kPeerLost, "there is no broker to attach '{}' from", request.inherits);
  }
  QKV_ASSIGN_OR_RETURN(const Context context, FetchContext(*broker_, request.inherits, sequence_->trace()));
  const auto read = [&]() -> Status {
    // For the text fallback, tokens are as good as text if both sides mean the same by them.
    const CacheCard& card = context.card;
    const bool same_tokens = card.model().tokenizer_digest() == model_->identity().tokenizer_digest();
    if (history.empty() && same_tokens) history.assign(card.token_ids().begin(), card.token_ids().end());
    QKV_ASSIGN_OR_RETURN(const auto tokens, TurnTokens(request, false));
    Status attached = sequence_->Attach(context);
    result.attach_ms = MsSince(start);
    if (!attached) {
      result.steps_down.front().mismatches = CompareCard(card, model_->identity());
      return attached;
    }
    QKV_RETURN_IF_ERROR(CheckRoom(request, sequence_->tokens().size(), tokens.size()));
    const TraceSpan span(sequence_->trace(), "read");
    return sequence_->Forward(tokens);  // verifies the pages first
  };
  const Status status = read();
  // The lease says what this agent holds: of contexts that it goes on from one after the other, the last.
  uint64_t ended = context.lease;
  if (status) std::swap(ended, lease_);
  if (ended != 0) (void)broker_->ReleaseLease(ended);
  if (!status) sequence_->Revert();
  return status;
}

Status Agent::Read(const TurnRequest& request, TurnResult& result) {
  std::vector<Token> history = request.history;
  if (!request.inherits.empty()) {
    result.steps_down.emplace_back();
    const auto start = Clock::now();
    const Status attached = Attach(request, history, result);
    if (result.attach_ms == 0) result.attach_ms = MsSince(start);  // it did not get that far
    if (attached) {
      result.steps_down.clear();
      result.mode = HandoffMode::kAttach;
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
  history.insert(history.end(), tokens.begin(), tokens.end());
  const int64_t before = sequence_->stats().tokens_recomputed;
  const TraceSpan span(sequence_->trace(), "read");
  QKV_RETURN_IF_ERROR(sequence_->Forward(history));
  result.tokens_recomputed = sequence_->stats().tokens_recomputed - before;
  return {};
}

void Agent::Report(const TurnRequest& request, const TurnResult& result, bool failed) {
  if (broker_ == nullptr || broker_->lost()) return;
  // Best effort: the turn is what counts.
  (void)broker_->Report({.context = request.inherits,
                         .mode = std::string(HandoffModeName(failed ? HandoffMode::kNone : result.mode)),
                         .reason = result.reason,
                         .failed = failed,
                         .tokens_reused = static_cast<uint64_t>(result.tokens_reused),
                         .tokens_recomputed = static_cast<uint64_t>(result.tokens_recomputed),
                         .attach_seconds = result.mode == HandoffMode::kAttach ? result.attach_ms / 1e3 : 0,
                         .publish_seconds = result.publish_ms / 1e3,
                         .ttft_seconds = result.ttft_ms / 1e3});
}

Result<TurnResult> Agent::Run(const TurnRequest& request, const std::function<bool(std::string_view)>& on_text) {
  const auto start = Clock::now();
  TurnResult result;
  if (Status status = Read(request, result); !status) {
    if (!request.inherits.empty()) Report(request, result, /*failed=*/true);
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
    }
    if (vocab_.IsEndOfGeneration(token) && !request.ignore_eos) {
      result.stopped_by_eos = true;
      break;
    }
    result.output_tokens.push_back(token);
    pending = true;
    emit(stream.Push(token));
  }
  emit(stream.Finish());
  if (request.digest_logits) {
    const XXH128_hash_t hash = XXH3_128bits_digest(digest.get());
    result.logits_digest = fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
  }
  result.decode_ms = request.max_tokens > 0 ? MsSince(first_token) : 0;

  result.context_tokens = sequence_->tokens();
  if (pending) result.context_tokens.push_back(result.output_tokens.back());
  if (!request.publish_as.empty()) {
    const auto publish_start = Clock::now();
    const TraceSpan span(sequence_->trace(), "publish");
    if (broker_ == nullptr)
      return Err(Code::kInvalidArgument, "there is no broker to publish '{}' to", request.publish_as);
    if (pending) QKV_RETURN_IF_ERROR(sequence_->Forward({&result.output_tokens.back(), 1}));
    Sequence::PublishInfo info;
    info.name = request.publish_as;
    info.agent = request.agent;
    info.sampler = request.sampling.Describe();
    info.seed = request.sampling.seed;
    QKV_ASSIGN_OR_RETURN(const Context context, sequence_->Publish(info));
    QKV_RETURN_IF_ERROR(PublishContext(*broker_, context));
    result.context_id = context.card.id();
    result.publish_ms = MsSince(publish_start);
  }
  const Sequence::Stats& stats = sequence_->stats();
  result.own_kv_bytes = stats.own_kv_bytes + stats.tail_bytes;
  result.kv_bytes = result.own_kv_bytes + stats.shared_kv_bytes;
  Report(request, result, /*failed=*/false);
  return result;
}

}  // namespace qkv
