// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Whoever dies, wherever: producer, consumer and broker are killed at every point of qkv/base/kill_point.h, then at
// random ones. Each time the others go on within their deadlines, no context is half there, nothing wrong is ever read,
// and no memory file and no temporary file is left. This program is the driver, and with --role one of the three. No
// model: pages hold a pattern that follows from the context's id.

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <set>

#include "qkv/base/kill_point.h"
#include "qkv/broker/server.h"
#include "qkv/broker/test_support.h"
#include "qkv/engine/agent.h"
#include "qkv/segment/writer.h"
#include "tests/process.h"

namespace qkv::testing {
namespace {

using std::chrono::milliseconds;
using test::FilesIn;

constexpr auto kCallDeadline = std::chrono::seconds(2);
constexpr auto kPatience = std::chrono::seconds(15);  // for a role to end by itself
constexpr Geometry kTiny{.n_layers = 1, .n_kv_heads = 1, .head_dim = 32};
constexpr CodecPair kCodecs{CodecId::kI8, CodecId::kI8};

// How a role ends.
constexpr int kFine = 0;
constexpr int kTurnedAway = 10;  // an error that somebody's death explains
constexpr int kWrongData = 20;
constexpr int kWrongError = 21;

// --- the roles -------------------------------------------------------------------------------------------

std::byte ByteOf(const std::string& id, size_t page, size_t i) {
  return static_cast<std::byte>(id[i % id.size()] + 31 * page + i / 97);
}

std::shared_ptr<const Segment> WriteSegment(const std::string& id, size_t n_pages) {
  const size_t bytes = PageLayout(kTiny, kCodecs).bytes;
  auto writer = test::Take(SegmentWriter::Create(kTiny, n_pages * bytes, {}));
  for (size_t page = 0; page < n_pages; ++page) {
    test::Take(writer->Append(kCodecs, kPageTokens, static_cast<uint32_t>(page * kPageTokens), [&](std::byte* out) {
      for (size_t i = 0; i < bytes; ++i) out[i] = ByteOf(id, page, i);
    }));
  }
  return test::Take(SegmentWriter::Seal(writer));
}

// One full page of each segment counts in the card. The maker of segment i is parent i, or the context itself.
Context NewContextOf(const std::string& name, const Context* parent) {
  std::vector<std::shared_ptr<const Segment>> segments;
  if (parent != nullptr) segments = parent->segments;
  Context context;
  const std::string id = NewContextId();
  segments.push_back(WriteSegment(id, 2));
  std::vector<size_t> sizes;
  for (const auto& segment : segments) sizes.push_back(segment->bytes());
  context.card = test::CardFor(name, sizes);
  context.card.set_id(id);
  if (parent != nullptr) {
    for (const std::string& ancestor : parent->card.parents()) context.card.add_parents(ancestor);
    context.card.add_parents(parent->card.id());
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    auto* segment = context.card.mutable_segments(static_cast<int>(i));
    segment->set_digest(segments[i]->digest());
    segment->set_n_pages(static_cast<uint32_t>(segments[i]->pages().size()));
  }
  context.segments = std::move(segments);
  return context;
}

bool IsWhole(const Context& context) {
  const CacheCard& card = context.card;
  if (context.segments.size() != static_cast<size_t>(card.segments_size())) return false;
  for (size_t s = 0; s < context.segments.size(); ++s) {
    const Segment& segment = *context.segments[s];
    const int i = static_cast<int>(s);
    const std::string& maker = i < card.parents_size() ? card.parents(i) : card.id();
    if (segment.digest() != card.segments(i).digest() || !segment.Verify(0, segment.pages().size(), 1)) return false;
    for (size_t page = 0; page < segment.pages().size(); ++page) {
      for (size_t at = 0; at < segment.pages()[page].bytes; ++at) {
        if (segment.page(page)[at] != ByteOf(maker, page, at)) return false;
      }
    }
  }
  return true;
}

int EndOf(const Error& error) {
  switch (error.code) {
    case Code::kPeerLost:
    case Code::kNotFound: return kTurnedAway;
    default: std::fprintf(stderr, "%s\n", error.message.c_str()); return kWrongError;
  }
}

int Produce(const std::string& socket) {
  auto client = BrokerClient::Connect(socket, kCallDeadline);
  if (!client) return EndOf(client.error());
  const Context a = NewContextOf("a", nullptr), b = NewContextOf("b", &a), c = NewContextOf("c", nullptr);
  for (const Context* context : {&a, &b, &c}) {
    if (Status done = PublishContext(**client, *context); !done) return EndOf(done.error());
  }
  const Context secret = NewContextOf("secret", nullptr);
  if (Status done = PublishContext(**client, secret, {.key = test::Take(SecretKey::Generate())}); !done) {
    return EndOf(done.error());
  }
  // Once it is on disk, so that there is something to remove.
  for (bool stored = false; !stored; ::usleep(1000)) {
    const auto status = (*client)->List();
    if (!status) return EndOf(status.error());
    stored = std::ranges::any_of(status->contexts, [&](const auto& i) { return i.id == c.card.id() && i.stored; });
  }
  if (Status done = (*client)->Remove(c.card.id()); !done) return EndOf(done.error());
  return kFine;
}

int Consume(const std::string& socket) {
  auto client = BrokerClient::Connect(socket, kCallDeadline);
  if (!client) return EndOf(client.error());
  const auto status = (*client)->List();
  if (!status) return EndOf(status.error());
  int end = kFine;
  for (const ContextInfo& info : status->contexts) {
    const auto context = FetchContext(**client, info.id);
    if (!context) {
      end = std::max(end, EndOf(context.error()));
      continue;
    }
    if (context->card.id() != info.id || !IsWhole(*context)) return kWrongData;
    if (Status done = (*client)->ReleaseLease(context->lease); !done) end = std::max(end, EndOf(done.error()));
  }
  return end;
}

int Serve(const std::string& socket, const std::string& store) {
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);
  BrokerOptions options{.socket_path = socket, .store_directory = store};
  options.seal_key = test::Take(KeyFromFile(store + ".key"));
  const auto server = BrokerServer::Start(std::move(options));
  if (!server) return EndOf(server.error());
  int signal = 0;
  sigwait(&stop, &signal);
  return kFine;
}

int RunRole(const std::string& role, const std::string& socket, const std::string& store) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (role == "producer") return Produce(socket);
  if (role == "consumer") return Consume(socket);
  return Serve(socket, store);
}

