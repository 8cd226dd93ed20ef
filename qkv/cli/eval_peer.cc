// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/eval_peer.h"

namespace qkv::cli {

Result<std::unique_ptr<PeerProbe>> PeerProbe::Read(Peer& peer, std::span<const Token> tokens, int n_first, int n_vocab,
                                                   int n_threads) {
  auto probe = std::unique_ptr<PeerProbe>(new PeerProbe(peer, tokens, n_first, n_threads));
  QKV_ASSIGN_OR_RETURN(auto logits, probe->Logits("f16"));
  probe->reference_ = std::make_unique<ReferenceLogits>(std::move(logits), n_vocab);
  return probe;
}

Result<SampleScore> PeerProbe::Score(const std::string& cache_type) {
  QKV_ASSIGN_OR_RETURN(const auto logits, Logits(cache_type));
  return reference_->ScoreAll(logits, std::span(tokens_).last(reference_->rows()));
}

Result<std::vector<float>> PeerProbe::Logits(const std::string& cache_type) {
  const auto read = std::span(tokens_).first(tokens_.size() - 1);
  PeerOptions options;
  options.n_ctx = static_cast<int>(read.size());
  options.n_threads = n_threads_;
  options.flash_attention = true;
  options.cache_type = cache_type;
  QKV_RETURN_IF_ERROR(peer_.Reset(options));
  QKV_RETURN_IF_ERROR(peer_.Forward(read.first(n_first_)));
  QKV_RETURN_IF_ERROR(peer_.Forward(read.subspan(n_first_), /*all_logits=*/true));
  return std::vector<float>(peer_.all_logits().begin(), peer_.all_logits().end());
}

}  // namespace qkv::cli
