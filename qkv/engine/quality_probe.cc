// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/quality_probe.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "qkv/engine/page_encoder.h"

namespace qkv {
namespace {

constexpr CodecPair kExact = {CodecId::kF16, CodecId::kF16};

Result<std::unique_ptr<Sequence>> NewSequence(const std::shared_ptr<const Model>& model, const ProbeOptions& options,
                                              const ProbeCodec& codec, size_t n_ctx, bool pages_at_once = false) {
  SequenceOptions sequence;
  sequence.n_ctx = static_cast<int>(n_ctx);
  sequence.n_threads = options.n_threads;
  sequence.n_batch = options.n_batch;
  sequence.kv = codec.kv;
  sequence.groups = codec.groups;
  sequence.calibration = codec.calibration;
  sequence.codebooks = codec.codebooks;
  if (pages_at_once) sequence.tail_budget_bytes = 0;
  sequence.refine = options.refine;
  sequence.on_progress = options.on_progress;
  return Sequence::Create(model, sequence);
}

// Calls `visit` with each page of the context that is used, and how many of its tokens are.
template <class Visit>
void ForEachPage(const Context& context, Visit visit) {
  for (const auto& span : context.card.spans()) {
    const Segment& segment = *context.segments[span.segment()];
    int left = static_cast<int>(span.n_tokens());
    for (size_t page = span.first_page(); page < size_t{span.first_page()} + span.n_pages(); ++page) {
      const int tokens = std::min<int>(left, segment.pages()[page].tokens);
      left -= tokens;
      visit(segment, page, tokens);
    }
  }
}

uint64_t ValuesPerToken(const Geometry& geometry) {
  return uint64_t{2} * geometry.n_layers * geometry.n_kv_heads * geometry.head_dim;
}

// For reading what is scored.
ProbeOptions Scoring(ProbeOptions options) {
  if (options.score_batch > 0) options.n_batch = options.score_batch;
  return options;
}

// Forward with the logits of every token.
Result<std::vector<float>> AllLogits(Sequence& sequence, std::span<const Token> tokens) {
  sequence.KeepAllLogits(true);
  const Status read = sequence.Forward(tokens);
  sequence.KeepAllLogits(false);
  if (!read) return tl::unexpected(read.error());
  return std::vector<float>(sequence.all_logits().begin(), sequence.all_logits().end());
}

// Handed over: from now on `sequence` reads what was exact so far in its own codec.
Result<Context> HandOver(Sequence& sequence, const Context& exact, const Sequence::RowTransform& transform) {
  QKV_RETURN_IF_ERROR(sequence.CopyExact(exact, transform));
  return sequence.Publish({});
}

double EncodeNs(const Sequence& sequence, const KvSize& size) {
  return 1e6 * sequence.stats().encode_ms / static_cast<double>(size.values);
}

// Nanoseconds per value to get a context's first pages back as fp32, one thread.
double DecodeNs(const Context& context, const PqCodebooks* codebooks) {
  std::vector<float> rows;
  uint64_t values = 0;
  const auto start = std::chrono::steady_clock::now();
  constexpr int kPages = 4;
  int pages = 0;
  ForEachPage(context, [&](const Segment& segment, size_t page, int tokens) {
    if (++pages > kPages) return;
    const Geometry& geometry = segment.geometry();
    const PageLayout layout = segment.layout(page);
    rows.resize(static_cast<size_t>(kPageTokens) * geometry.head_dim);
    for (int layer = 0; layer < geometry.n_layers; ++layer) {
      for (int head = 0; head < geometry.n_kv_heads; ++head) {
        for (const Side side : {Side::kK, Side::kV}) {
          const CodecPair codecs = layout.CodecsOf(layer);
          const Codec& codec = CodecOf(side == Side::kK ? codecs.k : codecs.v);
          const PqBook book = codec.needs_book ? codebooks->book(codec.id, layer, head, side) : PqBook();
          codec.decode(side, segment.page(page) + layout.BlockOffset(side, layer, head), tokens, geometry.head_dim,
                       rows.data(), &book);
        }
      }
    }
    values += ValuesPerToken(geometry) * static_cast<uint64_t>(tokens);
  });
  const std::chrono::duration<double, std::nano> ns = std::chrono::steady_clock::now() - start;
  return values == 0 ? 0 : ns.count() / static_cast<double>(values);
}

}  // namespace

KvSize SizeOf(const Context& context) {
  KvSize size;
  uint64_t bytes = 0, file_bytes = 0;
  ForEachPage(context,
              [&](const Segment& segment, size_t page, int /*tokens*/) { bytes += segment.layout(page).block_bytes; });
  size.values =
      ValuesPerToken(context.segments.front()->geometry()) * static_cast<uint64_t>(context.card.token_ids_size());
  for (const auto& span : context.card.spans()) {
    if (span.refinement_segment() == 0) continue;
    bytes += span.n_pages() * PageLayout(context.segments.front()->geometry(), kRefinementCodecs).block_bytes;
  }
  for (const auto& segment : context.segments) {
    bytes += segment->header().constants_bytes + segment->header().layers_bytes;
    file_bytes += segment->bytes();
  }
  size.bits_per_value = 8.0 * static_cast<double>(bytes) / static_cast<double>(size.values);
  size.file_bits = 8.0 * static_cast<double>(file_bytes) / static_cast<double>(size.values);
  return size;
}

Result<std::unique_ptr<HandoffProbe>> HandoffProbe::Read(std::shared_ptr<const Model> model,
                                                         std::span<const Token> tokens, int n_prefix,
                                                         const ProbeOptions& options) {
  QKV_CHECK(n_prefix >= 1 && static_cast<size_t>(n_prefix) + 2 <= tokens.size());
  auto probe = std::unique_ptr<HandoffProbe>(new HandoffProbe());
  probe->model_ = std::move(model);
  probe->options_ = options;
  const auto prefix = tokens.first(n_prefix);
  const auto rest = tokens.subspan(n_prefix);
  probe->scored_.assign(rest.begin(), rest.end() - 1);
  probe->next_.assign(rest.begin() + 1, rest.end());
  QKV_ASSIGN_OR_RETURN(const auto sequence, NewSequence(probe->model_, options, {kExact, {}}, tokens.size()));
  QKV_RETURN_IF_ERROR(sequence->Forward(prefix));
  QKV_ASSIGN_OR_RETURN(probe->exact_, sequence->Publish({}));
  QKV_ASSIGN_OR_RETURN(const auto reader, NewSequence(probe->model_, Scoring(options), {kExact, {}}, tokens.size()));
  QKV_RETURN_IF_ERROR(reader->Attach(probe->exact_));
  QKV_ASSIGN_OR_RETURN(auto logits, AllLogits(*reader, probe->scored_));
  probe->reference_ = std::make_unique<ReferenceLogits>(std::move(logits), probe->model_->params().n_vocab);
  return probe;
}

// Read, grouped and handed over as a producer does, which sees the prefix's own queries.
Result<ProbeResult> HandoffProbe::ScoreGroups(const ProbeCodec& codec) const {
  const std::vector<Token> prefix(exact_.card.token_ids().begin(), exact_.card.token_ids().end());
  ProbeOptions options = options_;
  options.on_progress = {};  // the prefix has been counted already
  QKV_ASSIGN_OR_RETURN(const auto producer, NewSequence(model_, options, codec, prefix.size()));
  QKV_RETURN_IF_ERROR(producer->Forward(prefix));
  QKV_ASSIGN_OR_RETURN(const Context context, producer->Publish({}));
  ProbeResult result;
  result.size = SizeOf(context);
  result.encode_ns = EncodeNs(*producer, result.size);
  result.decode_ns = DecodeNs(context, producer->codebooks());
  QKV_ASSIGN_OR_RETURN(const auto reader,
                       NewSequence(model_, Scoring(options_),
                                   {.kv = codec.kv, .calibration = codec.calibration, .codebooks = codec.codebooks},
                                   prefix.size() + scored_.size()));
  QKV_RETURN_IF_ERROR(reader->Attach(context));
  QKV_ASSIGN_OR_RETURN(const auto logits, AllLogits(*reader, scored_));
  result.score = reference_->ScoreAll(logits, next_);
  result.refined_share = reader->stats().refined_share();
  result.read_bits = reader->stats().read_bits();
  return result;
}

Result<ProbeResult> HandoffProbe::Score(const ProbeCodec& codec) const {
  if (codec.groups) return ScoreGroups(codec);
  const size_t n_ctx = exact_.card.token_ids_size() + scored_.size();
  QKV_ASSIGN_OR_RETURN(const auto sequence, NewSequence(model_, Scoring(options_), codec, n_ctx));
  QKV_ASSIGN_OR_RETURN(const Context context, HandOver(*sequence, exact_, codec.transform));
  ProbeResult result;
  result.size = SizeOf(context);
  result.encode_ns = EncodeNs(*sequence, result.size);
  result.decode_ns = DecodeNs(context, sequence->codebooks());
  QKV_ASSIGN_OR_RETURN(const auto logits, AllLogits(*sequence, scored_));
  result.score = reference_->ScoreAll(logits, next_);
  result.refined_share = sequence->stats().refined_share();
  result.read_bits = sequence->stats().read_bits();
  return result;
}

Result<SampleScore> HandoffProbe::NoiseFloor() const {
  const int head_dim = model_->params().head_dim;
  uint32_t random = 1;
  const auto last_bit = [=](Side, int, int, int, int tokens, float* rows) mutable {
    for (int i = 0; i < tokens * head_dim; ++i) {
      random = random * 1664525u + 1013904223u;
      rows[i] *= 1 + ((random >> 31) != 0 ? 0x1p-10f : -0x1p-10f);  // f16 has 11 bits
    }
  };
  QKV_ASSIGN_OR_RETURN(ProbeResult result, Score({kExact, last_bit}));
  return std::move(result.score);
}

Result<Context> ReadExact(const std::shared_ptr<const Model>& model, std::span<const Token> tokens,
                          const ProbeOptions& options) {
  QKV_ASSIGN_OR_RETURN(const auto sequence, NewSequence(model, options, {kExact, {}}, tokens.size()));
  QKV_RETURN_IF_ERROR(sequence->Forward(tokens));
  return sequence->Publish({});
}

Result<std::vector<Token>> GreedyOver(const std::shared_ptr<const Model>& model, const Context& exact, Token token,
                                      const ProbeCodec& codec, int max_tokens, const ProbeOptions& options) {
  const size_t n_ctx = static_cast<size_t>(exact.card.token_ids_size()) + max_tokens + 1;
  QKV_ASSIGN_OR_RETURN(const auto sequence, NewSequence(model, options, codec, n_ctx));
  QKV_RETURN_IF_ERROR(HandOver(*sequence, exact, codec.transform));
  const Vocab vocab(*model);
  Sampler greedy({});
  std::vector<Token> tokens;
  while (static_cast<int>(tokens.size()) < max_tokens) {
    QKV_RETURN_IF_ERROR(sequence->Forward({&token, 1}));
    token = greedy.Sample(sequence->logits());
    if (vocab.IsEndOfGeneration(token)) break;
    tokens.push_back(token);
  }
  return tokens;
}

Result<std::unique_ptr<PagesProbe>> PagesProbe::Read(std::shared_ptr<const Model> model, std::span<const Token> tokens,
                                                     const ProbeOptions& options) {
  QKV_CHECK(tokens.size() >= 3);
  auto probe = std::unique_ptr<PagesProbe>(new PagesProbe());
  probe->model_ = std::move(model);
  probe->options_ = options;
  probe->tokens_.assign(tokens.begin(), tokens.end());
  QKV_ASSIGN_OR_RETURN(auto logits, probe->Logits({kExact, {}}, nullptr));
  probe->reference_ = std::make_unique<ReferenceLogits>(std::move(logits), probe->model_->params().n_vocab);
  return probe;
}

Result<std::vector<float>> PagesProbe::Logits(const ProbeCodec& codec, ProbeResult* result) const {
  const auto read = std::span(tokens_).first(tokens_.size() - 1);
  const size_t half = read.size() / 2;
  QKV_ASSIGN_OR_RETURN(const auto sequence, NewSequence(model_, options_, codec, read.size(), /*pages_at_once=*/true));
  QKV_RETURN_IF_ERROR(sequence->Forward(read.first(half)));
  const Sequence::Stats before = sequence->stats();
  QKV_ASSIGN_OR_RETURN(auto logits, AllLogits(*sequence, read.subspan(half)));
  if (result != nullptr) {
    Sequence::Stats scored = sequence->stats();
    scored.keys_with_refinement -= before.keys_with_refinement;
    scored.keys_refined -= before.keys_refined;
    result->refined_share = scored.refined_share();
    result->read_bits = scored.read_bits();
    QKV_ASSIGN_OR_RETURN(const Context context, sequence->Publish({}));
    result->size = SizeOf(context);
    result->encode_ns = EncodeNs(*sequence, result->size);
    result->decode_ns = DecodeNs(context, sequence->codebooks());
  }
  return logits;
}

Result<ProbeResult> PagesProbe::Score(const ProbeCodec& codec) const {
  if (codec.transform) return Err(Code::kInvalidArgument, "protocol 'all' measures pages, not simulated codecs");
  ProbeResult result;
  QKV_ASSIGN_OR_RETURN(const auto logits, Logits(codec, &result));
  result.score = reference_->ScoreAll(logits, std::span(tokens_).last(reference_->rows()));
  return result;
}

std::span<const Token> HopsProbe::HopTokens(int hop, size_t shift) const {
  return std::span(tokens_).subspan(static_cast<size_t>(n_prefix_) + static_cast<size_t>(hop) * hop_tokens_ + shift,
                                    hop_tokens_);
}

Result<std::unique_ptr<HopsProbe>> HopsProbe::Read(std::shared_ptr<const Model> model, std::span<const Token> tokens,
                                                   int n_prefix, int n_hops, const ProbeOptions& options) {
  QKV_CHECK(n_prefix >= 1 && n_hops >= 1 && tokens.size() >= static_cast<size_t>(n_prefix) + n_hops + 1);
  auto probe = std::unique_ptr<HopsProbe>(new HopsProbe());
  probe->model_ = std::move(model);
  probe->options_ = options;
  probe->tokens_.assign(tokens.begin(), tokens.end());
  probe->n_prefix_ = n_prefix;
  probe->n_hops_ = n_hops;
  probe->hop_tokens_ = static_cast<int>((tokens.size() - n_prefix - 1) / n_hops);
  QKV_ASSIGN_OR_RETURN(const auto sequence, NewSequence(probe->model_, options, {kExact, {}}, tokens.size()));
  QKV_RETURN_IF_ERROR(sequence->Forward(tokens.first(n_prefix)));
  for (int hop = 0; hop < n_hops; ++hop) {
    QKV_ASSIGN_OR_RETURN(Context context, sequence->Publish({}));
    probe->exact_.push_back(std::move(context));
    QKV_ASSIGN_OR_RETURN(auto logits, AllLogits(*sequence, probe->HopTokens(hop, 0)));
    probe->references_.emplace_back(std::move(logits), probe->model_->params().n_vocab);
  }
  return probe;
}

Result<HopScores> HopsProbe::Score(const ProbeCodec& codec, KvSize& size) const {
  HopScores scores;
  QKV_ASSIGN_OR_RETURN(auto sequence, NewSequence(model_, options_, codec, tokens_.size()));
  QKV_ASSIGN_OR_RETURN(Context context, HandOver(*sequence, exact_[0], codec.transform));
  for (int hop = 0; hop < n_hops_; ++hop) {
    QKV_ASSIGN_OR_RETURN(sequence, NewSequence(model_, options_, codec, tokens_.size()));
    QKV_RETURN_IF_ERROR(sequence->Attach(context));
    QKV_ASSIGN_OR_RETURN(const auto chained, AllLogits(*sequence, HopTokens(hop, 0)));
    scores.chain.push_back(references_[hop].ScoreAll(chained, HopTokens(hop, 1)));
    scores.refined_share.push_back(sequence->stats().refined_share());
    scores.read_bits.push_back(sequence->stats().read_bits());
    QKV_ASSIGN_OR_RETURN(context, sequence->Publish({}));

    QKV_ASSIGN_OR_RETURN(const auto once, NewSequence(model_, options_, codec, tokens_.size()));
    QKV_RETURN_IF_ERROR(HandOver(*once, exact_[hop], codec.transform));
    QKV_ASSIGN_OR_RETURN(const auto alone, AllLogits(*once, HopTokens(hop, 0)));
    scores.single.push_back(references_[hop].ScoreAll(alone, HopTokens(hop, 1)));
  }
  size = SizeOf(context);
  return scores;
}

}  // namespace qkv
