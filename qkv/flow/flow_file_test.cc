// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/flow_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace qkv {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kGood[] = R"(name: report
model: models/tiny.gguf
n_ctx: 2048
threads: 3
budget: 9000
kv: [i8, "k=i8,v=i4"]
bal: true
inputs:
  topic: river mills
agents:
  - name: writer
    system: You write.
    prompt: "Write about {{input.topic}}."
    max_tokens: 150
    seed: 7
    temperature: 0.5
    top_k: 20
    top_p: 0.9
    min_p: 0.1
    kv: i4
    deadline: 2.5
    retries: 2
  - name: editor
    inherits: {from: writer, on_miss: fail, kv: i4, budget: 4000}
    prompt: |
      Improve this: {{ writer.output }}
)";

// The whole message of the error that `yaml` gives; "no error" if there is none.
std::string ErrorOf(const std::string& yaml) {
  auto flow = ParseFlow(yaml, "f.yaml");
  if (flow) return "no error";
  EXPECT_EQ(flow.error().code, Code::kInvalidArgument) << flow.error().message;
  EXPECT_EQ(flow.error().message.find('\n'), std::string::npos) << "an error is one line";
  return flow.error().message;
}

// A flow of agents given as their own lines, so that line 2 is the first agent's first.
std::string Agents(const std::string& items) {
  return "agents:\n" + items;
}

class FlowFileTest : public ::testing::Test {
 protected:
  FlowFileTest() {
    std::string path = (std::filesystem::temp_directory_path() / "flow_file_test.XXXXXX").string();
    EXPECT_NE(::mkdtemp(path.data()), nullptr);
    directory_ = path;
  }
  ~FlowFileTest() override { std::filesystem::remove_all(directory_); }

  std::string Write(const std::string& name, std::string_view text) {
    const std::string path = (directory_ / name).string();
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }

  std::filesystem::path directory_;
};

TEST(FlowFile, ReadsEveryKey) {
  auto flow = ParseFlow(kGood, "dir/f.yaml");
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_EQ(flow->name, "report");
  EXPECT_EQ(flow->model, "dir/models/tiny.gguf");
  EXPECT_EQ(flow->n_ctx, 2048);
  EXPECT_EQ(flow->threads, 3);
  EXPECT_EQ(flow->budget, 9000);
  EXPECT_THAT(flow->kv, ElementsAre(CodecPair{CodecId::kI8, CodecId::kI8}, CodecPair{CodecId::kI8, CodecId::kI4}));
  EXPECT_TRUE(flow->bal);
  EXPECT_EQ(flow->inputs.at("topic"), "river mills");
  ASSERT_EQ(flow->agents.size(), 2u);
  const FlowAgent& writer = flow->agents[0];
  EXPECT_EQ(writer.name, "writer");
  EXPECT_EQ(writer.system, "You write.");
  EXPECT_EQ(writer.max_tokens, 150);
  EXPECT_EQ(writer.sampling.seed, 7u);
  EXPECT_EQ(writer.sampling.temperature, 0.5f);
  EXPECT_EQ(writer.sampling.top_k, 20);
  EXPECT_EQ(writer.sampling.top_p, 0.9f);
  EXPECT_EQ(writer.sampling.min_p, 0.1f);
  EXPECT_EQ(writer.kv, (CodecPair{CodecId::kI4, CodecId::kI4}));
  EXPECT_EQ(writer.deadline_s, 2.5);
  EXPECT_EQ(writer.retries, 2);
  EXPECT_EQ(writer.inherits(), "");
  const FlowAgent& editor = flow->agents[1];
  EXPECT_EQ(editor.inherits(), "writer");
  ASSERT_EQ(editor.edges.size(), 1u);
  EXPECT_EQ(editor.edges[0].on_miss, OnMiss::kFail);
  EXPECT_EQ(editor.edges[0].budget, 4000);
  EXPECT_FALSE(editor.kv.has_value());
  const auto graph = flow->Graph();
  EXPECT_EQ(graph[1].inherits, 0);
  EXPECT_THAT(graph[1].needs, ElementsAre(0));
}

TEST(FlowFile, DefaultsNeedOnlyAnAgentWithAPrompt) {
  auto flow = ParseFlow("agents: [{name: solo, prompt: hello}]", "dir/my_flow.yaml");
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_EQ(flow->name, "my_flow");
  EXPECT_EQ(flow->model, "");
  EXPECT_TRUE(flow->kv.empty());
  EXPECT_FALSE(flow->bal);
  EXPECT_EQ(flow->agents[0].sampling.temperature, 0.0f) << "greedy";
}

TEST(FlowFile, NullInheritsMeansNobody) {
  auto flow = ParseFlow("agents: [{name: solo, prompt: hello, inherits: null}]", "f.yaml");
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_EQ(flow->agents[0].inherits(), "");
}

TEST(FlowFile, AgentsMayStandInAnyOrder) {
  auto flow = ParseFlow("agents: [{name: b, inherits: a}, {name: a, prompt: hello}]", "f.yaml");
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_EQ(flow->Graph()[0].inherits, 1);
}

