// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/segment/cipher.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace qkv {
namespace {

static_assert(kSecretKeyBytes == crypto_secretstream_xchacha20poly1305_KEYBYTES);
static_assert(kSecretKeyBytes == crypto_aead_xchacha20poly1305_ietf_KEYBYTES);

constexpr std::array<char, 8> kMagic = {'Q', 'K', 'V', 'E', 'N', 'C', '0', '1'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kChunkBytes = 64 << 10;
constexpr size_t kTagBytes = crypto_secretstream_xchacha20poly1305_ABYTES;
constexpr size_t kNonceBytes = crypto_aead_xchacha20poly1305_ietf_NPUBBYTES;

struct Head {  // FORMAT.md §8, in the byte order of the writer
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t chunk_bytes;
  uint64_t plain_bytes;
  std::array<unsigned char, crypto_secretstream_xchacha20poly1305_HEADERBYTES> stream;
};
static_assert(sizeof(Head) == 48);

// Once per process, before anything else of libsodium.
bool SodiumWorks() {
  static const bool works = ::sodium_init() >= 0;
  return works;
}

template <class... Args>
tl::unexpected<Error> Corrupt(fmt::format_string<Args...> format, Args&&... args) {
  return Err(Code::kCorrupt, Reason::kChecksum, "encrypted file: {}", fmt::format(format, std::forward<Args>(args)...));
}

tl::unexpected<Error> NoMemory() {
  return Err(Code::kExhausted, Reason::kPoolFull, "no memory that could be locked for a key");
}

// Header and label: what the first chunk vouches for.
std::vector<unsigned char> Associated(const Head& head, std::string_view label) {
  std::vector<unsigned char> bytes(sizeof(head) + label.size());
  std::memcpy(bytes.data(), &head, sizeof(head));
  std::memcpy(bytes.data() + sizeof(head), label.data(), label.size());
  return bytes;
}

Status Append(const Fd& fd, const void* data, size_t bytes) {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd.get(), at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoError("write memory file");
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return {};
}

Status Read(const Fd& fd, uint64_t offset, void* data, size_t bytes) {
  auto* at = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd.get(), at, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError("read encrypted file");
    if (n == 0) return Corrupt("ends at byte {}", offset);
    at += n;
    bytes -= static_cast<size_t>(n);
    offset += static_cast<uint64_t>(n);
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<const SecretKey>> SecretKey::From(std::string_view bytes) {
  if (bytes.size() != kSecretKeyBytes) {
    return Err(Code::kInvalidArgument, "key of {} bytes, expected {}", bytes.size(), kSecretKeyBytes);
  }
  if (!SodiumWorks()) return Err(Code::kInternal, "libsodium does not start");
  auto* memory = static_cast<unsigned char*>(::sodium_malloc(kSecretKeyBytes));
  if (memory == nullptr) return NoMemory();
  std::memcpy(memory, bytes.data(), kSecretKeyBytes);
  ::sodium_mprotect_readonly(memory);
  return std::shared_ptr<const SecretKey>(new SecretKey(memory));
}

Result<std::shared_ptr<const SecretKey>> SecretKey::Generate() {
  if (!SodiumWorks()) return Err(Code::kInternal, "libsodium does not start");
  std::string bytes(kSecretKeyBytes, '\0');
  ::randombytes_buf(bytes.data(), bytes.size());
  auto key = From(bytes);
  Erase(bytes);
  return key;
}

SecretKey::~SecretKey() {
  ::sodium_free(bytes_);
}

void Erase(std::string& secret) {
  ::sodium_memzero(secret.data(), secret.size());
  secret.clear();
}

Result<Fd> Encrypt(const SecretKey& key, std::string_view label, std::span<const std::byte> plain) {
  if (plain.empty()) return Err(Code::kInvalidArgument, "encrypt: nothing");
  QKV_ASSIGN_OR_RETURN(const Fd fd, CreateMemfd("qkv-encrypted"));
  Head head{kMagic, kVersion, kChunkBytes, plain.size(), {}};
  crypto_secretstream_xchacha20poly1305_state state;
  ::crypto_secretstream_xchacha20poly1305_init_push(&state, head.stream.data(), key.data());
  QKV_RETURN_IF_ERROR(Append(fd, &head, sizeof(head)));
  const std::vector<unsigned char> associated = Associated(head, label);
  std::vector<unsigned char> chunk(kChunkBytes + kTagBytes);
  for (size_t done = 0; done < plain.size();) {
    const size_t n = std::min<size_t>(kChunkBytes, plain.size() - done);
    const bool first = done == 0, last = done + n == plain.size();
    ::crypto_secretstream_xchacha20poly1305_push(&state, chunk.data(), nullptr,
                                                 reinterpret_cast<const unsigned char*>(plain.data()) + done, n,
                                                 first ? associated.data() : nullptr, first ? associated.size() : 0,
                                                 last ? crypto_secretstream_xchacha20poly1305_TAG_FINAL : 0);
    QKV_RETURN_IF_ERROR(Append(fd, chunk.data(), n + kTagBytes));
    done += n;
  }
  ::sodium_memzero(&state, sizeof(state));
  QKV_RETURN_IF_ERROR(Seal(fd));
  return fd.ReopenReadOnly();
}

Result<Fd> Decrypt(const SecretKey& key, std::string_view label, const Fd& encrypted, uint64_t max_bytes) {
  QKV_ASSIGN_OR_RETURN(const uint64_t size, encrypted.SizeBytes());
  Head head;
  QKV_RETURN_IF_ERROR(Read(encrypted, 0, &head, sizeof(head)));
  if (head.magic != kMagic) return Corrupt("does not start with QKVENC01");
  if (head.version != kVersion || head.chunk_bytes != kChunkBytes) {
    return Err(Code::kIncompatible, Reason::kVersion, "encrypted file: version {} in chunks of {}, expected {} and {}",
               head.version, head.chunk_bytes, kVersion, kChunkBytes);
  }
  if (head.plain_bytes < 1 || head.plain_bytes > max_bytes) {
    return Err(Code::kInvalidArgument, "encrypted file: {} bytes, expected 1 to {}", head.plain_bytes, max_bytes);
  }
  const uint64_t n_chunks = head.plain_bytes / kChunkBytes + (head.plain_bytes % kChunkBytes != 0);
  if (head.plain_bytes > size || size != sizeof(head) + head.plain_bytes + n_chunks * kTagBytes) {
    return Corrupt("{} bytes for {} encrypted ones", size, head.plain_bytes);
  }
  crypto_secretstream_xchacha20poly1305_state state;
  if (::crypto_secretstream_xchacha20poly1305_init_pull(&state, head.stream.data(), key.data()) != 0) {
    return Corrupt("no such stream");
  }
  QKV_ASSIGN_OR_RETURN(const Fd fd, CreateMemfd("qkv-private"));
  const std::vector<unsigned char> associated = Associated(head, label);
  std::vector<unsigned char> chunk(kChunkBytes + kTagBytes), plain(kChunkBytes);
  uint64_t offset = sizeof(head);
  Status status;
  for (uint64_t done = 0; status && done < head.plain_bytes;) {
    const size_t n = std::min<uint64_t>(kChunkBytes, head.plain_bytes - done);
    const bool first = done == 0, last = done + n == head.plain_bytes;
    status = Read(encrypted, offset, chunk.data(), n + kTagBytes);
    if (!status) break;
    unsigned char tag = 0;
    const bool genuine = ::crypto_secretstream_xchacha20poly1305_pull(
                             &state, plain.data(), nullptr, &tag, chunk.data(), n + kTagBytes,
                             first ? associated.data() : nullptr, first ? associated.size() : 0) == 0;
    if (!genuine || (tag == crypto_secretstream_xchacha20poly1305_TAG_FINAL) != last) {
      status = Corrupt("chunk at byte {} is not what was encrypted with this key for this place", offset);
      break;
    }
    status = Append(fd, plain.data(), n);
    offset += n + kTagBytes;
    done += n;
  }
  ::sodium_memzero(&state, sizeof(state));
  ::sodium_memzero(plain.data(), plain.size());
  QKV_RETURN_IF_ERROR(status);
  QKV_RETURN_IF_ERROR(Seal(fd));
  return fd.ReopenReadOnly();
}

Result<std::string> WrapKey(const SecretKey& with, std::string_view label, const SecretKey& key) {
  std::string wrapped(kNonceBytes + kSecretKeyBytes + crypto_aead_xchacha20poly1305_ietf_ABYTES, '\0');
  auto* out = reinterpret_cast<unsigned char*>(wrapped.data());
  ::randombytes_buf(out, kNonceBytes);
  ::crypto_aead_xchacha20poly1305_ietf_encrypt(out + kNonceBytes, nullptr, key.data(), kSecretKeyBytes,
                                               reinterpret_cast<const unsigned char*>(label.data()), label.size(),
                                               nullptr, out, with.data());
  return wrapped;
}

Result<std::shared_ptr<const SecretKey>> UnwrapKey(const SecretKey& with, std::string_view label,
                                                   std::string_view wrapped) {
  if (wrapped.size() != kNonceBytes + kSecretKeyBytes + crypto_aead_xchacha20poly1305_ietf_ABYTES) {
    return Corrupt("wrapped key of {} bytes", wrapped.size());
  }
  const auto* in = reinterpret_cast<const unsigned char*>(wrapped.data());
  std::string bytes(kSecretKeyBytes, '\0');
  const bool genuine = ::crypto_aead_xchacha20poly1305_ietf_decrypt(
                           reinterpret_cast<unsigned char*>(bytes.data()), nullptr, nullptr, in + kNonceBytes,
                           wrapped.size() - kNonceBytes, reinterpret_cast<const unsigned char*>(label.data()),
                           label.size(), in, with.data()) == 0;
  if (!genuine) return Corrupt("the key was wrapped with another one");
  auto key = SecretKey::From(bytes);
  Erase(bytes);
  return key;
}

Result<std::shared_ptr<const SecretKey>> KeyFromFile(const std::string& path) {
  const std::string what = fmt::format("key file '{}'", path);
  if (path.empty() || path.find('\0') != std::string::npos) {
    return Err(Code::kInvalidArgument, "a key file's path is empty or has a NUL");
  }
  if (const Fd made(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600)); made.valid()) {
    auto key = SecretKey::Generate();
    Status status = key ? Append(made, (*key)->data(), kSecretKeyBytes) : Status(tl::unexpected(key.error()));
    if (status && ::fsync(made.get()) != 0) status = ErrnoError(what);
    if (status) return key;
    ::unlink(path.c_str());  // rather than half a key
    return tl::unexpected(status.error());
  } else if (errno != EEXIST) {
    return ErrnoError(what);
  }
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd.valid()) return ErrnoError(what);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoError(what);
  if (!S_ISREG(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 0077) != 0) {
    return Err(Code::kDenied, Reason::kDenied, "{}: mode {:04o} of user {}, expected a file that only user {} may read",
               what, info.st_mode & 07777, info.st_uid, ::geteuid());
  }
  if (info.st_size != static_cast<off_t>(kSecretKeyBytes)) {
    return Err(Code::kInvalidArgument, "{}: {} bytes, expected {}", what, info.st_size, kSecretKeyBytes);
  }
  std::string bytes(kSecretKeyBytes, '\0');
  QKV_RETURN_IF_ERROR(Read(fd, 0, bytes.data(), bytes.size()));
  auto key = SecretKey::From(bytes);
  Erase(bytes);
  return key;
}

}  // namespace qkv
