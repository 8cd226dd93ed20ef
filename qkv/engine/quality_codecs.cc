// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/quality_codecs.h"

#include <ggml.h>

#include <cmath>
#include <utility>
#include <vector>

namespace qkv {
namespace {

constexpr std::string_view kPlain = ":plain";

const ggml_type* FindType(std::string_view name) {
  if (name.ends_with(kPlain)) name.remove_suffix(kPlain.size());
  static constexpr ggml_type kTypes[] = {GGML_TYPE_Q8_0, GGML_TYPE_Q4_0};
  for (const ggml_type& type : kTypes) {
    if (name == ggml_type_name(type)) return &type;
  }
  return nullptr;
}

// In place, orthonormal, its own inverse. size: a power of two.
void WalshHadamard(float* x, int size) {
  for (int half = 1; half < size; half *= 2) {
    for (int at = 0; at < size; at += 2 * half) {
      for (int i = at; i < at + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
  const float norm = 1 / std::sqrt(static_cast<float>(size));
  for (int i = 0; i < size; ++i) x[i] *= norm;
}

}  // namespace

double LikeGgmlBits(std::string_view name) {
  const ggml_type* type = FindType(name);
  if (type == nullptr) return 0;
  return 8.0 * static_cast<double>(ggml_type_size(*type)) / static_cast<double>(ggml_blck_size(*type));
}

Sequence::RowTransform LikeGgml(std::string_view name, int head_dim) {
  const ggml_type* type = FindType(name);
  if (type == nullptr || head_dim % ggml_blck_size(*type) != 0) return {};
  ggml_quantize_init(*type);
  int k_size = head_dim % 64 == 0 && !name.ends_with(kPlain) ? 64 : 0;
  const int v_size = k_size;
  while (k_size > 0 && head_dim % (2 * k_size) == 0) k_size *= 2;
  return [=, type = *type, codes = std::vector<std::byte>(ggml_row_size(*type, head_dim))](
             Side side, int, int, int, int tokens, float* rows) mutable {
    const int size = side == Side::kK ? k_size : v_size;
    const auto turn = [&](float* row) {
      for (int at = 0; size > 0 && at < head_dim; at += size) WalshHadamard(row + at, size);
    };
    for (int i = 0; i < tokens; ++i) {
      float* row = rows + static_cast<size_t>(i) * head_dim;
      turn(row);
      ggml_get_type_traits(type)->from_float_ref(row, codes.data(), head_dim);
      ggml_get_type_traits(type)->to_float(codes.data(), row, head_dim);
      turn(row);
    }
  };
}

}  // namespace qkv
