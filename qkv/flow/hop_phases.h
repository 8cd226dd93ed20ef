// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an agent did in its turn, one after the other: for timelines. Pure; any thread.

#include <cstdint>
#include <string_view>
#include <vector>

#include "qkv/flow/report.h"

namespace qkv {

struct HopPhase {
  enum class Kind : uint8_t { kWaiting, kHandoff, kPrefill, kDecode, kPublish } kind;
  double start_ms;  // from the start of the first turn
  double end_ms;
};
std::string_view PhaseName(HopPhase::Kind kind);       // "waiting", "handoff", "prefill", "decode", "publish"
std::vector<HopPhase> PhasesOf(const HopResult& hop);  // without empty ones

}  // namespace qkv
