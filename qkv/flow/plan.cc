// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/plan.h"

#include <algorithm>
#include <utility>

#include "qkv/base/error.h"

namespace qkv {

std::vector<int> FindCycle(const std::vector<PlanNode>& nodes) {
  enum class Mark : uint8_t { kNew, kOnPath, kDone };
  std::vector<Mark> marks(nodes.size(), Mark::kNew);
  for (int start = 0; start < static_cast<int>(nodes.size()); ++start) {
    if (marks[start] != Mark::kNew) continue;
    // Depth first, with the path kept by hand: a long chain must not use up the stack.
    std::vector<std::pair<int, size_t>> path{{start, 0}};
    marks[start] = Mark::kOnPath;
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next == nodes[node].needs.size()) {
        marks[node] = Mark::kDone;
        path.pop_back();
        continue;
      }
      const int need = nodes[node].needs[next++];
      if (marks[need] == Mark::kOnPath) {
        std::vector<int> cycle;
        auto from = std::find_if(path.begin(), path.end(), [&](const auto& step) { return step.first == need; });
        for (; from != path.end(); ++from) cycle.push_back(from->first);
        cycle.push_back(need);
        return cycle;
      }
      if (marks[need] == Mark::kNew) {
        marks[need] = Mark::kOnPath;
        path.emplace_back(need, 0);
      }
    }
  }
  return {};
}

Plan::Plan(std::vector<PlanNode> nodes)
    : nodes_(std::move(nodes)),
      states_(nodes_.size(), State::kWaiting),
      readers_(nodes_.size()),
      released_(nodes_.size(), false) {
  QKV_CHECK(FindCycle(nodes_).empty());
  for (int i = 0; i < static_cast<int>(nodes_.size()); ++i) {
    if (nodes_[i].inherits >= 0) readers_[nodes_[i].inherits].push_back(i);
  }
}

std::vector<int> Plan::Ready() const {
  std::vector<int> ready;
  for (int i = 0; i < static_cast<int>(nodes_.size()); ++i) {
    if (states_[i] == State::kWaiting && std::all_of(nodes_[i].needs.begin(), nodes_[i].needs.end(),
                                                     [&](int need) { return states_[need] == State::kFinished; })) {
      ready.push_back(i);
    }
  }
  return ready;
}

void Plan::OnStarted(int node) {
  QKV_CHECK(states_[node] == State::kWaiting);
  states_[node] = State::kRunning;
}

Plan::Change Plan::OnFinished(int node) {
  QKV_CHECK(states_[node] == State::kRunning);
  states_[node] = State::kFinished;
  Change change;
  Release(nodes_[node].inherits, change);
  if (publishes(node)) Release(node, change);  // its readers may have failed before it was done
  return change;
}

Plan::Change Plan::OnFailed(int node) {
  QKV_CHECK(states_[node] == State::kRunning || states_[node] == State::kWaiting);
  states_[node] = State::kFailed;
  Change change;
  // Skipping spreads: repeat until nothing changes (a flow has few agents).
  for (bool changed = true; changed;) {
    changed = false;
    for (int i = 0; i < static_cast<int>(nodes_.size()); ++i) {
      if (states_[i] != State::kWaiting) continue;
      if (std::any_of(nodes_[i].needs.begin(), nodes_[i].needs.end(),
                      [&](int need) { return states_[need] == State::kFailed || states_[need] == State::kSkipped; })) {
        states_[i] = State::kSkipped;
        change.skipped.push_back(i);
        changed = true;
      }
    }
  }
  std::sort(change.skipped.begin(), change.skipped.end());
  Release(nodes_[node].inherits, change);
  for (int skipped : change.skipped) Release(nodes_[skipped].inherits, change);
  return change;
}

void Plan::Release(int node, Change& change) {
  if (node < 0 || released_[node] || states_[node] != State::kFinished) return;
  const bool still_read = std::any_of(readers_[node].begin(), readers_[node].end(), [&](int reader) {
    return states_[reader] == State::kWaiting || states_[reader] == State::kRunning;
  });
  if (still_read) return;
  released_[node] = true;
  change.released.push_back(node);
}

bool Plan::complete() const {
  return Ready().empty() && std::none_of(states_.begin(), states_.end(), [](State s) { return s == State::kRunning; });
}

}  // namespace qkv
