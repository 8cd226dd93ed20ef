// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A client's connection to a broker (docs/PROTOCOL.md). Every call has a deadline and returns an error instead of
// hanging. Descriptors received are read-only, close-on-exec and owned by the caller: what was attached stays usable
// when the broker, the producer or this connection goes away.
//
// One thread at a time may use a client. A client's leases end with its connection, which does not survive a call that
// fails with kPeerLost, kTimeout or a reply that cannot be used: later calls fail with kPeerLost. No call raises
// SIGPIPE.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "qkv/base/fd.h"
#include "qkv/segment/cipher.h"

namespace qkv {

struct ContextInfo {
  std::string id;
  std::string name;
  std::string model;  // the card's model name
  std::string kv;     // codec pair of the first page, e.g. "i8", as the card says; may be empty
  uint64_t n_tokens = 0;
  uint64_t bytes = 0;        // of the segments this context holds, shared ones included
  int64_t producer_pid = 0;  // of the process that published it, as the kernel saw it
  int64_t created_unix_ms = 0;
  int64_t expires_unix_ms = 0;  // 0: never
  bool pinned = false;
  uint32_t n_leases = 0;
  uint64_t n_attached = 0;       // so far
  std::vector<int64_t> holders;  // processes with leases; the first few of them
  bool in_memory = false;        // else its segments are files in the broker's directory
  bool stored = false;           // they are (as well) in the broker's directory
  bool encrypted = false;
};

struct BrokerTotals {  // since the broker started
  uint64_t published = 0;
  uint64_t attached = 0;
  uint64_t evicted = 0;
  uint64_t expired = 0;
  uint64_t refused = 0;
  // As clients report them.
  uint64_t fallbacks = 0;
  uint64_t checksum_failures = 0;
  uint64_t tokens_reused = 0;
  uint64_t tokens_recomputed = 0;
};

struct BrokerStatus {
  std::vector<ContextInfo> contexts;
  uint64_t used_bytes = 0;  // every segment and card once, however many contexts share it
  uint64_t budget_bytes = 0;
  uint64_t generation = 0;          // random, new at every start of a broker
  uint64_t stored_bytes = 0;        // of disk
  uint64_t store_budget_bytes = 0;  // 0: no disk tier
  BrokerTotals totals;
};

// How a turn went, for the broker's counters and its log.
struct TurnReport {
  std::string context;            // id or name that it was to go on from; empty: none
  std::string mode = "none";      // "attach", "copy", "splice", "text", "none"
  Reason reason = Reason::kNone;  // why neither "attach" nor "copy"
  bool failed = false;            // the turn ended there
  uint64_t bytes_copied = 0;      // "copy": of segments
  uint64_t tokens_reused = 0;
  uint64_t tokens_recomputed = 0;
  double attach_seconds = 0;  // 0: did not happen, as below
  double publish_seconds = 0;
  double ttft_seconds = 0;
  std::string model;  // the client's, and the codec pair of the pages that it writes: labels of the counters
  std::string kv;
  // Keys that attention saw in pages with a refinement plane, and how many of them it refined.
  uint64_t keys_with_refinement = 0;
  uint64_t keys_refined = 0;
  double kv_bits_read = 0;  // of the pages, per value, on average; 0: no pages, or not said
};

struct AttachedContext {
  std::string id;
  uint64_t lease = 0;
  Fd card;
  std::vector<Fd> segments;              // in the card's order
  bool on_disk = false;                  // segments may be read-only files of the broker, which are not sealed
  std::shared_ptr<const SecretKey> key;  // of an encrypted context
};

struct PublishOptions {
  std::chrono::milliseconds ttl{0};           // 0: until removed or evicted; the card's own expiry counts as well
  bool pin = false;                           // never evicted to make room
  std::shared_ptr<const SecretKey> key = {};  // card and segments are encrypted with it
};

struct ConnectOptions {
  std::chrono::milliseconds deadline = std::chrono::seconds(5);  // of connecting and of every later call, each
  std::string token;                                             // where the broker has tenants
  std::vector<uint32_t> broker_uids;                             // users whose broker is as good as our own
};

class BrokerClient {
 public:
  // Errors: kPeerLost (nobody listens there), kDenied (it is not our user's, nor root's, or we are not its; the token is
  // no tenant's), kTimeout, kExhausted/pool_full (too many clients), kIncompatible/version, kInvalidArgument (no socket
  // can have that path; a token for a broker without tenants).
  static Result<std::unique_ptr<BrokerClient>> Connect(const std::string& socket_path, ConnectOptions options = {});
  static Result<std::unique_ptr<BrokerClient>> Connect(const std::string& socket_path,
                                                       std::chrono::milliseconds deadline) {
    return Connect(socket_path, ConnectOptions{.deadline = deadline});
  }
  ~BrokerClient();
  BrokerClient(const BrokerClient&) = delete;
  BrokerClient& operator=(const BrokerClient&) = delete;

  // The broker keeps its own duplicates; id and name are read from the card. A context of that id is replaced only by
  // the same bytes (so a client may re-announce); a name that another context holds moves to this one, and the other
  // can still be had by its id. Errors: kExhausted/pool_full, kInvalidArgument, kDenied/denied (a descriptor is not a
  // sealed memory file), what ParseCard says, kIncompatible/expired, kPeerLost, kTimeout.
  Status Publish(const Fd& card, std::span<const Fd* const> segments, const PublishOptions& options = {});

  // By id or, failing that, name. Errors: kNotFound/not_found, kIncompatible/expired, kExhausted/pool_full (too many
  // leases, or open files here), kPeerLost, kTimeout.
  Result<AttachedContext> Attach(const std::string& id_or_name);
  Status ReleaseLease(uint64_t lease);

  // Forgets the context; whoever has it mapped keeps it.
  Status Remove(const std::string& id_or_name);

  Result<BrokerStatus> List();

  // Nothing depends on it: a caller may ignore its error.
  Status Report(const TurnReport& report);

  // True once the broker has hung up or the connection was given up; calls then fail with kPeerLost.
  bool lost() const;

  // A new connection in place of the old one, with the same path, token and deadline. What was attached stays usable;
  // leases are gone, and none of their numbers means anything any more. If generation() is another one afterwards, it is
  // a new broker that knows nothing: announce again what you still hold. Errors: as Connect; the client is lost then.
  Status Reconnect();
  uint64_t generation() const;  // of the broker connected to last
  uint32_t broker_uid() const;  // whose process it is

  // A descriptor to poll: readable means hung up, as long as no call is going on. -1 when lost.
  int poll_fd() const;

 private:
  struct Impl;
  explicit BrokerClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkv
