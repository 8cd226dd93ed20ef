// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/protocol.h"

#include <algorithm>
#include <iterator>

#include "qkv/broker/socket.h"
#include "qkv/card/card.h"
#include "qkv/segment/cipher.h"

namespace qkv {
namespace {

// Names for people are cut, so that one context always fits into a message.
constexpr size_t kMaxListedBytes = 200;
constexpr size_t kMaxFailureBytes = 4000;

Code CodeFromName(std::string_view name) {
  for (int i = 0; i <= static_cast<int>(Code::kInternal); ++i) {
    if (CodeName(static_cast<Code>(i)) == name) return static_cast<Code>(i);
  }
  return Code::kInternal;
}

Reason ReasonFromName(std::string_view name) {
  for (int i = 0; i <= static_cast<int>(Reason::kVersion); ++i) {
    if (ReasonName(static_cast<Reason>(i)) == name) return static_cast<Reason>(i);
  }
  return Reason::kNone;
}

Status CheckPublish(const BrokerRequest::Publish& publish) {
  if (publish.n_descriptors() < 1 || publish.n_descriptors() > kMaxDescriptorsPerContext) {
    return Err(Code::kInvalidArgument, "publish: {} descriptors announced, expected 1 to {}", publish.n_descriptors(),
               kMaxDescriptorsPerContext);
  }
  if (publish.ttl_ms() < 0 || publish.ttl_ms() > kMaxTtlMs) {
    return Err(Code::kInvalidArgument, "publish: ttl of {} ms, expected 0 to {}", publish.ttl_ms(), kMaxTtlMs);
  }
  if (!publish.key().empty() && publish.key().size() != kSecretKeyBytes) {
    return Err(Code::kInvalidArgument, "publish: key of {} bytes, expected {}", publish.key().size(), kSecretKeyBytes);
  }
  return {};
}

// Counters must not be spoilt by what one client says.
Status CheckReport(const BrokerRequest::Report& report) {
  static constexpr std::string_view kModes[] = {"none", "attach", "copy", "splice", "text"};
  constexpr uint64_t kMostTokens = uint64_t{1} << 32;
  constexpr uint64_t kMostBytes = uint64_t{1} << 48;
  constexpr double kMostSeconds = 1e6;
  constexpr uint64_t kMostKeys = uint64_t{1} << 52;  // counters are doubles
  constexpr double kMostBits = 64;                   // per value; f16 has 16
  if (std::find(std::begin(kModes), std::end(kModes), report.mode()) == std::end(kModes)) {
    return Err(Code::kInvalidArgument, "report: unknown mode");
  }
  if (!report.reason().empty() && ReasonFromName(report.reason()) == Reason::kNone) {
    return Err(Code::kInvalidArgument, "report: unknown reason");
  }
  if (report.tokens_reused() > kMostTokens || report.tokens_recomputed() > kMostTokens) {
    return Err(Code::kInvalidArgument, "report: {} tokens reused and {} recomputed, expected at most {}",
               report.tokens_reused(), report.tokens_recomputed(), kMostTokens);
  }
  if (report.bytes_copied() > kMostBytes) {
    return Err(Code::kInvalidArgument, "report: {} bytes copied, expected at most {}", report.bytes_copied(),
               kMostBytes);
  }
  if (report.keys_with_refinement() > kMostKeys || report.keys_refined() > report.keys_with_refinement()) {
    return Err(Code::kInvalidArgument, "report: {} of {} keys refined, expected at most as many of at most {}",
               report.keys_refined(), report.keys_with_refinement(), kMostKeys);
  }
  if (!(report.kv_bits_read() >= 0 && report.kv_bits_read() <= kMostBits)) {
    return Err(Code::kInvalidArgument, "report: {} bits read per value, expected 0 to {}", report.kv_bits_read(),
               kMostBits);
  }
  for (const double seconds : {report.attach_seconds(), report.publish_seconds(), report.ttft_seconds()}) {
    if (!(seconds >= 0 && seconds <= kMostSeconds)) {
      return Err(Code::kInvalidArgument, "report: {} seconds, expected 0 to {}", seconds, kMostSeconds);
    }
  }
  return report.context().empty() ? Status{} : ValidateContextName(report.context());
}

}  // namespace

Result<BrokerRequest> DecodeRequest(std::string_view bytes, size_t n_descriptors) {
  BrokerRequest request;
  if (bytes.size() > kMaxMessageBytes || !request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return Err(Code::kInvalidArgument, "request of {} bytes cannot be decoded", bytes.size());
  }
  bool carries_descriptors = false;
  switch (request.body_case()) {
    case BrokerRequest::kHello:
      if (request.hello().protocol() != kProtocolVersion) {
        return Err(Code::kIncompatible, Reason::kVersion, "client speaks protocol {}, expected {}",
                   request.hello().protocol(), kProtocolVersion);
      }
      if (request.hello().token().size() > kMaxTokenBytes) {
        return Err(Code::kInvalidArgument, "token of {} bytes, expected at most {}", request.hello().token().size(),
                   kMaxTokenBytes);
      }
      break;
    case BrokerRequest::kPublish:
      QKV_RETURN_IF_ERROR(CheckPublish(request.publish()));
      carries_descriptors = true;
      break;
    case BrokerRequest::kMoreDescriptors: carries_descriptors = true; break;
    case BrokerRequest::kAttach: QKV_RETURN_IF_ERROR(ValidateContextName(request.attach().id_or_name())); break;
    case BrokerRequest::kRemove: QKV_RETURN_IF_ERROR(ValidateContextName(request.remove().id_or_name())); break;
    case BrokerRequest::kList:
      if (!request.list().after_id().empty()) QKV_RETURN_IF_ERROR(ValidateContextName(request.list().after_id()));
      break;
    case BrokerRequest::kReport: QKV_RETURN_IF_ERROR(CheckReport(request.report())); break;
    case BrokerRequest::kFetchDescriptors:
    case BrokerRequest::kReleaseLease: break;
    case BrokerRequest::BODY_NOT_SET:
      return Err(Code::kInvalidArgument, "request of {} bytes asks for nothing that this version knows", bytes.size());
  }
  if (carries_descriptors != (n_descriptors > 0)) {
    return Err(Code::kInvalidArgument, "request came with {} descriptors, expected {}", n_descriptors,
               carries_descriptors ? "some" : "none");
  }
  return request;
}

Result<BrokerReply> DecodeReply(std::string_view bytes) {
  BrokerReply reply;
  if (bytes.size() > kMaxMessageBytes || !reply.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) ||
      reply.body_case() == BrokerReply::BODY_NOT_SET) {
    return Err(Code::kIncompatible, Reason::kVersion, "the broker's reply of {} bytes is not understood", bytes.size());
  }
  return reply;
}

