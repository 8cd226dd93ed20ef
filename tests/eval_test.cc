// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// eval and calibrate: how samples are cut, what a resumed run measures again, and the program on a tiny model.

#include "qkv/cli/eval_log.h"
#include "qkv/cli/eval_samples.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "tests/process.h"
#include "tests/tiny_model.h"

namespace qkv::cli {
namespace {

using ::qkv::test::TemporaryFolder;
using ::qkv::testing::Process;
using ::qkv::testing::TinyModel;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Json = nlohmann::ordered_json;

std::vector<Token> Counting(int n) {
  std::vector<Token> tokens;
  for (int i = 0; i < n; ++i) tokens.push_back(i);
  return tokens;
}

TEST(EvalSamples, StretchesOfATextDoNotOverlap) {
  const auto text = Counting(100);
  const auto samples = TextSamples(text, {.samples = 3, .prefix = 20, .score = 5}, "t");
  ASSERT_TRUE(samples) << samples.error().message;
  ASSERT_EQ(samples->size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ((*samples)[i].n_prefix, 20);
    EXPECT_EQ((*samples)[i].tokens.size(), 26u);
    EXPECT_EQ((*samples)[i].tokens.front(), 33 * i);
    EXPECT_EQ((*samples)[i].tokens.back(), 33 * i + 25);
  }
  const auto too_many = TextSamples(text, {.samples = 4, .prefix = 20, .score = 5}, "t");
  ASSERT_FALSE(too_many);
  EXPECT_THAT(too_many.error().message, HasSubstr("'t' has 100 tokens; 4 samples of 26 need 104"));
}

TEST(EvalSamples, ACopySaysItsBeginningAgain) {
  const auto text = Counting(200);
  const auto samples = CopySamples(text, {.samples = 2, .prefix = 64, .score = 10}, "t");
  ASSERT_TRUE(samples) << samples.error().message;
  for (const EvalSample& sample : *samples) {
    ASSERT_EQ(sample.n_prefix, 64);
    const Token first = sample.tokens.front();
    // The last 16 tokens before what is asked for are the first of the text, and the answers are what came behind them.
    EXPECT_EQ(sample.tokens[64], first + 15);
    ASSERT_EQ(sample.tokens.size(), 64u + 10 + 1);
    for (int i = 0; i < 10; ++i) EXPECT_EQ(sample.tokens[65 + i], first + 16 + i);
  }
  EXPECT_FALSE(CopySamples(text, {.samples = 2, .prefix = 30, .score = 10}, "t"));
}

TEST(EvalSamples, TheLastNumberOfAnAnswer) {
  EXPECT_EQ(LastNumber("so 3 apples and 1,234 pears #### 42"), 42);
  EXPECT_EQ(LastNumber("it is 1,234."), 1234);
  EXPECT_EQ(LastNumber("-7.5 degrees"), -7.5);
  EXPECT_EQ(LastNumber("3, 4, 5"), 5);
  EXPECT_TRUE(std::isnan(LastNumber("none at all, sorry")));
  EXPECT_TRUE(std::isnan(LastNumber("")));
}

TEST(EvalSamples, QuestionsAreJsonLines) {
  const auto questions = ParseQuestions(
      "{\"question\": \"1+1?\", \"answer\": \"It is\\n#### 2\"}\n\n"
      "{\"question\": \"a\", \"answer\": \"#### 1,000\"}");
  ASSERT_TRUE(questions) << questions.error().message;
  ASSERT_EQ(questions->size(), 2u);
  EXPECT_EQ((*questions)[0].text, "1+1?");
  EXPECT_EQ((*questions)[1].answer, 1000);
  EXPECT_THAT(ParseQuestions("{}\n").error().message, HasSubstr("line 1"));
  EXPECT_THAT(ParseQuestions("{\"question\": \"a\", \"answer\": \"1\"}\nnonsense").error().message,
              HasSubstr("line 2"));
  EXPECT_FALSE(ParseQuestions(""));
}

class Resume : public ::testing::Test {
 protected:
  static EvalScore Score(double kl) {
    EvalScore score;
    score.score.kl = {kl, std::numeric_limits<double>::infinity()};
    score.score.same_top = 1;
    score.score.nll = 0.1;
    score.bits_per_value = 4.25;
    return score;
  }
  std::string Bytes() const {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  TemporaryFolder dir_;
  const std::string path_ = dir_.path() + "/scores";
  const Json settings_ = {{"prefix", 8}};
};

TEST_F(Resume, WhatWasScoredIsThere) {
  {
    auto log = EvalLog::Open(path_, settings_);
    ASSERT_TRUE(log) << log.error().message;
    ASSERT_TRUE(log->Add("i8", 0, "", Score(0.25)));
    ASSERT_TRUE(log->Add("i8", 1, "chain 1", Score(0.5)));
  }
  const auto log = EvalLog::Open(path_, settings_);
  ASSERT_TRUE(log) << log.error().message;
  const EvalScore* score = log->Find("i8", 0, "");
  ASSERT_NE(score, nullptr);
  EXPECT_THAT(score->score.kl, ElementsAre(0.25, std::numeric_limits<double>::infinity()));
  EXPECT_EQ(score->bits_per_value, 4.25);
  EXPECT_EQ(log->Find("i8", 1, ""), nullptr);
  EXPECT_NE(log->Find("i8", 1, "chain 1"), nullptr);
  EXPECT_FALSE(log->All("i8", 2, ""));
}

TEST_F(Resume, ALineThatWasCutShortIsMeasuredAgain) {
  {
    auto log = EvalLog::Open(path_, settings_);
    ASSERT_TRUE(log);
    ASSERT_TRUE(log->Add("i8", 0, "", Score(0.25)));
    ASSERT_TRUE(log->Add("i8", 1, "", Score(0.5)));
  }
  const std::string whole = Bytes();
  std::filesystem::resize_file(path_, whole.size() - 7);
  {
    auto log = EvalLog::Open(path_, settings_);
    ASSERT_TRUE(log) << log.error().message;
    EXPECT_NE(log->Find("i8", 0, ""), nullptr);
    EXPECT_EQ(log->Find("i8", 1, ""), nullptr);
    ASSERT_TRUE(log->Add("i8", 1, "", Score(0.5)));
  }
  EXPECT_EQ(Bytes(), whole);
}

TEST_F(Resume, OtherSettingsAndOtherFilesAreLeftAlone) {
  {
    auto log = EvalLog::Open(path_, settings_);
    ASSERT_TRUE(log);
    ASSERT_TRUE(log->Add("i8", 0, "", Score(0.25)));
  }
  const std::string whole = Bytes();
  const auto other = EvalLog::Open(path_, {{"prefix", 9}});
  ASSERT_FALSE(other);
  EXPECT_THAT(other.error().message, HasSubstr("other settings"));
  EXPECT_EQ(Bytes(), whole);
  for (const char* text : {"a letter\nto a friend\n", "no newline", "{}\n"}) {
    std::ofstream(path_, std::ios::binary) << text;
    EXPECT_FALSE(EvalLog::Open(path_, settings_)) << text;
    EXPECT_EQ(Bytes(), text);
  }
}

// The program itself, on a tiny model.
class EvalProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::WriteTinyModel({}, model_);
    std::ofstream out(text_);
    for (int i = 0; i < 300; ++i)
      out << "Line_" << i << "_says_" << (i * 7919) % 1000 << ".\n";  // a space is three bytes to it
  }
  struct Ran {
    int status = -1;
    std::string output, errors;
  };
  static Ran Run(std::vector<std::string> args) {
    args.insert(args.begin(), QKV_PROGRAM);
    const auto process = Process::Start(args);
    Ran ran;
    ran.status = process->Wait(std::chrono::seconds(60));
    ran.output = process->output();
    ran.errors = process->errors();
    return ran;
  }
  Ran Eval(std::vector<std::string> more, const char* prefix = "64", const char* score = "8") const {
    std::vector<std::string> args = {"eval", "-m", model_, "--text", text_, "--samples", "2", "-t", "1"};
    args.insert(args.end(), {"--prefix", prefix, "--score", score});
    args.insert(args.end(), more.begin(), more.end());
    return Run(args);
  }
  static Json Parsed(const Ran& ran) {
    EXPECT_EQ(ran.status, 0) << ran.errors;
    EXPECT_THAT(ran.errors, IsEmpty());
    return Json::parse(ran.output, nullptr, false);
  }
  size_t Files() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(dir_.path()), {}));
  }

  TemporaryFolder dir_;
  const std::string model_ = dir_.path() + "/tiny.gguf";
  const std::string text_ = dir_.path() + "/text";
};