TEST(FlowFileErrors, UnknownKeySuggestsTheNearest) {
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    promt: hi\n")), "f.yaml:3:5: unknown key 'promt', did you mean 'prompt'?");
  EXPECT_EQ(ErrorOf("agnets: []\n"), "f.yaml:1:1: unknown key 'agnets', did you mean 'agents'?");
  EXPECT_EQ(ErrorOf("inputs: {a: {fil: x}}\nagents: [{name: a, prompt: b}]\n"),
            "f.yaml:1:14: unknown key 'fil', did you mean 'file'?");
}

TEST(FlowFileErrors, UnknownKeyWithoutANearOneSuggestsNothing) {
  EXPECT_EQ(ErrorOf("colour: red\n"), "f.yaml:1:1: unknown key 'colour'");
}

TEST(FlowFileErrors, KeyThatIsThereTwice) {
  EXPECT_EQ(ErrorOf("name: a\nname: b\nagents: []\n"), "f.yaml:2:1: key 'name' is there twice");
}

TEST(FlowFileErrors, DuplicateAgent) {
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    prompt: x\n  - name: a\n    prompt: y\n")),
            "f.yaml:4:11: a second agent is called 'a'");
}

TEST(FlowFileErrors, InheritsFromNobodyKnownSuggestsTheNearest) {
  EXPECT_EQ(ErrorOf(Agents("  - {name: writer, prompt: x}\n  - name: editor\n    inherits: writr\n")),
            "f.yaml:4:15: agent 'editor' inherits from 'writr', but there is no such agent, did you mean 'writer'?");
}

TEST(FlowFileErrors, CycleIsNamedInFull) {
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    inherits: b\n"
                           "  - name: b\n    inherits: c\n  - name: c\n    inherits: a\n")),
            "f.yaml:3:15: agent 'a' inherits from 'b', which is not before it (a → b → c → a)");
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    inherits: a\n")),
            "f.yaml:3:15: agent 'a' inherits from 'a', which is not before it (a → a)");
}

TEST(FlowFileErrors, OutputOfAnAgentThatIsNotBefore) {
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    prompt: see {{b.output}}\n  - name: b\n    inherits: a\n")),
            "f.yaml:3:13: agent 'a' uses {{b.output}}, but 'b' is not before it (a → b → a)");
}

TEST(FlowFileErrors, ReferenceToNobody) {
  EXPECT_EQ(ErrorOf(Agents("  - {name: writer, prompt: x}\n  - name: b\n    prompt: see {{wirter.output}}\n")),
            "f.yaml:4:13: agent 'b': {{wirter.output}}: there is no agent 'wirter', did you mean 'writer'?");
  EXPECT_EQ(ErrorOf("inputs: {topic: x}\n" + Agents("  - {name: a, prompt: 'on {{input.topics}}'}\n")),
            "f.yaml:3:23: agent 'a': there is no input 'topics', did you mean 'topic'?");
}

TEST(FlowFileErrors, MalformedReference) {
  EXPECT_EQ(ErrorOf(Agents("  - {name: a, prompt: 'on {{topic}}'}\n")),
            "f.yaml:2:23: agent 'a': '{{topic}}' is no reference: expected {{input.<name>}} or {{<agent>.output}}");
  EXPECT_EQ(ErrorOf(Agents("  - {name: a, prompt: 'on {{input.x'}\n")),
            "f.yaml:2:23: agent 'a': '{{input.x' has no closing '}}'");
}

TEST(FlowFileErrors, UnquotedBracesGetAHint) {
  EXPECT_THAT(ErrorOf(Agents("  - name: a\n    prompt: {{input.x}} and more\n")),
              AllOf(StartsWith("f.yaml:3:"), HasSubstr("must be in quotes")));
  EXPECT_THAT(ErrorOf(Agents("  - name: a\n    prompt: {{input.x}}\n")),
              AllOf(StartsWith("f.yaml:3:13: prompt: expected text, found a map"), HasSubstr("must be in quotes")));
}

TEST(FlowFileErrors, NoAgents) {
  EXPECT_EQ(ErrorOf("name: a\n"), "f.yaml:1:1: key 'agents' is missing");
  EXPECT_EQ(ErrorOf("agents: []\n"), "f.yaml:1:9: agents: the list is empty");
  EXPECT_THAT(ErrorOf(""), HasSubstr("f.yaml:1:1: "));
  EXPECT_THAT(ErrorOf("agents:\n"), HasSubstr("agents: expected a list of agents, found nothing"));
}

TEST(FlowFileErrors, WrongTypes) {
  EXPECT_EQ(ErrorOf("just text\n"), "f.yaml:1:1: flow: expected a map of keys, found text");
  EXPECT_EQ(ErrorOf("- a\n- b\n"), "f.yaml:1:1: flow: expected a map of keys, found a list");
  EXPECT_EQ(ErrorOf("agents: {a: b}\n"), "f.yaml:1:9: agents: expected a list of agents, found a map");
  EXPECT_EQ(ErrorOf("agents: [writer]\n"), "f.yaml:1:10: agent: expected a map of keys, found text");
  EXPECT_EQ(ErrorOf("inputs: [a]\nagents: [{name: a, prompt: b}]\n"),
            "f.yaml:1:9: inputs: expected a map of keys, found a list");
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    prompt: [x]\n")), "f.yaml:3:13: prompt: expected text, found a list");
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    prompt: b\n    max_tokens: many\n")),
            "f.yaml:4:17: max_tokens: expected a whole number from 1 to 1048576, found 'many'");
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    prompt: b\n    max_tokens: 1.5\n")),
            "f.yaml:4:17: max_tokens: expected a whole number from 1 to 1048576, found '1.5'");
  for (const char* budget : {"-1", "12 potatoes", "0K", "1.5G"}) {
    EXPECT_EQ(ErrorOf(Agents(fmt::format("  - name: a\n    inherits: {{from: b, budget: {}}}\n", budget))),
              fmt::format("f.yaml:3:33: budget: expected a number of tokens from 1 to 1073741824, or a size such as "
                          "512MiB, found '{}'",
                          budget));
  }
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    prompt: b\n    temperature: nan\n")),
            "f.yaml:4:18: temperature: expected a number from 0 to 100, found 'nan'");
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    prompt: b\n    ? [x]\n    : y\n")),
            "f.yaml:4:7: agent: a key must be text");
}

