// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Of Agent: turns that read several contexts behind a system message of their own.

#include <algorithm>
#include <chrono>
#include <utility>

#include "qkv/engine/agent.h"

namespace qkv {

// One of a request's `reads`.
struct Agent::Reading {
  const ContextToRead* read;
  std::optional<Context> context;  // null: its text is read
  std::vector<Token> tokens;       // all of it
  int first_token = 0;             // what is before it is left out
};

namespace {

using Clock = std::chrono::steady_clock;
double MsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void StepDownToText(HandoffMode from, const Error& error, TurnResult& result) {
  const Reason reason = error.reason == Reason::kNone ? Reason::kPeerLost : error.reason;  // the system refused
  if (result.reason == Reason::kNone) {
    result.reason = reason;
    result.reason_detail = error.message;
  }
  result.steps_down.push_back({.from = from, .reason = reason, .detail = error.message});
}

// The top of the ladder for context i of a request's `reads`.
HandoffMode WantedFor(const TurnRequest& request, size_t i) {
  return i == 0 && request.system.empty() ? HandoffMode::kAttach : HandoffMode::kSplice;
}

}  // namespace

Result<Context> Agent::FetchToRead(const ContextToRead& read) {
  if (read.splice.kind == SplicePolicy::Kind::kOff) {
    return Err(Code::kIncompatible, Reason::kDenied, "splicing '{}' is not allowed (splice: off)", read.context);
  }
  if (broker_ == nullptr) {
    return Err(Code::kPeerLost, Reason::kPeerLost, "there is no broker to have '{}' from", read.context);
  }
  QKV_ASSIGN_OR_RETURN(Context context, Fetch(read.context));
  if (!admit_ || !sequence_->CheckAttach(context)) return context;  // Assemble says what is wrong with it
  if (const Status admitted = admit_(context); !admitted) {
    if (context.lease != 0) (void)broker_->ReleaseLease(context.lease);
    return tl::unexpected(admitted.error());
  }
  return context;
}

Status Agent::FetchAll(const TurnRequest& request, std::vector<Reading>& readings, TurnResult& result) {
  for (size_t i = 0; i < request.reads.size(); ++i) {
    const ContextToRead& read = request.reads[i];
    Reading& reading = readings.emplace_back(Reading{.read = &read, .context = {}, .tokens = read.history});
    int prefix_tokens = read.prefix_tokens;
    if (!read.context.empty()) {
      const auto take_text = [&](const CacheCard& card) {
        prefix_tokens = static_cast<int>(card.turn().prefix_tokens());
        const bool same_tokens = card.model().tokenizer_digest() == model_->identity().tokenizer_digest();
        if (reading.tokens.empty() && same_tokens) {
          reading.tokens.assign(card.token_ids().begin(), card.token_ids().end());
        }
      };
      auto fetched = FetchToRead(read);
      if (fetched) {
        encrypted_ |= fetched->encrypted;
        take_text(fetched->card);
        result.bytes_copied += fetched->copied_bytes;
        reading.context = *std::move(fetched);
      } else {
        if (read.on_miss == OnMiss::kFail) {
          result.reason = fetched.error().reason;
          result.reason_detail = fetched.error().message;
          return tl::unexpected(fetched.error());
        }
        StepDownToText(WantedFor(request, i), fetched.error(), result);
        // Pages that may not be used still know their text.
        if (reading.tokens.empty() && read.splice.kind == SplicePolicy::Kind::kOff && broker_ != nullptr) {
          if (const auto context = Fetch(read.context)) {
            take_text(context->card);
            if (context->lease != 0) (void)broker_->ReleaseLease(context->lease);
          }
        }
      }
    }
    if (reading.tokens.empty()) {
      const bool refused = !result.steps_down.empty();
      return Err(Code::kInvalidArgument, result.reason, "{}",
                 refused ? result.reason_detail + "; and there is no text to fall back to"
                         : "a context to read came without its tokens");
    }
    // A context that is nothing but a system message is used as it is.
    const bool behind = i > 0 || !request.system.empty();
    if (behind && prefix_tokens > 0 && static_cast<size_t>(prefix_tokens) < reading.tokens.size()) {
      reading.first_token = prefix_tokens;
    }
  }
  return {};
}

Status Agent::Place(const TurnRequest& request, const std::vector<Reading>& readings, TurnResult& result,
                    size_t* failed) {
  *failed = readings.size();
  std::vector<Token> own;
  if (!request.system.empty()) {
    QKV_ASSIGN_OR_RETURN(own, vocab_.SystemTurn(request.system));
  }
  QKV_ASSIGN_OR_RETURN(const auto prompt, TurnTokens(request, false));
  std::vector<ContextPiece> pieces;
  size_t n_context = 0;
  for (const Reading& reading : readings) {
    ContextPiece& piece = pieces.emplace_back();
    n_context += reading.tokens.size() - static_cast<size_t>(reading.first_token);
    if (reading.context) {
      piece = {&*reading.context, FirstTokenFor(reading.first_token, reading.read->splice), {}, reading.read->splice};
    } else {
      piece.tokens.assign(reading.tokens.begin() + reading.first_token, reading.tokens.end());
    }
  }
  // Where the first one begins with the same system message, or there is none, it stands where it was made.
  const Reading& front = readings.front();
  const auto begins_with_own = [&](const CacheCard& card) {
    return static_cast<size_t>(card.token_ids_size()) > own.size() &&
           std::equal(own.begin(), own.end(), card.token_ids().begin());
  };
  const bool as_heir =
      front.context && static_cast<size_t>(front.first_token) == own.size() && begins_with_own(front.context->card);
  for (size_t i = as_heir ? 1 : 0; i < readings.size(); ++i) {
    if (!readings[i].context || readings[i].read->splice.kind != SplicePolicy::Kind::kExactOnly) continue;
    *failed = i;
    return Err(Code::kIncompatible, Reason::kQualityGate,
               "'{}' does not stand where it was made, and only an exact use of it is allowed (splice: exact-only)",
               readings[i].read->context);
  }
  QKV_RETURN_IF_ERROR(CheckRoom(request, own.size() + n_context, prompt.size()));
  if (as_heir) pieces[0].first_token = 0;
  if (as_heir || own.empty()) {
    sequence_->Clear();
  } else {
    // In a call of its own, whether it was read ahead or not: where calls end is part of the result.
    QKV_RETURN_IF_ERROR(ReadPrefix(request.system));
  }
  const auto start = Clock::now();
  const TraceSpan span(sequence_->trace(), "read");
  auto put_together = Assemble(*sequence_, pieces, prompt, failed);
  if (!put_together) {
    sequence_->Clear();  // its prefix may be in pages by now, and reading text behind them would not be a cold run
    return tl::unexpected(std::move(put_together).error());
  }
  const Assembled& assembled = *put_together;
  prefix_tokens_ = static_cast<int>(own.size());
  result.prefill_ms = MsSince(start);

  const bool any_text = std::ranges::any_of(readings, [](const Reading& reading) { return !reading.context; });
  result.spans_spliced = assembled.splice.spans;
  result.tokens_repaired = assembled.splice.tokens_recomputed;
  result.mode = assembled.splice.spans > 0 || assembled.splice.tokens_recomputed > 0 ? HandoffMode::kSplice
                : any_text                                                           ? HandoffMode::kText
                : result.bytes_copied > 0                                            ? HandoffMode::kCopy
                                                                                     : HandoffMode::kAttach;
  if (assembled.chosen) result.probe_kl = assembled.probe_kl;
  for (size_t i = as_heir ? 1 : 0; i < readings.size() && result.mode == HandoffMode::kSplice; ++i) {
    if (!readings[i].context) continue;
    SplicePolicy policy = readings[i].read->splice;
    if (policy.kind == SplicePolicy::Kind::kAuto) policy = assembled.chosen.value_or(policy);
    const std::string name = policy.repair == kRepairAll ? "full" : ToString(policy);
    if (result.splice.find(name) == std::string::npos) result.splice += (result.splice.empty() ? "" : ", ") + name;
  }
  const Sequence::Stats& stats = sequence_->stats();
  result.tokens_reused = assembled.splice.tokens_spliced;
  result.tokens_recomputed = stats.tokens_recomputed;
  return {};
}

Status Agent::ReadBehindPrefix(const TurnRequest& request, TurnResult& result) {
  const auto start = Clock::now();
  std::vector<Reading> readings;
  const auto leases = [&] {
    std::vector<uint64_t> all;
    for (const Reading& reading : readings) {
      if (reading.context) all.push_back(reading.context->lease);
    }
    return all;
  };
  const auto let_go = [&](std::vector<uint64_t> all) {
    for (const uint64_t lease : all) {
      if (lease != 0) (void)broker_->ReleaseLease(lease);
    }
  };
  if (Status fetched = FetchAll(request, readings, result); !fetched) {
    let_go(leases());
    return fetched;
  }
  result.attach_ms = MsSince(start);
  // One context fewer each time round.
  while (std::ranges::any_of(readings, [](const Reading& reading) { return reading.context.has_value(); })) {
    size_t failed;
    const Status placed = Place(request, readings, result, &failed);
    if (placed) {
      Hold(leases());
      return {};
    }
    if (failed == readings.size()) {
      let_go(leases());
      return placed;
    }
    Reading& reading = readings[failed];
    const auto mismatches = CompareCard(reading.context->card, sequence_->identity());
    StepDownToText(WantedFor(request, failed), placed.error(), result);
    result.steps_down.back().mismatches = mismatches;
    let_go({reading.context->lease});
    reading.context.reset();
    if (reading.read->on_miss == OnMiss::kFail) {
      let_go(leases());
      return placed;
    }
  }

  result.mode = HandoffMode::kText;
  if (request.system.empty()) {
    sequence_->Clear();
  } else {
    // In a call of its own, as above.
    QKV_RETURN_IF_ERROR(ReadPrefix(request.system));
  }
  prefix_tokens_ = static_cast<int>(sequence_->tokens().size());
  QKV_ASSIGN_OR_RETURN(const auto prompt, TurnTokens(request, false));
  std::vector<Token> tokens;
  for (const Reading& reading : readings) {
    tokens.insert(tokens.end(), reading.tokens.begin() + reading.first_token, reading.tokens.end());
  }
  QKV_RETURN_IF_ERROR(CheckRoom(request, sequence_->tokens().size() + tokens.size(), prompt.size()));
  tokens.insert(tokens.end(), prompt.begin(), prompt.end());
  QKV_RETURN_IF_ERROR(ReadTokens(tokens, result));
  result.tokens_recomputed = sequence_->stats().tokens_recomputed;
  return {};
}

}  // namespace qkv
