// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// The spot check of `verify --verify=deep`: passes what a producer made, in every codec, and finds pages that are whole, and
// have the right checksums, but hold something else than the card says.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qkv/engine/deep_verify.h"
#include "qkv/engine/test_support.h"

namespace qkv {
namespace {

using ::testing::SizeIs;
using testing::SourceTokens;
using testing::TestModel;

constexpr int kTokens = 130;

Context Made(CodecPair kv, const std::vector<Token>& tokens, int pieces = 1) {
  SequenceOptions options;
  options.kv = kv;
  auto sequence = Sequence::Create(TestModel(), options);
  EXPECT_TRUE(sequence);
  const size_t piece = tokens.size() / static_cast<size_t>(pieces);
  for (int i = 0; i < pieces; ++i) {
    EXPECT_TRUE((*sequence)->Forward(std::span(tokens).subspan(static_cast<size_t>(i) * piece, piece)));
  }
  auto context = (*sequence)->Publish({});
  EXPECT_TRUE(context);
  return *std::move(context);
}

std::vector<DeepCheck> Checked(const Context& context, int n = 32) {
  auto checks = VerifyDeep(TestModel(), context, n, 2);
  EXPECT_TRUE(checks) << checks.error().message;
  return checks ? *checks : std::vector<DeepCheck>{};
}
std::string Text(const DeepCheck& c) {
  return fmt::format("{}: K {:.2e}/{:.2e} V {:.2e}/{:.2e} KL {:.2e}/{:.2e}", c.where, c.k_error, c.k_limit, c.v_error,
                     c.v_limit, c.kl, c.kl_limit);
}

class DeepVerify : public ::testing::TestWithParam<const char*> {};

TEST_P(DeepVerify, PassesWhatTheModelMade) {
  const CodecPair kv = *ParseCodecPair(GetParam());
  for (const int pieces : {1, 6}) {
    const auto checks = Checked(Made(kv, SourceTokens(40, kTokens), pieces));
    ASSERT_THAT(checks, SizeIs(2));
    for (const DeepCheck& check : checks) {
      EXPECT_TRUE(check.ok()) << pieces << " pieces, " << Text(check);
    }
  }
}

TEST_P(DeepVerify, FindsPagesOfAnotherTextUnderTheseTokens) {
  const CodecPair kv = *ParseCodecPair(GetParam());
  Context context = Made(kv, SourceTokens(40, kTokens));
  const auto other = SourceTokens(1000, kTokens);
  context.card.mutable_token_ids()->Assign(other.begin(), other.end());
  for (const DeepCheck& check : Checked(context)) {
    EXPECT_FALSE(check.ok()) << Text(check);
  }
}

TEST_P(DeepVerify, FindsALastWordThatWasExchanged) {
  const CodecPair kv = *ParseCodecPair(GetParam());
  Context context = Made(kv, SourceTokens(40, kTokens));
  context.card.set_token_ids(kTokens - 1, SourceTokens(2000, 1)[0]);
  const auto checks = Checked(context, 8);
  ASSERT_THAT(checks, SizeIs(2));
  EXPECT_TRUE(checks[0].ok()) << Text(checks[0]);
  EXPECT_FALSE(checks[1].ok()) << Text(checks[1]);
}

INSTANTIATE_TEST_SUITE_P(Codecs, DeepVerify,
                         ::testing::Values("f16", "i8", "i8-channel", "i8-tensor", "i4", "i4z", "8", "4", "4+4"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::ranges::replace_if(
                               name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
                           return name;
                         });

TEST(DeepVerify, ChecksPagesFirst) {
  const std::vector<Token> tokens = SourceTokens(40, 100);
  Context context = Made({CodecId::kI8, CodecId::kI8}, tokens);
  std::vector<std::byte> bytes(context.segments[0]->bytes());
  ASSERT_EQ(::pread(context.segments[0]->fd().get(), bytes.data(), bytes.size(), 0),
            static_cast<ssize_t>(bytes.size()));
  bytes[context.segments[0]->pages()[2].offset] ^= std::byte{1};
  auto damaged = Segment::Open(*SealedMemfd("qkv-test", bytes));
  ASSERT_TRUE(damaged);
  context.segments[0] = *damaged;
  const auto checks = VerifyDeep(TestModel(), context, 16, 2);
  ASSERT_FALSE(checks);
  EXPECT_EQ(checks.error().reason, Reason::kChecksum);
}

TEST(DeepVerify, AShortContextIsReadAgainWhole) {
  const auto checks = Checked(Made({CodecId::kI8, CodecId::kI8}, SourceTokens(40, 20)));
  ASSERT_THAT(checks, SizeIs(1));
  EXPECT_EQ(checks[0].where, "first 20 tokens");
  EXPECT_TRUE(checks[0].ok());
  EXPECT_FALSE(VerifyDeep(TestModel(), Made({CodecId::kI8, CodecId::kI8}, SourceTokens(40, 1)), 16, 2));
}

}  // namespace
}  // namespace qkv
