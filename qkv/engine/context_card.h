// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Between a sequence's spans of pages and the card that describes them to others. Pure but for a new context's id and time;
// any thread.

#include <span>
#include <string>
#include <vector>

#include "qkv/engine/model.h"
#include "qkv/engine/paged_kv.h"
#include "qkv/engine/sequence.h"

namespace qkv {

// What a context's card says about its pages, checked against the model (by `identity`, Sequence::identity) and the
// segments: the card comes from anybody. Errors: CheckCompatible's; kCorrupt/checksum when segments are not those that the
// card names, or spans or refinements do not match their pages; kIncompatible/model_mismatch; kInvalidArgument/too_long
// beyond n_ctx tokens.
Result<std::vector<SegmentSpan>> SpansOf(const Context& context, const Model& model, const ModelIdentity& identity,
                                         int n_ctx);

// Which of a context's first tokens stand where. `card` is one that ParseCard has let through, or our own.
GroupedTokens GroupsOf(const CacheCard& card);

// The card of these spans, which hold the first of `tokens`, the first of these as `groups` says, with their segments. `kv`:
// of the newest pages.
Context DescribeContext(const std::vector<SegmentSpan>& spans, const GroupedTokens& groups,
                        const ModelIdentity& identity, CodecPair kv, std::span<const Token> tokens,
                        std::span<const std::string> parents, const Sequence::PublishInfo& info);

}  // namespace qkv
