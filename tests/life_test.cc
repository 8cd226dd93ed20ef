// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// A context's life beyond its process, its broker and its memory: kept on disk, announced again, encrypted. With a model:
// what is read in the end must be what was written.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "qkv/broker/server.h"
#include "qkv/engine/agent.h"
#include "qkv/engine/test_support.h"
#include "tests/process.h"

namespace qkv::testing {
namespace {

using ::testing::HasSubstr;

constexpr auto kPatience = std::chrono::seconds(30);
constexpr int kContextTokens = 40;

class Life : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(TestModel(), nullptr);
    ASSERT_NO_FATAL_FAILURE(Start());
  }

  void Start() {
    client_.reset();
    server_.reset();
    BrokerOptions options;
    options.socket_path = socket_;
    options.store_directory = store_;
    options.on_event = [this](const std::string& line) {
      const std::lock_guard lock(mutex_);
      log_ += line + "\n";
    };
    auto key = KeyFromFile(dir_.path() + "/seal.key");
    ASSERT_TRUE(key) << key.error().message;
    options.seal_key = *std::move(key);
    auto server = BrokerServer::Start(std::move(options));
    ASSERT_TRUE(server) << server.error().message;
    server_ = *std::move(server);
    auto client = BrokerClient::Connect(socket_);
    ASSERT_TRUE(client) << client.error().message;
    client_ = *std::move(client);
  }

  std::unique_ptr<Agent> NewAgent(BrokerClient* broker = nullptr) {
    SequenceOptions options;
    options.n_ctx = 512;
    options.n_threads = 2;
    options.kv = {CodecId::kI8, CodecId::kI8};
    auto sequence = Sequence::Create(TestModel(), options);
    EXPECT_TRUE(sequence) << sequence.error().message;
    return std::make_unique<Agent>(TestModel(), *std::move(sequence), broker == nullptr ? client_.get() : broker);
  }

  static TurnRequest Question() {
    TurnRequest request;
    request.prompt = "What is this text about?";
    request.max_tokens = 12;
    request.ignore_eos = true;
    request.digest_logits = true;
    return request;
  }

  // Reads a text, and publishes it.
  std::vector<Token> Publish(Agent& agent, const std::string& name, bool encrypt) {
    const std::vector<Token> tokens = SourceTokens(11, kContextTokens);
    TurnRequest request;
    request.history = tokens;
    request.prompt = "Remember this.";
    request.max_tokens = 0;
    request.publish_as = name;
    request.encrypt = encrypt;
    const auto done = agent.Run(request);
    EXPECT_TRUE(done) << done.error().message;
    return done ? done->context_tokens : std::vector<Token>();
  }
  TurnResult Run(Agent& agent, const TurnRequest& request) {
    auto result = agent.Run(request);
    EXPECT_TRUE(result) << result.error().message;
    return result ? *std::move(result) : TurnResult{};
  }
  ContextInfo Info(const std::string& name) {
    const auto status = client_->List();
    EXPECT_TRUE(status) << status.error().message;
    for (const ContextInfo& info : status->contexts) {
      if (info.name == name) return info;
    }
    return {};
  }
  std::vector<std::filesystem::path> Ending(const std::string& ending) {
    std::vector<std::filesystem::path> paths;
    for (const auto& file : std::filesystem::directory_iterator(store_)) {
      if (file.path().extension() == ending) paths.push_back(file.path());
    }
    return paths;
  }

  TemporaryFolder dir_;
  const std::string socket_ = dir_.path() + "/broker.sock";
  const std::string store_ = dir_.path() + "/store";
  std::mutex mutex_;
  std::string log_;
  std::unique_ptr<BrokerServer> server_;
  std::unique_ptr<BrokerClient> client_;
};

