// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/flow_screen.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace qkv::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kRedraw{100};
constexpr int kMostRows = 16;

int TerminalWidth() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

double PerSecond(int64_t count, double ms) {
  return ms > 0 ? 1000.0 * static_cast<double>(count) / ms : 0.0;
}

}  // namespace

FlowScreen::FlowScreen(bool quiet) : quiet_(quiet), board_(::isatty(STDERR_FILENO) == 1) {}
FlowScreen::~FlowScreen() {
  ClearBoard();
}

void FlowScreen::Heading(const std::string& text) {
  End();
  if (!quiet_) fmt::print(stderr, "== {}\n", text);
}

void FlowScreen::Show(const FlowEvent& event) {
  if (quiet_) return;
  const std::string agent(event.agent);
  switch (event.kind) {
    case FlowEvent::Kind::kReady:
    case FlowEvent::Kind::kReleased: return;
    case FlowEvent::Kind::kPrepared:
      if (!rows_.contains(agent) || rows_[agent].state.starts_with("waits")) {
        rows_[agent].state = "waits, prepared";
        if (event.done > 0) rows_[agent].state += fmt::format(", {} tokens read", event.done);
        if (event.total > 0) {
          rows_[agent].state += fmt::format(", {:.1f} MB of pages checked", static_cast<double>(event.total) / 1e6);
        }
      }
      break;
    case FlowEvent::Kind::kStarted:
      rows_[agent] = {.state = "reads"};
      if (!board_) Say("{} starts", agent);
      break;
    case FlowEvent::Kind::kProgress:
      rows_[agent].done = event.done;
      rows_[agent].total = event.total;
      break;
    case FlowEvent::Kind::kText: {
      Row& row = rows_[agent];
      if (row.pieces++ == 0) row.first_piece = Clock::now();
      row.state = "generates";
      if (!board_) Stream(agent, event.text);
      break;
    }
    case FlowEvent::Kind::kFinished: {
      const TurnResult& r = *event.result;
      rows_.erase(agent);
      Finish(agent);
      Say("{}: {} tokens reused, {} read, first token after {:.0f} ms, {} tokens at {:.1f} tok/s, {:.1f} MB of KV{}",
          agent, r.tokens_reused, r.tokens_recomputed, r.ttft_ms, r.output_tokens.size(),
          PerSecond(static_cast<int64_t>(r.output_tokens.size()), r.decode_ms), static_cast<double>(r.kv_bytes) / 1e6,
          r.reason == Reason::kNone ? ""
                                    : fmt::format("; read as text ({}): {}", ReasonName(r.reason), r.reason_detail));
      if (board_) {
        fmt::print("{}\n", r.text);
        std::fflush(stdout);
      }
      break;
    }
    case FlowEvent::Kind::kRetried:
      rows_.erase(agent);
      Finish(agent);
      Say("{} is tried again: {}", agent, event.error->message);
      break;
    case FlowEvent::Kind::kFailed:
      rows_.erase(agent);
      Finish(agent);
      Say("{} failed: {}", agent, event.error->message);
      break;
    case FlowEvent::Kind::kSkipped:
      rows_.erase(agent);
      Say("{} is not run: something it needs failed", agent);
      break;
  }
  const bool small = event.kind == FlowEvent::Kind::kText || event.kind == FlowEvent::Kind::kProgress;
  DrawBoard(/*now=*/!small);
}

void FlowScreen::End() {
  ClearBoard();
  rows_.clear();
  EndLine();
  speaker_.clear();
  waiting_.clear();
}

// One agent speaks at a time, to its end; what others say meanwhile waits.
void FlowScreen::Stream(const std::string& agent, std::string_view text) {
  if (text.empty()) return;
  if (!speaker_.empty() && speaker_ != agent) {
    waiting_[agent] += text;
    return;
  }
  if (speaker_.empty() || interrupted_) fmt::print("[{}] ", agent);
  speaker_ = agent;
  interrupted_ = false;
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
  at_line_start_ = text.ends_with('\n');
}

// The agent has nothing more to say.
void FlowScreen::Finish(const std::string& agent) {
  const std::string held = waiting_.contains(agent) ? waiting_.extract(agent).mapped() : "";
  if (speaker_ != agent && !held.empty()) {
    EndLine();
    fmt::print("[{}] {}\n", agent, held);
    interrupted_ = true;
    return;
  }
  if (speaker_ != agent) return;
  EndLine();
  speaker_.clear();
  if (waiting_.empty()) return;
  const auto next = waiting_.extract(waiting_.begin());
  Stream(next.key(), next.mapped());
}

void FlowScreen::EndLine() {
  if (!at_line_start_) fmt::print("\n");
  std::fflush(stdout);
  at_line_start_ = true;
}

template <class... Args>
void FlowScreen::Say(fmt::format_string<Args...> format, Args&&... args) {
  ClearBoard();
  EndLine();
  interrupted_ = true;
  fmt::print(stderr, "-- {}\n", fmt::format(format, std::forward<Args>(args)...));
}

void FlowScreen::ClearBoard() {
  if (drawn_ > 0) fmt::print(stderr, "\033[{}A\r\033[J", drawn_);
  drawn_ = 0;
}

void FlowScreen::DrawBoard(bool now) {
  if (!board_ || (!now && Clock::now() - last_draw_ < kRedraw)) return;
  ClearBoard();
  const auto width = static_cast<size_t>(TerminalWidth());
  std::string all;
  for (const auto& [agent, row] : rows_) {
    if (drawn_ == kMostRows) break;
    std::string line = Line(agent, row);
    if (line.size() >= width) line.resize(width - 1);  // names and states are ASCII
    all += line + "\n";
    ++drawn_;
  }
  fmt::print(stderr, "{}", all);
  last_draw_ = Clock::now();
}

std::string FlowScreen::Line(const std::string& agent, const Row& row) const {
  std::string line = fmt::format("   {:<20} {}", agent, row.state);
  if (row.pieces > 0) {
    const double ms = std::chrono::duration<double, std::milli>(Clock::now() - row.first_piece).count();
    line += fmt::format(" {} tokens, {:.1f} tok/s", row.pieces, PerSecond(row.pieces - 1, ms));
  } else if (row.total > 0) {
    line += fmt::format(" {} of {} tokens", row.done, row.total);
  }
  return line;
}

}  // namespace qkv::cli
