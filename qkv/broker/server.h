// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The broker: knows which contexts exist and passes their descriptors on (docs/PROTOCOL.md). Serves a SOCK_SEQPACKET
// Unix socket from one thread of its own, with all signals blocked; embedded in `run`, alone in `qkvshare broker`. It
// answers processes of its own user, and root, only. It holds descriptors and never maps page contents; memory safety
// never depends on it. One thread makes and destroys it.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "qkv/base/error.h"
#include "qkv/broker/metrics.h"

namespace qkv {

struct BrokerOptions {
  std::string socket_path;
  uint64_t budget_bytes = uint64_t{4} << 30;
  size_t max_clients = 256;
  std::shared_ptr<BrokerMetrics> metrics;  // where to count; null: one of its own
  // One line of JSON per life-cycle event (docs/PROTOCOL.md: created, published, attached, released, removed, expired,
  // evicted, refused); called on the broker's thread, which serves nobody meanwhile. Must not throw.
  std::function<void(const std::string& json_line)> on_event;
};

class BrokerServer {
 public:
  // Binds and listens before returning. The socket is made with mode 0600; its directory, if it has to be made, with
  // 0700 (one level). A stale socket that nobody listens on is replaced; one in use is kInvalidArgument ("… is in use
  // by another broker"), also when two start at once. A child that is forked and does not exec keeps the path occupied.
  // Other errors: kInvalidArgument (path too long, or not a socket), kDenied, kNotFound, kExhausted, kIo.
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
