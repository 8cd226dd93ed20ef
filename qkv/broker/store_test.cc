// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <fstream>

#include "qkv/broker/admit.h"
#include "qkv/broker/test_support.h"

namespace qkv::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Kind = ContextStore::Outcome::Kind;

constexpr int64_t kNow = 1'700'000'000'000;

NewContext Admitted(const TestContext& context) {
  std::vector<Fd> fds;
  fds.push_back(Take(context.card_fd.Duplicate()));
  for (const Fd& segment : context.segments) fds.push_back(Take(segment.Duplicate()));
  return Take(AdmitContext(fds)).context;
}

class StoreTest : public ::testing::Test {
 protected:
  StoreTest() { Open(); }

  void Open(uint64_t budget_bytes = uint64_t{1} << 30) {
    store_.reset();
    store_ = Take(ContextStore::Open({.directory = path_, .budget_bytes = budget_bytes}));
  }

  // The outcome of everything that was put, in order.
  ContextStore::Outcome Next() {
    EXPECT_TRUE(Eventually([&] {
      for (auto& outcome : store_->TakeOutcomes()) outcomes_.push_back(std::move(outcome));
      return !outcomes_.empty();
    }));
    if (outcomes_.empty()) return {};
    ContextStore::Outcome first = std::move(outcomes_.front());
    outcomes_.erase(outcomes_.begin());
    return first;
  }
  void Put(const TestContext& context, int64_t now = kNow, const std::function<void(NewContext&)>& change = {}) {
    NewContext admitted = Admitted(context);
    if (change) change(admitted);
    store_->Put(admitted, now);
    const auto outcome = Next();
    ASSERT_EQ(outcome.kind, Kind::kStored) << outcome.error.message;
    EXPECT_EQ(outcome.id, context.id());
  }
  void ExpectLoads(const TestContext& context) {
    const auto loaded = store_->Load(context.id());
    ASSERT_TRUE(loaded) << loaded.error().message;
    const auto& files = loaded->context.files;
    ASSERT_EQ(files.size(), 1 + context.segments.size());
    EXPECT_EQ(Contents(*files[0].fd), SerializeCard(context.card));
    for (size_t i = 0; i < context.segments.size(); ++i) {
      EXPECT_EQ(Contents(*files[i + 1].fd), Contents(context.segments[i])) << "segment " << i;
      EXPECT_TRUE(files[i + 1].on_disk);
      EXPECT_EQ(::fcntl(files[i + 1].fd->get(), F_GETFL) & O_ACCMODE, O_RDONLY);
      EXPECT_TRUE(IsReadOnlyFileOf(*files[i + 1].fd, ::geteuid()));
    }
  }
  std::vector<std::string> Ending(const std::string& ending) {
    std::vector<std::string> names;
    for (const std::string& name : FilesIn(path_)) {
      if (name.ends_with(ending)) names.push_back(path_ + "/" + name);
    }
    return names;
  }
  void ExpectFiles(size_t n_contexts, size_t n_segments) {
    EXPECT_TRUE(Eventually([&] { return Ending(".segment").size() == n_segments; })) << Ending(".segment").size();
    EXPECT_THAT(Ending(".context"), SizeIs(n_contexts));
    EXPECT_THAT(Ending(".part"), IsEmpty());
    EXPECT_THAT(FilesIn(path_), SizeIs(1 + n_contexts + n_segments)) << "and the lock";
  }

  TemporaryFolder folder_;
  const std::string path_ = folder_ / "store";
  std::unique_ptr<ContextStore> store_;
  std::vector<ContextStore::Outcome> outcomes_;
};