TEST_F(Life, ARestartedBrokerHandsOverFromDiskWhatTheProducerWouldHaveGoneOnWith) {
  auto producer = NewAgent();
  Publish(*producer, "report", false);
  const TurnResult expected = Run(*producer, Question());
  ASSERT_TRUE(Eventually([&] { return Info("report").stored; }));
  producer.reset();
  Start();
  EXPECT_FALSE(Info("report").in_memory);

  auto consumer = NewAgent();
  TurnRequest request = Question();
  request.inherits = "report";
  request.on_miss = OnMiss::kFail;
  request.publish_as = "answer";
  const TurnResult attached = Run(*consumer, request);
  EXPECT_EQ(attached.mode, HandoffMode::kAttach);
  EXPECT_EQ(attached.output_tokens, expected.output_tokens);
  EXPECT_EQ(attached.logits_digest, expected.logits_digest) << "bit for bit";

  // The answer names the report's file on disk; after another restart both are still one whole.
  ASSERT_TRUE(Eventually([&] { return Info("answer").stored; }));
  EXPECT_EQ(Ending(".segment").size(), 2u);
  const TurnResult more = Run(*consumer, Question());
  consumer.reset();  // an agent lets its lease go at the client that Start() replaces
  Start();
  auto next = NewAgent();
  request.inherits = "answer";
  request.publish_as.clear();
  const TurnResult again = Run(*next, request);
  EXPECT_EQ(again.mode, HandoffMode::kAttach);
  EXPECT_EQ(again.logits_digest, more.logits_digest);
}

TEST_F(Life, APageFlippedOnDiskIsFoundAndReadAsText) {
  const std::vector<Token> tokens = Publish(*NewAgent(), "report", false);
  ASSERT_TRUE(Eventually([&] { return Info("report").stored; }));
  Start();
  ASSERT_EQ(Ending(".segment").size(), 1u);
  const std::filesystem::path file = Ending(".segment").front();
  {
    ASSERT_EQ(::chmod(file.c_str(), 0600), 0);
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(-5000, std::ios::end);
    const char was = static_cast<char>(bytes.get());
    bytes.seekp(-5000, std::ios::end);
    bytes.put(static_cast<char>(was ^ 0x20));
  }
  ASSERT_EQ(::chmod(file.c_str(), 0400), 0);
  TurnRequest request = Question();
  request.inherits = "report";
  const TurnResult fallback = Run(*NewAgent(), request);
  EXPECT_EQ(fallback.mode, HandoffMode::kText);
  EXPECT_EQ(fallback.reason, Reason::kChecksum) << fallback.reason_detail;
  TurnRequest cold = Question();
  cold.history = tokens;
  EXPECT_EQ(fallback.logits_digest, Run(*NewAgent(), cold).logits_digest);
}

TEST_F(Life, WhenTheBrokerDoesNotKnowTheFilesOnDiskAConsumerPublishesCopies) {
  Publish(*NewAgent(), "report", false);
  ASSERT_TRUE(Eventually([&] { return Info("report").stored; }));
  Start();
  auto consumer = NewAgent();
  TurnRequest request = Question();
  request.inherits = "report";
  request.on_miss = OnMiss::kFail;
  ASSERT_EQ(Run(*consumer, request).mode, HandoffMode::kAttach);
  ASSERT_TRUE(client_->Remove("report"));
  TurnRequest go_on = Question();
  go_on.publish_as = "answer";
  Run(*consumer, go_on);
  const TurnResult expected = Run(*consumer, Question());
  auto next = NewAgent();
  request.inherits = "answer";
  const TurnResult attached = Run(*next, request);
  EXPECT_EQ(attached.mode, HandoffMode::kAttach);
  EXPECT_EQ(attached.logits_digest, expected.logits_digest);
}

// Whether any memory file of this process (the broker is in it) holds these bytes.
bool AnyMemoryFileHolds(const std::string& name, const std::vector<std::byte>& needle) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string link = std::filesystem::read_symlink(entry.path(), error);
    if (link.find("memfd:" + name) == std::string::npos) continue;
    std::ifstream in(entry.path(), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), {}};
    if (bytes.find(std::string(reinterpret_cast<const char*>(needle.data()), needle.size())) != std::string::npos) {
      return true;
    }
  }
  return false;
}

