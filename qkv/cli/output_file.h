// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Files that a command writes when it is done: a report, a trace. One thread.

#include <span>
#include <string>

#include "qkv/base/error.h"
#include "qkv/base/trace.h"

namespace qkv::cli {

// What would make WriteOutputFile fail, as far as it can be known before the work that the file is to report on. `flag`
// names the option in the message.
Status CheckOutputFile(const std::string& path, const std::string& flag);

// Beside the target first, so that a failure leaves no partial file.
Status WriteOutputFile(const std::string& path, const std::string& text);

// In Chrome's trace format (chrome://tracing, Perfetto): one complete event per stage, one process per agent.
std::string TraceToJson(std::span<const TraceEvent> events);

}  // namespace qkv::cli
