// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/plan_text.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "qkv/flow/text_table.h"

namespace qkv {
namespace {

using Json = nlohmann::ordered_json;

// Of one agent's needs: why it needs it.
std::string_view Kind(const PlanNode& node, int need) {
  if (node.inherits == need) return EdgeKindName(EdgeKind::kInherits);
  const bool reads = std::find(node.reads.begin(), node.reads.end(), need) != node.reads.end();
  return EdgeKindName(reads ? EdgeKind::kReads : EdgeKind::kText);
}

std::vector<bool> OnCriticalPath(const PlanForecast& forecast) {
  std::vector<bool> on(forecast.level.size(), false);
  for (int node : forecast.critical_path) on[node] = true;
  return on;
}

// Whether the critical path goes from one to the other.
bool CriticalStep(const PlanForecast& forecast, int from, int to) {
  const auto at = std::find(forecast.critical_path.begin(), forecast.critical_path.end(), from);
  return at != forecast.critical_path.end() && at + 1 != forecast.critical_path.end() && *(at + 1) == to;
}

int64_t Whole(double cost) {
  return std::llround(cost);
}

}  // namespace

std::string FormatPlan(const PlanView& view) {
  const PlanForecast& forecast = view.forecast;
  const Plan plan(view.flow.Graph());
  const auto name = [&](int i) -> const std::string& { return view.flow.agents[i].name; };
  std::string text = fmt::format("{}: {} agents, {} at a time, {} of which may be of use\n", view.flow.name,
                                 forecast.level.size(), view.jobs, forecast.width);
  text += "longest way: ";
  for (size_t i = 0; i < forecast.critical_path.size(); ++i) {
    text += (i == 0 ? "" : " > ") + name(forecast.critical_path[i]);
  }
  const double end =
      forecast.turns.empty() ? 0 : std::max_element(forecast.turns.begin(), forecast.turns.end(), [](auto& a, auto& b) {
                                     return a.end < b.end;
                                   })->end;
  text += fmt::format("\nwork: {} token times, {} on the longest way, {} with {} at a time\n",
                      Whole(forecast.total_cost), Whole(forecast.critical_cost), Whole(end), view.jobs);
  text += fmt::format("KV: at most {} tokens at one time{}\n\n", forecast.peak_tokens,
                      view.flow.budget > 0 ? fmt::format(", budget {}", view.flow.budget) : "");

  TextTable table({false, true, true, true, true, true, false, false, false});
  table.Add({"agent", "level", "start", "end", "reads", "writes", "needs", "its context is needed by", "let go after"});
  for (const PlanForecast::Turn& turn : forecast.turns) {
    const PlanNode& node = plan.nodes()[turn.node];
    std::string needs, readers;
    for (int need : node.needs)
      needs += (needs.empty() ? "" : ", ") + fmt::format("{} ({})", name(need), Kind(node, need));
    for (int reader : plan.readers(turn.node)) readers += (readers.empty() ? "" : ", ") + name(reader);
    const int last = forecast.released_after[turn.node];
    table.Add({node.name, std::to_string(forecast.level[turn.node]), std::to_string(Whole(turn.start)),
               std::to_string(Whole(turn.end)), std::to_string(plan.own_tokens(turn.node) - node.write_tokens),
               std::to_string(node.write_tokens), needs.empty() ? "-" : needs, readers.empty() ? "-" : readers,
               last < 0 ? "-" : name(last)});
  }
  return text + table.Format();
}

std::string PlanToDot(const PlanView& view) {
  const std::vector<PlanNode> graph = view.flow.Graph();
  const std::vector<bool> critical = OnCriticalPath(view.forecast);
  // Names of agents hold nothing that would have to be escaped; a flow's may.
  std::string title;
  for (char c : view.flow.name) title += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  std::string text = fmt::format("digraph \"{}\" {{\n  rankdir=LR;\n  node [shape=box];\n", title);
  for (size_t i = 0; i < graph.size(); ++i) {
    text += fmt::format("  \"{0}\" [label=\"{0}\\n+{1} tokens\"{2}];\n", graph[i].name,
                        graph[i].read_tokens + graph[i].write_tokens, critical[i] ? ", penwidth=2" : "");
  }
  for (size_t i = 0; i < graph.size(); ++i) {
    for (int need : graph[i].needs) {
      const std::string_view kind = Kind(graph[i], need);
      const std::string_view style = kind == "inherits" ? "solid" : kind == "reads" ? "dashed" : "dotted";
      text += fmt::format("  \"{}\" -> \"{}\" [label=\"{}\", style={}{}];\n", graph[need].name, graph[i].name, kind,
                          style, CriticalStep(view.forecast, need, static_cast<int>(i)) ? ", penwidth=2" : "");
    }
  }
  return text + "}\n";
}

std::string PlanToMermaid(const PlanView& view) {
  const std::vector<PlanNode> graph = view.flow.Graph();
  const std::vector<bool> critical = OnCriticalPath(view.forecast);
  std::string text = "flowchart LR\n";
  // Ids of our own: some words mean something to Mermaid.
  for (size_t i = 0; i < graph.size(); ++i) text += fmt::format("  a{}[\"{}\"]\n", i, graph[i].name);
  for (size_t i = 0; i < graph.size(); ++i) {
    for (int need : graph[i].needs) {
      const std::string_view kind = Kind(graph[i], need);
      text += fmt::format("  a{} {}|{}| a{}\n", need,
                          kind == "inherits" ? "==>"
                          : kind == "reads"  ? "-->"
                                             : "-.->",
                          kind, i);
    }
  }
  for (size_t i = 0; i < graph.size(); ++i) {
    if (critical[i]) text += fmt::format("  style a{} stroke-width:3px\n", i);
  }
  return text;
}

std::string PlanToJson(const PlanView& view) {
  const PlanForecast& forecast = view.forecast;
  const Plan plan(view.flow.Graph());
  const auto name = [&](int i) -> const std::string& { return view.flow.agents[i].name; };
  Json agents = Json::array();
  for (const PlanForecast::Turn& turn : forecast.turns) {
    const PlanNode& node = plan.nodes()[turn.node];
    Json needs = Json::array(), readers = Json::array();
    for (int need : node.needs) needs.push_back(Json{{"agent", name(need)}, {"edge", Kind(node, need)}});
    for (int reader : plan.readers(turn.node)) readers.push_back(name(reader));
    const int last = forecast.released_after[turn.node];
    agents.push_back(Json{{"agent", node.name},
                          {"level", forecast.level[turn.node]},
                          {"start", turn.start},
                          {"end", turn.end},
                          {"read_tokens", plan.own_tokens(turn.node) - node.write_tokens},
                          {"write_tokens", node.write_tokens},
                          {"context_tokens", plan.context_tokens(turn.node)},
                          {"needs", std::move(needs)},
                          {"context_needed_by", std::move(readers)},
                          {"released_after", last < 0 ? Json() : Json(name(last))}});
  }
  Json path = Json::array();
  for (int node : forecast.critical_path) path.push_back(name(node));
  const Json json{{"flow", view.flow.name},
                  {"jobs", view.jobs},
                  {"width", forecast.width},
                  {"critical_path", std::move(path)},
                  {"critical_cost", forecast.critical_cost},
                  {"total_cost", forecast.total_cost},
                  {"peak_tokens", forecast.peak_tokens},
                  {"budget_tokens", view.flow.budget > 0 ? Json(view.flow.budget) : Json()},
                  {"agents", std::move(agents)}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace qkv