TEST_F(Life, AnEncryptedContextIsReadByWhoMayAttachAndByNobodyElse) {
  auto producer = NewAgent();
  Publish(*producer, "secret", true);
  const auto plain = producer->sequence().Publish({});
  ASSERT_TRUE(plain);
  uint64_t plain_bytes = 0;
  for (const auto& segment : plain->segments) plain_bytes += segment->bytes();
  const TurnResult expected = Run(*producer, Question());
  EXPECT_TRUE(Info("secret").encrypted);
  EXPECT_EQ(Info("secret").n_tokens, 0u) << "that is inside";

  // What the broker holds and what is on disk: neither token ids nor pages.
  const std::vector<std::byte> page(plain->segments[0]->page(0) + 64, plain->segments[0]->page(0) + 128);
  ASSERT_TRUE(AnyMemoryFileHolds("qkv-segment", page)) << "the producer's own: the search finds what is there";
  EXPECT_FALSE(AnyMemoryFileHolds("qkv-encrypted", page));
  ASSERT_TRUE(Eventually([&] { return Info("secret").stored; }));
  for (const char* ending : {".segment", ".context"}) {
    for (const auto& path : Ending(ending)) {
      std::ifstream in(path, std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(in), {}};
      EXPECT_EQ(bytes.find(std::string(reinterpret_cast<const char*>(page.data()), page.size())), std::string::npos);
    }
  }

  TurnRequest request = Question();
  request.inherits = "secret";
  request.on_miss = OnMiss::kFail;
  request.publish_as = "child";  // nobody asked to encrypt it
  for (const bool from_disk : {false, true}) {
    SCOPED_TRACE(from_disk);
    if (from_disk) {
      ASSERT_NO_FATAL_FAILURE(Start());
    }
    auto consumer = NewAgent();
    const TurnResult attached = Run(*consumer, request);
    EXPECT_EQ(attached.mode, HandoffMode::kCopy);
    EXPECT_EQ(attached.bytes_copied, plain_bytes);
    EXPECT_TRUE(attached.steps_down.empty()) << "nothing was refused";
    EXPECT_EQ(attached.output_tokens, expected.output_tokens);
    EXPECT_EQ(attached.logits_digest, expected.logits_digest);
    EXPECT_TRUE(Info("child").encrypted) << "what goes on from a secret is one";
  }

  // Without the key there is nothing, and with the key gone there never will be.
  std::filesystem::remove(dir_.path() + "/seal.key");
  ASSERT_NO_FATAL_FAILURE(Start());
  const auto denied = NewAgent()->Run(request);
  ASSERT_FALSE(denied);
  EXPECT_EQ(denied.error().reason, Reason::kDenied) << denied.error().message;
}

TEST_F(Life, ACopyAnswersAsAnAttachDoesAndIsCounted) {
  Publish(*NewAgent(), "secret", true);
  Publish(*NewAgent(), "open", false);
  TurnRequest request = Question();
  request.inherits = "secret";
  request.on_miss = OnMiss::kFail;
  const TurnResult copied = Run(*NewAgent(), request);
  request.inherits = "open";
  const TurnResult attached = Run(*NewAgent(), request);
  EXPECT_EQ(copied.mode, HandoffMode::kCopy);
  EXPECT_EQ(attached.mode, HandoffMode::kAttach);
  EXPECT_EQ(attached.bytes_copied, 0u);
  EXPECT_EQ(copied.logits_digest, attached.logits_digest) << "bit for bit";
  EXPECT_EQ(copied.tokens_reused, attached.tokens_reused);
  const std::string metrics = server_->metrics()->Text();
  EXPECT_NE(metrics.find(R"(qkvshare:handoffs_total{kv_type="i8",mode="copy",)"), std::string::npos);
  EXPECT_NE(metrics.find(fmt::format("}} {}\n", copied.bytes_copied)), std::string::npos) << metrics;
  const std::lock_guard lock(mutex_);
  EXPECT_NE(
      log_.find(fmt::format(R"("mode":"copy","reason":"","failed":false,"bytes_copied":{})", copied.bytes_copied)),
      std::string::npos);
}