TEST_F(EvalProgram, EveryProtocolHasItsFields) {
  for (const char* protocol : {"handoff", "all", "copy", "passkey", "hops"}) {
    SCOPED_TRACE(protocol);
    const Json json =
        Parsed(Eval({"--protocol", protocol, "--kv", "i8", "--kv", "i4", "--hops", "2", "--json"}, "160"));
    ASSERT_TRUE(json.is_object());
    EXPECT_EQ(json["protocol"], protocol);
    ASSERT_GE(json["results"].size(), 2u);
    for (const Json& row : json["results"]) {
      for (const char* field : {"kl_mean", "kl_se", "kl_p99", "top1", "ppl", "ppl_ref"}) {
        EXPECT_TRUE(row[field].is_number()) << field << " of " << row["kv"];
      }
      EXPECT_GE(row["kl_mean"], 0);
    }
    const bool hops = std::string_view(protocol) == "hops";
    EXPECT_EQ(json["results"][0].contains("kl_mean_once"), hops);
    EXPECT_EQ(json["results"][0].contains("recall"),
              std::string_view(protocol) == "copy" || std::string_view(protocol) == "passkey");
  }
}

TEST_F(EvalProgram, TheHeadingSaysWhatIsScored) {
  const auto heading = [&](const char* protocol) {
    const std::string output = Eval({"--protocol", protocol, "--kv", "i8", "--hops", "2"}, "160").output;
    return output.substr(0, output.find('\n'));
  };
  EXPECT_THAT(heading("handoff"), HasSubstr("prefix 160, scored 8 behind it"));
  EXPECT_THAT(heading("hops"), HasSubstr("prefix 160, scored 8 per hop"));
  EXPECT_THAT(heading("all"), HasSubstr("prefix 160, scored its second half"));
  EXPECT_THAT(heading("passkey"), HasSubstr("prefix 160, scored the key's digits"));
}

