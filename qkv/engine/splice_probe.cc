// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/splice_probe.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <random>
#include <set>
#include <utility>

#include "qkv/engine/kv_rows.h"

namespace qkv {
namespace {

using Encoding = SpliceArm::Encoding;
using Method = SpliceArm::Method;

constexpr CodecPair kExact = {CodecId::kF16, CodecId::kF16};

}  // namespace

Result<SpliceArm> ParseSpliceArm(std::string_view text) {
  SpliceArm arm;
  arm.name = text;
  if (const size_t at = text.find('@'); at != std::string_view::npos) {
    QKV_ASSIGN_OR_RETURN(arm.kv, ParseCodecPair(text.substr(at + 1)));
    text = text.substr(0, at);
  }
  const std::pair<std::string_view, Encoding> encodings[] = {
      {"bos:", Encoding::kBos}, {"own:", Encoding::kProducer}, {"common:", Encoding::kCommon}};
  for (const auto& [prefix, encoding] : encodings) {
    if (!text.starts_with(prefix)) continue;
    arm.encoding = encoding;
    text.remove_prefix(prefix.size());
    break;
  }
  constexpr std::string_view kRandom = "random=";
  if (text.starts_with(kRandom)) {
    arm.method = Method::kRandom;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + kRandom.size(), end, arm.n_random);
    if (error == std::errc() && stop == end && arm.n_random > 0 && arm.encoding == Encoding::kAlone) return arm;
  } else if (text == "none") {
    arm.method = Method::kNone;
    if (arm.encoding == Encoding::kAlone) return arm;
  } else if (text == "rotate") {
    return arm;
  } else if (text == "full") {
    arm.method = Method::kSplice;
    arm.policy = {.kind = SplicePolicy::Kind::kRepair, .repair = kRepairAll};
    return arm;
  } else if (const auto policy = ParseSplicePolicy(text); policy && policy->kind >= SplicePolicy::Kind::kHide) {
    arm.method = Method::kSplice;
    arm.policy = *policy;
    return arm;
  }
  return Err(
      Code::kInvalidArgument,
      "'{}': expected rotate, hide, repair=N, full or auto, perhaps behind bos:, own: or common:; none; random=N",
      arm.name);
}

Result<std::unique_ptr<Sequence>> SpliceProbe::NewSequence(CodecPair kv) const {
  SequenceOptions sequence;
  sequence.n_ctx = static_cast<int>(case_.own.size() + case_.producer.size() + case_.a.size() + case_.b.size() +
                                    case_.prompt.size() + case_.scored.size() + 1);
  sequence.n_threads = options_.n_threads;
  sequence.n_batch = options_.n_batch;
  sequence.kv = kv;
  return Sequence::Create(model_, sequence);
}

Result<std::unique_ptr<SpliceProbe>> SpliceProbe::Read(std::shared_ptr<const Model> model, SpliceCase what,
                                                       const ProbeOptions& options) {
  std::unique_ptr<SpliceProbe> probe(new SpliceProbe());
  probe->model_ = std::move(model);
  probe->options_ = options;
  probe->case_ = std::move(what);
  const SpliceCase& c = probe->case_;
  std::vector<Token> all = c.own;
  all.insert(all.end(), c.a.begin(), c.a.end());
  all.insert(all.end(), c.b.begin(), c.b.end());
  QKV_ASSIGN_OR_RETURN(const auto sequence, probe->NewSequence(kExact));
  QKV_RETURN_IF_ERROR(sequence->Forward(all));
  QKV_RETURN_IF_ERROR(sequence->Forward(c.prompt));
  QKV_ASSIGN_OR_RETURN(auto logits, probe->LogitsOfScored(*sequence));
  probe->reference_ =
      std::make_unique<ReferenceLogits>(std::move(logits), static_cast<size_t>(probe->model_->params().n_vocab));
  return probe;
}

Result<std::vector<float>> SpliceProbe::LogitsOfScored(Sequence& sequence) const {
  sequence.KeepAllLogits(true);
  const Status read = sequence.Forward(std::span(case_.scored).first(case_.scored.size() - 1));
  sequence.KeepAllLogits(false);
  if (!read) return tl::unexpected(read.error());
  return std::vector<float>(sequence.all_logits().begin(), sequence.all_logits().end());
}

Result<Context> SpliceProbe::ReadBehind(std::span<const Token> prefix, std::span<const Token> passage) const {
  std::vector<Token> tokens(prefix.begin(), prefix.end());
  tokens.insert(tokens.end(), passage.begin(), passage.end());
  QKV_ASSIGN_OR_RETURN(const auto sequence, NewSequence(kExact));
  QKV_RETURN_IF_ERROR(sequence->Forward(tokens));
  return sequence->Publish({});
}

Result<const SpliceProbe::Encoded*> SpliceProbe::Encode(Encoding encoding) {
  if (const auto known = encoded_.find(encoding); known != encoded_.end()) return &known->second;
  std::vector<Token> prefix;
  if (encoding == Encoding::kProducer) prefix = case_.producer;
  if (encoding == Encoding::kCommon) prefix = case_.own;
  if (encoding == Encoding::kBos) {
    const std::optional<Token> bos = Vocab(*model_).BeginningOfText();
    if (!bos) return Err(Code::kInvalidArgument, "the model has no token for the beginning of a text");
    prefix = {*bos};
  }
  Encoded encoded;
  encoded.left_out = static_cast<int>(prefix.size());
  QKV_ASSIGN_OR_RETURN(encoded.a, ReadBehind(prefix, case_.a));
  QKV_ASSIGN_OR_RETURN(encoded.b, ReadBehind(prefix, case_.b));
  return &(encoded_[encoding] = std::move(encoded));
}

