// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What `eval` reads: stretches of a text, cut into what is handed over and what is scored, one way per protocol. Pure but
// for ReadTextFile.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/engine/vocab.h"

namespace qkv::cli {

struct EvalSample {
  std::vector<Token> tokens;  // the prefix, what is scored, and the last scored place's answer
  int n_prefix = 0;
  double answer = 0;  // gsm8k: the number that is right
};

struct EvalShape {
  int samples = 12;
  int prefix = 1024;
  int score = 128;
};

// Errors: kNotFound, kDenied; kInvalidArgument when it is no regular file, empty, or beyond 1 GiB.
Result<std::string> ReadTextFile(const std::string& path);

// Stretches at even distances that don't overlap. Error: kInvalidArgument with how many tokens there are and how many it
// takes. `name`: the text's, for the message.
Result<std::vector<EvalSample>> TextSamples(std::span<const Token> text, const EvalShape& shape,
                                            const std::string& name);

// Something to repeat, other text, then its beginning again: scored is how it goes on. A model that can look it up says it
// word for word.
Result<std::vector<EvalSample>> CopySamples(std::span<const Token> text, const EvalShape& shape,
                                            const std::string& name);

// A pass key of five digits somewhere in the text, at another depth in each sample; scored is the answer to the question
// for it.
Result<std::vector<EvalSample>> PasskeySamples(const Vocab& vocab, std::span<const Token> text, const EvalShape& shape,
                                               const std::string& name);

struct Question {
  std::string text;
  double answer = 0;
};
// GSM8K's format: per line {"question": "…", "answer": "… #### 42"}. Error: kInvalidArgument with the line's number.
Result<std::vector<Question>> ParseQuestions(std::string_view json_lines);
// The last number in a text, thousands' commas left out; NaN when there is none.
double LastNumber(std::string_view text);

}  // namespace qkv::cli
