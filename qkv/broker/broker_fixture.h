// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For tests: a broker with a socket of its own, and the lines it logs.

#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "qkv/broker/client.h"
#include "qkv/broker/protocol.h"
#include "qkv/broker/server.h"
#include "qkv/broker/test_support.h"

namespace qkv::test {

inline std::unique_ptr<BrokerClient> ConnectTo(const std::string& path) {
  return Take(BrokerClient::Connect(path, kLong));
}

class BrokerTest : public ::testing::Test {
 protected:
  BrokerTest() { Start(); }

  void Start(uint64_t budget_bytes = uint64_t{1} << 30, size_t max_clients = 64) {
    server_.reset();
    server_ = Take(BrokerServer::Start({.socket_path = folder_ / "broker.sock",
                                        .budget_bytes = budget_bytes,
                                        .max_clients = max_clients,
                                        .on_event = [this](const std::string& line) {
                                          const std::lock_guard lock(mutex_);
                                          events_.push_back(line);
                                        }}));
  }

  std::unique_ptr<BrokerClient> Connect() { return ConnectTo(server_->socket_path()); }

  // Sends bytes as they are and returns the reply, or how the broker took it otherwise.
  static Result<BrokerReply> Ask(const Fd& socket, const std::string& bytes, const std::vector<int>& fds = {}) {
    QKV_RETURN_IF_ERROR(SendMessage(socket, bytes, fds, Soon()));
    QKV_ASSIGN_OR_RETURN(const Datagram reply, ReceiveMessage(socket, Soon()));
    return DecodeReply(reply.bytes);
  }
  static std::string OutcomeOf(const Result<BrokerReply>& reply) {
    if (!reply || !reply->has_failure()) return Outcome(reply);
    return Outcome(Status(tl::unexpected(ErrorFrom(reply->failure()))));
  }

  // A connection that the broker has taken up.
  Fd ConnectRaw() {
    Fd socket = Take(ConnectSocket(server_->socket_path(), Soon()));
    BrokerRequest hello;
    hello.mutable_hello()->set_protocol(kProtocolVersion);
    EXPECT_EQ(OutcomeOf(Ask(socket, hello.SerializeAsString())), "ok");
    return socket;
  }

  // The broker closes what it refused on its own thread, perhaps after it has said so.
  static void ExpectOpenDescriptors(size_t expected) {
    EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == expected; }))
        << OpenDescriptors() << " open, expected " << expected;
  }

  ContextInfo Info(BrokerClient& client, const std::string& id) {
    for (const ContextInfo& info : Take(client.List()).contexts) {
      if (info.id == id) return info;
    }
    return {};
  }

  std::vector<std::string> Events() {
    const std::lock_guard lock(mutex_);
    return events_;
  }

  TemporaryFolder folder_;
  std::mutex mutex_;
  std::vector<std::string> events_;
  std::unique_ptr<BrokerServer> server_;
};

}  // namespace qkv::test
