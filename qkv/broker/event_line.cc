// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/event_line.h"

namespace qkv {
namespace {

std::string_view OutcomeName(ContextStore::Outcome::Kind kind) {
  switch (kind) {
    case ContextStore::Outcome::Kind::kStored: return "stored";
    case ContextStore::Outcome::Kind::kFailed: return "store_failed";
    case ContextStore::Outcome::Kind::kEvicted: return "store_evicted";
    case ContextStore::Outcome::Kind::kExpired: return "expired";
    case ContextStore::Outcome::Kind::kDamaged: return "store_damaged";
  }
  return "";
}

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

std::string Begin(int64_t unix_ms, std::string_view event) {
  return fmt::format(R"({{"unix_ms":{},"event":"{}")", unix_ms, event);
}

std::string End(std::string line, int64_t pid, std::string_view tenant) {
  if (!tenant.empty()) line += fmt::format(R"(,"tenant":{})", JsonString(tenant));
  return line + fmt::format(R"(,"pid":{}}})", pid);
}

std::string ErrorFields(const Error& error) {
  return fmt::format(R"(,"code":"{}","reason":"{}","message":{})", CodeName(error.code), ReasonName(error.reason),
                     JsonString(error.message));
}

}  // namespace

std::string_view EventName(Event::Kind kind) {
  switch (kind) {
    case Event::Kind::kCreated: return "created";
    case Event::Kind::kPublished: return "published";
    case Event::Kind::kRestored: return "restored";
    case Event::Kind::kAttached: return "attached";
    case Event::Kind::kReleased: return "released";
    case Event::Kind::kRemoved: return "removed";
    case Event::Kind::kExpired: return "expired";
    case Event::Kind::kEvicted: return "evicted";
    case Event::Kind::kAlarm: return "alarm";
    case Event::Kind::kAlarmEnded: return "alarm_ended";
  }
  return "";
}

std::string EventLine(const Event& event, int64_t unix_ms, int64_t pid, std::string_view tenant) {
  std::string line = Begin(unix_ms, EventName(event.kind));
  if (event.percent > 0) {
    line += fmt::format(R"(,"percent":{},"bytes":{})", event.percent, event.bytes);
  } else {
    line += fmt::format(R"(,"id":{},"name":{},"bytes":{})", JsonString(event.id), JsonString(event.name), event.bytes);
  }
  if (!event.reason.empty()) line += fmt::format(R"(,"reason":"{}")", event.reason);
  return End(std::move(line), pid, tenant);
}

std::string HandoffLine(const TurnReport& report, int64_t unix_ms, int64_t pid, std::string_view tenant) {
  std::string line = Begin(unix_ms, "handoff");
  line += fmt::format(
      R"(,"context":{},"mode":{},"reason":"{}","failed":{},"bytes_copied":{},"tokens_reused":{},"tokens_recomputed":{})",
      JsonString(report.context), JsonString(report.mode), ReasonName(report.reason), report.failed,
      report.bytes_copied, report.tokens_reused, report.tokens_recomputed);
  line +=
      fmt::format(R"(,"attach_ms":{:.3f},"ttft_ms":{:.3f})", report.attach_seconds * 1e3, report.ttft_seconds * 1e3);
  return End(std::move(line), pid, tenant);
}

std::string RefusalLine(std::string_view request, const Error& error, int64_t unix_ms, int64_t pid,
                        std::string_view tenant) {
  return End(Begin(unix_ms, "refused") + fmt::format(R"(,"request":"{}")", request) + ErrorFields(error), pid, tenant);
}

std::string StoreLine(const ContextStore::Outcome& outcome, int64_t unix_ms, std::string_view tenant) {
  using Kind = ContextStore::Outcome::Kind;
  std::string line = Begin(unix_ms, OutcomeName(outcome.kind));
  line +=
      fmt::format(R"(,"id":{},"name":{},"bytes":{})", JsonString(outcome.id), JsonString(outcome.name), outcome.bytes);
  if (outcome.kind == Kind::kFailed || outcome.kind == Kind::kDamaged) line += ErrorFields(outcome.error);
  return End(std::move(line), 0, tenant);
}

std::string DroppedLine(uint64_t n_lines, int64_t unix_ms) {
  return Begin(unix_ms, "dropped") + fmt::format(R"(,"lines":{}}})", n_lines);
}

}  // namespace qkv
