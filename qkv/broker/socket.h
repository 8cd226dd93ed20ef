// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Messages with descriptors over SOCK_SEQPACKET Unix sockets, and how such sockets are made. Stateless; one thread at a
// time may send on a socket, and one may receive. Nothing here raises SIGPIPE, blocks past its deadline, or loses track
// of a descriptor: what arrives is owned by the Datagram or closed.

#include <sys/types.h>

#include <chrono>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/base/fd.h"

namespace qkv {

inline constexpr size_t kMaxMessageBytes = size_t{64} << 10;
inline constexpr size_t kMaxDescriptorsPerMessage = 253;  // the kernel's SCM_MAX_FD

using Deadline = std::chrono::steady_clock::time_point;
inline constexpr Deadline kDontWait = Deadline::min();  // try once; kTimeout if it would block

struct Datagram {
  std::string bytes;
  std::vector<Fd> fds;  // close-on-exec
};

// All or nothing. Errors: kPeerLost; kTimeout; kInvalidArgument for an empty message or one over the limits;
// kExhausted/pool_full when the kernel holds too many descriptors in flight. After all but kPeerLost the socket is as
// it was before.
Status SendMessage(const Fd& socket, std::string_view bytes, std::span<const int> fds, Deadline deadline);

// Errors: kPeerLost (hang-up; an empty message counts as one); kTimeout; kInvalidArgument when the message was longer
// than kMaxMessageBytes; kExhausted/pool_full when this process may not open all the descriptors that came. In the
// last two cases the message is gone, its descriptors are closed and the next one can be received.
Result<Datagram> ReceiveMessage(const Fd& socket, Deadline deadline);

// Sockets that are returned are non-blocking and close-on-exec.

// Errors: kPeerLost when nobody listens at `path`, kDenied when it is not ours to use, kInvalidArgument when no socket
// can have that path, kTimeout.
Result<Fd> ConnectSocket(const std::string& path, Deadline deadline);

// A listening socket at a path that this process owns for as long as it holds `lock`.
struct Listener {
  Fd lock;  // declared first: released last
  Fd socket;
};

// Makes the directory (mode 0700, one level) if it is missing, replaces a socket that nobody listens on, makes the
// socket with mode 0600; with `for_others`, 0711 and 0666, because who may connect is then decided user by user. A
// directory in which somebody else could put another socket in this one's place is refused. Two brokers that start at once on one path cannot both succeed, and neither can take the
// other's socket: whoever holds the flock on "<path>.lock" owns the path. Looking whether somebody answers and then
// unlinking would leave a gap in which a second broker removes the first one's fresh socket. The kernel drops the lock
// when its holder dies. The lock file stays behind on purpose: removing it would let two brokers lock two different
// files of that name.
// Errors: kInvalidArgument (in use, not a socket, path too long), kDenied, kNotFound, kIo.
Result<Listener> ListenAt(const std::string& path, bool for_others = false);

struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
};
// Of the process that connected (for an accepted socket) or that listens (for a connected one), as the kernel saw it.
Result<Peer> PeerOf(const Fd& socket);

// Whether we deal with that user at all: our own, root, or one of these.
bool IsTrusted(const Peer& peer, std::span<const uid_t> others = {});

}  // namespace qkv
