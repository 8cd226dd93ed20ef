// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/client.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "qkv/base/kill_point.h"
#include "qkv/broker/protocol.h"
#include "qkv/broker/socket.h"

namespace qkv {

struct BrokerClient::Impl {
  struct Answer {
    BrokerReply reply;
    std::vector<Fd> fds;
  };

  // `expected` is the kind of reply that means success.
  Result<Answer> Call(const BrokerRequest& request, std::span<const int> fds, BrokerReply::BodyCase expected,
                      Deadline deadline);
  Result<AttachedContext> ReceiveContext(Answer first, Deadline deadline);
  Deadline NewDeadline() const { return std::chrono::steady_clock::now() + options.deadline; }
  Status Open();

  std::string path;
  ConnectOptions options;
  Fd socket;
  uint64_t generation = 0;
  uint32_t broker_uid = 0;
};

Status BrokerClient::Impl::Open() {
  const Deadline deadline = NewDeadline();
  QKV_ASSIGN_OR_RETURN(socket, ConnectSocket(path, deadline));
  const auto hello = [&]() -> Status {
    QKV_ASSIGN_OR_RETURN(const Peer peer, PeerOf(socket));
    if (!IsTrusted(peer, options.broker_uids)) {
      return Err(Code::kDenied, Reason::kDenied, "the broker at '{}' belongs to user {}, expected {} or root", path,
                 peer.uid, ::geteuid());
    }
    broker_uid = peer.uid;
    BrokerRequest request;
    request.mutable_hello()->set_protocol(kProtocolVersion);
    request.mutable_hello()->set_token(options.token);
    auto answer = Call(request, {}, BrokerReply::kWelcome, deadline);
    Erase(*request.mutable_hello()->mutable_token());
    if (!answer) return Prefixed(fmt::format("broker at '{}'", path), std::move(answer).error());
    generation = answer->reply.welcome().generation();
    return {};
  };
  const Status status = hello();
  if (!status) socket.Reset();
  return status;
}

// An error that the broker replies leaves the connection as it is, and so does a request that could not be sent. When
// no usable reply comes, be it for a timeout, it is closed: a late reply must not be taken for the next call's.
Result<BrokerClient::Impl::Answer> BrokerClient::Impl::Call(const BrokerRequest& request, std::span<const int> fds,
                                                            BrokerReply::BodyCase expected, Deadline deadline) {
  if (!socket.valid()) return Err(Code::kPeerLost, Reason::kPeerLost, "the connection to the broker is gone");
  std::string bytes = request.SerializeAsString();
  KillPoint("client.send");
  const Status sent = SendMessage(socket, bytes, fds, deadline);
  Erase(bytes);  // there may be a token or a key in it
  KillPoint("client.sent");
  if (!sent && sent.error().code != Code::kPeerLost) return tl::unexpected(sent.error());
  // Also when the broker has hung up: it may have said why.
  auto received = ReceiveMessage(socket, sent ? deadline : kDontWait);
  if (!received) {
    socket.Reset();
    return tl::unexpected(sent ? std::move(received).error() : sent.error());
  }
  auto reply = DecodeReply(received->bytes);
  if (reply && reply->has_failure()) return tl::unexpected(ErrorFrom(reply->failure()));
  if (reply && reply->body_case() != expected) {
    reply = Err(Code::kIncompatible, Reason::kVersion, "the broker's reply is of kind {}, expected {}",
                static_cast<int>(reply->body_case()), static_cast<int>(expected));
  }
  if (!reply) {
    socket.Reset();
    return tl::unexpected(std::move(reply).error());
  }
  return Answer{*std::move(reply), std::move(received->fds)};
}

BrokerClient::BrokerClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
BrokerClient::~BrokerClient() = default;

Result<std::unique_ptr<BrokerClient>> BrokerClient::Connect(const std::string& socket_path, ConnectOptions options) {
  auto impl = std::make_unique<Impl>();
  impl->path = socket_path;
  impl->options = std::move(options);
  QKV_RETURN_IF_ERROR(impl->Open());
  return std::unique_ptr<BrokerClient>(new BrokerClient(std::move(impl)));
}

Status BrokerClient::Reconnect() {
  impl_->socket.Reset();
  return impl_->Open();
}

uint64_t BrokerClient::generation() const {
  return impl_->generation;
}

uint32_t BrokerClient::broker_uid() const {
  return impl_->broker_uid;
}

int BrokerClient::poll_fd() const {
  return impl_->socket.get();
}

Status BrokerClient::Publish(const Fd& card, std::span<const Fd* const> segments, const PublishOptions& options) {
  const Deadline deadline = impl_->NewDeadline();
  std::vector<int> fds = {card.get()};
  for (const Fd* segment : segments) fds.push_back(segment == nullptr ? -1 : segment->get());
  if (const auto closed = std::find(fds.begin(), fds.end(), -1); closed != fds.end()) {
    return Err(Code::kInvalidArgument, "publish: descriptor {} of {} is not open", closed - fds.begin(), fds.size());
  }

  BrokerRequest request;
  auto* publish = request.mutable_publish();
  publish->set_n_descriptors(static_cast<uint32_t>(fds.size()));
  publish->set_ttl_ms(options.ttl.count());
  publish->set_pin(options.pin);
  if (options.key != nullptr) publish->set_key(std::string(options.key->bytes()));
  for (std::span<const int> rest = fds; !rest.empty();) {
    const auto part = rest.first(std::min(rest.size(), kMaxDescriptorsPerMessage));
    rest = rest.subspan(part.size());
    const auto answer = impl_->Call(request, part, BrokerReply::kPublished, deadline);
    if (request.has_publish()) Erase(*request.mutable_publish()->mutable_key());
    if (!answer) return tl::unexpected(answer.error());
    request.mutable_more_descriptors();
  }
  return {};
}

Result<AttachedContext> BrokerClient::Attach(const std::string& id_or_name) {
  const Deadline deadline = impl_->NewDeadline();
  BrokerRequest request;
  request.mutable_attach()->set_id_or_name(id_or_name);
  QKV_ASSIGN_OR_RETURN(Impl::Answer answer, impl_->Call(request, {}, BrokerReply::kAttached, deadline));
  KillPoint("attach.received");
  const uint64_t lease = answer.reply.attached().lease();
  auto context = impl_->ReceiveContext(std::move(answer), deadline);
  if (!context) (void)ReleaseLease(lease);
  return context;
}

Result<AttachedContext> BrokerClient::Impl::ReceiveContext(Answer answer, Deadline deadline) {
  AttachedContext context;
  context.id = answer.reply.attached().id();
  context.lease = answer.reply.attached().lease();
  context.on_disk = answer.reply.attached().on_disk();
  if (std::string& key = *answer.reply.mutable_attached()->mutable_key(); !key.empty()) {
    auto secret = SecretKey::From(key);
    Erase(key);
    QKV_RETURN_IF_ERROR(secret);
    context.key = *std::move(secret);
  }
  const size_t total = answer.reply.attached().n_descriptors();
  std::vector<Fd> fds = std::move(answer.fds);
  while (!fds.empty() && fds.size() < total) {
    BrokerRequest request;
    request.mutable_fetch_descriptors()->set_lease(context.lease);
    request.mutable_fetch_descriptors()->set_first(static_cast<uint32_t>(fds.size()));
    QKV_ASSIGN_OR_RETURN(Answer more, Call(request, {}, BrokerReply::kDone, deadline));
    if (more.fds.empty()) break;
    std::move(more.fds.begin(), more.fds.end(), std::back_inserter(fds));
  }
  if (fds.empty() || fds.size() != total) {
    return Err(Code::kIncompatible, Reason::kVersion, "attach: {} descriptors came, the broker announced {}",
               fds.size(), total);
  }
  context.card = std::move(fds.front());
  context.segments.assign(std::make_move_iterator(fds.begin() + 1), std::make_move_iterator(fds.end()));
  return context;
}

Status BrokerClient::ReleaseLease(uint64_t lease) {
  KillPoint("client.release");
  BrokerRequest request;
  request.mutable_release_lease()->set_lease(lease);
  QKV_RETURN_IF_ERROR(impl_->Call(request, {}, BrokerReply::kDone, impl_->NewDeadline()));
  return {};
}

Status BrokerClient::Remove(const std::string& id_or_name) {
  BrokerRequest request;
  request.mutable_remove()->set_id_or_name(id_or_name);
  QKV_RETURN_IF_ERROR(impl_->Call(request, {}, BrokerReply::kDone, impl_->NewDeadline()));
  return {};
}

Result<BrokerStatus> BrokerClient::List() {
  const Deadline deadline = impl_->NewDeadline();
  BrokerStatus status;
  BrokerRequest request;
  request.mutable_list();
  for (bool more = true; more;) {
    QKV_ASSIGN_OR_RETURN(const Impl::Answer answer, impl_->Call(request, {}, BrokerReply::kListed, deadline));
    const auto& listed = answer.reply.listed();
    for (const auto& context : listed.contexts()) status.contexts.push_back(FromWire(context));
    status.used_bytes = listed.used_bytes();
    status.budget_bytes = listed.budget_bytes();
    status.generation = listed.generation();
    status.totals = FromWire(listed.totals());
    status.stored_bytes = listed.stored_bytes();
    status.store_budget_bytes = listed.store_budget_bytes();
    more = listed.more() && !listed.contexts().empty();
    if (more) request.mutable_list()->set_after_id(status.contexts.back().id);
  }
  std::stable_sort(status.contexts.begin(), status.contexts.end(),
                   [](const auto& a, const auto& b) { return a.created_unix_ms < b.created_unix_ms; });
  return status;
}

Status BrokerClient::Report(const TurnReport& report) {
  BrokerRequest request;
  ToWire(report, request.mutable_report());
  QKV_RETURN_IF_ERROR(impl_->Call(request, {}, BrokerReply::kDone, impl_->NewDeadline()));
  return {};
}

bool BrokerClient::lost() const {
  if (!impl_->socket.valid()) return true;
  pollfd entry{impl_->socket.get(), 0, 0};
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLHUP | POLLERR)) != 0;
}

}  // namespace qkv
