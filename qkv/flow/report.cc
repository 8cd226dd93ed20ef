// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "qkv/flow/text_table.h"

namespace qkv {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kNothing[] = "-";

std::string Milliseconds(double ms) {
  if (ms < 10) return fmt::format("{:.2f} ms", ms);
  if (ms < 10000) return fmt::format("{:.0f} ms", ms);
  return fmt::format("{:.1f} s", ms / 1000);
}

std::string Bytes(uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes == 0) return kNothing;
  if (value < 1024 * 1024) return fmt::format("{:.1f} KiB", value / 1024);
  if (value < 1024 * 1024 * 1024) return fmt::format("{:.1f} MiB", value / (1024 * 1024));
  return fmt::format("{:.2f} GiB", value / (1024 * 1024 * 1024));
}

std::string ModeTitle(const ModeResult& mode) {
  return fmt::format("{} ({})", FlowModeName(mode.mode), mode.kv);
}

double Microseconds(double ms) {
  return std::round(ms * 1000) / 1000;
}

}  // namespace

std::string_view FlowModeName(FlowMode mode) {
  return mode == FlowMode::kText ? "text" : "handoff";
}

std::vector<Agreement> CompareOutputs(const ModeResult& text, const ModeResult& handoff) {
  std::vector<Agreement> all;
  for (const HopResult& hop : handoff.hops) {
    const auto a = text.output_tokens.find(hop.agent);
    const auto b = handoff.output_tokens.find(hop.agent);
    if (a == text.output_tokens.end() || b == handoff.output_tokens.end()) continue;
    const auto differs = std::mismatch(a->second.begin(), a->second.end(), b->second.begin(), b->second.end());
    all.push_back({.kv = handoff.kv,
                   .agent = hop.agent,
                   .tokens_equal = differs.first - a->second.begin(),
                   .tokens = static_cast<int64_t>(std::max(a->second.size(), b->second.size()))});
  }
  return all;
}

std::string FormatTable(const FlowReport& report) {
  std::vector<std::string> title{report.flow}, time{"end-to-end"}, memory{"peak memory (PSS)"}, kv{"KV"},
      rate{"tasks per minute"};
  for (const ModeResult& mode : report.modes) {
    title.push_back(ModeTitle(mode));
    time.push_back(Milliseconds(mode.end_to_end_ms));
    memory.push_back(Bytes(mode.peak_pss_bytes));
    kv.push_back(Bytes(mode.kv_bytes));
    rate.push_back(mode.tasks_per_minute > 0 ? fmt::format("{:.2f}", mode.tasks_per_minute) : kNothing);
  }
  std::vector<bool> right(title.size(), true);
  right[0] = false;
  TextTable totals(right);
  for (auto* row : {&title, &time, &memory, &kv, &rate}) totals.Add(std::move(*row));
  std::string text = totals.Format();

  TextTable hops({false, false, false, false, true, true, true, true, true});
  hops.Add({"mode", "agent", "from", "handoff", "reused", "recomputed", "attach", "TTFT", "out tokens"});
  for (const ModeResult& mode : report.modes) {
    for (const HopResult& hop : mode.hops) {
      std::string handoff(HandoffModeName(hop.handoff));
      if (!hop.splice.empty()) handoff += ": " + hop.splice;
      if (hop.reason != Reason::kNone) handoff += fmt::format(" ({})", ReasonName(hop.reason));
      const bool attached = hop.handoff != HandoffMode::kText && hop.handoff != HandoffMode::kNone;
      hops.Add({ModeTitle(mode), hop.agent, hop.from.empty() ? kNothing : hop.from, std::move(handoff),
                std::to_string(hop.tokens_reused), std::to_string(hop.tokens_recomputed),
                attached ? Milliseconds(hop.attach_ms) : kNothing, Milliseconds(hop.ttft_ms),
                std::to_string(hop.output_tokens)});
    }
  }
  text += '\n';
  text += hops.Format();

  if (!report.agreement.empty()) {
    TextTable agreement({false, false, true, true});
    agreement.Add({"same output as text", "agent", "tokens", "share"});
    for (const Agreement& one : report.agreement) {
      const std::string tokens = fmt::format("{} of {}", one.tokens_equal, one.tokens);
      const std::string share = fmt::format("{:.0f} %", 100 * one.ratio());
      agreement.Add({fmt::format("handoff ({})", one.kv), one.agent, tokens, share});
    }
    text += '\n';
    text += agreement.Format();
  }

  for (const ModeResult& mode : report.modes) {
    for (const AgentFailure& failure : mode.failures) {
      text += fmt::format("\n{}: agent '{}' failed: {}\n", ModeTitle(mode), failure.agent, failure.error.message);
    }
    for (const std::string& agent : mode.skipped) {
      text += fmt::format("\n{}: agent '{}' was not run\n", ModeTitle(mode), agent);
    }
    if (mode.stopped) text += fmt::format("\n{}: stopped before the end\n", ModeTitle(mode));
  }
  return text;
}

