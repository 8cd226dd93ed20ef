// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// A flow's run as one page for a browser that needs nothing else: totals (with text handoff beside them when both were
// run), the graph, a timeline of every agent, memory over time, every figure, every answer. Pure; any thread.

#include <string>

#include "qkv/flow/report.h"

namespace qkv {

std::string ToHtml(const FlowReport& report);

}  // namespace qkv