TEST(FlowFileErrors, NumbersOutOfRange) {
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    prompt: b\n    max_tokens: 0\n")),
            "f.yaml:4:17: max_tokens: expected a whole number from 1 to 1048576, found '0'");
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    prompt: b\n    max_tokens: 99999999999999999999\n")),
            "f.yaml:4:17: max_tokens: expected a whole number from 1 to 1048576, found '99999999999999999999'");
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    prompt: b\n    seed: -1\n")),
            "f.yaml:4:11: seed: expected a whole number from 0 to 4294967295, found '-1'");
  EXPECT_EQ(ErrorOf("n_ctx: 7\nagents: []\n"),
            "f.yaml:1:8: n_ctx: expected a whole number from 32 to 1048576, found '7'");
  EXPECT_EQ(ErrorOf("bal: maybe\nagents: []\n"), "f.yaml:1:6: bal: expected true or false, found 'maybe'");
}

TEST(FlowFileErrors, BadCodecSaysWhichThereAre) {
  EXPECT_THAT(ErrorOf("agents:\n  - name: a\n    prompt: x\n    max_bytes: lots\n"),
              HasSubstr("max_bytes: expected a size such as 512MiB, found 'lots'"));
  EXPECT_THAT(ErrorOf("agents:\n  - name: a\n    prompt: x\n    max_bytes: 64MiB\n    kv: i8\n"),
              HasSubstr("either 'kv' or 'max_bytes'"));
  EXPECT_THAT(ErrorOf("agents:\n  - name: a\n    prompt: x\n    max_bytes: 64MiB\n"
                      "  - name: b\n    inherits: {from: a, kv: i8}\n"),
              HasSubstr("agent 'b' wants i8 pages of 'a', whose 'max_bytes' decides"));
  EXPECT_EQ(ParseFlow("agents:\n  - name: a\n    prompt: x\n    max_bytes: 64MiB\n", "f.yaml")->agents[0].max_bytes,
            uint64_t{64} << 20);
  EXPECT_EQ(ErrorOf("kv: i9\nagents: []\n"), "f.yaml:1:5: kv: " + ParseCodecPair("i9").error().message);
  EXPECT_EQ(ErrorOf("kv: tokens:0/8/4\nagents: []\n"),
            "f.yaml:1:5: kv: " + ParseKvChoice("tokens:0/8/4").error().message);
  EXPECT_EQ(
      ErrorOf("kv: layers:4.3\nagents: []\n"),
      "f.yaml:1:5: kv: codecs by layer are made for one model; an agent's 'max_bytes' and run --kv-bits choose them");
  EXPECT_EQ(ErrorOf("kv: [i8, i9]\nagents: []\n"), "f.yaml:1:10: kv: " + ParseCodecPair("i9").error().message);
  EXPECT_EQ(ErrorOf("kv: [i8, i4, i8]\nagents: []\n"), "f.yaml:1:14: kv: i8 is there twice");
  EXPECT_EQ(ErrorOf("kv: k=5/3,v=4\nagents: [{name: a, prompt: x}]\n"), "no error") << "a run may be given --bal";
}

TEST(FlowFileErrors, OnMissSuggests) {
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    prompt: b\n    on_miss: txt\n")),
            "f.yaml:4:14: on_miss: expected 'text' or 'fail', found 'txt', did you mean 'text'?");
}

TEST(FlowFileErrors, NamesAreChecked) {
  EXPECT_THAT(ErrorOf(Agents("  - name: a b\n    prompt: x\n")),
              StartsWith("f.yaml:2:11: agent name 'a b': expected "));
  EXPECT_THAT(ErrorOf(Agents("  - name: input\n    prompt: x\n")), StartsWith("f.yaml:2:11: no agent can be called"));
  EXPECT_THAT(ErrorOf(Agents("  - prompt: x\n")), Eq("f.yaml:2:5: agent: key 'name' is missing"));
  EXPECT_THAT(ErrorOf("inputs: {a.b: x}\nagents: []\n"), StartsWith("f.yaml:1:10: input name 'a.b': expected "));
}

TEST(FlowFileErrors, AgentWithNothingToRead) {
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n")),
            "f.yaml:2:5: agent 'a': it has nothing to read: 'prompt' is missing or empty");
}

TEST(FlowFileErrors, SystemMessageBehindAnInheritedContext) {
  EXPECT_THAT(ErrorOf(Agents("  - {name: a, prompt: x}\n  - name: b\n    inherits: a\n    system: Be brief.\n")),
              StartsWith("f.yaml:5:13: agent 'b': 'system' has no place"));
}

