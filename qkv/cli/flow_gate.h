// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Codecs of a flow, against its models, before any agent starts: a limit becomes codecs, and the quality gate. One
// thread.

#include "qkv/cli/quality_flags.h"
#include "qkv/flow/flow_file.h"
#include "qkv/flow/runner.h"

namespace qkv::cli {

// Whether keys are only written in codecs that `bal` is needed for where it is asked for. Error: kInvalidArgument.
Status CheckBalance(const Flow& flow, const RunOptions& run);

// Sets run.kv_bits; or, where the gate finds that what it comes to hurts a model, run.kv to what is within its bound.
// Before GateFlow; run.refine is set. Errors: Model::Load's, BestWithinBits', Calibration::Read's (of a flow with `bal`)
// and the gate's.
Status ApplyKvBits(double bits, const QualityFlags& flags, const Flow& flow, RunOptions& run);

// Replaces codecs of the flow, its agents and the run that hurt a model (--quality-gate enforce), or says so (warn);
// those of run.kv_bits have been looked at, and run.refine is set. Loads each model once; one that cannot be loaded, and
// an agent's max_bytes that no codecs keep, is left for the run to report. Errors: the gate's, and Calibration::Read's of
// a flow with `bal`; kInvalidArgument/quality_gate when what the gate wants takes more than an agent's max_bytes.
Status GateFlow(const QualityFlags& flags, Flow& flow, RunOptions& run);

}  // namespace qkv::cli
