// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/flow_gate.h"

#include <algorithm>
#include <map>
#include <set>

#include "qkv/engine/layer_sensitivity.h"

namespace qkv::cli {
namespace {

Result<std::unique_ptr<HandoffQuality>> GateOf(const QualityFlags& flags, const Flow& flow,
                                               std::shared_ptr<const Model> model) {
  QKV_ASSIGN_OR_RETURN(auto calibration, CalibrationOf({.balanced = flow.bal}, *model));
  return std::make_unique<HandoffQuality>(flags, std::move(model), TotalThreads(flow), std::move(calibration));
}

}  // namespace

Status CheckBalance(const Flow& flow, const RunOptions& run) {
  if (flow.bal) return {};
  const auto check = [&](const KvChoice& kv, const std::string& whose) -> Status {
    const Codec& k = CodecOf(kv.codecs.pair.k);
    if (!k.keys_only) return {};
    return Err(Code::kInvalidArgument,
               "{}: keys in codec {} need --bal, or 'bal: true' in the flow, and what 'qkvshare calibrate' makes",
               whose, k.name);
  };
  for (const FlowAgent& agent : flow.agents) {
    if (agent.kv) QKV_RETURN_IF_ERROR(check(*agent.kv, fmt::format("{}: agent '{}'", flow.path, agent.name)));
  }
  if (run.kv) return check(*run.kv, "--kv");
  for (const KvChoice& kv : flow.kv) QKV_RETURN_IF_ERROR(check(kv, flow.path + ": kv"));
  return {};
}

Status ApplyKvBits(double bits, const QualityFlags& flags, const Flow& flow, RunOptions& run) {
  std::set<std::string> paths;
  for (const FlowAgent& agent : flow.agents) {
    if (!agent.kv && agent.max_bytes == 0) paths.insert(agent.model.empty() ? flow.model : agent.model);
  }
  run.kv_bits = bits;
  for (const std::string& path : paths) {
    QKV_ASSIGN_OR_RETURN(const auto model, Model::Load(path));
    QKV_ASSIGN_OR_RETURN(const PageCodecs best, BestWithinBits(*model, bits));
    QKV_ASSIGN_OR_RETURN(const auto gate, GateOf(flags, flow, model));
    QKV_ASSIGN_OR_RETURN(const KvChoice chosen, gate->Choose(best));
    if (chosen == best) continue;
    run.kv = chosen;
    run.kv_bits = 0;
    break;
  }
  return {};
}

Status GateFlow(const QualityFlags& flags, Flow& flow, RunOptions& run) {
  if (flags.gate == "off") return {};
  std::map<std::string, std::unique_ptr<HandoffQuality>> gates;  // by model
  for (const FlowAgent& agent : flow.agents) {
    const std::string& path = agent.model.empty() ? flow.model : agent.model;
    if (path.empty() || gates.contains(path)) continue;
    auto model = Model::Load(path);
    if (!model) continue;  // the run will say so, and by whom it is needed
    QKV_ASSIGN_OR_RETURN(gates[path], GateOf(flags, flow, *std::move(model)));
  }
  for (FlowAgent& agent : flow.agents) {
    if (!agent.kv) continue;
    const auto gate = gates.find(agent.model.empty() ? flow.model : agent.model);
    if (gate == gates.end()) continue;
    QKV_ASSIGN_OR_RETURN(agent.kv, gate->second->Choose(*agent.kv));
  }
  if (run.kv_bits > 0) return {};
  // The run's own codecs hold for every agent that has none: what is good enough for all models.
  const auto for_all = [&](KvChoice kv) -> Result<KvChoice> {
    for (const auto& [path, gate] : gates) {
      QKV_ASSIGN_OR_RETURN(kv, gate->Choose(kv));
    }
    return kv;
  };
  if (run.kv) {
    QKV_ASSIGN_OR_RETURN(run.kv, for_all(*run.kv));
    return {};
  }
  std::vector<KvChoice> codecs;
  for (const KvChoice& kv : HandoffCodecs(flow)) {
    QKV_ASSIGN_OR_RETURN(const KvChoice chosen, for_all(kv));
    if (std::ranges::find(codecs, chosen) == codecs.end()) codecs.push_back(chosen);
  }
  flow.kv = std::move(codecs);
  return {};
}

}  // namespace qkv::cli
