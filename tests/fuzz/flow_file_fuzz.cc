// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Any bytes as a flow: ParseFlow says in one line what is wrong, or every name leads somewhere and nobody waits for itself.

#include <algorithm>
#include <cstdint>
#include <map>
#include <string_view>

#include "qkv/flow/flow_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto flow = qkv::ParseFlow({reinterpret_cast<const char*>(data), size}, "fuzz.yaml");
  if (!flow) {
    QKV_CHECK(!flow.error().message.empty() && flow.error().message.find('\n') == std::string::npos);
    return 0;
  }
  const auto graph = flow->Graph();
  QKV_CHECK(!flow->agents.empty() && flow->agents.size() <= qkv::kMaxFlowAgents);
  QKV_CHECK(qkv::FindCycle(graph).empty());
  std::map<std::string, std::string> outputs;
  for (const auto& agent : flow->agents) outputs[agent.name] = "said";
  for (size_t i = 0; i < graph.size(); ++i) {
    const auto& agent = flow->agents[i];
    QKV_CHECK(agent.inherits().empty() == (graph[i].inherits < 0));
    for (const auto& edge : agent.edges) QKV_CHECK(!flow->Resolve(agent, edge.from).empty());
    QKV_CHECK(flow->SystemOf(agent, outputs).has_value());
    QKV_CHECK(flow->PromptOf(agent, outputs).has_value());
  }
  return 0;
}
