// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The subcommands. Each function adds one to the program: its flags, help and an example; the callback leaves the exit
// status in `status`. One file per command, main.cc calls them all.

#include <CLI/CLI.hpp>

namespace qkv::cli {

void AddRun(CLI::App& app, int& status);
void AddPlan(CLI::App& app, int& status);
void AddAgentWorker(CLI::App& app, int& status);  // hidden: a worker process of `run`
void AddGenerate(CLI::App& app, int& status);
void AddPublish(CLI::App& app, int& status);
void AddAttach(CLI::App& app, int& status);
void AddBroker(CLI::App& app, int& status);
void AddLs(CLI::App& app, int& status);
void AddRelease(CLI::App& app, int& status);
void AddTop(CLI::App& app, int& status);
void AddInspect(CLI::App& app, int& status);
void AddVerify(CLI::App& app, int& status);
void AddBench(CLI::App& app, int& status);
void AddEval(CLI::App& app, int& status);
void AddCalibrate(CLI::App& app, int& status);

}  // namespace qkv::cli