TEST(FlowFileErrors, NotYaml) {
  EXPECT_THAT(ErrorOf("agents: [\n  {name: 'a\n"), StartsWith("f.yaml:"));
  EXPECT_THAT(ErrorOf("a: b: c\n"), StartsWith("f.yaml:1:"));
  EXPECT_EQ(ErrorOf("name: ok\n# \xff\n"), "f.yaml:2:3: not UTF-8 text");
  EXPECT_EQ(ErrorOf(std::string("name: \0x\n", 9)), "f.yaml:1:7: not UTF-8 text");
  EXPECT_EQ(ErrorOf("agents: [{name: a, prompt: b}]\n---\nagents: []\n"),
            "f.yaml:2:1: a second YAML document; a file holds one flow");
  EXPECT_THAT(ErrorOf("name: *nobody\n"), StartsWith("f.yaml:1:"));
}

TEST(FlowFileErrors, TokensOutOfPlaceEnd) {
  for (const char* yaml : {",", "]", "}", "agents: [{name: a, prompt: b}]\n,", "--- ,", "%", "---\n---\n"}) {
    EXPECT_THAT(ErrorOf(yaml), StartsWith("f.yaml:")) << yaml;
  }
  EXPECT_EQ(ErrorOf("---\nagents: [{name: a, prompt: b}]\n...\n"), "no error") << "one document with its marks";
}

TEST(FlowFileErrors, ManyValuesAreNotBuilt) {
  for (const char* piece : {"- a\n", "- {a: b}\n", "? \n"}) {
    std::string yaml;
    while (yaml.size() + 16 < kMaxFlowFileBytes) yaml += piece;
    EXPECT_THAT(ErrorOf(yaml), HasSubstr("more than 200000 values")) << piece;
  }
}

TEST(FlowFileErrors, EscapesCannotSmuggleInWhatIsNotText) {
  EXPECT_EQ(ErrorOf(Agents("  - name: a\n    prompt: \"x\\0y\"\n")), "f.yaml:3:13: prompt: not UTF-8 text");
}

TEST(FlowFileErrors, HugeFile) {
  EXPECT_THAT(ErrorOf(std::string(kMaxFlowFileBytes + 1, ' ')), StartsWith("f.yaml:1:1: larger than 16 MiB"));
}

TEST(FlowFileErrors, ManyAgents) {
  std::string items;
  for (size_t i = 0; i <= kMaxFlowAgents; ++i) items += fmt::format("  - {{name: a{}, prompt: x}}\n", i);
  EXPECT_EQ(ErrorOf(Agents(items)), "f.yaml:2:3: agents: more than 4096");
  EXPECT_EQ(ErrorOf("inputs: {all: [x, x, x, x]}\n" +
                    Agents(items.substr(0, items.rfind("  - ")) + "  - {name: b, prompt: x, foreach: all}\n")),
            "f.yaml:3:3: agents: more than 4096, counting what 'foreach' makes");
}

