// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tokens by importance: which codecs a sequence writes its pages in when it keeps the tokens of its prompt that get
// most attention in more bits than the others, or drops those; and which tokens stand where. Pure; any thread.

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "qkv/base/error.h"
#include "qkv/codec/codec.h"
#include "qkv/segment/layout.h"

namespace qkv {

// How to group a prompt's tokens. The first one is always among those with most attention.
struct TokenGroups {
  enum class By : uint8_t {
    kAttention,   // what a sample of the prompt's own queries look at (importance.h)
    kAllQueries,  // what all of them look at: slow, to see what the sample is worth
    kRandom,      // for comparison
  };
  By by = By::kAttention;
  int percent = 20;              // of the tokens, 1 to 99
  std::optional<CodecPair> low;  // of the others; nothing: they are dropped
  bool operator==(const TokenGroups&) const = default;
};

// What --kv says: the codecs of the pages that are written; with groups, of the tokens with most attention, and of all
// that comes after the prompt, whose importance nobody knows yet.
struct KvChoice {
  KvChoice(CodecPair codecs = {}) : codecs(codecs) {}  // NOLINT(google-explicit-constructor): the usual case
  KvChoice(PageCodecs codecs, std::optional<TokenGroups> groups = {})  // NOLINT(google-explicit-constructor): likewise
      : codecs(std::move(codecs)), groups(groups) {}
  PageCodecs codecs;  // with groups, of one pair for all layers
  std::optional<TokenGroups> groups;
  bool operator==(const KvChoice&) const = default;
};
// As ParseCodecPair, or "tokens:20/8/4": percent, their codecs, those of the others or "drop"; in front of the
// percentage "attention/" (what it means anyway), "all-queries/" or "random/". Errors: kInvalidArgument.
Result<KvChoice> ParseKvChoice(std::string_view text);
// "i8", "tokens:20/8/4", "tokens:random/20/8/drop".
std::string ToString(const KvChoice& kv);
// Whether these tokens can be grouped so: 1 to 99 %, no refinement planes, no codecs by layer. Error: kInvalidArgument.
Status CheckGroups(const KvChoice& kv);
// Whether pages of one group at least need codebooks.
bool NeedsBooks(const KvChoice& kv);
// Stored bits per value; of those that are grouped, dropped ones counted as 0 bits.
double BitsPerValue(const KvChoice& kv, int head_dim);

// The newest tokens of a prompt are not grouped: few queries have seen them, and the last one must be at the end of a
// context, where it can be read again. What is grouped is a whole number of pages.
inline constexpr int kUngroupedTokens = kPageTokens;
// Of a prompt of n_tokens, from the first on; 0: too few.
int TokensToGroup(int n_tokens);

// Where the first tokens of a context stand: first those that are `high`, then, unless they were dropped, the others;
// both in the order of the text, in pages of their own. Behind them everything is in the order of the text.
struct GroupedTokens {
  std::vector<bool> high;  // [grouped tokens]; empty: nothing is grouped. The first one is true, another one false
  bool dropped = false;

  bool empty() const { return high.empty(); }
  int size() const { return static_cast<int>(high.size()); }
  int n_high() const;
  int n_dropped() const { return dropped ? size() - n_high() : 0; }
  int n_in_pages() const { return size() - n_dropped(); }
  std::vector<int> Order() const;  // [n_in_pages], positions
  bool operator==(const GroupedTokens&) const = default;
};

// The `percent` of the tokens with the highest importance, rounded to whole pages of at least one, and the first token
// whatever its own; what is not a number comes last, of equals the later. importance.size() is TokensToGroup of
// something. Empty when all would be high.
GroupedTokens PlanGroups(std::span<const float> importance, int percent, bool drop);

// [n]: for comparison, the same numbers every time.
std::vector<float> RandomImportance(size_t n);

}  // namespace qkv
