// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/server.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "qkv/base/kill_point.h"
#include "qkv/broker/admit.h"
#include "qkv/broker/event_line.h"
#include "qkv/broker/protocol.h"
#include "qkv/broker/registry.h"
#include "qkv/broker/socket.h"
#include "qkv/broker/store.h"

namespace qkv {
namespace {

constexpr int kAcceptPauseMs = 100;  // after the system refused a descriptor for a new client
constexpr int kMaxPollMs = 60'000;   // the wall clock, which expiry goes by, may be set meanwhile
// A reply always fits into the buffer of a client that has read those before.
constexpr int kSendBufferBytes = 2 * kMaxMessageBytes;

int64_t NowUnixMs() {
  using std::chrono::system_clock;
  return std::chrono::duration_cast<std::chrono::milliseconds>(system_clock::now().time_since_epoch()).count();
}

// Half of the descriptors that this process may open: the rest is for clients, messages, and the program around us.
size_t MaxFiles() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 512;
  return static_cast<size_t>(std::min<rlim_t>(limit.rlim_cur, 1 << 20)) / 2;
}

std::string_view RequestName(const BrokerRequest& request) {
  switch (request.body_case()) {
    case BrokerRequest::kHello: return "hello";
    case BrokerRequest::kPublish:
    case BrokerRequest::kMoreDescriptors: return "publish";
    case BrokerRequest::kAttach: return "attach";
    case BrokerRequest::kFetchDescriptors: return "fetch_descriptors";
    case BrokerRequest::kReleaseLease: return "release_lease";
    case BrokerRequest::kRemove: return "remove";
    case BrokerRequest::kList: return "list";
    case BrokerRequest::kReport: return "report";
    case BrokerRequest::BODY_NOT_SET: break;
  }
  return "invalid";
}

// A Publish of which not all descriptors have come yet.
struct Upload {
  BrokerRequest::Publish publish;
  std::vector<Fd> fds;
};

// What clients of one tenant see. Without tenants there is one, without a name.
struct Tenant {
  std::string name;
  Registry registry;
  std::unique_ptr<ContextStore> store;  // perhaps none
};

struct Client {
  Fd socket;
  Peer peer;
  Tenant* tenant = nullptr;  // of whom it has not shown to be: none
  std::optional<Upload> upload;
};

struct Answer {
  BrokerReply reply;
  std::vector<int> fds;  // the registry's
  uint64_t lease = 0;    // made for this answer
};

void AppendFiles(std::span<const StoredFile> files, size_t first, Answer& answer) {
  const size_t end = std::min(files.size(), first + kMaxDescriptorsPerMessage);
  for (size_t i = first; i < end; ++i) answer.fds.push_back(files[i].fd->get());
}

void Ring(int eventfd) {
  const uint64_t one = 1;
  (void)!::write(eventfd, &one, sizeof(one));  // fails when it rings already
}

// The one above the tenants' own.
Status MakeStoreDirectory(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) return {};
  return ErrnoError(fmt::format("store '{}'", path));
}

}  // namespace

struct BrokerServer::Impl {
  Impl(BrokerOptions o, Listener l, Fd w, Fd s, uint64_t g)
      : options(std::move(o)), listener(std::move(l)), wake(std::move(w)), stored(std::move(s)), generation(g) {}
  ~Impl() { ::unlink(options.socket_path.c_str()); }  // while the lock is ours

