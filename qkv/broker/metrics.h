// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a broker counts, and how Prometheus reads it (docs/PROTOCOL.md §9). What happens in clients (fallbacks, tokens,
// times) comes from their reports. Safe from any thread.

#include <cstdint>
#include <memory>
#include <string>

#include "qkv/base/error.h"
#include "qkv/broker/client.h"
#include "qkv/broker/registry.h"

namespace prometheus {
class Collectable;
}

namespace qkv {

class BrokerMetrics {
 public:
  BrokerMetrics();
  ~BrokerMetrics();
  BrokerMetrics(const BrokerMetrics&) = delete;
  BrokerMetrics& operator=(const BrokerMetrics&) = delete;

  struct Pool {
    uint64_t bytes = 0;
    uint64_t budget_bytes = 0;
    uint64_t contexts = 0;
    uint64_t leases = 0;
    uint64_t clients = 0;
  };
  void SetPool(const Pool& pool);
  void Count(Event::Kind kind);
  void CountRefusal(Reason reason);
  void Count(const TurnReport& report);

  BrokerTotals totals() const;
  std::string Text() const;  // Prometheus' text format
  std::shared_ptr<prometheus::Collectable> collectable() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Serves http://<address>/metrics while it lives, from threads of its own.
class MetricsEndpoint {
 public:
  // `address`: "127.0.0.1:9464" or "[::1]:9464"; port 0 takes a free one. Only loopback: nobody is asked who they are.
  // Errors: kInvalidArgument (no such address, or not loopback), kIo (cannot listen there).
  static Result<std::unique_ptr<MetricsEndpoint>> Start(const std::string& address,
                                                        std::shared_ptr<const BrokerMetrics> metrics);
  ~MetricsEndpoint();

  int port() const;

 private:
  struct Impl;
  explicit MetricsEndpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkv
