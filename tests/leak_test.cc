// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Nothing is left behind, nothing can be changed, and a change would be found: memory files after many handoffs, the
// seals of what is handed over, and a page with one flipped byte. The broker is a process of its own.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "qkv/engine/agent.h"
#include "qkv/engine/test_support.h"
#include "tests/process.h"

namespace qkv::testing {
namespace {

using ::testing::HasSubstr;

constexpr auto kPatience = std::chrono::seconds(20);
constexpr int kContextTokens = 40;  // a full page and a part of one

std::vector<std::string> DescriptorsOf(pid_t pid) {
  std::vector<std::string> links;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", pid), error)) {
    const auto link = std::filesystem::read_symlink(entry.path(), error);  // gone again: the one that lists
    if (!error) links.push_back(link.string());
  }
  EXPECT_FALSE(links.empty()) << "cannot look at the descriptors of process " << pid;
  return links;
}

std::vector<std::string> MappingsOf(pid_t pid) {
  std::vector<std::string> lines;
  std::ifstream in(fmt::format("/proc/{}/maps", pid));
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  EXPECT_FALSE(lines.empty()) << "cannot look at the mappings of process " << pid;
  return lines;
}

int MemoryFilesIn(const std::vector<std::string>& lines) {
  int n = 0;
  for (const std::string& line : lines) n += line.find("memfd:qkv") != std::string::npos ? 1 : 0;
  return n;
}

class Leak : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(TestModel(), nullptr);
    socket_ = dir_.path() + "/broker.sock";
    // Its events are not read here, and a full pipe would stop it.
    broker_ =
        Process::Start({"/bin/sh", "-c", R"(exec "$@" > /dev/null)", "sh", QKV_PROGRAM, "broker", "--socket", socket_});
    ASSERT_TRUE(Eventually([&] {
      auto client = BrokerClient::Connect(socket_);
      if (client) client_ = *std::move(client);
      return client.has_value();
    }));
  }
  void TearDown() override {
    client_.reset();
    ASSERT_EQ(::kill(broker_->pid(), SIGTERM), 0) << "the broker has ended by itself";
    EXPECT_EQ(broker_->Wait(kPatience), 0) << broker_->errors();
    EXPECT_FALSE(std::filesystem::exists(socket_));
  }

  static std::unique_ptr<Sequence> NewSequence() {
    SequenceOptions options;
    options.n_ctx = 256;
    options.n_threads = 2;
    options.kv = {CodecId::kI8, CodecId::kI4};
    auto sequence = Sequence::Create(TestModel(), options);
    EXPECT_TRUE(sequence) << sequence.error().message;
    return sequence ? *std::move(sequence) : nullptr;
  }
  std::unique_ptr<Agent> NewAgent() { return std::make_unique<Agent>(TestModel(), NewSequence(), client_.get()); }

  // Goes on from what the sequence holds.
  Context PublishNow(Sequence& sequence, const std::string& name) {
    Sequence::PublishInfo info;
    info.name = name;
    auto context = sequence.Publish(info);
    EXPECT_TRUE(context) << context.error().message;
    if (!context) return {};
    const Status published = PublishContext(*client_, *context);
    EXPECT_TRUE(published) << published.error().message;
    return *std::move(context);
  }

  void AttachAndLetGo(const std::string& name, int n_tokens) {
    const auto fetched = FetchContext(*client_, name);
    ASSERT_TRUE(fetched) << fetched.error().message;
    const auto consumer = NewSequence();
    const Status attached = consumer->Attach(*fetched);
    ASSERT_TRUE(attached) << attached.error().message;
    EXPECT_EQ(consumer->stats().tokens_reused, n_tokens);
  }

  size_t ContextsAtTheBroker() {
    const auto status = client_->List();
    EXPECT_TRUE(status) << status.error().message;
    return status ? status->contexts.size() : size_t{0};
  }

  // A producer in a process of its own, which is killed while its context is in use.
  void CycleWithAKill(const std::string& name) {
    const std::string text =
        "The mill stood by the river for two hundred years, and nobody in the town could say who "
        "had built it or why it was so far from the road.";
    auto victim = Process::Start({QKV_PROGRAM, "publish", "--name", name, "--socket", socket_, "-m", TestModelPath(),
                                  "-p", text, "--raw", "-c", "256", "-t", "2", "--quality-gate", "off", "--hold"});
    ASSERT_TRUE(Eventually([&] { return ContextsAtTheBroker() == 1; })) << victim->errors();
    const auto held = FetchContext(*client_, name);
    ASSERT_TRUE(held) << held.error().message;
    ASSERT_EQ(::kill(victim->pid(), SIGKILL), 0);
    EXPECT_EQ(victim->Wait(kPatience), 128 + SIGKILL) << victim->errors();
    EXPECT_EQ(ContextsAtTheBroker(), 1u) << "a context outlives its producer";
    AttachAndLetGo(name, held->card.token_ids_size());
  }

  TemporaryFolder dir_;
  std::string socket_;
  std::unique_ptr<Process> broker_;
  std::unique_ptr<BrokerClient> client_;
};

