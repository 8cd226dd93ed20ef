// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/eval_table.h"

#include <fmt/format.h>

#include <cmath>
#include <string>

namespace qkv::cli {
namespace {

using Json = nlohmann::ordered_json;

// "1.71e-05 ± 3e-06"
std::string WithError(const Json& row, const char* value, const char* se) {
  const auto number = [&](const char* key) { return row[key].is_number() ? row[key].get<double>() : INFINITY; };
  return fmt::format("{:.2e} ± {:.0e}", number(value), number(se));
}

std::string BitsText(const Json& row) {
  if (!row.contains("bits_per_value")) return "";
  std::string text = fmt::format("{:.2f}", row["bits_per_value"].get<double>());
  if (row.contains("refined_share")) {
    text += fmt::format(", {:.2f} read ({:.1f} % refined)", row["read_bits_per_value"].get<double>(),
                        100 * row["refined_share"].get<double>());
  }
  return text;
}

// Each protocol has its own idea of what is read and what is scored.
std::string ScoredText(const Json& json) {
  const std::string protocol = json["protocol"];
  if (protocol == "gsm8k") return "scored the model's own answers";
  const std::string prefix = fmt::format("prefix {}, scored ", json["prefix"].get<int>());
  if (protocol == "all") return prefix + "its second half";
  if (protocol == "passkey") return prefix + "the key's digits";
  return fmt::format("{}{} {}", prefix, json["score"].get<int>(), protocol == "hops" ? "per hop" : "behind it");
}

}  // namespace

void PrintEvalTable(const Json& json) {
  fmt::print("{}, weights {}, protocol {}: {} samples, {}\n\n", json["model"].get<std::string>(),
             json["weights"].get<std::string>(), json["protocol"].get<std::string>(), json["samples"].get<int>(),
             ScoredText(json));
  const Json& rows = json["results"];
  const bool hops = rows.front().contains("hop");
  const bool recall = rows.front().contains("recall");
  const bool accuracy = rows.front().contains("accuracy");
  fmt::print("| {}codec | bits per value | mean KL | p99 KL | top-1 | perplexity |{}\n", hops ? "hop | " : "",
             hops       ? " mean KL after one handoff | ratio |"
             : recall   ? " recall | of exact | whole | of exact |"
             : accuracy ? " right | exact |"
                        : " encode, decode ns per value |");
  fmt::print("|{}---|---:|---:|---:|---:|---:|{}\n", hops ? "---:|" : "",
             hops       ? "---:|---:|"
             : recall   ? "---:|---:|---:|---:|"
             : accuracy ? "---:|---:|"
                        : "---:|");
  for (const Json& row : rows) {
    if (hops) fmt::print("| {} ", row["hop"].get<int>());
    fmt::print("| `{}` | {} | {} | {:.1e} | {:.2f} ± {:.2f} % | {:+.2f} ± {:.2f} % |", row["kv"].get<std::string>(),
               BitsText(row), WithError(row, "kl_mean", "kl_se"),
               row["kl_p99"].is_number() ? row["kl_p99"].get<double>() : INFINITY, 100 * row["top1"].get<double>(),
               100 * row["top1_se"].get<double>(),
               row["nll_delta"].is_number() ? 100 * std::expm1(row["nll_delta"].get<double>()) : INFINITY,
               row["nll_delta_se"].is_number() ? 100 * row["nll_delta_se"].get<double>() : INFINITY);
    if (hops) {
      fmt::print(" {} | {} |", WithError(row, "kl_mean_once", "kl_se_once"),
                 row.contains("kl_vs_first") ? fmt::format("{:.2f} x/÷ {:.2f}", row["kl_vs_first"].get<double>(),
                                                           row["kl_vs_first_se_factor"].get<double>())
                                             : "");
    } else if (recall) {
      fmt::print(" {:.1f} ± {:.1f} % | {:.1f} % | {:.0f} % | {:.0f} % |", 100 * row["recall"].get<double>(),
                 100 * row["recall_se"].get<double>(), 100 * row["recall_ref"].get<double>(),
                 100 * row["whole"].get<double>(), 100 * row["whole_ref"].get<double>());
    } else if (accuracy) {
      fmt::print(" {:.1f} % | {:.1f} % |", 100 * row["accuracy"].get<double>(),
                 100 * row["accuracy_ref"].get<double>());
    } else {
      fmt::print(" {} |", row.contains("encode_ns_per_value")
                              ? fmt::format("{:.1f}, {:.1f}", row["encode_ns_per_value"].get<double>(),
                                            row.value("decode_ns_per_value", 0.0))
                              : "");
    }
    fmt::print("\n");
  }
}

}  // namespace qkv::cli
