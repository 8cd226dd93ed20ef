// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// The program from the outside: what it says to bad input, what it promises to scripts. Every case runs the real
// program in an empty directory and looks at its exit status, at both outputs, and at what it left in the directory.

#include <gguf.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "qkv/broker/client.h"
#include "qkv/engine/test_support.h"
#include "tests/process.h"

namespace qkv::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using Json = nlohmann::json;
using Args = std::vector<std::string>;

constexpr auto kPatience = std::chrono::seconds(20);

struct Ran {
  int status = -1;
  std::string output;
  std::string errors;
};

class Cli : public ::testing::Test {
 protected:
  // `script` sees the program and its arguments as "$@".
  std::unique_ptr<Process> Start(const Args& args, const std::string& script = R"(exec "$@")") const {
    Args argv = {"/bin/sh", "-c", R"(cd "$1" && shift && )" + script, "sh", dir_.path(), QKV_PROGRAM};
    argv.insert(argv.end(), args.begin(), args.end());
    return Process::Start(argv);
  }
  Ran Run(const Args& args, const std::string& script = R"(exec "$@")") const {
    const auto process = Start(args, script);
    Ran ran;
    ran.status = process->Wait(kPatience);
    ran.output = process->output();
    ran.errors = process->errors();
    return ran;
  }

  std::set<std::string> Files() const {
    std::set<std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(dir_.path())) {
      files.insert(std::filesystem::relative(entry.path(), dir_.path()).string());
    }
    return files;
  }
  void Write(const std::string& name, std::string_view text) const {
    std::ofstream(Path(name), std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
  }
  std::string Path(const std::string& name) const { return dir_.path() + "/" + name; }

  // Exit code 2, one line that says what was found, nothing on stdout, no file more than before.
  void ExpectRefused(const Args& args, const std::vector<std::string>& found) const {
    SCOPED_TRACE(::testing::PrintToString(args).substr(0, 300));
    const std::set<std::string> before = Files();
    const Ran ran = Run(args);
    EXPECT_EQ(ran.status, 2);
    EXPECT_EQ(ran.output, "");
    EXPECT_THAT(ran.errors, AllOf(StartsWith("qkvshare: "), EndsWith("\n")));
    EXPECT_EQ(std::count(ran.errors.begin(), ran.errors.end(), '\n'), 1) << ran.errors;
    for (const std::string& text : found) EXPECT_THAT(ran.errors, HasSubstr(text));
    EXPECT_EQ(Files(), before);
  }
  // The same for usage errors, which may end with a line that says where help is.
  void ExpectUsageError(const Args& args, const std::string& found) const {
    SCOPED_TRACE(::testing::PrintToString(args));
    const Ran ran = Run(args);
    EXPECT_EQ(ran.status, 2);
    EXPECT_EQ(ran.output, "");
    const size_t first = ran.errors.find('\n');
    ASSERT_NE(first, std::string::npos) << ran.errors;
    EXPECT_THAT(ran.errors.substr(0, first), AllOf(StartsWith("qkvshare: "), HasSubstr(found)));
    const std::string rest = ran.errors.substr(first + 1);
    EXPECT_TRUE(rest.empty() || (rest.starts_with("Try ") && rest.find('\n') == rest.size() - 1)) << ran.errors;
    EXPECT_THAT(Files(), IsEmpty());
  }
  void ExpectFlowRefused(const std::string& yaml, const std::vector<std::string>& found) const {
    Write("flow.yaml", yaml);
    ExpectRefused({"run", "flow.yaml", "-m", TestModelPath()}, found);
  }

  TemporaryFolder dir_;
};

