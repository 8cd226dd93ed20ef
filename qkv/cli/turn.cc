// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/turn.h"

#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "qkv/cli/output_file.h"

namespace qkv::cli {

namespace {

std::string StatsText(const TurnResult& result, double refine) {
  constexpr double kMiB = 1 << 20;
  const size_t n_out = result.output_tokens.size();
  std::string text = fmt::format("qkvshare: read {} tokens in {:.0f} ms, took over {}; first token after {:.0f} ms",
                                 result.tokens_recomputed, result.prefill_ms, result.tokens_reused, result.ttft_ms);
  if (n_out > 1) {
    text += fmt::format("; {:.1f} tokens/s behind it", 1e3 * static_cast<double>(n_out - 1) / result.decode_ms);
  }
  text += fmt::format("\nqkvshare: KV {:.1f} MiB, {:.1f} of it written here", result.kv_bytes / kMiB,
                      result.own_kv_bytes / kMiB);
  if (result.kv_bits_stored > 0) {
    text += fmt::format("; pages of {:.2f} bits per value, {:.2f} read", result.kv_bits_stored, result.kv_bits_read);
  }
  if (result.keys_with_refinement > 0)
    text += fmt::format(", {:.1f} % of the keys refined", 100 * result.refined_share());
  if (refine == 0 && result.kv_bits_read < result.kv_bits_stored) text += ", the base planes alone";
  if (result.tokens_grouped > 0) {
    text += fmt::format("\nqkvshare: {} tokens grouped by importance, {} of them dropped", result.tokens_grouped,
                        result.tokens_dropped);
    if (result.sample_ms > 0) {
      text += fmt::format("; sampling attention took {:.1f} ms, {:.1f} % of reading the prompt, grouping {:.1f} ms",
                          result.sample_ms, 100 * result.sample_share, result.group_ms);
    }
  }
  return text + "\n";
}

}  // namespace

std::string TurnToJson(const TurnResult& result, double load_ms, const std::optional<QualitySummary>& calibration) {
  nlohmann::ordered_json json;
  json["text"] = result.text;
  json["token_ids"] = result.output_tokens;
  json["mode"] = HandoffModeName(result.mode);
  json["reason"] = ReasonName(result.reason);
  if (!result.reason_detail.empty()) json["reason_detail"] = result.reason_detail;
  json["steps_down"] = nlohmann::ordered_json::array();
  for (const StepDown& step : result.steps_down) {
    auto mismatches = nlohmann::ordered_json::array();
    for (const FieldMismatch& m : step.mismatches) {
      mismatches.push_back({{"field", m.field}, {"found", m.found}, {"expected", m.expected}});
    }
    json["steps_down"].push_back({{"from", HandoffModeName(step.from)},
                                  {"reason", ReasonName(step.reason)},
                                  {"detail", step.detail},
                                  {"mismatches", std::move(mismatches)}});
  }
  if (calibration) {
    json["calibration"] = {
        {"tokens", calibration->tokens}, {"kl_mean", calibration->kl.value}, {"top1", calibration->top1.value}};
  }
  json["bytes_copied"] = result.bytes_copied;
  json["tokens_reused"] = result.tokens_reused;
  json["tokens_recomputed"] = result.tokens_recomputed;
  if (!result.splice.empty()) {
    json["splice"] = result.splice;
    json["spans_spliced"] = result.spans_spliced;
    json["tokens_repaired"] = result.tokens_repaired;
    if (result.probe_kl >= 0) json["probe_kl"] = result.probe_kl;
  }
  json["load_ms"] = load_ms;
  json["attach_ms"] = result.attach_ms;
  json["ttft_ms"] = result.ttft_ms;
  json["decode_ms"] = result.decode_ms;
  json["stopped_by_eos"] = result.stopped_by_eos;
  json["context_tokens"] = result.context_tokens.size();
  json["kv_bytes"] = result.kv_bytes;
  json["own_kv_bytes"] = result.own_kv_bytes;
  json["kv_bits_stored"] = result.kv_bits_stored;
  json["kv_bits_read"] = result.kv_bits_read;
  json["refined_share"] = result.refined_share();
  json["keys_refined"] = result.keys_refined;
  json["keys_with_refinement"] = result.keys_with_refinement;
  json["tokens_grouped"] = result.tokens_grouped;
  json["tokens_dropped"] = result.tokens_dropped;
  json["sample_ms"] = result.sample_ms;
  json["sample_share"] = result.sample_share;
  json["group_ms"] = result.group_ms;
  if (!result.context_id.empty()) {
    json["context_id"] = result.context_id;
    json["publish_ms"] = result.publish_ms;
  }
  if (!result.logits_digest.empty()) json["logits_digest"] = result.logits_digest;
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

int RunTurn(const ModelOptions& given_options, const TurnOptions& turn, const QualityFlags& quality,
            const TurnRequest& request, BrokerClient* broker, const std::function<void(Agent&)>& after) {
  ModelOptions model_options = given_options;
  if (auto kv = ChooseCodecs(model_options, nullptr); !kv) return Fail(kv.error());  // before anything that takes time
  if (!turn.trace_file.empty()) {
    if (auto usable = CheckOutputFile(turn.trace_file, "--trace"); !usable) return Fail(usable.error());
  }
  Trace trace(request.agent.empty() ? "agent" : request.agent);
  const auto start = std::chrono::steady_clock::now();
  auto model = LoadModel(model_options);
  if (!model) return Fail(model.error());
  (*model)->identity();  // digests now: a handoff then takes no longer than it must
  const std::chrono::duration<double, std::milli> load_ms = std::chrono::steady_clock::now() - start;
  const auto calibration = CalibrationOf(model_options, **model);
  if (!calibration) return Fail(calibration.error());
  HandoffQuality checks(quality, *model, ThreadsOf(model_options), *calibration, model_options.refine);
  auto kv = ChooseCodecs(model_options, model->get());
  if (kv) kv = checks.Choose(*kv);
  if (!kv) return Fail(kv.error());
  model_options.chosen = *kv;
  auto sequence = NewSequence(model_options, *model, turn.trace_file.empty() ? nullptr : &trace);
  if (!sequence) return Fail(sequence.error());
  Agent agent(*model, *std::move(sequence), broker);
  agent.AdmitBy([&](const Context& context) { return checks.Admit(context); });

  const auto print = [&](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return std::fflush(stdout) == 0;  // a closed pipe ends the turn
  };
  const auto result = agent.Run(request, turn.json ? std::function<bool(std::string_view)>{} : print);
  if (!result) {
    Error error = result.error();
    if ((!request.inherits.empty() || !request.reads.empty()) && error.reason != Reason::kNone)
      error.message += fmt::format(" ({})", ReasonName(error.reason));
    return Fail(error);
  }
  if (!turn.trace_file.empty()) {
    if (auto written = WriteOutputFile(turn.trace_file, TraceToJson(trace.Take())); !written)
      return Fail(written.error());
  }
  if (turn.json) {
    fmt::print("{}\n", TurnToJson(*result, load_ms.count(), checks.calibration()));
  } else if (!result->text.empty()) {
    fmt::print("\n");
  }
  if (turn.stats) {
    std::fflush(stdout);
    fmt::print(stderr, "{}", StatsText(*result, model_options.refine));
  }
  if (result->mode != HandoffMode::kAttach && result->reason != Reason::kNone) {
    fmt::print(stderr, "qkvshare: read as text ({}): {}\n", ReasonName(result->reason), result->reason_detail);
  }
  if (after) {
    std::fflush(stdout);
    after(agent);
  }
  return 0;
}

}  // namespace qkv::cli
