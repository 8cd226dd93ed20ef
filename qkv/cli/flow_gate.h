// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The quality gate for a flow: its codecs are checked against its models before any agent starts. One thread.

#include "qkv/cli/quality_flags.h"
#include "qkv/flow/flow_file.h"
#include "qkv/flow/runner.h"

namespace qkv::cli {

// Replaces codecs of the flow, its agents and the run that hurt a model (--quality-gate enforce), or says so (warn). Loads
// each model once; one that cannot be loaded is left for the run to report. Errors: the gate's.
Status GateFlow(const QualityFlags& flags, Flow& flow, RunOptions& run);

}  // namespace qkv::cli
