// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures layers' sensitivities, and finds them beside a model again. One thread; blocks for as long as the model takes.

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "qkv/engine/layer_bits.h"
#include "qkv/engine/sequence.h"

namespace qkv {

// Protocol `handoff` (quality_probe.h): the first n_prefix tokens of each stretch are handed over, what follows is scored
// but for the last token. Each stretch takes 2 n_layers + 2 kLayerWidths short runs. Errors: Sequence's; kInvalidArgument
// when coding changes nothing at all.
Result<LayerSensitivity> MeasureLayers(const std::shared_ptr<const Model>& model,
                                       std::span<const std::vector<Token>> stretches, int n_prefix, int n_threads,
                                       const std::function<void(size_t done, size_t total)>& on_progress = {});

// A file beside the model: its directory, its weights' digest and ".qkvlayers".
std::string LayerSensitivityPath(const Model& model);
// Errors: ParseLayerSensitivity's; kNotFound (how to make one); kIo, kDenied.
Result<LayerSensitivity> ReadLayerSensitivity(const Model& model, const std::string& path);

// Codecs by layer of at most `bits` per value, by the file beside the model. Errors: ReadLayerSensitivity's and
// LayersWithinBits'.
Result<PageCodecs> CodecsByLayer(const Model& model, double bits);

// The best of at most `bits` per value, or with which a context of n_tokens takes at most max_bytes: preset.h's, or codecs
// by layer where there is a file beside the model and they are predicted to do less harm. Errors: preset.h's, and
// ReadLayerSensitivity's but for kNotFound.
Result<PageCodecs> BestWithinBits(const Model& model, double bits);
Result<PageCodecs> BestWithinBytes(const Model& model, uint64_t max_bytes, int n_tokens);

}  // namespace qkv
