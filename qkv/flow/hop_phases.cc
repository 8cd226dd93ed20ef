// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/hop_phases.h"

#include <algorithm>

namespace qkv {

std::string_view PhaseName(HopPhase::Kind kind) {
  switch (kind) {
    case HopPhase::Kind::kWaiting: return "waiting";
    case HopPhase::Kind::kHandoff: return "handoff";
    case HopPhase::Kind::kPrefill: return "prefill";
    case HopPhase::Kind::kDecode: return "decode";
    case HopPhase::Kind::kPublish: return "publish";
  }
  return "";
}

std::vector<HopPhase> PhasesOf(const HopResult& hop) {
  const double first_token = hop.started_at_ms + hop.ttft_ms;
  const double decoded = first_token + hop.decode_ms;
  const HopPhase all[] = {
      {HopPhase::Kind::kWaiting, hop.ready_at_ms, hop.started_at_ms},
      {HopPhase::Kind::kHandoff, hop.started_at_ms, hop.started_at_ms + std::min(hop.attach_ms, hop.ttft_ms)},
      {HopPhase::Kind::kPrefill, hop.started_at_ms + std::min(hop.attach_ms, hop.ttft_ms), first_token},
      {HopPhase::Kind::kDecode, first_token, decoded},
      {HopPhase::Kind::kPublish, decoded, decoded + hop.publish_ms},
  };
  std::vector<HopPhase> phases;
  for (const HopPhase& phase : all) {
    if (phase.end_ms > phase.start_ms) phases.push_back(phase);
  }
  return phases;
}

}  // namespace qkv
