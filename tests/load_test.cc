// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Many agents at once on one broker whose budget holds a third of what is published: producers publish, consumers attach,
// generate and let go, at random, while contexts come and are evicted. Each context says one secret marker over and over,
// and the model (tests/tiny_model.h) answers with what its context says most. So:
//   - every answer holds the marker of its own context and of no other;
//   - after an attach it is, bit for bit, what that context gave when it was alone;
//   - after a fallback it is, bit for bit, that of a cold run.
// Once with a process per agent, for QKV_LOAD_SECONDS (60), once with a thread per agent, for ThreadSanitizer.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <thread>

#include "qkv/broker/server.h"
#include "qkv/engine/agent.h"
#include "tests/process.h"
#include "tests/tiny_model.h"

namespace qkv::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kContexts = 24;
constexpr int kProducers = 4;
constexpr int kConsumers = 16;
constexpr uint64_t kBudgetBytes = 1280 << 10;         // a context takes some 130 to 220 KiB
constexpr auto kPatience = std::chrono::seconds(30);  // twenty processes may share two cores
constexpr const char* kPrompts[] = {"and then", "what was it?", "x"};

int Seconds(int otherwise) {
  const char* given = std::getenv("QKV_LOAD_SECONDS");
  return given != nullptr ? std::max(1, std::atoi(given)) : otherwise;
}

std::string NameOf(int context) {
  return fmt::format("context-{}", context);
}

// Every other token is the context's marker.
std::vector<Token> TokensOf(int context) {
  std::mt19937 random(static_cast<uint32_t>(context));
  std::vector<Token> tokens = {1};
  const size_t n = 40 + static_cast<size_t>(context) * 7;
  while (tokens.size() < n) {
    tokens.push_back(TinyModel::kFirstMarker + context);
    tokens.push_back(static_cast<Token>(3 + random() % 256));
  }
  return tokens;
}

Result<std::unique_ptr<Agent>> NewAgent(const std::shared_ptr<const Model>& model, BrokerClient* client) {
  SequenceOptions options;
  options.n_ctx = 512;
  options.n_threads = 1;
  options.kv = {CodecId::kI8, CodecId::kI8};
  QKV_ASSIGN_OR_RETURN(auto sequence, Sequence::Create(model, options));
  return std::make_unique<Agent>(model, std::move(sequence), client);
}

TurnRequest Request(int context, int prompt) {
  TurnRequest request;
  request.prompt = kPrompts[prompt];
  request.raw = true;
  request.max_tokens = 6;
  request.ignore_eos = true;
  request.digest_logits = true;
  request.history = TokensOf(context);
  return request;
}

// Its own marker and nobody else's.
bool SaysItsOwnMarkerOnly(const std::string& text, int context) {
  bool own = false;
  for (int i = 0; i < TinyModel::kMarkers; ++i) {
    const bool there = text.find(TinyModel::Marker(i)) != std::string::npos;
    if (there && i != context) return false;
    own = own || there;
  }
  return own;
}

struct Answers {
  std::string attached;  // digest of all logits, with nobody else around
  std::string cold;
};
using References = std::map<std::pair<int, int>, Answers>;  // by context and prompt

References AnswersAlone(const std::shared_ptr<const Model>& model, const std::string& socket) {
  References references;
  auto client = BrokerClient::Connect(socket, kPatience);
  EXPECT_TRUE(client) << client.error().message;
  for (int context = 0; context < kContexts; ++context) {
    auto producer = NewAgent(model, client->get());
    EXPECT_TRUE(producer);
    EXPECT_TRUE((*producer)->sequence().Forward(TokensOf(context)));
    const auto published = (*producer)->sequence().Publish({.name = "alone"});
    EXPECT_TRUE(published);
    EXPECT_TRUE(PublishContext(**client, *published));
    for (int prompt = 0; prompt < static_cast<int>(std::size(kPrompts)); ++prompt) {
      TurnRequest request = Request(context, prompt);
      const auto cold = (*NewAgent(model, nullptr))->Run(request);
      request.inherits = "alone";
      request.on_miss = OnMiss::kFail;
      const auto attached = (*NewAgent(model, client->get()))->Run(request);
      EXPECT_TRUE(cold && attached);
      if (!cold || !attached) return references;
      EXPECT_TRUE(SaysItsOwnMarkerOnly(attached->text, context)) << attached->text;
      EXPECT_TRUE(SaysItsOwnMarkerOnly(cold->text, context)) << cold->text;
      references[{context, prompt}] = {attached->logits_digest, cold->logits_digest};
    }
    EXPECT_TRUE((*client)->Remove("alone"));
  }
  return references;
}