std::string ToJson(const FlowReport& report) {
  Json modes = Json::array();
  for (const ModeResult& mode : report.modes) {
    Json hops = Json::array();
    for (const HopResult& hop : mode.hops) {
      const auto output = mode.outputs.find(hop.agent);
      hops.push_back(Json{{"agent", hop.agent},
                          {"from", hop.from.empty() ? Json() : Json(hop.from)},
                          {"handoff", HandoffModeName(hop.handoff)},
                          {"reason", ReasonName(hop.reason)},
                          {"tokens_reused", hop.tokens_reused},
                          {"tokens_recomputed", hop.tokens_recomputed},
                          {"attach_ms", Microseconds(hop.attach_ms)},
                          {"ttft_ms", Microseconds(hop.ttft_ms)},
                          {"output_tokens", hop.output_tokens},
                          {"ready_at_ms", Microseconds(hop.ready_at_ms)},
                          {"started_at_ms", Microseconds(hop.started_at_ms)},
                          {"ended_at_ms", Microseconds(hop.ended_at_ms)},
                          {"prefill_ms", Microseconds(hop.prefill_ms)},
                          {"decode_ms", Microseconds(hop.decode_ms)},
                          {"publish_ms", Microseconds(hop.publish_ms)},
                          {"gap_ms", hop.gap_ms < 0 ? Json() : Json(Microseconds(hop.gap_ms))},
                          {"prepared_ms", Microseconds(hop.prepared_ms)},
                          {"prepared_tokens", hop.prepared_tokens},
                          {"prepared_bytes", hop.prepared_bytes},
                          {"kv_bytes", hop.kv_bytes},
                          {"own_kv_bytes", hop.own_kv_bytes},
                          {"attempts", hop.attempts},
                          {"output", output == mode.outputs.end() ? "" : output->second}});
      if (hop.splice.empty()) continue;
      hops.back()["splice"] = hop.splice;
      hops.back()["spans_spliced"] = hop.spans_spliced;
      hops.back()["tokens_repaired"] = hop.tokens_repaired;
      if (hop.probe_kl >= 0) hops.back()["probe_kl"] = hop.probe_kl;
    }
    Json entry{{"mode", FlowModeName(mode.mode)},
               {"kv", mode.kv},
               {"end_to_end_ms", Microseconds(mode.end_to_end_ms)},
               {"peak_pss_bytes", mode.peak_pss_bytes},
               {"kv_bytes", mode.kv_bytes},
               {"tasks_per_minute", Microseconds(mode.tasks_per_minute)},
               {"jobs", mode.jobs},
               {"threads", mode.threads},
               {"ahead", mode.ahead},
               {"hops", std::move(hops)}};
    // Only when there is something to tell: who reads the figures above must not miss it.
    for (const AgentFailure& failure : mode.failures) {
      entry["failures"].push_back(Json{{"agent", failure.agent},
                                       {"code", CodeName(failure.error.code)},
                                       {"reason", ReasonName(failure.error.reason)},
                                       {"message", failure.error.message}});
    }
    if (!mode.skipped.empty()) entry["skipped"] = mode.skipped;
    if (mode.stopped) entry["stopped"] = true;
    modes.push_back(std::move(entry));
  }
  Json agreement = Json::object();
  for (const Agreement& one : report.agreement) {
    agreement[one.kv][one.agent] =
        Json{{"tokens_equal", one.tokens_equal}, {"tokens", one.tokens}, {"ratio", Microseconds(one.ratio())}};
  }
  const Json json{{"modes", std::move(modes)}, {"output_agreement", std::move(agreement)}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

int FlowExitStatus(const FlowReport& report) {
  for (const ModeResult& mode : report.modes) {
    if (mode.stopped) return 130;
    if (mode.failures.empty()) continue;
    const Code code = mode.failures.front().error.code;
    return code == Code::kPeerLost ? 1 : ExitStatus(code);
  }
  return 0;
}

}  // namespace qkv
