// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// CacheCards as bytes, and whether a card fits a model. The message itself is generated from
// proto/qkvshare/v1/cache_card.proto and used directly. Pure functions, safe from any thread; the bytes may come from
// anybody: every length is limited and everything is checked before the card is handed out.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/base/error.h"
#include "qkvshare/v1/cache_card.pb.h"

namespace qkv {

using CacheCard = ::qkvshare::v1::CacheCard;
using ModelIdentity = ::qkvshare::v1::ModelIdentity;

inline constexpr size_t kMaxCardBytes = size_t{64} << 20;  // with the envelope; FORMAT.md §5, as the limits in card.cc
inline constexpr size_t kMaxNameBytes = 200;

// CacheFormat.rotation.
inline constexpr std::string_view kNoRotation = "none";
inline constexpr std::string_view kHadamardRotation = "hadamard";

// The envelope of FORMAT.md §4: magic, version, length, XXH3-64, then the message. Does not look into the card.
std::vector<std::byte> SerializeCard(const CacheCard& card);

// Checks the envelope, the checksum, every limit, and that the card is consistent with itself (spans inside segments,
// positions consecutive, token count equal to the spans', token ids inside the vocabulary, ids and digests
// well-formed). Errors: kCorrupt/checksum, kIncompatible/version, kIncompatible/endianness.
Result<CacheCard> ParseCard(std::span<const std::byte> bytes);

// 1..200 bytes of [A-Za-z0-9._-], not starting with a dot. Names and ids become parts of messages, logs and file names.
// Error: kInvalidArgument, without the name's own bytes.
Status ValidateContextName(std::string_view name);

struct FieldMismatch {
  std::string field;     // "rope.base", "layers[3].n_kv_heads", "weights_digest", …
  std::string found;     // in the card; strings are quoted and escaped
  std::string expected;  // by the model that would consume it
};

// Empty: compatible. ModelIdentity.name is for people and not compared; a field that this version does not know is a
// mismatch. At most 16 entries; when there are more, the last one's field says how many were left out.
std::vector<FieldMismatch> CompareIdentity(const ModelIdentity& card, const ModelIdentity& model);

// The same for the whole card: what this version cannot read of its format ("format.byte_order", …), then the model.
// Empty exactly when CheckCompatible is OK.
std::vector<FieldMismatch> CompareCard(const CacheCard& card, const ModelIdentity& model);

// kIncompatible with kModelMismatch or kTokenizerMismatch (when only tokenizer or template differ), or kVersion,
// kEndianness, kCodecUnsupported for the format; the message lists the fields. OK when the card may be attached, as far
// as the card alone can tell: that the segments are the ones it describes is for whoever has them.
Status CheckCompatible(const CacheCard& card, const ModelIdentity& model);

// Pretty-printed, field names as in the .proto. Without token ids their number stands there as "n_token_ids".
std::string CardToJson(const CacheCard& card, bool with_token_ids);

std::string NewContextId();  // 32 hex digits from the kernel's random generator

}  // namespace qkv
