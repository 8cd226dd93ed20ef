// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// The program's --quality-gate in flows whose codecs a limit chooses, and --calibration-tokens at a handoff, on tiny
// models.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "qkv/broker/client.h"
#include "tests/process.h"
#include "tests/tiny_model.h"

namespace qkv::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Json = nlohmann::json;
using Args = std::vector<std::string>;

constexpr auto kPatience = std::chrono::seconds(60);
// What 16 pages of the tiny model take: 2 layers x 2 KV heads x 2 sides x 32 channels of 16 bits. In half of that k=6,v=5
// has room (with a scale of 16 bits per row, 6 bits per value), and 8 (8.5 bits) has not.
constexpr int kTokens = 512;
constexpr int kF16Bytes = kTokens * 256 * 16 / 8;
constexpr int kHalf = kF16Bytes / 2;

struct Ran {
  int status = -1;
  std::string output;
  std::string errors;
};

// With a cache of its own, so that every gate measures.
class QualityFlags : public ::testing::Test {
 protected:
  std::unique_ptr<Process> Start(Args args) const {
    args.insert(args.begin(), {"/usr/bin/env", "XDG_CACHE_HOME=" + dir_.path() + "/cache", QKV_PROGRAM});
    return Process::Start(args);
  }
  Ran Run(Args args, const Args& more = {}) const {
    args.insert(args.end(), more.begin(), more.end());
    const auto process = Start(std::move(args));
    Ran ran;
    ran.status = process->Wait(kPatience);
    ran.output = process->output();
    ran.errors = process->errors();
    return ran;
  }
  std::string Path(const std::string& name) const { return dir_.path() + "/" + name; }
  void WriteModel(float k_outlier) const {
    WriteTinyModel({.k_outlier = k_outlier, .q_scale = 16, .chat_template = "<|im_start|>{{ messages }}"}, model_);
  }

  TemporaryFolder dir_;
  const std::string model_ = Path("tiny.gguf");
};

// --- flows ----------------------------------------------------------------------------------------------------------

class FlowLimit : public QualityFlags {
 protected:
  Ran RunWith(int max_bytes, const Args& more) const {
    std::ofstream(Path("flow.yaml")) << "n_ctx: " << kTokens
                                     << "\nkv: f16\nagents:\n  - {name: a, prompt: one, max_tokens: 3, max_bytes: "
                                     << max_bytes << "}\n  - {name: b, inherits: a, prompt: two, max_tokens: 3}\n";
    return Run({"run", Path("flow.yaml"), "-m", model_, "-q", "-t", "1"}, more);
  }
};

TEST_F(FlowLimit, ThatLeavesOnlyCodecsThatHurtTheModelIsRefused) {
  WriteModel(1 << 12);
  for (const char* compare : {"", "--compare"}) {
    const Ran refused = RunWith(kHalf, *compare == '\0' ? Args{} : Args{compare});
    EXPECT_EQ(refused.status, 2);
    EXPECT_THAT(refused.output, IsEmpty()) << "it does not start";
    EXPECT_THAT(refused.errors,
                AllOf(HasSubstr("agent 'a': codec 'k=6,v=5'"), HasSubstr(std::to_string(kHalf)), HasSubstr("KL "),
                      HasSubstr("top-1 "),
                      HasSubstr(fmt::format("'f16' does not, and takes {} bytes for 512 tokens", kF16Bytes)),
                      HasSubstr("raise max_bytes")));
  }
  const Ran warned = RunWith(kHalf, {"--quality-gate", "warn"});
  EXPECT_EQ(warned.status, 0) << warned.errors;
  EXPECT_THAT(warned.errors, AllOf(HasSubstr("agent 'a': codec 'k=6,v=5'"), HasSubstr("hurts this model: KL ")));
  const Ran off = RunWith(kHalf, {"--quality-gate", "off"});
  EXPECT_EQ(off.status, 0);
  EXPECT_THAT(off.errors, IsEmpty());
}

TEST_F(FlowLimit, ThatLeavesRoomForExactPagesIsKept) {
  WriteModel(1 << 12);
  const Ran ran = RunWith(kF16Bytes, {});
  EXPECT_EQ(ran.status, 0);
  EXPECT_THAT(ran.errors, IsEmpty());
}

TEST_F(FlowLimit, IsKeptOnAHealthyModel) {
  WriteModel(1);
  const Ran ran = RunWith(kHalf, {});
  EXPECT_EQ(ran.status, 0);
  EXPECT_THAT(ran.errors, IsEmpty());
}

TEST_F(FlowLimit, ThatNoCodecsKeepIsTheRunsToReport) {
  WriteModel(1 << 12);
  const Ran ran = RunWith(1000, {});
  EXPECT_EQ(ran.status, 1);
  EXPECT_THAT(ran.errors, AllOf(HasSubstr("agent 'a': a context of 512 tokens takes"), HasSubstr("limit 1000")));
}

// --- calibration tokens ---------------------------------------------------------------------------------------------