TEST(FlowFileErrors, DeepNestingEndsQuickly) {
  const auto start = std::chrono::steady_clock::now();
  for (const char* piece : {"[", "{a: ", "- ", "? "}) {
    std::string yaml = "agents: \n";
    while (yaml.size() < (size_t{1} << 20)) yaml += piece;
    EXPECT_THAT(ErrorOf(yaml), StartsWith("f.yaml:")) << piece;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(FlowFileErrors, AliasBombCostsNothing) {
  std::string yaml = "inputs:\n  a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 40; ++i) {
    yaml += fmt::format("  a{0}: &a{0} [*a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}]\n", i, i - 1);
  }
  EXPECT_THAT(ErrorOf(yaml + "agents: [{name: a, prompt: b}]\n"), HasSubstr("expected text, found a list"));
}

TEST(FlowFileErrors, AliasesCannotMultiplyALargeText) {
  // 40 agents with one prompt of 2 MiB are 80 MiB of text in a file of 2.
  std::string yaml = "agents:\n  - {name: a0, prompt: &big '" + std::string(2 << 20, 'x') + "'}\n";
  for (int i = 1; i < 40; ++i) yaml += fmt::format("  - {{name: a{}, prompt: *big}}\n", i);
  EXPECT_THAT(ErrorOf(yaml), HasSubstr("prompt: the flow's texts are more than 64 MiB together"));
}

TEST(FlowFileErrors, AliasToItself) {
  EXPECT_THAT(ErrorOf("agents: &a [*a]\n"), StartsWith("f.yaml:1:"));
}

TEST(FlowFile, SurvivesArbitraryBytes) {
  EXPECT_TRUE(rc::check("ParseFlow returns", [](const std::string& bytes) { (void)ParseFlow(bytes, "f.yaml"); }));
}

TEST(FlowFile, SurvivesArbitraryYamlLikeText) {
  const std::string alphabet = "{}[]:&*!|>-?#%@,'\"\n\t  agentsmpu0";
  const auto yaml = rc::gen::container<std::string>(rc::gen::elementOf(alphabet));
  EXPECT_TRUE(rc::check("ParseFlow returns", [&] { (void)ParseFlow("agents:\n- " + *yaml, "f.yaml"); }));
}

TEST(FlowFile, SurvivesEveryDamagedByteOfAGoodFlow) {
  const std::string good = kGood;
  for (size_t i = 0; i < good.size(); ++i) {
    for (char c : {'{', '[', '"', '&', '\n', ':', '\xff'}) {
      std::string bad = good;
      bad[i] = c;
      auto flow = ParseFlow(bad, "f.yaml");
      if (!flow) {
        ASSERT_THAT(flow.error().message, StartsWith("f.yaml:"));
      }
    }
  }
}

TEST_F(FlowFileTest, InputsComeFromFilesBesideTheFlow) {
  Write("source.txt", "a long text\n");
  const std::string path =
      Write("f.yaml", "inputs: {source: {file: source.txt}}\nagents: [{name: a, prompt: '{{input.source}}'}]\n");
  auto flow = ParseFlowFile(path);
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_EQ(flow->inputs.at("source"), "a long text\n");
}

TEST_F(FlowFileTest, UnreadableInputsSayWhereTheyAreNamed) {
  const auto error_of = [&](const std::string& file) {
    const std::string path =
        Write("f.yaml", "inputs:\n  source:\n    file: " + file + "\nagents: [{name: a, prompt: b}]\n");
    auto flow = ParseFlowFile(path);
    EXPECT_FALSE(flow);
    return flow ? Error{} : flow.error();
  };
  const Error missing = error_of("nowhere.txt");
  EXPECT_EQ(missing.code, Code::kNotFound);
  EXPECT_THAT(missing.message,
              AllOf(HasSubstr("f.yaml:3:11: input 'source': cannot read "), HasSubstr("No such file")));

  ASSERT_EQ(::mkfifo((directory_ / "fifo").c_str(), 0600), 0);
  EXPECT_THAT(error_of("fifo").message, EndsWith("fifo: not a regular file")) << "and it did not wait for a writer";
  EXPECT_THAT(error_of(".").message, EndsWith("not a regular file"));

  Write("binary", std::string("a\0b", 3));
  EXPECT_THAT(error_of("binary").message, HasSubstr("is not UTF-8 text"));

  if (::geteuid() != 0) {
    ::chmod(Write("secret", "x").c_str(), 0);
    EXPECT_EQ(error_of("secret").code, Code::kDenied);
  }
}

TEST_F(FlowFileTest, MissingFlowFileIsNotFound) {
  auto flow = ParseFlowFile((directory_ / "nothing.yaml").string());
  ASSERT_FALSE(flow);
  EXPECT_EQ(flow.error().code, Code::kNotFound);
}

TEST_F(FlowFileTest, LargestFileIsReadInReasonableTime) {
  std::string yaml = "agents: [{name: a, prompt: b}]\ninputs:\n  big: |\n";
  const std::string line = "    sixty-four characters of text make a line, more or less, here\n";
  while (yaml.size() + line.size() < kMaxFlowFileBytes) yaml += line;
  const auto start = std::chrono::steady_clock::now();
  auto flow = ParseFlowFile(Write("f.yaml", yaml));
  EXPECT_TRUE(flow) << flow.error().message;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

const std::filesystem::path kRoot = QKV_SOURCE_DIR;

TEST(Examples, ParseAndAreChains) {
  for (const auto& [file, agents] : {std::pair{"writer_editor.yaml", 2u}, {"long_report.yaml", 3u}}) {
    auto flow = ParseFlowFile((kRoot / "examples" / file).string());
    ASSERT_TRUE(flow) << flow.error().message;
    ASSERT_EQ(flow->agents.size(), agents);
    for (size_t i = 1; i < flow->agents.size(); ++i) EXPECT_EQ(flow->agents[i].inherits(), flow->agents[i - 1].name);
  }
}

TEST(Examples, AllOfThemParse) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kRoot / "examples")) {
    if (entry.path().extension() != ".yaml") continue;
    auto flow = ParseFlowFile(entry.path().string());
    EXPECT_TRUE(flow) << flow.error().message;
    ++count;
  }
  EXPECT_GE(count, 6);
}

TEST(Examples, SchemaAndParserKnowTheSameKeys) {
  const auto schema = nlohmann::json::parse(std::ifstream(kRoot / "docs" / "flow.schema.json"));
  const auto unknown = [](const std::string& yaml) { return ErrorOf(yaml).find("unknown key") != std::string::npos; };
  ASSERT_TRUE(unknown("nothing: []\n"));
  size_t keys = 0;
  for (const auto& [key, value] : schema["properties"].items()) {
    EXPECT_FALSE(unknown(key + ": []\n")) << key;
    ++keys;
  }
  EXPECT_EQ(keys, 9u) << "a new key of the flow belongs into the schema and FLOWS.md";
  for (const auto& [key, value] : schema["$defs"]["edge"]["properties"].items()) {
    EXPECT_FALSE(unknown("agents: [{inherits: {" + key + ": []}}]\n")) << key;
  }
  for (const auto& [key, value] : schema["$defs"]["reads_edge"]["properties"].items()) {
    EXPECT_FALSE(unknown("agents: [{reads: {" + key + ": []}}]\n")) << key;
  }
  for (const auto& [key, value] : schema["$defs"]["agent"]["properties"].items()) {
    EXPECT_FALSE(unknown("agents: [{" + key + ": []}]\n")) << key;
    ++keys;
  }
  EXPECT_EQ(keys, 9u + 21u) << "a new key of an agent belongs into the schema and FLOWS.md";
}

