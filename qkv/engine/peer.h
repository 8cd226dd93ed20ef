// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// libllama running the same GGUF with its own graph and its own KV cache: the oracle of the tests and the peer of the
// benchmarks, built from the same source as our ggml. Nothing of the product goes through it. One thread at a time.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "qkv/engine/vocab.h"

namespace qkv {

struct PeerOptions {
  int n_ctx = 4096;
  int n_threads = 2;
  int n_batch = 512;
  bool flash_attention = false;
  std::string cache_type = "f16";  // "f16", "q8_0", "q4_0"; quantized types need flash attention for V
};

class Peer {
 public:
  // Loads the model as libllama does by default (mapped, repacked where it knows how).
  static Result<std::unique_ptr<Peer>> Load(const std::string& path);
  // Another one with the same weights and, so far, no context.
  std::unique_ptr<Peer> Twin() const;
  ~Peer();

  // A new context with an empty cache; replaces the one before.
  Status Reset(const PeerOptions& options);
  // Reads tokens; logits of the last one, or of every one.
  Status Forward(std::span<const Token> tokens, bool all_logits = false);
  // An empty cache becomes one of `depth` tokens, by copies of the cache that `tokens` give, which libllama moves to their
  // positions: for measuring speed without the time to read so many.
  Status FillWithCopies(std::span<const Token> tokens, int depth);
  Status Truncate(int n_tokens);
  std::span<const float> logits() const;      // [n_vocab]
  std::span<const float> all_logits() const;  // [tokens of the last Forward][n_vocab], after all_logits
  // The whole sequence's state, as its server saves and restores it.
  Result<std::vector<uint8_t>> SaveState();
  Status RestoreState(std::span<const uint8_t> state);

 private:
  struct Impl;
  explicit Peer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The same model with other weights, by libllama's own quantizer. Types: "f32", "q4_0", "q4_1", "q8_0".
Status WriteRequantizedModel(const std::string& path, const std::string& type, const std::string& to);

}  // namespace qkv
