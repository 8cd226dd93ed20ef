// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Handing over is exact: what a consumer in another process generates from a published context equals, token by token
// and logit bit by logit bit, what the producer generates that goes on itself after publishing. The producer is this
// process (or a `qkvshare publish` that is killed); consumers are `qkvshare attach`.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "qkv/broker/server.h"
#include "qkv/codec/test_support.h"
#include "qkv/engine/agent.h"
#include "qkv/engine/calibration.h"
#include "qkv/engine/codebooks.h"
#include "qkv/engine/layer_bits.h"
#include "qkv/engine/test_support.h"
#include "qkv/engine/whole_file.h"
#include "tests/process.h"

namespace qkv::testing {
namespace {

using Json = nlohmann::json;

constexpr int kTokens = 64;
constexpr auto kPatience = std::chrono::seconds(120);

struct Generated {
  std::vector<Token> tokens;
  std::string logits_digest;
  bool operator==(const Generated&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Generated& g) {
  return out << g.logits_digest << " (" << g.tokens.size() << " tokens)";
}

// What a consumer is started with.
struct Reader {
  std::string kv;
  std::string publish_as = "";
  std::string model = TestModelPath();
  bool balanced = false;
  std::string on_miss = "fail";
};

class HandoffExact : public ::testing::Test {
 protected:
  void SetUp() override {
    BrokerOptions options;
    options.socket_path = dir_.path() + "/broker.sock";
    auto server = BrokerServer::Start(options);
    ASSERT_TRUE(server) << server.error().message;
    server_ = *std::move(server);
    auto client = BrokerClient::Connect(options.socket_path);
    ASSERT_TRUE(client) << client.error().message;
    client_ = *std::move(client);
  }

  SequenceOptions OptionsOf(const KvChoice& kv) const {
    SequenceOptions options;
    options.n_ctx = 4608;
    options.n_threads = n_threads_;
    options.kv = kv.codecs;
    options.groups = kv.groups;
    return options;
  }
  std::unique_ptr<Agent> NewAgent(const KvChoice& kv) { return NewAgent(OptionsOf(kv)); }
  std::unique_ptr<Agent> NewAgent(const SequenceOptions& options) {
    auto sequence = Sequence::Create(TestModel(), options);
    EXPECT_TRUE(sequence) << sequence.error().message;
    return std::make_unique<Agent>(TestModel(), *std::move(sequence), client_.get());
  }

  // Reads `tokens` and publishes them under `name`.
  std::string Produce(Agent& agent, std::span<const Token> tokens, const std::string& name) {
    const Status read = agent.sequence().Forward(tokens);
    EXPECT_TRUE(read) << read.error().message;
    return PublishNow(agent, name);
  }
  std::string PublishNow(Agent& agent, const std::string& name) {
    Sequence::PublishInfo info;
    info.name = name;
    const auto context = agent.sequence().Publish(info);
    EXPECT_TRUE(context) << context.error().message;
    const Status published = PublishContext(*client_, *context);
    EXPECT_TRUE(published) << published.error().message;
    return context->card.id();
  }

  // The producer goes on itself; or, with a history, an agent that has read nothing goes on from that.
  static Generated GoOn(Agent& agent, std::vector<Token> history = {}) {
    TurnRequest request;
    request.history = std::move(history);
    request.max_tokens = kTokens;
    request.ignore_eos = true;
    request.digest_logits = true;
    const auto result = agent.Run(request);
    EXPECT_TRUE(result) << result.error().message;
    return {result->output_tokens, result->logits_digest};
  }