BrokerReply FailureReply(const Error& error) {
  BrokerReply reply;
  auto* failure = reply.mutable_failure();
  failure->set_code(std::string(CodeName(error.code)));
  failure->set_reason(std::string(ReasonName(error.reason)));
  failure->set_message(error.message.substr(0, kMaxFailureBytes));
  return reply;
}

Error ErrorFrom(const BrokerReply::Failure& failure) {
  return {CodeFromName(failure.code()), failure.message(), ReasonFromName(failure.reason())};
}

void ToWire(const ContextInfo& info, BrokerReply::Context* context) {
  context->set_id(info.id);
  context->set_name(info.name);
  context->set_model(info.model.substr(0, kMaxListedBytes));
  context->set_kv(info.kv.substr(0, kMaxListedBytes));
  context->set_n_tokens(info.n_tokens);
  context->set_bytes(info.bytes);
  context->set_producer_pid(info.producer_pid);
  context->set_created_unix_ms(info.created_unix_ms);
  context->set_expires_unix_ms(info.expires_unix_ms);
  context->set_pinned(info.pinned);
  context->set_n_leases(info.n_leases);
  context->set_n_attached(info.n_attached);
  for (size_t i = 0; i < std::min<size_t>(info.holders.size(), kMaxListedHolders); ++i) {
    context->add_holders(info.holders[i]);
  }
  context->set_in_memory(info.in_memory);
  context->set_stored(info.stored);
  context->set_encrypted(info.encrypted);
}

