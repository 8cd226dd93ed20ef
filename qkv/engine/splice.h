// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Splicing: pages of a context used at another position, behind something else than they were encoded behind (DESIGN §6,
// §8). Keys stay as they are and are shared; what changes is what their readers do. It is an approximation: the pages
// don't know what stands before them now. What mends most of that is here as a policy:
//
//   hide    a moved span that was encoded from position 0 hides its first token: such a token draws attention of its own
//           (a sink), and a reader is to see one of these. Costs nothing.
//   repair  the first tokens of a moved span are read again where they stand now, into pages of the reader's own.
//   auto    climbs hide, repair=32, repair=64, full prefill, until a step changes little in what comes next.
//
// Pure functions and values; any thread.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/engine/paged_kv.h"

namespace qkv {

struct Context;

inline constexpr int kRepairAll = 1 << 30;

// What a reader allows for a context that does not stand where it was made.
struct SplicePolicy {
  enum class Kind : uint8_t {
    kOff,        // contexts are read as text, even one that could be gone on from
    kExactOnly,  // gone on from where that is exact, else read as text
    kHide,
    kRepair,
    kAuto,
  };
  Kind kind = Kind::kHide;
  int repair = 0;  // for kRepair: a positive multiple of kPageTokens
  bool operator==(const SplicePolicy&) const = default;
};

// "off", "exact-only", "hide", "repair=N", "auto". Error: kInvalidArgument, which names them.
Result<SplicePolicy> ParseSplicePolicy(std::string_view text);
std::string ToString(SplicePolicy policy);

// A context to be used behind what a sequence has read.
struct SpliceSource {
  const Context* context = nullptr;
  int first_token = 0;  // what is before it is left out: the producer's own system message, say
};

// From where on a context is used whose first `prefix_tokens` are to be left out. A single one, the token for the beginning
// of a text, say, is left out for nothing by hiding it; leaving more out costs reading again what is left of their page.
int FirstTokenFor(int prefix_tokens, SplicePolicy policy);

struct SpliceOptions {
  int repair = 0;          // tokens at the start of each moved context: a multiple of kPageTokens, or kRepairAll
  bool hide_first = true;  // where it has a meaning: of a context from its start that is moved and not repaired
};

struct SpliceResult {
  int64_t tokens_spliced = 0;     // used as they are, moved or not
  int64_t tokens_recomputed = 0;  // of the contexts, into pages of the reader's own
  int spans = 0;                  // moved
  int hidden = 0;                 // spans whose first token is not seen
};

// How one context comes to stand at a new place: its first tokens are read again, the rest are pages.
struct SplicePlan {
  int n_recompute = 0;
  std::vector<SegmentSpan> spans;
  int n_spliced = 0;
};

// `source`: a whole context's spans, which hold its tokens in order. Its tokens from `first_token` on will stand from
// `position` on; `exact` if they stand where they were made, behind the same tokens: then nothing is hidden or repaired.
// Pages are used from their first token on, so that tokens up to the next page are read again where `first_token` or the
// end of a repair is inside one. REQUIRES: 0 <= first_token < tokens of source.
SplicePlan PlanSplice(std::span<const SegmentSpan> source, int first_token, int position, bool exact,
                      const SpliceOptions& options);

}  // namespace qkv
