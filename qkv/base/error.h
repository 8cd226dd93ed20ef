// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Errors are values. Every fallible call returns Result<T> (or Status); no exception crosses a room.
// A Code exists only if a caller acts on it; a Reason exists only if a handoff steps down because of it.
// Immutable value types, usable from any thread.

#include <fmt/core.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <utility>

namespace qkv {

enum class Code : uint8_t {
  kInvalidArgument,  // the caller or the user gave something unusable: report, exit code 2
  kNotFound,         // no such file, context or name
  kDenied,           // not permitted
  kCorrupt,          // bad magic, checksum or bounds: drop it, fall back to text
  kIncompatible,     // other model, codec or version: fall back to text
  kExhausted,        // budget, descriptors or memory: wait or fall back to text
  kPeerLost,         // the other process is gone
  kTimeout,          // a deadline passed
  kIo,               // the system refused; errno's text is in the message
  kInternal,         // a bug of ours
};

// Why a handoff stepped down from attach to copy, splice or text (DESIGN §8). Reported in responses, logs and counters.
enum class Reason : uint8_t {
  kNone,
  kModelMismatch,
  kTokenizerMismatch,
  kCodecUnsupported,
  kChecksum,
  kExpired,
  kNotFound,
  kDenied,
  kTooLong,
  kPoolFull,
  kPeerLost,
  kQualityGate,
  kEndianness,
  kVersion,
};

std::string_view CodeName(Code code);
std::string_view ReasonName(Reason reason);  // "model_mismatch", …; kNone is ""

struct Error {
  Code code = Code::kInternal;
  std::string message;  // names the thing, what was found, what was expected; one line, no trailing period
  Reason reason = Reason::kNone;
};

template <class T>
using Result = tl::expected<T, Error>;
using Status = Result<void>;

template <class... Args>
tl::unexpected<Error> Err(Code code, fmt::format_string<Args...> format, Args&&... args) {
  return tl::unexpected(Error{code, fmt::format(format, std::forward<Args>(args)...), Reason::kNone});
}
template <class... Args>
tl::unexpected<Error> Err(Code code, Reason reason, fmt::format_string<Args...> format, Args&&... args) {
  return tl::unexpected(Error{code, fmt::format(format, std::forward<Args>(args)...), reason});
}
// "<what>: <strerror(errno)>"; call it before anything else can change errno. EACCES and EPERM become kDenied, ENOENT
// and ENOTDIR kNotFound, ELOOP and ENAMETOOLONG kInvalidArgument, ENOMEM, ENOSPC, EMFILE and ENFILE kExhausted (with
// Reason::kPoolFull), everything else kIo.
tl::unexpected<Error> ErrnoError(std::string_view what);

// The same error with "<prefix>: " in front of its message.
tl::unexpected<Error> Prefixed(std::string_view prefix, Error error);

// Exit status of the command line: 2 for what the user can mend (usage, files, permissions, sockets), 1 for the rest.
int ExitStatus(Code code);

[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);

}  // namespace qkv

// For our own bugs only; never on bytes that came from a file, a socket, a user or another process.
#define QKV_CHECK(condition) \
  (static_cast<bool>(condition) ? void(0) : ::qkv::CheckFailed(__FILE__, __LINE__, #condition))

#define QKV_RETURN_IF_ERROR(expression)                            \
  do {                                                             \
    if (auto qkv_status = (expression); !qkv_status.has_value()) { \
      return tl::unexpected(std::move(qkv_status).error());        \
    }                                                              \
  } while (false)

#define QKV_CONCAT_INNER(a, b) a##b
#define QKV_CONCAT(a, b) QKV_CONCAT_INNER(a, b)
#define QKV_ASSIGN_OR_RETURN(lhs, expression) \
  QKV_ASSIGN_OR_RETURN_IMPL(QKV_CONCAT(qkv_result_, __LINE__), lhs, expression)
#define QKV_ASSIGN_OR_RETURN_IMPL(result, lhs, expression) \
  auto result = (expression);                              \
  if (!result.has_value()) {                               \
    return tl::unexpected(std::move(result).error());      \
  }                                                        \
  lhs = *std::move(result)
