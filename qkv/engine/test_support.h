// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For tests only: the default model, real text in tokens, and the few things that every test of a sequence does. Whatever
// fails is the test's failure.

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "qkv/engine/model.h"
#include "qkv/engine/sequence.h"
#include "qkv/engine/vocab.h"

namespace qkv::testing {

inline std::string TestModelPath() {
  const char* given = std::getenv("QKVSHARE_MODEL");
  return given != nullptr && *given != '\0' ? given : QKV_TEST_MODEL;
}

// Loaded once per test program.
inline std::shared_ptr<const Model> TestModel() {
  static const auto model = [] {
    auto loaded = Model::Load(TestModelPath());
    if (!loaded) ADD_FAILURE() << loaded.error().message;
    return loaded ? *loaded : nullptr;
  }();
  return model;
}

// `n` tokens of the long report's source text, from token `first` on.
inline std::vector<Token> SourceTokens(size_t first, size_t n) {
  static const std::vector<Token> all = [] {
    std::ifstream in(QKV_SOURCE_DIR "/examples/long_report_source.txt", std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    auto tokens = Vocab(*TestModel()).Tokenize(text, false, false);
    return tokens ? *tokens : std::vector<Token>{};
  }();
  std::vector<Token> tokens;
  for (size_t i = 0; i < n; ++i) tokens.push_back(all.at((first + i) % all.size()));
  return tokens;
}

// Of 2048 tokens at most, in codecs and groups as `--kv` names them.
inline std::unique_ptr<Sequence> NewSequence(std::string_view kv, SequenceOptions options = {},
                                             std::shared_ptr<const Model> model = TestModel()) {
  const auto choice = ParseKvChoice(kv);
  EXPECT_TRUE(choice) << choice.error().message;
  options.n_ctx = 2048;
  options.kv = choice->codecs;
  options.groups = choice->groups;
  auto sequence = Sequence::Create(std::move(model), options);
  EXPECT_TRUE(sequence) << sequence.error().message;
  return *std::move(sequence);
}

inline void Read(Sequence& sequence, std::span<const Token> tokens) {
  const Status status = sequence.Forward(tokens);
  ASSERT_TRUE(status) << status.error().message;
}

inline std::vector<float> Logits(const Sequence& sequence) {
  return {sequence.logits().begin(), sequence.logits().end()};
}

// As a broker would hand it on: the card through its bytes.
inline Context PublishedBy(Sequence& sequence) {
  auto context = sequence.Publish({});
  EXPECT_TRUE(context) << context.error().message;
  if (!context) return {};
  auto card = ParseCard(SerializeCard(context->card));
  EXPECT_TRUE(card) << card.error().message;
  if (card) context->card = *std::move(card);
  return *std::move(context);
}

// What its pages hold, wherever they are.
inline std::vector<uint64_t> Checksums(const Context& context) {
  std::vector<uint64_t> sums;
  for (const auto& span : context.card.spans()) {
    for (uint32_t i = 0; i < span.n_pages(); ++i) {
      sums.push_back(context.segments[span.segment()]->pages()[span.first_page() + i].checksum);
      if (span.refinement_segment() == 0) continue;
      const auto& refinement = context.segments[span.refinement_segment() - 1];
      sums.push_back(refinement->pages()[span.refinement_first_page() + i].checksum);
    }
  }
  return sums;
}

}  // namespace qkv::testing
