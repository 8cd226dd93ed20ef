// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/admit.h"

#include <sys/stat.h>

#include <algorithm>

#include "qkv/card/card.h"

namespace qkv {
namespace {

// Keeps sums of sizes far from overflow, also those of cards, which may be sparse files.
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 40;
constexpr uint64_t kMemoryPageBytes = 4096;

struct Taken {
  StoredFile file;
  uint64_t size = 0;
};

Result<Taken> Take(const Fd& received, const FindOnDisk& on_disk) {
  struct stat info {};
  if (::fstat(received.get(), &info) != 0) return ErrnoError("fstat");
  Taken taken;
  // Before anything else: this also keeps out pipes, devices and other files on disk, which have no seals.
  if (!IsSealed(received)) {
    std::optional<StoredFile> file = on_disk ? on_disk({info.st_dev, info.st_ino}) : std::nullopt;
    if (!file) {
      return Err(Code::kDenied, Reason::kDenied, "not a memory file sealed against writing, shrinking and growing");
    }
    taken.file = *std::move(file);
    taken.size = taken.file.bytes;
    return taken;
  }
  taken.size = static_cast<uint64_t>(info.st_size);
  if (taken.size == 0 || taken.size > kMaxFileBytes) {
    return Err(Code::kInvalidArgument, "{} bytes, expected 1 to {}", taken.size, kMaxFileBytes);
  }
  QKV_ASSIGN_OR_RETURN(Fd read_only, received.ReopenReadOnly());
  // Whole pages, whether they are there yet or come when a hole is read; or more, where the system uses larger ones.
  const uint64_t memory = std::max((taken.size + kMemoryPageBytes - 1) / kMemoryPageBytes * kMemoryPageBytes,
                                   static_cast<uint64_t>(info.st_blocks) * 512);
  taken.file = {{info.st_dev, info.st_ino}, memory, std::make_shared<const Fd>(std::move(read_only))};
  return taken;
}

}  // namespace

ContextInfo InfoOf(const CacheCard& card) {
  ContextInfo info;
  info.id = card.id();
  info.name = card.name();
  info.model = card.model().name();
  info.kv = card.format().kv();
  info.n_tokens = static_cast<uint64_t>(card.token_ids_size());
  for (const auto& segment : card.segments()) info.bytes += segment.bytes();
  info.created_unix_ms = card.created_unix_ms();
  info.expires_unix_ms = card.expires_unix_ms();
  info.encrypted = !card.format().cipher().empty();
  return info;
}

Result<AdmittedContext> AdmitContext(const std::vector<Fd>& fds, const FindOnDisk& on_disk) {
  AdmittedContext admitted;
  auto& [context, card_bytes, tenant] = admitted;
  std::vector<uint64_t> sizes;
  for (size_t i = 0; i < fds.size(); ++i) {
    auto taken = Take(fds[i], i == 0 ? FindOnDisk() : on_disk);
    if (!taken) return Prefixed(i == 0 ? "card" : fmt::format("segment {}", i - 1), std::move(taken).error());
    context.files.push_back(std::move(taken->file));
    sizes.push_back(taken->size);
  }
  if (context.files.empty()) return Err(Code::kInvalidArgument, "publish: no card");

  auto bytes = ReadWhole(*context.files[0].fd, kMaxCardBytes);
  if (!bytes) return Prefixed("card", std::move(bytes).error());
  card_bytes = *std::move(bytes);
  QKV_ASSIGN_OR_RETURN(const CacheCard card, ParseCard(card_bytes));
  if (static_cast<size_t>(card.segments_size()) != fds.size() - 1) {
    return Err(Code::kInvalidArgument, "publish: {} segments came, the card has {}", fds.size() - 1,
               card.segments_size());
  }
  for (int i = 0; i < card.segments_size(); ++i) {
    const uint64_t found = sizes[static_cast<size_t>(i) + 1];
    if (found != card.segments(i).bytes()) {
      return Err(Code::kInvalidArgument, "segment {}: {} bytes, the card says {}", i, found, card.segments(i).bytes());
    }
  }
  context.info = InfoOf(card);
  tenant = card.tenant();
  return admitted;
}

}  // namespace qkv