TEST_F(Leak, AfterTwoHundredHandoffsAndEightKillsNoMemoryFileOrDescriptorIsLeft) {
  constexpr int kCycles = 200, kKillEvery = 25, kBaseline = 10, kNewTokens = 4;
  const auto producer = NewSequence();
  // The model's packed weights are a memory file too; before the first handoff there is no other.
  const auto files_before = MemoryFilesIn(DescriptorsOf(::getpid())),
             maps_before = MemoryFilesIn(MappingsOf(::getpid()));
  ASSERT_LE(files_before, 1);
  ASSERT_LE(maps_before, 1);
  size_t baseline = 0;
  for (int cycle = 0; cycle < kCycles; ++cycle) {
    const std::string name = fmt::format("cycle{}", cycle);
    SCOPED_TRACE(name);
    if (cycle % kKillEvery == 0) {
      ASSERT_NO_FATAL_FAILURE(CycleWithAKill(name));
    } else {
      // Mostly a few new tokens behind what the cycles before read: a segment that is shared, and one of its own.
      if (cycle % kKillEvery == 1) {
        producer->Clear();
        ASSERT_TRUE(producer->Forward(SourceTokens(cycle, kContextTokens)));
      } else {
        ASSERT_TRUE(producer->Truncate(kContextTokens - kNewTokens));
        ASSERT_TRUE(producer->Forward(SourceTokens(cycle, kNewTokens)));
      }
      PublishNow(*producer, name);
      ASSERT_NO_FATAL_FAILURE(AttachAndLetGo(name, kContextTokens));
    }
    const Status removed = client_->Remove(name);
    ASSERT_TRUE(removed) << removed.error().message;
    if (cycle == kBaseline) {
      ASSERT_TRUE(Eventually([&] { return MemoryFilesIn(DescriptorsOf(broker_->pid())) == 0; }));
      baseline = DescriptorsOf(broker_->pid()).size();
    }
  }
  EXPECT_EQ(ContextsAtTheBroker(), 0u);
  const auto status = client_->List();
  ASSERT_TRUE(status);
  EXPECT_EQ(status->used_bytes, 0u);
  EXPECT_TRUE(Eventually([&] { return MemoryFilesIn(DescriptorsOf(broker_->pid())) == 0; }));
  EXPECT_TRUE(Eventually([&] { return DescriptorsOf(broker_->pid()).size() == baseline; }))
      << DescriptorsOf(broker_->pid()).size() << " descriptors, " << baseline << " after " << kBaseline << " handoffs";
  EXPECT_EQ(MemoryFilesIn(MappingsOf(broker_->pid())), 0) << "the broker maps nothing";

  producer->Clear();
  EXPECT_EQ(MemoryFilesIn(DescriptorsOf(::getpid())), files_before);
  EXPECT_EQ(MemoryFilesIn(MappingsOf(::getpid())), maps_before);
}

uint64_t ResidentBytesOf(pid_t pid) {
  std::ifstream in(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("RssAnon:")) return std::stoull(line.substr(8)) * 1024;  // memory files are counted above
  }
  ADD_FAILURE() << "cannot look at the memory of process " << pid;
  return 0;
}

