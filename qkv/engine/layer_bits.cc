// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/layer_bits.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "qkv/engine/preset.h"

namespace qkv {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kVersion = 1;

CodecId CodecOfBits(int bits) {
  return static_cast<CodecId>(static_cast<int>(CodecId::k3) + bits - kMinLayerBits);
}
int BitsOf(CodecId codec) {
  return static_cast<int>(codec) - static_cast<int>(CodecId::k3) + kMinLayerBits;
}

// Of a layer at a width.
double Damage(const SideSensitivity& side, size_t layer, int bits) {
  const double all = std::accumulate(side.layer.begin(), side.layer.end(), 0.0);
  return side.layer[layer] / all * side.widths[static_cast<size_t>(bits - kMinLayerBits)];
}

// [n] numbers that add up to something.
bool ReadNumbers(const Json& object, const char* key, std::span<double> out) {
  if (!object.contains(key) || !object[key].is_array() || object[key].size() != out.size()) return false;
  double sum = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const Json& number = object[key][i];
    if (!number.is_number()) return false;
    out[i] = number.get<double>();
    if (!std::isfinite(out[i]) || out[i] < 0) return false;
    sum += out[i];
  }
  return std::isfinite(sum) && sum > 0;
}

}  // namespace

double PredictKl(const LayerSensitivity& sensitivity, std::span<const CodecPair> layers) {
  double kl = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    kl += Damage(sensitivity.k, i, BitsOf(layers[i].k)) + Damage(sensitivity.v, i, BitsOf(layers[i].v));
  }
  return kl;
}

Result<std::shared_ptr<const LayerCodecs>> LayersWithin(const LayerSensitivity& sensitivity, const Geometry& geometry,
                                                        size_t max_block_bytes) {
  const auto n_layers = static_cast<size_t>(geometry.n_layers);
  QKV_CHECK(sensitivity.k.layer.size() == n_layers && sensitivity.v.layer.size() == n_layers);
  const auto layer_bytes = [&](int bits) {  // of one side
    return CodecOf(CodecOfBits(bits)).block_bytes(geometry.head_dim) * static_cast<size_t>(geometry.n_kv_heads);
  };
  size_t bytes = 2 * n_layers * layer_bytes(kMinLayerBits);
  if (bytes > max_block_bytes) {
    return Err(Code::kInvalidArgument, "{} bytes per page, expected at least {} ({} bits in every layer)",
               max_block_bytes, bytes, kMinLayerBits);
  }
  struct Choice {
    const SideSensitivity* side;
    size_t layer;
    int bits = kMinLayerBits;
    double gain() const { return Damage(*side, layer, bits) - Damage(*side, layer, bits + 1); }
  };
  std::vector<Choice> choices;
  for (size_t layer = 0; layer < n_layers; ++layer) {
    choices.push_back({&sensitivity.k, layer});
    choices.push_back({&sensitivity.v, layer});
  }
  for (;;) {
    Choice* best = nullptr;
    for (Choice& choice : choices) {
      if (choice.bits == kMaxLayerBits) continue;
      if (layer_bytes(choice.bits + 1) - layer_bytes(choice.bits) > max_block_bytes - bytes) continue;
      if (best == nullptr || choice.gain() > best->gain()) best = &choice;
    }
    if (best == nullptr) break;
    bytes += layer_bytes(best->bits + 1) - layer_bytes(best->bits);
    ++best->bits;
  }
  std::vector<CodecPair> pairs;
  for (size_t layer = 0; layer < n_layers; ++layer) {
    pairs.push_back({CodecOfBits(choices[2 * layer].bits), CodecOfBits(choices[2 * layer + 1].bits)});
  }
  return LayerCodecs::Create(geometry, pairs);
}

Result<std::shared_ptr<const LayerCodecs>> LayersWithinBits(const LayerSensitivity& sensitivity,
                                                            const Geometry& geometry, double bits) {
  const double values = 2.0 * kPageTokens * geometry.n_layers * geometry.n_kv_heads * geometry.head_dim;
  const double fewest =
      BitsPerValue(CodecPair{CodecOfBits(kMinLayerBits), CodecOfBits(kMinLayerBits)}, geometry.head_dim);
  if (!(bits >= fewest)) {
    return Err(Code::kInvalidArgument, "{} bits per value, expected at least {} ({} bits in every layer)", bits, fewest,
               kMinLayerBits);
  }
  return LayersWithin(sensitivity, geometry, static_cast<size_t>(std::min(bits, 16.0) * values / 8));
}

std::string ToJson(const LayerSensitivity& sensitivity, std::string_view weights_digest) {
  const auto side = [](const SideSensitivity& s) { return Json{{"layers", s.layer}, {"widths", s.widths}}; };
  return Json{{"qkvlayers", kVersion},    {"weights_digest", weights_digest}, {"tokens", sensitivity.tokens},
              {"probe_bits", kProbeBits}, {"first_width", kMinLayerBits},     {"k", side(sensitivity.k)},
              {"v", side(sensitivity.v)}}
             .dump(1) +
         "\n";
}

Result<LayerSensitivity> ParseLayerSensitivity(std::string_view text, std::string_view weights_digest, int n_layers,
                                               std::string_view name) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto is = [&](const char* key, int value) {
    return json.contains(key) && json[key].is_number_integer() && json[key] == value;
  };
  if (!json.is_object() || !json.contains("qkvlayers")) {
    return Err(Code::kCorrupt, "'{}' does not hold layers' sensitivities", name);
  }
  if (!is("qkvlayers", kVersion) || !is("probe_bits", kProbeBits) || !is("first_width", kMinLayerBits)) {
    return Err(Code::kIncompatible, "'{}' is of another version; make one with: qkvshare calibrate --layers", name);
  }
  const bool ours = json.contains("weights_digest") && json["weights_digest"].is_string() &&
                    json["weights_digest"].get_ref<const std::string&>() == weights_digest;
  if (!ours) {
    return Err(Code::kIncompatible, "'{}' is of another model; make one with: qkvshare calibrate --layers", name);
  }
  LayerSensitivity out;
  const auto read = [&](const char* key, SideSensitivity& side) {
    side.layer.resize(static_cast<size_t>(n_layers));
    return json.contains(key) && json[key].is_object() && ReadNumbers(json[key], "layers", side.layer) &&
           ReadNumbers(json[key], "widths", side.widths);
  };
  const bool has_tokens = json.contains("tokens") && json["tokens"].is_number_unsigned() &&
                          json["tokens"].get<uint64_t>() <= uint64_t{1} << 30;
  if (!has_tokens || !read("k", out.k) || !read("v", out.v)) {
    return Err(Code::kCorrupt, "'{}' is damaged: expected what calibrate --layers writes, for {} layers", name,
               n_layers);
  }
  out.tokens = json["tokens"].get<int>();
  return out;
}

}  // namespace qkv
