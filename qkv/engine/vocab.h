// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Text to tokens and back, chat turns, and sampling: libllama's vocabulary, templates and samplers behind a small face.
// A Vocab borrows the Model, which must outlive it; const calls are safe from any thread. TextStream and Sampler belong
// to one thread.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/engine/model.h"

namespace qkv {

using Token = int32_t;

class Vocab {
 public:
  explicit Vocab(const Model& model);

  // `with_special`: text such as "<|im_end|>" becomes the control token. `add_bos`: as the model asks for at the start
  // of a sequence (models that want none get none).
  Result<std::vector<Token>> Tokenize(std::string_view text, bool add_bos, bool with_special) const;
  std::string Piece(Token token) const;  // raw bytes; may be part of a character. "" for control tokens
  std::string Text(std::span<const Token> tokens) const;
  bool IsEndOfGeneration(Token token) const;
  std::optional<Token> BeginningOfText() const;  // the model's token for it (BOS), if it has one

  // A conversation's first turn: optional system message, user message, and the assistant's header. Control tokens inside the
  // messages themselves are not interpreted. Falls back to plain text when the model has no chat template.
  Result<std::vector<Token>> FirstTurn(std::string_view system, std::string_view user) const;
  // What follows an assistant turn that is still open (no end-of-turn token in the context): its closing, the next user
  // message, the assistant's header.
  Result<std::vector<Token>> NextTurn(std::string_view user) const;
  // A system message alone, as it stands at the start of a conversation; no turn is open behind it. Empty when the model's
  // template has no place for one before a user's message.
  Result<std::vector<Token>> SystemTurn(std::string_view system) const;
  bool has_chat_template() const;

 private:
  const Model& model_;
};

// Joins token pieces to text without ever returning part of a UTF-8 character; bytes that can't become one are replaced
// by U+FFFD.
class TextStream {
 public:
  explicit TextStream(const Vocab& vocab) : vocab_(vocab) {}
  std::string Push(Token token);  // what has become complete
  std::string Finish();           // what is left

 private:
  const Vocab& vocab_;
  std::string pending_;
};

struct Sampling {
  float temperature = 0;  // 0: greedy
  int top_k = 40;         // 0: off
  float top_p = 0.95f;    // 1: off
  float min_p = 0.05f;    // 0: off
  uint32_t seed = 0;
  std::string Describe() const;  // "greedy", or "temp=0.8 top_k=40 top_p=0.95 min_p=0.05 seed=1"
};

class Sampler {
 public:
  explicit Sampler(const Sampling& sampling);
  ~Sampler();
  Sampler(Sampler&&) noexcept;
  Token Sample(std::span<const float> logits);  // [n_vocab]

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkv
