// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/context_card.h"

#include <ggml-cpu.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "qkv/card/card.h"
#include "qkv/engine/page_encoder.h"

namespace qkv {
namespace {

int64_t NowUnixMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// The refinement pages that the card names beside the span's pages become `out`'s, if they are that.
Status AddRefinement(const Context& context, const ::qkvshare::v1::Span& span, SegmentSpan& out) {
  const auto is_refinement = [](CodecPair codecs) {
    return codecs.k == CodecId::kRefine4 || codecs.v == CodecId::kRefine4;
  };
  const auto mismatch = [&](std::string_view what) {
    return Err(Code::kCorrupt, Reason::kChecksum, "a span of context '{}' {}", context.card.id(), what);
  };
  for (size_t i = 0; i < out.n_pages; ++i) {
    if (is_refinement(out.segment->codecs(out.first_page + i))) return mismatch("has refinement pages for its own");
  }
  if (span.refinement_segment() == 0) return {};
  if (span.refinement_segment() > context.segments.size()) return mismatch("has its refinement in no segment");
  const auto& refinement = context.segments[span.refinement_segment() - 1];
  const size_t first = span.refinement_first_page();
  bool fits = first <= refinement->pages().size() && out.n_pages <= refinement->pages().size() - first;
  for (size_t i = 0; fits && i < out.n_pages; ++i) {
    const CodecPair base = out.segment->codecs(out.first_page + i);
    const PageEntry &page = out.segment->pages()[out.first_page + i], &beside = refinement->pages()[first + i];
    fits = refinement->codecs(first + i) == kRefinementCodecs && TakesRefinement(base) &&
           beside.tokens == page.tokens && beside.first_position == page.first_position;
  }
  if (!fits) return mismatch("does not match its refinement pages");
  out.refinement = refinement;
  out.first_refinement_page = first;
  return {};
}

bool HasRotatedPage(const Segment& segment) {
  return segment.header().rotation_seed != 0;
}

bool UsesCodebooks(const Segment& segment, size_t first_page, size_t n_pages) {
  for (size_t i = 0; i < n_pages; ++i) {
    if (NeedsBooks(segment.codecs(first_page + i))) return true;
  }
  return false;
}

std::string CpuFeatures() {
  std::string features;
  const auto add = [&](bool has, const char* name) {
    if (!has) return;
    if (!features.empty()) features += ' ';
    features += name;
  };
  add(ggml_cpu_has_avx2(), "avx2");
  add(ggml_cpu_has_f16c(), "f16c");
  add(ggml_cpu_has_fma(), "fma");
  add(ggml_cpu_has_avx512(), "avx512");
  add(ggml_cpu_has_avx512_vnni(), "avx512_vnni");
  add(ggml_cpu_has_neon(), "neon");
  add(ggml_cpu_has_dotprod(), "dotprod");
  return features;
}

}  // namespace

Result<std::vector<SegmentSpan>> SpansOf(const Context& context, const Model& model, const ModelIdentity& identity,
                                         int n_ctx) {
  const CacheCard& card = context.card;
  QKV_RETURN_IF_ERROR(CheckCompatible(card, identity));
  if (static_cast<int>(context.segments.size()) != card.segments_size()) {
    return Err(Code::kCorrupt, Reason::kChecksum, "context '{}' came with {} segments, its card names {}", card.id(),
               context.segments.size(), card.segments_size());
  }
  if (card.token_ids().empty()) {
    return Err(Code::kCorrupt, Reason::kChecksum, "context '{}' has no tokens", card.id());
  }
  if (card.token_ids_size() > n_ctx) {
    return Err(Code::kInvalidArgument, Reason::kTooLong, "context '{}' has {} tokens, this agent's context size is {}",
               card.id(), card.token_ids_size(), n_ctx);
  }
  for (int i = 0; i < card.segments_size(); ++i) {
    const Segment& segment = *context.segments[i];
    if (segment.digest() != card.segments(i).digest()) {
      return Err(Code::kCorrupt, Reason::kChecksum, "segment {} of context '{}' has digest {}, its card says {}", i,
                 card.id(), segment.digest(), card.segments(i).digest());
    }
    if (segment.geometry() != model.geometry() || segment.header().model_digest != model.weights_digest()) {
      return Err(Code::kIncompatible, Reason::kModelMismatch, "segment {} of context '{}' was written by another model",
                 i, card.id());
    }
  }
  const std::vector<int> order = GroupsOf(card).Order();
  // Of the token at a place, places being counted in the order of the pages.
  const auto position_of = [&](int64_t place) -> int64_t {
    const auto n_grouped = static_cast<int64_t>(order.size());
    if (place < n_grouped) return order[place];
    return place - n_grouped + card.mask().groups().n_tokens();
  };
  std::vector<SegmentSpan> spans;
  int64_t place = 0;
  for (const auto& span : card.spans()) {
    const auto& segment = context.segments[span.segment()];
    int64_t whole = 0;  // tokens of all pages but the last
    const uint64_t end_page = uint64_t{span.first_page()} + span.n_pages();
    bool fits = span.n_pages() > 0 && end_page <= segment->pages().size();
    for (uint64_t page = span.first_page(); fits && page < end_page; ++page) {
      fits = segment->pages()[page].first_position == position_of(place + whole) - span.position_offset();
      if (page + 1 < end_page) whole += segment->pages()[page].tokens;
    }
    fits = fits && span.n_tokens() > whole && span.n_tokens() <= whole + segment->pages()[end_page - 1].tokens;
    if (!fits) {
      return Err(Code::kCorrupt, Reason::kChecksum, "a span of context '{}' does not match the pages of its segment",
                 card.id());
    }
    if (card.model().codebooks_digest().empty() && UsesCodebooks(*segment, span.first_page(), span.n_pages())) {
      return Err(Code::kCorrupt, Reason::kChecksum, "context '{}' has pages that need codebooks, its card names none",
                 card.id());
    }
    spans.push_back({segment, span.first_page(), span.n_pages(), static_cast<int>(span.n_tokens()),
                     static_cast<int>(span.position_offset()), span.hide_first()});
    QKV_RETURN_IF_ERROR(AddRefinement(context, span, spans.back()));
    place += span.n_tokens();
  }
  for (const uint32_t token : card.token_ids()) {
    if (token >= static_cast<uint32_t>(model.params().n_vocab)) {
      return Err(Code::kCorrupt, Reason::kTokenizerMismatch, "context '{}' has token {}, the vocabulary has {}",
                 card.id(), token, model.params().n_vocab);
    }
  }
  return spans;
}

GroupedTokens GroupsOf(const CacheCard& card) {
  if (!card.mask().has_groups()) return {};
  const auto& groups = card.mask().groups();
  GroupedTokens grouped{std::vector<bool>(groups.n_tokens()), groups.dropped()};
  for (size_t t = 0; t < grouped.high.size(); ++t) {
    grouped.high[t] = (static_cast<uint8_t>(groups.high()[t / 8]) >> (t % 8) & 1) != 0;
  }
  return grouped;
}

Context DescribeContext(const std::vector<SegmentSpan>& spans, const GroupedTokens& groups,
                        const ModelIdentity& identity, CodecPair kv, std::span<const Token> tokens,
                        std::span<const std::string> parents, const Sequence::PublishInfo& info) {
  Context context;
  CacheCard& card = context.card;
  card.set_id(NewContextId());
  card.set_name(info.name);
  for (const std::string& parent : parents) card.add_parents(parent);
  card.set_created_unix_ms(NowUnixMs());
  card.mutable_producer()->set_pid(::getpid());
  card.mutable_producer()->set_program("qkvshare");
  card.mutable_producer()->set_agent(info.agent);
  *card.mutable_model() = identity;
  if (std::ranges::none_of(
          spans, [](const SegmentSpan& span) { return UsesCodebooks(*span.segment, span.first_page, span.n_pages); })) {
    card.mutable_model()->clear_codebooks_digest();
  }
  auto* format = card.mutable_format();
  format->set_segment_version(kSegmentVersion);
  format->set_page_tokens(kPageTokens);
  const bool rotated =
      std::ranges::any_of(spans, [](const SegmentSpan& span) { return HasRotatedPage(*span.segment); });
  format->set_rotation(std::string(rotated ? kHadamardRotation : kNoRotation));
  format->set_byte_order("little");
  format->set_cpu_features(CpuFeatures());
  format->set_kv(ToString(kv));
  uint32_t position = 0;
  const auto index_of = [&](const std::shared_ptr<const Segment>& segment) {
    auto known = std::find(context.segments.begin(), context.segments.end(), segment);
    if (known == context.segments.end()) {
      known = context.segments.insert(known, segment);
      auto* out = card.add_segments();
      out->set_digest(segment->digest());
      out->set_bytes(segment->bytes());
      out->set_n_pages(segment->pages().size());
    }
    return static_cast<uint32_t>(known - context.segments.begin());
  };
  for (const SegmentSpan& span : spans) {
    auto* out = card.add_spans();
    out->set_segment(index_of(span.segment));
    if (span.refinement != nullptr) {
      out->set_refinement_segment(index_of(span.refinement) + 1);
      out->set_refinement_first_page(span.first_refinement_page);
    }
    out->set_first_page(span.first_page);
    out->set_n_pages(span.n_pages);
    out->set_n_tokens(span.n_tokens);
    out->set_first_position(position);
    out->set_position_offset(span.position_offset);
    out->set_hide_first(span.hide_first);
    position += span.n_tokens;
    if (groups.dropped && position == static_cast<uint32_t>(groups.n_high())) position = groups.size();
  }
  card.mutable_token_ids()->Add(tokens.begin(), tokens.begin() + position);
  card.mutable_mask()->set_kind(::qkvshare::v1::MaskState::CAUSAL);
  if (!groups.empty()) {
    auto* out = card.mutable_mask()->mutable_groups();
    out->set_n_tokens(groups.size());
    out->set_dropped(groups.dropped);
    std::string& high = *out->mutable_high();
    high.resize((groups.high.size() + 7) / 8);
    for (size_t t = 0; t < groups.high.size(); ++t) {
      if (groups.high[t]) high[t / 8] = static_cast<char>(static_cast<uint8_t>(high[t / 8]) | 1 << t % 8);
    }
  }
  card.mutable_turn()->set_open_turn(info.open_turn);
  card.mutable_turn()->set_sampler(info.sampler);
  card.mutable_turn()->set_seed(info.seed);
  card.mutable_turn()->set_prefix_tokens(std::min<uint32_t>(info.prefix_tokens, position));
  return context;
}

}  // namespace qkv
