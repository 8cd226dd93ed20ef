// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace qkv {
namespace {

constexpr int kBacklog = 64;

tl::unexpected<Error> Lost(std::string_view what) {
  return Err(Code::kPeerLost, Reason::kPeerLost, "{}: the other side hung up", what);
}

// Waits until the socket is ready for `events`, or has failed (the caller's next call then says how).
Status WaitFor(const Fd& socket, short events, Deadline deadline, std::string_view what) {
  while (deadline != kDontWait) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    if (left <= 0) break;
    pollfd entry{socket.get(), events, 0};
    const int n = ::poll(&entry, 1, static_cast<int>(std::min<int64_t>(left, 60'000)));
    if (n > 0) return {};
    if (n < 0 && errno != EINTR) return ErrnoError(what);
  }
  return Err(Code::kTimeout, "{}: the deadline passed", what);
}

struct Address {
  sockaddr_un un{};
  socklen_t bytes = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&un); }
};

Result<Address> AddressOf(const std::string& path) {
  Address address;
  // One byte is kept for the terminating NUL, so that other programs can read the path back.
  if (path.empty() || path.size() >= sizeof(address.un.sun_path) || path.find('\0') != std::string::npos) {
    return Err(Code::kInvalidArgument, "socket path '{}' has {} bytes, expected 1 to {} without NUL", path.c_str(),
               path.size(), sizeof(address.un.sun_path) - 1);
  }
  address.un.sun_family = AF_UNIX;
  std::memcpy(address.un.sun_path, path.data(), path.size());
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
  return address;
}

Result<Fd> NewSocket(int flags) {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!socket.valid()) return ErrnoError("create socket");
  return socket;
}

// Whether somebody accepts connections at an existing socket file, of whatever type of socket.
Result<bool> SomebodyListens(const Address& address) {
  QKV_ASSIGN_OR_RETURN(const Fd probe, NewSocket(SOCK_NONBLOCK));
  if (::connect(probe.get(), address.get(), address.bytes) == 0) return true;
  if (errno == ECONNREFUSED || errno == ENOENT) return false;
  if (errno == EAGAIN || errno == EPROTOTYPE) return true;  // its queue is full, or it is not even a broker's
  return ErrnoError(fmt::format("look who listens at '{}'", address.un.sun_path));
}

Status MakeDirectoryOf(const std::string& path, mode_t mode) {
  std::string directory = std::filesystem::path(path).parent_path().string();
  if (directory.empty()) directory = ".";
  const bool made = ::mkdir(directory.c_str(), mode) == 0;
  const int saved = errno;
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0) {  // it may be there, above EROFS or EACCES
    errno = saved;
    return ErrnoError(fmt::format("make directory '{}' for the broker's socket", directory));
  }
  const bool ours = info.st_uid == ::geteuid() || info.st_uid == 0;
  const bool others_can_replace = (info.st_mode & 0022) != 0 && (info.st_mode & S_ISVTX) == 0;
  if (S_ISDIR(info.st_mode) && (!ours || others_can_replace)) {
    return Err(Code::kDenied, Reason::kDenied,
               "directory '{}' of the broker's socket belongs to user {} with mode {:04o}: others could put their own "
               "socket there",
               directory, info.st_uid, info.st_mode & 07777);
  }
  // The umask may have taken something away.
  if (made && ::chmod(directory.c_str(), mode) != 0) return ErrnoError(fmt::format("set mode of '{}'", directory));
  return {};
}

Status RemoveStaleSocket(const std::string& path, const Address& address) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return {};
    return ErrnoError(fmt::format("look at '{}'", path));
  }
  if (!S_ISSOCK(info.st_mode)) return Err(Code::kInvalidArgument, "'{}' exists and is not a socket", path);
  QKV_ASSIGN_OR_RETURN(const bool in_use, SomebodyListens(address));
  if (in_use) return Err(Code::kInvalidArgument, "'{}' is in use by another program", path);
  if (::unlink(path.c_str()) != 0) return ErrnoError(fmt::format("remove stale socket '{}'", path));
  return {};
}

}  // namespace

