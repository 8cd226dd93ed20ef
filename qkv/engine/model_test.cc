// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/model.h"

#include <gguf.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "qkv/engine/test_support.h"

namespace qkv {
namespace {

using ::testing::HasSubstr;

// A file that is gone when the test is.
class ScratchFile {
 public:
  explicit ScratchFile(const std::string& name)
      : path_(std::filesystem::path(::testing::TempDir()) / (std::to_string(::getpid()) + "-" + name)) {}
  ~ScratchFile() { std::filesystem::remove_all(path_); }
  std::string path() const { return path_.string(); }
  void Write(std::string_view bytes) const { std::ofstream(path_, std::ios::binary).write(bytes.data(), bytes.size()); }

 private:
  std::filesystem::path path_;
};

Error LoadError(const std::string& path) {
  const auto model = Model::Load(path);
  EXPECT_FALSE(model) << "loaded " << path;
  return model ? Error{} : model.error();
}

TEST(Model, KnowsItsShape) {
  const HyperParams& p = testing::TestModel()->params();
  EXPECT_EQ(p.architecture, "llama");  // SmolLM2-135M: 30 layers, 9 heads on 3 KV heads, 64 wide
  EXPECT_EQ(p.n_layers, 30);
  EXPECT_EQ(p.n_heads, 9);
  EXPECT_EQ(p.n_kv_heads, 3);
  EXPECT_EQ(p.head_dim, 64);
  EXPECT_EQ(p.n_embd, 576);
  EXPECT_EQ(p.n_vocab, 49152);
  EXPECT_FLOAT_EQ(p.rope_base, 100000.0f);
}

TEST(Model, IdentityNamesEverythingThatACardMustAgreeWith) {
  const ModelIdentity& id = testing::TestModel()->identity();
  EXPECT_EQ(id.architecture(), "llama");
  EXPECT_EQ(id.layers_size(), 30);
  EXPECT_EQ(id.weights_digest().size(), 32u);
  EXPECT_EQ(id.tokenizer_digest().size(), 32u);
  EXPECT_EQ(id.chat_template_digest().size(), 32u);
  EXPECT_EQ(id.rope().layout(), ::qkvshare::v1::Rope::INTERLEAVED);
  EXPECT_TRUE(CompareIdentity(id, id).empty());
}

TEST(Model, SaysWhatIsWrongWithAFile) {
  EXPECT_EQ(LoadError("no/such/model.gguf").code, Code::kNotFound);
  EXPECT_EQ(LoadError(::testing::TempDir()).code, Code::kInvalidArgument);

  const ScratchFile file("bad.gguf");
  file.Write("");
  EXPECT_THAT(LoadError(file.path()).message, HasSubstr("not a GGUF file"));
  file.Write("just some text that is no model at all");
  EXPECT_THAT(LoadError(file.path()).message, HasSubstr("not a GGUF file"));
  file.Write("GGUF");
  EXPECT_THAT(LoadError(file.path()).message, HasSubstr("broken or truncated"));
}

TEST(Model, RefusesEveryTruncationOfAFile) {
  std::ifstream in(testing::TestModelPath(), std::ios::binary);
  std::string bytes(8 << 20, '\0');
  in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  const ScratchFile file("truncated.gguf");
  for (const size_t n : {5, 8, 24, 100, 1000, 100'000, 1'700'000, 4 << 20, 8 << 20}) {
    file.Write(std::string_view(bytes).substr(0, n));
    const Error error = LoadError(file.path());
    EXPECT_EQ(error.code, Code::kInvalidArgument) << n << " bytes";
    EXPECT_THAT(error.message, HasSubstr("truncated")) << n << " bytes";
  }
}

TEST(Model, NamesAnArchitectureThatItDoesNotRun) {
  const ScratchFile file("mamba.gguf");
  gguf_context* gguf = gguf_init_empty();
  gguf_set_val_str(gguf, "general.architecture", "mamba");
  ASSERT_TRUE(gguf_write_to_file(gguf, file.path().c_str(), false));
  gguf_free(gguf);
  const Error error = LoadError(file.path());
  EXPECT_EQ(error.code, Code::kIncompatible);
  EXPECT_THAT(error.message, HasSubstr("'mamba' is not supported"));
}

TEST(Model, NamesAMissingKeyAndAMissingTensor) {
  const ScratchFile file("hollow.gguf");
  gguf_context* gguf = gguf_init_empty();
  gguf_set_val_str(gguf, "general.architecture", "llama");
  ASSERT_TRUE(gguf_write_to_file(gguf, file.path().c_str(), false));
  EXPECT_THAT(LoadError(file.path()).message, HasSubstr("'llama.context_length' is missing"));
  gguf_set_val_u32(gguf, "llama.context_length", 512);
  gguf_set_val_u32(gguf, "llama.embedding_length", 64);
  gguf_set_val_u32(gguf, "llama.block_count", 1);
  gguf_set_val_u32(gguf, "llama.feed_forward_length", 128);
  gguf_set_val_u32(gguf, "llama.attention.head_count", 2);
  ASSERT_TRUE(gguf_write_to_file(gguf, file.path().c_str(), false));
  EXPECT_THAT(LoadError(file.path()).message, HasSubstr("'token_embd.weight' is missing"));
  gguf_set_val_u32(gguf, "llama.attention.head_count", 0);
  ASSERT_TRUE(gguf_write_to_file(gguf, file.path().c_str(), false));
  EXPECT_THAT(LoadError(file.path()).message, HasSubstr("'llama.attention.head_count' is 0"));
  gguf_free(gguf);
}

}  // namespace
}  // namespace qkv
