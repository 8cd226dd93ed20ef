// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a person sees of a running flow. On a terminal: a board with a line for every agent at work (state, tokens per
// second, reused against recomputed, bytes), redrawn in place, and every answer as a whole once it is there. In a pipe:
// who starts and ends as plain lines on stderr, text as it comes on stdout. One thread.

#include <chrono>
#include <map>
#include <string>
#include <string_view>

#include "qkv/flow/runner.h"

namespace qkv::cli {

class FlowScreen {
 public:
  explicit FlowScreen(bool quiet);
  ~FlowScreen();  // clears the board
  FlowScreen(const FlowScreen&) = delete;
  FlowScreen& operator=(const FlowScreen&) = delete;

  void Heading(const std::string& text);
  void Show(const FlowEvent& event);
  void End();  // nothing more comes: no board, no open line

 private:
  struct Row {
    std::string state;
    int64_t done = 0, total = 0;  // of reading
    int64_t pieces = 0;           // of text; about tokens
    std::chrono::steady_clock::time_point first_piece;
  };

  template <class... Args>
  void Say(fmt::format_string<Args...> format, Args&&... args);
  void Stream(const std::string& agent, std::string_view text);
  void Finish(const std::string& agent);
  void EndLine();
  void ClearBoard();
  void DrawBoard(bool now);
  std::string Line(const std::string& agent, const Row& row) const;

  const bool quiet_;
  const bool board_;
  std::map<std::string, Row, std::less<>> rows_;  // of who is at work
  int drawn_ = 0;                                 // lines of the board on the screen
  std::chrono::steady_clock::time_point last_draw_{};
  std::string speaker_;                         // whose text is on the open line; empty: nobody's
  std::map<std::string, std::string> waiting_;  // what others said meanwhile
  bool interrupted_ = false;                    // its line was ended before its text was
  bool at_line_start_ = true;
};

}  // namespace qkv::cli
