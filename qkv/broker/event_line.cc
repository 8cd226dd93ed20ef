// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/event_line.h"

namespace qkv {
namespace {

// Bytes beyond ASCII are not decoded: each becomes the \u00xx of its number.
std::string JsonString(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\' || c < 0x20 || c > 0x7e) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out += '"';
}

}  // namespace

std::string_view EventName(Event::Kind kind) {
  switch (kind) {
    case Event::Kind::kCreated: return "created";
    case Event::Kind::kPublished: return "published";
    case Event::Kind::kAttached: return "attached";
    case Event::Kind::kReleased: return "released";
    case Event::Kind::kRemoved: return "removed";
    case Event::Kind::kExpired: return "expired";
    case Event::Kind::kEvicted: return "evicted";
  }
  return "";
}

std::string EventLine(const Event& event, int64_t unix_ms, int64_t pid) {
  return fmt::format(R"({{"unix_ms":{},"event":"{}","id":{},"name":{},"bytes":{},"pid":{}}})", unix_ms,
                     EventName(event.kind), JsonString(event.id), JsonString(event.name), event.bytes, pid);
}

std::string HandoffLine(const TurnReport& report, int64_t unix_ms, int64_t pid) {
  return fmt::format(
      R"({{"unix_ms":{},"event":"handoff","context":{},"mode":{},"reason":"{}","failed":{},"tokens_reused":{},)"
      R"("tokens_recomputed":{},"attach_ms":{:.3f},"ttft_ms":{:.3f},"pid":{}}})",
      unix_ms, JsonString(report.context), JsonString(report.mode), ReasonName(report.reason), report.failed,
      report.tokens_reused, report.tokens_recomputed, report.attach_seconds * 1e3, report.ttft_seconds * 1e3, pid);
}

std::string RefusalLine(std::string_view request, const Error& error, int64_t unix_ms, int64_t pid) {
  return fmt::format(
      R"({{"unix_ms":{},"event":"refused","request":"{}","code":"{}","reason":"{}","message":{},"pid":{}}})", unix_ms,
      request, CodeName(error.code), ReasonName(error.reason), JsonString(error.message), pid);
}

}  // namespace qkv