TEST(Texts, ReplaceReferences) {
  auto flow = ParseFlow(
      "inputs: {x: '1', braces: '{{w.output}}'}\nagents:\n  - {name: w, prompt: no references but } and { and {a}}\n"
      "  - {name: r, system: 'be {{input.x}}', prompt: 'a {{input.x}} b {{ w.output }}{{w.output}}'}\n"
      "  - {name: s, prompt: '{{input.braces}}'}\n",
      "f.yaml");
  ASSERT_FALSE(flow) << "unquoted braces";
  flow = ParseFlow(
      "inputs: {x: '1', braces: '{{w.output}}'}\nagents:\n  - {name: w, prompt: 'no references, but } and { and {a}'}\n"
      "  - {name: r, system: 'be {{input.x}}', prompt: 'a {{input.x}} b {{ w.output }}{{w.output}}'}\n"
      "  - {name: s, prompt: '{{input.braces}}'}\n",
      "f.yaml");
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_EQ(flow->PromptOf(flow->agents[0], {}).value(), "no references, but } and { and {a}");
  EXPECT_EQ(flow->PromptOf(flow->agents[1], {{"w", "2"}}).value(), "a 1 b 22");
  EXPECT_EQ(flow->SystemOf(flow->agents[1], {{"w", "2"}}).value(), "be 1");
  EXPECT_EQ(flow->PromptOf(flow->agents[2], {{"w", "2"}}).value(), "{{w.output}}")
      << "what is filled in is not searched";
  EXPECT_EQ(flow->PromptOf(flow->agents[1], {}).error().code, Code::kInvalidArgument) << "w has not answered";
}

TEST(Texts, OfTextEdgesStandBeforeThePrompt) {
  auto flow = ParseFlow(
      "agents:\n  - {name: a, prompt: x}\n  - {name: b, prompt: y}\n"
      "  - {name: c, prompt: Decide., text: [b, a]}\n",
      "f.yaml");
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_EQ(flow->PromptOf(flow->agents[2], {{"a", "yes"}, {"b", "no"}}).value(), "b:\nno\n\na:\nyes\n\nDecide.");
  EXPECT_THAT(flow->Graph()[2].needs, ElementsAre(1, 0));
  EXPECT_THAT(flow->Graph()[2].reads, ElementsAre());
}

TEST(Texts, AreLimited) {
  const std::string yaml =
      "inputs: {x: y}\nagents: [{name: a, prompt: '{{input.x}}{{input.x}}{{input.x}}{{input.x}}'},"
      "{name: b, prompt: '{{input.x}}{{input.x}}{{input.x}}{{input.x}}!'}]\n";
  auto flow = ParseFlow(yaml, "f.yaml", {{"x", {std::string(kMaxFlowFileBytes, 'x')}}});
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_EQ(flow->PromptOf(flow->agents[0], {}).value().size(), kMaxFlowTextBytes);
  EXPECT_FALSE(flow->PromptOf(flow->agents[1], {}));
}

TEST(Reads, TakesOneContextOrSeveral) {
  auto flow = ParseFlow(
      "agents:\n  - {name: a, prompt: x}\n  - {name: b, prompt: x}\n"
      "  - {name: one, reads: a, prompt: y, on_miss: fail}\n"
      "  - name: two\n    system: own\n    prompt: y\n    reads: [{from: a, budget: 512MiB}, {from: b, on_miss: text, "
      "budget: 9}]\n"
      "    on_miss: fail\n",
      "f.yaml");
  ASSERT_TRUE(flow) << flow.error().message;
  const auto graph = flow->Graph();
  EXPECT_THAT(graph[2].reads, ElementsAre(0));
  EXPECT_EQ(graph[2].inherits, -1);
  EXPECT_THAT(graph[3].reads, ElementsAre(0, 1));
  EXPECT_THAT(graph[3].needs, ElementsAre(0, 1));
  EXPECT_EQ(flow->agents[2].edges[0].on_miss, OnMiss::kFail) << "the agent's";
  EXPECT_EQ(flow->agents[3].edges[0].on_miss, OnMiss::kFail);
  EXPECT_EQ(flow->agents[3].edges[1].on_miss, OnMiss::kText) << "the edge's own";
  EXPECT_EQ(flow->agents[3].edges[1].budget, 9);
  EXPECT_EQ(flow->agents[3].edges[1].budget_bytes, 0u);
  EXPECT_EQ(flow->agents[3].edges[0].budget, 0);
  EXPECT_EQ(flow->agents[3].edges[0].budget_bytes, uint64_t{512} << 20);
}

