// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/eval_samples.h"

#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

namespace qkv::cli {
namespace {

constexpr int kCue = 16;  // tokens that are said again before the copy is scored

using Json = nlohmann::json;

// `samples` stretches of `length` tokens, one in each equal part of the text.
Result<std::vector<std::span<const Token>>> Stretches(std::span<const Token> text, int samples, size_t length,
                                                      const std::string& name) {
  const size_t stride = text.size() / static_cast<size_t>(samples);
  if (stride < length) {
    return Err(
        Code::kInvalidArgument,
        "'{}' has {} tokens; {} samples of {} need {}: give a longer text, fewer --samples or a shorter --prefix", name,
        text.size(), samples, length, length * static_cast<size_t>(samples));
  }
  std::vector<std::span<const Token>> stretches;
  for (int i = 0; i < samples; ++i) stretches.push_back(text.subspan(stride * static_cast<size_t>(i), length));
  return stretches;
}

void Append(std::vector<Token>& to, std::span<const Token> what) {
  to.insert(to.end(), what.begin(), what.end());
}

}  // namespace

Result<std::string> ReadTextFile(const std::string& path) {
  constexpr off_t kMaxBytes = off_t{1} << 30;
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return ErrnoError(fmt::format("'{}'", path));
  if (!S_ISREG(info.st_mode)) return Err(Code::kInvalidArgument, "'{}' is not a regular file", path);
  if (info.st_size == 0) return Err(Code::kInvalidArgument, "'{}' is empty, expected text", path);
  if (info.st_size > kMaxBytes) {
    return Err(Code::kInvalidArgument, "'{}' has {} bytes, at most {} are read", path, info.st_size, kMaxBytes);
  }
  std::ifstream in(path, std::ios::binary);
  if (!in) return ErrnoError(fmt::format("'{}'", path));
  return std::string(std::istreambuf_iterator<char>(in), {});
}

Result<std::vector<EvalSample>> TextSamples(std::span<const Token> text, const EvalShape& shape,
                                            const std::string& name) {
  const auto length = static_cast<size_t>(shape.prefix) + shape.score + 1;
  QKV_ASSIGN_OR_RETURN(const auto stretches, Stretches(text, shape.samples, length, name));
  std::vector<EvalSample> samples;
  for (const auto stretch : stretches) samples.push_back({{stretch.begin(), stretch.end()}, shape.prefix, 0});
  return samples;
}

Result<std::vector<EvalSample>> CopySamples(std::span<const Token> text, const EvalShape& shape,
                                            const std::string& name) {
  const auto copied = static_cast<size_t>(kCue) + shape.score;
  if (static_cast<size_t>(shape.prefix) < copied + kCue) {
    return Err(Code::kInvalidArgument,
               "a prefix of {} tokens has no room for the {} that are to be copied; raise "
               "--prefix or lower --score",
               shape.prefix, copied);
  }
  const size_t length = static_cast<size_t>(shape.prefix) - kCue + 1;
  QKV_ASSIGN_OR_RETURN(const auto stretches, Stretches(text, shape.samples, length, name));
  std::vector<EvalSample> samples;
  for (const auto stretch : stretches) {
    EvalSample sample;
    // The cue's last token is read behind the handoff: what comes after it is the first thing that is asked for.
    Append(sample.tokens, stretch);
    Append(sample.tokens, stretch.first(copied));
    sample.n_prefix = static_cast<int>(length) + kCue - 1;
    samples.push_back(std::move(sample));
  }
  return samples;
}

Result<std::vector<EvalSample>> PasskeySamples(const Vocab& vocab, std::span<const Token> text, const EvalShape& shape,
                                               const std::string& name) {
  QKV_ASSIGN_OR_RETURN(const auto question, vocab.Tokenize("\n\nWhat is the pass key? The pass key is", false, false));
  std::vector<EvalSample> samples;
  uint64_t random = 20260701;
  for (int i = 0; i < shape.samples; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    const auto key = 10000 + (random >> 33) % 90000;
    QKV_ASSIGN_OR_RETURN(
        const auto note,
        vocab.Tokenize(fmt::format("\n\nThe pass key is {0}. Remember it. {0} is the pass key.\n\n", key), false,
                       false));
    QKV_ASSIGN_OR_RETURN(const auto answer, vocab.Tokenize(fmt::format(" {}", key), false, false));
    const size_t around = note.size() + question.size();
    if (static_cast<size_t>(shape.prefix) <= around) {
      return Err(Code::kInvalidArgument, "a prefix of {} tokens has no room for the pass key and its question ({})",
                 shape.prefix, around);
    }
    const size_t filler = static_cast<size_t>(shape.prefix) - around;
    QKV_ASSIGN_OR_RETURN(const auto stretches, Stretches(text, shape.samples, filler, name));
    const auto stretch = stretches[static_cast<size_t>(i)];
    const size_t depth = filler * static_cast<size_t>(2 * i + 1) / static_cast<size_t>(2 * shape.samples);
    EvalSample sample;
    Append(sample.tokens, stretch.first(depth));
    Append(sample.tokens, note);
    Append(sample.tokens, stretch.subspan(depth));
    Append(sample.tokens, question);
    sample.n_prefix = static_cast<int>(sample.tokens.size()) - 1;
    Append(sample.tokens, answer);
    samples.push_back(std::move(sample));
  }
  return samples;
}

double LastNumber(std::string_view text) {
  double last = std::numeric_limits<double>::quiet_NaN();
  for (size_t i = 0; i < text.size();) {
    if (std::isdigit(static_cast<unsigned char>(text[i])) == 0) {
      ++i;
      continue;
    }
    std::string digits = i > 0 && text[i - 1] == '-' ? "-" : "";
    for (; i < text.size(); ++i) {
      const bool followed = i + 1 < text.size() && std::isdigit(static_cast<unsigned char>(text[i + 1])) != 0;
      if (std::isdigit(static_cast<unsigned char>(text[i])) != 0 || (text[i] == '.' && followed)) {
        digits += text[i];
      } else if (text[i] != ',' || !followed) {
        break;
      }
    }
    double value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error == std::errc()) last = value;
  }
  return last;
}

Result<std::vector<Question>> ParseQuestions(std::string_view json_lines) {
  std::vector<Question> questions;
  for (size_t line = 1; !json_lines.empty(); ++line) {
    const size_t end = std::min(json_lines.find('\n'), json_lines.size());
    const std::string_view text = json_lines.substr(0, end);
    json_lines.remove_prefix(std::min(end + 1, json_lines.size()));
    if (text.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    const bool whole = json.is_object() && json.contains("question") && json["question"].is_string() &&
                       json.contains("answer") && json["answer"].is_string();
    if (!whole) {
      return Err(Code::kInvalidArgument, "line {}: expected {{\"question\": \"…\", \"answer\": \"… #### 42\"}}", line);
    }
    const double answer = LastNumber(json["answer"].get<std::string>());
    if (answer != answer) return Err(Code::kInvalidArgument, "line {}: the answer has no number", line);
    questions.push_back({json["question"].get<std::string>(), answer});
  }
  if (questions.empty()) return Err(Code::kInvalidArgument, "there are no questions");
  return questions;
}

}  // namespace qkv::cli