TEST_F(StoreTest, AContextIsThereAfterARestart) {
  const TestContext context("report", {8192, 5000});
  NewContext admitted = Admitted(context);
  admitted.info.pinned = true;
  admitted.info.expires_unix_ms = kNow + 1000;
  admitted.info.producer_pid = 4711;
  store_->Put(admitted, kNow, "a wrapped key");
  ASSERT_EQ(Next().kind, Kind::kStored);
  ExpectFiles(1, 2);
  for (int life = 0; life < 2; ++life) {
    SCOPED_TRACE(life);
    EXPECT_EQ(store_->Find("report", kNow), context.id());
    EXPECT_EQ(store_->Find(context.id(), kNow), context.id());
    EXPECT_EQ(store_->Find("report", kNow + 1000), "") << "expired";
    ExpectLoads(context);
    const auto loaded = Take(store_->Load(context.id()));
    EXPECT_EQ(loaded.wrapped_key, "a wrapped key");
    EXPECT_EQ(loaded.context.info.name, "report");
    EXPECT_TRUE(loaded.context.info.pinned);
    EXPECT_EQ(loaded.context.info.expires_unix_ms, kNow + 1000);
    EXPECT_EQ(loaded.context.info.producer_pid, 4711);
    EXPECT_EQ(loaded.context.info.bytes, 8192u + 5000u);
    EXPECT_EQ(store_->used_bytes(), 8192u + 8192u + 4096u) << "whole blocks";
    EXPECT_EQ(store_->NextExpiryUnixMs(), kNow + 1000);
    Open();
  }
  store_->Expire(kNow + 1000);
  EXPECT_EQ(Next().kind, Kind::kExpired);
  ExpectFiles(0, 0);
  EXPECT_EQ(store_->used_bytes(), 0u);
}

TEST_F(StoreTest, SharedSegmentsAreWrittenOnceAndStayAsLongAsOneNeedsThem) {
  const TestContext parent("parent", {8192});
  TestContext fork("fork", {8192, 12288});
  fork.segments[0] = Take(parent.segments[0].Duplicate());
  NewContext first = Admitted(parent), second = Admitted(fork);
  second.files[1].fd = first.files[1].fd;  // as the registry has it: one holder of the memory file
  store_->Put(first, kNow);
  store_->Put(second, kNow);
  ASSERT_EQ(Next().kind, Kind::kStored);
  ASSERT_EQ(Next().kind, Kind::kStored);
  ExpectFiles(2, 2);
  store_->Remove(parent.id());
  ExpectFiles(1, 2);
  Open();
  ExpectFiles(1, 2);
  ExpectLoads(fork);

  // A child of what came from disk names the files there.
  const auto loaded = Take(store_->Load(fork.id()));
  TestContext child("child", {8192, 12288, 5000});
  NewContext third = Admitted(child);
  third.files[1] = loaded.context.files[1];
  third.files[2] = loaded.context.files[2];
  store_->Put(third, kNow);
  ASSERT_EQ(Next().kind, Kind::kStored);
  ExpectFiles(2, 3);
  store_->Remove(fork.id());
  store_->Remove(child.id());
  ExpectFiles(0, 0);
  EXPECT_EQ(store_->used_bytes(), 0u);
}

TEST_F(StoreTest, TheSameContextTwiceIsOneAndRenewsNameExpiryAndPin) {
  const TestContext context("a", {8192});
  Put(context);
  const uint64_t used = store_->used_bytes();
  Put(context, kNow + 1, [](NewContext& again) {
    again.info.name = "b";
    again.info.pinned = true;
  });
  ExpectFiles(1, 1);
  Open();
  EXPECT_EQ(store_->Find("a", kNow), "");
  EXPECT_EQ(store_->Find("b", kNow), context.id());
  ExpectFiles(1, 1);
  EXPECT_EQ(store_->used_bytes(), used);
}

TEST_F(StoreTest, ANameLeadsToWhatWasPublishedLast) {
  const TestContext older("report", {5000}), newer("report", {6000});
  Put(newer, kNow + 1);
  Put(older, kNow);  // written later
  EXPECT_EQ(store_->Find("report", kNow), older.id());
  Open();
  EXPECT_EQ(store_->Find("report", kNow), newer.id()) << "by time of publication, not of writing";
  EXPECT_EQ(store_->Find(older.id(), kNow), older.id());
  std::vector<std::string> ids;
  for (const ContextInfo& info : store_->InfosAfter("", 10)) ids.push_back(info.id);
  EXPECT_THAT(ids, ElementsAre(std::min(older.id(), newer.id()), std::max(older.id(), newer.id())));
}

