// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/quality_gate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "qkv/engine/calibration.h"
#include "tests/tiny_model_fixture.h"

namespace qkv {
namespace {

using ::qkv::testing::TinyModel;

KvChoice Choice(std::string_view text) {
  const auto choice = ParseKvChoice(text);
  EXPECT_TRUE(choice) << text;
  return choice ? *choice : KvChoice{};
}

CodecPair Pair(std::string_view text) {
  const auto pair = ParseCodecPair(text);
  EXPECT_TRUE(pair) << text;
  return pair ? *pair : CodecPair{};
}

std::vector<std::string> Names(const std::vector<CodecPair>& pairs) {
  std::vector<std::string> names;
  for (const CodecPair pair : pairs) names.push_back(ToString(pair));
  return names;
}

TEST(QualityBounds, AreStricterForMoreBits) {
  double before = 0;
  for (const Preset& preset : Presets()) {
    EXPECT_GT(BoundOf(preset.codecs).kl, before) << preset.name;
    before = BoundOf(preset.codecs).kl;
  }
  EXPECT_EQ(BoundOf(Pair("f16")).kl, 0);
  EXPECT_EQ(BoundOf(Pair("i8")).kl, BoundOf(Pair("exact")).kl);
  EXPECT_EQ(BoundOf(Pair("k=i8,v=i4")).kl, BoundOf(Pair("safe")).kl);
  EXPECT_EQ(BoundOf(Pair("3")).kl, BoundOf(Pair("tiny")).kl);  // fewer bits than any preset
  EXPECT_EQ(BoundOf(Pair("3+4")).kl, BoundOf(Pair("safe")).kl);
  EXPECT_EQ(BoundOf(Choice("tokens:20/8/4")).kl, BoundOf(Pair("balanced")).kl);  // 5.05 bits
  EXPECT_EQ(BoundOf(Choice("tokens:20/8/drop")).kl, BoundOf(Pair("tiny")).kl);
}

TEST(QualityBounds, TheLadderGoesByThePresetsUpToF16) {
  EXPECT_EQ(Names(LadderAbove(Pair("tiny"))),
            Names({Pair("small"), Pair("balanced"), Pair("safe"), Pair("exact"), Pair("f16")}));
  EXPECT_EQ(Names(LadderAbove(Pair("i4"))), Names({Pair("balanced"), Pair("safe"), Pair("exact"), Pair("f16")}));
  EXPECT_EQ(Names(LadderAbove(Pair("exact"))), Names({Pair("f16")}));
  EXPECT_TRUE(LadderAbove(Pair("f16")).empty());
}

TEST(QualityBounds, TheNoiseOfTheWeightsIsNotHeldAgainstACodec) {
  QualityVerdict verdict{.kv = Pair("i8"), .kl = 5e-3, .top1 = 0.93};
  verdict.noise_top1 = 1;
  EXPECT_FALSE(verdict.Within());
  verdict.noise_kl = 3e-3;
  EXPECT_FALSE(verdict.Within());  // top-1
  verdict.noise_top1 = 0.96;
  EXPECT_TRUE(verdict.Within());
}

TEST(GateReadings, DependOnTheModelAndLeaveRoom) {
  // SmolLM2-135M, Llama-3.2-1B, Llama-2-7B.
  const HyperParams small = {.n_vocab = 49152,
                             .n_ctx_train = 8192,
                             .n_embd = 576,
                             .n_layers = 30,
                             .n_heads = 9,
                             .n_kv_heads = 3,
                             .head_dim = 64,
                             .n_ff = 1536};
  const HyperParams medium = {.n_vocab = 128256,
                              .n_ctx_train = 131072,
                              .n_embd = 2048,
                              .n_layers = 16,
                              .n_heads = 32,
                              .n_kv_heads = 8,
                              .head_dim = 64,
                              .n_ff = 8192};
  const HyperParams large = {.n_vocab = 32000,
                             .n_ctx_train = 4096,
                             .n_embd = 4096,
                             .n_layers = 32,
                             .n_heads = 32,
                             .n_kv_heads = 32,
                             .head_dim = 128,
                             .n_ff = 11008};
  EXPECT_EQ(ReadingOf(small, 1100).tokens(), 1344u);
  EXPECT_EQ(ReadingOf(medium, 1100).tokens(), 1344u);
  EXPECT_EQ(ReadingOf(large, 1100).tokens(), 320u);
  EXPECT_GE(ReadingOf(large, 1100).scored, 64u);
  for (HyperParams params : {small, large}) {
    for (int n_ctx : {0, 1, 31, 32, 33, 100, 193, 481, 4096}) {
      params.n_ctx_train = n_ctx;
      for (size_t n_tokens : {0, 1, 31, 32, 63, 64, 65, 200, 400, 962, 5000}) {
        const GateReading reading = ReadingOf(params, n_tokens);
        if (reading.scored == 0) continue;
        const size_t stretch = reading.prefix + reading.scored + 1;
        EXPECT_LE(stretch, n_tokens / reading.samples);
        EXPECT_LE(stretch, static_cast<size_t>(n_ctx));
        EXPECT_GE(reading.prefix, reading.scored);
      }
    }
  }
  EXPECT_EQ(ReadingOf(small, 63).scored, 0u);
  EXPECT_GT(ReadingOf(small, 64).scored, 0u);
}

class Gate : public testing::TinyModelTest {
 protected:
  QualityGate NewGate(std::shared_ptr<const Model> model) {
    return QualityGate(std::move(model), {.directory = dir_.path() + "/quality", .n_threads = 1});
  }
  QualityVerdict Check(QualityGate& gate, std::string_view kv) {
    const auto verdict = gate.Check(Choice(kv));
    EXPECT_TRUE(verdict) << verdict.error().message;
    return verdict ? *verdict : QualityVerdict{};
  }
};

TEST_F(Gate, AHealthyModelKeepsWhatItWasAskedFor) {
  auto gate = NewGate(Load({}));
  for (const char* kv : {"i8", "i4", "f16"}) {
    const auto choice = gate.Choose(Pair(kv));
    ASSERT_TRUE(choice) << choice.error().message;
    EXPECT_EQ(ToString(choice->kv.codecs.pair), kv);
    EXPECT_EQ(choice->verdicts.size(), 1u);
  }
}

TEST_F(Gate, TwoBandsAreMeasuredBehindTheirMatrices) {
  const auto model = Load({});
  EXPECT_FALSE(NewGate(model).Check(Pair("k=5/3,v=4")));
  std::vector<Token> tokens;
  for (int i = 0; i < 600; ++i) tokens.push_back(3 + (i * 37 + i / 7) % 256);
  auto made = Calibrate(model, tokens, 200, 1);
  ASSERT_TRUE(made) << made.error().message;
  const auto calibration = std::make_shared<const Calibration>(*std::move(made));
  const auto new_gate = [&] {
    return QualityGate(model, {.directory = dir_.path() + "/quality", .n_threads = 1, .calibration = calibration});
  };
  auto gate = new_gate(), later = new_gate(), plain = NewGate(model);
  EXPECT_GT(Check(gate, "k=5/3,v=4").kl, 0);
  EXPECT_FALSE(Check(gate, "4").known);
  EXPECT_TRUE(Check(later, "k=5/3,v=4").known);
  EXPECT_FALSE(Check(plain, "4").known) << "what was measured behind the matrices says nothing about pages without";
}

TEST_F(Gate, OutliersInAHeadLiftTheCodecUntilItIsWithinItsBound) {
  auto gate = NewGate(Load({.k_outlier = 1 << 12, .q_scale = 16}));
  const auto choice = gate.Choose(Pair("i4"));
  ASSERT_TRUE(choice) << choice.error().message;
  EXPECT_GT(choice->verdicts.size(), 1u) << choice->verdicts.front().Describe();
  for (size_t i = 0; i < choice->verdicts.size(); ++i) {
    EXPECT_EQ(choice->verdicts[i].Within(), i + 1 == choice->verdicts.size()) << choice->verdicts[i].Describe();
  }
  EXPECT_EQ(choice->kv, choice->verdicts.back().kv);
}

TEST_F(Gate, TheOutliersAreNotSeenInFullPrecision) {
  const auto logits = [&](float k_outlier) {
    const auto model = Load({.k_outlier = k_outlier, .q_scale = 16});
    const auto sequence = *Sequence::Create(model, {.n_ctx = 64, .n_threads = 1});
    const std::vector<Token> tokens = {1, 70, 80, 90, 300, 71};
    EXPECT_TRUE(sequence->Forward(tokens));
    return std::vector<float>(sequence->logits().begin(), sequence->logits().end());
  };
  EXPECT_EQ(logits(1), logits(1 << 12));
}

TEST_F(Gate, WhatWasMeasuredIsKeptByModelAndCodec) {
  const auto model = Load({});
  auto first = NewGate(model);
  const QualityVerdict measured = Check(first, "i8");
  EXPECT_FALSE(measured.known);
  EXPECT_TRUE(Check(first, "i8").known);
  auto again = NewGate(model);
  const QualityVerdict recalled = Check(again, "i8");
  EXPECT_TRUE(recalled.known);
  EXPECT_FLOAT_EQ(static_cast<float>(recalled.kl), static_cast<float>(measured.kl));
  EXPECT_EQ(recalled.Within(), measured.Within());
  EXPECT_FALSE(Check(again, "i4").known);
  auto other = NewGate(Load({.weights_seed = 2}));
  EXPECT_FALSE(Check(other, "i8").known);
  // Grouped tokens, which are another thing than their codecs.
  const QualityVerdict grouped = Check(first, "tokens:20/i8/drop");
  EXPECT_FALSE(grouped.known);
  EXPECT_GT(grouped.kl, measured.kl);
  EXPECT_TRUE(Check(again, "tokens:20/i8/drop").known);
  EXPECT_FALSE(Check(again, "tokens:20/i8/i4").known);
}

TEST_F(Gate, ADamagedEntryIsMeasuredAnew) {
  const auto model = Load({});
  auto first = NewGate(model);
  Check(first, "i8");
  const std::filesystem::directory_iterator entries(dir_.path() + "/quality");
  const std::string path = entries->path();
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const auto write = [&](const std::string& to) { std::ofstream(path, std::ios::binary) << to; };
  std::vector<std::string> damaged = {"", text.substr(0, text.size() / 2), text + "x"};
  std::string other = text;
  other[other.find("\nkl ") + 4] ^= 1;
  damaged.push_back(other);
  for (const std::string& bytes : damaged) {
    write(bytes);
    auto gate = NewGate(model);
    EXPECT_FALSE(Check(gate, "i8").known) << bytes;
  }
  write(text);
  ASSERT_EQ(::chmod(path.c_str(), 0622), 0);  // others could have written it
  auto gate = NewGate(model);
  EXPECT_FALSE(Check(gate, "i8").known);
}

TEST_F(Gate, AContextIsRefusedForItsPages) {
  for (const float k_outlier : {1.0f, static_cast<float>(1 << 12)}) {
    const auto model = Load({.k_outlier = k_outlier, .q_scale = 16});
    const auto sequence = *Sequence::Create(model, {.n_ctx = 64, .n_threads = 1, .kv = Pair("i4")});
    ASSERT_TRUE(sequence->Forward(std::vector<Token>(40, 70)));
    const auto context = sequence->Publish({});
    ASSERT_TRUE(context) << context.error().message;
    auto gate = NewGate(model);
    const Status admitted = gate.Admit(*context);
    EXPECT_EQ(admitted.has_value(), k_outlier == 1);
    if (!admitted) {
      EXPECT_EQ(admitted.error().reason, Reason::kQualityGate) << admitted.error().message;
    }
  }
}

TEST_F(Gate, AReaderThatRefinesNothingIsJudgedByTheBaseAlone) {
  const auto model = Load({});
  const auto gate_of = [&](double refine) {
    return QualityGate(model, {.directory = dir_.path() + "/quality", .n_threads = 1, .refine = refine});
  };
  auto base = gate_of(0), few = gate_of(0.999), all = gate_of(1e-9);
  const QualityVerdict of_base = Check(base, "3+4");
  EXPECT_FALSE(of_base.kv.codecs.pair.refine);
  EXPECT_TRUE(Check(base, "3").known);
  const QualityVerdict of_few = Check(few, "3+4"), of_all = Check(all, "3+4");
  EXPECT_FALSE(of_few.known);
  EXPECT_FALSE(of_all.known);
  EXPECT_LT(of_all.kl, of_base.kl / 2);
  EXPECT_LT(of_all.kl, of_few.kl);

  // What is written stays what was asked for.
  const auto choice = base.Choose(Pair("3+4"));
  ASSERT_TRUE(choice) << choice.error().message;
  EXPECT_EQ(ToString(choice->kv), "3+4");

  // A context is judged by what its reader sees of it.
  const auto sequence = *Sequence::Create(model, {.n_ctx = 64, .n_threads = 1, .kv = Pair("3+4")});
  ASSERT_TRUE(sequence->Forward(std::vector<Token>(40, 70)));
  const auto context = sequence->Publish({});
  ASSERT_TRUE(context) << context.error().message;
  auto reader = gate_of(0.25);
  ASSERT_TRUE(reader.Admit(*context));
  EXPECT_TRUE(Check(reader, "3+4").known);
}

TEST_F(Gate, AContinuationIsComparedBehindTheReadersMatrices) {
  const auto model = Load({});
  std::vector<Token> tokens;
  for (int i = 0; i < 600; ++i) tokens.push_back(3 + (i * 37 + i / 7) % 256);
  auto made = Calibrate(model, tokens, 200, 1);
  ASSERT_TRUE(made) << made.error().message;
  const auto calibration = std::make_shared<const Calibration>(*std::move(made));
  for (const char* kv : {"8", "k=5/3,v=4"}) {
    SCOPED_TRACE(kv);
    SequenceOptions options{.n_ctx = 128, .n_threads = 1, .kv = Pair(kv)};
    options.calibration = calibration;
    const auto sequence = *Sequence::Create(model, options);
    ASSERT_TRUE(sequence->Forward(std::span(tokens).first(70)));
    const auto context = sequence->Publish({});
    ASSERT_TRUE(context) << context.error().message;
    const QualityGate with(model, {.n_threads = 1, .calibration = calibration});
    const auto score = with.CompareContinuation(*context, 5);
    ASSERT_TRUE(score) << score.error().message;
    EXPECT_GT(score->kl_mean(), 0);
    if (std::string_view(kv) == "8") {
      EXPECT_LT(score->kl_mean(), 1e-3);
    }
    EXPECT_FALSE(NewGate(model).CompareContinuation(*context, 5));
  }
}

TEST_F(Gate, AContinuationOverExactPagesIsTheSame) {
  for (const char* kv : {"f16", "i4"}) {
    const auto model = Load({.k_outlier = 1 << 12, .q_scale = 16});
    const auto sequence = *Sequence::Create(model, {.n_ctx = 128, .n_threads = 1, .kv = Pair(kv)});
    std::vector<Token> tokens;
    for (int i = 0; i < 70; ++i) tokens.push_back(3 + (i * 37) % 256);
    ASSERT_TRUE(sequence->Forward(tokens));
    const auto context = sequence->Publish({});
    ASSERT_TRUE(context) << context.error().message;
    const auto score = NewGate(model).CompareContinuation(*context, 5);
    ASSERT_TRUE(score) << score.error().message;
    ASSERT_EQ(score->n(), 5u);
    if (std::string_view(kv) == "f16") {
      EXPECT_LT(score->kl_mean(), 1e-6);
      EXPECT_EQ(score->same_top, 5u);
    } else {
      EXPECT_GT(score->kl_mean(), 1e-3);
    }
  }
}

}  // namespace
}  // namespace qkv
