// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/report_html.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "qkv/flow/hop_phases.h"

namespace qkv {
namespace {

constexpr int kPlotWidth = 900;
constexpr int kLabelWidth = 170;
constexpr int kRowHeight = 20;

constexpr std::string_view kStyle = R"(
body{font:14px/1.45 system-ui,sans-serif;margin:24px auto;max-width:1120px;padding:0 16px;color:#1c2330;background:#fff}
h1{font-size:22px}h2{font-size:17px;margin-top:32px}h3{font-size:14px;margin:18px 0 4px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:3px 10px;border-bottom:1px solid #dde2ea;text-align:right}
td:first-child,th:first-child,td.l,th.l{text-align:left}th{font-weight:600}
svg{display:block;max-width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:#1c2330}
pre{white-space:pre-wrap;background:#f5f7fa;padding:10px;border-radius:6px}
.box{fill:#eef3fb;stroke:#4a6fa5}.inherits{stroke:#1f5fbf;stroke-width:2.5}.reads{stroke:#b0561f;stroke-width:2;stroke-dasharray:7 4}
.text{stroke:#777;stroke-width:1.2;stroke-dasharray:2 4}.edge{fill:none}.axis{stroke:#c9d0da}.grid{stroke:#eceff4}
.waiting{fill:#e3e6ec}.handoff{fill:#d0453e}.prefill{fill:#e2a03f}.decode{fill:#3f8f5f}.publish{fill:#7a5bbf}
.key span{display:inline-block;width:12px;height:12px;margin:0 4px 0 14px;vertical-align:-1px}
.memory{fill:none;stroke-width:1.8}.bad{color:#b00020}
@media (prefers-color-scheme:dark){body{background:#14181f;color:#dfe5ee}svg text{fill:#dfe5ee}td,th{border-color:#2c3440}
pre{background:#1d232d}.box{fill:#1f2a3a}.grid{stroke:#232a35}.axis{stroke:#3a4452}.waiting{fill:#39414d}}
)";
constexpr std::string_view kLineColors[] = {"#777777", "#1f5fbf", "#3f8f5f", "#b0561f", "#7a5bbf"};

std::string Escaped(std::string_view text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string Seconds(double ms) {
  return ms < 1000 ? fmt::format("{:.1f} ms", ms) : fmt::format("{:.2f} s", ms / 1000);
}
std::string Megabytes(uint64_t bytes) {
  return bytes == 0 ? "-" : fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}
std::string Title(const ModeResult& mode) {
  return fmt::format("{} ({})", FlowModeName(mode.mode), mode.kv);
}

// A round number of milliseconds of which some five to ten fit into `span`.
double TickOf(double span) {
  double tick = 1;
  for (int i = 0; span / tick > 10 && i < 40; ++i) tick *= i % 3 == 1 ? 2.5 : 2;
  return tick;
}

std::string Totals(const FlowReport& report) {
  const ModeResult* text = nullptr;
  for (const ModeResult& mode : report.modes) {
    if (mode.mode == FlowMode::kText && report.modes.size() > 1) text = &mode;
  }
  std::string html =
      "<table><tr><th>mode</th><th>end to end</th><th>peak memory (PSS)</th><th>KV</th><th>tokens read</th>"
      "<th>tokens reused</th><th>agents at a time</th><th>threads</th>";
  if (text != nullptr) html += "<th>time, of text's</th><th>memory, of text's</th>";
  html += "</tr>";
  for (const ModeResult& mode : report.modes) {
    int64_t read = 0, reused = 0;
    for (const HopResult& hop : mode.hops) {
      read += hop.tokens_recomputed;
      reused += hop.tokens_reused;
    }
    html += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>",
                        Title(mode), Seconds(mode.end_to_end_ms), Megabytes(mode.peak_pss_bytes),
                        Megabytes(mode.kv_bytes), read, reused, mode.jobs, mode.threads);
    if (text != nullptr) {
      const auto share = [](double a, double b) { return b > 0 ? fmt::format("{:.2f}", a / b) : std::string("-"); };
      html += fmt::format("<td>{}</td><td>{}</td>", share(mode.end_to_end_ms, text->end_to_end_ms),
                          share(static_cast<double>(mode.peak_pss_bytes), static_cast<double>(text->peak_pss_bytes)));
    }
    html += "</tr>";
  }
  html += "</table>";
  for (const ModeResult& mode : report.modes) {
    for (const AgentFailure& failure : mode.failures) {
      html += fmt::format("<p class=\"bad\">{}: agent {} failed: {}</p>", Title(mode), Escaped(failure.agent),
                          Escaped(failure.error.message));
    }
    for (const std::string& agent : mode.skipped) {
      html += fmt::format("<p class=\"bad\">{}: agent {} was not run</p>", Title(mode), Escaped(agent));
    }
    if (mode.stopped) html += fmt::format("<p class=\"bad\">{}: stopped before the end</p>", Title(mode));
  }
  return html;
}

// Agents in columns by level, edges from left to right.
std::string Graph(const std::vector<PlanNode>& graph) {
  constexpr int kBoxWidth = 130, kBoxHeight = 28, kColumn = 190, kLine = 44, kMargin = 8;
  const PlanForecast forecast = Forecast(graph, static_cast<int>(graph.size()), 0);
  std::vector<int> in_column;
  std::vector<std::pair<int, int>> at(graph.size());
  for (size_t i = 0; i < graph.size(); ++i) {
    const auto column = static_cast<size_t>(forecast.level[i] - 1);
    if (in_column.size() <= column) in_column.resize(column + 1, 0);
    at[i] = {kMargin + static_cast<int>(column) * kColumn, kMargin + in_column[column]++ * kLine};
  }
  const int rows = in_column.empty() ? 0 : *std::max_element(in_column.begin(), in_column.end());
  const int width = 2 * kMargin + static_cast<int>(in_column.size()) * kColumn;
  std::string svg = fmt::format("<svg viewBox=\"0 0 {} {}\" width=\"{}\" role=\"img\" aria-label=\"graph\">", width,
                                2 * kMargin + rows * kLine, width);
  for (size_t i = 0; i < graph.size(); ++i) {
    for (int need : graph[i].needs) {
      const bool reads = std::find(graph[i].reads.begin(), graph[i].reads.end(), need) != graph[i].reads.end();
      const std::string_view kind = graph[i].inherits == need ? "inherits" : reads ? "reads" : "text";
      const int x1 = at[need].first + kBoxWidth, y1 = at[need].second + kBoxHeight / 2;
      const int x2 = at[i].first, y2 = at[i].second + kBoxHeight / 2, bend = (x2 - x1) / 2;
      svg += fmt::format("<path class=\"edge {}\" d=\"M{} {}C{} {} {} {} {} {}\"><title>{} {} {}</title></path>", kind,
                         x1, y1, x1 + bend, y1, x2 - bend, y2, x2, y2, Escaped(graph[i].name), kind,
                         Escaped(graph[need].name));
    }
  }
  for (size_t i = 0; i < graph.size(); ++i) {
    std::string label = graph[i].name;
    if (label.size() > 18) label = label.substr(0, 17) + "…";
    svg += fmt::format(
        "<rect class=\"box\" rx=\"5\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"><title>{}</title></rect>"
        "<text x=\"{}\" y=\"{}\">{}</text>",
        at[i].first, at[i].second, kBoxWidth, kBoxHeight, Escaped(graph[i].name), at[i].first + 8, at[i].second + 18,
        Escaped(label));
  }
  return svg +
         "</svg><p class=\"key\">lines: solid <b>inherits</b> (goes on from the context), dashed <b>reads</b> "
         "(behind an own prefix), dotted <b>text</b></p>";
}

std::string TimeAxis(double end_ms, int height) {
  std::string svg;
  const double tick = TickOf(end_ms);
  for (double t = 0; t <= end_ms; t += tick) {
    const double x = kLabelWidth + kPlotWidth * t / end_ms;
    svg += fmt::format(
        "<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"0\" y2=\"{1}\"/>"
        "<text x=\"{0:.1f}\" y=\"{2}\" text-anchor=\"middle\">{3:g} s</text>",
        x, height, height + 15, t / 1000);
  }
  return svg;
}

std::string Timeline(const ModeResult& mode) {
  const double end = std::max(mode.end_to_end_ms, 1.0);
  const int height = static_cast<int>(mode.hops.size()) * kRowHeight;
  std::string svg = fmt::format("<svg viewBox=\"0 0 {} {}\" width=\"{}\" role=\"img\" aria-label=\"timeline\">",
                                kLabelWidth + kPlotWidth + 30, height + 22, kLabelWidth + kPlotWidth + 30);
  svg += TimeAxis(end, height);
  for (size_t i = 0; i < mode.hops.size(); ++i) {
    const HopResult& hop = mode.hops[i];
    const int y = static_cast<int>(i) * kRowHeight;
    svg += fmt::format("<text x=\"0\" y=\"{}\">{}</text>", y + 14, Escaped(hop.agent.substr(0, 24)));
    for (const HopPhase& phase : PhasesOf(hop)) {
      const double x = kLabelWidth + kPlotWidth * std::clamp(phase.start_ms / end, 0.0, 1.0);
      const double x2 = kLabelWidth + kPlotWidth * std::clamp(phase.end_ms / end, 0.0, 1.0);
      svg += fmt::format(
          "<rect class=\"{0}\" x=\"{1:.1f}\" y=\"{2}\" width=\"{3:.1f}\" height=\"{4}\">"
          "<title>{5}: {0} {6}</title></rect>",
          PhaseName(phase.kind), x, y + 3, std::max(x2 - x, 0.8), kRowHeight - 6, Escaped(hop.agent),
          Seconds(phase.end_ms - phase.start_ms));
    }
  }
  return svg + "</svg>";
}

std::string Memory(const FlowReport& report) {
  constexpr int kHeight = 160;
  double end = 1;
  uint64_t most = 1;
  for (const ModeResult& mode : report.modes) {
    end = std::max(end, mode.end_to_end_ms);
    for (const MemorySample& sample : mode.memory) most = std::max(most, sample.pss_bytes);
  }
  std::string svg = fmt::format("<svg viewBox=\"0 0 {} {}\" width=\"{}\" role=\"img\" aria-label=\"memory\">",
                                kLabelWidth + kPlotWidth + 30, kHeight + 22, kLabelWidth + kPlotWidth + 30);
  svg += TimeAxis(end, kHeight);
  for (int quarter = 0; quarter <= 4; ++quarter) {
    const int y = kHeight - quarter * (kHeight - 12) / 4;
    svg += fmt::format(
        "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\"/><text x=\"{}\" y=\"{}\" "
        "text-anchor=\"end\">{}</text>",
        kLabelWidth, kLabelWidth + kPlotWidth, y, y, kLabelWidth - 6, y + 4,
        Megabytes(most / 4 * static_cast<uint64_t>(quarter)));
  }
  std::string key;
  for (size_t m = 0; m < report.modes.size(); ++m) {
    const std::string_view color = kLineColors[m % std::size(kLineColors)];
    std::string points;
    for (const MemorySample& sample : report.modes[m].memory) {
      if (sample.at_ms < 0 || sample.at_ms > end) continue;
      points +=
          fmt::format("{:.1f},{:.1f} ", kLabelWidth + kPlotWidth * sample.at_ms / end,
                      kHeight - (kHeight - 12) * static_cast<double>(sample.pss_bytes) / static_cast<double>(most));
    }
    svg += fmt::format("<polyline class=\"memory\" stroke=\"{}\" points=\"{}\"/>", color, points);
    key += fmt::format("<span style=\"background:{}\"></span>{}", color, Title(report.modes[m]));
  }
  return svg + "</svg><p class=\"key\">" + key + "</p>";
}

std::string Hops(const ModeResult& mode) {
  std::string html =
      "<table><tr><th>agent</th><th class=\"l\">from</th><th class=\"l\">handoff</th><th>reused</th><th>read</th>"
      "<th>attach</th><th>TTFT</th><th>gap</th><th>prefill</th><th>tokens</th><th>tok/s</th><th>KV</th><th>own KV</th>"
      "<th>ahead</th></tr>";
  for (const HopResult& hop : mode.hops) {
    std::string how(HandoffModeName(hop.handoff));
    if (!hop.splice.empty()) how += ": " + Escaped(hop.splice);
    if (hop.reason != Reason::kNone) how += fmt::format(" ({})", ReasonName(hop.reason));
    const double rate = hop.decode_ms > 0 ? 1000.0 * static_cast<double>(hop.output_tokens) / hop.decode_ms : 0;
    html += fmt::format(
        "<tr><td>{}</td><td class=\"l\">{}</td><td class=\"l\" title=\"{}\">{}</td><td>{}</td><td>{}</td>"
        "<td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.1f}</td><td>{}</td><td>{}</td>"
        "<td>{}</td></tr>",
        Escaped(hop.agent), hop.from.empty() ? "-" : Escaped(hop.from), Escaped(hop.reason_detail), how,
        hop.tokens_reused, hop.tokens_recomputed, Seconds(hop.attach_ms), Seconds(hop.ttft_ms),
        hop.gap_ms < 0 ? "-" : Seconds(hop.gap_ms), Seconds(hop.prefill_ms), hop.output_tokens, rate,
        Megabytes(hop.kv_bytes), Megabytes(hop.own_kv_bytes), hop.prepared_ms > 0 ? Seconds(hop.prepared_ms) : "-");
  }
  return html + "</table>";
}

}  // namespace

std::string ToHtml(const FlowReport& report) {
  std::string html = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title><style>{1}</style></head>"
      "<body><h1>{0}</h1>",
      Escaped(report.flow), kStyle);
  html += Totals(report);
  if (!report.graph.empty()) html += "<h2>Graph</h2>" + Graph(report.graph);
  html += "<h2>Timeline</h2><p class=\"key\">";
  for (const auto kind : {HopPhase::Kind::kWaiting, HopPhase::Kind::kHandoff, HopPhase::Kind::kPrefill,
                          HopPhase::Kind::kDecode, HopPhase::Kind::kPublish}) {
    html += fmt::format(
        "<svg width=\"12\" height=\"12\" style=\"display:inline;vertical-align:-1px;margin:0 4px 0 14px\">"
        "<rect class=\"{0}\" width=\"12\" height=\"12\"/></svg>{0}",
        PhaseName(kind));
  }
  html += "</p>";
  for (const ModeResult& mode : report.modes) html += fmt::format("<h3>{}</h3>", Title(mode)) + Timeline(mode);
  html += "<h2>Memory of all processes together</h2>" + Memory(report);
  html += "<h2>Agents</h2>";
  for (const ModeResult& mode : report.modes) html += fmt::format("<h3>{}</h3>", Title(mode)) + Hops(mode);
  if (!report.agreement.empty()) {
    html +=
        "<h2>Same output as text handoff</h2><table><tr><th>agent</th><th>KV</th><th>tokens</th><th>share</th></tr>";
    for (const Agreement& one : report.agreement) {
      html += fmt::format("<tr><td>{}</td><td>{}</td><td>{} of {}</td><td>{:.0f} %</td></tr>", Escaped(one.agent),
                          Escaped(one.kv), one.tokens_equal, one.tokens, 100 * one.ratio());
    }
    html += "</table>";
  }
  html += "<h2>Answers</h2>";
  for (const ModeResult& mode : report.modes) {
    for (const HopResult& hop : mode.hops) {
      const auto output = mode.outputs.find(hop.agent);
      if (output == mode.outputs.end()) continue;
      html += fmt::format("<details><summary>{}, {}</summary><pre>{}</pre></details>", Escaped(hop.agent), Title(mode),
                          Escaped(output->second));
    }
  }
  return html + "</body></html>\n";
}

}  // namespace qkv
