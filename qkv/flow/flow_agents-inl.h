// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For flow_file.cc and flow_agents.cc only: the `agents` of a flow, from their YAML to FlowAgents.

#include <map>
#include <string>
#include <vector>

#include "qkv/flow/flow_file.h"
#include "qkv/flow/flow_yaml-inl.h"

namespace qkv::flow_yaml {

using InputLists = std::map<std::string, std::vector<std::string>>;

// Fills in flow.agents and flow.names; the flow's inputs must be there already, `lists` holds them item by item.
Status ReadAgents(Reader& reader, const Entry& agents, const InputLists& lists, Flow& flow);

}  // namespace qkv::flow_yaml
