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
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "qkv/broker/admit.h"
#include "qkv/broker/event_line.h"
#include "qkv/broker/protocol.h"
#include "qkv/broker/registry.h"
#include "qkv/broker/socket.h"

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

struct Client {
  Fd socket;
  Peer peer;
  std::optional<Upload> upload;
};

struct Answer {
  BrokerReply reply;
  std::vector<int> fds;  // the registry's
  uint64_t lease = 0;    // made for this answer
};

}  // namespace

struct BrokerServer::Impl {
  Impl(BrokerOptions o, Listener l, Fd w, uint64_t g)
      : options(std::move(o)),
        listener(std::move(l)),
        wake(std::move(w)),
        generation(g),
        registry({.budget_bytes = options.budget_bytes, .max_files = MaxFiles()}) {}
  ~Impl() { ::unlink(options.socket_path.c_str()); }  // while the lock is ours

  void Run();
  bool Accept();  // false: the system is out of descriptors
  void Serve(ClientId id);
  void Drop(ClientId id);
  Result<Answer> Handle(ClientId id, Client& client, BrokerRequest& request, std::vector<Fd> fds);
  Result<Answer> HandlePublish(Client& client, const BrokerRequest& request, std::vector<Fd> fds);
  Status Publish(const Client& client, const Upload& upload);
  Result<Answer> HandleAttach(ClientId id, const std::string& id_or_name);
  BrokerReply List(std::string_view after_id) const;
  void TakeReport(const Client& client, const TurnReport& report);
  void ShowPool();
  Status AppendFiles(ClientId id, uint64_t lease, size_t first, Answer* answer, size_t* total) const;
  Status Send(const Client& client, const BrokerReply& reply, std::span<const int> fds);
  void EmitEvents(int64_t pid);
  void EmitRefusal(const Client& client, const BrokerRequest& request, const Error& error);
  int PollMs(bool accept_paused) const;

  const BrokerOptions options;
  Listener listener;
  Fd wake;
  const uint64_t generation;
  const std::shared_ptr<BrokerMetrics> metrics =
      options.metrics != nullptr ? options.metrics : std::make_shared<BrokerMetrics>();
  std::thread thread;
  // From here on: only that thread's.
  Registry registry;
  std::map<ClientId, Client> clients;
  ClientId last_client = 0;
};

int BrokerServer::Impl::PollMs(bool accept_paused) const {
  if (accept_paused) return kAcceptPauseMs;
  const int64_t next = registry.NextExpiryUnixMs();
  if (next == 0) return -1;
  return static_cast<int>(std::clamp<int64_t>(next - NowUnixMs(), 0, kMaxPollMs));
}

