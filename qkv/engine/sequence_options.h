// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whether a sequence can be as it is asked for, by its options and its model alone. Pure.

#include "qkv/engine/sequence.h"

namespace qkv {

// Error: kInvalidArgument. What else Create refuses, it has to look for: threads, memory, files beside the model.
Status CheckOptions(const SequenceOptions& options, const Model& model);

}  // namespace qkv
