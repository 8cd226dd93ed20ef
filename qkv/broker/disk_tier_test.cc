// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Broker, clients and the disk tier together: what is known after a restart, and what is not.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <mutex>
#include <set>

#include "qkv/broker/server.h"
#include "qkv/broker/test_support.h"

namespace qkv::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class DiskTier : public ::testing::Test {
 protected:
  DiskTier() { Start(); }

  // A new broker on the same directory.
  void Start(const std::function<void(BrokerOptions&)>& change = {}) {
    client_.reset();
    server_.reset();
    BrokerOptions options;
    options.socket_path = folder_ / "broker.sock";
    options.store_directory = store_;
    options.on_event = [this](const std::string& line) {
      const std::lock_guard lock(mutex_);
      events_.push_back(line);
    };
    if (change) change(options);
    server_ = Take(BrokerServer::Start(std::move(options)));
    client_ = Take(BrokerClient::Connect(server_->socket_path(), kLong));
  }
  ContextInfo Info(const std::string& id) {
    for (const ContextInfo& info : Take(client_->List()).contexts) {
      if (info.id == id) return info;
    }
    return {};
  }
  void PublishAndStore(const TestContext& context, const PublishOptions& options = {}) {
    const size_t before = EventCount("stored");
    ASSERT_EQ(Outcome(context.PublishTo(*client_, options)), "ok");
    ASSERT_TRUE(Eventually([&] { return EventCount("stored") == before + 1; }));
    EXPECT_TRUE(Info(context.id()).stored);
  }
  void ExpectAttaches(const std::string& id_or_name, const TestContext& context, bool from_disk) {
    const auto attached = client_->Attach(id_or_name);
    ASSERT_TRUE(attached) << attached.error().message;
    EXPECT_EQ(attached->id, context.id());
    EXPECT_EQ(attached->on_disk, from_disk);
    EXPECT_EQ(Contents(attached->card), SerializeCard(context.card));
    ASSERT_EQ(attached->segments.size(), context.segments.size());
    for (size_t i = 0; i < context.segments.size(); ++i) {
      EXPECT_EQ(Contents(attached->segments[i]), Contents(context.segments[i]));
      EXPECT_EQ(::fcntl(attached->segments[i].get(), F_GETFL) & O_ACCMODE, O_RDONLY);
      EXPECT_NE(IsSealed(attached->segments[i]), from_disk);
      EXPECT_EQ(IsReadOnlyFileOf(attached->segments[i], client_->broker_uid()), from_disk);
    }
    EXPECT_TRUE(client_->ReleaseLease(attached->lease));
  }
  std::string SegmentFile() {
    for (const std::string& name : FilesIn(store_)) {
      if (name.ends_with(".segment")) return store_ + "/" + name;
    }
    return "";
  }
  size_t EventCount(const std::string& kind) {
    const std::lock_guard lock(mutex_);
    return static_cast<size_t>(std::ranges::count_if(events_, [&](const std::string& line) {
      return line.find(fmt::format(R"("event":"{}")", kind)) != std::string::npos;
    }));
  }

  TemporaryFolder folder_;
  const std::string store_ = folder_ / "store";
  std::mutex mutex_;
  std::vector<std::string> events_;
  std::unique_ptr<BrokerServer> server_;
  std::unique_ptr<BrokerClient> client_;
};

TEST_F(DiskTier, ARestartedBrokerAttachesFromDiskWhatTheOneBeforeStored) {
  const TestContext context("report", {8192, 5000});
  PublishAndStore(context, {.pin = true});
  ExpectAttaches("report", context, false);
  const uint64_t stored_bytes = Take(client_->List()).stored_bytes;
  EXPECT_EQ(stored_bytes, 8192u + 8192u + 4096u);
  Start();
  const ContextInfo info = Info(context.id());
  EXPECT_TRUE(info.stored);
  EXPECT_FALSE(info.in_memory);
  EXPECT_TRUE(info.pinned);
  EXPECT_EQ(info.name, "report");
  EXPECT_EQ(info.n_tokens, 64u);
  const BrokerStatus before = Take(client_->List());
  EXPECT_EQ(before.used_bytes, 0u);
  EXPECT_EQ(before.stored_bytes, stored_bytes);
  EXPECT_EQ(before.store_budget_bytes, uint64_t{16} << 30);
  ExpectAttaches("report", context, true);
  ExpectAttaches(context.id(), context, true);
  EXPECT_EQ(Take(client_->List()).used_bytes, context.card_memory()) << "pages on disk are not in the budget of memory";
  EXPECT_EQ(EventCount("stored"), 1u);
  EXPECT_EQ(EventCount("restored"), 1u);
}