TEST_F(StoreTest, MakesRoomFromTheLeastRecentlyUsed) {
  Open(3 * (8192 + 4096));
  const TestContext a("a", {8192}), b("b", {8192}), c("c", {8192}), d("d", {8192}), large("e", {40'000});
  Put(a, kNow, [](NewContext& context) { context.info.pinned = true; });
  Put(b);
  Put(c);
  store_->Touch(b.id());
  store_->Put(Admitted(d), kNow);
  const auto evicted = Next();
  EXPECT_EQ(evicted.kind, Kind::kEvicted);
  EXPECT_EQ(evicted.id, c.id());
  EXPECT_EQ(Next().kind, Kind::kStored);
  ExpectFiles(3, 3);
  EXPECT_LE(store_->used_bytes(), store_->budget_bytes());

  store_->Put(Admitted(large), kNow);
  const auto failed = Next();
  EXPECT_EQ(failed.kind, Kind::kFailed);
  EXPECT_EQ(failed.error.reason, Reason::kPoolFull);
  ExpectFiles(3, 3);
  EXPECT_EQ(store_->used_bytes(), 3u * (8192 + 4096));
}

TEST_F(StoreTest, WhatACrashLeftIsRemoved) {
  const TestContext context("a", {8192});
  Put(context);
  store_.reset();
  const std::string some_id(32, 'e');
  for (const std::string& name : {some_id + ".part", some_id + ".segment"}) std::ofstream(path_ + "/" + name) << "half";
  std::ofstream(path_ + "/README") << "somebody's own";
  Open();
  EXPECT_TRUE(Eventually([&] { return FilesIn(path_).size() == 4; }));
  EXPECT_THAT(Ending("README"), SizeIs(1)) << "what is not ours is left alone";
  ExpectLoads(context);
}

TEST_F(StoreTest, DamageIsFoundAndNothingElseSuffers) {
  const TestContext good("good", {5000});
  const std::string outside = folder_ / "outside";
  std::ofstream(outside) << std::string(8192, '\1');
  ASSERT_EQ(::chmod(outside.c_str(), 0400), 0);
  struct Case {
    const char* what;
    std::function<void(const std::string& context, const std::string& segment)> damage;
  };
  const auto rewrite = [](const std::string& path, const std::function<void(std::string&)>& change) {
    std::ifstream in(path, std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(in), {}};
    change(bytes);
    ::unlink(path.c_str());
    std::ofstream(path, std::ios::binary) << bytes;
    ::chmod(path.c_str(), 0400);
  };
  const Case cases[] = {
      {"segment truncated", [&](auto&, auto& s) { rewrite(s, [](std::string& b) { b.resize(b.size() - 1); }); }},
      {"segment longer", [&](auto&, auto& s) { rewrite(s, [](std::string& b) { b += 'x'; }); }},
      {"segment gone", [&](auto&, auto& s) { ::unlink(s.c_str()); }},
      {"segment a link to a file of the same size",
       [&](auto&, auto& s) {
         ::unlink(s.c_str());
         ASSERT_EQ(::symlink(outside.c_str(), s.c_str()), 0);
       }},
      {"segment a directory",
       [&](auto&, auto& s) {
         ::unlink(s.c_str());
         ASSERT_EQ(::mkdir(s.c_str(), 0500), 0);
       }},
      {"segment a fifo",
       [&](auto&, auto& s) {
         ::unlink(s.c_str());
         ASSERT_EQ(::mkfifo(s.c_str(), 0400), 0);
       }},
      {"segment writable", [&](auto&, auto& s) { ::chmod(s.c_str(), 0600); }},
      {"context flipped", [&](auto& c, auto&) { rewrite(c, [](std::string& b) { b[b.size() / 2] ^= 1; }); }},
      {"context truncated", [&](auto& c, auto&) { rewrite(c, [](std::string& b) { b.resize(b.size() / 2); }); }},
      {"context empty", [&](auto& c, auto&) { rewrite(c, [](std::string& b) { b.clear(); }); }},
      {"context a link",
       [&](auto& c, auto&) {
         ::unlink(c.c_str());
         ASSERT_EQ(::symlink(outside.c_str(), c.c_str()), 0);
       }},
      {"context under another id",
       [&](auto& c, auto&) { ::rename(c.c_str(), (path_ + "/" + std::string(32, 'f') + ".context").c_str()); }},
  };
  Put(good);
  const std::string good_segment = Ending(".segment").front();
  for (const Case& one : cases) {
    SCOPED_TRACE(one.what);
    const TestContext victim("victim", {8192});
    Put(victim);
    std::string segment = Ending(".segment").front();
    if (segment == good_segment) segment = Ending(".segment").back();
    const std::string context = path_ + "/" + victim.id() + ".context";
    // While it is known: found when it is loaded. Else when the directory is opened.
    const bool while_open = std::string_view(one.what).starts_with("segment");
    if (!while_open) store_.reset();
    one.damage(context, segment);
    if (while_open) {
      EXPECT_EQ(Outcome(store_->Load(victim.id())), "corrupt/checksum");
    } else {
      Open();
    }
    EXPECT_EQ(Next().kind, Kind::kDamaged);
    EXPECT_EQ(Outcome(store_->Load(victim.id())), "not_found/not_found");
    EXPECT_EQ(store_->Find("victim", kNow), "");
    ExpectLoads(good);
    if (std::string_view(one.what) == "segment a directory") ::rmdir(segment.c_str());
    ExpectFiles(1, 1);
  }
  EXPECT_EQ(std::filesystem::file_size(outside), 8192u);
}

TEST_F(StoreTest, AFlippedBitOrAMissingByteOfAContextsFileIsNeverAContext) {
  const TestContext context("a", {5000});
  Put(context);
  store_.reset();
  const std::string file = path_ + "/" + context.id() + ".context";
  std::ifstream in(file, std::ios::binary);
  const std::string good{std::istreambuf_iterator<char>(in), {}};
  const std::string segment = Ending(".segment").front();
  const auto is_there_with = [&](const std::string& bytes) {
    // A damaged one is removed, and its segment with it.
    ::unlink(file.c_str());
    std::ofstream(file, std::ios::binary) << bytes;
    std::ofstream(segment) << std::string(5000, '\1');
    ::chmod(file.c_str(), 0400);
    ::chmod(segment.c_str(), 0400);
    const auto store = Take(ContextStore::Open({.directory = path_}));
    return store->Has(context.id());
  };
  EXPECT_TRUE(is_there_with(good));
  for (size_t bit = 0; bit < 8 * good.size(); bit += bit < 256 ? 1 : 5) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    ASSERT_FALSE(is_there_with(bad)) << "bit " << bit;
  }
  for (size_t n = 0; n < good.size(); n += 3) ASSERT_FALSE(is_there_with(good.substr(0, n))) << n << " bytes";
  EXPECT_FALSE(is_there_with(good + "x"));
  EXPECT_TRUE(is_there_with(good));
}

TEST_F(StoreTest, OneProcessOwnsADirectory) {
  const auto second = ContextStore::Open({.directory = path_});
  ASSERT_EQ(Outcome(second), "invalid_argument");
  EXPECT_THAT(second.error().message, HasSubstr("in use by another broker"));
  store_.reset();
  EXPECT_EQ(Outcome(ContextStore::Open({.directory = path_})), "ok");
}

TEST_F(StoreTest, RefusesADirectoryThatIsNoneOrNotOurs) {
  const auto outcome = [](const std::string& path) { return Outcome(ContextStore::Open({.directory = path})); };
  EXPECT_EQ(outcome(""), "invalid_argument");
  EXPECT_EQ(outcome(std::string("a\0b", 3)), "invalid_argument");
  EXPECT_EQ(outcome(folder_ / "none" + "/store"), "not_found");
  EXPECT_EQ(outcome(folder_ / std::string(300, 'x')), "invalid_argument");
  std::ofstream(folder_ / "file") << "x";
  EXPECT_EQ(outcome(folder_ / "file"), "invalid_argument");
  ASSERT_EQ(::mkdir((folder_ / "open").c_str(), 0700), 0);
  ASSERT_EQ(::chmod((folder_ / "open").c_str(), 0777), 0);
  EXPECT_EQ(outcome(folder_ / "open"), "denied/denied");
  ASSERT_EQ(::symlink("/etc/passwd", (path_ + "2").c_str()), 0);
  EXPECT_EQ(outcome(path_ + "2"), "invalid_argument");
  struct stat info {};
  ASSERT_EQ(::stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700u);
}

TEST_F(StoreTest, WhatIsRemovedBeforeItIsWrittenIsNotThere) {
  std::vector<TestContext> contexts;
  for (int i = 0; i < 20; ++i) contexts.emplace_back(fmt::format("c{}", i), std::vector<size_t>{1 << 20});
  for (const TestContext& context : contexts) store_->Put(Admitted(context), kNow);
  for (const TestContext& context : contexts) store_->Remove(context.id());
  store_->Put(Admitted(contexts[3]), kNow);
  EXPECT_TRUE(Eventually([&] { return store_->Has(contexts[3].id()); }));
  ExpectFiles(1, 1);
  for (const TestContext& context : contexts) store_->Remove(context.id());
  ExpectFiles(0, 0);
  EXPECT_EQ(store_->used_bytes(), 0u);
}

TEST_F(StoreTest, WhatWasPutIsWrittenBeforeItEnds) {
  std::vector<TestContext> contexts;
  for (int i = 0; i < 20; ++i) contexts.emplace_back(fmt::format("c{}", i), std::vector<size_t>{100'000});
  for (const TestContext& context : contexts) store_->Put(Admitted(context), kNow);
  Open();
  for (const TestContext& context : contexts) ExpectLoads(context);
}

TEST_F(StoreTest, LeavesNoDescriptorBehind) {
  const TestContext context("a", {8192, 8192});
  Put(context);
  const size_t before = test::OpenDescriptors();
  for (int i = 0; i < 50; ++i) {
    const TestContext more("b", {8192});
    Put(more);
    ExpectLoads(more);
    store_->Remove(more.id());
  }
  EXPECT_TRUE(Eventually([&] { return test::OpenDescriptors() == before; })) << test::OpenDescriptors();
}

// Runs `body` in a child that has a small filesystem of its own at `path`; it returns what went wrong, or "".
std::string OnASmallFilesystem(const std::string& path, const std::function<std::string()>& body) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return "pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    std::string said;
    if (::unshare(::geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWNS | CLONE_NEWUSER) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", path.c_str(), "tmpfs", 0, "size=256k,mode=0700") != 0) {
      said = "skip";
    } else {
      said = body();
    }
    (void)!::write(ends[1], said.data(), said.size());
    ::_exit(0);
  }
  ::close(ends[1]);
  const Fd read_end(ends[0]);
  std::string said(4096, '\0');
  const ssize_t n = ::read(read_end.get(), said.data(), said.size());
  said.resize(n > 0 ? static_cast<size_t>(n) : 0);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? said : "the child died";
}

TEST(StoreOnASmallDisk, AFullOrReadOnlyDiskIsAnOutcomeAndLeavesNothing) {
  const TemporaryFolder folder;
  const std::string said = OnASmallFilesystem(folder.path(), [&]() -> std::string {
    const std::string path = folder.path();
    const auto next = [](ContextStore& store) {
      std::vector<ContextStore::Outcome> outcomes;
      Eventually([&] { return !(outcomes = store.TakeOutcomes()).empty(); });
      return outcomes.empty() ? ContextStore::Outcome{} : outcomes.front();
    };
    const TestContext small("small", {100'000}), large("large", {100'000, 100'000}), tiny("tiny", {5000});
    {
      const auto store = Take(ContextStore::Open({.directory = path}));
      store->Put(Admitted(small), kNow);
      if (next(*store).kind != Kind::kStored) return "the small one does not fit";
      store->Put(Admitted(large), kNow);
      const auto full = next(*store);
      if (full.kind != Kind::kFailed || full.error.reason != Reason::kPoolFull) return "full: " + full.error.message;
      if (!Eventually([&] { return FilesIn(path).size() == 3; })) return "something is left of the large one";
      if (store->used_bytes() != 102'400 + 4096) return fmt::format("{} bytes used", store->used_bytes());
      store->Put(Admitted(tiny), kNow);
      if (next(*store).kind != Kind::kStored) return "the store does not go on";
      if (::mount(nullptr, path.c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) != 0)
        return "it cannot be made read-only";
      const TestContext late("late", {5000});
      store->Put(Admitted(late), kNow);
      const auto refused = next(*store);
      if (refused.kind != Kind::kFailed || refused.error.reason != Reason::kDenied)
        return "ro: " + refused.error.message;
      if (!store->Load(small.id())) return "what is there cannot be read any more";
    }
    const auto again = ContextStore::Open({.directory = path});
    if (again || again.error().reason != Reason::kDenied) return "a read-only directory was opened";
    return "";
  });
  if (said == "skip") GTEST_SKIP() << "the system lets nobody mount here";
  EXPECT_EQ(said, "");
}

}  // namespace
}  // namespace qkv::test
