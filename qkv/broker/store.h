// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The disk tier (docs/FORMAT.md §7): published contexts as files of one directory, so that they outlive their memory and
// the broker. A context is there as a whole or not at all, whenever the process or the machine dies: files are written
// under temporary names, flushed, renamed; the file that makes a context one comes last. What an earlier life left half
// done is removed when the directory is opened.
//
// One process at a time owns a directory (flock). Writing is done by a thread of this object: Put returns at once, and
// so does every other call (the slowest reads one card). All calls from one thread, the broker's.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "qkv/broker/registry.h"

namespace qkv {

struct StoreOptions {
  std::string directory;  // made (mode 0700, one level) if it is missing
  uint64_t budget_bytes = uint64_t{16} << 30;
  // Called on the store's thread when there are new outcomes to take. Must not throw or call back.
  std::function<void()> on_outcome;
};

class ContextStore {
 public:
  // What became of a context, long after the call.
  struct Outcome {
    enum class Kind {
      kStored,   // it would survive now
      kFailed,   // `error`; nothing of it is in the directory
      kEvicted,  // made room for others
      kExpired,
      kDamaged,  // `error`: what the directory holds is not what was written; it has been removed
    };
    Kind kind;
    std::string id;
    std::string name;
    uint64_t bytes = 0;
    Error error;
  };

  // Errors: kInvalidArgument (in use by another broker, not a directory, path empty or with a NUL), kDenied (not ours
  // alone to write, or read-only), kNotFound, kExhausted, kIo.
  static Result<std::unique_ptr<ContextStore>> Open(StoreOptions options);

  // Finishes what is queued, for ten seconds at most; what is then being written is given up and leaves no file.
  ~ContextStore();
  ContextStore(const ContextStore&) = delete;
  ContextStore& operator=(const ContextStore&) = delete;

  // Queues the context to be written, or its name, expiry and pin to be renewed; a name goes to it at once. Contexts
  // that are not pinned make room, least recently used first; if that is not enough the outcome is kFailed with
  // kExhausted/pool_full.
  void Put(const NewContext& context, int64_t now_unix_ms, std::string wrapped_key = {});

  // "" when there is none. An id is looked up before a name. Expired ones are none.
  std::string Find(std::string_view id_or_name, int64_t now_unix_ms) const;
  struct Loaded {
    NewContext context;  // the card as a sealed memory file, the segments as read-only files of the directory
    std::string wrapped_key;
  };
  // Errors: kNotFound/not_found; kCorrupt/checksum when files are missing, truncated or not ours (they are removed);
  // kExhausted. Page contents are not looked at.
  Result<Loaded> Load(const std::string& id);
  void Touch(std::string_view id);  // it has just been used
  // When this returns, no later process finds it.
  void Remove(std::string_view id);

  // A segment of this directory, by what the kernel says of a descriptor; nothing if it is none.
  std::optional<StoredFile> FileOf(const FileKey& key) const;

  void Expire(int64_t now_unix_ms);
  int64_t NextExpiryUnixMs() const;  // 0: never
  bool Has(std::string_view id) const;
  // Contexts whose id is behind `after_id`, in order.
  std::vector<ContextInfo> InfosAfter(std::string_view after_id, size_t at_most) const;

  uint64_t used_bytes() const;
  uint64_t budget_bytes() const { return options_.budget_bytes; }
  std::vector<Outcome> TakeOutcomes();

 private:
  struct Entry {
    ContextInfo info;
    int64_t published_unix_ms = 0;
    std::vector<std::string> segments;
    std::string wrapped_key;
    uint64_t file_bytes = 0;  // of its own file
    uint64_t last_use = 0;
  };
  struct SegmentFile {
    FileKey key;
    uint64_t bytes = 0;
    size_t n_uses = 0;  // contexts, and jobs being done
  };
  struct Job {
    NewContext context;
    int64_t published_unix_ms = 0;
    std::string wrapped_key;
  };
  struct Written;
  using Entries = std::map<std::string, Entry, std::less<>>;

  ContextStore(StoreOptions options, Fd directory, Fd lock);

  Status Scan();
  Result<Entry> ReadEntry(const std::string& id, std::vector<std::byte>* card) const;
  Result<Fd> OpenSegment(const std::string& name, uint64_t bytes) const;

  void WorkerMain();
  Status Write(const Job& job, Written& written);
  Status WriteFile(const std::string& part, const std::function<Status(const Fd&)>& fill, uint64_t bytes) const;
  Status Rename(const std::string& part, const std::string& name) const;
  Status Commit(const Job& job, Written& written);

  // With mutex_ held.
  Status MakeRoom(uint64_t bytes, std::string_view but_not);
  void Drop(Entries::iterator entry);
  void LetGo(const std::string& segment);
  void TakeName(Entry& entry, const std::string& name);
  void Report(Outcome outcome);

  const StoreOptions options_;
  const Fd directory_;
  const Fd lock_;  // its flock makes the directory ours

  mutable std::mutex mutex_;  // never held while a file is read, written or flushed
  std::condition_variable changed_;
  Entries entries_;
  std::map<std::string, std::string, std::less<>> names_;  // to ids
  std::map<std::string, SegmentFile> segments_;
  std::map<FileKey, std::string> on_disk_;  // to segments
  // Memory files that have been written already, as long as somebody holds them: then their inodes stay theirs.
  std::map<FileKey, std::pair<std::weak_ptr<const Fd>, std::string>> copied_;
  std::deque<Job> jobs_;
  std::string current_;               // id being written; "" once it was removed meanwhile
  std::vector<std::string> garbage_;  // segments to unlink
  std::vector<Outcome> outcomes_;
  uint64_t used_bytes_ = 0;
  uint64_t uses_ = 0;
  bool stop_ = false;
  bool give_up_ = false;
  std::thread worker_;  // last: it uses all of the above
};

}  // namespace qkv