TEST_F(Leak, AfterAThousandCyclesMemoryAndDescriptorsAreWhereTheyWereAfterTen) {
  constexpr int kCycles = 1000, kBaseline = 10, kNewTokens = 1;
  constexpr uint64_t kSlack = uint64_t{2} << 20;  // what an allocator may keep; a leak of 2 kB a cycle would be more
  const auto producer = NewSequence();
  ASSERT_TRUE(producer->Forward(SourceTokens(0, kContextTokens)));
  const pid_t processes[] = {broker_->pid(), ::getpid()};
  size_t descriptors[2] = {};
  uint64_t resident[2] = {};
  for (int cycle = 0; cycle < kCycles; ++cycle) {
    ASSERT_TRUE(producer->Truncate(kContextTokens - kNewTokens));
    ASSERT_TRUE(producer->Forward(SourceTokens(cycle, kNewTokens)));
    const Context context = PublishNow(*producer, "cycle");
    const auto fetched = FetchContext(*client_, "cycle");
    ASSERT_TRUE(fetched) << fetched.error().message;
    ASSERT_TRUE(client_->ReleaseLease(fetched->lease));
    ASSERT_TRUE(client_->Remove(context.card.id()));
    if (cycle != kBaseline) continue;
    for (int i = 0; i < 2; ++i) {
      descriptors[i] = DescriptorsOf(processes[i]).size();
      resident[i] = ResidentBytesOf(processes[i]);
    }
  }
  for (int i = 0; i < 2; ++i) {
    SCOPED_TRACE(i == 0 ? "broker" : "producer and consumer");
    EXPECT_TRUE(Eventually([&] { return DescriptorsOf(processes[i]).size() <= descriptors[i]; }))
        << DescriptorsOf(processes[i]).size() << " descriptors, " << descriptors[i] << " after " << kBaseline;
    EXPECT_LT(ResidentBytesOf(processes[i]), resident[i] + kSlack);
  }
}

// Whatever could change the memory file behind `fd`, tried on `fd` itself and on descriptors opened anew from it.
void ExpectNobodyCanWrite(int fd, const std::string& what) {
  SCOPED_TRACE(what);
  const off_t size = ::lseek(fd, 0, SEEK_END);
  ASSERT_GT(size, 0);
  const size_t bytes = static_cast<size_t>(size);
  const auto read_all = [&] {
    std::string content(bytes, '\0');
    EXPECT_EQ(::pread(fd, content.data(), bytes, 0), size);
    return content;
  };
  const std::string before = read_all();
  const auto try_on = [&](int target, const char* how) {
    SCOPED_TRACE(how);
    EXPECT_EQ(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, target, 0), MAP_FAILED);
    void* const read_only = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, target, 0);
    if (read_only != MAP_FAILED) {  // a write-only descriptor cannot be mapped at all
      EXPECT_NE(::mprotect(read_only, bytes, PROT_READ | PROT_WRITE), 0);
      ::munmap(read_only, bytes);
    }
    EXPECT_EQ(::pwrite(target, "x", 1, 0), -1);
    EXPECT_EQ(::pwrite(target, "x", 1, size), -1);
    EXPECT_NE(::ftruncate(target, 0), 0);
    EXPECT_NE(::ftruncate(target, size - 1), 0);
    EXPECT_NE(::ftruncate(target, size + 4096), 0);
    EXPECT_NE(::fallocate(target, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
    EXPECT_NE(::fallocate(target, 0, 0, size + 4096), 0);
  };
  try_on(fd, "the descriptor itself");
  const std::string path = fmt::format("/proc/self/fd/{}", fd);
  for (const int flags : {O_RDWR, O_WRONLY}) {
    const Fd again(::open(path.c_str(), flags | O_CLOEXEC));
    if (again.valid()) try_on(again.get(), flags == O_RDWR ? "reopened to read and write" : "reopened to write");
  }
  const Fd truncated(::open(path.c_str(), O_RDWR | O_TRUNC | O_CLOEXEC));
  EXPECT_EQ(::lseek(fd, 0, SEEK_END), size);
  EXPECT_EQ(read_all(), before);
}

