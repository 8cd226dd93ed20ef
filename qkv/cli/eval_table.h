// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What `eval` shows people, from what it would print with --json. Pure, but for stdout.

#include <nlohmann/json.hpp>

namespace qkv::cli {

// json: `eval --json` of any protocol but splice and recall.
void PrintEvalTable(const nlohmann::ordered_json& json);

}  // namespace qkv::cli
