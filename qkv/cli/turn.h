// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// One agent's turn from the command line: what generate, publish and attach have in common. One thread.

#include <functional>
#include <optional>

#include "qkv/cli/options.h"
#include "qkv/cli/quality_flags.h"
#include "qkv/engine/agent.h"

namespace qkv::cli {

// Loads the model, runs the turn, prints it: text as it comes, or one JSON object; then calls `after` with the agent.
// Returns the exit status.
int RunTurn(const ModelOptions& model, const TurnOptions& turn, const QualityFlags& quality, const TurnRequest& request,
            BrokerClient* broker, const std::function<void(Agent&)>& after = {});

// text, token_ids, mode, reason, steps_down, tokens_reused, tokens_recomputed, attach_ms, ttft_ms and what else a script
// may want. `load_ms`: of the model and its digests.
std::string TurnToJson(const TurnResult& result, double load_ms, const std::optional<QualitySummary>& calibration);

}  // namespace qkv::cli
