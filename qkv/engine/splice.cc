// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/splice.h"

#include <algorithm>
#include <charconv>

namespace qkv {
namespace {

constexpr std::string_view kRepairPrefix = "repair=";
constexpr int kMaxRepair = 1 << 20;

// Part of a page, as a context uses it.
struct Piece {
  const SegmentSpan* span;
  size_t page;
  int tokens;
  int position;  // of the first one, in that context
};

std::vector<Piece> PiecesOf(std::span<const SegmentSpan> source) {
  std::vector<Piece> pieces;
  int position = 0;
  for (const SegmentSpan& span : source) {
    int left = span.n_tokens;
    for (size_t i = 0; i < span.n_pages; ++i) {
      const size_t page = span.first_page + i;
      const int tokens = std::min<int>(left, span.segment->pages()[page].tokens);
      pieces.push_back({&span, page, tokens, position});
      position += tokens;
      left -= tokens;
    }
  }
  return pieces;
}

}  // namespace

Result<SplicePolicy> ParseSplicePolicy(std::string_view text) {
  using Kind = SplicePolicy::Kind;
  for (const Kind kind : {Kind::kOff, Kind::kExactOnly, Kind::kHide, Kind::kAuto}) {
    if (text == ToString(SplicePolicy{.kind = kind})) return SplicePolicy{.kind = kind};
  }
  int repair = 0;
  if (text.starts_with(kRepairPrefix)) {
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + kRepairPrefix.size(), end, repair);
    if (error == std::errc() && stop == end && repair >= kPageTokens && repair <= kMaxRepair &&
        repair % kPageTokens == 0) {
      return SplicePolicy{.kind = Kind::kRepair, .repair = repair};
    }
    return Err(Code::kInvalidArgument, "repair=N: expected N to be a multiple of {} from {} to {}", kPageTokens,
               kPageTokens, kMaxRepair);
  }
  return Err(Code::kInvalidArgument, "expected off, exact-only, hide, repair=N or auto");
}

std::string ToString(SplicePolicy policy) {
  switch (policy.kind) {
    case SplicePolicy::Kind::kOff: return "off";
    case SplicePolicy::Kind::kExactOnly: return "exact-only";
    case SplicePolicy::Kind::kHide: return "hide";
    case SplicePolicy::Kind::kRepair: return fmt::format("{}{}", kRepairPrefix, policy.repair);
    case SplicePolicy::Kind::kAuto: return "auto";
  }
  return "off";
}

int FirstTokenFor(int prefix_tokens, SplicePolicy policy) {
  return prefix_tokens == 1 && policy.kind == SplicePolicy::Kind::kHide ? 0 : prefix_tokens;
}

SplicePlan PlanSplice(std::span<const SegmentSpan> source, int first_token, int position, bool exact,
                      const SpliceOptions& options) {
  const std::vector<Piece> pieces = PiecesOf(source);
  const int n_tokens = pieces.back().position + pieces.back().tokens;
  const int repair = exact ? 0 : std::min(options.repair, n_tokens - first_token);
  const int wanted = first_token + repair;
  const auto kept = std::ranges::find_if(pieces, [&](const Piece& piece) { return piece.position >= wanted; });

  SplicePlan plan;
  plan.n_recompute = (kept == pieces.end() ? n_tokens : kept->position) - first_token;
  plan.n_spliced = n_tokens - first_token - plan.n_recompute;
  for (auto piece = kept; piece != pieces.end(); ++piece) {
    const SegmentSpan& span = *piece->span;
    const int encoded_at = static_cast<int>(span.segment->pages()[piece->page].first_position);
    const int offset = position + piece->position - first_token - encoded_at;
    const bool was_hidden = span.hide_first && piece->page == span.first_page;
    const bool surplus_sink = options.hide_first && !exact && encoded_at == 0 && offset != 0;
    const bool hide = was_hidden || surplus_sink;
    const bool goes_on =
        piece != kept && !hide && std::prev(piece)->span == &span && plan.spans.back().position_offset == offset;
    if (!goes_on) {
      plan.spans.push_back({span.segment, piece->page, 0, 0, offset, hide, span.refinement,
                            span.first_refinement_page + (piece->page - span.first_page)});
    }
    plan.spans.back().n_pages += 1;
    plan.spans.back().n_tokens += piece->tokens;
  }
  return plan;
}

}  // namespace qkv