// Tokens of a context, keys and values as they are, behind what `sequence` holds.
Status SpliceProbe::AppendMoved(Sequence& sequence, const Context& context, int first, int n, bool rotate) const {
  KvRows rows = DecodeRows(context, first, n);
  const int shift = static_cast<int>(sequence.tokens().size()) - first;
  if (rotate) MoveKeys(rows, model_->params().head_dim, sequence.rope(), shift);
  const std::vector<Token> tokens(context.card.token_ids().begin() + first,
                                  context.card.token_ids().begin() + first + n);
  return sequence.AppendRows(tokens, rows.k, rows.v);
}

Status SpliceProbe::PlaceRandom(Sequence& sequence, const Context& context, int n_random, uint64_t seed) const {
  const int n = context.card.token_ids_size();
  std::mt19937_64 random(seed);
  std::set<int> picked;
  while (static_cast<int>(picked.size()) < std::min(n_random, n)) picked.insert(static_cast<int>(random() % n));
  for (int at = 0; at < n;) {
    const auto next = picked.lower_bound(at);
    const int end = next == picked.end() ? n : *next;
    if (end > at) QKV_RETURN_IF_ERROR(AppendMoved(sequence, context, at, end - at, /*rotate=*/true));
    if (end < n) {
      const auto token = static_cast<Token>(context.card.token_ids(end));
      QKV_RETURN_IF_ERROR(sequence.Forward({&token, 1}));
    }
    at = end + 1;
  }
  return {};
}

Result<SpliceScore> SpliceProbe::Score(const SpliceArm& arm) {
  QKV_ASSIGN_OR_RETURN(const Encoded* encoded, Encode(arm.encoding));
  const bool repairs = arm.method == Method::kSplice && arm.policy.kind != SplicePolicy::Kind::kHide;
  const int left_out = FirstTokenFor(encoded->left_out, repairs ? arm.policy : SplicePolicy{});
  Context recoded[2];
  const Context* passages[] = {&encoded->a, &encoded->b};
  for (int i = 0; i < 2 && !(arm.kv == kExact); ++i) {
    QKV_ASSIGN_OR_RETURN(const auto writer, NewSequence(arm.kv));
    QKV_RETURN_IF_ERROR(writer->CopyExact(*passages[i]));
    QKV_ASSIGN_OR_RETURN(recoded[i], writer->Publish({}));
    passages[i] = &recoded[i];
  }
  QKV_ASSIGN_OR_RETURN(const auto sequence, NewSequence(kExact));
  QKV_RETURN_IF_ERROR(sequence->Forward(case_.own));

  SpliceScore result;
  const auto start = std::chrono::steady_clock::now();
  const auto ms = [&] {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  };
  if (arm.method == Method::kSplice && arm.policy.kind == SplicePolicy::Kind::kAuto) {
    std::vector<ContextPiece> pieces;
    for (const Context* passage : passages) pieces.push_back({passage, left_out, {}, arm.policy});
    size_t failed;
    QKV_ASSIGN_OR_RETURN(const Assembled assembled, Assemble(*sequence, pieces, case_.prompt, &failed));
    result.ms = ms();
    result.recomputed = assembled.splice.tokens_recomputed;
    result.rung = std::min<double>(assembled.chosen->repair, static_cast<double>(case_.a.size()));
    result.probe_kl = assembled.probe_kl;
  } else {
    switch (arm.method) {
      case Method::kNone:
        for (const Context* passage : passages) {
          QKV_RETURN_IF_ERROR(AppendMoved(*sequence, *passage, 0, passage->card.token_ids_size(), /*rotate=*/false));
        }
        break;
      case Method::kRandom:
        for (int i = 0; i < 2; ++i) {
          QKV_RETURN_IF_ERROR(PlaceRandom(*sequence, *passages[i], arm.n_random, 2 * case_.seed + i));
        }
        result.recomputed = 2 * arm.n_random;
        break;
      case Method::kRotate:
      case Method::kSplice: {
        const SpliceSource sources[] = {{passages[0], left_out}, {passages[1], left_out}};
        SpliceOptions options;
        options.hide_first = arm.method == Method::kSplice;
        options.repair = arm.method == Method::kSplice ? arm.policy.repair : 0;
        QKV_ASSIGN_OR_RETURN(const SpliceResult spliced, sequence->Splice(sources, options));
        result.ms = ms();
        result.recomputed = spliced.tokens_recomputed;
        break;
      }
    }
    QKV_RETURN_IF_ERROR(sequence->Forward(case_.prompt));
  }
  QKV_ASSIGN_OR_RETURN(const auto logits, LogitsOfScored(*sequence));
  const auto n_vocab = static_cast<size_t>(model_->params().n_vocab);
  for (size_t row = 0; row + 1 < case_.scored.size(); ++row) {
    result.places.push_back(
        reference_->Score(row, std::span(logits).subspan(row * n_vocab, n_vocab), case_.scored[row + 1]));
  }
  return result;
}

}  // namespace qkv