ContextInfo FromWire(const BrokerReply::Context& context) {
  ContextInfo info;
  info.id = context.id();
  info.name = context.name();
  info.model = context.model();
  info.kv = context.kv();
  info.n_tokens = context.n_tokens();
  info.bytes = context.bytes();
  info.producer_pid = context.producer_pid();
  info.created_unix_ms = context.created_unix_ms();
  info.expires_unix_ms = context.expires_unix_ms();
  info.pinned = context.pinned();
  info.n_leases = context.n_leases();
  info.n_attached = context.n_attached();
  info.holders.assign(context.holders().begin(), context.holders().end());
  info.in_memory = context.in_memory();
  info.stored = context.stored();
  info.encrypted = context.encrypted();
  return info;
}

void ToWire(const BrokerTotals& totals, BrokerReply::Totals* out) {
  out->set_published(totals.published);
  out->set_attached(totals.attached);
  out->set_evicted(totals.evicted);
  out->set_expired(totals.expired);
  out->set_refused(totals.refused);
  out->set_fallbacks(totals.fallbacks);
  out->set_checksum_failures(totals.checksum_failures);
  out->set_tokens_reused(totals.tokens_reused);
  out->set_tokens_recomputed(totals.tokens_recomputed);
}

BrokerTotals FromWire(const BrokerReply::Totals& totals) {
  return {.published = totals.published(),
          .attached = totals.attached(),
          .evicted = totals.evicted(),
          .expired = totals.expired(),
          .refused = totals.refused(),
          .fallbacks = totals.fallbacks(),
          .checksum_failures = totals.checksum_failures(),
          .tokens_reused = totals.tokens_reused(),
          .tokens_recomputed = totals.tokens_recomputed()};
}

void ToWire(const TurnReport& report, BrokerRequest::Report* out) {
  out->set_context(report.context);
  out->set_mode(report.mode);
  out->set_reason(std::string(ReasonName(report.reason)));
  out->set_failed(report.failed);
  out->set_tokens_reused(report.tokens_reused);
  out->set_tokens_recomputed(report.tokens_recomputed);
  out->set_attach_seconds(report.attach_seconds);
  out->set_publish_seconds(report.publish_seconds);
  out->set_ttft_seconds(report.ttft_seconds);
  out->set_bytes_copied(report.bytes_copied);
  out->set_model(report.model);
  out->set_kv(report.kv);
  out->set_keys_with_refinement(report.keys_with_refinement);
  out->set_keys_refined(report.keys_refined);
  out->set_kv_bits_read(report.kv_bits_read);
}

TurnReport FromWire(const BrokerRequest::Report& report) {
  return {.context = report.context(),
          .mode = report.mode(),
          .reason = ReasonFromName(report.reason()),
          .failed = report.failed(),
          .bytes_copied = report.bytes_copied(),
          .tokens_reused = report.tokens_reused(),
          .tokens_recomputed = report.tokens_recomputed(),
          .attach_seconds = report.attach_seconds(),
          .publish_seconds = report.publish_seconds(),
          .ttft_seconds = report.ttft_seconds(),
          .model = report.model(),
          .kv = report.kv(),
          .keys_with_refinement = report.keys_with_refinement(),
          .keys_refined = report.keys_refined(),
          .kv_bits_read = report.kv_bits_read()};
}

}  // namespace qkv
