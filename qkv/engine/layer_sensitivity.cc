// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/layer_sensitivity.h"

#include <ggml.h>

#include <algorithm>
#include <filesystem>

#include "qkv/codec/frame.h"
#include "qkv/engine/page_encoder.h"
#include "qkv/engine/preset.h"
#include "qkv/engine/quality_probe.h"
#include "qkv/engine/whole_file.h"

namespace qkv {
namespace {

constexpr size_t kMaxFileBytes = size_t{1} << 20;
constexpr int kAllLayers = -1;

SegmentConstants ConstantsOfContext(const Context& exact) {
  std::vector<F16Page> pages;
  for (const auto& span : exact.card.spans()) {
    const Segment& segment = *exact.segments[span.segment()];
    for (size_t page = span.first_page(); page < size_t{span.first_page()} + span.n_pages(); ++page) {
      pages.push_back({segment.page(page), segment.pages()[page].tokens});
    }
  }
  return ConstantsOf(exact.segments.front()->geometry(), pages, /*at_zero=*/true);
}

// Through a codec of 3 to 8 bits and back as its pages would give it, on one side of one layer or of all.
Sequence::RowTransform Through(CodecId id, Side coded_side, int coded_layer, const SegmentConstants& constants,
                               int head_dim) {
  return [=, &constants](Side side, int layer, int head, int first_position, int tokens, float* rows) {
    if (side != coded_side || (coded_layer != kAllLayers && coded_layer != layer)) return;
    float mean[kMaxHeadDim];
    std::vector<float> first(rows, rows + head_dim);
    const size_t at = constants.layout.Offset(layer, head, Constant::kMeanK) / sizeof(uint16_t);
    ggml_fp16_to_fp32_row(constants.halves.data() + at, mean, head_dim);
    const float* off = side == Side::kK ? mean : nullptr;
    const Codec& codec = CodecOf(id);
    ToRotated(rows, tokens, head_dim, off, rows);
    if (first_position == 0) std::fill_n(rows, head_dim, 0.0f);
    alignas(64) std::byte block[size_t{kPageTokens} * kMaxHeadDim + 64];
    QKV_CHECK(codec.block_bytes(head_dim) <= sizeof block);
    codec.encode(side, rows, tokens, head_dim, block);
    codec.decode(side, block, tokens, head_dim, rows);
    FromRotated(rows, tokens, head_dim, off, rows);
    if (first_position == 0) std::ranges::copy(first, rows);
  };
}

// Whether the table is predicted to do less harm than one pair everywhere.
bool Improves(const LayerSensitivity& sensitivity, const LayerCodecs& table, CodecPair pair) {
  std::vector<CodecPair> layers, same(static_cast<size_t>(table.geometry().n_layers), pair);
  for (size_t i = 0; i < same.size(); ++i) layers.push_back(table.at(static_cast<int>(i)).codecs);
  if (!LayerCodecs::Create(table.geometry(), same)) return false;  // no pair of 3 to 8, but f16
  return PredictKl(sensitivity, layers) < PredictKl(sensitivity, same);
}

// `within`: what the sensitivities make of the limit that `pair` keeps.
Result<PageCodecs> BetterOf(
    const Model& model, const Result<CodecPair>& pair,
    const std::function<Result<std::shared_ptr<const LayerCodecs>>(const LayerSensitivity&)>& within) {
  const auto sensitivity = ReadLayerSensitivity(model, LayerSensitivityPath(model));
  if (!sensitivity && sensitivity.error().code != Code::kNotFound) return tl::unexpected(sensitivity.error());
  if (sensitivity) {
    auto table = within(*sensitivity);
    if (table && (!pair || Improves(*sensitivity, **table, *pair))) return PageCodecs(kLayersPair, *std::move(table));
  }
  if (!pair) return tl::unexpected(pair.error());
  return PageCodecs(*pair);
}

}  // namespace

Result<LayerSensitivity> MeasureLayers(const std::shared_ptr<const Model>& model,
                                       std::span<const std::vector<Token>> stretches, int n_prefix, int n_threads,
                                       const std::function<void(size_t done, size_t total)>& on_progress) {
  const Geometry geometry = model->geometry();
  LayerSensitivity out;
  for (SideSensitivity* side : {&out.k, &out.v}) side->layer.resize(static_cast<size_t>(geometry.n_layers));
  ProbeOptions options;
  options.n_threads = n_threads;
  const size_t total = stretches.size() * (2 * static_cast<size_t>(geometry.n_layers) + 2 * kLayerWidths + 1);
  size_t done = 0;
  const auto step = [&] {
    if (on_progress) on_progress(++done, total);
  };
  for (const std::vector<Token>& tokens : stretches) {
    QKV_ASSIGN_OR_RETURN(const auto probe, HandoffProbe::Read(model, tokens, n_prefix, options));
    step();
    const SegmentConstants constants = ConstantsOfContext(probe->exact());
    const auto add = [&](double& kl, int bits, Side side, int layer) -> Status {
      const auto id = static_cast<CodecId>(static_cast<int>(CodecId::k3) + bits - kMinLayerBits);
      QKV_ASSIGN_OR_RETURN(
          const ProbeResult result,
          probe->Score({{CodecId::kF16, CodecId::kF16}, Through(id, side, layer, constants, geometry.head_dim)}));
      kl += result.score.kl_mean() / static_cast<double>(stretches.size());
      step();
      return {};
    };
    for (const Side side : {Side::kK, Side::kV}) {
      SideSensitivity& sums = side == Side::kK ? out.k : out.v;
      for (int layer = 0; layer < geometry.n_layers; ++layer) {
        QKV_RETURN_IF_ERROR(add(sums.layer[static_cast<size_t>(layer)], kProbeBits, side, layer));
      }
      for (int bits = kMinLayerBits; bits <= kMaxLayerBits; ++bits) {
        QKV_RETURN_IF_ERROR(add(sums.widths[static_cast<size_t>(bits - kMinLayerBits)], bits, side, kAllLayers));
      }
    }
    out.tokens += static_cast<int>(tokens.size());
  }
  // What is read must be what was written; a model that answers without a number is no model to measure.
  const std::string digest = model->identity().weights_digest();
  if (!ParseLayerSensitivity(ToJson(out, digest), digest, geometry.n_layers, "")) {
    return Err(Code::kInvalidArgument, "coding keys or values changes none of this model's answers to this text");
  }
  return out;
}

std::string LayerSensitivityPath(const Model& model) {
  const std::filesystem::path path(model.path());
  return (path.parent_path() / (model.identity().weights_digest() + ".qkvlayers")).string();
}

Result<LayerSensitivity> ReadLayerSensitivity(const Model& model, const std::string& path) {
  const auto bytes = ReadWholeFile(path, kMaxFileBytes);
  if (!bytes && bytes.error().code == Code::kNotFound) {
    return Err(Code::kNotFound,
               "there are no sensitivities of this model's layers at '{}'; measure them with: qkvshare calibrate "
               "--layers",
               path);
  }
  if (!bytes) return tl::unexpected(bytes.error());
  return ParseLayerSensitivity({reinterpret_cast<const char*>(bytes->data()), bytes->size()},
                               model.identity().weights_digest(), model.geometry().n_layers, path);
}

Result<PageCodecs> CodecsByLayer(const Model& model, double bits) {
  QKV_ASSIGN_OR_RETURN(const LayerSensitivity sensitivity, ReadLayerSensitivity(model, LayerSensitivityPath(model)));
  QKV_ASSIGN_OR_RETURN(auto layers, LayersWithinBits(sensitivity, model.geometry(), bits));
  return PageCodecs(kLayersPair, std::move(layers));
}

Result<PageCodecs> BestWithinBits(const Model& model, double bits) {
  const Geometry geometry = model.geometry();
  return BetterOf(model, BestWithinBits(bits, geometry.head_dim),
                  [&](const LayerSensitivity& sensitivity) { return LayersWithinBits(sensitivity, geometry, bits); });
}

Result<PageCodecs> BestWithinBytes(const Model& model, uint64_t max_bytes, int n_tokens) {
  const Geometry geometry = model.geometry();
  return BetterOf(model, BestWithinBytes(max_bytes, n_tokens, geometry), [&](const LayerSensitivity& sensitivity) {
    const auto n_pages = static_cast<uint64_t>((n_tokens + kPageTokens - 1) / kPageTokens);
    return LayersWithin(sensitivity, geometry, max_bytes / n_pages / kPageAlignment * kPageAlignment);
  });
}

}  // namespace qkv
