// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For tests only: the default model, and real text in tokens.

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "qkv/engine/model.h"
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

}  // namespace qkv::testing
