// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For the tests of this room: small contexts to publish, child processes.

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "qkv/base/fd.h"
#include "qkv/base/test_support.h"
#include "qkv/broker/client.h"
#include "qkv/broker/socket.h"
#include "qkv/card/card.h"
#include "qkv/segment/layout.h"

namespace qkv::test {

inline Deadline Soon() {
  return std::chrono::steady_clock::now() + kLong;
}

// "ok", or code and reason, such as "exhausted/pool_full".
template <class T>
std::string Outcome(const Result<T>& result) {
  if (result) return "ok";
  const auto& [code, message, reason] = result.error();
  if (reason == Reason::kNone) return std::string(CodeName(code));
  return fmt::format("{}/{}", CodeName(code), ReasonName(reason));
}

// Names of the files in a folder, sorted.
inline std::vector<std::string> FilesIn(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator(path)) names.push_back(file.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

inline size_t OpenDescriptors() {
  size_t n = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++n;
  ::closedir(folder);
  return n - 3;  // ".", ".." and the folder itself
}

// A child process in which `start` has returned true, and which then stays; the caller ends it.
inline pid_t ForkAndWait(const std::function<bool()>& start) {
  int ready[2];
  if (::pipe2(ready, O_CLOEXEC) != 0) std::abort();
  const pid_t child = ::fork();
  if (child == 0) {
    const bool ok = start() && ::write(ready[1], "x", 1) == 1;
    while (ok) ::pause();
    ::_exit(1);
  }
  const Fd read_end(ready[0]);
  Fd(ready[1]).Reset();
  char byte = 0;
  EXPECT_EQ(::read(read_end.get(), &byte, 1), 1);
  return child;
}

inline std::vector<std::byte> Contents(const Fd& fd) {
  std::vector<std::byte> bytes(Take(fd.SizeBytes()));
  EXPECT_EQ(::pread(fd.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  return bytes;
}

inline Fd SealedBytes(size_t bytes, uint8_t value) {
  return Take(SealedMemfd("qkv-test", std::vector<std::byte>(bytes, std::byte{value})));
}

// A card that is consistent with itself, of one full page per segment. A segment takes at least 4216 bytes.
inline CacheCard CardFor(const std::string& name, const std::vector<size_t>& segment_bytes) {
  CacheCard card;
  card.set_id(NewContextId());
  card.set_name(name);
  card.set_created_unix_ms(1'700'000'000'000);
  card.mutable_producer()->set_program("broker_test");
  auto* model = card.mutable_model();
  model->set_architecture("llama");
  model->set_name("tiny");
  model->set_n_vocab(1000);
  model->set_n_embd(64);
  auto* layer = model->add_layers();
  layer->set_n_heads(2);
  layer->set_n_kv_heads(1);
  layer->set_k_head_dim(32);
  layer->set_v_head_dim(32);
  model->mutable_rope()->set_base(10000);
  model->mutable_rope()->set_scaling("none");
  model->mutable_rope()->set_scaling_factor(1);
  model->mutable_rope()->set_rotary_dims(32);
  const std::string digest(32, 'a');
  model->set_weights_digest(digest);
  model->set_tokenizer_digest(digest);
  model->set_chat_template_digest(digest);
  auto* format = card.mutable_format();
  format->set_segment_version(kSegmentVersion);
  format->set_page_tokens(32);
  format->set_rotation("none");
  format->set_byte_order("little");
  format->set_kv("i8");
  for (size_t i = 0; i < segment_bytes.size(); ++i) {
    auto* segment = card.add_segments();
    segment->set_digest(digest);
    segment->set_bytes(segment_bytes[i]);
    segment->set_n_pages(1);
    auto* span = card.add_spans();
    span->set_segment(static_cast<uint32_t>(i));
    span->set_n_pages(1);
    span->set_n_tokens(32);
    span->set_first_position(static_cast<uint32_t>(32 * i));
    for (uint32_t t = 0; t < 32; ++t) card.add_token_ids(t);
  }
  return card;
}

// A context as a producer would publish it. Segment i is filled with the byte i + 1.
struct TestContext {
  CacheCard card;
  Fd card_fd;
  std::vector<Fd> segments;

  explicit TestContext(const std::string& name, const std::vector<size_t>& segment_bytes = {8192})
      : card(CardFor(name, segment_bytes)) {
    for (size_t i = 0; i < segment_bytes.size(); ++i) {
      segments.push_back(SealedBytes(segment_bytes[i], static_cast<uint8_t>(i + 1)));
    }
    SealCard();
  }

  void SealCard() { card_fd = Take(SealedMemfd("qkv-card", SerializeCard(card))); }
  const std::string& id() const { return card.id(); }
  uint64_t card_memory() const { return (Take(card_fd.SizeBytes()) + 4095) / 4096 * 4096; }

  std::vector<const Fd*> SegmentPointers() const {
    std::vector<const Fd*> pointers;
    for (const Fd& segment : segments) pointers.push_back(&segment);
    return pointers;
  }
  Status PublishTo(BrokerClient& client, const PublishOptions& options = {}) const {
    return client.Publish(card_fd, SegmentPointers(), options);
  }
};

}  // namespace qkv::test
