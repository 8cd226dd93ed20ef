// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/importance.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <random>

#include "qkv/engine/preset.h"

namespace qkv {

AttentionMass::AttentionMass(const AttentionShape& shape, int n_layers) : shape_(shape), layers_(n_layers) {}

void AttentionMass::Take(RowKind kind, int layer, int n_tokens, std::span<const float> rows) {
  if (kind == RowKind::kV) return;
  Layer& keys = layers_[layer];
  const auto head_dim = static_cast<size_t>(shape_.head_dim);
  const size_t key_row = head_dim * static_cast<size_t>(shape_.n_kv_heads);
  if (kind == RowKind::kK) {
    keys.keys.insert(keys.keys.end(), rows.begin(), rows.end());
    keys.n_tokens += n_tokens;
    if (mass_.size() < static_cast<size_t>(keys.n_tokens)) mass_.resize(keys.n_tokens);
    return;
  }
  const int group = shape_.n_heads / shape_.n_kv_heads;
  const int first = keys.n_tokens - n_tokens;  // a batch's keys come before its queries
  // Keys with their tokens side by side, so that the loop over tokens is one over neighbours.
  std::vector<float> turned(head_dim * static_cast<size_t>(keys.n_tokens));
  std::vector<float> weights(keys.n_tokens);
  for (int kv_head = 0; kv_head < shape_.n_kv_heads; ++kv_head) {
    for (int t = 0; t < keys.n_tokens; ++t) {
      const float* key = keys.keys.data() + static_cast<size_t>(t) * key_row + static_cast<size_t>(kv_head) * head_dim;
      for (size_t c = 0; c < head_dim; ++c) turned[c * static_cast<size_t>(keys.n_tokens) + t] = key[c];
    }
    for (int i = 0; i < n_tokens; ++i) {
      const int visible = first + i + 1;
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const float* query = rows.data() + (static_cast<size_t>(i) * shape_.n_heads + head) * head_dim;
        std::fill_n(weights.begin(), visible, 0.0f);
        for (size_t c = 0; c < head_dim; ++c) {
          const float q = query[c] * shape_.scale;
          const float* key = turned.data() + c * static_cast<size_t>(keys.n_tokens);
          for (int t = 0; t < visible; ++t) weights[t] += q * key[t];
        }
        const float most = *std::max_element(weights.begin(), weights.begin() + visible);
        double sum = 0;
        for (int t = 0; t < visible; ++t) sum += weights[t] = std::exp(weights[t] - most);
        for (int t = 0; t < visible; ++t) mass_[t] += weights[t] / sum;
      }
    }
  }
}

std::vector<float> AttentionMass::importance() const {
  const double heads = static_cast<double>(layers_.size()) * shape_.n_heads;
  std::vector<float> mean(mass_.size());
  for (size_t t = 0; t < mean.size(); ++t) {
    mean[t] = static_cast<float>(mass_[t] / (heads * static_cast<double>(mean.size() - t)));
  }
  return mean;
}

Result<TokenGroups> ParseTokenGroups(std::string_view text) {
  std::vector<std::string_view> parts;
  for (size_t at = 0; at != text.npos;) {
    const size_t end = text.find('/', at);
    parts.push_back(text.substr(at, end - at));
    at = end == text.npos ? end : end + 1;
  }
  TokenGroups groups;
  int percent = -1;
  if (parts.size() == 4) {
    const char* const end = parts[1].data() + parts[1].size();
    const auto [stop, error] = std::from_chars(parts[1].data(), end, percent);
    if (error != std::errc() || stop != end) percent = -1;
  }
  const bool random = parts[0] == "random";
  if (percent < 0 || percent > 100 || (!random && parts[0] != "attention")) {
    return Err(Code::kInvalidArgument,
               "tokens: expected attention or random, a percentage, the codecs of those tokens and of the others or "
               "'drop', such as attention/20/8/4");
  }
  groups.by = random ? TokenGroups::By::kRandom : TokenGroups::By::kAttention;
  groups.share = percent / 100.0;
  QKV_ASSIGN_OR_RETURN(groups.high, ParseCodecPair(parts[2]));
  if (parts[3] != "drop") {
    QKV_ASSIGN_OR_RETURN(groups.low, ParseCodecPair(parts[3]));
  }
  return groups;
}

double BitsPerValue(const TokenGroups& groups, int n_tokens, int head_dim) {
  const double n_high = std::min<double>(n_tokens, 1 + std::round(groups.share * n_tokens));
  double bits = n_high * BitsPerValue(groups.high, head_dim);
  if (groups.low) bits += (n_tokens - n_high) * BitsPerValue(*groups.low, head_dim);
  return bits / n_tokens;
}

std::vector<float> RandomImportance(size_t n) {
  std::mt19937 random(1);
  std::vector<float> importance(n);
  for (float& x : importance) x = static_cast<float>(random() >> 8);
  return importance;
}

}  // namespace qkv