TEST_F(DiskTier, AChildOfARestoredContextNamesTheFilesOnDisk) {
  const TestContext parent("parent", {8192});
  PublishAndStore(parent);
  Start();
  AttachedContext attached = Take(client_->Attach("parent"));
  TestContext child("child", {8192, 12288});
  child.segments[0] = std::move(attached.segments[0]);
  PublishAndStore(child);
  EXPECT_THAT(FilesIn(store_), SizeIs(1 + 2 + 2)) << "lock, two contexts, two segments: the parent's is not copied";
  Start();
  ExpectAttaches("child", child, true);
}

TEST_F(DiskTier, AFileOnDiskThatIsNotTheBrokersIsRefused) {
  const std::string path = folder_ / "own.segment";
  ASSERT_EQ(::ftruncate(Fd(::open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0400)).get(), 8192), 0);
  TestContext context("a", {8192});
  context.segments[0] = Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(Outcome(context.PublishTo(*client_)), "denied/denied");
}

TEST_F(DiskTier, WhatIsEvictedFromMemoryIsStillOnDisk) {
  Start([](BrokerOptions& options) { options.budget_bytes = 40'000; });
  const TestContext a("a", {20'480}), b("b", {20'480});
  PublishAndStore(a);
  PublishAndStore(b);
  EXPECT_EQ(EventCount("evicted"), 1u);
  EXPECT_FALSE(Info(a.id()).in_memory);
  EXPECT_TRUE(Info(b.id()).in_memory);
  ExpectAttaches("a", a, true);
  ExpectAttaches("b", b, false);
}

TEST_F(DiskTier, WhatWasRemovedOrExpiredDoesNotComeBack) {
  const TestContext removed("removed"), expired("expired"), on_disk("on-disk");
  PublishAndStore(removed);
  PublishAndStore(on_disk);
  ASSERT_TRUE(client_->Remove("removed"));
  PublishAndStore(expired, {.ttl = std::chrono::milliseconds(150)});
  Start();
  EXPECT_EQ(Outcome(client_->Attach("removed")), "not_found/not_found");
  ASSERT_TRUE(client_->Remove("on-disk"));
  EXPECT_EQ(Outcome(client_->Remove("on-disk")), "not_found/not_found");
  EXPECT_TRUE(Eventually([&] { return Take(client_->List()).contexts.empty(); }));
  EXPECT_EQ(EventCount("expired"), 1u);
  EXPECT_TRUE(Eventually([&] { return FilesIn(store_).size() == 1; })) << "the lock";
  Start();
  EXPECT_THAT(Take(client_->List()).contexts, IsEmpty());
}

TEST_F(DiskTier, AFileTruncatedAfterItWasRestoredIsFoundBeforeItIsHandedOut) {
  const TestContext context("a", {8192});
  PublishAndStore(context);
  Start();
  ExpectAttaches("a", context, true);
  ASSERT_EQ(::chmod(SegmentFile().c_str(), 0600), 0);
  ASSERT_EQ(::truncate(SegmentFile().c_str(), 4096), 0);
  EXPECT_EQ(Outcome(client_->Attach("a")), "corrupt/checksum");
  EXPECT_EQ(EventCount("store_damaged"), 1u);
  EXPECT_EQ(Outcome(client_->Attach("a")), "not_found/not_found");
  EXPECT_THAT(Take(client_->List()).contexts, IsEmpty());
}

TEST_F(DiskTier, ListsMemoryAndDiskTogetherInPages) {
  const Fd shared = test::SealedBytes(5000, 1);
  std::set<std::string> ids;
  for (int i = 0; i < 300; ++i) {
    TestContext context(fmt::format("{}{}", std::string(180, 'n'), i), {5000});
    context.segments[0] = Take(shared.Duplicate());
    ASSERT_TRUE(context.PublishTo(*client_));
    ids.insert(context.id());
    if (i == 150) {  // the first half is on disk only
      ASSERT_TRUE(Eventually([&] { return EventCount("stored") == 151; }));
      Start();
    }
  }
  std::set<std::string> listed;
  const BrokerStatus status = Take(client_->List());
  for (const ContextInfo& info : status.contexts) listed.insert(info.id);
  EXPECT_THAT(status.contexts, SizeIs(300)) << "each once";
  EXPECT_EQ(listed, ids);
}

TEST_F(DiskTier, ASecondBrokerOnTheDirectoryIsTurnedAway) {
  const auto second = BrokerServer::Start({.socket_path = folder_ / "second.sock", .store_directory = store_});
  ASSERT_EQ(Outcome(second), "invalid_argument");
  EXPECT_THAT(second.error().message, HasSubstr("in use by another broker"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "second.sock"));
}

TEST_F(DiskTier, ReAnnouncingWhatIsOnDiskIsTheSameContext) {
  const TestContext context("a");
  PublishAndStore(context);
  Start();
  EXPECT_EQ(Outcome(context.PublishTo(*client_)), "ok");
  EXPECT_THAT(Take(client_->List()).contexts, SizeIs(1));
  TestContext other("b");
  other.card.set_id(context.id());
  other.SealCard();
  EXPECT_EQ(Outcome(other.PublishTo(*client_)), "invalid_argument") << "another card under an id that is taken";
}

// --- encrypted contexts: the broker's part ---------------------------------------------------------------

TestContext Encrypted(const std::string& name) {
  TestContext context(name, {8192, 8192});
  context.card.clear_token_ids();
  context.card.clear_spans();
  context.card.mutable_format()->set_cipher(std::string(kCipherName));
  context.SealCard();
  return context;
}

TEST_F(DiskTier, TheKeyOfAnEncryptedContextComesWithItAndSurvivesOnlyUnderTheSealKey) {
  const TestContext context = Encrypted("secret");
  const auto key = Take(SecretKey::Generate());
  EXPECT_EQ(Outcome(context.PublishTo(*client_)), "invalid_argument") << "no key";
  EXPECT_EQ(Outcome(TestContext("plain").PublishTo(*client_, {.key = key})), "invalid_argument") << "no need of a key";
  ASSERT_EQ(Outcome(context.PublishTo(*client_, {.key = key})), "ok");
  EXPECT_TRUE(Info(context.id()).encrypted);
  EXPECT_EQ(Take(client_->Attach("secret")).key->bytes(), key->bytes());
  EXPECT_EQ(EventCount("store_failed"), 1u) << "without a seal key it stays in memory";
  EXPECT_THAT(FilesIn(store_), SizeIs(1));

  const auto seal_key = Take(KeyFromFile(folder_ / "seal.key"));
  Start([&](BrokerOptions& options) { options.seal_key = seal_key; });
  PublishAndStore(context, {.key = key});
  for (const std::string& file : FilesIn(store_)) {
    const Fd fd(::open((store_ + "/" + file).c_str(), O_RDONLY | O_CLOEXEC));
    const auto bytes = Contents(fd);
    const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    EXPECT_EQ(text.find(key->bytes()), std::string::npos) << "the key itself is in " << file;
  }
  Start([&](BrokerOptions& options) { options.seal_key = Take(KeyFromFile(folder_ / "seal.key")); });
  const AttachedContext attached = Take(client_->Attach("secret"));
  EXPECT_EQ(attached.key->bytes(), key->bytes());
  EXPECT_TRUE(attached.on_disk);
  Start([&](BrokerOptions& options) { options.seal_key = Take(SecretKey::Generate()); });
  EXPECT_EQ(Outcome(client_->Attach("secret")), "denied/denied") << "another seal key";
  Start();
  EXPECT_EQ(Outcome(client_->Attach("secret")), "denied/denied") << "none";
  EXPECT_TRUE(Info(context.id()).stored) << "and it is not thrown away for that";
}

}  // namespace
}  // namespace qkv::test