  std::unique_ptr<Process> StartConsumer(const std::string& context, CodecPair kv, const std::string& publish_as = "") {
    return StartConsumer(context, Reader{.kv = ToString(kv), .publish_as = publish_as});
  }
  std::unique_ptr<Process> StartConsumer(const std::string& context, const Reader& reader) {
    std::vector<std::string> argv = {QKV_PROGRAM,
                                     "attach",
                                     context,
                                     "--socket",
                                     server_->socket_path(),
                                     "-m",
                                     reader.model,
                                     "-n",
                                     std::to_string(kTokens),
                                     "--ignore-eos",
                                     "--json",
                                     "--logits-digest",
                                     "--on-miss",
                                     reader.on_miss,
                                     "--kv",
                                     reader.kv,
                                     "-c",
                                     "4608",
                                     "-t",
                                     std::to_string(n_threads_),
                                     "--quality-gate",
                                     "off"};
    if (!reader.publish_as.empty()) argv.insert(argv.end(), {"--publish", reader.publish_as});
    if (reader.balanced) argv.emplace_back("--bal");
    return Process::Start(argv);
  }
  static Json Report(Process& consumer) {
    EXPECT_EQ(consumer.Wait(kPatience), 0) << consumer.errors();
    Json json = Json::parse(consumer.output(), nullptr, false);
    EXPECT_FALSE(json.is_discarded()) << consumer.output();
    return json.is_discarded() ? Json::object() : json;
  }
  static Generated GeneratedOf(const Json& report) {
    return {report.value("token_ids", std::vector<Token>()), report.value("logits_digest", "")};
  }
  static Generated Finish(Process& consumer) {
    const Json report = Report(consumer);
    EXPECT_EQ(report.value("mode", ""), "attach");
    return GeneratedOf(report);
  }

  // A consumer goes on from context `id` and publishes what came of it, another one from that; so does the producer.
  void ExpectTwoHops(Agent& producer, const std::string& id, Reader reader) {
    reader.publish_as = "second";
    const Generated first = Finish(*StartConsumer(id, reader));
    EXPECT_EQ(first, GoOn(producer));
    ASSERT_EQ(first.tokens.size(), static_cast<size_t>(kTokens));
    const Token last = first.tokens.back();
    ASSERT_TRUE(producer.sequence().Forward({&last, 1}));  // published with the context
    PublishNow(producer, "own");
    reader.publish_as.clear();
    EXPECT_EQ(Finish(*StartConsumer("second", reader)), GoOn(producer));
  }

