// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The texts of a flow: names, references such as {{input.topic}} and {{writer.output}}, files, and how messages quote
// them. Pure, apart from ReadTextFile. Any thread.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/base/error.h"

namespace qkv {

inline constexpr size_t kMaxFlowFileBytes = size_t{16} << 20;  // a flow's YAML, and each input file
inline constexpr size_t kMaxFlowTextBytes = size_t{64} << 20;  // all texts of a flow together; one filled-in prompt

inline constexpr std::string_view kFlowNameRule = "1 to 64 letters, digits, '-' or '_'";
bool IsFlowName(std::string_view text);

// For messages: in single quotes, one line, not too long, whole characters.
std::string Quoted(std::string_view text);
// ", did you mean 'x'?" for the nearest of `known`, or "" when none is near.
std::string Suggestion(std::string_view word, const std::vector<std::string_view>& known);

// Offset of the first byte that is not part of UTF-8 text (or is a NUL), or npos. Refuses overlong forms and
// surrogates.
size_t FindNonText(std::string_view text);

// A regular file of UTF-8 text, at most kMaxFlowFileBytes. Errors: kNotFound, kDenied, kInvalidArgument, kIo.
Result<std::string> ReadTextFile(const std::string& path);

// A text between references, or a reference.
struct TextPart {
  enum class Kind : uint8_t {
    kLiteral,  // value: the text
    kInput,    // {{input.NAME}}; value: the name
    kOutput,   // {{AGENT.output}}; value: the agent's name
    kItem,     // {{item}}
    kIndex,    // {{index}}
  } kind;
  std::string_view value;
};

// The parts point into `text`. Errors: kInvalidArgument (a malformed reference).
Result<std::vector<TextPart>> SplitReferences(std::string_view text);

// `text` with every reference replaced by what `value_of` says; replacements are not searched for references. Errors:
// kInvalidArgument (a malformed reference, more than kMaxFlowTextBytes), and value_of's.
Result<std::string> FillReferences(std::string_view text,
                                   const std::function<Result<std::string>(const TextPart&)>& value_of);

}  // namespace qkv
