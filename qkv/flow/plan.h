// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which agents of a flow may start and in which order, which can't any more, and which published contexts nobody will
// read again; and what a whole run looks like before it begins. Knows nothing of processes, clocks or files: the runner
// reports what happened and asks what is next. The same reports always give the same answers.
//
// Work is counted in token times: reading one token costs 1, generating one kDecodeCost. A Plan is a value; one thread
// at a time.

#include <cstdint>
#include <string>
#include <vector>

namespace qkv {

struct PlanNode {
  std::string name;
  std::vector<int> needs;    // indexes of the agents that must have finished before; those below are among them
  int inherits = -1;         // whose context it goes on from; -1: nobody's
  std::vector<int> reads;    // whose contexts it uses behind its own prefix, in this order
  std::vector<int> spliced;  // those of `reads` whose pages it uses; the others are read again
  bool own_prefix = false;   // it has one; without, the first of `reads` is gone on from
  int64_t read_tokens = 0;   // of its own, about
  int64_t write_tokens = 0;  // at most
};

// The indexes of a cycle, the first one repeated at the end; empty if there is none. Indexes must be valid.
std::vector<int> FindCycle(const std::vector<PlanNode>& nodes);

class Plan {
 public:
  enum class State : uint8_t { kWaiting, kRunning, kFinished, kFailed, kSkipped };

  // Generating a token takes about as long as reading two or three.
  static constexpr double kDecodeCost = 2.5;

  struct Change {
    std::vector<int> skipped;   // can't run any more, because something they need failed
    std::vector<int> released;  // published their context, and its last reader is through: it may be forgotten
  };

  // `nodes` has no cycle.
  explicit Plan(std::vector<PlanNode> nodes);

  // Waiting, and all they need has finished. First those that most work waits for; equals in the order of the agents.
  std::vector<int> Ready() const;
  // Those of Ready() that may start now: at most `jobs` agents run at one time, and no more than `budget` tokens of KV
  // exist, as far as waiting for others to finish can help it (budget 0: any number).
  std::vector<int> Startable(int jobs, int64_t budget) const;
  // Waiting for agents of which every one runs or has finished: who is next.
  std::vector<int> Upcoming() const;

  void OnStarted(int node);     // was ready
  void OnRetried(int node);     // was running; waits again
  Change OnFinished(int node);  // was running
  Change OnFailed(int node);    // was running or waiting (its process may die before its turn)

  State state(int node) const { return states_[node]; }
  int running() const { return running_; }
  bool publishes(int node) const { return !readers_[node].empty(); }  // somebody needs its context, not only its words
  bool complete() const { return running_ == 0 && ready_.empty(); }   // nothing runs and nothing will

  const std::vector<PlanNode>& nodes() const { return nodes_; }
  const std::vector<int>& readers(int node) const { return readers_[node]; }  // of its context
  int base(int node) const;  // whose context it goes on from, by `inherits` or as the first of `reads`; -1: nobody's
  // Of those that go on from it by `inherits` the first to start: who may do so where its context is; -1: nobody.
  int heir(int node) const;
  double cost(int node) const;                                    // of its own turn
  double path_cost(int node) const { return path_costs_[node]; }  // to the end, its own included
  int64_t own_tokens(int node) const;                             // of KV that it makes, about
  int64_t context_tokens(int node) const;                         // that its context will have, about
  int64_t live_tokens() const;  // of KV that exist now: of who runs and of what may still be read, once each

 private:
  void Release(int node, Change& change);
  void SetReady(int node, bool ready);
  bool Before(int a, int b) const;

  std::vector<PlanNode> nodes_;
  std::vector<State> states_;
  std::vector<std::vector<int>> readers_;  // of a node's context
  std::vector<std::vector<int>> needed_by_;
  std::vector<int> open_needs_;  // not finished
  std::vector<int> idle_needs_;  // neither finished nor running
  std::vector<double> path_costs_;
  std::vector<int64_t> context_tokens_;
  std::vector<bool> released_;
  std::vector<int> ready_;  // sorted by Before
  int running_ = 0;
};

// A whole run as it would go if every turn took its cost: what `qkvshare plan` shows.
struct PlanForecast {
  struct Turn {
    int node;
    double start, end;  // in token times
  };
  std::vector<Turn> turns;         // in the order of their start
  std::vector<int> level;          // by node: agents on the longest way to it
  int width = 0;                   // most agents that could run at one time if nothing but their needs held them
  std::vector<int> critical_path;  // the longest chain of work, first to last
  double critical_cost = 0;
  double total_cost = 0;            // of all turns
  std::vector<int> released_after;  // by node: the reader with which its context may go; -1: it publishes none
  std::vector<int> together;        // by node: most agents at work at one time during its turn, itself included
  int64_t peak_tokens = 0;          // most KV at one time
};
PlanForecast Forecast(const std::vector<PlanNode>& nodes, int jobs, int64_t budget);

}  // namespace qkv