TEST_F(Leak, WhatIsPublishedCanBeChangedByNeitherConsumerNorProducer) {
  const auto producer = NewSequence();
  ASSERT_TRUE(producer->Forward(SourceTokens(3, kContextTokens)));
  const Context context = PublishNow(*producer, "sealed");
  ASSERT_FALSE(context.segments.empty());
  const auto attached = client_->Attach("sealed");
  ASSERT_TRUE(attached) << attached.error().message;
  ASSERT_EQ(attached->segments.size(), context.segments.size());

  ExpectNobodyCanWrite(attached->card.get(), "the consumer's card");
  for (const Fd& segment : attached->segments) ExpectNobodyCanWrite(segment.get(), "the consumer's segment");
  for (const auto& segment : context.segments) ExpectNobodyCanWrite(segment->fd().get(), "the producer's segment");
  for (const std::string& line : MappingsOf(::getpid())) {
    if (line.find("memfd:qkv") == std::string::npos) continue;
    EXPECT_EQ(line.find(" rw"), std::string::npos) << line;
  }
}

TEST_F(Leak, AFlippedByteInAPageIsFoundAndTheConsumerFallsBackToText) {
  auto producer = NewAgent();
  const std::vector<Token> tokens = SourceTokens(29, kContextTokens);
  ASSERT_TRUE(producer->sequence().Forward(tokens));
  const Context good = PublishNow(producer->sequence(), "good");
  ASSERT_EQ(good.segments.size(), 1u);

  // The same header and page table, hence the digest that the card names; one bit of the last page is another.
  const Segment& segment = *good.segments[0];
  ASSERT_EQ(segment.pages().size(), 2u);
  std::vector<std::byte> bytes(segment.bytes());
  ASSERT_EQ(::pread(segment.fd().get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  bytes[segment.pages()[1].offset + 1000] ^= std::byte{0x10};
  const auto damaged = SealedMemfd("qkv-test", bytes);
  ASSERT_TRUE(damaged) << damaged.error().message;
  CacheCard card = good.card;
  card.set_id(NewContextId());
  card.set_name("damaged");
  const auto card_fd = SealedMemfd("qkv-test", SerializeCard(card));
  ASSERT_TRUE(card_fd) << card_fd.error().message;
  const Fd* const segments[] = {&*damaged};
  const Status published = client_->Publish(*card_fd, segments);
  ASSERT_TRUE(published) << published.error().message;

  TurnRequest request;
  request.prompt = "What is this text about?";
  request.max_tokens = 16;
  request.ignore_eos = true;
  request.digest_logits = true;
  auto consumer = NewAgent();

  request.inherits = "damaged";
  request.on_miss = OnMiss::kFail;
  const auto failed = consumer->Run(request);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().reason, Reason::kChecksum) << failed.error().message;
  EXPECT_EQ(failed.error().code, Code::kCorrupt);

  request.on_miss = OnMiss::kText;
  const auto fallback = consumer->Run(request);
  ASSERT_TRUE(fallback) << fallback.error().message;
  EXPECT_EQ(fallback->mode, HandoffMode::kText);
  EXPECT_EQ(fallback->reason, Reason::kChecksum) << fallback->reason_detail;
  EXPECT_EQ(fallback->tokens_reused, 0);

  TurnRequest cold = request;
  cold.inherits.clear();
  cold.history = tokens;
  const auto expected = NewAgent()->Run(cold);
  ASSERT_TRUE(expected) << expected.error().message;
  EXPECT_EQ(fallback->output_tokens, expected->output_tokens);
  EXPECT_EQ(fallback->logits_digest, expected->logits_digest);

  // The process that was given the damaged one is none the worse for it: it attaches, and answers as the producer does.
  request.inherits = "good";
  request.on_miss = OnMiss::kFail;
  const auto right = consumer->Run(request);
  ASSERT_TRUE(right) << right.error().message;
  EXPECT_EQ(right->mode, HandoffMode::kAttach);
  EXPECT_EQ(right->reason, Reason::kNone);
  EXPECT_EQ(right->tokens_reused, kContextTokens);
  request.inherits.clear();
  const auto own = producer->Run(request);
  ASSERT_TRUE(own) << own.error().message;
  EXPECT_EQ(right->output_tokens, own->output_tokens);
  EXPECT_EQ(right->logits_digest, own->logits_digest);

  auto verify = Process::Start({QKV_PROGRAM, "verify", "damaged", "--socket", socket_});
  EXPECT_EQ(verify->Wait(kPatience), 2) << verify->errors();
  EXPECT_THAT(verify->output(), HasSubstr("page 0 (32 tokens): ok"));
  EXPECT_THAT(verify->output(), HasSubstr("page 1 (8 tokens): checksum"));
}

}  // namespace
}  // namespace qkv::testing
