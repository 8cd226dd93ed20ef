// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/base/error.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <system_error>

namespace qkv {

std::string_view CodeName(Code code) {
  switch (code) {
    case Code::kInvalidArgument: return "invalid_argument";
    case Code::kNotFound: return "not_found";
    case Code::kDenied: return "denied";
    case Code::kCorrupt: return "corrupt";
    case Code::kIncompatible: return "incompatible";
    case Code::kExhausted: return "exhausted";
    case Code::kPeerLost: return "peer_lost";
    case Code::kTimeout: return "timeout";
    case Code::kIo: return "io";
    case Code::kInternal: return "internal";
  }
  return "internal";
}

std::string_view ReasonName(Reason reason) {
  switch (reason) {
    case Reason::kNone: return "";
    case Reason::kModelMismatch: return "model_mismatch";
    case Reason::kTokenizerMismatch: return "tokenizer_mismatch";
    case Reason::kCodecUnsupported: return "codec_unsupported";
    case Reason::kChecksum: return "checksum";
    case Reason::kExpired: return "expired";
    case Reason::kNotFound: return "not_found";
    case Reason::kDenied: return "denied";
    case Reason::kTooLong: return "too_long";
    case Reason::kPoolFull: return "pool_full";
    case Reason::kPeerLost: return "peer_lost";
    case Reason::kQualityGate: return "quality_gate";
    case Reason::kEndianness: return "endianness";
    case Reason::kVersion: return "version";
  }
  return "";
}

tl::unexpected<Error> ErrnoError(std::string_view what) {
  const int saved = errno;
  Code code = Code::kIo;
  Reason reason = Reason::kNone;
  switch (saved) {
    case EACCES:
    case EPERM: code = Code::kDenied; break;
    case ENOENT:
    case ENOTDIR: code = Code::kNotFound; break;
    case ELOOP:
    case ENAMETOOLONG: code = Code::kInvalidArgument; break;
    case ENOMEM:
    case ENOSPC:
    case EMFILE:
    case ENFILE:
      code = Code::kExhausted;
      reason = Reason::kPoolFull;
      break;
    default: break;
  }
  return Err(code, reason, "{}: {}", what, std::generic_category().message(saved));
}

tl::unexpected<Error> Prefixed(std::string_view prefix, Error error) {
  error.message = fmt::format("{}: {}", prefix, error.message);
  return tl::unexpected(std::move(error));
}

int ExitStatus(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
    case Code::kNotFound:
    case Code::kDenied:
    case Code::kCorrupt:
    case Code::kIncompatible:
    case Code::kPeerLost: return 2;
    case Code::kExhausted:
    case Code::kTimeout:
    case Code::kIo:
    case Code::kInternal: return 1;
  }
  return 1;
}

void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, condition);
  std::abort();
}

}  // namespace qkv
