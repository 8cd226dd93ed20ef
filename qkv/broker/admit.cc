// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/admit.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "qkv/card/card.h"

namespace qkv {
namespace {

// Keeps sums of sizes far from overflow, also those of cards, which may be sparse files.
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 40;

Result<StoredFile> Store(const Fd& received) {
  // Before anything else: this also keeps out pipes, devices and files on disk, which have no seals.
  if (!IsSealed(received)) {
    return Err(Code::kDenied, Reason::kDenied, "not a memory file sealed against writing, shrinking and growing");
  }
  QKV_ASSIGN_OR_RETURN(Fd read_only, received.ReopenReadOnly());
  struct stat info {};
  if (::fstat(read_only.get(), &info) != 0) return ErrnoError("fstat");
  const auto bytes = static_cast<uint64_t>(info.st_size);
  if (bytes == 0 || bytes > kMaxFileBytes) {
    return Err(Code::kInvalidArgument, "{} bytes, expected 1 to {}", bytes, kMaxFileBytes);
  }
  return StoredFile{{info.st_dev, info.st_ino}, bytes, std::make_shared<const Fd>(std::move(read_only))};
}

}  // namespace

Result<std::vector<std::byte>> ReadFile(const Fd& fd, size_t max_bytes) {
  QKV_ASSIGN_OR_RETURN(const uint64_t size, fd.SizeBytes());
  if (size > max_bytes) return Err(Code::kInvalidArgument, "{} bytes, expected at most {}", size, max_bytes);
  std::vector<std::byte> bytes(size);
  size_t done = 0;
  while (done < bytes.size()) {
    // pread, not a mapping: a page that cannot be had is an error here and a SIGBUS there.
    const ssize_t n = ::pread(fd.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError("read");
    if (n == 0) return Err(Code::kCorrupt, Reason::kChecksum, "ends after {} of {} bytes", done, size);
    done += static_cast<size_t>(n);
  }
  return bytes;
}

Result<AdmittedContext> AdmitContext(const std::vector<Fd>& fds) {
  AdmittedContext admitted;
  auto& [context, card_bytes] = admitted;
  for (size_t i = 0; i < fds.size(); ++i) {
    auto file = Store(fds[i]);
    if (!file) return Prefixed(i == 0 ? "card" : fmt::format("segment {}", i - 1), std::move(file).error());
    context.files.push_back(*std::move(file));
  }
  if (context.files.empty()) return Err(Code::kInvalidArgument, "publish: no card");

  auto bytes = ReadFile(*context.files[0].fd, kMaxCardBytes);
  if (!bytes) return Prefixed("card", std::move(bytes).error());
  card_bytes = *std::move(bytes);
  QKV_ASSIGN_OR_RETURN(const CacheCard card, ParseCard(card_bytes));
  if (static_cast<size_t>(card.segments_size()) != fds.size() - 1) {
    return Err(Code::kInvalidArgument, "publish: {} segments came, the card has {}", fds.size() - 1,
               card.segments_size());
  }
  for (int i = 0; i < card.segments_size(); ++i) {
    const uint64_t found = context.files[static_cast<size_t>(i) + 1].bytes;
    if (found != card.segments(i).bytes()) {
      return Err(Code::kInvalidArgument, "segment {}: {} bytes, the card says {}", i, found, card.segments(i).bytes());
    }
    context.info.bytes += found;
  }
  context.info.id = card.id();
  context.info.name = card.name();
  context.info.model = card.model().name();
  context.info.kv = card.format().kv();
  context.info.n_tokens = static_cast<uint64_t>(card.token_ids_size());
  context.info.created_unix_ms = card.created_unix_ms();
  context.info.expires_unix_ms = card.expires_unix_ms();
  return admitted;
}

}  // namespace qkv