  int n_threads_ = 2;  // of producers and consumers
  TemporaryFolder dir_;
  std::unique_ptr<BrokerServer> server_;
  std::unique_ptr<BrokerClient> client_;
};

// Every pair of the plain codecs.
std::vector<CodecPair> AllPairs() {
  std::vector<CodecPair> pairs;
  for (const Codec& k : Codecs()) {
    for (const Codec& v : Codecs()) {
      if (!k.rotated && !v.rotated) pairs.push_back({k.id, v.id});
    }
  }
  return pairs;
}

// Of the rotated ones those that presets are made of, with refinement planes and without.
std::vector<CodecPair> RotatedPairs() {
  std::vector<CodecPair> pairs;
  for (const char* text : {"8", "k=6,v=5", "k=5,v=4", "4", "k=4,v=3", "4+4"}) pairs.push_back(*ParseCodecPair(text));
  return pairs;
}

std::string PairName(const ::testing::TestParamInfo<CodecPair>& info) {
  std::string name = ToString(info.param);
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

class HandoffExactPair : public HandoffExact, public ::testing::WithParamInterface<CodecPair> {};

TEST_P(HandoffExactPair, ShortContexts) {
  for (const size_t n : {1, 2, 31, 32, 33}) {
    auto producer = NewAgent(GetParam());
    const std::string id = Produce(*producer, SourceTokens(17, n), "short");
    const Generated theirs = Finish(*StartConsumer(id, GetParam()));  // one after the other: both use all cores
    EXPECT_EQ(theirs, GoOn(*producer)) << ToString(GetParam()) << ", " << n << " tokens";
  }
}

TEST_P(HandoffExactPair, LongContexts) {
  for (const size_t n : {1000, 4000}) {
    auto producer = NewAgent(GetParam());
    const std::string id = Produce(*producer, SourceTokens(5, n), "long");
    const Generated theirs = Finish(*StartConsumer(id, GetParam()));  // one after the other: both use all cores
    EXPECT_EQ(theirs, GoOn(*producer)) << ToString(GetParam()) << ", " << n << " tokens";
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, HandoffExactPair, ::testing::ValuesIn(AllPairs()), PairName);

class HandoffExactRotated : public HandoffExact, public ::testing::WithParamInterface<CodecPair> {};

TEST_P(HandoffExactRotated, TheProducersCodecsOrTheReadersOwn) {
  const std::vector<CodecPair> pairs = RotatedPairs();
  const size_t index = static_cast<size_t>(std::ranges::find(pairs, GetParam()) - pairs.begin());
  const CodecPair others = pairs[(index + 1) % pairs.size()];
  for (const size_t n : {1, 33, 1000}) {
    SCOPED_TRACE(fmt::format("{}, {} tokens", ToString(GetParam()), n));
    auto producer = NewAgent(GetParam());
    const std::string id = Produce(*producer, SourceTokens(5, n), "context");
    EXPECT_EQ(Finish(*StartConsumer(id, GetParam())), GoOn(*producer));
    // A reader that writes other pages behind these: its twin is a sequence of this process.
    auto twin = NewAgent(others);
    const auto context = FetchContext(*client_, id);
    ASSERT_TRUE(context) << context.error().message;
    const Status attached = twin->sequence().Attach(*context);
    ASSERT_TRUE(attached) << attached.error().message;
    EXPECT_EQ(Finish(*StartConsumer(id, others)), GoOn(*twin)) << "read by " << ToString(others);
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, HandoffExactRotated, ::testing::ValuesIn(RotatedPairs()), PairName);

TEST_F(HandoffExact, AfterASecondAndAThirdHop) {
  const CodecPair kv = {CodecId::kI8, CodecId::kI4};
  auto producer = NewAgent(kv);
  std::string id = Produce(*producer, SourceTokens(100, 333), "hop0");
  for (int hop = 1; hop <= 3; ++hop) {
    // The consumer goes on from what the consumer before it published; the producer does the same all by itself.
    auto consumer = StartConsumer(id, kv, fmt::format("hop{}", hop));
    const Generated theirs = Finish(*consumer);
    EXPECT_EQ(theirs, GoOn(*producer)) << "hop " << hop;
    const Token last = theirs.tokens.back();
    ASSERT_TRUE(producer->sequence().Forward({&last, 1}));  // published with the context
    PublishNow(*producer, "own");
    id = fmt::format("hop{}", hop);
  }
}

// Tokens grouped by importance, the others in fewer bits or dropped; and what is made of that in a second hop.
TEST_F(HandoffExact, OfAGroupedPrompt) {
  for (const char* text : {"tokens:20/8/4", "tokens:30/8/drop"}) {
    SCOPED_TRACE(text);
    const KvChoice kv = *ParseKvChoice(text);
    auto producer = NewAgent(kv);
    const std::string id = Produce(*producer, SourceTokens(5, 700), "grouped");
    ASSERT_EQ(producer->sequence().groups().size(), 640);
    ExpectTwoHops(*producer, id, {.kv = ToString(kv.codecs.pair)});
  }
}

TEST_F(HandoffExact, TwoConsumersForkOneParentAtOnce) {
  const CodecPair kv = {CodecId::kI4, CodecId::kI4};
  auto producer = NewAgent(kv);
  const std::string id = Produce(*producer, SourceTokens(900, 200), "parent");
  auto left = StartConsumer(id, kv);
  auto right = StartConsumer(id, kv);
  const Generated left_result = Finish(*left);
  EXPECT_EQ(left_result, Finish(*right));
  EXPECT_EQ(left_result, GoOn(*producer));
}

TEST_F(HandoffExact, TheProducerIsKilledRightAfterPublishing) {
  const CodecPair kv = {CodecId::kI8, CodecId::kI8};
  const std::string text =
      "The mill stood by the river for two hundred years, and nobody in the town could say who had built it.";
  // It stays after publishing, so that there is something to kill.
  auto victim = Process::Start({QKV_PROGRAM, "publish",
                                "--name",    "victim",
                                "--socket",  server_->socket_path(),
                                "-m",        TestModelPath(),
                                "-p",        text,
                                "--raw",     "--kv",
                                "i8",        "-c",
                                "4608",      "-t",
                                "2",         "--quality-gate",
                                "off",       "--hold"});
  std::string id;
  ASSERT_TRUE(Eventually(
      [&] {
        const auto status = client_->List();
        if (status && !status->contexts.empty()) id = status->contexts[0].id;
        return !id.empty();
      },
      kPatience))
      << victim->errors();
  ASSERT_EQ(::kill(victim->pid(), SIGKILL), 0);
  EXPECT_EQ(victim->Wait(kPatience), 128 + SIGKILL);

  const Generated theirs = Finish(*StartConsumer(id, kv));
  auto twin = NewAgent(kv);  // the dead producer's, in this process
  const auto tokens = twin->vocab().Tokenize(text, true, false);
  ASSERT_TRUE(tokens);
  Produce(*twin, *tokens, "twin");
  EXPECT_EQ(theirs, GoOn(*twin));
}

// --- pages that take more than the model to be read -----------------------------------------------------------------

// The model in a folder of the test's own, by a link: what it needs besides is looked for, and put, there.
class ModelFolder {
 public:
  ModelFolder() { std::filesystem::create_symlink(std::filesystem::absolute(TestModelPath()), model()); }
  std::string model() const { return dir_.path() + "/model.gguf"; }
  std::string file(const char* ending) const {
    return dir_.path() + "/" + TestModel()->identity().weights_digest() + ending;
  }

 private:
  TemporaryFolder dir_;
};

class HandoffExactBeside : public HandoffExact {
 protected:
  HandoffExactBeside() { n_threads_ = 1; }  // nothing here depends on it, and one never waits for another

  static std::shared_ptr<const Calibration> Calibrated(size_t first_token, const ModelFolder& folder) {
    constexpr int kLeast = 300;
    auto calibration = Calibrate(TestModel(), SourceTokens(first_token, kLeast), kLeast, 1);
    EXPECT_TRUE(calibration) << calibration.error().message;
    EXPECT_TRUE(calibration->Write(*TestModel(), folder.file(".qkvbal")));
    return std::make_shared<const Calibration>(*std::move(calibration));
  }
  static std::shared_ptr<const PqCodebooks> Written(PqCodebooks codebooks, const ModelFolder& folder) {
    EXPECT_TRUE(WriteCodebooks(codebooks, folder.file(".qkvpq")));
    return std::make_shared<const PqCodebooks>(std::move(codebooks));
  }
  static PqShape Shape() {
    const Geometry geometry = TestModel()->geometry();
    return {geometry.n_layers, geometry.n_kv_heads, geometry.head_dim};
  }

  // `reader` reads the context as text and says why: the only field of the model's identity that differs. Its answer is
  // that of an agent with `options` that has never heard of a context.
  void ExpectText(const std::string& id, Reader reader, const SequenceOptions& options, const char* field) {
    SCOPED_TRACE(reader.kv + (reader.balanced ? ", balanced" : ""));
    reader.on_miss = "text";
    const Json report = Report(*StartConsumer(id, reader));
    EXPECT_EQ(report.value("mode", ""), "text");
    EXPECT_EQ(report.value("reason", ""), "model_mismatch");
    std::vector<std::string> fields;
    for (const Json& step : report.value("steps_down", Json::array())) {
      for (const Json& mismatch : step["mismatches"]) fields.push_back(mismatch["field"]);
    }
    EXPECT_EQ(fields, std::vector<std::string>{field});
    EXPECT_EQ(GeneratedOf(report), GoOn(*NewAgent(options), tokens_));
  }

  const std::vector<Token> tokens_ = SourceTokens(40, 150);
};

TEST_F(HandoffExactBeside, InCodebooks) {
  const ModelFolder folder, others;
  SequenceOptions options = OptionsOf(*ParseKvChoice("pq4"));
  options.codebooks = Written(test::TestCodebooks(Shape(), TestModel()->weights_digest()), folder);
  auto producer = NewAgent(options);
  const std::string id = Produce(*producer, tokens_, "context");
  ExpectTwoHops(*producer, id, {.kv = "pq4", .model = folder.model()});

  std::mt19937 random(3);
  std::vector<int8_t> centroids(2 * Shape().n_heads() * PqCodebooks::kSideBytes);
  for (int8_t& centroid : centroids) centroid = static_cast<int8_t>(static_cast<int>(random() % 161) - 80);
  options.codebooks = Written(*PqCodebooks::Make(Shape(), TestModel()->weights_digest(), centroids), others);
  ExpectText(id, {.kv = "pq4", .model = others.model()}, options, "codebooks_digest");
  ExpectText(id, {.kv = "i8"}, OptionsOf(*ParseKvChoice("i8")), "codebooks_digest");
}

TEST_F(HandoffExactBeside, InCodecsByLayer) {
  const ModelFolder folder;
  const Geometry geometry = TestModel()->geometry();
  LayerSensitivity sensitivity;
  for (int layer = 0; layer < geometry.n_layers; ++layer) {
    sensitivity.k.layer.push_back(1 + layer % 5);
    sensitivity.v.layer.push_back(0.3 + layer % 3);
  }
  sensitivity.k.widths = sensitivity.v.widths = {0.9, 0.3, 0.1, 0.03, 0.01, 0.003};
  const std::string json = ToJson(sensitivity, TestModel()->identity().weights_digest());
  ASSERT_TRUE(WriteWholeFile(folder.file(".qkvlayers"), {std::as_bytes(std::span(json))}));
  const auto table = LayersWithinBits(sensitivity, geometry, 5);
  ASSERT_TRUE(table) << table.error().message;
  ASSERT_NE((*table)->at(0).codecs, (*table)->at(4).codecs);

  auto producer = NewAgent(KvChoice(PageCodecs(kLayersPair, *table)));
  const std::string id = Produce(*producer, tokens_, "context");
  // Who writes other pages needs nothing beside the model: the table is in the segment.
  auto twin = NewAgent(*ParseKvChoice("i8"));
  const auto context = FetchContext(*client_, id);
  ASSERT_TRUE(context) << context.error().message;
  ASSERT_TRUE(twin->sequence().Attach(*context));
  EXPECT_EQ(Finish(*StartConsumer(id, Reader{.kv = "i8"})), GoOn(*twin));
  ExpectTwoHops(*producer, id, {.kv = "layers:5", .model = folder.model()});
}

TEST_F(HandoffExactBeside, InBalancedKeys) {
  const ModelFolder folder, others;
  SequenceOptions options = OptionsOf(*ParseKvChoice("4")), plain = options;
  options.calibration = Calibrated(0, folder);
  auto producer = NewAgent(options);
  const std::string id = Produce(*producer, tokens_, "context");
  ExpectTwoHops(*producer, id, {.kv = "4", .model = folder.model(), .balanced = true});

  ExpectText(id, {.kv = "4", .model = folder.model()}, plain, "calibration_digest");
  options.calibration = Calibrated(1000, others);
  ExpectText(id, {.kv = "4", .model = others.model(), .balanced = true}, options, "calibration_digest");
}

TEST_F(HandoffExactBeside, InBalancedKeysOfTwoBands) {
  const ModelFolder folder;
  SequenceOptions options = OptionsOf(*ParseKvChoice("k=5/3,v=4"));
  options.calibration = Calibrated(0, folder);
  auto producer = NewAgent(options);
  const std::string id = Produce(*producer, tokens_, "context");
  ExpectTwoHops(*producer, id, {.kv = "k=5/3,v=4", .model = folder.model(), .balanced = true});

  // The matrices of two bands are others, by the same calibration.
  options.kv = ParseKvChoice("4")->codecs;
  ExpectText(id, {.kv = "4", .model = folder.model(), .balanced = true}, options, "calibration_digest");
}

}  // namespace
}  // namespace qkv::testing
