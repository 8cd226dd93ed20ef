// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The broker: knows which contexts exist and passes their descriptors on (docs/PROTOCOL.md). Serves a SOCK_SEQPACKET
// Unix socket from one thread of its own, with all signals blocked; embedded in `run`, alone in `qkvshare broker`. It
// answers processes of its own user, of root, and of users that it was told to. It holds descriptors and never maps page
// contents; memory safety never depends on it. With a directory it keeps what is published there as well, by a second
// thread (store.h). One thread makes and destroys it. Who may trust whom: docs/SECURITY.md.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "qkv/base/error.h"
#include "qkv/broker/metrics.h"
#include "qkv/broker/tenant.h"
#include "qkv/segment/cipher.h"

namespace qkv {

struct BrokerOptions {
  std::string socket_path;
  uint64_t budget_bytes = uint64_t{4} << 30;
  size_t max_clients = 256;
  std::shared_ptr<BrokerMetrics> metrics;  // where to count; null: one of its own
  // One line of JSON per life-cycle event (docs/PROTOCOL.md §8); called on the broker's thread, which serves nobody
  // meanwhile (EventWriter never blocks). Must not throw.
  std::function<void(const std::string& json_line)> on_event;

  std::vector<uint32_t> allowed_uids;  // besides our own and root: the socket is then open to all, and they are let in
  // With tenants, every client needs the token of one, and sees that tenant's contexts only. Each tenant has an equal
  // share of both budgets and of the descriptors, and evicts from its own.
  TenantList tenants;
  std::string store_directory;  // empty: no disk tier
  uint64_t store_budget_bytes = uint64_t{16} << 30;
  // For the keys of encrypted contexts on disk; without it those are kept in memory only.
  std::shared_ptr<const SecretKey> seal_key;
};

class BrokerServer {
 public:
  // Binds and listens before returning. The socket is made with mode 0600; its directory, if it has to be made, with
  // 0700 (one level). A stale socket that nobody listens on is replaced; one in use is kInvalidArgument ("… is in use
  // by another broker"), also when two start at once. A child that is forked and does not exec keeps the path occupied.
  // Other errors: kInvalidArgument (path too long, or not a socket), kDenied, kNotFound, kExhausted, kIo, and what
  // ContextStore::Open says.
  static Result<std::unique_ptr<BrokerServer>> Start(BrokerOptions options);

  // Stops serving, closes all descriptors, removes the socket. Clients see a hang-up.
  ~BrokerServer();
  BrokerServer(const BrokerServer&) = delete;
  BrokerServer& operator=(const BrokerServer&) = delete;

  const std::string& socket_path() const;

  // What this broker counts; lives on after it.
  std::shared_ptr<const BrokerMetrics> metrics() const;

 private:
  struct Impl;
  explicit BrokerServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// $QKVSHARE_SOCKET, else $XDG_RUNTIME_DIR/qkvshare/broker.sock, else a per-user directory under the system's temporary
// directory.
std::string DefaultSocketPath();

}  // namespace qkv