TEST_F(EvalProgram, WhatWasRefinedIsInEveryTable) {
  for (const char* protocol : {"handoff", "all", "hops"}) {
    const Json json = Parsed(Eval({"--protocol", protocol, "--kv", "4+4", "--hops", "2", "--json"}, "160"));
    const Json& row = json["results"][0];
    ASSERT_TRUE(row.contains("refined_share")) << protocol;
    EXPECT_NEAR(row["read_bits_per_value"], 4.5 * (1 + row["refined_share"].get<double>()), 1e-9) << protocol;
  }
}

TEST_F(EvalProgram, PagesOfF16AreTheReferenceItself) {
  const Json json = Parsed(Eval({"--kv", "f16", "--json"}));
  EXPECT_EQ(json["results"][0]["kl_mean"], 0);
  EXPECT_EQ(json["results"][0]["top1"], 1);
  EXPECT_EQ(json["results"][0]["ppl"], json["results"][0]["ppl_ref"]);
  EXPECT_EQ(json["results"][0]["bits_per_value"], 16);
}

TEST_F(EvalProgram, AResumedRunSaysTheSame) {
  const std::string log = dir_.path() + "/log";
  const Json first = Parsed(Eval({"--kv", "i8", "--resume", log, "--json"}));
  const Json both = Parsed(Eval({"--kv", "i8", "--kv", "i4", "--resume", log, "--json"}));
  EXPECT_EQ(both["results"][0], first["results"][0]);  // times too: nothing was measured again
  const Ran other = Eval({"--kv", "i8", "--resume", log}, "64", "9");
  EXPECT_EQ(other.status, 2);
  EXPECT_THAT(other.errors, HasSubstr("other settings"));
}

