// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a broker knows: contexts by id and name, who leases them, and how much memory they hold. Pure state: no clock,
// no sockets, no system calls (dropping the last handle of a file closes it); time is passed in, what happened comes
// out as Events. Callers have validated every string and number. Not synchronised: one thread at a time.

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "qkv/broker/client.h"

namespace qkv {

// A sealed memory file is counted and kept once, however many contexts it is part of. The inode cannot be reused while
// somebody, such as we, holds the file.
struct FileKey {
  uint64_t device = 0;
  uint64_t inode = 0;
  auto operator<=>(const FileKey&) const = default;
};

struct StoredFile {
  FileKey key;
  uint64_t bytes = 0;
  std::shared_ptr<const Fd> fd;  // carried, never looked at
};

struct RegistryLimits {
  uint64_t budget_bytes = 0;
  size_t max_files = SIZE_MAX;  // each takes a descriptor of this process
  size_t max_leases_per_client = 4096;
};

using ClientId = uint64_t;

struct NewContext {
  ContextInfo info;               // n_leases is ignored
  std::vector<StoredFile> files;  // the card, then the segments in the card's order; the same file may occur twice
};

struct Event {
  enum class Kind { kCreated, kPublished, kAttached, kReleased, kRemoved, kExpired, kEvicted };
  Kind kind;
  std::string id;
  std::string name;
  uint64_t bytes = 0;
};

class Registry {
 public:
  explicit Registry(RegistryLimits limits) : limits_(limits) {}

  // Adds a context, evicting unpinned and unleased ones, least recently used first, when it would not fit; nothing is
  // evicted in vain. A name held by another context moves to this one; the other stays, without a name. An id that is
  // known already keeps its files and takes over name, expiry and pin: the caller has made sure that the card is the
  // same. Errors: kExhausted/pool_full, kIncompatible/expired.
  Status Publish(NewContext context, int64_t now_unix_ms);

  struct Grant {
    std::string id;
    uint64_t lease = 0;
  };
  // An id is looked up before a name. Errors: kNotFound/not_found, kIncompatible/expired (for the most recent few
  // hundred that expired), kExhausted/pool_full when the client has too many leases.
  Result<Grant> Attach(ClientId client, std::string_view id_or_name, int64_t now_unix_ms);

  // The card, then the segments. Valid until the next call that is not const. kNotFound when the lease is not this
  // client's or its context is gone.
  Result<std::span<const StoredFile>> FilesOf(ClientId client, uint64_t lease) const;

  Status Release(ClientId client, uint64_t lease);
  void ReleaseAllOf(ClientId client);

  // Leases do not stand in its way; they remain until released, but lead nowhere.
  Status Remove(std::string_view id_or_name);

  void Expire(int64_t now_unix_ms);
  int64_t NextExpiryUnixMs() const;  // 0: never

  // Of a known context; nullptr when there is none.
  const StoredFile* CardOf(std::string_view id) const;
  // In order of id, from behind `after_id` on, while `take` returns true.
  template <class Take>
  void ForEachAfter(std::string_view after_id, Take take) const {
    for (auto it = contexts_.upper_bound(after_id); it != contexts_.end() && take(it->second.info); ++it) continue;
  }

  // Every lease whose context is still there: visit(client, context id).
  template <class Visit>
  void ForEachLease(Visit visit) const {
    for (const auto& [client, leases] : leases_) {
      for (const auto& [lease, id] : leases) {
        if (!id.empty()) visit(client, id);
      }
    }
  }

  size_t n_contexts() const { return contexts_.size(); }
  uint64_t used_bytes() const { return used_bytes_; }
  size_t n_files() const { return files_.size(); }
  const RegistryLimits& limits() const { return limits_; }

  // What happened since the last call, oldest first.
  std::vector<Event> TakeEvents() { return std::exchange(events_, {}); }

 private:
  struct Context {
    ContextInfo info;
    std::vector<StoredFile> files;
    uint64_t last_use = 0;  // order, not time
  };
  struct CountedFile {
    uint64_t bytes = 0;
    size_t n_uses = 0;  // places in contexts
    std::shared_ptr<const Fd> fd;
  };
  using Contexts = std::map<std::string, Context, std::less<>>;

  Contexts::iterator Find(std::string_view id_or_name);
  Status MakeRoomFor(const NewContext& context);
  void TakeName(Context& context, std::string name);
  void Drop(Contexts::iterator context, Event::Kind why);
  void EndLease(std::string_view context_id);
  void Note(Event::Kind kind, const ContextInfo& info) { events_.push_back({kind, info.id, info.name, info.bytes}); }

  RegistryLimits limits_;
  Contexts contexts_;
  std::map<std::string, std::string, std::less<>> names_;  // to ids
  std::map<FileKey, CountedFile> files_;
  std::map<ClientId, std::map<uint64_t, std::string>> leases_;  // to ids; "": the context is gone
  std::vector<std::pair<std::string, std::string>> expired_;    // ids and names, oldest first
  std::vector<Event> events_;
  uint64_t used_bytes_ = 0;
  uint64_t uses_ = 0;
  uint64_t last_lease_ = 0;
};

}  // namespace qkv
