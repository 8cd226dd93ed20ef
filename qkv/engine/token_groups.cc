// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/token_groups.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "qkv/engine/preset.h"

namespace qkv {
namespace {

constexpr std::string_view kTokens = "tokens:";
constexpr std::string_view kDrop = "drop";
constexpr std::pair<std::string_view, TokenGroups::By> kBy[] = {{"attention", TokenGroups::By::kAttention},
                                                                {"all-queries", TokenGroups::By::kAllQueries},
                                                                {"random", TokenGroups::By::kRandom}};

std::vector<std::string_view> Split(std::string_view text) {
  std::vector<std::string_view> parts;
  for (size_t at = 0; at != text.npos;) {
    const size_t end = text.find('/', at);
    parts.push_back(text.substr(at, end - at));
    at = end == text.npos ? end : end + 1;
  }
  return parts;
}

Result<CodecPair> WithoutRefinement(std::string_view text) {
  QKV_ASSIGN_OR_RETURN(const CodecPair pair, ParseCodecPair(text));
  if (pair.refine) return Err(Code::kInvalidArgument, "tokens: pages grouped by importance have no refinement plane");
  return pair;
}

}  // namespace

Result<KvChoice> ParseKvChoice(std::string_view text) {
  if (!text.starts_with(kTokens)) {
    QKV_ASSIGN_OR_RETURN(const CodecPair pair, ParseCodecPair(text));
    return pair;
  }
  std::vector<std::string_view> parts = Split(text.substr(kTokens.size()));
  TokenGroups groups;
  const auto by = std::ranges::find(kBy, parts[0], &std::pair<std::string_view, TokenGroups::By>::first);
  if (by != std::end(kBy)) {
    groups.by = by->second;
    parts.erase(parts.begin());
  }
  if (parts.size() != 3) {
    return Err(
        Code::kInvalidArgument,
        "tokens: expected a percentage, the codecs of those tokens, and the codecs of the others or 'drop', such "
        "as tokens:20/8/4");
  }
  const char* const end = parts[0].data() + parts[0].size();
  const auto [stop, error] = std::from_chars(parts[0].data(), end, groups.percent);
  if (error != std::errc() || stop != end || groups.percent < 1 || groups.percent > 99) {
    return Err(Code::kInvalidArgument, "tokens: expected the share of the tokens in percent, from 1 to 99");
  }
  QKV_ASSIGN_OR_RETURN(const CodecPair high, WithoutRefinement(parts[1]));
  if (parts[2] != kDrop) {
    QKV_ASSIGN_OR_RETURN(groups.low, WithoutRefinement(parts[2]));
  }
  return KvChoice(high, groups);
}

std::string ToString(const KvChoice& kv) {
  if (!kv.groups) return ToString(kv.codecs.pair);
  const TokenGroups& groups = *kv.groups;
  std::string text(kTokens);
  if (groups.by != TokenGroups::By::kAttention) {
    text += std::ranges::find(kBy, groups.by, &std::pair<std::string_view, TokenGroups::By>::second)->first;
    text += '/';
  }
  return text + fmt::format("{}/{}/{}", groups.percent, ToString(kv.codecs.pair),
                            groups.low ? ToString(*groups.low) : std::string(kDrop));
}

Status CheckGroups(const KvChoice& kv) {
  if (!kv.groups) return {};
  if (kv.codecs.pair == kLayersPair || kv.groups->low == kLayersPair) {
    return Err(Code::kInvalidArgument,
               "tokens grouped by importance: expected a pair of codecs per group, found codecs "
               "by layer; only one of both can be asked for");
  }
  if (CodecOf(kv.codecs.pair.k).keys_only || (kv.groups->low && CodecOf(kv.groups->low->k).keys_only)) {
    return Err(Code::kInvalidArgument, "tokens grouped by importance: not with keys in {}",
               CodecOf(CodecId::kBands).name);
  }
  if (kv.codecs.pair.refine || (kv.groups->low && kv.groups->low->refine) || kv.groups->percent < 1 ||
      kv.groups->percent > 99) {
    return Err(Code::kInvalidArgument, "{} % of the tokens in {}, expected 1 to 99 and no refinement planes",
               kv.groups->percent, ToString(kv.codecs.pair));
  }
  return {};
}

bool NeedsBooks(const KvChoice& kv) {
  return NeedsBooks(kv.codecs.pair) || (kv.groups && kv.groups->low && NeedsBooks(*kv.groups->low));
}

double BitsPerValue(const KvChoice& kv, int head_dim) {
  if (const LayerCodecs* layers = kv.codecs.layers.get()) {
    const int n_layers = layers->geometry().n_layers;
    double sum = 0;
    for (int layer = 0; layer < n_layers; ++layer) sum += BitsPerValue(layers->at(layer).codecs, head_dim);
    return sum / n_layers;
  }
  const double bits = BitsPerValue(kv.codecs.pair, head_dim);
  if (!kv.groups) return bits;
  const double share = kv.groups->percent / 100.0;
  return share * bits + (kv.groups->low ? (1 - share) * BitsPerValue(*kv.groups->low, head_dim) : 0);
}

int TokensToGroup(int n_tokens) {
  const int pages = (n_tokens - kUngroupedTokens) / kPageTokens;
  return pages < 2 ? 0 : pages * kPageTokens;
}

int GroupedTokens::n_high() const {
  return static_cast<int>(std::ranges::count(high, true));
}

std::vector<int> GroupedTokens::Order() const {
  std::vector<int> order;
  for (int t = 0; t < size(); ++t) {
    if (high[t]) order.push_back(t);
  }
  for (int t = 0; t < size() && !dropped; ++t) {
    if (!high[t]) order.push_back(t);
  }
  return order;
}

GroupedTokens PlanGroups(std::span<const float> importance, int percent, bool drop) {
  const auto n_pages = static_cast<double>(importance.size() / kPageTokens);
  const auto n_high = static_cast<size_t>(std::max(1L, std::lround(percent / 100.0 * n_pages))) * kPageTokens;
  if (n_high >= importance.size()) return {};
  std::vector<float> keys(importance.begin(), importance.end());
  for (float& key : keys) {
    if (std::isnan(key)) key = -std::numeric_limits<float>::infinity();
  }
  std::vector<int> order(keys.size() - 1);
  std::iota(order.begin(), order.end(), 1);
  std::ranges::stable_sort(order, [&](int a, int b) { return keys[a] > keys[b]; });
  GroupedTokens groups{std::vector<bool>(keys.size()), drop};
  groups.high[0] = true;
  for (size_t i = 0; i + 1 < n_high; ++i) groups.high[order[i]] = true;
  return groups;
}

std::vector<float> RandomImportance(size_t n) {
  std::mt19937 random(1);
  std::vector<float> importance(n);
  for (float& x : importance) x = static_cast<float>(random() >> 8);
  return importance;
}

}  // namespace qkv