TEST_F(EvalProgram, WhatCannotBeMeasuredIsSaid) {
  std::ofstream(dir_.path() + "/empty");
  std::ofstream(dir_.path() + "/short") << "too short";
  const auto refused = [&](std::vector<std::string> args, const char* why) {
    const Ran ran = Run(std::move(args));
    EXPECT_NE(ran.status, 0);
    EXPECT_THAT(ran.errors, HasSubstr(why));
    EXPECT_THAT(ran.output, IsEmpty());
  };
  refused({"eval", "-m", model_, "--text", dir_.path() + "/empty"}, "is empty");
  refused({"eval", "-m", model_, "--text", dir_.path() + "/short"}, "tokens; 12 samples of 1153 need");
  refused({"eval", "-m", model_, "--text", dir_.path() + "/missing"}, "missing");
  refused({"eval", "-m", model_, "--text", dir_.path()}, "not a regular file");
  refused({"eval", "-m", model_, "--text", text_, "--kv", "i3"}, "i3");
  refused({"eval", "-m", model_, "--text", text_, "--kv", "like:q3_k"}, "like:q3_k");
  const Ran like = Eval({"--protocol", "all", "--kv", "like:q8_0"});
  EXPECT_EQ(like.status, 2);
  EXPECT_THAT(like.errors, HasSubstr("not with 'all'"));
  refused({"eval", "-m", model_, "--text", text_, "--protocol", "gsm8k"}, "not a file of questions");
  refused({"eval", "-m", model_, "--text", text_, "--kv", "pq4"}, "make some with: qkvshare calibrate --codebooks");
  refused({"eval", "-m", model_, "--text", text_, "--protocol", "splice", "--kv", "4"}, "--kv has no meaning");
  refused({"eval", "-m", model_, "--text", text_, "--arm", "rotate"}, "--arm has no meaning for protocol 'handoff'");
  refused({"generate", "-m", model_, "-p", "x", "--kv", "pq2"}, "make some with: qkvshare calibrate --codebooks");
}

TEST_F(EvalProgram, CalibrateWritesOneFileOrNothing) {
  const Ran made = Run({"calibrate", "-m", model_, "--text", text_, "-t", "1"});
  ASSERT_EQ(made.status, 0) << made.errors;
  EXPECT_THAT(made.output, HasSubstr(".qkvbal"));
  EXPECT_EQ(Files(), 3u);
  const Ran learned = Run({"calibrate", "-m", model_, "--text", text_, "-t", "1", "--codebooks"});
  ASSERT_EQ(learned.status, 0) << learned.errors;
  EXPECT_THAT(learned.output, HasSubstr(".qkvpq"));
  EXPECT_EQ(Files(), 4u);
  const Json json = Parsed(Eval({"--kv", "pq4", "--kv", "k=pq4,v=pq2", "--kv", "tokens:random/20/8/pq2", "--json"}));
  // A head of 32 channels: 4 bits and half a bit of scale; and once, for 64 tokens, a mean, a first key and a first
  // value.
  constexpr double kOnce = 3 * 16.0 / (2 * 64);
  EXPECT_DOUBLE_EQ(json["results"][0]["bits_per_value"], 4.5 + kOnce);
  EXPECT_DOUBLE_EQ(json["results"][1]["bits_per_value"], 3.5 + kOnce);
  const auto refused = [&](const std::string& name, const std::string& text, const char* why) {
    std::ofstream(dir_.path() + "/" + name, std::ios::binary) << text;
    for (const char* what : {"--threads=1", "--codebooks"}) {
      const std::string out = dir_.path() + "/out";
      const Ran ran = Run({"calibrate", "-m", model_, "--text", dir_.path() + "/" + name, "-o", out, what});
      EXPECT_EQ(ran.status, 2);
      EXPECT_THAT(ran.errors, HasSubstr(why));
    }
    std::filesystem::remove(dir_.path() + "/" + name);
    EXPECT_EQ(Files(), 4u) << name;
  };
  refused("empty", "", "is empty");
  refused("short", "a b", "at least 129 are needed");
  refused("binary", std::string(2000, '\0'), "zero bytes");
  std::string bytes;
  for (int i = 0; i < 3000; ++i) bytes += static_cast<char>(1 + (i * 131) % 255);
  refused("noise", bytes, "single bytes");
}

