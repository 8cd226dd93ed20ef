// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of cells as text: columns as wide as their widest cell, two spaces apart. A value; any thread.

#include <string>
#include <vector>

namespace qkv {

class TextTable {
 public:
  // By column: whether it is aligned to the right, as numbers are.
  explicit TextTable(std::vector<bool> right);

  void Add(std::vector<std::string> row);  // as many cells as there are columns
  std::string Format() const;              // a line per row, without spaces at its end

 private:
  std::vector<bool> right_;
  std::vector<size_t> widths_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace qkv