  Status MakeTenants();
  void Run();
  bool Accept();  // false: the system is out of descriptors
  void Serve(ClientId id);
  void Drop(ClientId id);
  void Expire();
  Result<Answer> Handle(ClientId id, Client& client, BrokerRequest& request, std::vector<Fd> fds);
  Result<Answer> HandleHello(ClientId id, Client& client, const BrokerRequest::Hello& hello);
  Result<Answer> HandlePublish(Client& client, const BrokerRequest& request, std::vector<Fd> fds);
  Status Publish(const Client& client, const Upload& upload);
  Result<Answer> HandleAttach(ClientId id, Tenant& tenant, const std::string& id_or_name);
  Status Restore(Tenant& tenant, const std::string& id);
  Status Remove(Tenant& tenant, const std::string& id_or_name);
  void Keep(Tenant& tenant, const std::string& id);
  Status CheckOnDisk(Tenant& tenant, const std::string& id);
  BrokerReply List(const Tenant& tenant, std::string_view after_id) const;
  void TakeReport(const Client& client, const TurnReport& report);
  void ShowPool();
  Status Send(const Client& client, const BrokerReply& reply, std::span<const int> fds);
  void Emit(const std::string& line);
  void EmitEvents(int64_t pid);
  void HeedStores();
  void EmitRefusal(const Client& client, const BrokerRequest& request, const Error& error);
  int PollMs(bool accept_paused) const;

  const BrokerOptions options;
  Listener listener;
  Fd wake;
  Fd stored;  // an eventfd: a store has something to say
  const uint64_t generation;
  const std::shared_ptr<BrokerMetrics> metrics =
      options.metrics != nullptr ? options.metrics : std::make_shared<BrokerMetrics>();
  std::thread thread;
  // From here on: only that thread's.
  std::vector<std::unique_ptr<Tenant>> tenants;
  std::map<ClientId, Client> clients;
  ClientId last_client = 0;
};

Status BrokerServer::Impl::MakeTenants() {
  std::vector<std::string> names = options.tenants.names();
  if (names.empty()) names = {""};
  const RegistryLimits limits{.budget_bytes = options.budget_bytes / names.size(),
                              .max_files = MaxFiles() / names.size(),
                              .first_lease = generation | 1};
  for (const std::string& name : names) {
    tenants.push_back(std::make_unique<Tenant>(Tenant{name, Registry(limits), nullptr}));
    if (options.store_directory.empty()) continue;
    if (!name.empty() && tenants.size() == 1) QKV_RETURN_IF_ERROR(MakeStoreDirectory(options.store_directory));
    QKV_ASSIGN_OR_RETURN(
        tenants.back()->store,
        ContextStore::Open({.directory = name.empty() ? options.store_directory
                                                      : fmt::format("{}/tenant-{}", options.store_directory, name),
                            .budget_bytes = options.store_budget_bytes / names.size(),
                            .on_outcome = [fd = stored.get()] { Ring(fd); }}));
  }
  return {};
}

int BrokerServer::Impl::PollMs(bool accept_paused) const {
  if (accept_paused) return kAcceptPauseMs;
  int64_t next = 0;
  const auto consider = [&](int64_t expiry) {
    if (expiry != 0 && (next == 0 || expiry < next)) next = expiry;
  };
  for (const auto& tenant : tenants) {
    consider(tenant->registry.NextExpiryUnixMs());
    if (tenant->store) consider(tenant->store->NextExpiryUnixMs());
  }
  if (next == 0) return -1;
  return static_cast<int>(std::clamp<int64_t>(next - NowUnixMs(), 0, kMaxPollMs));
}

void BrokerServer::Impl::Expire() {
  const int64_t now = NowUnixMs();
  for (const auto& tenant : tenants) tenant->registry.Expire(now);
  EmitEvents(0);  // before the stores look: what is reported here is not reported there
  for (const auto& tenant : tenants) {
    if (tenant->store) tenant->store->Expire(now);
  }
  HeedStores();
}