TEST_F(EvalProgram, LayersAreMeasuredOnceAndBitsSpentOnThem) {
  const Ran before = Eval({"--kv", "layers:5"});
  EXPECT_EQ(before.status, 2);
  EXPECT_THAT(before.errors, HasSubstr("qkvshare calibrate --layers"));
  const Ran bad = Run({"calibrate", "--layers", "-m", model_, "--text", model_});
  EXPECT_EQ(bad.status, 2);
  EXPECT_THAT(bad.errors, HasSubstr("it is not a text"));
  const Ran few = Run({"calibrate", "--layers", "-m", model_, "--text", text_, "--tokens", "15"});
  EXPECT_THAT(few.errors, HasSubstr("stretches of 15 tokens"));
  EXPECT_EQ(Files(), 2u);
  const Ran made =
      Run({"calibrate", "--layers", "-m", model_, "--text", text_, "-t", "1", "--tokens", "300", "--stretch", "150"});
  ASSERT_EQ(made.status, 0) << made.errors;
  EXPECT_THAT(made.output, HasSubstr(".qkvlayers: 300 tokens, 2 layers"));
  EXPECT_EQ(Files(), 3u);

  // Two layers of two sides; 3 bits and a scale of 16 bits per 32 channels are 3.5, and each bit on one side 0.25 more.
  // Stored besides, once for 64 tokens: constants (as above) and, for each layer's two heads, two bytes of its codecs.
  constexpr double kOnce = 3 * 16.0 / (2 * 64) + 2 * 8.0 / (2 * 2 * 32 * 64);
  EXPECT_THAT(Eval({"--kv", "bal:layers:5"}).errors, HasSubstr("there is no calibration for this model"));
  const Json rows = Parsed(Eval({"--kv", "layers:5", "--kv", "layers:4.99", "--kv", "3", "--json"}))["results"];
  EXPECT_DOUBLE_EQ(rows[0]["bits_per_value"], 5.0 + kOnce);
  EXPECT_DOUBLE_EQ(rows[1]["bits_per_value"], 4.75 + kOnce);
  EXPECT_LT(rows[0]["kl_mean"].get<double>(), rows[2]["kl_mean"].get<double>());
  EXPECT_THAT(Eval({"--kv", "layers:3.4"}).errors, HasSubstr("3.4 bits per value, expected at least 3.5"));

  const auto generate = [&](const char* kv) {
    return Run({"generate", "-m", model_, "--raw", "-p", "hi", "-n", "40", "--ignore-eos", "--kv", kv, "--quality-gate",
                "off", "--json"});
  };
  EXPECT_EQ(Parsed(generate("layers:5"))["kv_bits_stored"], 5.0);
  const std::string file = made.output.substr(0, made.output.find(": 300"));
  testing::WriteTinyModel({.weights_seed = 2}, model_);
  const Ran other = Eval({"--kv", "layers:5", "--layers", file});
  EXPECT_EQ(other.status, 2);
  EXPECT_THAT(other.errors, HasSubstr("is of another model"));
  testing::WriteTinyModel({}, model_);
  std::filesystem::resize_file(file, 100);
  const Ran damaged = generate("layers:5");
  EXPECT_EQ(damaged.status, 2);
  EXPECT_THAT(damaged.errors, HasSubstr("does not hold layers' sensitivities"));
}

