// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the bench subcommands share: a clock, medians, prompts, and contexts of any length without the time to read them.
// One thread.

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "qkv/engine/sequence.h"

namespace qkv::cli {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

void AddBenchHandoff(CLI::App& bench, int& status);
void AddBenchEngine(CLI::App& bench, int& status);
void AddBenchScale(CLI::App& bench, int& status);
void AddBenchModel(CLI::App& bench, int& status);
void AddBenchFlow(CLI::App& bench, int& status);

// Prints what was measured as JSON or by `table`, or what went wrong; returns the exit status.
int PrintMeasured(const Result<Json>& json, bool as_json, void (*table)(const Json&));

double MsSince(Clock::time_point start);
double Quantile(std::vector<double> values, double q);  // values not empty
double Median(std::vector<double> values);

// Ordinary tokens in a fixed pseudo-random order: time does not depend on what they say.
std::vector<Token> SomeTokens(const Model& model, size_t n, uint64_t seed);

// A published context of `depth` tokens (> 0) in memory of its own: `sequence` reads `read`, not empty, and what is
// missing is copies of its pages. For measuring speed, which does not depend on what keys and values say; but how many
// tokens are refined does.
Result<Context> DeepContext(Sequence& sequence, int depth, std::span<const Token> read);

}  // namespace qkv::cli