Status SendMessage(const Fd& socket, std::string_view bytes, std::span<const int> fds, Deadline deadline) {
  if (bytes.empty() || bytes.size() > kMaxMessageBytes) {
    return Err(Code::kInvalidArgument, "send: message of {} bytes, expected 1 to {}", bytes.size(), kMaxMessageBytes);
  }
  if (fds.size() > kMaxDescriptorsPerMessage) {
    return Err(Code::kInvalidArgument, "send: {} descriptors, expected at most {}", fds.size(),
               kMaxDescriptorsPerMessage);
  }
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMaxDescriptorsPerMessage)> control{};
  if (!fds.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
  }
  for (;;) {
    if (::sendmsg(socket.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return {};
    switch (errno) {
      case EINTR: continue;
      case EAGAIN: QKV_RETURN_IF_ERROR(WaitFor(socket, POLLOUT, deadline, "send")); continue;
      case EPIPE:
      case ECONNRESET:
      case ENOTCONN: return Lost("send");
      case ETOOMANYREFS:
        return Err(Code::kExhausted, Reason::kPoolFull, "send: too many descriptors of this user are in flight");
      default: return ErrnoError("send");
    }
  }
}

Result<Datagram> ReceiveMessage(const Fd& socket, Deadline deadline) {
  Datagram message;
  message.bytes.resize(kMaxMessageBytes);
  iovec part{message.bytes.data(), message.bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMaxDescriptorsPerMessage)> control;
  msghdr header{};
  ssize_t n = 0;
  bool reset_seen = false;
  for (;;) {
    header = {};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    n = ::recvmsg(socket.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (n >= 0) break;
    switch (errno) {
      case EINTR: continue;
      case EAGAIN: QKV_RETURN_IF_ERROR(WaitFor(socket, POLLIN, deadline, "receive")); continue;
      case ECONNRESET:
        // Said once, before messages that the peer sent before it went away (such as why it did).
        if (std::exchange(reset_seen, true)) return Lost("receive");
        continue;
      default: return ErrnoError("receive");
    }
  }
  // Take hold of the descriptors before anything can return: also of a message that turns out to be unusable.
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= c->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + at, sizeof(fd));
      message.fds.emplace_back(fd);
    }
  }
  if (n == 0) return Lost("receive");
  if ((header.msg_flags & MSG_TRUNC) != 0) {
    return Err(Code::kInvalidArgument, "receive: message longer than {} bytes", kMaxMessageBytes);
  }
  // The buffer has room for as many descriptors as the kernel ever sends, so it is our own limit that cut them off.
  if ((header.msg_flags & MSG_CTRUNC) != 0) {
    return Err(Code::kExhausted, Reason::kPoolFull, "receive: this process may not open that many descriptors");
  }
  message.bytes.resize(static_cast<size_t>(n));
  return message;
}

Result<Fd> ConnectSocket(const std::string& path, Deadline deadline) {
  QKV_ASSIGN_OR_RETURN(const Address address, AddressOf(path));
  QKV_ASSIGN_OR_RETURN(Fd socket, NewSocket(0));
  // A full queue cannot be polled for; a blocking connect waits for it, and no longer than the send timeout (0 would
  // be forever).
  const auto left = std::chrono::ceil<std::chrono::microseconds>(deadline - std::chrono::steady_clock::now());
  const int64_t wait_us = deadline == kDontWait ? 1 : std::max<int64_t>(left.count(), 1);
  const timeval timeout{wait_us / 1'000'000, wait_us % 1'000'000};
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) != 0) {
    return ErrnoError("set socket timeout");
  }
  while (::connect(socket.get(), address.get(), address.bytes) != 0) {
    if (errno == EINTR) continue;
    switch (errno) {
      case ENOENT:
      case ECONNREFUSED: return Err(Code::kPeerLost, Reason::kPeerLost, "no broker listens at '{}'", path);
      case EAGAIN: return Err(Code::kTimeout, "connect to the broker at '{}': the deadline passed", path);
      case EPROTOTYPE: return Err(Code::kInvalidArgument, "the socket '{}' is not a broker's", path);
      default: return ErrnoError(fmt::format("connect to the broker at '{}'", path));
    }
  }
  const int flags = ::fcntl(socket.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK) != 0) return ErrnoError("set non-blocking");
  return socket;
}

Result<Listener> ListenAt(const std::string& path, bool for_others) {
  QKV_ASSIGN_OR_RETURN(const Address address, AddressOf(path));
  QKV_RETURN_IF_ERROR(MakeDirectoryOf(path, for_others ? 0711 : 0700));
  Listener listener;
  const std::string lock_path = path + ".lock";
  listener.lock = Fd(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!listener.lock.valid()) return ErrnoError(fmt::format("open '{}'", lock_path));
  while (::flock(listener.lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno == EWOULDBLOCK) return Err(Code::kInvalidArgument, "'{}' is in use by another broker", path);
    return ErrnoError(fmt::format("lock '{}'", lock_path));
  }
  QKV_RETURN_IF_ERROR(RemoveStaleSocket(path, address));
  QKV_ASSIGN_OR_RETURN(listener.socket, NewSocket(SOCK_NONBLOCK));
  // Nobody can connect between bind and listen, so the mode is right before it matters.
  if (::bind(listener.socket.get(), address.get(), address.bytes) != 0) {
    return ErrnoError(fmt::format("bind the broker's socket '{}'", path));
  }
  if (::chmod(path.c_str(), for_others ? 0666 : 0600) != 0 || ::listen(listener.socket.get(), kBacklog) != 0) {
    auto error = ErrnoError(fmt::format("listen at '{}'", path));
    ::unlink(path.c_str());
    return error;
  }
  return listener;
}

Result<Peer> PeerOf(const Fd& socket) {
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) {
    return ErrnoError("ask who the peer is");
  }
  return Peer{credentials.pid, credentials.uid};
}

bool IsTrusted(const Peer& peer, std::span<const uid_t> others) {
  return peer.uid == ::geteuid() || peer.uid == 0 || std::ranges::find(others, peer.uid) != others.end();
}

}  // namespace qkv