TEST_F(EvalProgram, TwoBandsAreMeasuredBehindACalibration) {
  const Ran without = Eval({"--kv", "k=5/3,v=4"});
  EXPECT_EQ(without.status, 2);
  EXPECT_THAT(without.errors, HasSubstr("'k=5/3,v=4' needs a calibration: bal:k=5/3,v=4"));
  const Ran missing = Eval({"--kv", "bal:k=5/3,v=4"});
  EXPECT_EQ(missing.status, 2);
  EXPECT_THAT(missing.errors, HasSubstr("make one with: qkvshare calibrate"));
  ASSERT_EQ(Run({"calibrate", "-m", model_, "--text", text_, "-t", "1"}).status, 0);
  const Json json = Parsed(Eval({"--kv", "bal:k=5/3,v=4", "--kv", "bal:4", "--json"}));
  EXPECT_EQ(json["results"][0]["kv"], "bal:k=5/3,v=4");
  EXPECT_EQ(json["results"][0]["bits_per_value"], json["results"][1]["bits_per_value"]);
  EXPECT_GT(json["results"][0]["kl_mean"], 0);

  const auto turn = [&](std::vector<std::string> more) {
    std::vector<std::string> args = {"generate", "-m",    model_,           "-p", "a", "-n", "2", "-t",
                                     "1",        "--raw", "--quality-gate", "off"};
    args.insert(args.end(), more.begin(), more.end());
    return Run(std::move(args));
  };
  EXPECT_EQ(turn({"--kv", "k=5/3,v=4", "--bal"}).status, 0);
  const Ran plain = turn({"--kv", "k=5/3,v=4"});
  EXPECT_EQ(plain.status, 2);
  EXPECT_THAT(plain.errors, HasSubstr("keys in codec 5/3 need --bal"));
}

TEST_F(EvalProgram, AFlowTakesTheCalibrationBesideItsModel) {
  testing::WriteTinyModel({.chat_template = "<|im_start|>{{ messages }}"}, model_);
  const std::string flow = dir_.path() + "/flow.yaml", report = dir_.path() + "/report.json";
  std::ofstream(flow) << "n_ctx: 512\nkv: 'k=5/3,v=4'\nagents:\n  - {name: a, prompt: one, max_tokens: 3}\n"
                         "  - {name: b, inherits: a, prompt: two, max_tokens: 3}\n"
                         "  - {name: c, reads: a, prompt: three, max_tokens: 3}\n";
  const auto run = [&](std::vector<std::string> more) {
    std::vector<std::string> args = {"run", flow, "-m", model_, "-q", "--json", report, "-t", "1"};
    args.insert(args.end(), more.begin(), more.end());
    return Run(std::move(args));
  };
  const auto refused = [&](std::vector<std::string> more, const char* why) {
    const Ran ran = run(std::move(more));
    EXPECT_EQ(ran.status, 2);
    EXPECT_THAT(ran.errors, HasSubstr(why));
  };
  refused({}, "flow.yaml: kv: keys in codec 5/3 need --bal, or 'bal: true' in the flow");
  refused({"--kv", "k=5/3,v=8"}, "--kv: keys in codec 5/3 need --bal");
  refused({"--bal", "--quality-gate", "warn"}, "there is no calibration for this model");
  refused({"--bal", "--quality-gate", "off"}, "make one with: qkvshare calibrate");
  ASSERT_EQ(Run({"calibrate", "-m", model_, "--text", text_, "-t", "1"}).status, 0);
  const Ran done = run({"--bal", "--quality-gate", "off"});
  ASSERT_EQ(done.status, 0) << done.errors;
  const Json mode = Json::parse(std::ifstream(report), nullptr, false)["modes"][0];
  EXPECT_EQ(mode["kv"], "bal:k=5/3,v=4");
  EXPECT_EQ(mode["hops"][1]["handoff"], "attach");
  EXPECT_EQ(mode["hops"][2]["handoff"], "text");
  EXPECT_EQ(mode["hops"][2]["reason"], "codec_unsupported") << "such keys stay where they are";
  EXPECT_EQ(run({"--kv", "i8", "--quality-gate", "off"}).status, 0) << "in place of the flow's, which would need it";
}

}  // namespace
}  // namespace qkv::cli