class CalibrationTokens : public QualityFlags {
 protected:
  void SetUp() override {
    WriteModel(1);
    broker_ = Start({"broker", "--socket", socket_});
    ASSERT_TRUE(Eventually([&] { return BrokerClient::Connect(socket_).has_value(); }, kPatience));
  }
  // In `kv`, by a reader or a writer with `more`.
  Args With(Args args, const std::string& kv, const Args& more = {}) const {
    args.insert(args.end(), {"-m", model_, "-c", "512", "-t", "1", "--raw", "--quality-gate", "off", "--kv", kv});
    args.insert(args.end(), more.begin(), more.end());
    return args;
  }
  void Publish(const std::string& kv, const Args& more = {}) const {
    const Ran ran = Run(With({"publish", "--name", "story", "--socket", socket_, "-p", kStory}, kv, more));
    ASSERT_EQ(ran.status, 0) << ran.errors;
  }
  Args Attach(const std::string& kv, const Args& more) const {
    Args args = {"attach", "story",        "--socket", socket_,          "-p", kQuestion, "-n",
                 "6",      "--ignore-eos", "--json",   "--logits-digest"};
    return With(std::move(args), kv, more);
  }
  static Json Parsed(const Ran& ran) {
    EXPECT_EQ(ran.status, 0) << ran.errors;
    Json json = Json::parse(ran.output, nullptr, false);
    EXPECT_FALSE(json.is_discarded()) << ran.output;
    return json.is_discarded() ? Json::object() : json;
  }

  // What `flags` read and write in `kv`: within the bound, beyond it, and that it is an answer to the text then.
  void ExpectJudged(const std::string& kv, const Args& flags) const {
    const auto attach = [&](const char* most, const char* on_miss = "text") {
      Args more = {"--calibration-tokens", "4", "--calibration-kl", most, "--on-miss", on_miss};
      more.insert(more.end(), flags.begin(), flags.end());
      return Run(Attach(kv, more));
    };
    const Ran within = attach("1e6");
    const Json attached = Parsed(within);
    EXPECT_EQ(attached.value("mode", ""), "attach");
    ASSERT_TRUE(attached.contains("calibration")) << within.output;
    EXPECT_EQ(attached["calibration"]["tokens"], 4);
    EXPECT_GT(attached["calibration"]["kl_mean"], 0);
    EXPECT_GE(attached["calibration"]["top1"], 0);
    EXPECT_LE(attached["calibration"]["top1"], 1);
    EXPECT_THAT(within.errors, AllOf(HasSubstr("4 tokens over its pages and over exact ones: mean KL "),
                                     HasSubstr("same first choice"), Not(HasSubstr("read as text"))));

    const Ran beyond = attach("0");
    const Json text = Parsed(beyond);
    EXPECT_EQ(text.value("mode", ""), "text");
    EXPECT_EQ(text.value("reason", ""), "quality_gate");
    EXPECT_THAT(text.value("reason_detail", ""), HasSubstr("mean KL "));
    EXPECT_EQ(text["calibration"], attached["calibration"]) << "the same pages, the same tokens";
    EXPECT_THAT(beyond.errors, HasSubstr("read as text (quality_gate)"));
    Args more = {"--json", "--logits-digest", "-n", "6", "--ignore-eos"};
    more.insert(more.end(), flags.begin(), flags.end());
    const Json cold = Parsed(Run(With({"generate", "-p", std::string(kStory) + kQuestion}, kv, more)));
    EXPECT_EQ(text["token_ids"], cold["token_ids"]);
    EXPECT_EQ(text["logits_digest"], cold["logits_digest"]);
    EXPECT_NE(text["logits_digest"], attached["logits_digest"]);

    const Ran failed = attach("0", "fail");
    EXPECT_EQ(failed.status, 2);
    EXPECT_THAT(failed.errors, HasSubstr("(quality_gate)"));
  }

  static constexpr char kStory[] =
      "The_mill_of_[marker-107]_stood_by_the_river_for_two_hundred_years,_and_nobody_knew_who_had_built_it.";
  static constexpr char kQuestion[] = "[marker-109]";  // one token, whatever stands before it
  const std::string socket_ = Path("broker.sock");
  std::unique_ptr<Process> broker_;
};

TEST_F(CalibrationTokens, SayHowMuchPagesChangeAndReadTheTextBeyondTheBound) {
  Publish("4");
  ExpectJudged("4", {});
}

TEST_F(CalibrationTokens, OverExactPagesAreTheSame) {
  Publish("f16");
  const Ran ran = Run(Attach("f16", {"--calibration-tokens", "4", "--calibration-kl", "1e-6"}));
  const Json json = Parsed(ran);
  EXPECT_EQ(json.value("mode", ""), "attach") << ran.errors;
  EXPECT_LT(json["calibration"]["kl_mean"], 1e-6);
  EXPECT_EQ(json["calibration"]["top1"], 1);
}

TEST_F(CalibrationTokens, AreReadBehindTheMatricesOfBalancedKeys) {
  std::ofstream text(Path("text"));
  for (int i = 0; i < 300; ++i) text << "Line_" << i << "_says_" << (i * 7919) % 1000 << ".\n";
  text.close();
  const Ran made = Run({"calibrate", "-m", model_, "--text", Path("text"), "-t", "1"});
  ASSERT_EQ(made.status, 0) << made.errors;
  for (const char* kv : {"4", "k=5/3,v=4"}) {
    SCOPED_TRACE(kv);
    Publish(kv, {"--bal"});
    ExpectJudged(kv, {"--bal"});
  }
}

TEST_F(CalibrationTokens, AreForCommandsThatReadContexts) {
  const Ran ran = Run(With({"generate", "-p", kStory}, "4", {"--calibration-tokens", "4"}));
  EXPECT_EQ(ran.status, 2);
  EXPECT_THAT(ran.errors, HasSubstr("--calibration-tokens"));
}

}  // namespace
}  // namespace qkv::testing