struct Tally {
  int64_t published = 0, publish_refused = 0, attached = 0, text = 0, failed = 0;
  std::string wrong;  // the first thing that was; empty: nothing

  void Add(const Tally& other) {
    published += other.published;
    publish_refused += other.publish_refused;
    attached += other.attached;
    text += other.text;
    failed += other.failed;
    if (wrong.empty()) wrong = other.wrong;
  }
  std::string Line() const {
    return fmt::format("{} {} {} {} {} {}\n", published, publish_refused, attached, text, failed, wrong);
  }
  static Tally From(const std::string& line) {
    Tally tally;
    std::istringstream in(line);
    in >> tally.published >> tally.publish_refused >> tally.attached >> tally.text >> tally.failed >> std::ws;
    if (!in) tally.wrong = "no tally: " + line;
    std::getline(in, tally.wrong);
    return tally;
  }
};

Tally Produce(const std::shared_ptr<const Model>& model, const std::string& socket, int producer,
              Clock::time_point end) {
  Tally tally;
  std::mt19937 random(static_cast<uint32_t>(1000 + producer));
  auto client = BrokerClient::Connect(socket, kPatience);
  auto agent = NewAgent(model, nullptr);
  if (!client || !agent) return {.wrong = "producer: cannot start"};
  while (Clock::now() < end) {
    const int context = producer + kProducers * static_cast<int>(random() % (kContexts / kProducers));
    Sequence& sequence = (*agent)->sequence();
    sequence.Clear();
    if (auto read = sequence.Forward(TokensOf(context)); !read) return {.wrong = read.error().message};
    const auto made = sequence.Publish({.name = NameOf(context)});
    if (!made) return {.wrong = made.error().message};
    if (const Status published = PublishContext(**client, *made)) {
      ++tally.published;
    } else if (published.error().reason == Reason::kPoolFull) {  // the others hold everything
      ++tally.publish_refused;
    } else {
      tally.wrong = "producer: " + published.error().message;
      return tally;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
  }
  return tally;
}

Tally Consume(const std::shared_ptr<const Model>& model, const std::string& socket, const References& references,
              int consumer, Clock::time_point end) {
  Tally tally;
  std::mt19937 random(static_cast<uint32_t>(consumer));
  std::unique_ptr<BrokerClient> client;
  std::unique_ptr<Agent> agent;
  while (Clock::now() < end && tally.wrong.empty()) {
    if (client == nullptr || random() % 4 == 0) {  // lets go of everything and starts anew
      agent.reset();
      auto connected = BrokerClient::Connect(socket, kPatience);
      if (!connected) return {.wrong = "consumer: " + connected.error().message};
      client = *std::move(connected);
      auto fresh = NewAgent(model, client.get());
      if (!fresh) return {.wrong = "consumer: " + fresh.error().message};
      agent = *std::move(fresh);
    }
    const int context = static_cast<int>(random() % kContexts);
    const int prompt = static_cast<int>(random() % std::size(kPrompts));
    TurnRequest request = Request(context, prompt);
    request.inherits = NameOf(context);
    request.on_miss = random() % 8 == 0 ? OnMiss::kFail : OnMiss::kText;
    const auto result = agent->Run(request);
    if (!result) {
      ++tally.failed;
      if (request.on_miss != OnMiss::kFail || result.error().reason != Reason::kNotFound) {
        tally.wrong = fmt::format("{}: {}", request.inherits, result.error().message);
      }
      continue;
    }
    const bool attached = result->mode == HandoffMode::kAttach;
    ++(attached ? tally.attached : tally.text);
    const Answers& alone = references.at({context, prompt});
    if (!attached && result->reason != Reason::kNotFound) {
      tally.wrong = fmt::format("{}: fell back: {}", request.inherits, result->reason_detail);
    } else if (result->logits_digest != (attached ? alone.attached : alone.cold)) {
      tally.wrong =
          fmt::format("{}: another answer ({}): {}", request.inherits, HandoffModeName(result->mode), result->text);
    } else if (!SaysItsOwnMarkerOnly(result->text, context)) {
      tally.wrong = fmt::format("{}: not its own marker: {}", request.inherits, result->text);
    }
  }
  return tally;
}

class Load : public ::testing::Test {
 protected:
  void SetUp() override {
    model_path_ = dir_.path() + "/model.gguf";
    testing::WriteTinyModel({}, model_path_);
    auto model = Model::Load(model_path_);
    ASSERT_TRUE(model) << model.error().message;
    model_ = *std::move(model);
    BrokerOptions options;
    options.socket_path = dir_.path() + "/broker.sock";
    options.budget_bytes = kBudgetBytes;
    auto server = BrokerServer::Start(options);
    ASSERT_TRUE(server) << server.error().message;
    server_ = *std::move(server);
    references_ = AnswersAlone(model_, server_->socket_path());
    ASSERT_FALSE(HasFailure());
  }

  void ExpectAllWell(const Tally& tally, int seconds) {
    auto client = BrokerClient::Connect(server_->socket_path());
    ASSERT_TRUE(client);
    const auto status = (*client)->List();
    ASSERT_TRUE(status);
    fmt::print(
        "{} s: {} published ({} refused: pool_full), {} attached, {} read as text, {} failed as asked; {} evicted\n",
        seconds, tally.published, tally.publish_refused, tally.attached, tally.text, tally.failed,
        status->totals.evicted);
    EXPECT_EQ(tally.wrong, "");
    EXPECT_GT(tally.published, 0);
    EXPECT_GT(tally.attached, 0);
    EXPECT_GT(tally.text, 0) << "the budget was too large for anything to be gone";
    EXPECT_GT(status->totals.evicted, 0u);
    EXPECT_LE(status->used_bytes, kBudgetBytes);
    for (const ContextInfo& context : status->contexts) EXPECT_EQ(context.n_leases, 0u) << context.name;
    EXPECT_EQ(status->totals.checksum_failures, 0u);
    // The broker heard of every turn, AnswersAlone's attaches included.
    const uint64_t alone = kContexts * std::size(kPrompts);
    EXPECT_EQ(status->totals.fallbacks, static_cast<uint64_t>(tally.text + tally.failed));
    EXPECT_EQ(status->totals.attached, static_cast<uint64_t>(tally.attached) + alone);
  }

  TemporaryFolder dir_;
  std::string model_path_;
  std::shared_ptr<const Model> model_;
  std::unique_ptr<BrokerServer> server_;
  References references_;
};

TEST_F(Load, SixteenProcessesAttachFromFourWithoutEverMixingContexts) {
  const int seconds = Seconds(60);
  const std::string answers = dir_.path() + "/answers";
  {
    std::ofstream out(answers);
    for (const auto& [key, alone] : references_) {
      out << key.first << ' ' << key.second << ' ' << alone.attached << ' ' << alone.cold << '\n';
    }
  }
  std::vector<std::unique_ptr<Process>> agents;
  const auto start = [&](const char* role, int number) {
    agents.push_back(Process::Start({"/proc/self/exe", role, std::to_string(number), model_path_,
                                     server_->socket_path(), answers, std::to_string(seconds)}));
  };
  for (int i = 0; i < kProducers; ++i) start("--producer", i);
  for (int i = 0; i < kConsumers; ++i) start("--consumer", i);
  Tally tally;
  for (const auto& agent : agents) {
    ASSERT_EQ(agent->Wait(std::chrono::seconds(seconds + 60)), 0) << agent->errors();
    tally.Add(Tally::From(agent->output()));
  }
  ExpectAllWell(tally, seconds);
}

TEST_F(Load, EightThreadsAttachFromTwoWithoutEverMixingContexts) {
  const int seconds = Seconds(5);
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  std::vector<Tally> tallies(10);
  std::vector<std::thread> agents;
  for (int i = 0; i < 2; ++i) {
    agents.emplace_back([&, i] { tallies[i] = Produce(model_, server_->socket_path(), i, end); });
  }
  for (int i = 2; i < 10; ++i) {
    agents.emplace_back([&, i] { tallies[i] = Consume(model_, server_->socket_path(), references_, i, end); });
  }
  for (std::thread& agent : agents) agent.join();
  Tally tally;
  for (const Tally& one : tallies) tally.Add(one);
  ExpectAllWell(tally, seconds);
}

int RunAgent(const std::vector<std::string>& args) {
  const auto end = Clock::now() + std::chrono::seconds(std::atoi(args.at(5).c_str()));
  const auto model = Model::Load(args.at(2));
  if (!model) return 1;
  const int number = std::atoi(args.at(1).c_str());
  References references;
  std::ifstream in(args.at(4));
  int context, prompt;
  for (Answers alone; in >> context >> prompt >> alone.attached >> alone.cold;) references[{context, prompt}] = alone;
  const Tally tally = args.at(0) == "--producer" ? Produce(*model, args.at(3), number, end)
                                                 : Consume(*model, args.at(3), references, number, end);
  fmt::print("{}", tally.Line());
  return 0;
}

}  // namespace
}  // namespace qkv::testing

int main(int argc, char** argv) {
  if (argc == 7) return qkv::testing::RunAgent({argv + 1, argv + argc});
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
