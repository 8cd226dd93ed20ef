// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// The ladder from attach to text: each reason to step down is brought about, and then
//   - with on_miss: fail, the turn fails for that reason and the agent is what it was: it goes on like one that never tried;
//   - with on_miss: text, the answer is, bit for bit, that of an agent that reads everything cold;
//   - the reason is in the result, and reaches the broker's log and counter.
// Models are tiny and made here, one for each way in which two models can differ.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "qkv/broker/protocol.h"
#include "qkv/broker/server.h"
#include "qkv/broker/socket.h"
#include "qkv/engine/agent.h"
#include "qkv/engine/quality_gate.h"
#include "tests/process.h"
#include "tests/tiny_model_fixture.h"

namespace qkv::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kContextTokens = 70;  // two full pages and a part of one
constexpr CodecPair kI8 = {CodecId::kI8, CodecId::kI8};

// Stands in for a broker of another version, or one that lies: hands out what it is given under the one name it knows.
class FakeBroker {
 public:
  explicit FakeBroker(const std::string& path) {
    auto listener = ListenAt(path);
    EXPECT_TRUE(listener) << listener.error().message;
    listener_ = *std::move(listener);
    thread_ = std::thread([this] { Run(); });
  }
  ~FakeBroker() {
    stop_ = true;
    thread_.join();
  }
  // The card, then the segments.
  void Offer(std::string id, std::vector<Fd> fds) {
    std::lock_guard lock(mutex_);
    id_ = std::move(id);
    fds_ = std::move(fds);
  }
  std::vector<TurnReport> TakeReports() {
    std::lock_guard lock(mutex_);
    return std::exchange(reports_, {});
  }

