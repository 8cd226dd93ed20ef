// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/registry.h"

#include <algorithm>
#include <utility>

namespace qkv {
namespace {

constexpr size_t kRememberedExpired = 256;

uint64_t MemoryOf(const StoredFile& file) {
  return file.on_disk ? 0 : file.bytes;
}

// Distinct files and the memory they take.
struct Footprint {
  std::map<FileKey, uint64_t> files;
  uint64_t bytes = 0;

  void Add(std::span<const StoredFile> more) {
    for (const StoredFile& file : more) {
      if (files.emplace(file.key, MemoryOf(file)).second) bytes += MemoryOf(file);
    }
  }
};

tl::unexpected<Error> NoSuchContext(std::string_view id_or_name) {
  return Err(Code::kNotFound, Reason::kNotFound, "no context '{}'", id_or_name);
}

tl::unexpected<Error> NoSuchLease(uint64_t lease) {
  return Err(Code::kNotFound, Reason::kNotFound, "no lease {} of this client", lease);
}

}  // namespace

Status Registry::Publish(NewContext incoming, int64_t now_unix_ms) {
  Expire(now_unix_ms);
  ContextInfo& info = incoming.info;
  if (info.expires_unix_ms != 0 && info.expires_unix_ms <= now_unix_ms) {
    return Err(Code::kIncompatible, Reason::kExpired, "context '{}' expired {} ms ago", info.id,
               now_unix_ms - info.expires_unix_ms);
  }
  std::erase_if(expired_, [&](const auto& gone) {
    return gone.first == info.id || (!info.name.empty() && gone.second == info.name);
  });
  auto it = contexts_.find(info.id);
  const bool is_new = it == contexts_.end();
  if (is_new) {
    QKV_RETURN_IF_ERROR(MakeRoomFor(incoming));
    for (StoredFile& file : incoming.files) {
      auto [counted, added] = files_.try_emplace(file.key, CountedFile{MemoryOf(file), 0, file.fd, file.on_disk});
      if (added) used_bytes_ += MemoryOf(file);
      file.fd = counted->second.fd;
      file.on_disk = counted->second.on_disk;
      ++counted->second.n_uses;
    }
    Context context;
    context.info = info;
    context.info.name.clear();
    context.info.n_leases = 0;
    context.info.n_attached = 0;
    context.info.in_memory = std::ranges::none_of(incoming.files, &StoredFile::on_disk);
    context.files = std::move(incoming.files);
    context.key = std::move(incoming.key);
    it = contexts_.emplace(info.id, std::move(context)).first;
  }
  Context& context = it->second;
  context.info.expires_unix_ms = info.expires_unix_ms;
  context.info.pinned = info.pinned;
  context.last_use = ++uses_;
  TakeName(context, std::move(info.name));
  if (incoming.restored) {
    Note(Event::Kind::kRestored, context.info);
  } else {
    if (is_new) Note(Event::Kind::kCreated, context.info);
    Note(Event::Kind::kPublished, context.info);
  }
  NoteUsage();
  return {};
}

void Registry::NoteUsage() {
  const auto at_least = [&](int percent) {
    return static_cast<__int128>(used_bytes_) * 100 >= static_cast<__int128>(limits_.budget_bytes) * percent;
  };
  for (const int percent : kAlarmPercents) {
    if (percent <= alarm_percent_ || !at_least(percent)) continue;
    alarm_percent_ = percent;
    events_.push_back({Event::Kind::kAlarm, {}, {}, used_bytes_, {}, percent});
  }
  while (alarm_percent_ > 0 && !at_least(alarm_percent_ - kAlarmSlackPercent)) {
    events_.push_back({Event::Kind::kAlarmEnded, {}, {}, used_bytes_, {}, alarm_percent_});
    int below = 0;
    for (const int percent : kAlarmPercents) {
      if (percent < alarm_percent_) below = percent;
    }
    alarm_percent_ = below;
  }
}

Status Registry::MakeRoomFor(const NewContext& incoming) {
  const auto evictable = [](const Context& c) { return !c.info.pinned && c.info.n_leases == 0 && !c.held; };
  Footprint wanted;
  wanted.Add(incoming.files);

  const auto lacking = [&]() -> std::string_view {
    uint64_t bytes = used_bytes_;
    size_t n = files_.size();
    for (const auto& [key, file_bytes] : wanted.files) {
      if (files_.contains(key)) continue;
      bytes += file_bytes;
      ++n;
    }
    return bytes > limits_.budget_bytes ? "budget" : n > limits_.max_files ? "descriptors" : "";
  };
  if (lacking().empty()) return {};

  Footprint least = wanted;  // with everything evicted that can be
  for (const auto& [id, context] : contexts_) {
    if (!evictable(context)) least.Add(context.files);
  }
  if (least.bytes > limits_.budget_bytes) {
    return Err(Code::kExhausted, Reason::kPoolFull,
               "context '{}' of {} bytes would bring the pool to {} bytes, pinned and leased contexts included, "
               "expected at most {}",
               incoming.info.id, wanted.bytes, least.bytes, limits_.budget_bytes);
  }
  if (least.files.size() > limits_.max_files) {
    return Err(Code::kExhausted, Reason::kPoolFull,
               "context '{}' of {} files would bring the pool to {} files, pinned and leased contexts included, "
               "expected at most {}",
               incoming.info.id, wanted.files.size(), least.files.size(), limits_.max_files);
  }
  for (std::string_view what = lacking(); !what.empty(); what = lacking()) {
    auto victim = contexts_.end();
    for (auto it = contexts_.begin(); it != contexts_.end(); ++it) {
      if (!evictable(it->second)) continue;
      if (victim == contexts_.end() || it->second.last_use < victim->second.last_use) victim = it;
    }
    QKV_CHECK(victim != contexts_.end());
    Drop(victim, Event::Kind::kEvicted, what);
  }
  return {};
}

void Registry::TakeName(Context& context, std::string name) {
  if (!context.info.name.empty()) names_.erase(context.info.name);
  if (!name.empty()) {
    if (auto held = names_.find(name); held != names_.end()) contexts_.find(held->second)->second.info.name.clear();
    names_[name] = context.info.id;
  }
  context.info.name = std::move(name);
}

void Registry::Drop(Contexts::iterator it, Event::Kind why, std::string_view reason) {
  Context& context = it->second;
  Note(why, context.info, reason);
  if (context.info.n_leases > 0) {
    for (auto& [client, leases] : leases_) {
      for (auto& [lease, id] : leases) {
        if (id == context.info.id) id.clear();
      }
    }
  }
  if (!context.info.name.empty()) names_.erase(context.info.name);
  for (const StoredFile& file : context.files) {
    const auto counted = files_.find(file.key);
    if (--counted->second.n_uses > 0) continue;
    used_bytes_ -= counted->second.bytes;
    files_.erase(counted);
  }
  contexts_.erase(it);
}

void Registry::Hold(std::string_view id, bool held) {
  if (const auto it = contexts_.find(id); it != contexts_.end()) it->second.held = held;
}

void Registry::ForgetFromDisk(std::string_view id) {
  const auto it = contexts_.find(id);
  if (it == contexts_.end()) return;
  if (std::ranges::any_of(it->second.files, &StoredFile::on_disk)) Drop(it, Event::Kind::kEvicted, "disk");
  NoteUsage();
}

std::string Registry::IdOf(std::string_view id_or_name) const {
  if (contexts_.contains(id_or_name)) return std::string(id_or_name);
  const auto named = names_.find(id_or_name);
  return named == names_.end() ? std::string() : named->second;
}

Registry::Contexts::iterator Registry::Find(std::string_view id_or_name) {
  return contexts_.find(IdOf(id_or_name));
}

Result<Registry::Grant> Registry::Attach(ClientId client, std::string_view id_or_name, int64_t now_unix_ms) {
  Expire(now_unix_ms);
  const auto it = Find(id_or_name);
  if (it == contexts_.end()) {
    const bool expired = std::any_of(expired_.begin(), expired_.end(), [&](const auto& gone) {
      return gone.first == id_or_name || gone.second == id_or_name;
    });
    if (expired) return Err(Code::kIncompatible, Reason::kExpired, "context '{}' has expired", id_or_name);
    return NoSuchContext(id_or_name);
  }
  auto& leases = leases_[client];
  if (leases.size() >= limits_.max_leases_per_client) {
    return Err(Code::kExhausted, Reason::kPoolFull, "client holds {} leases, expected fewer than {}", leases.size(),
               limits_.max_leases_per_client);
  }
  Context& context = it->second;
  leases.emplace(++last_lease_, context.info.id);
  ++context.info.n_leases;
  ++context.info.n_attached;
  context.last_use = ++uses_;
  Note(Event::Kind::kAttached, context.info);
  return Grant{context.info.id, last_lease_};
}

Result<std::span<const StoredFile>> Registry::FilesOf(ClientId client, uint64_t lease) const {
  const auto leases = leases_.find(client);
  if (leases == leases_.end()) return NoSuchLease(lease);
  const auto it = leases->second.find(lease);
  if (it == leases->second.end()) return NoSuchLease(lease);
  const auto context = contexts_.find(it->second);
  if (context == contexts_.end()) {
    return Err(Code::kNotFound, Reason::kNotFound, "the context of lease {} is gone", lease);
  }
  return std::span<const StoredFile>(context->second.files);
}

void Registry::EndLease(std::string_view context_id, std::string_view reason) {
  const auto it = contexts_.find(context_id);
  if (it == contexts_.end()) return;
  --it->second.info.n_leases;
  it->second.last_use = ++uses_;
  Note(Event::Kind::kReleased, it->second.info, reason);
}

Status Registry::Release(ClientId client, uint64_t lease) {
  const auto leases = leases_.find(client);
  if (leases == leases_.end()) return NoSuchLease(lease);
  const auto it = leases->second.find(lease);
  if (it == leases->second.end()) return NoSuchLease(lease);
  EndLease(it->second, "request");
  leases->second.erase(it);
  return {};
}

void Registry::ReleaseAllOf(ClientId client) {
  const auto leases = leases_.find(client);
  if (leases == leases_.end()) return;
  for (const auto& [lease, id] : leases->second) EndLease(id, "hang_up");
  leases_.erase(leases);
}

Status Registry::Remove(std::string_view id_or_name) {
  const auto it = Find(id_or_name);
  if (it == contexts_.end()) return NoSuchContext(id_or_name);
  Drop(it, Event::Kind::kRemoved);
  NoteUsage();
  return {};
}

void Registry::Expire(int64_t now_unix_ms) {
  for (auto it = contexts_.begin(); it != contexts_.end();) {
    const auto next = std::next(it);
    const ContextInfo& info = it->second.info;
    if (info.expires_unix_ms != 0 && info.expires_unix_ms <= now_unix_ms) {
      if (expired_.size() >= kRememberedExpired) expired_.erase(expired_.begin());
      expired_.emplace_back(info.id, info.name);
      Drop(it, Event::Kind::kExpired);
    }
    it = next;
  }
  NoteUsage();
}

int64_t Registry::NextExpiryUnixMs() const {
  int64_t next = 0;
  for (const auto& [id, context] : contexts_) {
    const int64_t expires = context.info.expires_unix_ms;
    if (expires != 0 && (next == 0 || expires < next)) next = expires;
  }
  return next;
}

std::span<const StoredFile> Registry::FilesOf(std::string_view id) const {
  const auto it = contexts_.find(id);
  return it == contexts_.end() ? std::span<const StoredFile>() : std::span<const StoredFile>(it->second.files);
}

const ContextInfo* Registry::InfoOf(std::string_view id) const {
  const auto it = contexts_.find(id);
  return it == contexts_.end() ? nullptr : &it->second.info;
}

std::shared_ptr<const SecretKey> Registry::KeyOf(std::string_view id) const {
  const auto it = contexts_.find(id);
  return it == contexts_.end() ? nullptr : it->second.key;
}

}  // namespace qkv
