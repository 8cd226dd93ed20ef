// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scores that `eval` has so far, in a file of JSON lines: a run that was interrupted goes on where it was, and another
// codec is added without measuring the others again. The first line says what was measured; scores of other settings are
// refused. A line that was cut short by the end of the process is measured again. One process, one thread.

#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "qkv/base/error.h"
#include "qkv/engine/quality_probe.h"

namespace qkv::cli {

struct EvalScore {
  SampleScore score;
  double bits_per_value = 0;
  double file_bits = 0;
  double refined_share = 0;  // of pages with a refinement plane; 0: without
  double read_bits = 0;      // per value, by attention; 0: not known
  double encode_ns = 0;      // per value; 0: not known
  double decode_ns = 0;
  std::optional<bool> answer_right, answer_right_ref;  // gsm8k
  std::map<std::string, double> more;                  // figures of one protocol
};

class EvalLog {
 public:
  // Empty path: kept in memory only. `settings`: what the scores depend on. Errors: kInvalidArgument when the file is of
  // other settings or is no such file, kDenied, kIo.
  static Result<EvalLog> Open(const std::string& path, const nlohmann::ordered_json& settings);

  // `part`: of protocols that score a sample in several ways, else "".
  const EvalScore* Find(const std::string& kv, int sample, const std::string& part) const;
  // Errors: kIo when the file cannot be written.
  Status Add(const std::string& kv, int sample, const std::string& part, EvalScore score);
  // Of all samples 0..n-1; nullopt when one is missing.
  std::optional<std::vector<EvalScore>> All(const std::string& kv, int samples, const std::string& part) const;

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::map<std::tuple<std::string, int, std::string>, EvalScore> scores_;
  std::unique_ptr<std::FILE, Close> file_;
  std::string path_;
};

}  // namespace qkv::cli
