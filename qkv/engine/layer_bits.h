// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Bits by layer: what coding one layer's keys or values does to a model's answers, and the table of widths that spends a
// limit where it helps most. Pure functions, any thread; layer_sensitivity.h measures.

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/segment/layout.h"

namespace qkv {

inline constexpr int kMinLayerBits = 3;
inline constexpr int kMaxLayerBits = 8;
inline constexpr int kLayerWidths = kMaxLayerBits - kMinLayerBits + 1;
inline constexpr int kProbeBits = 3;  // where a single layer's share shows best

// Mean KL against f16 pages, nats, of one side: finite, not negative, some of each list above 0.
struct SideSensitivity {
  std::vector<double> layer;                  // [n_layers], this layer alone in kProbeBits, all others exact
  std::array<double, kLayerWidths> widths{};  // all layers in 3, 4 … 8 bits
  bool operator==(const SideSensitivity&) const = default;
};
struct LayerSensitivity {
  SideSensitivity k, v;  // the other side exact
  int tokens = 0;        // that it was measured on
  bool operator==(const LayerSensitivity&) const = default;
};

// Of pages of these pairs, [n_layers] of 3 to 8. Layers' shares of a side's KL are taken to be the same at every width, and
// everything to add up: so a table of one pair has what was measured for it, K and V apart.
double PredictKl(const LayerSensitivity& sensitivity, std::span<const CodecPair> layers);

// The table of least predicted KL whose blocks take at most max_block_bytes per page. One bit after another goes to the
// layer and side that gains most by it; the first of equals. Error: kInvalidArgument when 3 bits everywhere are too many.
Result<std::shared_ptr<const LayerCodecs>> LayersWithin(const LayerSensitivity& sensitivity, const Geometry& geometry,
                                                        size_t max_block_bytes);
// The same with a limit in stored bits per value, scales included.
Result<std::shared_ptr<const LayerCodecs>> LayersWithinBits(const LayerSensitivity& sensitivity,
                                                            const Geometry& geometry, double bits);

// As a file beside a model has it (docs/FORMAT.md §10).
std::string ToJson(const LayerSensitivity& sensitivity, std::string_view weights_digest);
// `name`: of the file, for messages. Errors: kCorrupt; kIncompatible when it is of another version or model.
Result<LayerSensitivity> ParseLayerSensitivity(std::string_view json, std::string_view weights_digest, int n_layers,
                                               std::string_view name);

}  // namespace qkv
