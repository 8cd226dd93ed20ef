// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/admit.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include "qkv/broker/test_support.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace qkv {
namespace {

using test::Contents;
using test::OpenDescriptors;
using test::Outcome;
using test::SealedBytes;
using test::Take;
using test::TestContext;
using ::testing::HasSubstr;

// As they arrive at the broker: duplicates of the producer's.
std::vector<Fd> Arrived(const TestContext& context) {
  std::vector<Fd> fds;
  fds.push_back(Take(context.card_fd.Duplicate()));
  for (const Fd& segment : context.segments) fds.push_back(Take(segment.Duplicate()));
  return fds;
}

std::string Admitted(const TestContext& context) {
  return Outcome(AdmitContext(Arrived(context)));
}

TEST(Admit, TakesWhatTheCardSays) {
  const TestContext context("summary", {8192, 12288});
  const AdmittedContext admitted = Take(AdmitContext(Arrived(context)));
  const ContextInfo& info = admitted.context.info;
  EXPECT_EQ(info.id, context.id());
  EXPECT_EQ(info.name, "summary");
  EXPECT_EQ(info.model, "tiny");
  EXPECT_EQ(info.kv, "i8");
  EXPECT_EQ(info.n_tokens, 64);
  EXPECT_EQ(info.bytes, 8192 + 12288);
  EXPECT_EQ(info.created_unix_ms, 1'700'000'000'000);
  EXPECT_EQ(admitted.card_bytes, SerializeCard(context.card));
  ASSERT_EQ(admitted.context.files.size(), 3);
  EXPECT_EQ(admitted.context.files[0].bytes, context.card_memory());
  EXPECT_EQ(Contents(*admitted.context.files[2].fd), std::vector<std::byte>(12288, std::byte{2}));
}

TEST(Admit, KeepsReadOnlyDescriptorsWhateverCame) {
  const TestContext context("a");
  ASSERT_EQ(::fcntl(context.segments[0].get(), F_GETFL) & O_ACCMODE, O_RDWR);
  const AdmittedContext admitted = Take(AdmitContext(Arrived(context)));
  for (const StoredFile& file : admitted.context.files) {
    EXPECT_EQ(::fcntl(file.fd->get(), F_GETFL) & O_ACCMODE, O_RDONLY);
    EXPECT_EQ(::mmap(nullptr, 10, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd->get(), 0), MAP_FAILED);
  }
}

TEST(Admit, RefusesAMemoryFileThatCanStillBeChanged) {
  for (const int seals : {0, F_SEAL_WRITE, F_SEAL_WRITE | F_SEAL_SHRINK, F_SEAL_SHRINK | F_SEAL_GROW,
                          F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL}) {
    for (const bool damage_card : {false, true}) {
      TestContext context("a");
      Fd& damaged = damage_card ? context.card_fd : context.segments[0];
      const auto bytes = Contents(damaged);
      Fd unsealed = Take(CreateMemfd("unsealed"));
      ASSERT_EQ(::write(unsealed.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
      ASSERT_EQ(::fcntl(unsealed.get(), F_ADD_SEALS, seals), 0);
      damaged = std::move(unsealed);
      EXPECT_EQ(Admitted(context), "denied/denied") << "seals " << seals;
    }
  }
}

TEST(Admit, RefusesAMemoryFileThatIsMappedWritable) {
  TestContext context("a");
  Fd fd = Take(CreateMemfd("mapped"));
  ASSERT_EQ(::ftruncate(fd.get(), 8192), 0);
  const Mapping mapping = Take(Mapping::Map(fd, Mapping::Access::kReadWrite, 0, 8192));
  EXPECT_FALSE(Seal(fd));
  context.segments[0] = std::move(fd);
  EXPECT_EQ(Admitted(context), "denied/denied");
}

TEST(Admit, RefusesWhatIsNoMemoryFileAndDoesNotBlockOnIt) {
  int pipe_fds[2];
  ASSERT_EQ(::pipe2(pipe_fds, O_CLOEXEC), 0);
  const Fd pipe_in(pipe_fds[1]);
  std::vector<Fd> strangers;
  strangers.emplace_back(pipe_fds[0]);
  strangers.emplace_back(::eventfd(0, EFD_CLOEXEC));
  strangers.emplace_back(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
  strangers.emplace_back(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  for (Fd& stranger : strangers) {
    TestContext context("a");
    context.segments[0] = Take(stranger.Duplicate());
    EXPECT_EQ(Admitted(context), "denied/denied");
    context.card_fd = std::move(stranger);
    EXPECT_EQ(Admitted(context), "denied/denied");
  }
}

TEST(Admit, RefusesAnotherNumberOfSegmentsThanTheCardHas) {
  TestContext more("a", {8192, 8192});
  more.segments.push_back(SealedBytes(8192, 9));
  EXPECT_EQ(Admitted(more), "invalid_argument");
  TestContext fewer("a", {8192, 8192});
  fewer.segments.pop_back();
  EXPECT_EQ(Admitted(fewer), "invalid_argument");
  EXPECT_EQ(Outcome(AdmitContext({})), "invalid_argument");
}

TEST(Admit, RefusesASegmentOfAnotherSizeThanTheCardSays) {
  TestContext context("a", {8192, 8192});
  context.segments[1] = SealedBytes(8193, 1);
  const auto admitted = AdmitContext(Arrived(context));
  ASSERT_EQ(Outcome(admitted), "invalid_argument");
  EXPECT_THAT(admitted.error().message, HasSubstr("segment 1: 8193 bytes, the card says 8192"));
}

TEST(Admit, RefusesDamagedAndEmptyAndHugeCards) {
  TestContext context("a");
  auto bytes = SerializeCard(context.card);
  bytes[bytes.size() / 2] ^= std::byte{1};
  context.card_fd = Take(SealedMemfd("damaged", bytes));
  EXPECT_EQ(Admitted(context), "corrupt/checksum");
  context.card_fd = Take(SealedMemfd("empty", {}));
  EXPECT_EQ(Admitted(context), "invalid_argument");
  Fd huge = Take(CreateMemfd("huge"));  // sparse: takes no memory here, and must take none in the broker
  ASSERT_EQ(::ftruncate(huge.get(), off_t{1} << 39), 0);
  ASSERT_TRUE(Seal(huge));
  context.card_fd = std::move(huge);
  EXPECT_EQ(Admitted(context), "invalid_argument");
}

TEST(Admit, RefusesIdsAndNamesThatWouldNotBeSafeInPathsAndLogs) {
  for (const char* bad : {"../up", ".hidden", "a b", "a\nb"}) {
    TestContext named("a");
    named.card.set_name(bad);
    named.SealCard();
    EXPECT_NE(Admitted(named), "ok") << bad;
    TestContext identified("a");
    identified.card.set_id(bad);
    identified.SealCard();
    EXPECT_NE(Admitted(identified), "ok") << bad;
  }
}

TEST(Admit, RefusesSizesWhoseSumCouldOverflow) {
  TestContext context("a");
  Fd huge = Take(CreateMemfd("huge"));
  ASSERT_EQ(::ftruncate(huge.get(), INT64_MAX), 0);
  ASSERT_TRUE(Seal(huge));
  context.segments[0] = std::move(huge);
  EXPECT_EQ(Admitted(context), "invalid_argument");
}

TEST(Admit, ARefusalLeaksNoDescriptor) {
  TestContext context("a", {8192, 8192});
  context.segments.pop_back();
  const size_t before = OpenDescriptors();
  EXPECT_EQ(Admitted(context), "invalid_argument");
  EXPECT_EQ(OpenDescriptors(), before);
}

}  // namespace
}  // namespace qkv
