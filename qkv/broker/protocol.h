// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Between bytes on the broker's socket and values (docs/PROTOCOL.md). Pure functions, safe from any thread; bytes may
// come from anybody.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "qkv/base/error.h"
#include "qkv/broker/client.h"
#include "qkvshare/v1/broker.pb.h"

namespace qkv {

using BrokerRequest = ::qkvshare::v1::BrokerRequest;
using BrokerReply = ::qkvshare::v1::BrokerReply;

inline constexpr uint32_t kProtocolVersion = 2;
inline constexpr uint32_t kMaxDescriptorsPerContext = 1 + 4096;  // the card and as many segments as a card may have
inline constexpr int kMaxListedHolders = 16;
inline constexpr size_t kMaxTokenBytes = 256;
inline constexpr int64_t kMaxTtlMs = int64_t{10} * 366 * 24 * 3600 * 1000;  // ten years

// A request whose numbers are within their limits, whose ids and names are well-formed, and beside which as many
// descriptors came as such a request may carry. Errors: kInvalidArgument, kIncompatible/version.
Result<BrokerRequest> DecodeRequest(std::string_view bytes, size_t n_descriptors);

// Errors: kIncompatible/version.
Result<BrokerReply> DecodeReply(std::string_view bytes);

BrokerReply FailureReply(const Error& error);
Error ErrorFrom(const BrokerReply::Failure& failure);

void ToWire(const ContextInfo& info, BrokerReply::Context* context);
ContextInfo FromWire(const BrokerReply::Context& context);

void ToWire(const BrokerTotals& totals, BrokerReply::Totals* out);
BrokerTotals FromWire(const BrokerReply::Totals& totals);

void ToWire(const TurnReport& report, BrokerRequest::Report* out);
// Of a request that DecodeRequest has let through.
TurnReport FromWire(const BrokerRequest::Report& report);

}  // namespace qkv
