// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/segment/cipher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "qkv/segment/test_support.h"

namespace qkv {
namespace {

using test::Bytes;
using test::Take;

std::string Outcome(const auto& result) {
  if (result) return "ok";
  return fmt::format("{}/{}", CodeName(result.error().code), ReasonName(result.error().reason));
}

Bytes Contents(const Fd& fd) {
  return Take(ReadWhole(fd, 1 << 28));
}

Bytes Pattern(size_t n) {
  Bytes bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = test::PatternByte(3, i);
  return bytes;
}

constexpr uint64_t kPlenty = uint64_t{1} << 30;

TEST(Cipher, WhatWasEncryptedComesBackWithTheKeyOnly) {
  const auto key = Take(SecretKey::Generate()), other = Take(SecretKey::Generate());
  EXPECT_NE(key->bytes(), other->bytes());
  for (const size_t n : {size_t{1}, size_t{100}, size_t{65535}, size_t{65536}, size_t{65537}, size_t{300'000}}) {
    SCOPED_TRACE(n);
    const Bytes plain = Pattern(n);
    const Fd encrypted = Take(Encrypt(*key, "id/1", plain));
    EXPECT_TRUE(IsSealed(encrypted));
    const Bytes bytes = Contents(encrypted);
    EXPECT_EQ(bytes.size(), 48 + n + 17 * ((n + 65535) / 65536)) << "docs/FORMAT.md";
    if (n >= 100) {
      EXPECT_EQ(std::search(bytes.begin(), bytes.end(), plain.begin(), plain.begin() + 16), bytes.end());
    }
    const Fd decrypted = Take(Decrypt(*key, "id/1", encrypted, n));
    EXPECT_TRUE(IsSealed(decrypted));
    EXPECT_EQ(Contents(decrypted), plain);
    EXPECT_EQ(Outcome(Decrypt(*other, "id/1", encrypted, n)), "corrupt/checksum");
    EXPECT_EQ(Outcome(Decrypt(*key, "id/2", encrypted, n)), "corrupt/checksum") << "another place";
    EXPECT_EQ(Outcome(Decrypt(*key, "id/1", encrypted, n - 1)), "invalid_argument/");
    EXPECT_NE(Contents(Take(Encrypt(*key, "id/1", plain))), bytes) << "twice the same is never the same";
  }
  EXPECT_EQ(Outcome(Encrypt(*key, "x", {})), "invalid_argument/");
}

// The bytes, taken apart by libsodium itself: they are what docs/FORMAT.md says, not only what we read back.
TEST(Cipher, IsLibsodiumsSecretstreamInChunks) {
  const auto key = Take(SecretKey::Generate());
  const Bytes plain = Pattern(65536 + 10);
  const Bytes bytes = Contents(Take(Encrypt(*key, "label", plain)));
  const auto* in = reinterpret_cast<const unsigned char*>(bytes.data());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(in), 8), "QKVENC01");
  crypto_secretstream_xchacha20poly1305_state state;
  ASSERT_EQ(::crypto_secretstream_xchacha20poly1305_init_pull(&state, in + 24, key->data()), 0);
  const std::string ad = std::string(reinterpret_cast<const char*>(in), 48) + "label";
  std::vector<unsigned char> out(65536);
  unsigned char tag = 0;
  ASSERT_EQ(::crypto_secretstream_xchacha20poly1305_pull(&state, out.data(), nullptr, &tag, in + 48, 65536 + 17,
                                                         reinterpret_cast<const unsigned char*>(ad.data()), ad.size()),
            0);
  EXPECT_EQ(std::memcmp(out.data(), plain.data(), 65536), 0);
  ASSERT_EQ(::crypto_secretstream_xchacha20poly1305_pull(&state, out.data(), nullptr, &tag, in + 48 + 65536 + 17,
                                                         10 + 17, nullptr, 0),
            0);
  EXPECT_EQ(tag, crypto_secretstream_xchacha20poly1305_TAG_FINAL);
  EXPECT_EQ(std::memcmp(out.data(), plain.data() + 65536, 10), 0);
}

TEST(Cipher, EveryFlippedBitAndEveryLengthIsFound) {
  const auto key = Take(SecretKey::Generate());
  const Bytes good = Contents(Take(Encrypt(*key, "l", Pattern(40))));
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_FALSE(Decrypt(*key, "l", test::UnsealedMemfd(bad), kPlenty)) << bit;
  }
  for (size_t n = 1; n < good.size(); ++n) {
    ASSERT_FALSE(Decrypt(*key, "l", test::UnsealedMemfd({good.begin(), good.begin() + n}), kPlenty)) << n;
  }
  Bytes longer = good;
  longer.push_back({});
  EXPECT_FALSE(Decrypt(*key, "l", test::UnsealedMemfd(longer), kPlenty));
  EXPECT_TRUE(Decrypt(*key, "l", test::UnsealedMemfd(good), kPlenty));
}

TEST(Cipher, ChunksCannotChangePlacesOrBeLeftOut) {
  const auto key = Take(SecretKey::Generate());
  const Bytes good = Contents(Take(Encrypt(*key, "l", Pattern(3 * 65536))));
  constexpr size_t kChunk = 65536 + 17;
  ASSERT_EQ(good.size(), 48 + 3 * kChunk);
  Bytes swapped = good;
  std::swap_ranges(swapped.begin() + 48, swapped.begin() + 48 + kChunk, swapped.begin() + 48 + kChunk);
  EXPECT_EQ(Outcome(Decrypt(*key, "l", test::UnsealedMemfd(swapped), kPlenty)), "corrupt/checksum");
  Bytes shorter(good.begin(), good.end() - kChunk);
  const uint64_t plain = 2 * 65536;
  std::memcpy(shorter.data() + 16, &plain, sizeof(plain));
  EXPECT_EQ(Outcome(Decrypt(*key, "l", test::UnsealedMemfd(shorter), kPlenty)), "corrupt/checksum");
}

TEST(Cipher, RefusesWhatItDoesNotKnow) {
  const auto key = Take(SecretKey::Generate());
  Bytes bytes = Contents(Take(Encrypt(*key, "l", Pattern(40))));
  bytes[8] = std::byte{2};
  EXPECT_EQ(Outcome(Decrypt(*key, "l", test::UnsealedMemfd(bytes), kPlenty)), "incompatible/version");
  bytes[8] = std::byte{1};
  bytes[23] = std::byte{0x7f};  // a length that no file has
  EXPECT_EQ(Outcome(Decrypt(*key, "l", test::UnsealedMemfd(bytes), kPlenty)), "invalid_argument/");
  EXPECT_EQ(Outcome(Decrypt(*key, "l", test::UnsealedMemfd(bytes), ~uint64_t{0})), "corrupt/checksum");
}

TEST(SecretKey, IsWrappedForOneLabel) {
  const auto with = Take(SecretKey::Generate()), key = Take(SecretKey::Generate());
  const std::string wrapped = Take(WrapKey(*with, "id", *key));
  EXPECT_EQ(wrapped.find(key->bytes()), std::string::npos);
  EXPECT_EQ(Take(UnwrapKey(*with, "id", wrapped))->bytes(), key->bytes());
  EXPECT_EQ(Outcome(UnwrapKey(*with, "other", wrapped)), "corrupt/checksum");
  EXPECT_EQ(Outcome(UnwrapKey(*key, "id", wrapped)), "corrupt/checksum");
  EXPECT_EQ(Outcome(UnwrapKey(*with, "id", "")), "corrupt/checksum");
  for (size_t i = 0; i < wrapped.size(); ++i) {
    std::string bad = wrapped;
    bad[i] ^= 1;
    EXPECT_EQ(Outcome(UnwrapKey(*with, "id", bad)), "corrupt/checksum") << i;
  }
  EXPECT_EQ(Outcome(SecretKey::From("short")), "invalid_argument/");
}

TEST(SecretKey, TheFileIsMadeOnceAndForUsAlone) {
  std::string folder = (std::filesystem::temp_directory_path() / "qkvkeyXXXXXX").string();
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/seal.key";
  const auto key = Take(KeyFromFile(path));
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
  EXPECT_EQ(Take(KeyFromFile(path))->bytes(), key->bytes());
  ASSERT_EQ(::chmod(path.c_str(), 0640), 0);
  EXPECT_EQ(Outcome(KeyFromFile(path)), "denied/denied");
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  std::ofstream(path, std::ios::app) << "x";
  EXPECT_EQ(Outcome(KeyFromFile(path)), "invalid_argument/");
  EXPECT_EQ(Outcome(KeyFromFile(folder + "/none/key")), "not_found/");
  EXPECT_EQ(Outcome(KeyFromFile("")), "invalid_argument/");
  std::filesystem::remove_all(folder);
}

TEST(SecretKey, ErasingOverwrites) {
  std::string secret(100, 's');
  const char* const was = secret.data();
  Erase(secret);
  EXPECT_TRUE(secret.empty());
  EXPECT_EQ(was[1], '\0');  // capacity is still there
}

}  // namespace
}  // namespace qkv