void BrokerServer::Impl::Run() {
  std::vector<pollfd> polled;
  std::vector<ClientId> ids;
  bool accept_paused = false;
  for (;;) {
    polled = {{wake.get(), POLLIN, 0}, {accept_paused ? -1 : listener.socket.get(), POLLIN, 0}};
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
    registry.Expire(NowUnixMs());
    EmitEvents(0);
    // One request of each client per round: none can starve the others.
    for (size_t i = 0; i < ids.size(); ++i) {
      if (polled[i + 2].revents != 0) Serve(ids[i]);
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
  clients.erase(it);
  registry.ReleaseAllOf(id);
  EmitEvents(pid);
  ShowPool();
}

Status BrokerServer::Impl::Send(const Client& client, const BrokerReply& reply, std::span<const int> fds) {
  return SendMessage(client.socket, reply.SerializeAsString(), fds, kDontWait);
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
  BrokerRequest request;
  const auto answer = [&]() -> Result<Answer> {
    if (!message) return tl::unexpected(message.error());
    if (!IsTrusted(client.peer)) {
      return Err(Code::kDenied, Reason::kDenied, "the broker belongs to user {}, not to {}", ::geteuid(),
                 client.peer.uid);
    }
    QKV_ASSIGN_OR_RETURN(request, DecodeRequest(message->bytes, message->fds.size()));
    return Handle(id, client, request, std::move(message->fds));
  }();
  std::optional<Error> refusal;
  if (!answer) refusal = answer.error();
  Status sent;
  if (answer) sent = Send(client, answer->reply, answer->fds);
  if (answer && !sent && sent.error().code == Code::kExhausted) {  // the kernel would not take the descriptors
    if (answer->lease != 0) (void)registry.Release(id, answer->lease);
    refusal = sent.error();
  }
  if (refusal) {
    client.upload.reset();
    sent = Send(client, FailureReply(*refusal), {});
  }
  EmitEvents(client.peer.pid);
  if (refusal) EmitRefusal(client, request, *refusal);
  if (!sent) Drop(id);
}

Result<Answer> BrokerServer::Impl::Handle(ClientId id, Client& client, BrokerRequest& request, std::vector<Fd> fds) {
  if (!request.has_more_descriptors()) client.upload.reset();
  Answer answer;
  switch (request.body_case()) {
    case BrokerRequest::kPublish:
    case BrokerRequest::kMoreDescriptors: return HandlePublish(client, request, std::move(fds));
    case BrokerRequest::kAttach: return HandleAttach(id, request.attach().id_or_name());
    case BrokerRequest::kFetchDescriptors: {
      const auto& fetch = request.fetch_descriptors();
      size_t total = 0;
      QKV_RETURN_IF_ERROR(AppendFiles(id, fetch.lease(), fetch.first(), &answer, &total));
      if (answer.fds.empty()) {
        return Err(Code::kInvalidArgument, "lease {} has {} descriptors, none from {} on", fetch.lease(), total,
                   fetch.first());
      }
      break;
    }
    case BrokerRequest::kReleaseLease:
      QKV_RETURN_IF_ERROR(registry.Release(id, request.release_lease().lease()));
      break;
    case BrokerRequest::kRemove: QKV_RETURN_IF_ERROR(registry.Remove(request.remove().id_or_name())); break;
    case BrokerRequest::kList: answer.reply = List(request.list().after_id()); return answer;
    case BrokerRequest::kReport: TakeReport(client, FromWire(request.report())); break;
    case BrokerRequest::kHello:
    case BrokerRequest::BODY_NOT_SET: break;
  }
  answer.reply.mutable_done();
  return answer;
}

Result<Answer> BrokerServer::Impl::HandlePublish(Client& client, const BrokerRequest& request, std::vector<Fd> fds) {
  if (request.has_publish()) {
    // Descriptors of unfinished uploads are bounded together, by what all contexts may take.
    size_t announced = request.publish().n_descriptors();
    for (const auto& [id, other] : clients) announced += other.upload ? other.upload->publish.n_descriptors() : 0;
    if (announced > registry.limits().max_files) {
      return Err(Code::kExhausted, Reason::kPoolFull,
                 "publish: {} descriptors on their way to the broker, expected at most {}", announced,
                 registry.limits().max_files);
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
  QKV_ASSIGN_OR_RETURN(AdmittedContext admitted, AdmitContext(upload.fds));
  ContextInfo& info = admitted.context.info;
  const int64_t now = NowUnixMs();
  if (const StoredFile* known = registry.CardOf(info.id)) {
    QKV_ASSIGN_OR_RETURN(const auto known_bytes, ReadFile(*known->fd, known->bytes));
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
  return registry.Publish(std::move(admitted.context), now);
}

Result<Answer> BrokerServer::Impl::HandleAttach(ClientId id, const std::string& id_or_name) {
  QKV_ASSIGN_OR_RETURN(const Registry::Grant grant, registry.Attach(id, id_or_name, NowUnixMs()));
  Answer answer;
  answer.lease = grant.lease;
  size_t total = 0;
  QKV_RETURN_IF_ERROR(AppendFiles(id, grant.lease, 0, &answer, &total));
  auto* attached = answer.reply.mutable_attached();
  attached->set_id(grant.id);
  attached->set_lease(grant.lease);
  attached->set_n_descriptors(static_cast<uint32_t>(total));
  return answer;
}

Status BrokerServer::Impl::AppendFiles(ClientId id, uint64_t lease, size_t first, Answer* answer, size_t* total) const {
  QKV_ASSIGN_OR_RETURN(const auto files, registry.FilesOf(id, lease));
  *total = files.size();
  const size_t end = std::min(files.size(), first + kMaxDescriptorsPerMessage);
  for (size_t i = first; i < end; ++i) answer->fds.push_back(files[i].fd->get());
  return {};
}

BrokerReply BrokerServer::Impl::List(std::string_view after_id) const {
  constexpr size_t kRoomForTheRest = 256;
  BrokerReply reply;
  auto* listed = reply.mutable_listed();
  listed->set_used_bytes(registry.used_bytes());
  listed->set_budget_bytes(options.budget_bytes);
  listed->set_generation(generation);
  ToWire(metrics->totals(), listed->mutable_totals());
  std::map<std::string_view, std::vector<int64_t>> holders;  // of each context, every process once
  registry.ForEachLease([&](ClientId client, const std::string& id) {
    std::vector<int64_t>& pids = holders[id];
    const int64_t pid = clients.at(client).peer.pid;
    if (pids.size() < kMaxListedHolders && std::find(pids.begin(), pids.end(), pid) == pids.end()) pids.push_back(pid);
  });
  size_t bytes = kRoomForTheRest;
  registry.ForEachAfter(after_id, [&](const ContextInfo& info) {
    BrokerReply::Context context;
    ToWire(info, &context);
    if (const auto held = holders.find(info.id); held != holders.end()) {
      context.mutable_holders()->Add(held->second.begin(), held->second.end());
    }
    bytes += context.ByteSizeLong() + 8;
    listed->set_more(bytes > kMaxMessageBytes);
    if (listed->more()) return false;
    *listed->add_contexts() = std::move(context);
    return true;
  });
  return reply;
}

void BrokerServer::Impl::EmitEvents(int64_t pid) {
  const std::vector<Event> events = registry.TakeEvents();
  for (const Event& event : events) {
    metrics->Count(event.kind);
    if (options.on_event) options.on_event(EventLine(event, NowUnixMs(), pid));
  }
  if (!events.empty()) ShowPool();
}

void BrokerServer::Impl::ShowPool() {
  uint64_t leases = 0;
  registry.ForEachLease([&](ClientId, const std::string&) { ++leases; });
  metrics->SetPool({.bytes = registry.used_bytes(),
                    .budget_bytes = options.budget_bytes,
                    .contexts = registry.n_contexts(),
                    .leases = leases,
                    .clients = clients.size()});
}

void BrokerServer::Impl::TakeReport(const Client& client, const TurnReport& report) {
  metrics->Count(report);
  if (options.on_event) options.on_event(HandoffLine(report, NowUnixMs(), client.peer.pid));
}

void BrokerServer::Impl::EmitRefusal(const Client& client, const BrokerRequest& request, const Error& error) {
  metrics->CountRefusal(error.reason);
  if (options.on_event) options.on_event(RefusalLine(RequestName(request), error, NowUnixMs(), client.peer.pid));
}

Result<std::unique_ptr<BrokerServer>> BrokerServer::Start(BrokerOptions options) {
  uint64_t generation = 0;
  if (::getrandom(&generation, sizeof(generation), 0) != sizeof(generation)) return ErrnoError("getrandom");
  Fd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return ErrnoError("create eventfd");
  QKV_ASSIGN_OR_RETURN(Listener listener, ListenAt(options.socket_path));
  auto impl = std::make_unique<Impl>(std::move(options), std::move(listener), std::move(wake), generation);
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
