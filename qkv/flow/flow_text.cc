// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/flow_text.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "qkv/base/fd.h"

namespace qkv {
namespace {

constexpr size_t kMaxNameLength = 64;

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

bool IsFlowName(std::string_view text) {
  return !text.empty() && text.size() <= kMaxNameLength && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
  });
}

std::string Quoted(std::string_view text) {
  constexpr size_t kMost = 60;
  std::string quoted(text.substr(0, kMost));
  if (text.size() > kMost) {
    size_t cut = kMost;
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;
    quoted = std::string(text.substr(0, cut)) + "…";
  }
  for (char& c : quoted) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return "'" + quoted + "'";
}

std::string Suggestion(std::string_view word, const std::vector<std::string_view>& known) {
  std::string_view best;
  size_t best_distance = std::numeric_limits<size_t>::max();
  if (word.size() <= 2 * kMaxNameLength) {
    for (std::string_view name : known) {
      const size_t distance = EditDistance(word, name);
      if (distance <= std::max<size_t>(1, name.size() / 3) && distance < best_distance) {
        best = name;
        best_distance = distance;
      }
    }
  }
  return best.empty() ? "" : fmt::format(", did you mean '{}'?", best);
}

size_t FindNonText(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (lead == 0 || length == 0 || text.size() - i < length) return i;
    for (size_t k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      unsigned low = 0x80, high = 0xBF;
      if (k == 1 && lead == 0xE0) low = 0xA0;
      if (k == 1 && lead == 0xED) high = 0x9F;
      if (k == 1 && lead == 0xF0) low = 0x90;
      if (k == 1 && lead == 0xF4) high = 0x8F;
      if (next < low || next > high) return i;
    }
    i += length;
  }
  return std::string_view::npos;
}

Result<std::string> ReadTextFile(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return ErrnoError("cannot read " + path);
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return ErrnoError("cannot read " + path);
  if (!S_ISREG(info.st_mode)) return Err(Code::kInvalidArgument, "cannot read {}: not a regular file", path);
  std::string text;
  char buffer[65536];
  for (;;) {
    const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError("cannot read " + path);
    if (n == 0) break;
    text.append(buffer, static_cast<size_t>(n));
    if (text.size() > kMaxFlowFileBytes) {
      return Err(Code::kInvalidArgument, "{} is larger than {} MiB", path, kMaxFlowFileBytes >> 20);
    }
  }
  return text;
}

Result<std::vector<TextPart>> SplitReferences(std::string_view text) {
  std::vector<TextPart> parts;
  while (!text.empty()) {
    const size_t open = text.find("{{");
    if (open != 0) {
      parts.push_back({TextPart::Kind::kLiteral, text.substr(0, open)});
      if (open == std::string_view::npos) break;
      text.remove_prefix(open);
    }
    const size_t close = text.find("}}");
    if (close == std::string_view::npos) {
      return Err(Code::kInvalidArgument, "{} has no closing '}}}}'", Quoted(text));
    }
    std::string_view reference = text.substr(2, close - 2);
    const std::string_view whole = text.substr(0, close + 2);
    text.remove_prefix(close + 2);
    while (!reference.empty() && reference.front() == ' ') reference.remove_prefix(1);
    while (!reference.empty() && reference.back() == ' ') reference.remove_suffix(1);
    const size_t dot = reference.find('.');
    const std::string_view left = reference.substr(0, dot);
    const std::string_view right = dot == std::string_view::npos ? "" : reference.substr(dot + 1);
    if (left == "input" && IsFlowName(right)) {
      parts.push_back({TextPart::Kind::kInput, right});
    } else if (IsFlowName(left) && right == "output") {
      parts.push_back({TextPart::Kind::kOutput, left});
    } else if (reference == "item") {
      parts.push_back({TextPart::Kind::kItem, reference});
    } else if (reference == "index") {
      parts.push_back({TextPart::Kind::kIndex, reference});
    } else {
      return Err(Code::kInvalidArgument, "{} is no reference: expected {{{{input.<name>}}}} or {{{{<agent>.output}}}}",
                 Quoted(whole));
    }
  }
  return parts;
}

Result<std::string> FillReferences(std::string_view text,
                                   const std::function<Result<std::string>(const TextPart&)>& value_of) {
  QKV_ASSIGN_OR_RETURN(const std::vector<TextPart> parts, SplitReferences(text));
  std::string filled;
  for (const TextPart& part : parts) {
    std::string value;
    std::string_view piece = part.value;
    if (part.kind != TextPart::Kind::kLiteral) {
      QKV_ASSIGN_OR_RETURN(value, value_of(part));
      piece = value;
    }
    if (filled.size() + piece.size() > kMaxFlowTextBytes) {
      return Err(Code::kInvalidArgument, "the prompt is longer than {} MiB", kMaxFlowTextBytes >> 20);
    }
    filled += piece;
  }
  return filled;
}

}  // namespace qkv
