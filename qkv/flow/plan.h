// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which agents of a flow may start, which can't any more, and which published contexts nobody will read again. Knows
// nothing of processes, clocks or files: the runner reports what happened and asks what is next. The same reports
// always give the same answers, in the order of the agents.
//
// A value; one thread at a time.

#include <cstdint>
#include <string>
#include <vector>

namespace qkv {

struct PlanNode {
  std::string name;
  std::vector<int> needs;  // indexes of the agents that must have finished before; `inherits` is one of them
  int inherits = -1;       // whose context it goes on from; -1: nobody's
};

// The names of a cycle, the first one repeated at the end ("a", "b", "a"); empty if there is none. Indexes must be
// valid.
std::vector<int> FindCycle(const std::vector<PlanNode>& nodes);

class Plan {
 public:
  enum class State : uint8_t { kWaiting, kRunning, kFinished, kFailed, kSkipped };

  struct Change {
    std::vector<int> skipped;   // can't run any more, because something they need failed
    std::vector<int> released;  // published their context, and its last reader is through: it may be forgotten
  };

  // `nodes` has no cycle.
  explicit Plan(std::vector<PlanNode> nodes);

  std::vector<int> Ready() const;  // waiting, and all they need has finished
  void OnStarted(int node);        // was ready
  Change OnFinished(int node);     // was running
  Change OnFailed(int node);       // was running or waiting (its process may die before its turn)

  State state(int node) const { return states_[node]; }
  bool publishes(int node) const { return !readers_[node].empty(); }  // somebody goes on from its context
  bool complete() const;                                              // nothing runs and nothing will

 private:
  void Release(int node, Change& change);

  std::vector<PlanNode> nodes_;
  std::vector<State> states_;
  std::vector<std::vector<int>> readers_;  // of a node's context
  std::vector<bool> released_;
};

}  // namespace qkv
