// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For tests with tiny models (tests/tiny_model.h): each is loaded from a file in a folder that the test has to itself.

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "qkv/base/test_support.h"
#include "qkv/engine/model.h"
#include "tests/tiny_model.h"

namespace qkv::testing {

class TinyModelTest : public ::testing::Test {
 protected:
  std::shared_ptr<const Model> Load(const TinyModel& tiny) {
    const std::string path = fmt::format("{}/model-{}.gguf", dir_.path(), ++n_models_);
    WriteTinyModel(tiny, path);
    auto model = Model::Load(path);
    EXPECT_TRUE(model) << model.error().message;
    return model ? *model : nullptr;
  }
  // Bytes, as its vocabulary has them.
  static std::vector<Token> SomeTokens(int n) {
    std::vector<Token> tokens;
    for (int i = 0; i < n; ++i) tokens.push_back(3 + (i * 37 + i / 7) % 256);
    return tokens;
  }

  test::TemporaryFolder dir_;

 private:
  int n_models_ = 0;
};

}  // namespace qkv::testing
