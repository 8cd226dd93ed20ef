// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/digest_cache.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

namespace qkv {
namespace {

constexpr FileDigest kDigest = {0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77,
                                0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff};
constexpr FileVersion kVersion = {
    .device = 3, .inode = 9, .bytes = 1000, .modified_ns = 5'000'000'001, .changed_ns = 6};

class DigestCache : public ::testing::Test {
 protected:
  DigestCache() {
    std::string path = (std::filesystem::temp_directory_path() / "qkv-digests-XXXXXX").string();
    EXPECT_NE(::mkdtemp(path.data()), nullptr);
    root_ = path;
    directory_ = path + "/cache/digests";
  }
  ~DigestCache() override { std::filesystem::remove_all(root_); }
  std::string Entry() const {
    std::string found;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      EXPECT_EQ(found, "") << "more than one file";
      found = entry.path();
    }
    return found;
  }
  std::string root_, directory_;
};

TEST_F(DigestCache, FindsWhatItRemembered) {
  EXPECT_FALSE(FindDigest(directory_, kVersion));
  RememberDigest(directory_, kVersion, kDigest);
  EXPECT_EQ(FindDigest(directory_, kVersion), kDigest);
  struct stat info {};
  ASSERT_EQ(::stat(directory_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

TEST_F(DigestCache, AnyChangeOfTheFileIsAnotherFile) {
  RememberDigest(directory_, kVersion, kDigest);
  for (int i = 0; i < 5; ++i) {
    FileVersion other = kVersion;
    if (i == 0) ++other.device;
    if (i == 1) ++other.inode;
    if (i == 2) ++other.bytes;
    if (i == 3) ++other.modified_ns;
    if (i == 4) ++other.changed_ns;
    EXPECT_FALSE(FindDigest(directory_, other)) << i;
  }
}

TEST_F(DigestCache, ANewVersionReplacesTheOldOne) {
  RememberDigest(directory_, kVersion, kDigest);
  FileVersion newer = kVersion;
  newer.modified_ns += 1;
  FileDigest other = kDigest;
  other[0] = 0x77;
  RememberDigest(directory_, newer, other);
  EXPECT_FALSE(FindDigest(directory_, kVersion));
  EXPECT_EQ(FindDigest(directory_, newer), other);
  EXPECT_NE(Entry(), "");  // the only file
}

TEST_F(DigestCache, EveryBitFlipAndTruncationOfAnEntryIsNotBelieved) {
  RememberDigest(directory_, kVersion, kDigest);
  const std::string path = Entry();
  std::ifstream in(path, std::ios::binary);
  const std::string valid{std::istreambuf_iterator<char>(in), {}};
  const auto with = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    return FindDigest(directory_, kVersion);
  };
  for (size_t bit = 0; bit < valid.size() * 8; ++bit) {
    std::string bytes = valid;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    ASSERT_FALSE(with(bytes)) << bit;
  }
  for (size_t length = 0; length < valid.size(); ++length) ASSERT_FALSE(with(valid.substr(0, length))) << length;
  EXPECT_FALSE(with(valid + "x"));
  EXPECT_FALSE(with(std::string(100'000, 'x')));
  EXPECT_EQ(with(valid), kDigest);
}

TEST_F(DigestCache, WhatOthersMayWriteIsNotBelieved) {
  RememberDigest(directory_, kVersion, kDigest);
  ASSERT_EQ(::chmod(Entry().c_str(), 0620), 0);
  EXPECT_FALSE(FindDigest(directory_, kVersion));
  ASSERT_EQ(::chmod(Entry().c_str(), 0600), 0);
  ASSERT_EQ(::chmod(directory_.c_str(), 0777), 0);
  EXPECT_FALSE(FindDigest(directory_, kVersion));
  ASSERT_EQ(::chmod(directory_.c_str(), 0700), 0);
  EXPECT_EQ(FindDigest(directory_, kVersion), kDigest);
  if (::geteuid() != 0) return;  // only root can give files away
  ASSERT_EQ(::chown(Entry().c_str(), 1, 1), 0);
  EXPECT_FALSE(FindDigest(directory_, kVersion));
  RememberDigest(directory_, kVersion, kDigest);  // replaces it
  EXPECT_EQ(FindDigest(directory_, kVersion), kDigest);
  ASSERT_EQ(::chown(directory_.c_str(), 1, 1), 0);
  EXPECT_FALSE(FindDigest(directory_, kVersion));
}

TEST_F(DigestCache, FollowsNoLinkAndWaitsForNoPipe) {
  RememberDigest(directory_, kVersion, kDigest);
  const std::string path = Entry();
  std::filesystem::rename(path, root_ + "/elsewhere");
  std::filesystem::create_symlink(root_ + "/elsewhere", path);
  EXPECT_FALSE(FindDigest(directory_, kVersion));
  std::filesystem::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_FALSE(FindDigest(directory_, kVersion));
}

TEST_F(DigestCache, IsSilentWhereItCannotWrite) {
  RememberDigest("", kVersion, kDigest);
  std::ofstream(root_ + "/file") << "x";
  RememberDigest(root_ + "/file/digests", kVersion, kDigest);
  EXPECT_FALSE(FindDigest(root_ + "/file/digests", kVersion));
}

TEST_F(DigestCache, DoesNotRememberAFileThatHasJustChanged) {
  const std::string path = root_ + "/fresh";
  std::ofstream(path) << "weights";
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const auto version = VersionOf(fd);
  ASSERT_TRUE(version);
  EXPECT_EQ(version->bytes, 7u);
  RememberDigest(directory_, *version, kDigest);
  EXPECT_FALSE(FindDigest(directory_, *version));
}

TEST_F(DigestCache, SettingTheTimeOfModificationBackDoesNotHideAChange) {
  const std::string path = root_ + "/model";
  std::ofstream(path) << "weights";
  const Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  const auto before = VersionOf(fd);
  ASSERT_TRUE(before);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // longer than a tick
  ASSERT_EQ(::pwrite(fd.get(), "W", 1, 0), 1);
  const timespec times[] = {{0, UTIME_OMIT},
                            {before->modified_ns / 1'000'000'000, before->modified_ns % 1'000'000'000}};
  ASSERT_EQ(::futimens(fd.get(), times), 0);
  const auto after = VersionOf(fd);
  ASSERT_TRUE(after);
  EXPECT_EQ(after->modified_ns, before->modified_ns);
  EXPECT_NE(*after, *before);
}

TEST_F(DigestCache, ManyWritersLeaveOneWholeEntry) {
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&] {
      for (int n = 0; n < 50; ++n) RememberDigest(directory_, kVersion, kDigest);
    });
  }
  for (std::thread& writer : writers) writer.join();
  RememberDigest(directory_, kVersion, kDigest);
  EXPECT_EQ(FindDigest(directory_, kVersion), kDigest);
  EXPECT_NE(Entry(), "");
}

}  // namespace
}  // namespace qkv