// --- the driver ------------------------------------------------------------------------------------------

int MemoryFilesOf(pid_t pid) {
  int n = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", pid), error)) {
    const auto link = std::filesystem::read_symlink(entry.path(), error);
    if (!error && link.string().find("memfd:qkv") != std::string::npos) ++n;
  }
  return n;
}

class Kill : public ::testing::Test {
 protected:
  void SetUp() override { StartBroker(""); }
  void TearDown() override { StopBroker(); }

  std::unique_ptr<Process> StartRole(const std::string& role, const std::string& kill_at) {
    const std::string self = std::filesystem::read_symlink("/proc/self/exe");
    std::vector<std::string> argv = {self, "--role", role, socket_, store_};
    if (!kill_at.empty()) argv.insert(argv.begin(), {"/usr/bin/env", "QKV_KILL_AT=" + kill_at});
    return Process::Start(argv);
  }
  void StartBroker(const std::string& kill_at) {
    broker_ = StartRole("broker", kill_at);
    // Without a word: a request would be a passage of its kill point.
    ASSERT_TRUE(Eventually([&] { return ConnectSocket(socket_, kDontWait).has_value() || Died(*broker_); }));
  }
  void StopBroker() {
    ::kill(broker_->pid(), SIGTERM);
    EXPECT_EQ(broker_->Wait(kPatience), kFine) << broker_->errors();
  }
  static bool Died(const Process& process) {
    std::ifstream in(fmt::format("/proc/{}/stat", process.pid()));
    std::string stat{std::istreambuf_iterator<char>(in), {}};
    const size_t end = stat.rfind(") ");
    return end == std::string::npos || stat[end + 2] == 'Z';
  }
  std::unique_ptr<BrokerClient> Connect() {
    auto client = BrokerClient::Connect(socket_, kCallDeadline);
    return client ? *std::move(client) : nullptr;
  }
  // Everything the broker knows is on disk, or the broker has died.
  bool Settled() {
    return Eventually([&] {
      if (Died(*broker_)) return true;
      const auto client = Connect();
      const auto status = client ? client->List() : Result<BrokerStatus>(Err(Code::kPeerLost, "no broker"));
      return status && std::ranges::all_of(status->contexts, &ContextInfo::stored);
    });
  }

