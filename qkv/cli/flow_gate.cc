// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/flow_gate.h"

#include <algorithm>
#include <map>
#include <set>

#include "qkv/engine/layer_sensitivity.h"

namespace qkv::cli {
namespace {

struct ModelGate {
  std::shared_ptr<const Model> model;
  std::unique_ptr<HandoffQuality> quality;
};

Result<ModelGate> GateOf(const QualityFlags& flags, const Flow& flow, const RunOptions& run,
                         std::shared_ptr<const Model> model) {
  QKV_ASSIGN_OR_RETURN(auto calibration, CalibrationOf({.balanced = flow.bal}, *model));
  auto quality = std::make_unique<HandoffQuality>(flags, model, TotalThreads(flow), std::move(calibration), run.refine);
  return ModelGate{std::move(model), std::move(quality)};
}

uint64_t BytesOf(const Geometry& geometry, CodecPair codecs, int n_tokens) {
  const auto n_pages = static_cast<uint64_t>((n_tokens + kPageTokens - 1) / kPageTokens);
  const uint64_t plane = codecs.refine ? PageLayout(geometry, {CodecId::kRefine4, CodecId::kRefine4}).bytes : 0;
  return n_pages * (PageLayout(geometry, codecs).bytes + plane);
}

// Its worker takes the best codecs within max_bytes. Better ones that the gate would rather have must keep to it as well.
Status GateLimit(const QualityFlags& flags, const Flow& flow, const ModelGate& gate, FlowAgent& agent) {
  const auto best = BestWithinBytes(*gate.model, agent.max_bytes, flow.n_ctx);
  if (!best) return {};  // the run will say so
  HandoffQuality& quality = *gate.quality;
  QKV_ASSIGN_OR_RETURN(const QualityVerdict verdict, quality.gate().Check(*best));
  if (verdict.Within()) return {};
  const std::string found =
      fmt::format("{}: agent '{}': codec '{}', the best within its max_bytes ({}), hurts this model: {}", flow.path,
                  agent.name, ToString(*best), agent.max_bytes, verdict.Describe());
  if (flags.gate == "warn") {
    quality.Note(found);
    return {};
  }
  QKV_ASSIGN_OR_RETURN(const QualityGate::Choice choice, quality.gate().Choose(*best));
  const uint64_t bytes = BytesOf(gate.model->geometry(), choice.kv.codecs.pair, flow.n_ctx);
  if (bytes > agent.max_bytes) {
    return Err(Code::kInvalidArgument, Reason::kQualityGate,
               "{}; '{}' does not, and takes {} bytes for {} tokens: raise max_bytes, lower n_ctx, or take it as it is "
               "with --quality-gate warn",
               found, ToString(choice.kv), bytes, flow.n_ctx);
  }
  quality.Note(fmt::format("{}; using '{}' instead (--quality-gate)", found, ToString(choice.kv)));
  agent.kv = choice.kv;
  agent.max_bytes = 0;
  return {};
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
    QKV_ASSIGN_OR_RETURN(const ModelGate gate, GateOf(flags, flow, run, model));
    QKV_ASSIGN_OR_RETURN(const KvChoice chosen, gate.quality->Choose(best));
    if (chosen == best) continue;
    run.kv = chosen;
    run.kv_bits = 0;
    break;
  }
  return {};
}

Status GateFlow(const QualityFlags& flags, Flow& flow, RunOptions& run) {
  if (flags.gate == "off") return {};
  std::map<std::string, ModelGate> gates;  // by model
  for (const FlowAgent& agent : flow.agents) {
    const std::string& path = agent.model.empty() ? flow.model : agent.model;
    if (path.empty() || gates.contains(path)) continue;
    auto model = Model::Load(path);
    if (!model) continue;  // the run will say so, and by whom it is needed
    QKV_ASSIGN_OR_RETURN(gates[path], GateOf(flags, flow, run, *std::move(model)));
  }
  for (FlowAgent& agent : flow.agents) {
    const auto gate = gates.find(agent.model.empty() ? flow.model : agent.model);
    if (gate == gates.end()) continue;
    if (agent.max_bytes > 0) {
      QKV_RETURN_IF_ERROR(GateLimit(flags, flow, gate->second, agent));
    } else if (agent.kv) {
      QKV_ASSIGN_OR_RETURN(agent.kv, gate->second.quality->Choose(*agent.kv));
    }
  }
  if (run.kv_bits > 0) return {};
  // The run's own codecs hold for every agent that has none: what is good enough for all models.
  const auto for_all = [&](KvChoice kv) -> Result<KvChoice> {
    for (const auto& [path, gate] : gates) {
      QKV_ASSIGN_OR_RETURN(kv, gate.quality->Choose(kv));
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
