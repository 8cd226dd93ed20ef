// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/flow/text_table.h"

#include <algorithm>
#include <utility>

#include "qkv/base/error.h"

namespace qkv {

TextTable::TextTable(std::vector<bool> right) : right_(std::move(right)), widths_(right_.size(), 0) {}

void TextTable::Add(std::vector<std::string> row) {
  QKV_CHECK(row.size() == widths_.size());
  for (size_t i = 0; i < row.size(); ++i) widths_[i] = std::max(widths_[i], row[i].size());
  rows_.push_back(std::move(row));
}

std::string TextTable::Format() const {
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths_[i] - row[i].size(), ' ');
      line += (i == 0 ? "" : "  ") + (right_[i] ? pad + row[i] : row[i] + pad);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace qkv