 private:
  void Run() {
    std::vector<Fd> clients;
    while (!stop_) {
      std::vector<pollfd> polled = {{listener_.socket.get(), POLLIN, 0}};
      for (const Fd& client : clients) polled.push_back({client.get(), POLLIN, 0});
      ::poll(polled.data(), polled.size(), 20);
      for (size_t i = 0; i + 1 < polled.size(); ++i) {
        if (polled[i + 1].revents != 0) Answer(clients[i]);
      }
      std::erase_if(clients, [](const Fd& client) { return !client.valid(); });
      Fd client(::accept4(listener_.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (client.valid()) clients.push_back(std::move(client));
    }
  }
  void Answer(Fd& client) {
    const auto message = ReceiveMessage(client, kDontWait);
    if (!message) return client.Reset();
    BrokerRequest request;
    ASSERT_TRUE(request.ParseFromString(message->bytes));
    BrokerReply reply;
    std::vector<int> out;
    std::lock_guard lock(mutex_);
    if (request.has_hello()) {
      reply.mutable_welcome()->set_protocol(kProtocolVersion);
      reply.mutable_welcome()->set_generation(1);
    } else if (request.has_attach()) {
      for (const Fd& fd : fds_) out.push_back(fd.get());
      reply.mutable_attached()->set_id(id_);
      reply.mutable_attached()->set_lease(1);
      reply.mutable_attached()->set_n_descriptors(static_cast<uint32_t>(out.size()));
    } else {
      if (request.has_report()) reports_.push_back(FromWire(request.report()));
      reply.mutable_done();
    }
    EXPECT_TRUE(SendMessage(client, reply.SerializeAsString(), out, kDontWait));
  }

  Listener listener_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::string id_;
  std::vector<Fd> fds_;
  std::vector<TurnReport> reports_;
  std::thread thread_;
};

struct Expected {
  Reason reason;
  std::vector<std::string> mismatches;  // fields; empty: not looked at
  bool own_text = false;                // the caller must bring the text: the card's token ids mean nothing here
};

class Ladder : public TinyModelTest {
 protected:
  void SetUp() override {
    model_ = Load({});
    BrokerOptions options;
    options.socket_path = dir_.path() + "/broker.sock";
    options.on_event = [this](const std::string& line) {
      std::lock_guard lock(mutex_);
      log_ += line + "\n";
    };
    auto server = BrokerServer::Start(options);
    ASSERT_TRUE(server) << server.error().message;
    server_ = *std::move(server);
    client_ = Connect(options.socket_path);
  }

  static std::unique_ptr<BrokerClient> Connect(const std::string& path) {
    auto client = BrokerClient::Connect(path);
    EXPECT_TRUE(client) << client.error().message;
    return *std::move(client);
  }
  std::unique_ptr<Agent> NewAgent(std::shared_ptr<const Model> model, BrokerClient* client, int n_ctx = 512) {
    SequenceOptions options;
    options.n_ctx = n_ctx;
    options.n_threads = 1;
    options.kv = kI8;
    auto sequence = Sequence::Create(model, options);
    EXPECT_TRUE(sequence) << sequence.error().message;
    auto agent = std::make_unique<Agent>(model, *std::move(sequence), client);
    if (admit_) agent->AdmitBy(admit_);
    return agent;
  }

  static std::vector<Token> ContextTokens(int n = kContextTokens) {
    std::vector<Token> tokens = {1};
    for (int i = 1; i < n; ++i) {
      tokens.push_back(i % 2 == 0 ? TinyModel::kFirstMarker + 7 : 3 + (i * 37) % 256);
    }
    return tokens;
  }

  // What `model` reads and seals.
  Context Made(std::shared_ptr<const Model> model) {
    auto producer = NewAgent(model, nullptr);
    EXPECT_TRUE(producer->sequence().Forward(ContextTokens()));
    Sequence::PublishInfo info;
    info.name = "context";
    auto context = producer->sequence().Publish(info);
    EXPECT_TRUE(context) << context.error().message;
    return *std::move(context);
  }
  static std::vector<std::byte> BytesOf(const Segment& segment) {
    std::vector<std::byte> bytes(segment.bytes());
    EXPECT_EQ(::pread(segment.fd().get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    return bytes;
  }
  static Fd Sealed(std::span<const std::byte> bytes) {
    auto fd = SealedMemfd("qkv-test", bytes);
    EXPECT_TRUE(fd) << fd.error().message;
    return *std::move(fd);
  }
  // The card, then the segments, as descriptors of their own.
  static std::vector<Fd> Descriptors(std::span<const std::byte> card, const Context& context) {
    std::vector<Fd> fds;
    fds.push_back(Sealed(card));
    for (const auto& segment : context.segments) fds.push_back(*segment->fd().Duplicate());
    return fds;
  }
  void OfferFake(const Context& context, std::vector<Fd> fds) {
    if (fake_ == nullptr) {
      fake_ = std::make_unique<FakeBroker>(dir_.path() + "/fake.sock");
      fake_client_ = Connect(dir_.path() + "/fake.sock");
    }
    fake_->Offer(context.card.id(), std::move(fds));
  }

  static TurnRequest Request(bool own_text) {
    TurnRequest request;
    request.inherits = "context";
    request.prompt = "[marker-109] and then";
    request.raw = true;
    request.max_tokens = 8;
    request.ignore_eos = true;
    request.digest_logits = true;
    if (own_text) request.history = ContextTokens(40);
    return request;
  }
  static void ExpectSame(const Result<TurnResult>& got, const Result<TurnResult>& expected) {
    ASSERT_TRUE(got) << got.error().message;
    ASSERT_TRUE(expected) << expected.error().message;
    EXPECT_EQ(got->output_tokens, expected->output_tokens);
    EXPECT_EQ(got->logits_digest, expected->logits_digest);
  }

  // `client`: of whoever hands out the context; null if there is nobody.
  void ExpectStepsDown(const Expected& expected, BrokerClient* client, int n_ctx = 512) {
    // fail: the agent has a life of its own before, and it goes on as if nothing had been.
    TurnRequest own;
    own.prompt = "something else entirely";
    own.raw = true;
    own.max_tokens = 4;
    own.ignore_eos = true;
    own.digest_logits = true;
    auto consumer = NewAgent(model_, client, n_ctx);
    auto twin = NewAgent(model_, nullptr, n_ctx);
    ExpectSame(consumer->Run(own), twin->Run(own));
    const std::vector<Token> before = consumer->sequence().tokens();
    TurnRequest request = Request(expected.own_text);
    request.on_miss = OnMiss::kFail;
    const auto failed = consumer->Run(request);
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().reason, expected.reason) << failed.error().message;
    EXPECT_EQ(consumer->sequence().tokens(), before);
    ExpectSame(consumer->Run(own), twin->Run(own));

    // text: as a cold run.
    request.on_miss = OnMiss::kText;
    const auto fallback = consumer->Run(request);
    TurnRequest cold = Request(false);
    cold.inherits.clear();
    cold.history = expected.own_text ? ContextTokens(40) : ContextTokens();
    ExpectSame(fallback, NewAgent(model_, nullptr, n_ctx)->Run(cold));
    EXPECT_EQ(fallback->mode, HandoffMode::kText);
    EXPECT_EQ(fallback->reason, expected.reason) << fallback->reason_detail;
    EXPECT_EQ(fallback->tokens_reused, 0);
    EXPECT_GT(fallback->tokens_recomputed, static_cast<int64_t>(cold.history.size()));
    ASSERT_EQ(fallback->steps_down.size(), 1u);
    const StepDown& step = fallback->steps_down[0];
    EXPECT_EQ(step.from, HandoffMode::kAttach);
    EXPECT_EQ(step.reason, expected.reason);
    EXPECT_EQ(step.detail, fallback->reason_detail);
    if (!expected.mismatches.empty()) {
      std::vector<std::string> fields;
      for (const FieldMismatch& mismatch : step.mismatches) {
        fields.push_back(mismatch.field);
        EXPECT_NE(mismatch.found, mismatch.expected);
      }
      EXPECT_EQ(fields, expected.mismatches);
    }
  }
  // Both of the turns above reached the real broker's log and counters.
  void ExpectCounted(Reason reason) {
    const std::string name(ReasonName(reason));
    const std::string metrics = server_->metrics()->Text();
    for (const char* on_miss : {"text", "fail"}) {
      EXPECT_THAT(metrics,
                  HasSubstr(fmt::format("qkvshare:fallback_total{{on_miss=\"{}\",reason=\"{}\"}} 1\n", on_miss, name)));
    }
    const auto status = client_->List();
    ASSERT_TRUE(status) << status.error().message;
    for (const ContextInfo& context : status->contexts)
      EXPECT_EQ(context.n_leases, n_leases_) << "a lease stayed behind";
    std::lock_guard lock(mutex_);
    EXPECT_THAT(log_, HasSubstr(fmt::format(R"("mode":"none","reason":"{}","failed":true)", name)));
    EXPECT_THAT(log_, HasSubstr(fmt::format(R"("mode":"text","reason":"{}","failed":false)", name)));
  }
  void ExpectStepsDownAndCounted(const Expected& expected, int n_ctx = 512) {
    ExpectStepsDown(expected, client_.get(), n_ctx);
    ExpectCounted(expected.reason);
  }
  // From the stand-in, which keeps the reports.
  void ExpectStepsDownFromFake(const Expected& expected) {
    ExpectStepsDown(expected, fake_client_.get());
    const auto reports = fake_->TakeReports();
    ASSERT_EQ(reports.size(), 2u + 2u);  // and the consumer's turns of its own, before and after the failure
    EXPECT_EQ(reports[1].reason, expected.reason);
    EXPECT_TRUE(reports[1].failed);
    EXPECT_EQ(reports[3].reason, expected.reason);
    EXPECT_EQ(reports[3].mode, "text");
  }
  void Publish(const Context& context, const PublishOptions& options = {}) {
    const Status published = PublishContext(*client_, context, options);
    ASSERT_TRUE(published) << published.error().message;
  }

  uint32_t n_leases_ = 0;  // that the test itself holds
  std::shared_ptr<const Model> model_;
  Agent::Admit admit_;  // of agents made from here on
  std::mutex mutex_;
  std::string log_;
  std::unique_ptr<BrokerServer> server_;
  std::unique_ptr<BrokerClient> client_;
  std::unique_ptr<FakeBroker> fake_;
  std::unique_ptr<BrokerClient> fake_client_;
};

TEST_F(Ladder, TheSameModelAttachesAndAnswersAsItsProducer) {
  auto producer = NewAgent(model_, client_.get());
  ASSERT_TRUE(producer->sequence().Forward(ContextTokens()));
  const auto context = producer->sequence().Publish({.name = "context"});
  ASSERT_TRUE(context);
  Publish(*context);
  TurnRequest request = Request(false);
  request.on_miss = OnMiss::kFail;
  const auto attached = NewAgent(Load({}), client_.get())->Run(request);  // another file of the same bytes
  request.inherits.clear();
  ExpectSame(attached, producer->Run(request));
  EXPECT_EQ(attached->mode, HandoffMode::kAttach);
  EXPECT_EQ(attached->tokens_reused, kContextTokens);
  EXPECT_TRUE(attached->steps_down.empty());
  EXPECT_THAT(server_->metrics()->Text(),
              HasSubstr(R"(qkvshare:handoffs_total{kv_type="i8",mode="attach",model_name="tiny"} 1)"));
}

// --- the wrong model ---------------------------------------------------------------------------------------------

TEST_F(Ladder, OtherWeightsOfTheSameShape) {
  Publish(Made(Load({.weights_seed = 2})));
  ExpectStepsDownAndCounted({Reason::kModelMismatch, {"weights_digest"}});
}

TEST_F(Ladder, AnotherQuantizationOfTheSameWeights) {
  Publish(Made(Load({.type = GGML_TYPE_Q8_0})));
  ExpectStepsDownAndCounted({Reason::kModelMismatch, {"weights_digest"}});
}

TEST_F(Ladder, AnotherRopeBase) {
  Publish(Made(Load({.rope_base = 500000})));
  ExpectStepsDownAndCounted({Reason::kModelMismatch, {"rope.base"}});
}

TEST_F(Ladder, AnotherEpsilonOfTheNormalizations) {
  Publish(Made(Load({.norm_eps = 1e-6f})));
  ExpectStepsDownAndCounted({Reason::kModelMismatch, {"norm_eps"}});
}

TEST_F(Ladder, AnotherTokenizer) {
  Publish(Made(Load({.other_tokenizer = true})));
  ExpectStepsDownAndCounted({Reason::kTokenizerMismatch, {"tokenizer_digest"}, /*own_text=*/true});
}

TEST_F(Ladder, WithoutTextAnotherTokenizerLeavesNothingToRead) {
  Publish(Made(Load({.other_tokenizer = true})));
  const auto result = NewAgent(model_, client_.get())->Run(Request(false));
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().reason, Reason::kTokenizerMismatch);
  EXPECT_THAT(result.error().message, HasSubstr("no text to fall back to"));
}

TEST_F(Ladder, AnotherChatTemplate) {
  Publish(Made(Load({.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"})));
  ExpectStepsDownAndCounted({Reason::kTokenizerMismatch, {"chat_template_digest"}});
}

TEST_F(Ladder, AnotherNumberOfLayers) {
  Publish(Made(Load({.n_layers = 3})));
  ExpectStepsDownAndCounted({Reason::kModelMismatch, {"layers", "weights_digest"}});
}

TEST_F(Ladder, AnotherNumberOfHeads) {
  Publish(Made(Load({.n_heads = 2})));  // twice as wide
  ExpectStepsDownAndCounted({Reason::kModelMismatch,
                             {"layers[0].n_heads", "layers[0].k_head_dim", "layers[0].v_head_dim", "layers[1].n_heads",
                              "layers[1].k_head_dim", "layers[1].v_head_dim", "rope.rotary_dims", "weights_digest"}});
}

TEST_F(Ladder, AnotherNumberOfKvHeads) {
  Publish(Made(Load({.n_kv_heads = 4})));
  ExpectStepsDownAndCounted(
      {Reason::kModelMismatch, {"layers[0].n_kv_heads", "layers[1].n_kv_heads", "weights_digest"}});
}

TEST_F(Ladder, AnAdapterThatThisModelDoesNotHave) {
  Context context = Made(model_);
  auto* adapter = context.card.mutable_model()->add_adapters();
  adapter->set_digest(std::string(32, 'a'));
  adapter->set_scale(1);
  Publish(context);
  ExpectStepsDownAndCounted({Reason::kModelMismatch, {"adapters"}});
}

TEST_F(Ladder, SegmentsOfAnotherModelUnderACardOfThisOne) {
  Context context = Made(model_);
  const Context other = Made(Load({.weights_seed = 2}));
  context.segments = other.segments;
  *context.card.mutable_segments() = other.card.segments();
  Publish(context);
  ExpectStepsDownAndCounted({Reason::kModelMismatch});
}

// --- what this version cannot read -------------------------------------------------------------------------------

TEST_F(Ladder, ACodecThatThisVersionDoesNotKnowInTheCard) {
  Context context = Made(model_);
  context.card.mutable_format()->set_kv("i3");
  Publish(context);
  ExpectStepsDownAndCounted({Reason::kCodecUnsupported, {"format.kv"}});
}

TEST_F(Ladder, ACodecThatThisVersionDoesNotKnowInAPage) {
  const Context context = Made(model_);
  std::vector<std::byte> bytes = BytesOf(*context.segments[0]);
  SegmentHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  std::vector<PageEntry> table(header.n_pages);
  std::memcpy(table.data(), bytes.data() + sizeof header, table.size() * sizeof(PageEntry));
  table[1].v_codec = 99;
  header.header_checksum = HeaderChecksum(header, table);
  const auto head = HeadBytes(header, table);
  std::copy(head.begin(), head.end(), bytes.begin());
  const Fd card = Sealed(SerializeCard(context.card));
  const Fd segment = Sealed(bytes);
  const Fd* const segments[] = {&segment};
  ASSERT_TRUE(client_->Publish(card, segments));
  // Not even the card is looked at then, so the text must come from the caller.
  ExpectStepsDownAndCounted({Reason::kCodecUnsupported, {}, /*own_text=*/true});
}

TEST_F(Ladder, ARotationThatThisVersionDoesNotKnow) {
  Context context = Made(model_);
  context.card.mutable_format()->set_rotation("givens");
  Publish(context);
  ExpectStepsDownAndCounted({Reason::kCodecUnsupported, {"format.rotation"}});
}

TEST_F(Ladder, ACardFromANewerVersion) {
  const Context context = Made(model_);
  std::vector<std::byte> card = SerializeCard(context.card);
  card[8] = std::byte{2};
  OfferFake(context, Descriptors(card, context));
  ExpectStepsDownFromFake({Reason::kVersion, {}, /*own_text=*/true});
}

TEST_F(Ladder, ACardWithAFieldOfTheFormatFromANewerVersion) {
  Context context = Made(model_);
  auto* format = context.card.mutable_format();
  format->GetReflection()->MutableUnknownFields(format)->AddVarint(99, 1);
  Publish(context);
  ExpectStepsDownAndCounted({Reason::kVersion, {"format"}});
}

TEST_F(Ladder, ACardWithSwappedByteOrder) {
  const Context context = Made(model_);
  std::vector<std::byte> card = SerializeCard(context.card);
  std::reverse(&card[8], &card[12]);
  OfferFake(context, Descriptors(card, context));
  ExpectStepsDownFromFake({Reason::kEndianness, {}, /*own_text=*/true});
}

TEST_F(Ladder, PagesInTheOtherByteOrder) {
  Context context = Made(model_);
  context.card.mutable_format()->set_byte_order("big");
  Publish(context);
  ExpectStepsDownAndCounted({Reason::kEndianness, {"format.byte_order"}});
}

// --- pages that say something else -------------------------------------------------------------------------------

TEST_F(Ladder, ACodecThatHurtsThisModel) {
  model_ = Load({.k_outlier = 1 << 12, .q_scale = 16});
  QualityGate gate(model_, {.n_threads = 1});
  admit_ = [&](const Context& context) { return gate.Admit(context); };
  Publish(Made(model_));
  ExpectStepsDownAndCounted({Reason::kQualityGate});
}

TEST_F(Ladder, ACodecThatDoesNotHurtIsAdmitted) {
  QualityGate gate(model_, {.n_threads = 1});
  admit_ = [&](const Context& context) { return gate.Admit(context); };
  Publish(Made(model_));
  TurnRequest request = Request(false);
  request.on_miss = OnMiss::kFail;
  const auto attached = NewAgent(model_, client_.get())->Run(request);
  ASSERT_TRUE(attached) << attached.error().message;
  EXPECT_EQ(attached->mode, HandoffMode::kAttach);
}

// --- damage ------------------------------------------------------------------------------------------------------

TEST_F(Ladder, AFlippedBitInTheLastPage) {
  const Context context = Made(model_);
  std::vector<std::byte> bytes = BytesOf(*context.segments[0]);
  bytes[context.segments[0]->pages().back().offset + 100] ^= std::byte{4};
  const Fd card = Sealed(SerializeCard(context.card));
  const Fd segment = Sealed(bytes);
  const Fd* const segments[] = {&segment};
  ASSERT_TRUE(client_->Publish(card, segments));
  ExpectStepsDownAndCounted({Reason::kChecksum});
  EXPECT_THAT(server_->metrics()->Text(), HasSubstr("qkvshare:checksum_failures_total 2\n"));
}

TEST_F(Ladder, AFlippedBitInTheCard) {
  const Context context = Made(model_);
  std::vector<std::byte> card = SerializeCard(context.card);
  card[card.size() / 2] ^= std::byte{1};
  OfferFake(context, Descriptors(card, context));
  ExpectStepsDownFromFake({Reason::kChecksum, {}, /*own_text=*/true});
}

TEST_F(Ladder, ACardWithoutItsSegments) {
  const Context context = Made(model_);
  std::vector<Fd> fds;
  fds.push_back(Sealed(SerializeCard(context.card)));
  OfferFake(context, std::move(fds));
  ExpectStepsDownFromFake({Reason::kChecksum});
}

TEST_F(Ladder, ASegmentThatSomebodyCouldStillChange) {
  const Context context = Made(model_);
  auto open = CreateMemfd("qkv-test");
  ASSERT_TRUE(open);
  const auto bytes = BytesOf(*context.segments[0]);
  ASSERT_EQ(::write(open->get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  std::vector<Fd> fds;
  fds.push_back(Sealed(SerializeCard(context.card)));
  fds.push_back(*std::move(open));
  OfferFake(context, std::move(fds));
  ExpectStepsDownFromFake({Reason::kDenied, {}, /*own_text=*/true});
}

// --- gone, or no room --------------------------------------------------------------------------------------------

TEST_F(Ladder, AContextThatIsNotThere) {
  ExpectStepsDownAndCounted({Reason::kNotFound, {}, /*own_text=*/true});
}

TEST_F(Ladder, AContextThatHasExpired) {
  Publish(Made(model_), {.ttl = std::chrono::milliseconds(1)});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ExpectStepsDownAndCounted({Reason::kExpired, {}, /*own_text=*/true});
}

TEST_F(Ladder, AContextThatIsTooLong) {
  Publish(Made(model_));
  ExpectStepsDownAndCounted({Reason::kTooLong, {}, /*own_text=*/true}, /*n_ctx=*/69);
}

TEST_F(Ladder, MoreLeasesThanAClientMayHold) {
  Publish(Made(model_));
  for (;;) {
    const auto attached = client_->Attach("context");
    n_leases_ += attached ? 1 : 0;
    if (attached) continue;
    ASSERT_EQ(attached.error().reason, Reason::kPoolFull) << attached.error().message;
    break;
  }
  ExpectStepsDownAndCounted({Reason::kPoolFull, {}, /*own_text=*/true});
}

TEST_F(Ladder, ABrokerThatIsGone) {
  Publish(Made(model_));
  server_.reset();
  ExpectStepsDown({Reason::kPeerLost, {}, /*own_text=*/true}, client_.get());  // nobody is left to count it
}

TEST_F(Ladder, NoBrokerAtAll) {
  ExpectStepsDown({Reason::kPeerLost, {}, /*own_text=*/true}, nullptr);
}

}  // namespace
}  // namespace qkv::testing