TEST(Reads, SayHowTheirContextsMayBeSpliced) {
  auto flow = ParseFlow(
      "agents:\n  - {name: a, prompt: x}\n  - {name: b, prompt: x}\n"
      "  - {name: one, reads: a, prompt: y}\n"
      "  - {name: two, reads: [a, {from: b, splice: off}], prompt: y, splice: repair=64}\n",
      "f.yaml");
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_EQ(ToString(flow->agents[2].edges[0].splice), "hide") << "the default";
  EXPECT_EQ(ToString(flow->agents[3].edges[0].splice), "repair=64") << "the agent's";
  EXPECT_EQ(ToString(flow->agents[3].edges[1].splice), "off") << "the edge's own";

  const std::string a = "  - {name: a, prompt: x}\n";
  EXPECT_EQ(ErrorOf(Agents(a + "  - {name: b, prompt: y, reads: a, splice: hid}\n")),
            "f.yaml:3:44: splice: expected off, exact-only, hide, repair=N or auto, found 'hid', did you mean 'hide'?");
  EXPECT_EQ(
      ErrorOf(Agents(a + "  - {name: b, prompt: y, reads: {from: a, splice: repair=33}}\n")),
      "f.yaml:3:51: splice: repair=N: expected N to be a multiple of 32 from 32 to 1048576, found 'repair=33', did "
      "you mean 'repair=32'?");
  EXPECT_EQ(ErrorOf(Agents(a + "  - {name: b, prompt: y, inherits: a, splice: hide}\n")),
            "f.yaml:3:47: agent 'b': 'splice' has no meaning without 'reads'");
  EXPECT_THAT(ErrorOf(Agents(a + "  - {name: b, prompt: y, inherits: {from: a, splice: hide}}\n")),
              HasSubstr("splice"));
  EXPECT_THAT(ErrorOf(Agents(a + "  - {name: b, prompt: y, reads: a, splce: hide}\n")),
              HasSubstr("did you mean 'splice'?"));
}

TEST(Document, IsAnAgentThatOnlyReads) {
  auto flow = ParseFlow(
      "inputs: {x: [one, two]}\nagents:\n  - {name: doc, document: '{{item}}', foreach: x}\n"
      "  - {name: reader, system: own, reads: doc, prompt: y}\n",
      "f.yaml");
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_TRUE(flow->agents[0].document);
  EXPECT_EQ(flow->agents[0].max_tokens, 0);
  EXPECT_EQ(flow->PromptOf(flow->agents[1], {}).value(), "two");
  EXPECT_FALSE(flow->agents[2].document);
  EXPECT_EQ(flow->Graph()[0].write_tokens, 0);

  EXPECT_EQ(ErrorOf(Agents("  - {name: a, document: x, max_tokens: 3}\n")),
            "f.yaml:2:28: agent 'a': 'max_tokens' has no meaning with 'document', which is only read");
  EXPECT_THAT(ErrorOf(Agents("  - {name: a, document: x, prompt: y}\n")), HasSubstr("'prompt' has no meaning"));
  EXPECT_THAT(ErrorOf(Agents("  - {name: a, document: ''}\n")), HasSubstr("'document' is missing or empty"));
  const std::string doc = "  - {name: a, document: x}\n";
  EXPECT_THAT(ErrorOf(Agents(doc + "  - {name: b, prompt: y, text: a}\n")), HasSubstr("'reads' takes it"));
  EXPECT_THAT(ErrorOf(Agents(doc + "  - {name: b, prompt: '{{a.output}}'}\n")), HasSubstr("'reads' takes it"));
}

TEST(Reads, ErrorsSayWhere) {
  const std::string ab = "  - {name: alpha, prompt: x}\n  - {name: beta, prompt: x}\n";
  EXPECT_EQ(ErrorOf(Agents(ab + "  - name: c\n    prompt: y\n    reads: [alpha, bete]\n")),
            "f.yaml:6:20: agent 'c': reads: there is no agent 'bete', did you mean 'beta'?");
  EXPECT_EQ(ErrorOf(Agents(ab + "  - name: c\n    prompt: y\n    reads: [alpha, alpha]\n")),
            "f.yaml:6:20: reads: 'alpha' is there twice");
  EXPECT_EQ(ErrorOf(Agents(ab + "  - name: c\n    prompt: y\n    reads: []\n")),
            "f.yaml:6:12: reads: the list is empty");
  EXPECT_EQ(ErrorOf(Agents(ab + "  - name: c\n    reads: alpha\n")),
            "f.yaml:4:5: agent 'c': it has nothing to read: 'prompt' is missing or empty");
  EXPECT_THAT(ErrorOf(Agents(ab + "  - {name: c, prompt: y, inherits: alpha, reads: beta}\n")),
              StartsWith("f.yaml:4:50: agent 'c': 'reads' puts contexts behind an own prefix"));
  EXPECT_THAT(ErrorOf(Agents(ab + "  - {name: c, prompt: y, inherits: [alpha, beta]}\n")),
              StartsWith("f.yaml:4:36: inherits: expected one agent's name, found a list"));
  EXPECT_EQ(ErrorOf(Agents(ab + "  - {name: c, prompt: y, reads: {frm: alpha}}\n")),
            "f.yaml:4:34: unknown key 'frm', did you mean 'from'?");
  EXPECT_EQ(ErrorOf(Agents("  - {name: a, prompt: x, reads: b}\n  - {name: b, prompt: x, text: a}\n")),
            "f.yaml:2:33: agent 'a': reads: 'b' is not before it (a → b → a)");
}

TEST(EdgeCodecs, TheProducerWritesWhatItsReadersWant) {
  auto flow =
      ParseFlow("agents:\n  - {name: a, prompt: x}\n  - {name: b, prompt: y, inherits: {from: a, kv: i4}}\n", "f.yaml");
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_EQ(flow->agents[0].kv, (CodecPair{CodecId::kI4, CodecId::kI4}));
  EXPECT_EQ(
      ErrorOf(Agents("  - {name: a, prompt: x, kv: i8}\n  - {name: b, prompt: y, inherits: {from: a, kv: i4}}\n")),
      "f.yaml:3:50: agent 'b' wants i4 pages of 'a', which writes i8; pages are written once");
}

