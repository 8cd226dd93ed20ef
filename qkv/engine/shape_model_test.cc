// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/shape_model.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "qkv/engine/peer.h"
#include "qkv/engine/sequence.h"

namespace qkv {
namespace {

std::string TempFile() {
  std::string path = ::testing::TempDir() + "shape-XXXXXX";
  const int fd = ::mkstemp(path.data());
  EXPECT_GE(fd, 0);
  ::close(fd);
  return path;
}

TEST(ShapeModel, RunsHereAndInLibllamaAndBothAgree) {
  const std::string path = TempFile();
  const auto shape = FindModelShape("tiny");
  ASSERT_TRUE(shape);
  ASSERT_TRUE(WriteShapeModel(*shape, path));
  const auto model = Model::Load(path);
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ((*model)->geometry(), (Geometry{shape->n_layers, shape->n_kv_heads, shape->head_dim}));
  std::vector<Token> tokens;
  for (int i = 0; i < 60; ++i) tokens.push_back(259 + i * 7 % 200);
  auto sequence = Sequence::Create(*model, {});
  ASSERT_TRUE(sequence && (*sequence)->Forward(tokens));
  auto peer = Peer::Load(path);
  ASSERT_TRUE(peer && (*peer)->Reset({}) && (*peer)->Forward(tokens));
  double error = 0, size = 0;
  for (size_t i = 0; i < (*peer)->logits().size(); ++i) {
    const double theirs = (*peer)->logits()[i], ours = (*sequence)->logits()[i];
    ASSERT_TRUE(std::isfinite(ours));
    error += (ours - theirs) * (ours - theirs);
    size += theirs * theirs;
  }
  EXPECT_LT(std::sqrt(error / size), 0.05);  // both round activations to 8 bits, in another order
  std::filesystem::remove(path);
}

TEST(ShapeModel, NamesTheShapesThereAre) {
  const auto shape = FindModelShape("llama-2-70b");
  ASSERT_FALSE(shape);
  EXPECT_NE(shape.error().message.find("llama-2-7b, llama-3.2-1b"), std::string::npos) << shape.error().message;
}

TEST(ShapeModel, LeavesNoFileWhereItCannotWrite) {
  const auto written = WriteShapeModel(*FindModelShape("tiny"), "/no-such-directory/model.gguf");
  ASSERT_FALSE(written);
  EXPECT_EQ(written.error().code, Code::kNotFound) << written.error().message;
}

}  // namespace
}  // namespace qkv
