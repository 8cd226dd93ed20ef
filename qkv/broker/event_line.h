// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Life-cycle events as lines of JSON (docs/PROTOCOL.md §8). Pure functions, safe from any thread. A line is printable
// ASCII and one JSON object, whatever bytes a stranger brought into a name or a message.

#include <cstdint>
#include <string>
#include <string_view>

#include "qkv/base/error.h"
#include "qkv/broker/registry.h"
#include "qkv/broker/store.h"

namespace qkv {

std::string_view EventName(Event::Kind kind);  // "created", …

// `tenant` is left out where it is empty.
std::string EventLine(const Event& event, int64_t unix_ms, int64_t pid, std::string_view tenant = {});
std::string HandoffLine(const TurnReport& report, int64_t unix_ms, int64_t pid, std::string_view tenant = {});
std::string RefusalLine(std::string_view request, const Error& error, int64_t unix_ms, int64_t pid,
                        std::string_view tenant = {});
std::string StoreLine(const ContextStore::Outcome& outcome, int64_t unix_ms, std::string_view tenant = {});
// So many lines could not be written, because nobody read those before.
std::string DroppedLine(uint64_t n_lines, int64_t unix_ms);

}  // namespace qkv