// A broker of another user keeps its files; it could truncate them under whoever maps them.
TEST_F(Life, FilesOfAnotherUsersBrokerAreCopied) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  constexpr uid_t kOther = 65534;
  const TemporaryFolder theirs;
  ASSERT_EQ(::chown(theirs.path().c_str(), kOther, kOther), 0);
  const std::string socket = theirs.path() + "/broker.sock";
  pid_t broker = -1;
  const auto connect = [&]() -> std::unique_ptr<BrokerClient> {
    auto client = BrokerClient::Connect(socket, ConnectOptions{.broker_uids = {kOther}});
    return client ? *std::move(client) : nullptr;
  };
  std::unique_ptr<BrokerClient> client;
  const auto restart = [&] {
    client.reset();
    if (broker > 0) {
      ::kill(broker, SIGKILL);
      ::waitpid(broker, nullptr, 0);
    }
    broker = ::fork();
    if (broker == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::setgid(kOther) != 0 || ::setuid(kOther) != 0) ::_exit(1);
      const auto server = BrokerServer::Start({.socket_path = socket, .store_directory = theirs.path() + "/store"});
      if (!server) ::_exit(2);
      for (;;) ::pause();
    }
    ASSERT_TRUE(Eventually([&] { return (client = connect()) != nullptr; }));
  };
  ASSERT_NO_FATAL_FAILURE(restart());
  auto producer = NewAgent(client.get());
  Publish(*producer, "report", false);
  const TurnResult expected = Run(*producer, Question());
  ASSERT_TRUE(Eventually([&] {
    const auto status = client->List();
    return status && status->contexts.size() == 1 && status->contexts[0].stored;
  }));
  TurnRequest request = Question();
  request.inherits = "report";
  request.on_miss = OnMiss::kFail;
  EXPECT_EQ(Run(*NewAgent(client.get()), request).mode, HandoffMode::kAttach) << "sealed memory";
  producer.reset();
  ASSERT_NO_FATAL_FAILURE(restart());
  const TurnResult copied = Run(*NewAgent(client.get()), request);
  EXPECT_EQ(copied.mode, HandoffMode::kCopy);
  EXPECT_GT(copied.bytes_copied, 0u);
  EXPECT_EQ(copied.logits_digest, expected.logits_digest) << "bit for bit";
  ::kill(broker, SIGKILL);
  ::waitpid(broker, nullptr, 0);
}

TEST_F(Life, AnAgentReconnectsAndAnnouncesAgainToANewBroker) {
  auto client = BrokerClient::Connect(socket_);
  ASSERT_TRUE(client);
  auto producer = NewAgent(client->get());
  const std::vector<Token> tokens = Publish(*producer, "report", false);
  const std::string id = Info("report").id;
  server_.reset();
  std::filesystem::remove_all(store_);  // a broker that really knows nothing
  TurnRequest elsewhere = Question();
  elsewhere.inherits = "no-such";
  elsewhere.history = tokens;
  const TurnResult lost = Run(*NewAgent(client->get()), elsewhere);
  EXPECT_EQ(lost.reason, Reason::kPeerLost) << "no hang, and the text goes on";
  ASSERT_NO_FATAL_FAILURE(Start());
  EXPECT_EQ(Info("report").id, "");
  ASSERT_TRUE(producer->KeepAnnounced());
  EXPECT_EQ(Info("report").id, id);
  TurnRequest request = Question();
  request.inherits = id;
  request.on_miss = OnMiss::kFail;
  EXPECT_EQ(Run(*NewAgent(), request).mode, HandoffMode::kAttach);
}

TEST_F(Life, AHoldingPublisherFindsARestartedBrokerByItself) {
  client_.reset();
  server_.reset();
  const std::string socket = dir_.path() + "/other.sock";
  const auto start = [&] {
    return Process::Start(
        {"/bin/sh", "-c", R"(exec "$@" > /dev/null)", "sh", QKV_PROGRAM, "broker", "--socket", socket});
  };
  const auto find = [&](const char* name) {
    return Eventually([&] {
      const auto client = BrokerClient::Connect(socket);
      const auto status = client ? (*client)->List() : Result<BrokerStatus>(Err(Code::kPeerLost, "none"));
      return status && std::ranges::any_of(status->contexts, [&](const auto& info) { return info.name == name; });
    });
  };
  auto broker = start();
  ASSERT_TRUE(Eventually([&] { return BrokerClient::Connect(socket).has_value(); }));
  const auto publisher = Process::Start({QKV_PROGRAM, "publish", "--name", "held", "--socket", socket, "-m",
                                         TestModelPath(), "-p", "The mill stood by the river.", "--raw", "-c", "256",
                                         "--pin", "--ttl", "3600", "--quality-gate", "off", "--hold"});
  ASSERT_TRUE(find("held")) << publisher->errors();
  ASSERT_EQ(::kill(broker->pid(), SIGKILL), 0);
  EXPECT_EQ(broker->Wait(kPatience), 128 + SIGKILL);
  broker = start();
  EXPECT_TRUE(find("held"));
  const auto client = BrokerClient::Connect(socket);
  ASSERT_TRUE(client);
  const auto status = (*client)->List();
  ASSERT_TRUE(status);
  ASSERT_EQ(status->contexts.size(), 1u);
  EXPECT_TRUE(status->contexts[0].pinned);
  EXPECT_GT(status->contexts[0].expires_unix_ms, 0);
}

}  // namespace
}  // namespace qkv::testing