// With a broker in a process of its own.
class CliWithBroker : public Cli {
 protected:
  void SetUp() override {
    broker_ = Start({"broker", "--socket", "broker.sock"});
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (!BrokerClient::Connect(Path("broker.sock"))) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << "no broker came up";
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  void TearDown() override {
    ASSERT_EQ(::kill(broker_->pid(), SIGTERM), 0);
    EXPECT_EQ(broker_->Wait(kPatience), 0) << broker_->errors();
  }

  Args WithModel(Args args) const {
    args.insert(args.end(), {"--socket", "broker.sock", "-m", TestModelPath(), "-c", "256", "-t", "2"});
    return args;
  }
  void PublishStory() const {
    const std::string text = "The mill stood by the river for two hundred years, and nobody knows who built it.";
    const Ran ran = Run(WithModel({"publish", "--name", "story", "--raw", "-p", text}));
    ASSERT_EQ(ran.status, 0) << ran.errors;
  }
  // Runs it, which must succeed, and parses what it prints.
  Json RunForJson(const Args& args) const {
    const Ran ran = Run(args);
    EXPECT_EQ(ran.status, 0) << ran.errors;
    EXPECT_EQ(ran.errors, "");
    const Json json = Json::parse(ran.output, nullptr, false);
    EXPECT_FALSE(json.is_discarded()) << ran.output;
    return json;
  }

  std::unique_ptr<Process> broker_;
};

void ExpectTurnFields(const Json& json, int n_tokens) {
  for (const char* field : {"text", "mode", "reason"}) {
    EXPECT_TRUE(json.contains(field) && json[field].is_string()) << field;
  }
  for (const char* field : {"tokens_reused", "tokens_recomputed"}) {
    EXPECT_TRUE(json.contains(field) && json[field].is_number_integer()) << field;
  }
  for (const char* field : {"attach_ms", "ttft_ms"}) {
    EXPECT_TRUE(json.contains(field) && json[field].is_number()) << field;
  }
  ASSERT_TRUE(json.contains("token_ids") && json["token_ids"].is_array());
  EXPECT_EQ(json["token_ids"].size(), static_cast<size_t>(n_tokens));
}

TEST_F(Cli, AModelThatIsNotThereIsNamed) {
  ExpectRefused({"generate", "-m", "nowhere.gguf", "-p", "hi"}, {"nowhere.gguf", "No such file"});
}

TEST_F(Cli, AFileThatIsNoModelIsNamed) {
  Write("notes.txt", "just some text that is no model at all");
  ExpectRefused({"generate", "-m", "notes.txt", "-p", "hi"}, {"notes.txt", "not a GGUF file"});
}

TEST_F(Cli, ATruncatedModelIsNamed) {
  std::ifstream in(TestModelPath(), std::ios::binary);
  std::string start(1 << 20, '\0');
  ASSERT_TRUE(in.read(start.data(), static_cast<std::streamsize>(start.size())));
  Write("half.gguf", start);
  ExpectRefused({"generate", "-m", "half.gguf", "-p", "hi"}, {"half.gguf", "truncated"});
}

TEST_F(Cli, AnArchitectureThatItDoesNotRunIsNamed) {
  gguf_context* gguf = gguf_init_empty();
  gguf_set_val_str(gguf, "general.architecture", "mamba");
  ASSERT_TRUE(gguf_write_to_file(gguf, Path("other.gguf").c_str(), false));
  gguf_free(gguf);
  ExpectRefused({"generate", "-m", "other.gguf", "-p", "hi"}, {"other.gguf", "'mamba' is not supported"});
}

TEST_F(Cli, APromptLongerThanTheContextIsRefusedWithBothNumbers) {
  std::string prompt;
  for (int i = 0; i < 200; ++i) prompt += " word";
  // The prompt's 200 words are a token each, 4 tokens of output come to it.
  ExpectRefused({"generate", "-m", TestModelPath(), "-c", "32", "-t", "2", "-n", "4", "--raw", "-p", prompt},
                {"200 of prompt", "are 204", "context size is 32"});
}

TEST_F(Cli, AFlowWithAnUnknownKeyIsRefusedAndTheNearOneIsSuggested) {
  ExpectFlowRefused("agents:\n  - name: writer\n    promt: Write.\n",
                    {"flow.yaml:3:5", "'promt'", "did you mean 'prompt'?"});
}

TEST_F(Cli, AFlowWithACycleIsRefusedAndTheCycleIsShown) {
  ExpectFlowRefused(
      "agents:\n"
      "  - name: one\n    inherits: two\n    prompt: Go on.\n"
      "  - name: two\n    inherits: one\n    prompt: Go on.\n",
      {"flow.yaml:", "'one'", "'two'", " → "});
}

TEST_F(Cli, AFlowThatInheritsFromNobodyKnownIsRefused) {
  ExpectFlowRefused(
      "agents:\n"
      "  - name: writer\n    prompt: Write.\n"
      "  - name: editor\n    inherits: writter\n    prompt: Edit.\n",
      {"flow.yaml:5:", "'editor'", "'writter'", "did you mean 'writer'?"});
}

TEST_F(Cli, APlanNeedsNoModelAndStartsNothing) {
  Write("flow.yaml",
        "inputs: {topic: mills}\nagents:\n  - name: writer\n    prompt: 'On {{input.topic}}.'\n"
        "  - {name: editor, inherits: writer}\n");
  const Ran text = Run({"plan", "flow.yaml"});
  EXPECT_EQ(text.status, 0) << text.errors;
  EXPECT_THAT(text.output, HasSubstr("longest way: writer > editor"));
  EXPECT_THAT(Run({"plan", "flow.yaml", "--format", "dot"}).output, HasSubstr("\"writer\" -> \"editor\""));
  EXPECT_THAT(Run({"plan", "flow.yaml", "--format", "mermaid"}).output, HasSubstr("a0 ==>|inherits| a1"));
  const Json json = Json::parse(Run({"plan", "flow.yaml", "--json"}).output, nullptr, false);
  ASSERT_FALSE(json.is_discarded());
  EXPECT_EQ(json["critical_path"], Json({"writer", "editor"}));
  ExpectRefused({"plan", "flow.yaml", "--input", "topc=x"}, {"there is no input 'topc'", "did you mean 'topic'?"});
  ExpectRefused({"plan", "flow.yaml", "--input", "topic"}, {"--input 'topic': expected NAME=TEXT or NAME=@FILE"});
  ExpectRefused({"plan", "flow.yaml", "--input", "topic=@nowhere.txt"}, {"nowhere.txt", "No such file"});
}

TEST_F(Cli, AReportThatCannotBeWrittenIsRefusedBeforeTheRun) {
  Write("flow.yaml", "agents:\n  - name: writer\n    prompt: Write.\n    max_tokens: 1\n");
  const Args run = {"run", "flow.yaml", "-m", TestModelPath(), "--json"};
  const auto with = [&](const std::string& target) {
    Args args = run;
    args.push_back(target);
    return args;
  };
  ExpectRefused(with("nowhere/report.json"), {"nowhere/report.json"});
  ExpectRefused(with("flow.yaml/report.json"), {"flow.yaml/report.json"});
  ASSERT_TRUE(std::filesystem::create_directory(Path("reports")));
  ExpectRefused(with("reports"), {"'reports' is not a regular file"});
  ASSERT_EQ(::mkfifo(Path("pipe").c_str(), 0600), 0);  // would be replaced, as would /dev/null
  ExpectRefused(with("pipe"), {"'pipe' is not a regular file"});
}

TEST_F(Cli, ABrokerThatIsGoneIsNamedWithTheWayToStartOne) {
  const std::vector<std::string> found = {"no broker listens at 'gone.sock'", "qkvshare broker --socket gone.sock"};
  ExpectRefused({"ls", "--socket", "gone.sock"}, found);
  ExpectRefused({"attach", "story", "--socket", "gone.sock", "-m", TestModelPath(), "-p", "hi"}, found);
  ExpectRefused({"publish", "--name", "story", "--socket", "gone.sock", "-m", TestModelPath(), "-p", "hi"}, found);
  ExpectRefused({"release", "story", "--socket", "gone.sock"}, found);
  ExpectRefused({"inspect", "story", "--socket", "gone.sock"}, found);
  ExpectRefused({"verify", "story", "--socket", "gone.sock"}, found);
}

TEST_F(Cli, ASocketDirectoryWithoutPermissionIsNamed) {
  if (::geteuid() == 0) {  // root may write everywhere, but not below a file
    Write("file", "");
    ExpectRefused({"broker", "--socket", "file/broker.sock"}, {"'file'", "not a directory"});
    return;
  }
  ASSERT_TRUE(std::filesystem::create_directory(Path("closed")));
  ASSERT_EQ(::chmod(Path("closed").c_str(), 0500), 0);
  ExpectRefused({"broker", "--socket", "closed/broker.sock"}, {"closed/broker.sock", "Permission denied"});
}

TEST_F(Cli, WhatItDoesNotUnderstandIsNamedWithTheWayToHelp) {
  ExpectUsageError({}, "subcommand is required");
  ExpectUsageError({"frobnicate"}, "frobnicate");
  ExpectUsageError({"--frobnicate"}, "--frobnicate");
  ExpectUsageError({"bench", "frobnicate"}, "frobnicate");
  ExpectUsageError({"generate", "--frobnicate"}, "--frobnicate");
  ExpectUsageError({"generate", "-p", "hi", "-n", "many"}, "many");
  ExpectUsageError({"generate", "-p", "hi", "-c", "0"}, "0");
  ExpectUsageError({"attach", "story", "--on-miss", "weep"}, "weep");
  ExpectUsageError({"generate", "-p", "hi", "--kv", "8", "--kv-bits", "4.3"}, "--kv excludes --kv-bits");
  ExpectUsageError({"generate", "-p", "hi", "--kv-bits", "0.5"}, "0.5");
  ExpectUsageError({"generate", "-p", "hi", "--kv-bits", "nan"}, "nan");
  ExpectUsageError({"generate", "-p", "hi", "--top-p", "nan"}, "nan");
  ExpectUsageError({"attach", "story", "--calibration-kl", "nan"}, "nan");
  ExpectUsageError({"calibrate", "--text", "text.txt", "-o", ""}, "--output");
  ExpectUsageError({"run", "flow.yaml", "--kv", "8", "--kv-bits", "4.3"}, "--kv excludes --kv-bits");
  ExpectUsageError({"run", "flow.yaml", "--compare", "--kv", "8"}, "--compare excludes --kv");
  ExpectUsageError({"run", "flow.yaml", "--compare", "--kv-bits", "4.3"}, "--compare excludes --kv-bits");
  ExpectUsageError({"attach", "story", "--refine", "1.5"}, "1.5");
  ExpectUsageError({"run", "flow.yaml", "--refine", "-1"}, "-1");
  ExpectUsageError({"attach"}, "context");
  ExpectUsageError({"publish", "-p", "hi"}, "--name");
  ExpectUsageError({"run"}, "flow");
}

TEST_F(Cli, ABadValueIsNamed) {
  ExpectRefused({"generate", "-m", TestModelPath(), "-p", "hi", "--kv", "i9"}, {"'i9'", "i8-channel"});
  ExpectRefused({"generate", "-m", TestModelPath(), "-p", "hi", "--kv", "k=i8,v=i9"}, {"i9", "i8-channel"});
  ExpectRefused({"generate", "-m", TestModelPath(), "-p", "hi", "--kv-bits", "2"}, {"2 bits", "3.75", "k=4,v=3"});
  ExpectRefused({"generate", "-m", TestModelPath(), "-p", "hi", "--kv", "layers:some"},
                {"'layers:some'", "layers:4.3"});
  ExpectRefused({"generate", "-m", TestModelPath(), "-p", "hi", "--kv", "layers"}, {"'layers'"});
  ExpectRefused({"generate", "-m", TestModelPath()}, {"no prompt"});
  ExpectRefused({"generate", "-m", TestModelPath(), "-f", "nowhere.txt"}, {"'nowhere.txt'", "No such file"});
  ExpectRefused({"generate", "-m", TestModelPath(), "-p", "hi", "--kv", "tokens:120/8/4"}, {"tokens", "from 1 to 99"});
  ExpectRefused({"generate", "-m", TestModelPath(), "-p", "\xf4\x90\x80\x80"}, {"not UTF-8"});
  ExpectRefused({"broker", "--socket", "broker.sock", "--kv-budget", "much"}, {"--kv-budget", "'much'"});
  ExpectRefused({"run", "nowhere.yaml"}, {"nowhere.yaml", "No such file"});
  Write("flow.yaml", "agents:\n  - name: writer\n    prompt: Write.\n");
  ExpectRefused({"run", "flow.yaml", "-m", TestModelPath(), "--kv", "i9"}, {"'i9'", "i8-channel"});
  ExpectRefused({"run", "flow.yaml", "-m", TestModelPath(), "--kv-bits", "2"}, {"2 bits", "3.75"});
  ExpectRefused({"run", "flow.yaml", "-m", TestModelPath(), "--kv", "layers:4.3"}, {"layers:4.3", "--kv-bits 4.3"});
}

TEST_F(Cli, WhatATextUnlikeAnyOtherTaughtIsNotKept) {
  Write("text.txt", std::string(20000, 'a'));
  ExpectRefused({"calibrate", "-m", TestModelPath(), "--text", "text.txt", "--tokens", "512", "--stretch", "256", "-o",
                 "made.qkvbal"},
                {"'text.txt'", "not kept", "mean KL"});
  EXPECT_FALSE(std::filesystem::exists(Path("made.qkvbal")));
}

TEST_F(Cli, EveryCommandExplainsItselfWithAnExample) {
  const std::vector<Args> commands = {
      {},          {"run"},    {"generate"}, {"publish"}, {"attach"},           {"broker"},        {"ls"},  {"top"},
      {"inspect"}, {"verify"}, {"release"},  {"bench"},   {"bench", "handoff"}, {"bench", "flow"}, {"plan"}};
  for (Args args : commands) {
    args.push_back("--help");
    const Ran ran = Run(args);
    SCOPED_TRACE(::testing::PrintToString(args));
    EXPECT_EQ(ran.status, 0);
    EXPECT_THAT(ran.output, HasSubstr("Example"));
    EXPECT_EQ(ran.errors, "");
  }
  EXPECT_THAT(Files(), IsEmpty());
}

TEST_F(Cli, GenerateTellsScriptsWhatItPromises) {
  const Ran ran = Run({"generate", "-m", TestModelPath(), "-c", "256", "-t", "2", "-p", "Write about rivers.", "-n",
                       "6", "--ignore-eos", "--json"});
  ASSERT_EQ(ran.status, 0) << ran.errors;
  EXPECT_EQ(ran.errors, "");
  const Json json = Json::parse(ran.output, nullptr, false);
  ASSERT_FALSE(json.is_discarded()) << ran.output;
  ExpectTurnFields(json, 6);
  EXPECT_EQ(json["mode"], "none");
  EXPECT_EQ(json["reason"], "");
  EXPECT_EQ(json["tokens_reused"], 0);
  EXPECT_GT(json["tokens_recomputed"], 0);
  EXPECT_THAT(Files(), IsEmpty());
}

TEST_F(CliWithBroker, StatsSayWhatWasReadOfPagesWithARefinementPlane) {
  const std::string text =
      std::string(40, 'a') + " mill stood by the river for two hundred years, and nobody knew why.";
  ASSERT_EQ(Run(WithModel({"publish", "--name", "story", "--raw", "-p", text, "--kv", "4+4"})).status, 0);
  const Args attach =
      WithModel({"attach", "story", "--raw", "-p", " It", "-n", "4", "--ignore-eos", "--kv-bits", "4.3"});
  const auto with = [&](std::initializer_list<const char*> more) {
    Args args = attach;
    args.insert(args.end(), more.begin(), more.end());
    return args;
  };
  const Json refined = RunForJson(with({"--json"}));
  EXPECT_EQ(refined["kv_bits_stored"], 8.5);
  EXPECT_GT(refined["keys_refined"], 0);
  EXPECT_GT(refined["keys_with_refinement"], refined["keys_refined"]);
  EXPECT_DOUBLE_EQ(refined["kv_bits_read"], 4.25 * (1 + refined["refined_share"].get<double>()));
  const Json base = RunForJson(with({"--json", "--refine", "0"}));
  EXPECT_EQ(base["kv_bits_read"], 4.25);
  EXPECT_EQ(base["keys_refined"], 0);
  const Ran told = Run(with({"--stats"}));
  EXPECT_EQ(told.status, 0);
  EXPECT_THAT(told.errors, AllOf(HasSubstr("pages of 8.50 bits per value"), HasSubstr("% of the keys refined")));
}

TEST_F(Cli, EvalMeasuresSplicingAndGoesOnWhereItWas) {
  const Args args = {
      "eval",     "--protocol",    "splice",    "--text", QKV_SOURCE_DIR "/examples/long_report_source.txt",
      "-m",       TestModelPath(), "--weights", "as-is",  "--samples",
      "1",        "--arm",         "rotate",    "--arm",  "hide",
      "--resume", "scores.jsonl",  "--json",    "-t",     "2"};
  const Ran ran = Run(args);
  ASSERT_EQ(ran.status, 0) << ran.errors;
  const Json json = Json::parse(ran.output, nullptr, false);
  ASSERT_FALSE(json.is_discarded()) << ran.output;
  ASSERT_EQ(json["parts"].size(), 2u);
  for (const Json& part : json["parts"]) {
    const Json& rows = part["results"];
    EXPECT_EQ(rows[0]["arm"], "rotate");
    EXPECT_EQ(rows[0]["kl_vs_rotate"], 1);
    EXPECT_EQ(rows[1]["tokens"], 96);
    EXPECT_EQ(rows[1]["recomputed"], 0);
    EXPECT_LT(rows[1]["kl_mean"], rows[0]["kl_mean"]) << part["part"];
  }
  EXPECT_EQ(Run(args).output, ran.output) << "from the file";
  ExpectRefused({"eval", "--protocol", "splice", "--text", "scores.jsonl", "-m", TestModelPath(), "--arm", "rot"},
                {"'rot'", "rotate"});
}

TEST_F(Cli, OutputToAClosedPipeEndsQuietly) {
  // The pipe's reader is gone long before the model is loaded. The shell says what became of the program.
  const std::string script = R"({ "$@"; echo "status $?" >&2; } | :)";
  std::signal(SIGPIPE, SIG_DFL);  // children inherit it, and whoever started us may ignore it
  for (const bool json : {false, true}) {
    Args args = {"generate", "-m", TestModelPath(), "-c", "256", "-t",
                 "2",        "-p", "Count to ten.", "-n", "100", "--ignore-eos"};
    if (json) args.push_back("--json");
    const Ran ran = Run(args, script);
    EXPECT_EQ(ran.output, "");
    EXPECT_EQ(ran.errors, fmt::format("status {}\n", 128 + SIGPIPE));
  }
}

TEST_F(CliWithBroker, ASocketThatABrokerUsesIsNotTakenFromIt) {
  ExpectRefused({"broker", "--socket", "broker.sock"}, {"'broker.sock' is in use by another broker"});
  EXPECT_EQ(Run({"ls", "--socket", "broker.sock"}).status, 0);
}

TEST_F(CliWithBroker, AnUnknownContextIsNotFound) {
  for (const char* on_miss : {"fail", "text"}) {  // there is no text either
    ExpectRefused(WithModel({"attach", "nobody", "-p", "hi", "--on-miss", on_miss}), {"'nobody'", "not_found"});
  }
  for (const char* command : {"inspect", "verify", "release"}) {
    ExpectRefused({command, "nobody", "--socket", "broker.sock"}, {"'nobody'"});
  }
}

TEST_F(CliWithBroker, AttachTellsScriptsWhatItPromises) {
  PublishStory();
  const Json json = RunForJson(WithModel(
      {"attach", "story", "--raw", "-p", " The mayor", "-n", "6", "--ignore-eos", "--json", "--on-miss", "fail"}));
  ExpectTurnFields(json, 6);
  EXPECT_EQ(json["mode"], "attach");
  EXPECT_EQ(json["reason"], "");
  EXPECT_GT(json["tokens_reused"], 10);
  EXPECT_GT(json["tokens_recomputed"], 0);
  EXPECT_LT(json["tokens_recomputed"], 10);
}

TEST_F(CliWithBroker, AttachPutsContextsBehindASystemMessage) {
  for (const char* name : {"wood", "stone"}) {
    const std::string text = fmt::format(
        "The mill of {} stood by the river for two hundred years, and nobody in the town "
        "knows who built it, or why it was given up so soon.",
        name);
    const Ran ran = Run(WithModel({"publish", "--name", name, "--raw", "-p", text}));
    ASSERT_EQ(ran.status, 0) << ran.errors;
  }
  const auto with = [&](Args more) {
    Args args = {"attach", "wood", "--reads", "stone", "--system", "You are brief.", "-p", "Which mills are there?",
                 "-n",     "6",    "--json"};
    args.insert(args.end(), more.begin(), more.end());
    return WithModel(args);
  };
  const Json json = RunForJson(with({"--splice", "repair=32"}));
  EXPECT_EQ(json["mode"], "splice");
  EXPECT_EQ(json["splice"], "repair=32");
  EXPECT_EQ(json["spans_spliced"], 0) << "so short that all of it is repaired";
  EXPECT_GT(json["tokens_repaired"], 20);
  const Json hidden = RunForJson(with({}));
  EXPECT_EQ(hidden["splice"], "hide") << "the default";
  EXPECT_EQ(hidden["spans_spliced"], 2);
  EXPECT_EQ(hidden["tokens_repaired"], 0);

  const Ran text = Run(with({"--splice", "off"}));
  ASSERT_EQ(text.status, 0) << text.errors;
  EXPECT_EQ(Json::parse(text.output, nullptr, false)["mode"], "text");
  EXPECT_THAT(text.errors, HasSubstr("denied"));
  ExpectRefused(with({"--splice", "hid"}), {"--splice", "exact-only"});
  ExpectRefused(with({"--reads", "brick"}), {"'brick'", "not_found"});
}

TEST_F(CliWithBroker, AGroupedPromptIsPublishedInspectedAndGoneOnFrom) {
  std::string text;
  for (int i = 0; i < 16; ++i) text += fmt::format("Mill {} stood by the river. ", i);
  const Args publish = WithModel(
      {"publish", "--name", "mills", "--raw", "-p", text, "--kv", "tokens:30/8/drop", "--quality-gate", "off"});
  Args json = publish;
  json.push_back("--json");
  const Json published = RunForJson(json);
  const int grouped = published["tokens_grouped"], dropped = published["tokens_dropped"];
  EXPECT_GE(grouped, 64);
  EXPECT_EQ(grouped % 32, 0);
  EXPECT_GT(dropped, grouped / 2);
  EXPECT_GT(published["sample_ms"], 0);
  const Json card = RunForJson({"inspect", "mills", "--socket", "broker.sock"})["card"];
  EXPECT_EQ(card["mask"]["groups"]["n_tokens"], grouped);
  EXPECT_EQ(card["mask"]["groups"]["dropped"], true);
  EXPECT_EQ(card["n_token_ids"], published["context_tokens"]);
  EXPECT_EQ(Run({"verify", "mills", "--socket", "broker.sock"}).status, 0);
  const Ran deep = Run({"verify", "mills", "--socket", "broker.sock", "--verify", "deep", "-m", TestModelPath()});
  EXPECT_EQ(deep.status, 2);
  EXPECT_THAT(deep.errors, AllOf(HasSubstr("grouped by importance"), HasSubstr("only checksums")));
  const Args attach = WithModel({"attach", "mills", "--raw", "-p", " It", "-n", "4", "--ignore-eos"});
  Args ungated = attach;
  ungated.insert(ungated.end(), {"--json", "--quality-gate", "off"});
  const Json attached = RunForJson(ungated);
  EXPECT_EQ(attached["mode"], "attach");
  EXPECT_EQ(attached["tokens_grouped"], grouped);
  EXPECT_EQ(attached["sample_ms"], 0);
}

TEST_F(CliWithBroker, APublishedContextIsListedInspectedVerifiedAndReleased) {
  PublishStory();
  const Json list = RunForJson({"ls", "--socket", "broker.sock", "--json"});
  ASSERT_EQ(list["contexts"].size(), 1u);
  const Json context = list["contexts"][0];
  EXPECT_EQ(context["name"], "story");
  EXPECT_EQ(context["kv"], "i8");
  EXPECT_GT(context["tokens"], 10);
  EXPECT_GT(context["bytes"], 0);
  EXPECT_GE(list["used_bytes"], context["bytes"]);
  const std::string id = context["id"];
  EXPECT_EQ(id.size(), 32u);

  for (const std::string& what : {std::string("story"), id}) {
    const Json inspected = RunForJson({"inspect", what, "--socket", "broker.sock"});
    EXPECT_EQ(inspected["card"]["id"], id);
    EXPECT_EQ(inspected["card"]["name"], "story");
    ASSERT_EQ(inspected["segments"].size(), 1u);
    EXPECT_EQ(inspected["segments"][0]["digest"], inspected["card"]["segments"][0]["digest"]);
    EXPECT_EQ(inspected["segments"][0]["pages"][0]["kv"], "i8");
  }

  const Ran verified = Run({"verify", "story", "--socket", "broker.sock"});
  EXPECT_EQ(verified.status, 0) << verified.errors;
  EXPECT_THAT(verified.output, HasSubstr("segment 0 page 0"));
  EXPECT_THAT(verified.output, HasSubstr(": ok"));
  EXPECT_EQ(RunForJson({"verify", "story", "--socket", "broker.sock", "--json"})["failed"], 0);
  EXPECT_THAT(Run({"ls", "--socket", "broker.sock"}).output, HasSubstr("story"));

  const Ran released = Run({"release", "story", "--socket", "broker.sock"});
  EXPECT_EQ(released.status, 0) << released.errors;
  EXPECT_EQ(released.output + released.errors, "");
  EXPECT_EQ(RunForJson({"ls", "--socket", "broker.sock", "--json"})["contexts"].size(), 0u);
  ExpectRefused({"release", id, "--socket", "broker.sock"}, {id});
}

TEST_F(CliWithBroker, VerifyDeepReadsSomeTokensAgain) {
  PublishStory();
  const Json verified = RunForJson({"verify", "story", "--verify=deep", "--sample", "8", "--socket", "broker.sock",
                                    "-m", TestModelPath(), "-t", "2", "--json"});
  EXPECT_EQ(verified["failed"], 0);
  ASSERT_EQ(verified["read_again"].size(), 2u);
  EXPECT_EQ(verified["read_again"][1]["where"], "last 8 tokens");
  EXPECT_EQ(verified["read_again"][1]["status"], "ok");
  EXPECT_GT(verified["read_again"][1]["k_limit"], verified["read_again"][1]["k_error"]);
  const Ran text = Run({"verify", "story", "--verify=deep", "--sample", "8", "--socket", "broker.sock", "-m",
                        TestModelPath(), "-t", "2"});
  EXPECT_EQ(text.status, 0) << text.errors;
  EXPECT_THAT(text.output, HasSubstr("first 8 tokens read again: K error"));
  ExpectRefused({"verify", "--file", "segment.bin", "--verify=deep"}, {"--verify=deep", "not one file"});
}

TEST_F(CliWithBroker, TopShowsHoldersAndHits) {
  PublishStory();
  auto client = BrokerClient::Connect(Path("broker.sock"));
  ASSERT_TRUE(client);
  ASSERT_TRUE((*client)->Attach("story"));
  ASSERT_TRUE((*client)->Attach("story"));
  const Json top = RunForJson({"top", "--socket", "broker.sock", "--json"});
  ASSERT_EQ(top["contexts"].size(), 1u);
  EXPECT_EQ(top["contexts"][0]["hits"], 2);
  EXPECT_EQ(top["contexts"][0]["leases"], 2);
  EXPECT_EQ(top["contexts"][0]["holders"], Json::array({::getpid()}));
  EXPECT_EQ(top["totals"]["published"], 1);
  EXPECT_GT(top["totals"]["tokens_recomputed"], 10);  // the producer's own turn

  const Ran table = Run({"top", "--socket", "broker.sock"});  // a pipe: one look
  EXPECT_EQ(table.status, 0) << table.errors;
  EXPECT_THAT(table.output, AllOf(HasSubstr("1 contexts, 2 leases"), HasSubstr("story"),
                                  HasSubstr(std::to_string(::getpid())), ::testing::Not(HasSubstr("\033"))));
}

// Every complete event of a trace, by name; checks what the format asks for.
std::map<std::string, std::vector<Json>> StagesOf(const std::string& path) {
  std::ifstream in(path);
  const Json trace = Json::parse(in, nullptr, false);
  std::map<std::string, std::vector<Json>> stages;
  if (!trace.is_object() || !trace["traceEvents"].is_array()) {
    ADD_FAILURE() << path << " is no trace";
    return stages;
  }
  for (const Json& event : trace["traceEvents"]) {
    EXPECT_TRUE(event["name"].is_string() && event["pid"].is_number_integer() && event["tid"].is_number_integer());
    if (event["ph"] == "M") continue;
    EXPECT_EQ(event["ph"], "X");
    EXPECT_TRUE(event["ts"].is_number() && event["dur"].is_number());
    EXPECT_GE(event["dur"], 0);
    stages[event["name"]].push_back(event);
  }
  return stages;
}
double StartOf(const Json& event) {
  return event["ts"].get<double>();
}
double EndOf(const Json& event) {
  return StartOf(event) + event["dur"].get<double>();
}

TEST_F(CliWithBroker, ATraceHasTheStagesOfAHandoffInOrder) {
  std::string prompt;
  for (int i = 0; i < 80; ++i) prompt += " river";  // two full pages and a part of one
  const Ran producer = Run(WithModel({"publish", "--name", "story", "--raw", "-p", prompt, "--trace", "publish.json"}));
  ASSERT_EQ(producer.status, 0) << producer.errors;
  const Ran consumer = Run(WithModel({"attach", "story", "--raw", "-p", " bank", "-n", "2", "--ignore-eos", "--on-miss",
                                      "fail", "--trace", "attach.json"}));
  ASSERT_EQ(consumer.status, 0) << consumer.errors;
  auto made = StagesOf(Path("publish.json"));
  ASSERT_EQ(made["encode"].size(), 3u);
  ASSERT_EQ(made["seal"].size(), 1u);
  ASSERT_EQ(made["publish"].size(), 1u);
  EXPECT_LE(EndOf(made["encode"][2]), EndOf(made["seal"][0]));
  EXPECT_LE(EndOf(made["seal"][0]), EndOf(made["publish"][0]));
  EXPECT_NE(made["encode"][0]["tid"], made["publish"][0]["tid"]);  // the encoder is a thread of its own
  auto taken = StagesOf(Path("attach.json"));
  for (const char* stage : {"fetch", "map", "verify", "first_attention", "first_token"}) {
    ASSERT_EQ(taken[stage].size(), 1u) << stage;
  }
  EXPECT_LE(EndOf(made["publish"][0]), StartOf(taken["fetch"][0]));  // one clock for both processes
  EXPECT_LE(EndOf(taken["fetch"][0]), EndOf(taken["map"][0]));
  EXPECT_LE(EndOf(taken["map"][0]), StartOf(taken["verify"][0]));
  EXPECT_LE(EndOf(taken["verify"][0]), StartOf(taken["first_attention"][0]));
  EXPECT_LE(EndOf(taken["first_attention"][0]), EndOf(taken["first_token"][0]));
  ExpectRefused(WithModel({"attach", "story", "-p", "hi", "--trace", "nowhere/trace.json"}), {"--trace", "nowhere"});
}

TEST_F(Cli, ATraceOfAFlowHasAllItsAgents) {
  Write("flow.yaml",
        "n_ctx: 256\nthreads: 1\nagents:\n"
        "  - {name: writer, prompt: Write., max_tokens: 2}\n"
        "  - {name: editor, inherits: writer, prompt: Edit., max_tokens: 2}\n");
  const Ran ran =
      Run({"run", "flow.yaml", "-m", TestModelPath(), "--quiet", "--trace", "trace.json", "--metrics", "metrics.txt"});
  ASSERT_EQ(ran.status, 0) << ran.errors;
  std::ifstream metrics_file(Path("metrics.txt"));
  const std::string metrics{std::istreambuf_iterator<char>(metrics_file), {}};
  EXPECT_THAT(metrics, HasSubstr(R"(qkvshare:handoffs_total{kv_type="i8",mode="attach",model_name=)"));
  EXPECT_THAT(metrics, HasSubstr("qkvshare:events_total{event=\"published\"} 1\n"));
  // Two turns over i8: 64 channels and a scale of 16 bits.
  EXPECT_THAT(metrics, ContainsRegex(R"(read_bits_per_value_sum\{kv_type="i8",model_name="[^"]*"\} 16.5)"));
  auto stages = StagesOf(Path("trace.json"));
  ASSERT_EQ(stages["publish"].size(), 1u);
  ASSERT_EQ(stages["first_attention"].size(), 1u);
  EXPECT_NE(stages["publish"][0]["pid"], stages["first_attention"][0]["pid"]);
  EXPECT_LE(EndOf(stages["publish"][0]), StartOf(stages["first_attention"][0]));
  std::ifstream in(Path("trace.json"));
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  EXPECT_THAT(text, AllOf(HasSubstr("process_name"), HasSubstr("\"writer\""), HasSubstr("\"editor\"")));
}

TEST_F(Cli, MetricsAreOnLoopbackOnly) {
  ExpectRefused({"broker", "--socket", "broker.sock", "--metrics", "0.0.0.0:9464"}, {"0.0.0.0:9464", "loopback"});
  Write("flow.yaml", "agents:\n  - name: writer\n    prompt: Write.\n");
  const Args run = {"run", "flow.yaml", "-m", TestModelPath(), "--metrics"};
  const auto with = [&](Args more) {
    more.insert(more.begin(), run.begin(), run.end());
    return more;
  };
  ExpectRefused(with({"0.0.0.0:9464"}), {"0.0.0.0:9464", "loopback"});
  ExpectRefused(with({"nowhere/metrics.txt"}), {"--metrics", "nowhere"});
  ExpectRefused(with({"metrics.txt", "--socket", "broker.sock"}), {"--metrics", "--socket"});
}

}  // namespace
}  // namespace qkv::testing
