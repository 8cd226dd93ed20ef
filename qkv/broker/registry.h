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
  uint64_t bytes = 0;            // of memory that it takes, of disk if it is there
  std::shared_ptr<const Fd> fd;  // carried, never looked at
  bool on_disk = false;          // takes a descriptor, and no memory that the budget is for
};

struct RegistryLimits {
  uint64_t budget_bytes = 0;
  size_t max_files = SIZE_MAX;  // each takes a descriptor of this process
  size_t max_leases_per_client = 4096;
  uint64_t first_lease = 1;  // random, so that a number from another broker's life leads nowhere here
};

using ClientId = uint64_t;

struct NewContext {
  ContextInfo info;               // n_leases is ignored
  std::vector<StoredFile> files;  // the card, then the segments in the card's order; the same file may occur twice
  bool restored = false;          // comes from the disk tier, not from a client
  std::shared_ptr<const SecretKey> key = {};  // of an encrypted one; carried, gone with it
};

struct Event {
  enum class Kind {
    kCreated,
    kPublished,
    kRestored,
    kAttached,
    kReleased,
    kRemoved,
    kExpired,
    kEvicted,
    kAlarm,       // `percent` of the budget has been reached
    kAlarmEnded,  // it is well below again
  };
  Kind kind;
  std::string id;
  std::string name;
  uint64_t bytes = 0;            // of the context's segments; of the whole pool for alarms
  std::string_view reason = {};  // of kReleased: "request" or "hang_up"; of kEvicted: "budget", "descriptors" or "disk"
  int percent = 0;
};

// Parts of the budget, in percent, that are worth an alarm; it ends kAlarmSlack below.
inline constexpr int kAlarmPercents[] = {80, 95};
inline constexpr int kAlarmSlackPercent = 5;

class Registry {
 public:
  explicit Registry(RegistryLimits limits) : limits_(limits), last_lease_(limits.first_lease - 1) {}

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

  // Not evicted as long as it is held, as by the store while it writes. Of a context that is gone: nothing happens.
  void Hold(std::string_view id, bool held);
  // The disk tier has let it go: a context of which any file is there goes too.
  void ForgetFromDisk(std::string_view id);

  void Expire(int64_t now_unix_ms);
  int64_t NextExpiryUnixMs() const;  // 0: never

  // Of a known context, the card first; nothing when there is none.
  std::span<const StoredFile> FilesOf(std::string_view id) const;
  const ContextInfo* InfoOf(std::string_view id) const;               // nullptr when there is none
  std::shared_ptr<const SecretKey> KeyOf(std::string_view id) const;  // of an encrypted one
  std::string IdOf(std::string_view id_or_name) const;                // "" when there is none
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
    std::shared_ptr<const SecretKey> key;
    uint64_t last_use = 0;  // order, not time
    bool held = false;
  };
  struct CountedFile {
    uint64_t bytes = 0;
    size_t n_uses = 0;  // places in contexts
    std::shared_ptr<const Fd> fd;
    bool on_disk = false;
  };
  using Contexts = std::map<std::string, Context, std::less<>>;

  Contexts::iterator Find(std::string_view id_or_name);
  Status MakeRoomFor(const NewContext& context);
  void TakeName(Context& context, std::string name);
  void Drop(Contexts::iterator context, Event::Kind why, std::string_view reason = {});
  void EndLease(std::string_view context_id, std::string_view reason);
  void NoteUsage();
  void Note(Event::Kind kind, const ContextInfo& info, std::string_view reason = {}) {
    events_.push_back({kind, info.id, info.name, info.bytes, reason});
  }

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
  int alarm_percent_ = 0;  // the highest alarm that is on; 0: none
};

}  // namespace qkv
