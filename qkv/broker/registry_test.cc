// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "qkv/broker/test_support.h"

namespace qkv {
namespace {

using test::Outcome;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kNow = 1'000'000;
constexpr uint64_t kCardBytes = 10;
constexpr ClientId kAnn = 1;
constexpr ClientId kBob = 2;

StoredFile File(uint64_t inode, uint64_t bytes) {
  return {{7, inode}, bytes, std::make_shared<const Fd>()};
}

// A context whose card has an inode of its own, derived from the id.
NewContext Context(const std::string& id, const std::vector<StoredFile>& segments, const std::string& name = "") {
  NewContext context;
  context.info.id = id;
  context.info.name = name;
  context.files.push_back(File(1'000'000 + std::hash<std::string>()(id) % 1'000'000'000, kCardBytes));
  for (const StoredFile& segment : segments) {
    context.files.push_back(segment);
    context.info.bytes += segment.bytes;
  }
  return context;
}

std::string NameOf(Event::Kind kind) {
  const char* names[] = {"created", "published", "restored", "attached", "released",
                         "removed", "expired",   "evicted",  "alarm",    "alarm_ended"};
  return names[static_cast<size_t>(kind)];
}

class RegistryTest : public ::testing::Test {
 protected:
  static Registry WithBudget(uint64_t bytes) { return Registry({.budget_bytes = bytes}); }

  static std::vector<std::string> Ids(const Registry& registry) {
    std::vector<std::string> ids;
    registry.ForEachAfter("", [&](const ContextInfo& info) {
      ids.push_back(info.id);
      return true;
    });
    return ids;
  }

  static ContextInfo Info(const Registry& registry, const std::string& id) {
    ContextInfo found;
    registry.ForEachAfter("", [&](const ContextInfo& info) {
      if (info.id == id) found = info;
      return true;
    });
    return found;
  }

  static std::vector<std::string> EventsOf(Registry& registry) {
    std::vector<std::string> lines;
    for (const Event& event : registry.TakeEvents()) {
      if (event.percent == 0) lines.push_back(fmt::format("{} {}", NameOf(event.kind), event.id));
    }
    return lines;
  }
};

TEST_F(RegistryTest, EvictsTheLeastRecentlyUsedContextToMakeRoom) {
  Registry registry = WithBudget(3 * (100 + kCardBytes));
  for (const char* id : {"a", "b", "c"}) {
    ASSERT_EQ(Outcome(registry.Publish(Context(id, {File(id[0], 100)}), kNow)), "ok");
  }
  ASSERT_EQ(Outcome(registry.Publish(Context("d", {File('d', 100)}), kNow)), "ok");
  EXPECT_THAT(Ids(registry), ElementsAre("b", "c", "d"));
}

TEST_F(RegistryTest, AContextJustReleasedCountsAsJustUsed) {
  Registry registry = WithBudget(3 * (100 + kCardBytes));
  for (const char* id : {"a", "b", "c"}) ASSERT_TRUE(registry.Publish(Context(id, {File(id[0], 100)}), kNow));
  const auto grant = registry.Attach(kAnn, "a", kNow);
  ASSERT_TRUE(grant);
  ASSERT_TRUE(registry.Attach(kAnn, "b", kNow));
  ASSERT_TRUE(registry.Release(kAnn, grant->lease));  // used last: c, then b (leased), then a
  ASSERT_TRUE(registry.Publish(Context("d", {File('d', 100)}), kNow));
  EXPECT_THAT(Ids(registry), ElementsAre("a", "b", "d"));
}

TEST_F(RegistryTest, EvictsNeitherPinnedNorLeasedContexts) {
  Registry registry = WithBudget(3 * (100 + kCardBytes));
  NewContext pinned = Context("a", {File('a', 100)});
  pinned.info.pinned = true;
  ASSERT_TRUE(registry.Publish(std::move(pinned), kNow));
  ASSERT_TRUE(registry.Publish(Context("b", {File('b', 100)}), kNow));
  const auto grant = registry.Attach(kAnn, "b", kNow);
  ASSERT_TRUE(registry.Publish(Context("c", {File('c', 100)}), kNow));

  ASSERT_TRUE(registry.Publish(Context("d", {File('d', 100)}), kNow));
  EXPECT_THAT(Ids(registry), ElementsAre("a", "b", "d"));
  ASSERT_TRUE(registry.Release(kAnn, grant->lease));
  ASSERT_TRUE(registry.Attach(kAnn, "d", kNow));
  ASSERT_TRUE(registry.Publish(Context("e", {File('e', 100)}), kNow));
  EXPECT_THAT(Ids(registry), ElementsAre("a", "d", "e"));
}

TEST_F(RegistryTest, EvictsNothingForAContextThatCannotFitAnyway) {
  Registry registry = WithBudget(3 * (100 + kCardBytes));
  NewContext pinned = Context("a", {File('a', 100)});
  pinned.info.pinned = true;
  ASSERT_TRUE(registry.Publish(std::move(pinned), kNow));
  ASSERT_TRUE(registry.Publish(Context("b", {File('b', 100)}), kNow));
  const uint64_t before = registry.used_bytes();
  // Room is 330; a stays with 110.
  EXPECT_EQ(Outcome(registry.Publish(Context("c", {File('c', 211)}), kNow)), "exhausted/pool_full");
  EXPECT_THAT(Ids(registry), ElementsAre("a", "b"));
  EXPECT_EQ(registry.used_bytes(), before);
  EXPECT_EQ(Outcome(registry.Publish(Context("c", {File('c', 210)}), kNow)), "ok");
  EXPECT_THAT(Ids(registry), ElementsAre("a", "c"));
}

TEST_F(RegistryTest, TheBudgetIsExactToTheByte) {
  Registry exact = WithBudget(100 + kCardBytes);
  EXPECT_EQ(Outcome(exact.Publish(Context("a", {File(1, 100)}), kNow)), "ok");
  EXPECT_EQ(exact.used_bytes(), 100 + kCardBytes);
  Registry short_of_one = WithBudget(100 + kCardBytes - 1);
  EXPECT_EQ(Outcome(short_of_one.Publish(Context("a", {File(1, 100)}), kNow)), "exhausted/pool_full");
  EXPECT_EQ(short_of_one.used_bytes(), 0);
}

TEST_F(RegistryTest, CountsAFileOnceHoweverManyContextsShareIt) {
  Registry registry = WithBudget(100'000);
  ASSERT_TRUE(registry.Publish(Context("parent", {File(1, 5000)}), kNow));
  ASSERT_TRUE(registry.Publish(Context("fork1", {File(1, 5000), File(2, 30)}), kNow));
  ASSERT_TRUE(registry.Publish(Context("fork2", {File(1, 5000), File(3, 40), File(3, 40)}), kNow));
  EXPECT_EQ(registry.used_bytes(), 5000 + 30 + 40 + 3 * kCardBytes);
  EXPECT_EQ(registry.n_files(), 3 + 3);
  ASSERT_TRUE(registry.Remove("parent"));
  EXPECT_EQ(registry.used_bytes(), 5000 + 30 + 40 + 2 * kCardBytes);
  ASSERT_TRUE(registry.Remove("fork2"));
  ASSERT_TRUE(registry.Remove("fork1"));
  EXPECT_EQ(registry.used_bytes(), 0);
  EXPECT_EQ(registry.n_files(), 0);
}

TEST_F(RegistryTest, AFileIsInodeAndDevice) {
  Registry registry = WithBudget(100'000);
  StoredFile elsewhere = File(1, 100);
  elsewhere.key.device = 8;
  ASSERT_TRUE(registry.Publish(Context("a", {File(1, 100), elsewhere}), kNow));
  EXPECT_EQ(registry.used_bytes(), 200 + kCardBytes);
}

TEST_F(RegistryTest, AForkOfTheOnlyEvictableContextPaysForWhatItShares) {
  // Evicting the parent does not free the shared file, which the fork needs.
  Registry registry = WithBudget(100 + kCardBytes + 50);
  ASSERT_TRUE(registry.Publish(Context("parent", {File(1, 100)}), kNow));
  EXPECT_EQ(Outcome(registry.Publish(Context("fork", {File(1, 100), File(2, 51)}), kNow)), "exhausted/pool_full");
  EXPECT_THAT(Ids(registry), ElementsAre("parent"));
  EXPECT_EQ(Outcome(registry.Publish(Context("fork", {File(1, 100), File(2, 50)}), kNow)), "ok");
  EXPECT_THAT(Ids(registry), ElementsAre("fork"));
  EXPECT_EQ(registry.used_bytes(), 150 + kCardBytes);
}

TEST_F(RegistryTest, LimitsTheNumberOfFilesAsWell) {
  Registry registry({.budget_bytes = 1'000'000, .max_files = 5});
  ASSERT_TRUE(registry.Publish(Context("a", {File(1, 1)}), kNow));
  ASSERT_TRUE(registry.Publish(Context("b", {File(2, 1), File(3, 1)}), kNow));
  EXPECT_EQ(Outcome(registry.Publish(Context("c", {File(2, 1), File(3, 1)}), kNow)), "ok");  // one more: its card
  EXPECT_THAT(Ids(registry), ElementsAre("b", "c"));
  EXPECT_EQ(Outcome(registry.Publish(Context("d", {File(5, 1), File(6, 1), File(7, 1), File(8, 1), File(9, 1)}), kNow)),
            "exhausted/pool_full");
}

TEST_F(RegistryTest, DropsItsDescriptorWithTheLastContextThatUsesIt) {
  Registry registry = WithBudget(100'000);
  std::weak_ptr<const Fd> watched;
  {
    const StoredFile shared = File(1, 100);
    watched = shared.fd;
    ASSERT_TRUE(registry.Publish(Context("a", {shared}), kNow));
    ASSERT_TRUE(registry.Publish(Context("b", {shared}), kNow));
  }
  ASSERT_TRUE(registry.Remove("a"));
  EXPECT_FALSE(watched.expired());
  ASSERT_TRUE(registry.Remove("b"));
  EXPECT_TRUE(watched.expired());
}

TEST_F(RegistryTest, KeepsOneDescriptorOfAFileThatComesTwice) {
  Registry registry = WithBudget(100'000);
  ASSERT_TRUE(registry.Publish(Context("a", {File(1, 100)}), kNow));
  const StoredFile again = File(1, 100);
  ASSERT_TRUE(registry.Publish(Context("b", {again}), kNow));
  EXPECT_EQ(again.fd.use_count(), 1);
}

TEST_F(RegistryTest, ExpiresAtTheMomentAndNotBefore) {
  Registry registry = WithBudget(100'000);
  NewContext context = Context("a", {File(1, 100)}, "name");
  context.info.expires_unix_ms = kNow + 50;
  ASSERT_TRUE(registry.Publish(std::move(context), kNow));
  ASSERT_TRUE(registry.Publish(Context("b", {}), kNow));
  EXPECT_EQ(registry.NextExpiryUnixMs(), kNow + 50);
  EXPECT_EQ(Outcome(registry.Attach(kAnn, "name", kNow + 49)), "ok");
  EXPECT_EQ(Outcome(registry.Attach(kAnn, "name", kNow + 50)), "incompatible/expired");
  EXPECT_EQ(Outcome(registry.Attach(kAnn, "a", kNow + 50)), "incompatible/expired");
  EXPECT_EQ(Outcome(registry.Attach(kAnn, "b", kNow + 50)), "ok");
  EXPECT_EQ(registry.NextExpiryUnixMs(), 0);
  EXPECT_EQ(registry.used_bytes(), kCardBytes);
}

TEST_F(RegistryTest, ExpiryIsForgottenWhenTheContextComesBackAndGoesAgain) {
  Registry registry = WithBudget(100'000);
  NewContext context = Context("a", {}, "name");
  context.info.expires_unix_ms = kNow + 1;
  ASSERT_TRUE(registry.Publish(std::move(context), kNow));
  registry.Expire(kNow + 1);
  ASSERT_TRUE(registry.Publish(Context("a", {}, "name"), kNow + 2));
  ASSERT_TRUE(registry.Remove("a"));
  EXPECT_EQ(Outcome(registry.Attach(kAnn, "a", kNow + 3)), "not_found/not_found");
  EXPECT_EQ(Outcome(registry.Attach(kAnn, "name", kNow + 3)), "not_found/not_found");
}

TEST_F(RegistryTest, RefusesAContextThatHasExpiredAlready) {
  Registry registry = WithBudget(100'000);
  NewContext context = Context("a", {});
  context.info.expires_unix_ms = kNow;
  EXPECT_EQ(Outcome(registry.Publish(std::move(context), kNow)), "incompatible/expired");
  EXPECT_THAT(Ids(registry), IsEmpty());
}

TEST_F(RegistryTest, ANameMovesToTheContextPublishedLast) {
  Registry registry = WithBudget(100'000);
  ASSERT_TRUE(registry.Publish(Context("old", {}, "summary"), kNow));
  ASSERT_TRUE(registry.Publish(Context("new", {}, "summary"), kNow));
  EXPECT_EQ(registry.Attach(kAnn, "summary", kNow)->id, "new");
  EXPECT_EQ(registry.Attach(kAnn, "old", kNow)->id, "old");
  EXPECT_EQ(Info(registry, "old").name, "");
  // The name does not fall back, nor does dropping the old one take it away.
  ASSERT_TRUE(registry.Remove("old"));
  EXPECT_EQ(registry.Attach(kAnn, "summary", kNow)->id, "new");
  ASSERT_TRUE(registry.Remove("summary"));
  EXPECT_EQ(Outcome(registry.Attach(kAnn, "summary", kNow)), "not_found/not_found");
}

TEST_F(RegistryTest, AnIdIsLookedUpBeforeAName) {
  Registry registry = WithBudget(100'000);
  ASSERT_TRUE(registry.Publish(Context("a", {}), kNow));
  ASSERT_TRUE(registry.Publish(Context("b", {}, "a"), kNow));
  EXPECT_EQ(registry.Attach(kAnn, "a", kNow)->id, "a");
}

TEST_F(RegistryTest, AnnouncingAgainRenewsExpiryAndPinAndCountsNothingTwice) {
  Registry registry = WithBudget(100 + kCardBytes);
  NewContext first = Context("a", {File(1, 100)}, "name");
  first.info.expires_unix_ms = kNow + 10;
  first.info.pinned = true;
  ASSERT_TRUE(registry.Publish(std::move(first), kNow));
  ASSERT_TRUE(registry.Attach(kAnn, "a", kNow));
  // The same card over copies of the segments: the registry keeps what it has.
  EXPECT_EQ(Outcome(registry.Publish(Context("a", {File(2, 100)}, "name"), kNow)), "ok");
  EXPECT_EQ(registry.used_bytes(), 100 + kCardBytes);
  EXPECT_EQ(Info(registry, "a").expires_unix_ms, 0);
  EXPECT_FALSE(Info(registry, "a").pinned);
  EXPECT_EQ(Info(registry, "a").n_leases, 1);
  EXPECT_EQ(registry.Attach(kAnn, "name", kNow)->id, "a");
}

TEST_F(RegistryTest, ALeaseLeadsToTheFilesInOrder) {
  Registry registry = WithBudget(100'000);
  ASSERT_TRUE(registry.Publish(Context("a", {File(5, 50), File(3, 30)}), kNow));
  const uint64_t lease = registry.Attach(kAnn, "a", kNow)->lease;
  const auto files = registry.FilesOf(kAnn, lease);
  ASSERT_TRUE(files);
  ASSERT_EQ(files->size(), 3);
  EXPECT_EQ((*files)[0].bytes, kCardBytes);
  EXPECT_EQ((*files)[1].key.inode, 5);
  EXPECT_EQ((*files)[2].key.inode, 3);
}

TEST_F(RegistryTest, ALeaseIsNobodyElses) {
  Registry registry = WithBudget(100'000);
  ASSERT_TRUE(registry.Publish(Context("a", {}), kNow));
  const uint64_t lease = registry.Attach(kAnn, "a", kNow)->lease;
  EXPECT_EQ(Outcome(registry.Release(kBob, lease)), "not_found/not_found");
  ASSERT_TRUE(registry.Attach(kBob, "a", kNow));
  EXPECT_EQ(Outcome(registry.Release(kBob, lease)), "not_found/not_found");
  EXPECT_EQ(Outcome(registry.FilesOf(kBob, lease)), "not_found/not_found");
  EXPECT_EQ(Info(registry, "a").n_leases, 2);
  EXPECT_EQ(Outcome(registry.Release(kAnn, lease)), "ok");
  EXPECT_EQ(Outcome(registry.Release(kAnn, lease)), "not_found/not_found");
  EXPECT_EQ(Info(registry, "a").n_leases, 1);
}

TEST_F(RegistryTest, AClientThatGoesTakesItsLeasesAndNobodyElses) {
  Registry registry = WithBudget(100'000);
  ASSERT_TRUE(registry.Publish(Context("a", {}), kNow));
  ASSERT_TRUE(registry.Publish(Context("b", {}), kNow));
  for (const char* id : {"a", "a", "b"}) ASSERT_TRUE(registry.Attach(kAnn, id, kNow));
  ASSERT_TRUE(registry.Attach(kBob, "a", kNow));
  registry.ReleaseAllOf(kAnn);
  registry.ReleaseAllOf(99);
  EXPECT_EQ(Info(registry, "a").n_leases, 1);
  EXPECT_EQ(Info(registry, "b").n_leases, 0);
}

TEST_F(RegistryTest, LimitsTheLeasesOfOneClient) {
  Registry registry({.budget_bytes = 1000, .max_leases_per_client = 2});
  ASSERT_TRUE(registry.Publish(Context("a", {}), kNow));
  const uint64_t lease = registry.Attach(kAnn, "a", kNow)->lease;
  ASSERT_TRUE(registry.Attach(kAnn, "a", kNow));
  EXPECT_EQ(Outcome(registry.Attach(kAnn, "a", kNow)), "exhausted/pool_full");
  EXPECT_EQ(Outcome(registry.Attach(kBob, "a", kNow)), "ok");
  ASSERT_TRUE(registry.Release(kAnn, lease));
  EXPECT_EQ(Outcome(registry.Attach(kAnn, "a", kNow)), "ok");
}

TEST_F(RegistryTest, RemovingALeasedContextLeavesALeaseThatLeadsNowhere) {
  Registry registry = WithBudget(100'000);
  ASSERT_TRUE(registry.Publish(Context("a", {File(1, 100)}), kNow));
  const uint64_t lease = registry.Attach(kAnn, "a", kNow)->lease;
  ASSERT_TRUE(registry.Remove("a"));
  EXPECT_EQ(Outcome(registry.Remove("a")), "not_found/not_found");
  // Nor does it lead to another context that comes under the same id.
  ASSERT_TRUE(registry.Publish(Context("a", {File(2, 100)}), kNow));
  EXPECT_EQ(Outcome(registry.FilesOf(kAnn, lease)), "not_found/not_found");
  EXPECT_EQ(Outcome(registry.Release(kAnn, lease)), "ok");
  EXPECT_EQ(Info(registry, "a").n_leases, 0);
}

TEST_F(RegistryTest, TellsWhatHappenedInOrder) {
  Registry registry = WithBudget(2 * kCardBytes);
  ASSERT_TRUE(registry.Publish(Context("a", {}), kNow));
  ASSERT_TRUE(registry.Publish(Context("a", {}), kNow));
  NewContext brief = Context("b", {});
  brief.info.expires_unix_ms = kNow + 1;
  ASSERT_TRUE(registry.Publish(std::move(brief), kNow));
  const uint64_t lease = registry.Attach(kAnn, "a", kNow)->lease;
  ASSERT_TRUE(registry.Release(kAnn, lease));
  EXPECT_THAT(EventsOf(registry), ElementsAre("created a", "published a", "published a", "created b", "published b",
                                              "attached a", "released a"));
  registry.Expire(kNow + 1);
  ASSERT_TRUE(registry.Publish(Context("c", {}), kNow + 1));
  ASSERT_TRUE(registry.Publish(Context("d", {}), kNow + 1));
  ASSERT_TRUE(registry.Remove("c"));
  EXPECT_THAT(EventsOf(registry), ElementsAre("expired b", "created c", "published c", "evicted a", "created d",
                                              "published d", "removed c"));
  EXPECT_THAT(EventsOf(registry), IsEmpty());
}

TEST_F(RegistryTest, WalksContextsInPages) {
  Registry registry = WithBudget(100'000);
  for (const char* id : {"c", "a", "d", "b"}) ASSERT_TRUE(registry.Publish(Context(id, {}), kNow));
  std::vector<std::string> ids;
  registry.ForEachAfter("a", [&](const ContextInfo& info) {
    ids.push_back(info.id);
    return ids.size() < 2;
  });
  EXPECT_THAT(ids, ElementsAre("b", "c"));
}

// Random operations beside a model that keeps no sums: bytes are added up anew after every step.
TEST_F(RegistryTest, NeverExceedsItsLimitsAndNeverLosesCount) {
  const char* seed_text = std::getenv("QKV_TEST_SEED");
  const uint32_t seed = seed_text != nullptr ? static_cast<uint32_t>(std::atoi(seed_text)) : 20260;
  SCOPED_TRACE("QKV_TEST_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  const RegistryLimits limits{.budget_bytes = 1200, .max_files = 12, .max_leases_per_client = 5};
  Registry registry(limits);
  std::map<std::string, std::vector<StoredFile>> published;  // by id: the files it was last created with
  std::map<std::pair<ClientId, uint64_t>, std::string> leases;
  size_t n_full = 0;
  size_t n_evicted = 0;
  int64_t now = kNow;
  for (int step = 0; step < 20'000; ++step) {
    const std::string id(1, static_cast<char>('a' + below(12)));
    const ClientId client = 1 + below(3);
    switch (below(6)) {
      case 0:
      case 1: {
        std::vector<StoredFile> segments;
        for (uint32_t i = below(4); i > 0; --i) {
          const uint64_t inode = 1 + below(8);
          segments.push_back(File(inode, 50 * inode));
        }
        NewContext context = Context(id, segments, below(2) == 0 ? "" : "name-of-" + id);
        context.info.pinned = below(4) == 0;
        context.info.expires_unix_ms = below(3) == 0 ? now + 1 + below(20) : 0;
        const auto files = context.files;
        const bool known = !registry.FilesOf(id).empty();
        const auto outcome = Outcome(registry.Publish(std::move(context), now));
        if (outcome == "ok" && !known) published[id] = files;
        if (outcome != "ok") {
          EXPECT_EQ(outcome, "exhausted/pool_full");
          ++n_full;
        }
        break;
      }
      case 2:
        if (const auto grant = registry.Attach(client, id, now)) leases[{client, grant->lease}] = id;
        break;
      case 3:
        if (!leases.empty()) {
          const auto it = std::next(leases.begin(), below(static_cast<uint32_t>(leases.size())));
          EXPECT_EQ(Outcome(registry.Release(it->first.first, it->first.second)), "ok");
          leases.erase(it);
        }
        break;
      case 4:
        if (below(4) == 0) (void)registry.Remove(id);
        if (below(10) == 0) {
          registry.ReleaseAllOf(client);
          std::erase_if(leases, [&](const auto& lease) { return lease.first.first == client; });
        }
        break;
      case 5: registry.Expire(now += below(4)); break;
    }
    for (const Event& event : registry.TakeEvents()) {
      if (event.kind == Event::Kind::kEvicted) {
        ++n_evicted;
        for (const auto& [lease, context] : leases) EXPECT_NE(context, event.id) << "evicted while leased";
      }
      const bool gone = event.kind == Event::Kind::kEvicted || event.kind == Event::Kind::kExpired ||
                        event.kind == Event::Kind::kRemoved;
      if (!gone) continue;
      for (auto& [lease, context] : leases) {
        if (context == event.id) context.clear();
      }
    }
    std::set<FileKey> distinct;
    uint64_t bytes = 0;
    std::map<std::string, uint32_t> n_leases;
    for (const auto& [lease, context] : leases) ++n_leases[context];
    registry.ForEachAfter("", [&](const ContextInfo& info) {
      for (const StoredFile& file : published[info.id]) bytes += distinct.insert(file.key).second ? file.bytes : 0;
      EXPECT_EQ(info.n_leases, n_leases[info.id]);
      return true;
    });
    ASSERT_EQ(registry.used_bytes(), bytes) << "step " << step;
    ASSERT_EQ(registry.n_files(), distinct.size()) << "step " << step;
    ASSERT_LE(bytes, limits.budget_bytes);
    ASSERT_LE(distinct.size(), limits.max_files);
    if (HasFailure()) FAIL() << "step " << step;
  }
  EXPECT_GT(n_full, 100);
  EXPECT_GT(n_evicted, 100);
}

TEST_F(RegistryTest, FilesOnDiskTakeNoBudgetButDescriptors) {
  Registry registry({.budget_bytes = 2 * kCardBytes, .max_files = 4});
  StoredFile file = File(1, 1'000'000);
  file.on_disk = true;
  ASSERT_EQ(Outcome(registry.Publish(Context("a", {file}), kNow)), "ok");
  EXPECT_EQ(registry.used_bytes(), kCardBytes);
  EXPECT_EQ(registry.n_files(), 2u);
  EXPECT_FALSE(Info(registry, "a").in_memory);
  StoredFile another = File(2, 1'000'000);
  another.on_disk = true;
  ASSERT_EQ(Outcome(registry.Publish(Context("b", {another}), kNow)), "ok");
  another.key.inode = 3;
  (void)registry.TakeEvents();
  ASSERT_EQ(Outcome(registry.Publish(Context("c", {another}), kNow)), "ok");
  EXPECT_THAT(Ids(registry), ElementsAre("b", "c"));
}

TEST_F(RegistryTest, SaysWhyItEvictedAndReleased) {
  Registry registry({.budget_bytes = 200, .max_files = 4});
  const auto reasons = [&] {
    std::vector<std::string> lines;
    for (const Event& event : registry.TakeEvents()) {
      if (!event.reason.empty()) lines.push_back(fmt::format("{} {} {}", NameOf(event.kind), event.id, event.reason));
    }
    return lines;
  };
  ASSERT_TRUE(registry.Publish(Context("a", {File(1, 100)}), kNow));
  ASSERT_TRUE(registry.Publish(Context("b", {File(2, 100)}), kNow));
  EXPECT_THAT(reasons(), ElementsAre("evicted a budget"));
  ASSERT_TRUE(registry.Publish(Context("c", {File(3, 1), File(4, 1)}), kNow));
  EXPECT_THAT(reasons(), ElementsAre("evicted b descriptors"));
  const auto one = registry.Attach(kAnn, "c", kNow);
  ASSERT_TRUE(registry.Attach(kAnn, "c", kNow));
  ASSERT_TRUE(registry.Release(kAnn, one->lease));
  registry.ReleaseAllOf(kAnn);
  EXPECT_THAT(reasons(), ElementsAre("released c request", "released c hang_up"));
}

TEST_F(RegistryTest, RaisesAlarmsOnceUntilUsageIsWellBelow) {
  Registry registry = WithBudget(1000);
  const auto alarms = [&] {
    std::vector<std::string> lines;
    for (const Event& event : registry.TakeEvents()) {
      if (event.percent != 0) lines.push_back(fmt::format("{} {} {}", NameOf(event.kind), event.percent, event.bytes));
    }
    return lines;
  };
  const auto publish = [&](const char* id, uint64_t bytes) {  // with its card
    ASSERT_TRUE(registry.Publish(Context(id, {File(id[0], bytes - kCardBytes)}), kNow));
  };
  publish("a", 799);
  EXPECT_THAT(alarms(), IsEmpty());
  publish("b", 20);
  EXPECT_THAT(alarms(), ElementsAre("alarm 80 819"));
  ASSERT_TRUE(registry.Remove("b"));
  publish("c", 20);
  EXPECT_THAT(alarms(), IsEmpty()) << "799 is not well below 800";
  publish("d", 140);
  EXPECT_THAT(alarms(), ElementsAre("alarm 95 959"));
  ASSERT_TRUE(registry.Remove("a"));
  EXPECT_THAT(alarms(), ElementsAre("alarm_ended 95 160", "alarm_ended 80 160"));
  publish("e", 800);
  EXPECT_THAT(alarms(), ElementsAre("alarm 80 960", "alarm 95 960"));
}

TEST_F(RegistryTest, AHeldContextIsNotEvicted) {
  Registry registry = WithBudget(2 * (100 + kCardBytes));
  ASSERT_TRUE(registry.Publish(Context("a", {File('a', 100)}), kNow));
  ASSERT_TRUE(registry.Publish(Context("b", {File('b', 100)}), kNow));
  registry.Hold("a", true);
  ASSERT_TRUE(registry.Publish(Context("c", {File('c', 100)}), kNow));
  EXPECT_THAT(Ids(registry), ElementsAre("a", "c"));
  registry.Hold("a", false);
  ASSERT_TRUE(registry.Publish(Context("d", {File('d', 100)}), kNow));
  EXPECT_THAT(Ids(registry), ElementsAre("c", "d"));
  registry.Hold("a", true);  // gone: nothing to hold
}

TEST_F(RegistryTest, ForgetsFromDiskOnlyWhatIsThere) {
  Registry registry = WithBudget(1000);
  StoredFile on_disk = File(1, 100);
  on_disk.on_disk = true;
  ASSERT_TRUE(registry.Publish(Context("a", {on_disk}), kNow));
  ASSERT_TRUE(registry.Publish(Context("b", {File(2, 100)}), kNow));
  for (const char* id : {"a", "b", "c"}) registry.ForgetFromDisk(id);
  EXPECT_THAT(Ids(registry), ElementsAre("b"));
}

TEST_F(RegistryTest, LeasesStartWhereTheyAreToldTo) {
  Registry registry({.budget_bytes = 1000, .first_lease = 77});
  ASSERT_TRUE(registry.Publish(Context("a", {}), kNow));
  EXPECT_EQ(registry.Attach(kAnn, "a", kNow)->lease, 77u);
  EXPECT_EQ(registry.Attach(kAnn, "a", kNow)->lease, 78u);
}

}  // namespace
}  // namespace qkv
