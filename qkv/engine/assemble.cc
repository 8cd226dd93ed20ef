// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/assemble.h"

#include <algorithm>

#include "qkv/engine/quality.h"

namespace qkv {
namespace {

using Kind = SplicePolicy::Kind;

constexpr SplicePolicy kRungs[] = {{.kind = Kind::kHide},
                                   {.kind = Kind::kRepair, .repair = kPageTokens},
                                   {.kind = Kind::kRepair, .repair = 2 * kPageTokens},
                                   {.kind = Kind::kRepair, .repair = kRepairAll}};

// Of rows of logits, KL(p || q) of their distributions in the mean.
double MeanKl(std::span<const float> p_logits, std::span<const float> q_logits, size_t n_vocab) {
  double sum = 0;
  const size_t n_rows = p_logits.size() / n_vocab;
  for (size_t row = 0; row < n_rows; ++row) {
    sum += KlDivergence(p_logits.subspan(row * n_vocab, n_vocab), q_logits.subspan(row * n_vocab, n_vocab));
  }
  return sum / static_cast<double>(n_rows);
}

class Assembler {
 public:
  Assembler(Sequence& sequence, std::span<const ContextPiece> pieces, std::span<const Token> prompt, size_t* failed)
      : sequence_(sequence), pieces_(pieces), prompt_(prompt), failed_(failed) {}

  Result<Assembled> Once() {
    QKV_ASSIGN_OR_RETURN(const std::vector<Token> rest, Place(kRungs[0]));
    QKV_RETURN_IF_ERROR(sequence_.Forward(rest));
    return assembled_;
  }

  Result<Assembled> Climb() {
    const int before = static_cast<int>(sequence_.tokens().size());
    const auto n_vocab = static_cast<size_t>(sequence_.model().params().n_vocab);
    std::vector<float> last;
    for (const SplicePolicy& rung : kRungs) {
      if (!last.empty()) QKV_RETURN_IF_ERROR(sequence_.Truncate(before));
      const int64_t recomputed = assembled_.splice.tokens_recomputed;
      QKV_ASSIGN_OR_RETURN(const std::vector<Token> rest, Place(rung));
      assembled_.chosen = rung;
      QKV_ASSIGN_OR_RETURN(std::vector<float> now, Probe(rest));
      // Nothing was left to repair.
      if (!last.empty() && assembled_.splice.tokens_recomputed == recomputed) break;
      if (!last.empty()) {
        assembled_.probe_kl = MeanKl(now, last, n_vocab);
        if (assembled_.probe_kl <= kProbeAgreement) break;
      }
      last = std::move(now);
    }
    return assembled_;
  }

 private:
  // What can be spliced is; the tokens that are to be read behind it, prompt included.
  Result<std::vector<Token>> Place(const SplicePolicy& rung) {
    assembled_.splice = {};
    std::vector<Token> rest;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const ContextPiece& piece = pieces_[i];
      if (piece.context == nullptr) {
        rest.insert(rest.end(), piece.tokens.begin(), piece.tokens.end());
        continue;
      }
      if (!rest.empty()) QKV_RETURN_IF_ERROR(sequence_.Forward(rest));
      rest.clear();
      const SplicePolicy& policy = piece.policy.kind == Kind::kAuto ? rung : piece.policy;
      const SpliceOptions options{.repair = policy.kind == Kind::kRepair ? policy.repair : 0};
      const SpliceSource source{piece.context, piece.first_token};
      const auto spliced = sequence_.Splice({&source, 1}, options);
      if (!spliced) {
        *failed_ = i;
        return tl::unexpected(spliced.error());
      }
      assembled_.splice.tokens_spliced += spliced->tokens_spliced;
      assembled_.splice.tokens_recomputed += spliced->tokens_recomputed;
      assembled_.splice.spans += spliced->spans;
      assembled_.splice.hidden += spliced->hidden;
    }
    rest.insert(rest.end(), prompt_.begin(), prompt_.end());
    return rest;
  }

  // Reads `rest`; the logits of its last tokens, [up to kProbeTokens][n_vocab].
  Result<std::vector<float>> Probe(std::span<const Token> rest) {
    const size_t n = std::min<size_t>(rest.size(), kProbeTokens);
    if (n < rest.size()) QKV_RETURN_IF_ERROR(sequence_.Forward(rest.first(rest.size() - n)));
    sequence_.KeepAllLogits(true);
    const Status read = sequence_.Forward(rest.last(n));
    sequence_.KeepAllLogits(false);
    QKV_RETURN_IF_ERROR(read);
    return std::vector<float>(sequence_.all_logits().begin(), sequence_.all_logits().end());
  }

  Sequence& sequence_;
  const std::span<const ContextPiece> pieces_;
  const std::span<const Token> prompt_;
  size_t* const failed_;
  Assembled assembled_;
};

}  // namespace

Result<Assembled> Assemble(Sequence& sequence, std::span<const ContextPiece> pieces, std::span<const Token> prompt,
                           size_t* failed) {
  const int before = static_cast<int>(sequence.tokens().size());
  *failed = pieces.size();
  Assembler assembler(sequence, pieces, prompt, failed);
  const bool climbs = std::ranges::any_of(
      pieces, [](const ContextPiece& piece) { return piece.context != nullptr && piece.policy.kind == Kind::kAuto; });
  auto assembled = climbs ? assembler.Climb() : assembler.Once();
  if (!assembled) (void)sequence.Truncate(before);
  return assembled;
}

}  // namespace qkv