void BrokerServer::Impl::Run() {
  std::vector<pollfd> polled;
  std::vector<ClientId> ids;
  bool accept_paused = false;
  for (;;) {
    polled = {
        {wake.get(), POLLIN, 0}, {accept_paused ? -1 : listener.socket.get(), POLLIN, 0}, {stored.get(), POLLIN, 0}};
    ids.clear();
    for (const auto& [id, client] : clients) {
      polled.push_back({client.socket.get(), POLLIN, 0});
      ids.push_back(id);
    }
    if (::poll(polled.data(), polled.size(), PollMs(accept_paused)) < 0) {
      QKV_CHECK(errno == EINTR || errno == ENOMEM);
      continue;
    }
    if (polled[0].revents != 0) return;
    if (polled[2].revents != 0) {
      uint64_t count = 0;
      (void)!::read(stored.get(), &count, sizeof(count));
    }
    Expire();
    // One request of each client per round: none can starve the others.
    for (size_t i = 0; i < ids.size(); ++i) {
      if (polled[i + 3].revents != 0) Serve(ids[i]);
    }
    accept_paused = polled[1].revents != 0 && !Accept();
  }
}

bool BrokerServer::Impl::Accept() {
  Client client;
  client.socket = Fd(::accept4(listener.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!client.socket.valid()) return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
  // Best effort: the system's default is enough for a reply on all but oddly tuned machines.
  (void)::setsockopt(client.socket.get(), SOL_SOCKET, SO_SNDBUF, &kSendBufferBytes, sizeof(kSendBufferBytes));
  const auto peer = PeerOf(client.socket);
  if (!peer) return true;
  client.peer = *peer;
  if (options.tenants.empty()) client.tenant = tenants.front().get();
  if (clients.size() >= options.max_clients) {
    const Error full{Code::kExhausted, fmt::format("the broker serves {} clients already", clients.size()),
                     Reason::kPoolFull};
    EmitRefusal(client, BrokerRequest(), full);
    (void)Send(client, FailureReply(full), {});
    return true;
  }
  clients.emplace(++last_client, std::move(client));
  ShowPool();
  return true;
}

void BrokerServer::Impl::Drop(ClientId id) {
  const auto it = clients.find(id);
  const int64_t pid = it->second.peer.pid;
  Tenant* const tenant = it->second.tenant;
  clients.erase(it);
  if (tenant != nullptr) tenant->registry.ReleaseAllOf(id);
  EmitEvents(pid);
  ShowPool();
}

Status BrokerServer::Impl::Send(const Client& client, const BrokerReply& reply, std::span<const int> fds) {
  std::string bytes = reply.SerializeAsString();
  const Status sent = SendMessage(client.socket, bytes, fds, kDontWait);
  Erase(bytes);  // there may be a key in it
  return sent;
}

// One message in, one out. A client that cannot take its reply at once has not read those before: it is dropped.
void BrokerServer::Impl::Serve(ClientId id) {
  Client& client = clients.find(id)->second;
  auto message = ReceiveMessage(client.socket, kDontWait);
  if (!message) {
    const Code code = message.error().code;
    if (code == Code::kTimeout) return;
    if (code != Code::kInvalidArgument && code != Code::kExhausted) return Drop(id);
  }
  KillPoint("broker.received");
  BrokerRequest request;
  auto answer = [&]() -> Result<Answer> {
    if (!message) return tl::unexpected(message.error());
    if (!IsTrusted(client.peer, options.allowed_uids)) {
      return Err(Code::kDenied, Reason::kDenied, "the broker belongs to user {}, and does not serve user {}",
                 ::geteuid(), client.peer.uid);
    }
    try {
      auto decoded = DecodeRequest(message->bytes, message->fds.size());
      Erase(message->bytes);  // there may be a token or a key in it
      if (!decoded) return tl::unexpected(std::move(decoded).error());
      request = *std::move(decoded);
      return Handle(id, client, request, std::move(message->fds));
    } catch (const std::bad_alloc&) {  // a large card, under a memory limit
      return Err(Code::kExhausted, Reason::kPoolFull, "the broker is out of memory");
    }
  }();
  std::optional<Error> refusal;
  if (!answer) refusal = answer.error();
  Status sent;
  if (answer) sent = Send(client, answer->reply, answer->fds);
  if (answer && !sent && sent.error().code == Code::kExhausted) {  // the kernel would not take the descriptors
    if (answer->lease != 0) (void)client.tenant->registry.Release(id, answer->lease);
    refusal = sent.error();
  }
  if (refusal) {
    client.upload.reset();
    sent = Send(client, FailureReply(*refusal), {});
  }
  KillPoint("broker.replied");
  if (answer && answer->reply.has_attached()) Erase(*answer->reply.mutable_attached()->mutable_key());
  EmitEvents(client.peer.pid);
  HeedStores();
  if (refusal) EmitRefusal(client, request, *refusal);
  if (!sent) Drop(id);
}

Result<Answer> BrokerServer::Impl::Handle(ClientId id, Client& client, BrokerRequest& request, std::vector<Fd> fds) {
  if (!request.has_more_descriptors()) client.upload.reset();
  if (request.has_hello()) return HandleHello(id, client, request.hello());
  if (client.tenant == nullptr) {
    return Err(Code::kDenied, Reason::kDenied, "this broker has tenants; say hello with the token of one first");
  }
  Tenant& tenant = *client.tenant;
  Answer answer;
  switch (request.body_case()) {
    case BrokerRequest::kPublish:
    case BrokerRequest::kMoreDescriptors: return HandlePublish(client, request, std::move(fds));
    case BrokerRequest::kAttach: return HandleAttach(id, tenant, request.attach().id_or_name());
    case BrokerRequest::kFetchDescriptors: {
      const auto& fetch = request.fetch_descriptors();
      QKV_ASSIGN_OR_RETURN(const auto files, tenant.registry.FilesOf(id, fetch.lease()));
      AppendFiles(files, fetch.first(), answer);
      if (answer.fds.empty()) {
        return Err(Code::kInvalidArgument, "lease {} has {} descriptors, none from {} on", fetch.lease(), files.size(),
                   fetch.first());
      }
      break;
    }
    case BrokerRequest::kReleaseLease:
      QKV_RETURN_IF_ERROR(tenant.registry.Release(id, request.release_lease().lease()));
      KillPoint("broker.released");
      break;
    case BrokerRequest::kRemove: QKV_RETURN_IF_ERROR(Remove(tenant, request.remove().id_or_name())); break;
    case BrokerRequest::kList: answer.reply = List(tenant, request.list().after_id()); return answer;
    case BrokerRequest::kReport: TakeReport(client, FromWire(request.report())); break;
    case BrokerRequest::kHello:
    case BrokerRequest::BODY_NOT_SET: break;
  }
  answer.reply.mutable_done();
  return answer;
}

Result<Answer> BrokerServer::Impl::HandleHello(ClientId id, Client& client, const BrokerRequest::Hello& hello) {
  Tenant* tenant = tenants.front().get();
  if (!options.tenants.empty()) {
    const std::optional<size_t> found = options.tenants.Find(hello.token());
    tenant = found ? tenants[*found].get() : nullptr;
  } else if (!hello.token().empty()) {
    // Who brings a token counts on being kept apart.
    return Err(Code::kInvalidArgument, "this broker has no tenants, so a token means nothing to it");
  }
  if (client.tenant != nullptr && client.tenant != tenant) client.tenant->registry.ReleaseAllOf(id);
  client.tenant = tenant;
  if (tenant == nullptr)
    return Err(Code::kDenied, Reason::kDenied, "this broker has tenants, and the token is of none");
  Answer answer;
  answer.reply.mutable_welcome()->set_protocol(kProtocolVersion);
  answer.reply.mutable_welcome()->set_generation(generation);
  return answer;
}

Result<Answer> BrokerServer::Impl::HandlePublish(Client& client, const BrokerRequest& request, std::vector<Fd> fds) {
  if (request.has_publish()) {
    // Descriptors of unfinished uploads are bounded together, by what all contexts may take.
    size_t announced = request.publish().n_descriptors();
    for (const auto& [id, other] : clients) {
      if (other.tenant == client.tenant) announced += other.upload ? other.upload->publish.n_descriptors() : 0;
    }
    const size_t max_files = client.tenant->registry.limits().max_files;
    if (announced > max_files) {
      return Err(Code::kExhausted, Reason::kPoolFull,
                 "publish: {} descriptors on their way to the broker, expected at most {}", announced, max_files);
    }
    client.upload.emplace(Upload{request.publish(), {}});
  } else if (!client.upload) {
    return Err(Code::kInvalidArgument, "publish: more descriptors, but of no context");
  }
  Upload& upload = *client.upload;
  const size_t wanted = upload.publish.n_descriptors();
  if (upload.fds.size() + fds.size() > wanted) {
    return Err(Code::kInvalidArgument, "publish: {} descriptors came, {} were announced",
               upload.fds.size() + fds.size(), wanted);
  }
  std::move(fds.begin(), fds.end(), std::back_inserter(upload.fds));
  Answer answer;
  const size_t missing = wanted - upload.fds.size();
  answer.reply.mutable_published()->set_n_missing(static_cast<uint32_t>(missing));
  if (missing > 0) return answer;
  const Upload complete = *std::exchange(client.upload, std::nullopt);
  QKV_RETURN_IF_ERROR(Publish(client, complete));
  return answer;
}

Status BrokerServer::Impl::Publish(const Client& client, const Upload& upload) {
  Tenant& tenant = *client.tenant;
  FindOnDisk on_disk;
  if (tenant.store) on_disk = [&](const FileKey& key) { return tenant.store->FileOf(key); };
  QKV_ASSIGN_OR_RETURN(AdmittedContext admitted, AdmitContext(upload.fds, on_disk));
  KillPoint("broker.admitted");
  ContextInfo& info = admitted.context.info;
  const int64_t now = NowUnixMs();
  if (!admitted.tenant.empty() && admitted.tenant != tenant.name) {
    return Err(Code::kDenied, Reason::kDenied, "context '{}' is another tenant's by its card", info.id);
  }
  if (info.encrypted != !upload.publish.key().empty()) {
    return Err(Code::kInvalidArgument, "context '{}' is {}encrypted, and came {} key", info.id,
               info.encrypted ? "" : "not ", info.encrypted ? "without a" : "with a");
  }
  if (info.encrypted) {
    QKV_ASSIGN_OR_RETURN(admitted.context.key, SecretKey::From(upload.publish.key()));
  }
  if (tenant.registry.InfoOf(info.id) == nullptr && tenant.store && tenant.store->Has(info.id)) {
    (void)Restore(tenant, info.id);
  }
  if (const auto known = tenant.registry.FilesOf(info.id); !known.empty()) {
    QKV_ASSIGN_OR_RETURN(const auto known_bytes, ReadWhole(*known.front().fd, kMaxCardBytes));
    if (known_bytes != admitted.card_bytes) {
      return Err(Code::kInvalidArgument, "context '{}' exists with another card", info.id);
    }
  }
  if (upload.publish.ttl_ms() > 0) {
    const int64_t expires = now + upload.publish.ttl_ms();
    info.expires_unix_ms = info.expires_unix_ms == 0 ? expires : std::min(info.expires_unix_ms, expires);
  }
  info.pinned = upload.publish.pin();
  info.producer_pid = client.peer.pid;
  const std::string id = info.id;
  QKV_RETURN_IF_ERROR(tenant.registry.Publish(std::move(admitted.context), now));
  KillPoint("broker.published");
  Keep(tenant, id);
  return {};
}

// On disk as well, some time.
void BrokerServer::Impl::Keep(Tenant& tenant, const std::string& id) {
  if (!tenant.store) return;
  const ContextInfo& info = *tenant.registry.InfoOf(id);
  Result<std::string> wrapped_key;
  if (info.encrypted && options.seal_key) {
    wrapped_key = WrapKey(*options.seal_key, id, *tenant.registry.KeyOf(id));
  } else if (info.encrypted) {
    wrapped_key = Err(Code::kDenied, Reason::kDenied, "encrypted, and the broker runs without --seal-key");
  }
  if (!wrapped_key) {
    return Emit(StoreLine({ContextStore::Outcome::Kind::kFailed, id, info.name, info.bytes, wrapped_key.error()},
                          NowUnixMs(), tenant.name));
  }
  const auto files = tenant.registry.FilesOf(id);
  NewContext context{info, {files.begin(), files.end()}};
  tenant.registry.Hold(id, true);  // its memory is not given away before it is on disk
  tenant.store->Put(context, NowUnixMs(), *std::move(wrapped_key));
}

// From the disk tier into the registry, which then leads to files instead of memory.
Status BrokerServer::Impl::Restore(Tenant& tenant, const std::string& id) {
  QKV_ASSIGN_OR_RETURN(ContextStore::Loaded loaded, tenant.store->Load(id));
  if (loaded.context.info.encrypted) {
    if (!options.seal_key) {
      return Err(Code::kDenied, Reason::kDenied, "context '{}' is encrypted, and the broker runs without --seal-key",
                 id);
    }
    auto key = UnwrapKey(*options.seal_key, id, loaded.wrapped_key);
    if (!key) {
      return Err(Code::kDenied, Reason::kDenied, "context '{}': {}", id, key.error().message);
    }
    loaded.context.key = *std::move(key);
  }
  loaded.context.restored = true;
  return tenant.registry.Publish(std::move(loaded.context), NowUnixMs());
}

// Files on disk have no seals: a truncated one would be a SIGBUS to whoever maps it.
Status BrokerServer::Impl::CheckOnDisk(Tenant& tenant, const std::string& id) {
  for (const StoredFile& file : tenant.registry.FilesOf(id)) {
    if (!file.on_disk) continue;
    const auto size = file.fd->SizeBytes();
    if (size && *size == file.bytes) continue;
    const Error error{Code::kCorrupt, fmt::format("context '{}': a file of it on disk is not as it was written", id),
                      Reason::kChecksum};
    const ContextInfo info = *tenant.registry.InfoOf(id);
    Emit(
        StoreLine({ContextStore::Outcome::Kind::kDamaged, id, info.name, info.bytes, error}, NowUnixMs(), tenant.name));
    tenant.registry.ForgetFromDisk(id);
    tenant.store->Remove(id);
    return tl::unexpected(error);
  }
  return {};
}

Result<Answer> BrokerServer::Impl::HandleAttach(ClientId id, Tenant& tenant, const std::string& id_or_name) {
  const int64_t now = NowUnixMs();
  auto grant = tenant.registry.Attach(id, id_or_name, now);
  const bool unknown = !grant && grant.error().reason != Reason::kPoolFull;
  if (const std::string stored = unknown && tenant.store ? tenant.store->Find(id_or_name, now) : ""; !stored.empty()) {
    QKV_RETURN_IF_ERROR(Restore(tenant, stored));
    grant = tenant.registry.Attach(id, stored, now);
  }
  if (!grant) return tl::unexpected(std::move(grant).error());
  if (tenant.store) tenant.store->Touch(grant->id);
  Answer answer;
  answer.lease = grant->lease;
  if (Status intact = CheckOnDisk(tenant, grant->id); !intact) {
    (void)tenant.registry.Release(id, grant->lease);
    return tl::unexpected(std::move(intact).error());
  }
  KillPoint("broker.granted");
  QKV_ASSIGN_OR_RETURN(const auto files, tenant.registry.FilesOf(id, grant->lease));
  AppendFiles(files, 0, answer);
  auto* attached = answer.reply.mutable_attached();
  attached->set_id(grant->id);
  attached->set_lease(grant->lease);
  attached->set_n_descriptors(static_cast<uint32_t>(files.size()));
  attached->set_on_disk(std::ranges::any_of(files, &StoredFile::on_disk));
  if (const auto key = tenant.registry.KeyOf(grant->id)) attached->set_key(std::string(key->bytes()));
  return answer;
}

// The store first: what was removed must not come back, whenever this process dies.
Status BrokerServer::Impl::Remove(Tenant& tenant, const std::string& id_or_name) {
  const std::string id = tenant.registry.IdOf(id_or_name);
  const std::string stored = tenant.store ? tenant.store->Find(id.empty() ? id_or_name : id, NowUnixMs()) : "";
  if (tenant.store) tenant.store->Remove(stored.empty() ? id : stored);
  if (!id.empty() || stored.empty()) {
    QKV_RETURN_IF_ERROR(tenant.registry.Remove(id_or_name));
  } else {
    Emit(EventLine({Event::Kind::kRemoved, stored, "", 0}, NowUnixMs(), 0, tenant.name));
  }
  KillPoint("broker.removed");
  return {};
}

BrokerReply BrokerServer::Impl::List(const Tenant& tenant, std::string_view after_id) const {
  constexpr size_t kRoomForTheRest = 256;
  constexpr size_t kMoreThanOneMessageHolds = 4096;  // a context takes more than 16 bytes
  BrokerReply reply;
  auto* listed = reply.mutable_listed();
  listed->set_used_bytes(tenant.registry.used_bytes());
  listed->set_budget_bytes(tenant.registry.limits().budget_bytes);
  listed->set_generation(generation);
  // Sums over all tenants are nobody's business but the operator's.
  if (options.tenants.empty()) ToWire(metrics->totals(), listed->mutable_totals());
  std::map<std::string_view, std::vector<int64_t>> holders;  // of each context, every process once
  tenant.registry.ForEachLease([&](ClientId client, const std::string& id) {
    std::vector<int64_t>& pids = holders[id];
    const int64_t pid = clients.at(client).peer.pid;
    if (pids.size() < kMaxListedHolders && std::find(pids.begin(), pids.end(), pid) == pids.end()) pids.push_back(pid);
  });
  std::vector<ContextInfo> stored;
  if (tenant.store) {
    listed->set_stored_bytes(tenant.store->used_bytes());
    listed->set_store_budget_bytes(tenant.store->budget_bytes());
    stored = tenant.store->InfosAfter(after_id, kMoreThanOneMessageHolds);
  }
  size_t bytes = kRoomForTheRest;
  const auto add = [&](const ContextInfo& info, bool is_stored) {
    BrokerReply::Context context;
    ToWire(info, &context);
    context.set_stored(is_stored);
    if (const auto held = holders.find(info.id); held != holders.end()) {
      context.mutable_holders()->Add(held->second.begin(), held->second.end());
    }
    bytes += context.ByteSizeLong() + 8;
    listed->set_more(bytes > kMaxMessageBytes);
    if (!listed->more()) *listed->add_contexts() = std::move(context);
    return !listed->more();
  };
  // Both are in order of id.
  auto next = stored.begin();
  bool going_on = true;
  tenant.registry.ForEachAfter(after_id, [&](const ContextInfo& info) {
    while (going_on && next != stored.end() && next->id < info.id) going_on = add(*next++, true);
    const bool both = next != stored.end() && next->id == info.id;
    if (going_on) going_on = add(info, both);
    if (both) ++next;
    return going_on;
  });
  while (going_on && next != stored.end()) going_on = add(*next++, true);
  return reply;
}

void BrokerServer::Impl::Emit(const std::string& line) {
  if (options.on_event) options.on_event(line);
}

void BrokerServer::Impl::EmitEvents(int64_t pid) {
  bool any = false;
  for (const auto& tenant : tenants) {
    for (const Event& event : tenant->registry.TakeEvents()) {
      any = true;
      metrics->Count(event.kind);
      if (event.kind == Event::Kind::kExpired && tenant->store) tenant->store->Remove(event.id);
      Emit(EventLine(event, NowUnixMs(), pid, tenant->name));
    }
  }
  if (any) ShowPool();
}

void BrokerServer::Impl::ShowPool() {
  BrokerMetrics::Pool pool{.budget_bytes = options.budget_bytes, .clients = clients.size()};
  for (const auto& tenant : tenants) {
    tenant->registry.ForEachLease([&](ClientId, const std::string&) { ++pool.leases; });
    pool.bytes += tenant->registry.used_bytes();
    pool.contexts += tenant->registry.n_contexts();
  }
  metrics->SetPool(pool);
}

void BrokerServer::Impl::TakeReport(const Client& client, const TurnReport& report) {
  metrics->Count(report);
  Emit(HandoffLine(report, NowUnixMs(), client.peer.pid, client.tenant->name));
}

void BrokerServer::Impl::HeedStores() {
  using Kind = ContextStore::Outcome::Kind;
  for (const auto& tenant : tenants) {
    if (!tenant->store) continue;
    for (const ContextStore::Outcome& outcome : tenant->store->TakeOutcomes()) {
      tenant->registry.Hold(outcome.id, false);
      if (outcome.kind == Kind::kEvicted || outcome.kind == Kind::kDamaged) tenant->registry.ForgetFromDisk(outcome.id);
      Emit(StoreLine(outcome, NowUnixMs(), tenant->name));
    }
  }
  EmitEvents(0);
}

void BrokerServer::Impl::EmitRefusal(const Client& client, const BrokerRequest& request, const Error& error) {
  metrics->CountRefusal(error.reason);
  Emit(RefusalLine(RequestName(request), error, NowUnixMs(), client.peer.pid,
                   client.tenant == nullptr ? "" : client.tenant->name));
}

Result<std::unique_ptr<BrokerServer>> BrokerServer::Start(BrokerOptions options) {
  uint64_t generation = 0;
  if (::getrandom(&generation, sizeof(generation), 0) != sizeof(generation)) return ErrnoError("getrandom");
  Fd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), stored(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid() || !stored.valid()) return ErrnoError("create eventfd");
  QKV_ASSIGN_OR_RETURN(Listener listener, ListenAt(options.socket_path, !options.allowed_uids.empty()));
  auto impl =
      std::make_unique<Impl>(std::move(options), std::move(listener), std::move(wake), std::move(stored), generation);
  QKV_RETURN_IF_ERROR(impl->MakeTenants());
  impl->ShowPool();
  // Signals are the business of the program around us: the thread starts, and stays, with all of them blocked.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  Status started;
  try {
    impl->thread = std::thread([raw = impl.get()] { raw->Run(); });
  } catch (const std::system_error& error) {
    started = Err(Code::kExhausted, "start the broker's thread: {}", error.what());
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  QKV_RETURN_IF_ERROR(started);
  return std::unique_ptr<BrokerServer>(new BrokerServer(std::move(impl)));
}

BrokerServer::BrokerServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

BrokerServer::~BrokerServer() {
  const uint64_t one = 1;
  QKV_CHECK(::write(impl_->wake.get(), &one, sizeof(one)) == sizeof(one));
  impl_->thread.join();
}

const std::string& BrokerServer::socket_path() const {
  return impl_->options.socket_path;
}

std::shared_ptr<const BrokerMetrics> BrokerServer::metrics() const {
  return impl_->metrics;
}

std::string DefaultSocketPath() {
  if (const char* path = std::getenv("QKVSHARE_SOCKET"); path != nullptr && *path != '\0') return path;
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime != '\0') {
    return std::string(runtime) + "/qkvshare/broker.sock";
  }
  std::error_code error;
  const auto temporary = std::filesystem::temp_directory_path(error);
  return fmt::format("{}/qkvshare-{}/broker.sock", error ? "/tmp" : temporary.string(), ::geteuid());
}

}  // namespace qkv
