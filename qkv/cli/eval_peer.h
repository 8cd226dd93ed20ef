// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// libllama's quantized KV cache against its own f16 one, on the same file, with the same text. It has no exact prefill:
// whatever it reads goes through the quantized cache at once. One thread.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "qkv/engine/peer.h"
#include "qkv/engine/quality.h"

namespace qkv::cli {

class PeerProbe {
 public:
  // Reads tokens[0, n_first) and scores the rest; the last token is only an answer. Flash attention is on in all runs,
  // since a quantized V needs it. `peer` must outlive this.
  static Result<std::unique_ptr<PeerProbe>> Read(Peer& peer, std::span<const Token> tokens, int n_first, int n_vocab,
                                                 int n_threads);
  Result<SampleScore> Score(const std::string& cache_type);

 private:
  PeerProbe(Peer& peer, std::span<const Token> tokens, int n_first, int n_threads)
      : peer_(peer), tokens_(tokens.begin(), tokens.end()), n_first_(n_first), n_threads_(n_threads) {}
  Result<std::vector<float>> Logits(const std::string& cache_type);

  Peer& peer_;
  std::vector<Token> tokens_;
  int n_first_, n_threads_;
  std::unique_ptr<ReferenceLogits> reference_;
};

}  // namespace qkv::cli
