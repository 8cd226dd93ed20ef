// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For flow_file.cc and flow_agents.cc only: values of a YAML document, checked, with errors that say where. yaml-cpp
// throws; whoever uses this catches YAML::Exception.

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "qkv/codec/codec.h"
#include "qkv/flow/flow_text.h"

namespace qkv::flow_yaml {

inline constexpr int kMaxValues = 200000;  // keys, texts, lists and maps of a file

// Runs through the events of a document without building it: a large document costs a hundred times its size when it is
// built, and no flow has as many values as a small part of that.
class Counter : public YAML::EventHandler {
 public:
  const YAML::Mark& start() const { return start_; }

  void OnDocumentStart(const YAML::Mark& mark) override { start_ = mark; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override { Count(mark); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { Count(mark); }
  void OnScalar(const YAML::Mark& mark, const std::string&, YAML::anchor_t, const std::string&) override {
    Count(mark);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    Count(mark);
  }
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    Count(mark);
  }
  void OnMapEnd() override {}

 private:
  void Count(const YAML::Mark& mark) {
    if (++values_ > kMaxValues) throw YAML::Exception(mark, fmt::format("more than {} values", kMaxValues));
  }
  YAML::Mark start_;
  int values_ = 0;
};

struct Entry {
  std::string key;
  YAML::Mark key_mark;
  YAML::Node value;

  YAML::Mark mark() const { return value.Mark().is_null() ? key_mark : value.Mark(); }
};

inline std::string_view KindName(const YAML::Node& node) {
  switch (node.Type()) {
    case YAML::NodeType::Scalar: return "text";
    case YAML::NodeType::Sequence: return "a list";
    case YAML::NodeType::Map: return "a map";
    default: return "nothing";
  }
}

// Reads values; every error starts with "<path>:<line>:<column>: ".
class Reader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)), directory_(std::filesystem::path(path_).parent_path()) {}

  const std::string& path() const { return path_; }

  template <class... Args>
  tl::unexpected<Error> At(const YAML::Mark& mark, fmt::format_string<Args...> format, Args&&... args) const {
    return Located(mark, Error{Code::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...)});
  }
  // In one line, whatever part of the file the message quotes.
  tl::unexpected<Error> Located(const YAML::Mark& mark, Error error) const {
    std::ranges::replace(error.message, '\n', ' ');
    return Prefixed(fmt::format("{}:{}:{}", path_, mark.line + 1, mark.column + 1), std::move(error));
  }

  // The entries of a map. An empty `known` admits every key.
  Result<std::vector<Entry>> Map(const YAML::Node& node, const YAML::Mark& mark, std::string_view what,
                                 std::span<const std::string_view> known) const {
    if (!node.IsMap()) return At(mark, "{}: expected a map of keys, found {}", what, KindName(node));
    std::vector<Entry> entries;
    std::set<std::string> seen;
    for (const auto& pair : node) {
      if (!pair.first.IsScalar()) return At(pair.first.Mark(), "{}: a key must be text", what);
      Entry entry{pair.first.Scalar(), pair.first.Mark(), pair.second};
      if (!known.empty() && std::find(known.begin(), known.end(), entry.key) == known.end()) {
        return At(entry.key_mark, "unknown key {}{}", Quoted(entry.key),
                  Suggestion(entry.key, {known.begin(), known.end()}));
      }
      if (!seen.insert(entry.key).second) return At(entry.key_mark, "key {} is there twice", Quoted(entry.key));
      entries.push_back(std::move(entry));
    }
    return entries;
  }

  // The elements of a list, or the value alone.
  static std::vector<Entry> ListOrOne(const Entry& entry) {
    if (!entry.value.IsSequence()) return {entry};
    std::vector<Entry> all;
    for (const YAML::Node& node : entry.value) all.push_back({entry.key, entry.mark(), node});
    return all;
  }

  Result<std::string> Text(const Entry& entry) {
    if (!entry.value.IsScalar()) {
      return At(entry.mark(), "{}: expected text, found {}{}", entry.key, KindName(entry.value),
                entry.value.IsMap() ? " (text that starts with '{{' must be in quotes or a '|' block)" : "");
    }
    const std::string& text = entry.value.Scalar();
    // Escapes such as "\0" make bytes that the file itself may not hold.
    if (FindNonText(text) != std::string::npos) return At(entry.mark(), "{}: not UTF-8 text", entry.key);
    QKV_RETURN_IF_ERROR(Account(entry, text.size()));
    return text;
  }
  // Aliases make a small file name a large text many times.
  Status Account(const Entry& entry, size_t bytes) {
    text_bytes_ += bytes;
    if (text_bytes_ <= kMaxFlowTextBytes) return {};
    return At(entry.mark(), "{}: the flow's texts are more than {} MiB together", entry.key, kMaxFlowTextBytes >> 20);
  }

  template <class Number>
  Status Read(const Entry& entry, double low, double high, Number& out) const {
    const std::string_view kind = std::is_integral_v<Number> ? "a whole number" : "a number";
    const std::string text = entry.value.IsScalar() ? entry.value.Scalar() : std::string();
    std::conditional_t<std::is_integral_v<Number>, int64_t, double> value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool whole = !text.empty() && end == text.data() + text.size();
    if (!whole || error != std::errc() || !(value >= low && value <= high)) {
      return At(entry.mark(), "{}: expected {} from {} to {}, found {}", entry.key, kind, low, high,
                entry.value.IsScalar() ? Quoted(text) : std::string(KindName(entry.value)));
    }
    out = static_cast<Number>(value);
    return {};
  }

  Status Read(const Entry& entry, bool& out) const {
    if (!entry.value.IsScalar() || !YAML::convert<bool>::decode(entry.value, out)) {
      return At(entry.mark(), "{}: expected true or false, found {}", entry.key,
                entry.value.IsScalar() ? Quoted(entry.value.Scalar()) : std::string(KindName(entry.value)));
    }
    return {};
  }

  Result<KvChoice> Codec(const Entry& entry, const YAML::Node& node) const {
    const YAML::Mark mark = node.Mark().is_null() ? entry.key_mark : node.Mark();
    if (!node.IsScalar()) return At(mark, "{}: expected a codec pair such as i8, found {}", entry.key, KindName(node));
    if (node.Scalar().starts_with("layers:")) {
      return At(mark,
                "{}: codecs by layer are made for one model; an agent's 'max_bytes' and run --kv-bits choose them",
                entry.key);
    }
    auto choice = ParseKvChoice(node.Scalar());
    if (!choice) return Located(mark, Error{Code::kInvalidArgument, entry.key + ": " + choice.error().message});
    return choice;
  }

  Result<std::string> Path(const Entry& entry) {
    QKV_ASSIGN_OR_RETURN(std::string text, Text(entry));
    if (text.empty()) return At(entry.mark(), "{}: expected a path, found nothing", entry.key);
    return (directory_ / text).string();
  }

 private:
  const std::string path_;
  const std::filesystem::path directory_;
  size_t text_bytes_ = 0;
};

}  // namespace qkv::flow_yaml
