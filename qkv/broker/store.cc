// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/store.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "qkv/base/kill_point.h"
#include "qkv/broker/admit.h"
#include "qkv/card/card.h"
#include "qkvshare/v1/store.pb.h"

namespace qkv {
namespace {

using ::qkvshare::v1::StoredContext;

constexpr std::array<char, 8> kMagic = {'Q', 'K', 'V', 'C', 'T', 'X', '0', '1'};
constexpr size_t kHeadBytes = 16;  // magic, XXH3-64 of the rest
constexpr size_t kMaxContextFileBytes = kMaxCardBytes + (size_t{1} << 20);
constexpr size_t kMaxWrappedKeyBytes = 256;
constexpr size_t kIdBytes = 32;
constexpr std::string_view kContextEnding = ".context";
constexpr std::string_view kSegmentEnding = ".segment";
constexpr std::string_view kPartEnding = ".part";
constexpr char kLockName[] = "lock";
constexpr uint64_t kBlockBytes = 4096;
constexpr size_t kCopyBytes = size_t{1} << 20;
constexpr auto kStopDeadline = std::chrono::seconds(10);

uint64_t RoundUp(uint64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

bool IsHexId(std::string_view text) {
  return text.size() == kIdBytes && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// The 32 digits of "<32 digits><ending>"; "" for other names. So no name that anybody chose becomes part of a path.
std::string_view StemOf(std::string_view file, std::string_view ending) {
  if (!file.ends_with(ending)) return {};
  file.remove_suffix(ending.size());
  return IsHexId(file) ? file : std::string_view();
}

std::string SegmentName(const std::string& stem) {
  return stem + std::string(kSegmentEnding);
}
std::string ContextName(const std::string& id) {
  return id + std::string(kContextEnding);
}

template <class... Args>
tl::unexpected<Error> Damaged(fmt::format_string<Args...> format, Args&&... args) {
  return Err(Code::kCorrupt, Reason::kChecksum, "stored context: {}", fmt::format(format, std::forward<Args>(args)...));
}

// ENOSPC and the like are pool_full; a filesystem that has become read-only is denied.
tl::unexpected<Error> DiskError(std::string_view what) {
  if (errno == EROFS) return Err(Code::kDenied, Reason::kDenied, "{}: the filesystem is read-only", what);
  if (errno == EDQUOT) return Err(Code::kExhausted, Reason::kPoolFull, "{}: the disk quota is used up", what);
  return ErrnoError(what);
}

Status WriteAll(const Fd& fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return DiskError("write");
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return {};
}

Result<FileKey> KeyOf(const Fd& fd) {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoError("fstat");
  return FileKey{info.st_dev, info.st_ino};
}

Result<Fd> OpenDirectory(const std::string& path) {
  if (path.empty() || path.find('\0') != std::string::npos) {
    return Err(Code::kInvalidArgument, "store: a directory's path is empty or has a NUL");
  }
  const std::string what = fmt::format("store '{}'", path);
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return DiskError(what);
  Fd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory.valid() && errno == ENOTDIR) return Err(Code::kInvalidArgument, "{}: not a directory", what);
  if (!directory.valid()) return ErrnoError(what);
  struct stat info {};
  if (::fstat(directory.get(), &info) != 0) return ErrnoError(what);
  if (info.st_uid != ::geteuid() || (info.st_mode & 0022) != 0) {
    return Err(Code::kDenied, Reason::kDenied,
               "{}: belongs to user {} with mode {:04o}, expected user {} and nobody else to write to it", what,
               info.st_uid, info.st_mode & 07777, ::geteuid());
  }
  if (::faccessat(directory.get(), ".", W_OK | X_OK, AT_EACCESS) != 0) return DiskError(what);
  return directory;
}

Result<Fd> LockDirectory(const Fd& directory, const std::string& path) {
  Fd lock(::openat(directory.get(), kLockName, O_RDONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) return DiskError(fmt::format("store '{}': open its lock", path));
  while (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno == EWOULDBLOCK) {
      return Err(Code::kInvalidArgument, "store '{}' is in use by another broker; connect to that one", path);
    }
    return ErrnoError(fmt::format("store '{}': lock", path));
  }
  return lock;
}

}  // namespace

// What a job has put into the directory so far.
struct ContextStore::Written {
  std::vector<std::string> segments;    // in the card's order; each counts as used by the job
  std::vector<std::string> new_ones;    // of which this job wrote
  std::vector<std::byte> context_file;  // its contents
  std::string part;                     // the name it has while it is written
  uint64_t reserved_bytes = 0;
};

Result<std::unique_ptr<ContextStore>> ContextStore::Open(StoreOptions options) {
  QKV_ASSIGN_OR_RETURN(Fd directory, OpenDirectory(options.directory));
  QKV_ASSIGN_OR_RETURN(Fd lock, LockDirectory(directory, options.directory));
  std::unique_ptr<ContextStore> store(new ContextStore(std::move(options), std::move(directory), std::move(lock)));
  QKV_RETURN_IF_ERROR(store->Scan());
  sigset_t all, before;  // signals are the business of the program around us
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  Status started;
  try {
    store->worker_ = std::thread([raw = store.get()] { raw->WorkerMain(); });
  } catch (const std::system_error& error) {
    started = Err(Code::kExhausted, Reason::kPoolFull, "start the store's thread: {}", error.what());
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  QKV_RETURN_IF_ERROR(started);
  return store;
}

ContextStore::ContextStore(StoreOptions options, Fd directory, Fd lock)
    : options_(std::move(options)), directory_(std::move(directory)), lock_(std::move(lock)) {}

ContextStore::~ContextStore() {
  {
    std::unique_lock lock(mutex_);
    stop_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, kStopDeadline, [this] { return jobs_.empty() && current_.empty() && garbage_.empty(); });
    give_up_ = true;
  }
  if (worker_.joinable()) worker_.join();
}

// --- looking into the directory --------------------------------------------------------------------------

Status ContextStore::Scan() {
  // A descriptor of its own: it has a position.
  Fd copy(::openat(directory_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!copy.valid()) return ErrnoError("store: open the directory");
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(::fdopendir(copy.get()), ::closedir);
  if (listing == nullptr) return ErrnoError("store: list the directory");
  copy.Release();
  std::vector<std::string> ids, parts;
  std::map<std::string, bool> segment_is_used;
  while (const dirent* file = ::readdir(listing.get())) {
    const std::string_view name = file->d_name;
    if (const auto id = StemOf(name, kContextEnding); !id.empty()) ids.emplace_back(id);
    if (const auto stem = StemOf(name, kSegmentEnding); !stem.empty()) segment_is_used.emplace(stem, false);
    if (!StemOf(name, kPartEnding).empty()) parts.emplace_back(name);
  }
  for (const std::string& part : parts) {
    if (::unlinkat(directory_.get(), part.c_str(), 0) != 0) return DiskError(fmt::format("store: remove '{}'", part));
  }
  std::vector<Entry> found;
  for (const std::string& id : ids) {
    auto entry = ReadEntry(id, nullptr);
    if (!entry) {
      if (entry.error().code != Code::kCorrupt) return tl::unexpected(entry.error());  // e.g. out of descriptors
      if (::unlinkat(directory_.get(), ContextName(id).c_str(), 0) != 0) return DiskError("store: remove a context");
      Report({Outcome::Kind::kDamaged, id, "", 0, entry.error()});
      continue;
    }
    found.push_back(*std::move(entry));
  }
  std::ranges::sort(found, {}, &Entry::published_unix_ms);  // so that the latest gets a name that two have
  for (Entry& entry : found) {
    for (const std::string& stem : entry.segments) {
      segment_is_used[stem] = true;
      SegmentFile& file = segments_[stem];
      if (file.n_uses++ > 0) continue;
      struct stat info {};
      if (::fstatat(directory_.get(), SegmentName(stem).c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
        return ErrnoError("store: look at a segment");
      }
      file.key = {info.st_dev, info.st_ino};
      file.bytes = RoundUp(static_cast<uint64_t>(info.st_size));
      on_disk_[file.key] = stem;
      used_bytes_ += file.bytes;
    }
    used_bytes_ += entry.file_bytes;
    entry.last_use = ++uses_;
    const std::string id = entry.info.id, name = std::exchange(entry.info.name, {});
    TakeName(entries_.emplace(id, std::move(entry)).first->second, name);
  }
  for (const auto& [stem, used] : segment_is_used) {
    if (!used) garbage_.push_back(stem);
  }
  return {};
}

Result<Fd> ContextStore::OpenSegment(const std::string& stem, uint64_t bytes) const {
  Fd fd(::openat(directory_.get(), SegmentName(stem).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd.valid() && (errno == ENOENT || errno == ELOOP)) return Damaged("segment {} is not there", stem);
  if (!fd.valid()) return ErrnoError(fmt::format("segment {}", stem));
  if (!IsReadOnlyFileOf(fd, ::geteuid())) return Damaged("segment {} is not a read-only file of ours", stem);
  QKV_ASSIGN_OR_RETURN(const uint64_t size, fd.SizeBytes());
  if (size != bytes) return Damaged("segment {} has {} bytes, its card says {}", stem, size, bytes);
  return fd;
}

// Errors other than kCorrupt say that it could not be looked at, not that it is damaged.
Result<ContextStore::Entry> ContextStore::ReadEntry(const std::string& id, std::vector<std::byte>* card_bytes) const {
  const Fd fd(::openat(directory_.get(), ContextName(id).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd.valid() && (errno == ENOENT || errno == ELOOP)) return Damaged("{} is not there", id);
  if (!fd.valid()) return ErrnoError(fmt::format("stored context {}", id));
  if (!IsReadOnlyFileOf(fd, ::geteuid())) return Damaged("{} is not a read-only file of ours", id);
  auto bytes = ReadWhole(fd, kMaxContextFileBytes);
  if (!bytes && bytes.error().code == Code::kInvalidArgument) return Damaged("{}: {}", id, bytes.error().message);
  if (!bytes) return tl::unexpected(bytes.error());
  const std::span<const std::byte> payload =
      std::span<const std::byte>(*bytes).subspan(std::min(bytes->size(), kHeadBytes));
  uint64_t checksum = 0;
  if (bytes->size() >= kHeadBytes) std::memcpy(&checksum, bytes->data() + kMagic.size(), sizeof(checksum));
  StoredContext stored;
  if (bytes->size() < kHeadBytes || std::memcmp(bytes->data(), kMagic.data(), kMagic.size()) != 0 ||
      checksum != XXH3_64bits(payload.data(), payload.size()) ||
      !stored.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) {
    return Damaged("{} is not as it was written", id);
  }
  const auto card = ParseCard(std::as_bytes(std::span(stored.card())));
  if (!card) return Damaged("{}: {}", id, card.error().message);
  const bool fits = card->id() == id && card->segments_size() == stored.segment_files_size() &&
                    stored.wrapped_key().size() <= kMaxWrappedKeyBytes && stored.expires_unix_ms() >= 0 &&
                    (stored.name().empty() || ValidateContextName(stored.name()));
  if (!fits) return Damaged("{} does not fit its card", id);
  Entry entry;
  entry.info = InfoOf(*card);
  entry.info.name = stored.name();
  entry.info.expires_unix_ms = stored.expires_unix_ms();
  entry.info.pinned = stored.pinned();
  entry.info.producer_pid = stored.producer_pid();
  entry.published_unix_ms = stored.published_unix_ms();
  entry.wrapped_key = stored.wrapped_key();
  entry.file_bytes = RoundUp(bytes->size());
  for (int i = 0; i < card->segments_size(); ++i) {
    const std::string& stem = stored.segment_files(i);
    if (!IsHexId(stem)) return Damaged("{} names a segment that is none", id);
    QKV_RETURN_IF_ERROR(OpenSegment(stem, card->segments(i).bytes()));
    entry.segments.push_back(stem);
  }
  if (card_bytes != nullptr) {
    const auto whole = std::as_bytes(std::span(stored.card()));
    card_bytes->assign(whole.begin(), whole.end());
  }
  return entry;
}

Result<ContextStore::Loaded> ContextStore::Load(const std::string& id) {
  {
    const std::lock_guard lock(mutex_);
    if (!entries_.contains(id)) return Err(Code::kNotFound, Reason::kNotFound, "no context '{}'", id);
  }
  std::vector<std::byte> card_bytes;
  const auto load = [&]() -> Result<Loaded> {
    QKV_ASSIGN_OR_RETURN(const Entry entry, ReadEntry(id, &card_bytes));
    Loaded loaded;
    loaded.wrapped_key = entry.wrapped_key;
    loaded.context.info = entry.info;
    QKV_ASSIGN_OR_RETURN(Fd card, SealedMemfd("qkv-card", card_bytes));
    QKV_ASSIGN_OR_RETURN(const FileKey card_key, KeyOf(card));
    QKV_ASSIGN_OR_RETURN(Fd card_read_only, card.ReopenReadOnly());
    loaded.context.files.push_back(
        {card_key, RoundUp(card_bytes.size()), std::make_shared<const Fd>(std::move(card_read_only))});
    QKV_ASSIGN_OR_RETURN(const CacheCard parsed, ParseCard(card_bytes));
    for (int i = 0; i < parsed.segments_size(); ++i) {
      QKV_ASSIGN_OR_RETURN(Fd fd, OpenSegment(entry.segments[static_cast<size_t>(i)], parsed.segments(i).bytes()));
      QKV_ASSIGN_OR_RETURN(const FileKey key, KeyOf(fd));
      loaded.context.files.push_back(
          {key, parsed.segments(i).bytes(), std::make_shared<const Fd>(std::move(fd)), /*on_disk=*/true});
    }
    return loaded;
  };
  auto loaded = load();
  const std::lock_guard lock(mutex_);
  const auto it = entries_.find(id);
  if (it == entries_.end()) return Err(Code::kNotFound, Reason::kNotFound, "no context '{}'", id);
  if (!loaded && loaded.error().code == Code::kCorrupt) {
    Report({Outcome::Kind::kDamaged, id, it->second.info.name, it->second.info.bytes, loaded.error()});
    Drop(it);
  } else if (loaded) {
    loaded->context.info = it->second.info;  // its name may have gone to another one since
    it->second.last_use = ++uses_;
  }
  return loaded;
}

// --- what it knows ---------------------------------------------------------------------------------------

std::string ContextStore::Find(std::string_view id_or_name, int64_t now_unix_ms) const {
  const std::lock_guard lock(mutex_);
  auto it = entries_.find(id_or_name);
  if (it == entries_.end()) {
    const auto named = names_.find(id_or_name);
    if (named == names_.end()) return {};
    it = entries_.find(named->second);
  }
  const int64_t expires = it->second.info.expires_unix_ms;
  return expires != 0 && expires <= now_unix_ms ? std::string() : it->first;
}

void ContextStore::Touch(std::string_view id) {
  const std::lock_guard lock(mutex_);
  if (const auto it = entries_.find(id); it != entries_.end()) it->second.last_use = ++uses_;
}

bool ContextStore::Has(std::string_view id) const {
  const std::lock_guard lock(mutex_);
  return entries_.contains(id);
}

std::optional<StoredFile> ContextStore::FileOf(const FileKey& key) const {
  std::string stem;
  {
    const std::lock_guard lock(mutex_);
    const auto it = on_disk_.find(key);
    if (it == on_disk_.end()) return std::nullopt;
    stem = it->second;
  }
  // Opened anew: what somebody sent us may have been opened for writing before the file was finished.
  Fd fd(::openat(directory_.get(), SegmentName(stem).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd.valid() || !IsReadOnlyFileOf(fd, ::geteuid())) return std::nullopt;
  const auto found = KeyOf(fd);
  const auto size = fd.SizeBytes();
  if (!found || !size || *found != key) return std::nullopt;
  return StoredFile{key, *size, std::make_shared<const Fd>(std::move(fd)), /*on_disk=*/true};
}

void ContextStore::Expire(int64_t now_unix_ms) {
  const std::lock_guard lock(mutex_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto next = std::next(it);
    const int64_t expires = it->second.info.expires_unix_ms;
    if (expires != 0 && expires <= now_unix_ms) {
      const ContextInfo& info = it->second.info;
      Report({Outcome::Kind::kExpired, info.id, info.name, info.bytes, {}});
      Drop(it);
    }
    it = next;
  }
}

int64_t ContextStore::NextExpiryUnixMs() const {
  const std::lock_guard lock(mutex_);
  int64_t next = 0;
  for (const auto& [id, entry] : entries_) {
    const int64_t expires = entry.info.expires_unix_ms;
    if (expires != 0 && (next == 0 || expires < next)) next = expires;
  }
  return next;
}

std::vector<ContextInfo> ContextStore::InfosAfter(std::string_view after_id, size_t at_most) const {
  const std::lock_guard lock(mutex_);
  std::vector<ContextInfo> infos;
  for (auto it = entries_.upper_bound(after_id); it != entries_.end() && infos.size() < at_most; ++it) {
    infos.push_back(it->second.info);
  }
  return infos;
}

uint64_t ContextStore::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

std::vector<ContextStore::Outcome> ContextStore::TakeOutcomes() {
  const std::lock_guard lock(mutex_);
  return std::exchange(outcomes_, {});
}

void ContextStore::Report(Outcome outcome) {
  outcomes_.push_back(std::move(outcome));
}

// --- changing it -----------------------------------------------------------------------------------------

void ContextStore::TakeName(Entry& entry, const std::string& name) {
  if (!entry.info.name.empty()) names_.erase(entry.info.name);
  if (!name.empty()) {
    if (const auto held = names_.find(name); held != names_.end())
      entries_.find(held->second)->second.info.name.clear();
    names_[name] = entry.info.id;
  }
  entry.info.name = name;
}

void ContextStore::LetGo(const std::string& stem) {
  const auto it = segments_.find(stem);
  if (--it->second.n_uses > 0) return;
  used_bytes_ -= it->second.bytes;
  on_disk_.erase(it->second.key);
  segments_.erase(it);
  garbage_.push_back(stem);
  changed_.notify_all();
}

void ContextStore::Drop(Entries::iterator it) {
  // At once, and before its segments: from here on it is not there for any later process.
  (void)::unlinkat(directory_.get(), ContextName(it->first).c_str(), 0);
  KillPoint("store.unlinked");
  Entry& entry = it->second;
  if (!entry.info.name.empty()) names_.erase(entry.info.name);
  used_bytes_ -= entry.file_bytes;
  const std::vector<std::string> segments = std::move(entry.segments);
  entries_.erase(it);
  for (const std::string& stem : segments) LetGo(stem);
}

void ContextStore::Remove(std::string_view id) {
  const std::lock_guard lock(mutex_);
  std::erase_if(jobs_, [&](const Job& job) { return job.context.info.id == id; });
  if (current_ == id) current_.clear();
  if (const auto it = entries_.find(id); it != entries_.end()) Drop(it);
}

void ContextStore::Put(const NewContext& context, int64_t now_unix_ms, std::string wrapped_key) {
  const std::lock_guard lock(mutex_);
  // A name leads to what was published last, and must not lead to the one before while this one is being written.
  const std::string& name = context.info.name;
  if (const auto held = names_.find(name); !name.empty() && held != names_.end() && held->second != context.info.id) {
    entries_.find(held->second)->second.info.name.clear();
    names_.erase(held);
  }
  std::erase_if(jobs_, [&](const Job& job) { return job.context.info.id == context.info.id; });
  jobs_.push_back({context, now_unix_ms, std::move(wrapped_key)});
  changed_.notify_all();
}

Status ContextStore::MakeRoom(uint64_t bytes, std::string_view but_not) {
  while (used_bytes_ + bytes > options_.budget_bytes) {
    auto victim = entries_.end();
    for (auto it = entries_.begin(); it != entries_.end(); ++it) {
      if (it->second.info.pinned || it->first == but_not) continue;
      if (victim == entries_.end() || it->second.last_use < victim->second.last_use) victim = it;
    }
    if (bytes > options_.budget_bytes || victim == entries_.end()) {
      return Err(Code::kExhausted, Reason::kPoolFull,
                 "store: {} bytes more would make {}, pinned contexts included, expected at most {}", bytes,
                 used_bytes_ + bytes, options_.budget_bytes);
    }
    Report({Outcome::Kind::kEvicted, victim->first, victim->second.info.name, victim->second.info.bytes, {}});
    Drop(victim);
  }
  used_bytes_ += bytes;
  return {};
}

// --- the writer's thread ---------------------------------------------------------------------------------

void ContextStore::WorkerMain() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !jobs_.empty() || !garbage_.empty(); });
    if (!garbage_.empty()) {
      const std::vector<std::string> garbage = std::exchange(garbage_, {});
      lock.unlock();
      for (const std::string& stem : garbage) (void)::unlinkat(directory_.get(), SegmentName(stem).c_str(), 0);
      lock.lock();
    } else if (!jobs_.empty() && !give_up_) {
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      const ContextInfo& info = job.context.info;
      current_ = info.id;
      lock.unlock();
      Written written;
      Status status = Write(job, written);
      if (status) status = Commit(job, written);
      lock.lock();
      const bool removed = std::exchange(current_, {}).empty();
      if (!status) {
        used_bytes_ -= written.reserved_bytes;
        for (const std::string& stem : written.segments) LetGo(stem);
        if (!removed) Report({Outcome::Kind::kFailed, info.id, info.name, info.bytes, status.error()});
      } else {
        Report({Outcome::Kind::kStored, info.id, info.name, info.bytes, {}});
      }
      if (options_.on_outcome) options_.on_outcome();
    } else if (stop_) {
      return;
    }
    changed_.notify_all();
  }
}

// Flushed to the disk under its temporary name, which is gone again if anything fails.
Status ContextStore::WriteFile(const std::string& part, const std::function<Status(const Fd&)>& fill,
                               uint64_t bytes) const {
  const Fd fd(::openat(directory_.get(), part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0400));
  if (!fd.valid()) return DiskError("store: make a file");
  KillPoint("store.part");
  const auto write = [&]() -> Status {
    // A full disk is found here, before anything is copied.
    if (::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0 && errno != EOPNOTSUPP && errno != EINTR) {
      return DiskError(fmt::format("store: take {} bytes of disk", bytes));
    }
    QKV_RETURN_IF_ERROR(fill(fd));
    KillPoint("store.written");
    if (::fsync(fd.get()) != 0) return DiskError("store: flush a file");
    KillPoint("store.synced");
    return {};
  };
  const Status written = write();
  if (!written) (void)::unlinkat(directory_.get(), part.c_str(), 0);
  return written;
}

Status ContextStore::Rename(const std::string& part, const std::string& name) const {
  if (::renameat(directory_.get(), part.c_str(), directory_.get(), name.c_str()) == 0) return {};
  const auto error = DiskError("store: rename a file");
  (void)::unlinkat(directory_.get(), part.c_str(), 0);
  return error;
}

Status ContextStore::Write(const Job& job, Written& written) {
  QKV_ASSIGN_OR_RETURN(const auto card_bytes, ReadWhole(*job.context.files.front().fd, kMaxCardBytes));
  const auto segments = std::span(job.context.files).subspan(1);
  const ContextInfo& info = job.context.info;

  // Which are there already; and room for the others, before anything is written.
  std::vector<uint64_t> sizes;
  for (const StoredFile& segment : segments) {
    QKV_ASSIGN_OR_RETURN(sizes.emplace_back(), segment.fd->SizeBytes());
  }
  std::vector<std::string> stems(segments.size());
  std::map<FileKey, std::string> to_write;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(copied_, [](const auto& copy) { return copy.second.first.expired(); });
    uint64_t bytes = RoundUp(kHeadBytes + card_bytes.size() + 1024 + 34 * segments.size());
    for (size_t i = 0; i < segments.size(); ++i) {
      const FileKey& key = segments[i].key;
      if (const auto it = on_disk_.find(key); it != on_disk_.end()) {
        stems[i] = it->second;
      } else if (const auto copy = copied_.find(key);
                 copy != copied_.end() && segments_.contains(copy->second.second)) {
        stems[i] = copy->second.second;
      } else if (const auto twice = to_write.find(key); twice != to_write.end()) {
        stems[i] = twice->second;
        continue;
      } else {
        stems[i] = NewContextId();
        to_write.emplace(key, stems[i]);
        bytes += RoundUp(sizes[i]);
        continue;
      }
      ++segments_[stems[i]].n_uses;  // so that making room does not take it
      written.segments.push_back(stems[i]);
    }
    QKV_RETURN_IF_ERROR(MakeRoom(bytes, info.id));
    written.reserved_bytes = bytes;
  }

  for (size_t i = 0; i < segments.size(); ++i) {
    const auto mine = to_write.find(segments[i].key);
    if (mine == to_write.end()) continue;
    const std::string& stem = mine->second;
    if (std::ranges::find(written.new_ones, stem) == written.new_ones.end()) {
      const std::string part = stem + std::string(kPartEnding);
      QKV_RETURN_IF_ERROR(WriteFile(
          part,
          [&](const Fd& to) -> Status {
            std::vector<std::byte> buffer(std::min<uint64_t>(kCopyBytes, sizes[i]));
            for (uint64_t done = 0; done < sizes[i];) {
              {
                const std::lock_guard lock(mutex_);
                if (give_up_ || current_.empty()) return Err(Code::kExhausted, "store: given up");
              }
              const ssize_t n = ::pread(segments[i].fd->get(), buffer.data(), buffer.size(), static_cast<off_t>(done));
              if (n < 0 && errno == EINTR) continue;
              if (n <= 0) return ErrnoError("store: read a segment");
              QKV_RETURN_IF_ERROR(WriteAll(to, {buffer.data(), static_cast<size_t>(n)}));
              done += static_cast<uint64_t>(n);
            }
            return {};
          },
          sizes[i]));
      QKV_RETURN_IF_ERROR(Rename(part, SegmentName(stem)));
      KillPoint("store.renamed");
      struct stat status {};
      if (::fstatat(directory_.get(), SegmentName(stem).c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
        const auto error = ErrnoError("store: look at a segment");
        (void)::unlinkat(directory_.get(), SegmentName(stem).c_str(), 0);
        return error;
      }
      const std::lock_guard lock(mutex_);
      segments_[stem] = {{status.st_dev, status.st_ino}, RoundUp(sizes[i]), 0};
      on_disk_[segments_[stem].key] = stem;
      written.reserved_bytes -= RoundUp(sizes[i]);  // it has become the segment's
      written.new_ones.push_back(stem);
      if (!segments[i].on_disk) copied_[segments[i].key] = {segments[i].fd, stem};
    }
    const std::lock_guard lock(mutex_);
    ++segments_[stem].n_uses;
    written.segments.push_back(stem);
  }
  if (!written.new_ones.empty() && ::fsync(directory_.get()) != 0) return DiskError("store: flush the directory");
  KillPoint("store.segments_synced");

  written.segments = stems;  // the same ones, in the card's order
  StoredContext stored;
  stored.set_card(card_bytes.data(), card_bytes.size());
  stored.set_name(info.name);
  stored.set_expires_unix_ms(info.expires_unix_ms);
  stored.set_pinned(info.pinned);
  stored.set_producer_pid(info.producer_pid);
  stored.set_published_unix_ms(job.published_unix_ms);
  for (const std::string& stem : stems) stored.add_segment_files(stem);
  stored.set_wrapped_key(job.wrapped_key);
  auto& file = written.context_file;
  file.resize(kHeadBytes + stored.ByteSizeLong());
  std::memcpy(file.data(), kMagic.data(), kMagic.size());
  QKV_CHECK(stored.SerializeToArray(file.data() + kHeadBytes, static_cast<int>(file.size() - kHeadBytes)));
  const uint64_t checksum = XXH3_64bits(file.data() + kHeadBytes, file.size() - kHeadBytes);
  std::memcpy(file.data() + kMagic.size(), &checksum, sizeof(checksum));
  written.part = NewContextId() + std::string(kPartEnding);
  return WriteFile(
      written.part, [&](const Fd& to) { return WriteAll(to, file); }, file.size());
}

Status ContextStore::Commit(const Job& job, Written& written) {
  const ContextInfo& info = job.context.info;
  {
    const std::lock_guard lock(mutex_);
    if (current_.empty()) {
      (void)::unlinkat(directory_.get(), written.part.c_str(), 0);
      return Err(Code::kNotFound, "store: removed meanwhile");
    }
    QKV_RETURN_IF_ERROR(Rename(written.part, ContextName(info.id)));
    KillPoint("store.committed");
    // The old file, if there was one, is gone: its segments are let go once the new ones count.
    Entry& entry = entries_[info.id];
    const std::vector<std::string> before = std::exchange(entry.segments, written.segments);
    used_bytes_ -= entry.file_bytes + written.reserved_bytes;
    written.reserved_bytes = 0;
    entry.file_bytes = RoundUp(written.context_file.size());
    used_bytes_ += entry.file_bytes;
    const std::string old_name = std::move(entry.info.name);
    entry.info = info;
    entry.info.n_leases = 0;
    entry.info.in_memory = false;
    entry.info.name = old_name;
    TakeName(entry, info.name);
    entry.published_unix_ms = job.published_unix_ms;
    entry.wrapped_key = job.wrapped_key;
    entry.last_use = ++uses_;
    for (const std::string& stem : before) LetGo(stem);
  }
  // Without this it might be lost by a power cut, never by a crash of ours; it is there either way.
  (void)::fsync(directory_.get());
  KillPoint("store.directory_synced");
  return {};
}

}  // namespace qkv
