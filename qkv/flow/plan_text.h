// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// How people and programs get to see a flow's plan: a table, a graph for Graphviz or Mermaid, JSON. Pure; any thread.

#include <string>

#include "qkv/flow/flow_file.h"
#include "qkv/flow/plan.h"

namespace qkv {

struct PlanView {
  const Flow& flow;
  const PlanForecast& forecast;
  int jobs = 1;
};

std::string FormatPlan(const PlanView& view);     // ends in a newline, like the others
std::string PlanToDot(const PlanView& view);      // Graphviz
std::string PlanToMermaid(const PlanView& view);  // a flowchart
std::string PlanToJson(const PlanView& view);     // pretty-printed; docs/FLOWS.md lists the keys

}  // namespace qkv