  // One life of all three, `victim` of which is to die at `kill_at`. Returns whether it did.
  bool Try(const std::string& victim, const std::string& kill_at) {
    SCOPED_TRACE(victim + " dies at " + kill_at);
    if (victim == "broker") {
      StopBroker();
      StartBroker(kill_at);
    }
    bool died = false;
    for (const std::string role : {"producer", "consumer"}) {
      const auto process = StartRole(role, role == victim ? kill_at : "");
      const int end = process->Wait(kPatience);
      const bool killed = end == 128 + SIGKILL;
      if (role == victim) died = killed;
      EXPECT_TRUE(role == victim       ? killed || end == kFine
                  : victim == "broker" ? end <= kTurnedAway && end >= 0
                                       : end == kFine)
          << role << " ended with " << end << ": " << process->errors();
    }
    EXPECT_TRUE(Settled());
    if (victim == "broker" && Died(*broker_)) {
      died = true;
      EXPECT_EQ(broker_->Wait(kPatience), 128 + SIGKILL) << broker_->errors();
      StartBroker("");  // on the same socket and directory
    } else if (victim == "broker") {
      StopBroker();
      StartBroker("");
    }

    // What is there is whole, and others go on as if nothing had happened.
    for (const char* role : {"consumer", "producer", "consumer"}) {
      const auto process = StartRole(role, "");
      EXPECT_EQ(process->Wait(kPatience), kFine) << role << " afterwards: " << process->errors();
    }
    EXPECT_TRUE(Settled());
    const auto client = Connect();
    if (client == nullptr) {
      ADD_FAILURE() << "no broker";
      return died;
    }
    std::set<std::string> names;
    const auto status = client->List();
    EXPECT_TRUE(status);
    for (const ContextInfo& info : status->contexts) {
      EXPECT_EQ(info.n_leases, 0u) << "a lease outlived its holder";
      names.insert(info.name);
      EXPECT_TRUE(client->Remove(info.id));
    }
    for (const char* name : {"a", "b", "secret"}) EXPECT_TRUE(names.contains(name)) << name;
    // And nothing is left.
    EXPECT_TRUE(Eventually([&] { return MemoryFilesOf(broker_->pid()) == 0; })) << MemoryFilesOf(broker_->pid());
    EXPECT_EQ(MemoryFilesOf(::getpid()), 0);
    EXPECT_TRUE(Eventually([&] { return FilesIn(store_).size() == 1; })) << ::testing::PrintToString(FilesIn(store_));
    const auto empty = client->List();
    EXPECT_TRUE(empty && empty->contexts.empty() && empty->used_bytes == 0 && empty->stored_bytes == 0);
    return died;
  }

  TemporaryFolder folder_;
  const std::string socket_ = folder_ / "broker.sock";
  const std::string store_ = folder_ / "store";
  std::unique_ptr<Process> broker_;
};

TEST_F(Kill, AtEveryPoint) {
  constexpr int kMaxPassages = 3;
  const std::string roles[] = {"producer", "consumer", "broker"};
  std::map<std::string, int> deaths;
  int tries = 0;
  for (const std::string_view point : kKillPoints) {
    for (const std::string& role : roles) {
      for (int passage = 1; passage <= kMaxPassages; ++passage) {
        ++tries;
        const bool died = Try(role, fmt::format("{}:{}", point, passage));
        if (::testing::Test::HasFailure()) FAIL() << role << " at " << point << ":" << passage;
        if (!died) break;
        ++deaths[std::string(point)];
      }
    }
    EXPECT_GT(deaths[std::string(point)], 0) << "nobody ever came to " << point;
  }
  int total = 0;
  for (const auto& [point, n] : deaths) total += n;
  fmt::print("{} lives, {} deaths at {} points\n", tries, total, std::size(kKillPoints));
}

TEST_F(Kill, AtRandomPoints) {
  const auto number = [](const char* variable, int otherwise) {
    const char* given = std::getenv(variable);
    return given == nullptr ? otherwise : std::atoi(given);
  };
  const int runs = number("QKV_KILL_RUNS", 200);
  std::mt19937 random(static_cast<uint32_t>(number("QKV_KILL_SEED", 20261130)));  // another seed, other points
  const std::string roles[] = {"producer", "consumer", "broker"};
  // About as many passages as each of them makes.
  const uint32_t passages[] = {30, 30, 90};
  int deaths = 0;
  for (int i = 0; i < runs; ++i) {
    const size_t role = random() % 3;
    deaths += Try(roles[role], fmt::format("*:{}", 1 + random() % passages[role]));
    if (::testing::Test::HasFailure()) FAIL() << "run " << i << " of " << runs;
  }
  EXPECT_GT(deaths, runs / 3) << "too few runs reach their point to mean anything";
  fmt::print("{} lives, {} deaths at random points\n", runs, deaths);
}

}  // namespace
}  // namespace qkv::testing

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--role") return qkv::testing::RunRole(argv[2], argv[3], argv[4]);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
