// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/plan.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <utility>

#include "qkv/base/error.h"

namespace qkv {

namespace {

// Every node behind all that it needs.
std::vector<int> TopologicalOrder(const std::vector<std::vector<int>>& needed_by, std::vector<int> open) {
  std::vector<int> order;
  for (int i = 0; i < static_cast<int>(open.size()); ++i) {
    if (open[i] == 0) order.push_back(i);
  }
  for (size_t next = 0; next < order.size(); ++next) {
    for (int other : needed_by[order[next]]) {
      if (--open[other] == 0) order.push_back(other);
    }
  }
  return order;
}

}  // namespace

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
      needed_by_(nodes_.size()),
      path_costs_(nodes_.size(), 0),
      context_tokens_(nodes_.size(), 0),
      released_(nodes_.size(), false) {
  QKV_CHECK(FindCycle(nodes_).empty());
  const int n = static_cast<int>(nodes_.size());
  for (int i = 0; i < n; ++i) {
    if (nodes_[i].inherits >= 0) readers_[nodes_[i].inherits].push_back(i);
    for (int other : nodes_[i].reads) readers_[other].push_back(i);
    for (int need : nodes_[i].needs) needed_by_[need].push_back(i);
    open_needs_.push_back(static_cast<int>(nodes_[i].needs.size()));
  }
  idle_needs_ = open_needs_;
  const std::vector<int> order = TopologicalOrder(needed_by_, open_needs_);
  for (int i : order) {
    context_tokens_[i] = own_tokens(i) + (base(i) >= 0 ? context_tokens_[base(i)] : 0);
    for (int other : nodes_[i].spliced) context_tokens_[i] += other == base(i) ? 0 : context_tokens_[other];
  }
  for (auto i = order.rbegin(); i != order.rend(); ++i) {
    for (int other : needed_by_[*i]) path_costs_[*i] = std::max(path_costs_[*i], path_costs_[other]);
    path_costs_[*i] += cost(*i);
  }
  for (int i = 0; i < n; ++i) {
    if (open_needs_[i] == 0) ready_.push_back(i);
  }
  std::sort(ready_.begin(), ready_.end(), [this](int a, int b) { return Before(a, b); });
}

int Plan::base(int node) const {
  const bool first_is_base = !nodes_[node].own_prefix && !nodes_[node].reads.empty();
  return first_is_base ? nodes_[node].reads.front() : nodes_[node].inherits;
}

int Plan::heir(int node) const {
  int first = -1;
  for (int reader : readers_[node]) {
    if (nodes_[reader].inherits == node && (first < 0 || Before(reader, first))) first = reader;
  }
  return first;
}

int64_t Plan::own_tokens(int node) const {
  int64_t tokens = nodes_[node].read_tokens + nodes_[node].write_tokens;
  const std::vector<int>& spliced = nodes_[node].spliced;
  for (int other : nodes_[node].reads) {
    const bool as_pages = other == base(node) || std::find(spliced.begin(), spliced.end(), other) != spliced.end();
    tokens += as_pages ? 0 : context_tokens_[other];
  }
  return tokens;
}

int64_t Plan::context_tokens(int node) const {
  return context_tokens_[node];
}

double Plan::cost(int node) const {
  const auto written = static_cast<double>(nodes_[node].write_tokens);
  return static_cast<double>(own_tokens(node)) - written + kDecodeCost * written;
}

bool Plan::Before(int a, int b) const {
  return path_costs_[a] != path_costs_[b] ? path_costs_[a] > path_costs_[b] : a < b;
}

void Plan::SetReady(int node, bool ready) {
  const auto at = std::lower_bound(ready_.begin(), ready_.end(), node, [this](int a, int b) { return Before(a, b); });
  if (ready) {
    ready_.insert(at, node);
  } else if (at != ready_.end() && *at == node) {
    ready_.erase(at);
  }
}

std::vector<int> Plan::Ready() const {
  return ready_;
}

int64_t Plan::live_tokens() const {
  std::vector<bool> seen(nodes_.size(), false);
  int64_t tokens = 0;
  for (int i = 0; i < static_cast<int>(nodes_.size()); ++i) {
    const bool held =
        states_[i] == State::kRunning || (states_[i] == State::kFinished && publishes(i) && !released_[i]);
    if (!held) continue;
    // With a context live its ancestors' pages.
    for (int node = i; node >= 0 && !seen[node]; node = base(node)) {
      seen[node] = true;
      tokens += own_tokens(node);
    }
  }
  return tokens;
}

std::vector<int> Plan::Startable(int jobs, int64_t budget) const {
  std::vector<int> chosen;
  int free = std::max(jobs, 1) - running_;
  int64_t live = budget > 0 && free > 0 ? live_tokens() : 0;
  for (int node : ready_) {
    if (free <= 0) break;
    if (budget > 0 && live + own_tokens(node) > budget) continue;
    chosen.push_back(node);
    live += own_tokens(node);
    --free;
  }
  if (chosen.empty() && running_ == 0 && !ready_.empty()) {
    // Nothing fits, and nothing that could make room is on its way.
    chosen.push_back(*std::min_element(ready_.begin(), ready_.end(),
                                       [this](int a, int b) { return own_tokens(a) < own_tokens(b); }));
  }
  return chosen;
}

std::vector<int> Plan::Upcoming() const {
  std::vector<int> upcoming;
  for (int i = 0; i < static_cast<int>(nodes_.size()); ++i) {
    if (states_[i] == State::kWaiting && open_needs_[i] > 0 && idle_needs_[i] == 0) upcoming.push_back(i);
  }
  std::sort(upcoming.begin(), upcoming.end(), [this](int a, int b) { return Before(a, b); });
  return upcoming;
}

void Plan::OnStarted(int node) {
  QKV_CHECK(states_[node] == State::kWaiting);
  states_[node] = State::kRunning;
  ++running_;
  SetReady(node, false);
  for (int other : needed_by_[node]) --idle_needs_[other];
}

void Plan::OnRetried(int node) {
  QKV_CHECK(states_[node] == State::kRunning);
  states_[node] = State::kWaiting;
  --running_;
  SetReady(node, true);
  for (int other : needed_by_[node]) ++idle_needs_[other];
}

Plan::Change Plan::OnFinished(int node) {
  QKV_CHECK(states_[node] == State::kRunning);
  states_[node] = State::kFinished;
  --running_;
  for (int other : needed_by_[node]) {
    if (--open_needs_[other] == 0 && states_[other] == State::kWaiting) SetReady(other, true);
  }
  Change change;
  Release(nodes_[node].inherits, change);
  for (int other : nodes_[node].reads) Release(other, change);
  if (publishes(node)) Release(node, change);  // its readers may have failed before it was done
  return change;
}

Plan::Change Plan::OnFailed(int node) {
  QKV_CHECK(states_[node] == State::kRunning || states_[node] == State::kWaiting);
  if (states_[node] == State::kRunning) --running_;
  SetReady(node, false);
  states_[node] = State::kFailed;
  Change change;
  std::vector<int> spreading{node};
  for (size_t next = 0; next < spreading.size(); ++next) {
    for (int other : needed_by_[spreading[next]]) {
      if (states_[other] != State::kWaiting) continue;
      states_[other] = State::kSkipped;
      change.skipped.push_back(other);
      spreading.push_back(other);
    }
  }
  std::sort(change.skipped.begin(), change.skipped.end());
  for (int gone : spreading) {
    Release(nodes_[gone].inherits, change);
    for (int other : nodes_[gone].reads) Release(other, change);
  }
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

PlanForecast Forecast(const std::vector<PlanNode>& nodes, int jobs, int64_t budget) {
  const int n = static_cast<int>(nodes.size());
  Plan plan(nodes);
  PlanForecast forecast;
  forecast.level.assign(n, 1);
  forecast.released_after.assign(n, -1);
  forecast.together.assign(n, 0);

  // One run without limits for the width, one as it will be.
  for (const bool limited : {false, true}) {
    Plan run = plan;
    std::vector<int> running;
    double now = 0;
    using End = std::pair<double, int>;
    std::priority_queue<End, std::vector<End>, std::greater<>> ends;
    while (!run.complete()) {
      for (int node : limited ? run.Startable(jobs, budget) : run.Ready()) {
        run.OnStarted(node);
        running.push_back(node);
        ends.emplace(now + run.cost(node), node);
        if (limited) {
          forecast.turns.push_back({node, now, now + run.cost(node)});
          forecast.total_cost += run.cost(node);
        }
      }
      if (limited) {
        for (int node : running) forecast.together[node] = std::max(forecast.together[node], run.running());
        forecast.peak_tokens = std::max(forecast.peak_tokens, run.live_tokens());
      } else {
        forecast.width = std::max(forecast.width, run.running());
      }
      const auto [end, node] = ends.top();
      ends.pop();
      now = end;
      running.erase(std::find(running.begin(), running.end(), node));
      const Plan::Change change = run.OnFinished(node);
      if (!limited) {
        for (int need : nodes[node].needs) {
          forecast.level[node] = std::max(forecast.level[node], forecast.level[need] + 1);
        }
      } else {
        for (int released : change.released) forecast.released_after[released] = node;
      }
    }
  }

  int at = -1;
  for (int i = 0; i < n; ++i) {
    if (nodes[i].needs.empty() && (at < 0 || plan.path_cost(i) > plan.path_cost(at))) at = i;
  }
  forecast.critical_cost = at < 0 ? 0 : plan.path_cost(at);
  std::vector<std::vector<int>> needed_by(n);
  for (int i = 0; i < n; ++i) {
    for (int need : nodes[i].needs) needed_by[need].push_back(i);
  }
  while (at >= 0) {
    forecast.critical_path.push_back(at);
    int next = -1;
    for (int other : needed_by[at]) {
      if (next < 0 || plan.path_cost(other) > plan.path_cost(next)) next = other;
    }
    at = next;
  }
  return forecast;
}

}  // namespace qkv
