// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/card/card.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/unknown_field_set.h>
#include <google/protobuf/util/json_util.h>
#include <google/protobuf/wire_format_lite.h>
#include <sys/random.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "qkv/segment/layout.h"

namespace qkv {
namespace {

namespace pb = ::google::protobuf;
using ::qkvshare::v1::LayerDims;
using ::qkvshare::v1::MaskState;

constexpr std::array<char, 8> kMagic = {'Q', 'K', 'V', 'C', 'A', 'R', 'D', '1'};
constexpr uint32_t kCardVersion = 1;
constexpr size_t kEnvelopeBytes = 24;

// FORMAT.md §5.
constexpr int kMaxTokens = 16 << 20;  // also of n_vocab
constexpr int kMaxSpans = 65536;
constexpr int kMaxSegments = 4096;
constexpr int kMaxParents = 64;
constexpr int kMaxAdapters = 64;
constexpr int kMaxAbsentTokens = 1 << 20;
constexpr int kMaxTopTokens = 65536;
constexpr uint32_t kMaxDimension = 1 << 20;  // n_embd, heads, head dims, rotary dims
constexpr size_t kMaxStringBytes = 4096;
constexpr size_t kMaxWordBytes = 64;
constexpr size_t kMaxBytesBesideTokens = size_t{8} << 20;
constexpr size_t kMaxMismatches = 16;

template <class... Args>
tl::unexpected<Error> Corrupt(fmt::format_string<Args...> format, Args&&... args) {
  return Err(Code::kCorrupt, Reason::kChecksum, "card: {}", fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
tl::unexpected<Error> Unreadable(Reason reason, fmt::format_string<Args...> format, Args&&... args) {
  return Err(Code::kIncompatible, reason, "card: {}", fmt::format(format, std::forward<Args>(args)...));
}

// --- the envelope ----------------------------------------------------------------------------------------

void StoreLittleEndian(uint64_t value, int bytes, std::byte* out) {
  for (int i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(value >> (8 * i));
}

uint64_t LoadLittleEndian(const std::byte* in, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= std::to_integer<uint64_t>(in[i]) << (8 * i);
  return value;
}

Result<std::span<const std::byte>> OpenEnvelope(std::span<const std::byte> bytes) {
  if (bytes.size() < kEnvelopeBytes || bytes.size() > kMaxCardBytes) {
    return Corrupt("{} bytes, expected {} to {}", bytes.size(), kEnvelopeBytes, kMaxCardBytes);
  }
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) return Corrupt("does not start with QKVCARD1");
  const auto version = static_cast<uint32_t>(LoadLittleEndian(&bytes[8], 4));
  if (version == __builtin_bswap32(kCardVersion)) {
    return Unreadable(Reason::kEndianness, "envelope in big-endian order, expected little-endian");
  }
  if (version != kCardVersion) return Unreadable(Reason::kVersion, "version {}, expected {}", version, kCardVersion);
  const auto payload = bytes.subspan(kEnvelopeBytes);
  const uint64_t length = LoadLittleEndian(&bytes[12], 4);
  if (length != payload.size()) return Corrupt("message of {} bytes, {} found", length, payload.size());
  const uint64_t expected = LoadLittleEndian(&bytes[16], 8);
  const uint64_t checksum = XXH3_64bits(payload.data(), payload.size());
  if (checksum != expected) return Corrupt("message has checksum {:016x}, expected {:016x}", checksum, expected);
  return payload;
}

// Before the message is built: an empty sub-message takes two bytes here and fifty in memory, so what is not token ids
// must be small.
Status CheckWireSize(std::span<const std::byte> payload) {
  using pb::internal::WireFormatLite;
  pb::io::CodedInputStream in(reinterpret_cast<const uint8_t*>(payload.data()), static_cast<int>(payload.size()));
  size_t beside_tokens = 0;
  while (const uint32_t tag = in.ReadTag()) {
    const int start = in.CurrentPosition();
    if (!WireFormatLite::SkipField(&in, tag)) return Corrupt("message is malformed at byte {}", start);
    if (WireFormatLite::GetTagFieldNumber(tag) != CacheCard::kTokenIdsFieldNumber) {
      beside_tokens += static_cast<size_t>(in.CurrentPosition() - start) + 1;
    }
  }
  if (!in.ConsumedEntireMessage()) return Corrupt("message is malformed at byte {}", in.CurrentPosition());
  if (beside_tokens > kMaxBytesBesideTokens) {
    return Corrupt("{} bytes beside the token ids, limit {}", beside_tokens, kMaxBytesBesideTokens);
  }
  return {};
}

// --- fields ----------------------------------------------------------------------------------------------

bool IsHexDigest(std::string_view text) {
  return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Status CheckDigest(std::string_view field, std::string_view text) {
  if (!IsHexDigest(text)) return Corrupt("{} has {} bytes, expected 32 hex digits", field, text.size());
  return {};
}

Status CheckOptionalDigest(std::string_view field, std::string_view text) {
  return text.empty() ? Status{} : CheckDigest(field, text);
}

Status CheckOptionalName(std::string_view field, std::string_view name) {
  if (name.empty()) return {};
  if (const Status status = ValidateContextName(name); !status) return Corrupt("{}: {}", field, status.error().message);
  return {};
}

// For people: any UTF-8 (which the parser has checked) without control characters.
Status CheckText(std::string_view field, std::string_view text) {
  if (text.size() > kMaxStringBytes) return Corrupt("{} has {} bytes, limit {}", field, text.size(), kMaxStringBytes);
  if (std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; })) {
    return Corrupt("{} has control characters", field);
  }
  return {};
}

// For programs: short, printable ASCII, so that it can be part of messages.
Status CheckWord(std::string_view field, std::string_view word) {
  if (word.size() > kMaxWordBytes ||
      std::any_of(word.begin(), word.end(), [](char c) { return c < 0x21 || c > 0x7e; })) {
    return Corrupt("{} has {} bytes, expected at most {}, printable ASCII", field, word.size(), kMaxWordBytes);
  }
  return {};
}

Status CheckCount(std::string_view field, int count, int limit) {
  if (count > limit) return Corrupt("{} {}, limit {}", count, field, limit);
  return {};
}

Status CheckDimension(std::string_view field, uint32_t value) {
  if (value > kMaxDimension) return Corrupt("{} is {}, limit {}", field, value, kMaxDimension);
  return {};
}

Status CheckFinite(std::string_view field, float value) {
  if (!std::isfinite(value)) return Corrupt("{} is not a finite number", field);
  return {};
}

Status CheckModel(const ModelIdentity& model) {
  QKV_RETURN_IF_ERROR(CheckWord("model.architecture", model.architecture()));
  QKV_RETURN_IF_ERROR(CheckText("model.name", model.name()));
  if (model.n_vocab() > static_cast<uint32_t>(kMaxTokens)) {
    return Corrupt("model.n_vocab is {}, limit {}", model.n_vocab(), kMaxTokens);
  }
  QKV_RETURN_IF_ERROR(CheckDimension("model.n_embd", model.n_embd()));
  if (model.layers().empty()) return Corrupt("model has no layers");
  QKV_RETURN_IF_ERROR(CheckCount("layers", model.layers_size(), kMaxLayers));
  for (const LayerDims& layer : model.layers()) {
    QKV_RETURN_IF_ERROR(CheckDimension("n_heads of a layer", layer.n_heads()));
    QKV_RETURN_IF_ERROR(CheckDimension("n_kv_heads of a layer", layer.n_kv_heads()));
    QKV_RETURN_IF_ERROR(CheckDimension("k_head_dim of a layer", layer.k_head_dim()));
    QKV_RETURN_IF_ERROR(CheckDimension("v_head_dim of a layer", layer.v_head_dim()));
    if ((layer.kind() == LayerDims::SLIDING) != (layer.window() > 0)) {
      return Corrupt("a layer of kind {} has a window of {}", LayerDims::Kind_Name(layer.kind()), layer.window());
    }
  }
  QKV_RETURN_IF_ERROR(CheckFinite("rope.base", model.rope().base()));
  QKV_RETURN_IF_ERROR(CheckFinite("rope.scaling_factor", model.rope().scaling_factor()));
  QKV_RETURN_IF_ERROR(CheckWord("rope.scaling", model.rope().scaling()));
  QKV_RETURN_IF_ERROR(CheckDimension("rope.rotary_dims", model.rope().rotary_dims()));
  QKV_RETURN_IF_ERROR(CheckOptionalDigest("rope.factors_digest", model.rope().factors_digest()));
  QKV_RETURN_IF_ERROR(CheckDigest("weights_digest", model.weights_digest()));
  QKV_RETURN_IF_ERROR(CheckDigest("tokenizer_digest", model.tokenizer_digest()));
  QKV_RETURN_IF_ERROR(CheckOptionalDigest("chat_template_digest", model.chat_template_digest()));
  QKV_RETURN_IF_ERROR(CheckOptionalDigest("calibration_digest", model.calibration_digest()));
  QKV_RETURN_IF_ERROR(CheckOptionalDigest("codebooks_digest", model.codebooks_digest()));
  QKV_RETURN_IF_ERROR(CheckCount("adapters", model.adapters_size(), kMaxAdapters));
  for (const auto& adapter : model.adapters()) {
    QKV_RETURN_IF_ERROR(CheckDigest("digest of an adapter", adapter.digest()));
    QKV_RETURN_IF_ERROR(CheckFinite("scale of an adapter", adapter.scale()));
  }
  return {};
}

Status CheckRefinement(const CacheCard& card, int index) {
  const auto& span = card.spans(index);
  if (span.refinement_segment() == 0) {
    if (span.refinement_first_page() == 0) return {};
    return Corrupt("span {} has refinement pages of no segment", index);
  }
  if (span.refinement_segment() > static_cast<uint32_t>(card.segments_size())) {
    return Corrupt("refinement of span {} is in segment {} of {}", index, span.refinement_segment() - 1,
                   card.segments_size());
  }
  const uint32_t n_pages = card.segments(static_cast<int>(span.refinement_segment() - 1)).n_pages();
  if (span.refinement_first_page() > n_pages || span.n_pages() > n_pages - span.refinement_first_page()) {
    return Corrupt("refinement of span {} is {} pages from page {} on, its segment has {}", index, span.n_pages(),
                   span.refinement_first_page(), n_pages);
  }
  return {};
}

// How many tokens are in the first group, and in both.
struct GroupSizes {
  uint64_t high = 0;
  uint64_t all = 0;
};

Result<GroupSizes> CheckGroups(const CacheCard& card) {
  if (!card.mask().has_groups()) return GroupSizes{};
  const auto& groups = card.mask().groups();
  const std::string& high = groups.high();
  // At least one token comes behind them, which can be read again.
  if (groups.n_tokens() < 2 || groups.n_tokens() >= static_cast<uint32_t>(card.token_ids_size())) {
    return Corrupt("{} of {} tokens are grouped, expected 2 to all but one", groups.n_tokens(), card.token_ids_size());
  }
  if (high.size() != (uint64_t{groups.n_tokens()} + 7) / 8) {
    return Corrupt("{} bytes for {} grouped tokens", high.size(), groups.n_tokens());
  }
  GroupSizes sizes{.all = groups.n_tokens()};
  for (const char byte : high) sizes.high += std::popcount(static_cast<uint8_t>(byte));
  if (groups.n_tokens() % 8 != 0 && static_cast<uint8_t>(high.back()) >> groups.n_tokens() % 8 != 0) {
    return Corrupt("bits beyond {} grouped tokens", groups.n_tokens());
  }
  if ((static_cast<uint8_t>(high.front()) & 1) == 0 || sizes.high == sizes.all) {
    return Corrupt("{} of {} grouped tokens are in the first group, expected the first token and not all", sizes.high,
                   sizes.all);
  }
  if (card.mask().kind() != MaskState::CAUSAL || card.mask().absent_tokens_size() > 0) {
    return Corrupt("grouped tokens under a mask of kind {} with {} absent tokens", static_cast<int>(card.mask().kind()),
                   card.mask().absent_tokens_size());
  }
  return sizes;
}

// A span of grouped tokens is within one of the groups, in place, and plain.
Status CheckGroupedSpan(const CacheCard& card, const GroupSizes& groups, int index) {
  const auto& span = card.spans(index);
  const uint64_t end = uint64_t{span.first_position()} + span.n_tokens();
  const bool in_high = span.first_position() < groups.high;
  if (end > (in_high ? groups.high : groups.all) || (!in_high && card.mask().groups().dropped())) {
    return Corrupt("span {} has grouped tokens {} to {}, of {} and {} in the groups{}", index, span.first_position(),
                   end, groups.high, groups.all - groups.high,
                   card.mask().groups().dropped() ? ", the second one dropped" : "");
  }
  if (span.position_offset() != 0 || span.hide_first() || span.refinement_segment() != 0) {
    return Corrupt("span {} of grouped tokens is moved or has a refinement", index);
  }
  return {};
}

// Sums are of numbers below kMaxTokens and kMaxPosition, in 64 bits.
Status CheckSpans(const CacheCard& card) {
  QKV_ASSIGN_OR_RETURN(const GroupSizes groups, CheckGroups(card));
  const auto n_tokens = static_cast<uint64_t>(card.token_ids_size());
  uint64_t end = 0;       // position behind the spans so far
  uint64_t in_pages = 0;  // tokens
  for (int i = 0; i < card.spans_size(); ++i) {
    const auto& span = card.spans(i);
    if (span.segment() >= static_cast<uint32_t>(card.segments_size())) {
      return Corrupt("span {} is in segment {} of {}", i, span.segment(), card.segments_size());
    }
    const uint32_t n_pages = card.segments(static_cast<int>(span.segment())).n_pages();
    if (span.n_pages() < 1 || span.first_page() > n_pages || span.n_pages() > n_pages - span.first_page()) {
      return Corrupt("span {} has {} pages from page {} on, its segment has {}", i, span.n_pages(), span.first_page(),
                     n_pages);
    }
    if (span.n_tokens() < span.n_pages() || span.n_tokens() > uint64_t{kPageTokens} * span.n_pages()) {
      return Corrupt("span {} has {} tokens in {} pages", i, span.n_tokens(), span.n_pages());
    }
    if (span.first_position() < end || span.first_position() > n_tokens ||
        span.n_tokens() > n_tokens - span.first_position()) {
      return Corrupt("span {} has {} tokens from position {} on, expected {} to {}", i, span.n_tokens(),
                     span.first_position(), end, n_tokens);
    }
    const auto position = static_cast<int64_t>(span.first_position());
    if (span.position_offset() > position || span.position_offset() <= position - int64_t{kMaxPosition}) {
      return Corrupt("span {} at position {} has offset {}", i, position, span.position_offset());
    }
    // What was encoded at the start is a sink. Without the one at this context's start nothing sensible is read.
    if (position == 0 && span.position_offset() != 0) {
      return Corrupt("span {} at position 0 was encoded at {}: no token is seen that was encoded at the start", i,
                     -span.position_offset());
    }
    if (span.hide_first() && (position == 0 || span.position_offset() != position)) {
      return Corrupt(
          "span {} at position {} hides its first token, encoded at {}; expected a moved span from position 0", i,
          position, position - span.position_offset());
    }
    QKV_RETURN_IF_ERROR(CheckRefinement(card, i));
    if (span.first_position() < groups.all) QKV_RETURN_IF_ERROR(CheckGroupedSpan(card, groups, i));
    end = uint64_t{span.first_position()} + span.n_tokens();
    in_pages += span.n_tokens();
  }
  // Every position is in at most one span, so with this each one is either in a span or absent: no gaps.
  const auto absent = static_cast<uint64_t>(card.mask().absent_tokens_size()) +
                      (card.mask().groups().dropped() ? groups.all - groups.high : 0);
  if (in_pages + absent != n_tokens) {
    return Corrupt("{} token ids, expected {}: {} in spans and {} absent", n_tokens, in_pages + absent, in_pages,
                   absent);
  }
  return {};
}

Status CheckTokens(const CacheCard& card) {
  for (const uint32_t token : card.token_ids()) {
    if (token >= card.model().n_vocab()) {
      return Corrupt("token id {} of a vocabulary of {}", token, card.model().n_vocab());
    }
  }
  const auto n_tokens = static_cast<uint32_t>(card.token_ids_size());
  uint64_t next = 0;
  for (const uint32_t token : card.mask().absent_tokens()) {
    if (token < next || token >= n_tokens) return Corrupt("absent token {}, expected {} to {}", token, next, n_tokens);
    next = uint64_t{token} + 1;
  }
  for (const uint32_t token : card.importance().top_tokens()) {
    if (token >= n_tokens) return Corrupt("top token {} of {}", token, n_tokens);
  }
  return {};
}

Status CheckCard(const CacheCard& card) {
  QKV_RETURN_IF_ERROR(CheckCount("token ids", card.token_ids_size(), kMaxTokens));
  QKV_RETURN_IF_ERROR(CheckCount("spans", card.spans_size(), kMaxSpans));
  QKV_RETURN_IF_ERROR(CheckCount("segments", card.segments_size(), kMaxSegments));
  QKV_RETURN_IF_ERROR(CheckCount("parents", card.parents_size(), kMaxParents));
  QKV_RETURN_IF_ERROR(CheckCount("absent tokens", card.mask().absent_tokens_size(), kMaxAbsentTokens));
  QKV_RETURN_IF_ERROR(CheckCount("top tokens", card.importance().top_tokens_size(), kMaxTopTokens));

  QKV_RETURN_IF_ERROR(CheckDigest("id", card.id()));
  QKV_RETURN_IF_ERROR(CheckOptionalName("name", card.name()));
  QKV_RETURN_IF_ERROR(CheckOptionalName("tenant", card.tenant()));
  for (const std::string& parent : card.parents()) QKV_RETURN_IF_ERROR(CheckDigest("id of a parent", parent));
  if (card.created_unix_ms() < 0 || card.expires_unix_ms() < 0) return Corrupt("created or expires before 1970");
  QKV_RETURN_IF_ERROR(CheckText("producer.program", card.producer().program()));
  QKV_RETURN_IF_ERROR(CheckText("producer.agent", card.producer().agent()));
  QKV_RETURN_IF_ERROR(CheckModel(card.model()));
  QKV_RETURN_IF_ERROR(CheckWord("format.rotation", card.format().rotation()));
  QKV_RETURN_IF_ERROR(CheckWord("format.byte_order", card.format().byte_order()));
  QKV_RETURN_IF_ERROR(CheckText("format.cpu_features", card.format().cpu_features()));
  QKV_RETURN_IF_ERROR(CheckWord("format.kv", card.format().kv()));
  QKV_RETURN_IF_ERROR(CheckWord("format.cipher", card.format().cipher()));
  const bool encrypted = !card.format().cipher().empty();
  if (encrypted && (card.token_ids_size() > 0 || card.spans_size() > 0 || card.segments_size() < 2)) {
    return Corrupt("encrypted, with {} token ids, {} spans and {} segments, expected none, none and at least 2",
                   card.token_ids_size(), card.spans_size(), card.segments_size());
  }
  QKV_RETURN_IF_ERROR(CheckText("turn.sampler", card.turn().sampler()));
  if (card.turn().prefix_tokens() > static_cast<uint32_t>(card.token_ids_size())) {
    return Corrupt("{} tokens of a system message in {} token ids", card.turn().prefix_tokens(), card.token_ids_size());
  }

  for (int i = 0; i < card.segments_size(); ++i) {
    const auto& segment = card.segments(i);
    QKV_RETURN_IF_ERROR(CheckDigest(fmt::format("digest of segment {}", i), segment.digest()));
    // Encrypted, it is one piece of any size.
    const uint64_t least = encrypted ? 1 : sizeof(SegmentHeader) + segment.n_pages() * uint64_t{kPageAlignment};
    if (segment.n_pages() < 1 || segment.n_pages() > kMaxPagesPerSegment || segment.bytes() > kMaxSegmentBytes ||
        segment.bytes() < least) {
      return Corrupt("segment {} has {} pages in {} bytes", i, segment.n_pages(), segment.bytes());
    }
  }
  QKV_RETURN_IF_ERROR(CheckSpans(card));
  return CheckTokens(card);
}

// --- identity --------------------------------------------------------------------------------------------

std::string ValueText(const pb::Message& message, const pb::FieldDescriptor* field, int index) {
  std::string text;
  pb::TextFormat::PrintFieldValueToString(message, field, index, &text);
  return text;
}

// By reflection, so that a field added to the message is compared without anybody having to think of it.
void Compare(const pb::Message& found, const pb::Message& expected, const std::string& prefix,
             std::vector<FieldMismatch>& out) {
  const pb::Reflection& reflection = *found.GetReflection();
  const pb::Descriptor& type = *found.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const pb::FieldDescriptor* const field = type.field(i);
    if (&type == ModelIdentity::descriptor() && field->number() == ModelIdentity::kNameFieldNumber) continue;
    // A reader may have codebooks that a context does not need.
    if (&type == ModelIdentity::descriptor() && field->number() == ModelIdentity::kCodebooksDigestFieldNumber &&
        !reflection.HasField(found, field)) {
      continue;
    }
    const std::string path = prefix + std::string(field->name());
    const bool is_message = field->cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE;
    if (!field->is_repeated()) {
      if (is_message) {
        Compare(reflection.GetMessage(found, field), reflection.GetMessage(expected, field), path + ".", out);
      } else if (auto a = ValueText(found, field, -1), b = ValueText(expected, field, -1); a != b) {
        out.push_back({path, a, b});
      }
      continue;
    }
    const int n_found = reflection.FieldSize(found, field);
    const int n_expected = reflection.FieldSize(expected, field);
    if (n_found != n_expected) {
      out.push_back({path, fmt::format("{} entries", n_found), fmt::format("{} entries", n_expected)});
    }
    for (int k = 0; k < std::min(n_found, n_expected); ++k) {
      const std::string entry = fmt::format("{}[{}]", path, k);
      if (is_message) {
        Compare(reflection.GetRepeatedMessage(found, field, k), reflection.GetRepeatedMessage(expected, field, k),
                entry + ".", out);
      } else if (auto a = ValueText(found, field, k), b = ValueText(expected, field, k); a != b) {
        out.push_back({entry, a, b});
      }
    }
  }
  const pb::UnknownFieldSet& unknown = reflection.GetUnknownFields(found);
  for (int i = 0; i < unknown.field_count(); ++i) {
    out.push_back({fmt::format("{}field {}", prefix, unknown.field(i).number()), "present", "unknown to this version"});
  }
}

std::vector<FieldMismatch> AllMismatches(const ModelIdentity& card, const ModelIdentity& model) {
  std::vector<FieldMismatch> mismatches;
  Compare(card, model, "", mismatches);
  return mismatches;
}

void Shorten(std::vector<FieldMismatch>& mismatches) {
  if (mismatches.size() <= kMaxMismatches) return;
  const size_t left_out = mismatches.size() - (kMaxMismatches - 1);
  mismatches.resize(kMaxMismatches - 1);
  mismatches.push_back({fmt::format("and {} more fields", left_out), "", ""});
}

bool HasUnknownFields(const pb::Message& message) {
  return !message.GetReflection()->GetUnknownFields(message).empty();
}

struct FormatProblem {
  Reason reason;
  FieldMismatch mismatch;
  std::string message;
};

// What this version must understand in order to read the pages as they are meant; the gravest first.
std::vector<FormatProblem> FormatProblems(const CacheCard& card) {
  std::vector<FormatProblem> problems;
  const auto add = [&](Reason reason, std::string field, std::string found, std::string expected, std::string message) {
    problems.push_back({reason, {std::move(field), std::move(found), std::move(expected)}, std::move(message)});
  };
  const auto quoted = [](std::string_view text) { return fmt::format("\"{}\"", text); };  // words are printable ASCII
  const auto& format = card.format();
  if (!format.cipher().empty()) {
    add(Reason::kDenied, "format.cipher", quoted(format.cipher()), "\"\"",
        fmt::format("encrypted with '{}'; only the card inside can be attached", format.cipher()));
  }
  const std::string_view native = std::endian::native == std::endian::little ? "little" : "big";
  if (format.byte_order() != native) {
    add(Reason::kEndianness, "format.byte_order", quoted(format.byte_order()), quoted(native),
        fmt::format("byte order '{}', expected '{}'", format.byte_order(), native));
  }
  if (format.segment_version() != kSegmentVersion) {
    add(Reason::kVersion, "format.segment_version", std::to_string(format.segment_version()),
        std::to_string(kSegmentVersion),
        fmt::format("segment version {}, expected {}", format.segment_version(), kSegmentVersion));
  }
  if (format.page_tokens() != kPageTokens) {
    add(Reason::kVersion, "format.page_tokens", std::to_string(format.page_tokens()), std::to_string(kPageTokens),
        fmt::format("pages of {} tokens, expected {}", format.page_tokens(), kPageTokens));
  }
  if (format.rotation() != kNoRotation && format.rotation() != kHadamardRotation) {
    add(Reason::kCodecUnsupported, "format.rotation", quoted(format.rotation()), "\"none\" or \"hadamard\"",
        fmt::format("rotation '{}', expected '{}' or '{}'", format.rotation(), kNoRotation, kHadamardRotation));
  }
  const bool of_layers = format.kv() == ToString(kLayersPair);  // which: the segments say
  if (const auto kv = ParseCodecPair(format.kv()); !format.kv().empty() && !of_layers && !kv) {
    add(Reason::kCodecUnsupported, "format.kv", quoted(format.kv()), "a codec of this version",
        fmt::format("codecs '{}': {}", format.kv(), kv.error().message));
  }
  if (card.mask().kind() != MaskState::CAUSAL && card.mask().kind() != MaskState::CAUSAL_SLIDING) {
    const int kind = card.mask().kind();
    add(Reason::kVersion, "mask.kind", std::to_string(kind), "CAUSAL or CAUSAL_SLIDING",
        fmt::format("mask of kind {}, not known here", kind));
  }
  if (const int absent = card.mask().absent_tokens_size(); absent > 0) {
    add(Reason::kVersion, "mask.absent_tokens", fmt::format("{} entries", absent), "0 entries",
        fmt::format("{} absent tokens, expected none", absent));
  }
  const auto unknown = [](const auto& messages) {
    return std::any_of(messages.begin(), messages.end(), HasUnknownFields);
  };
  const bool unknown_fields[] = {HasUnknownFields(format),
                                 HasUnknownFields(card.mask()) || HasUnknownFields(card.mask().groups()),
                                 unknown(card.spans()), unknown(card.segments())};
  for (int i = 0; i < 4; ++i) {
    static constexpr const char* kWhere[] = {"format", "mask", "spans", "segments"};
    if (!unknown_fields[i]) continue;
    add(Reason::kVersion, kWhere[i], "a field more", "the fields of this version",
        fmt::format("fields of {} that this version does not know", kWhere[i]));
  }
  return problems;
}

}  // namespace

std::vector<std::byte> SerializeCard(const CacheCard& card) {
  const size_t length = card.ByteSizeLong();
  QKV_CHECK(length < size_t{1} << 31);
  std::vector<std::byte> bytes(kEnvelopeBytes + length);
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  QKV_CHECK(card.SerializeToArray(bytes.data() + kEnvelopeBytes, static_cast<int>(length)));
  StoreLittleEndian(kCardVersion, 4, &bytes[8]);
  StoreLittleEndian(length, 4, &bytes[12]);
  StoreLittleEndian(XXH3_64bits(bytes.data() + kEnvelopeBytes, length), 8, &bytes[16]);
  return bytes;
}

Result<CacheCard> ParseCard(std::span<const std::byte> bytes) {
  QKV_ASSIGN_OR_RETURN(const std::span<const std::byte> payload, OpenEnvelope(bytes));
  QKV_RETURN_IF_ERROR(CheckWireSize(payload));
  CacheCard card;
  if (!card.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) return Corrupt("message is malformed");
  QKV_RETURN_IF_ERROR(CheckCard(card));
  return card;
}

Status ValidateContextName(std::string_view name) {
  if (name.empty() || name.size() > kMaxNameBytes) {
    return Err(Code::kInvalidArgument, "name of {} bytes, expected 1 to {}", name.size(), kMaxNameBytes);
  }
  if (name[0] == '.') return Err(Code::kInvalidArgument, "name starts with a dot");
  for (size_t i = 0; i < name.size(); ++i) {
    const char c = name[i];
    const bool allowed =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
    if (!allowed) {
      return Err(Code::kInvalidArgument, "name has byte {:#04x} at {}, expected A-Z, a-z, 0-9, '.', '_' or '-'",
                 static_cast<unsigned char>(c), i);
    }
  }
  return {};
}

std::vector<FieldMismatch> CompareIdentity(const ModelIdentity& card, const ModelIdentity& model) {
  std::vector<FieldMismatch> mismatches = AllMismatches(card, model);
  Shorten(mismatches);
  return mismatches;
}

std::vector<FieldMismatch> CompareCard(const CacheCard& card, const ModelIdentity& model) {
  std::vector<FieldMismatch> mismatches;
  for (FormatProblem& problem : FormatProblems(card)) mismatches.push_back(std::move(problem.mismatch));
  Compare(card.model(), model, "", mismatches);
  Shorten(mismatches);
  return mismatches;
}

Status CheckCompatible(const CacheCard& card, const ModelIdentity& model) {
  if (const auto problems = FormatProblems(card); !problems.empty()) {
    return Unreadable(problems.front().reason, "{}", problems.front().message);
  }
  std::vector<FieldMismatch> mismatches = AllMismatches(card.model(), model);
  if (mismatches.empty()) return {};
  const bool only_tokenizer = std::all_of(mismatches.begin(), mismatches.end(), [](const FieldMismatch& mismatch) {
    return mismatch.field == "tokenizer_digest" || mismatch.field == "chat_template_digest";
  });
  Shorten(mismatches);
  std::string list;
  for (const FieldMismatch& mismatch : mismatches) {
    if (!list.empty()) list += "; ";
    list += mismatch.field;
    if (!mismatch.found.empty()) list += fmt::format(" {}, expected {}", mismatch.found, mismatch.expected);
  }
  return Unreadable(only_tokenizer ? Reason::kTokenizerMismatch : Reason::kModelMismatch, "made by another model: {}",
                    list);
}

std::string CardToJson(const CacheCard& card, bool with_token_ids) {
  pb::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
#if GOOGLE_PROTOBUF_VERSION >= 5026000
  options.always_print_fields_with_no_presence = true;
#else
  options.always_print_primitive_fields = true;
#endif
  std::string json;
  const auto print = [&](const CacheCard& what) {
    if (!pb::util::MessageToJsonString(what, &json, options).ok()) json = "{}";  // only text that is no UTF-8 can do it
  };
  if (with_token_ids) {
    print(card);
    return json;
  }
  CacheCard without_ids = card;
  without_ids.clear_token_ids();
  print(without_ids);
  // An empty list would be a lie. Quotes inside of values are escaped, so this finds nothing but the field.
  constexpr std::string_view kEmptyList = "\"token_ids\": []";
  if (const size_t at = json.find(kEmptyList); at != std::string::npos) {
    json.replace(at, kEmptyList.size(), fmt::format("\"n_token_ids\": {}", card.token_ids_size()));
  }
  return json;
}

std::string NewContextId() {
  std::array<unsigned char, 16> random;
  ssize_t n;  // so few bytes come whole; a signal can only come between while the system is booting
  do {
    n = ::getrandom(random.data(), random.size(), 0);
  } while (n < 0 && errno == EINTR);
  QKV_CHECK(n == static_cast<ssize_t>(random.size()));
  std::string id;
  for (const unsigned char byte : random) id += fmt::format("{:02x}", byte);
  return id;
}

}  // namespace qkv
