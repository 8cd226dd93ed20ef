// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The protocols `splice` and `recall` of `eval`: what it does to the answers that passages were read apart.
//
//   splice   a reader's prefix, two passages of the text, a prompt, what is scored: as in one go, against every arm. Half of
//            the cases have passages that belong together, half have the first one from elsewhere in the text.
//   recall   a fact is planted in each passage, and asked for behind both: is every digit the likeliest token?

#include <string>
#include <vector>

#include "qkv/base/error.h"

namespace qkv::cli {

struct SpliceEvalOptions {
  std::string model;  // as ModelOptions::model
  std::string text;
  std::string weights = "f32";
  std::string protocol;           // "splice" or "recall"
  std::vector<std::string> arms;  // ParseSpliceArm; empty: DefaultArms
  std::string resume;
  int samples = 16;  // splice: of each kind; recall: of two facts each
  int n_threads = 0;
};

std::vector<std::string> DefaultSpliceArms(const std::string& protocol);

// Measures what the log does not have yet, and prints it: tables, one for each kind of case, or with `json` one object.
// Errors: kInvalidArgument (the text is too short, an arm that nobody knows), those of files and models.
Status RunSpliceEval(const SpliceEvalOptions& options, bool json);

}  // namespace qkv::cli
