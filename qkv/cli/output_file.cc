// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/output_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

namespace qkv::cli {

Status CheckOutputFile(const std::string& path, const std::string& flag) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return Err(Code::kInvalidArgument, "{}: '{}' is not a regular file", flag, path);
  }
  const std::string parent = std::filesystem::path(path).parent_path().string();
  if (::access(parent.empty() ? "." : parent.c_str(), W_OK | X_OK) != 0 ||
      (::access(path.c_str(), F_OK) == 0 && ::access(path.c_str(), W_OK) != 0)) {
    return Err(Code::kInvalidArgument, "{}: cannot write '{}': {}", flag, path, std::generic_category().message(errno));
  }
  if (::stat((parent.empty() ? "." : parent).c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    return Err(Code::kInvalidArgument, "{}: cannot write '{}': '{}' is not a directory", flag, path, parent);
  }
  return {};
}

Status WriteOutputFile(const std::string& path, const std::string& text) {
  const std::string part = fmt::format("{}.{}.part", path, ::getpid());
  std::FILE* file = std::fopen(part.c_str(), "wxe");
  if (file == nullptr) return ErrnoError(fmt::format("'{}'", path));
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed || std::rename(part.c_str(), path.c_str()) != 0) {
    const auto error = ErrnoError(fmt::format("'{}'", path));
    ::unlink(part.c_str());
    return error;
  }
  return {};
}

std::string TraceToJson(std::span<const TraceEvent> events) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  std::map<int64_t, std::string> processes;
  for (const TraceEvent& event : events) processes[event.pid] = event.process;
  for (const auto& [pid, name] : processes) {
    list.push_back({{"name", "process_name"}, {"ph", "M"}, {"pid", pid}, {"tid", 0}, {"args", {{"name", name}}}});
  }
  for (const TraceEvent& event : events) {
    list.push_back({{"name", event.name},
                    {"cat", "handoff"},
                    {"ph", "X"},
                    {"ts", event.start_us},
                    {"dur", event.duration_us},
                    {"pid", event.pid},
                    {"tid", event.tid}});
  }
  const nlohmann::ordered_json json{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(list)}};
  return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace qkv::cli