constexpr char kMapReduce[] = R"(inputs:
  chapters: [one, two, three]
agents:
  - {name: sum, foreach: chapters, prompt: "{{index}}: {{item}}"}
  - {name: check, foreach: chapters, inherits: sum, prompt: "{{sum.output}}?"}
  - {name: all, prompt: "{{sum.output}} / {{sum-2.output}}", reads: check}
)";

TEST(Foreach, MakesAnAgentPerItem) {
  auto flow = ParseFlow(kMapReduce, "f.yaml");
  ASSERT_TRUE(flow) << flow.error().message;
  ASSERT_EQ(flow->agents.size(), 7u);
  EXPECT_EQ(flow->agents[1].name, "sum-2");
  EXPECT_EQ(flow->PromptOf(flow->agents[1], {}).value(), "2: two");
  const auto graph = flow->Graph();
  EXPECT_EQ(graph[4].inherits, 1) << "agents over one list go item by item";
  const std::map<std::string, std::string> said{{"sum-1", "a"}, {"sum-2", "b"}, {"sum-3", "c"}};
  EXPECT_EQ(flow->PromptOf(flow->agents[4], said).value(), "b?");
  EXPECT_EQ(flow->PromptOf(flow->agents[6], said).value(), "a\n\nb\n\nc / b") << "others get them all";
  EXPECT_THAT(graph[6].reads, ElementsAre(3, 4, 5));
}

TEST(Foreach, TakesItsListFromTheCommandLine) {
  auto flow = ParseFlow(kMapReduce, "f.yaml", {{"chapters", {"new", "texts"}}});
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_EQ(flow->agents.size(), 5u);
  EXPECT_EQ(flow->agents[1].item, "texts");
  EXPECT_EQ(flow->inputs.at("chapters"), "new\n\ntexts");
}

TEST(Foreach, ErrorsSayWhere) {
  EXPECT_EQ(
      ErrorOf("inputs: {chapters: [a]}\n" + Agents("  - {name: a, foreach: chapter, prompt: x}\n")),
      "f.yaml:3:24: foreach: expected an input's name or a list of texts; there is no input 'chapter', did you mean "
      "'chapters'?");
  EXPECT_EQ(ErrorOf(Agents("  - {name: a, foreach: [], prompt: x}\n")), "f.yaml:2:24: foreach: the list is empty");
  EXPECT_EQ(ErrorOf(Agents("  - {name: a, prompt: '{{item}}'}\n")),
            "f.yaml:2:23: agent 'a': {{item}} has no meaning without 'foreach'");
  EXPECT_EQ(ErrorOf(Agents("  - {name: a, foreach: [x, y], prompt: x}\n  - {name: a-2, prompt: x}\n")),
            "f.yaml:3:12: a second agent is called 'a-2'");
  EXPECT_EQ(ErrorOf(Agents("  - {name: a, foreach: [x, y], prompt: x}\n  - {name: b, prompt: x, inherits: a}\n")),
            "f.yaml:3:36: agent 'b' inherits from 'a', which are 2 agents; 'reads' takes several contexts");
}

TEST(Inputs, FromTheCommandLineTakeThePlaceOfTheFiles) {
  const std::string yaml =
      "inputs:\n  topic: old\n  source: {file: nowhere.txt}\n  needed:\nagents: [{name: a, prompt: x}]\n";
  auto flow = ParseFlow(yaml, "f.yaml", {{"topic", {"new"}}, {"source", {"s"}}, {"needed", {"n"}}});
  ASSERT_TRUE(flow) << flow.error().message;
  EXPECT_EQ(flow->inputs.at("topic"), "new");
  EXPECT_EQ(flow->inputs.at("source"), "s") << "the file is not even looked for";
  flow = ParseFlow(yaml, "f.yaml", {{"source", {"s"}}});
  ASSERT_FALSE(flow);
  EXPECT_EQ(flow.error().message,
            "f.yaml:4:3: input 'needed' has no text: give one with --input needed=TEXT or needed=@FILE");
  flow = ParseFlow(yaml, "f.yaml", {{"source", {"s"}}, {"topc", {"x"}}});
  ASSERT_FALSE(flow);
  EXPECT_EQ(flow.error().message, "f.yaml: there is no input 'topc', did you mean 'topic'?");
}

TEST_F(FlowFileTest, AddInputTakesTextsAndFiles) {
  FlowInputs inputs;
  EXPECT_TRUE(AddInput("a=one=two", inputs));
  EXPECT_TRUE(AddInput("a=@" + Write("x.txt", "from a file"), inputs));
  EXPECT_TRUE(AddInput("b=", inputs));
  EXPECT_THAT(inputs.at("a"), ElementsAre("one=two", "from a file"));
  EXPECT_THAT(inputs.at("b"), ElementsAre(""));
  EXPECT_EQ(AddInput("novalue", inputs).error().message, "--input 'novalue': expected NAME=TEXT or NAME=@FILE");
  EXPECT_EQ(AddInput("a=@/nowhere", inputs).error().code, Code::kNotFound);
  EXPECT_EQ(AddInput("a=\xff", inputs).error().code, Code::kInvalidArgument);
}

}  // namespace
}  // namespace qkv
