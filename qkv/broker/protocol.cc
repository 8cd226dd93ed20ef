// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/protocol.h"

#include "qkv/broker/socket.h"
#include "qkv/card/card.h"

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
  return {};
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
  return info;
}

}  // namespace qkv
