// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/codebooks.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "qkv/codec/frame.h"
#include "qkv/engine/whole_file.h"

namespace qkv {
namespace {

constexpr size_t kMostBytes = size_t{512} << 20;  // of the largest shape there may be
constexpr size_t kPointsPerBook = 16384;          // as many as TrainPq looks at

PqShape ShapeOf(const Model& model) {
  const Geometry geometry = model.geometry();
  return {geometry.n_layers, geometry.n_kv_heads, geometry.head_dim};
}

// Pairs of rotated rows in units of their rows' root mean square, per layer, KV head and side.
class Points {
 public:
  // Every `step`-th of a text's tokens is looked at.
  Points(const Geometry& geometry, size_t step)
      : geometry_(geometry), step_(step), points_(2 * Heads(geometry.n_layers, geometry)) {}

  // Rows [n][n_kv_heads][head_dim] of a whole stretch, as SequenceOptions::on_rows gives them.
  void Add(Side side, int layer, size_t n, std::span<const float> rows) {
    const auto dim = static_cast<size_t>(geometry_.head_dim);
    const auto heads = static_cast<size_t>(geometry_.n_kv_heads);
    QKV_CHECK(rows.size() == n * heads * dim);
    std::vector<float> row(dim), mean(dim);
    for (size_t head = 0; head < heads; ++head) {
      const auto at = [&](size_t t) { return rows.subspan((t * heads + head) * dim, dim); };
      std::vector<double> sums(dim);
      for (size_t t = 1; t < n; ++t) {
        for (size_t c = 0; c < dim; ++c) sums[c] += at(t)[c];
      }
      for (size_t c = 0; c < dim; ++c)
        mean[c] = static_cast<float>(sums[c] / static_cast<double>(std::max<size_t>(n, 2) - 1));
      std::vector<float>& points = points_[Index(side, layer, static_cast<int>(head))];
      for (size_t t = 1; t < n; t += step_) {
        ToRotated(at(t).data(), 1, geometry_.head_dim, side == Side::kK ? mean.data() : nullptr, row.data());
        double squares = 0;
        for (const float value : row) squares += static_cast<double>(value) * value;
        const auto rms = static_cast<float>(std::sqrt(squares / static_cast<double>(dim)));
        for (size_t m = 0; m < dim / 2 && rms > 0; ++m) {
          points.push_back(row[m] / rms);
          points.push_back(row[dim / 2 + m] / rms);
        }
      }
    }
  }

  std::span<const float> Of(Side side, int layer, int head) const { return points_[Index(side, layer, head)]; }

 private:
  static size_t Heads(int layers, const Geometry& geometry) {
    return static_cast<size_t>(layers) * static_cast<size_t>(geometry.n_kv_heads);
  }
  size_t Index(Side side, int layer, int head) const {
    return 2 * (Heads(layer, geometry_) + static_cast<size_t>(head)) + (side == Side::kV ? 1 : 0);
  }

  Geometry geometry_;
  size_t step_;
  std::vector<std::vector<float>> points_;
};

}  // namespace

std::string CodebooksPath(const Model& model) {
  const std::filesystem::path path(model.path());
  return (path.parent_path() / (model.identity().weights_digest() + ".qkvpq")).string();
}

Status WriteCodebooks(const PqCodebooks& codebooks, const std::string& path) {
  const std::vector<std::byte> bytes = codebooks.Serialize();
  return WriteWholeFile(path, {bytes});
}

Result<std::shared_ptr<const PqCodebooks>> ReadCodebooks(const Model& model, const std::string& path) {
  const auto bytes = ReadWholeFile(path, kMostBytes);
  if (!bytes && bytes.error().code == Code::kNotFound) {
    return Err(Code::kNotFound,
               "there are no codebooks for this model at '{}'; make some with: qkvshare calibrate --codebooks", path);
  }
  if (!bytes) return tl::unexpected(bytes.error());
  auto codebooks = PqCodebooks::Parse(*bytes);
  if (!codebooks) {
    Error error = codebooks.error();
    error.message = fmt::format("'{}': {}; make others with: qkvshare calibrate --codebooks", path, error.message);
    return tl::unexpected(std::move(error));
  }
  if (codebooks->model_digest() != model.weights_digest() || !Fits(*codebooks, model)) {
    return Err(Code::kIncompatible,
               "codebooks '{}' are of another model; make some with: qkvshare calibrate --codebooks", path);
  }
  return std::make_shared<const PqCodebooks>(*std::move(codebooks));
}

bool Fits(const PqCodebooks& codebooks, const Model& model) {
  return codebooks.shape() == ShapeOf(model);
}

Result<PqCodebooks> LearnCodebooks(const std::shared_ptr<const Model>& model, std::span<const Token> tokens,
                                   int n_stretch, int n_threads,
                                   const std::function<void(size_t done, size_t total)>& on_progress) {
  const Geometry geometry = model->geometry();
  const size_t rows_per_book = kPointsPerBook / static_cast<size_t>(geometry.head_dim / 2);
  Points points(geometry, std::max<size_t>(1, tokens.size() / rows_per_book));
  SequenceOptions options;
  options.n_ctx = options.n_batch = n_stretch;  // a batch is a stretch, so that its mean can be taken
  options.n_threads = n_threads;
  options.kv = {CodecId::kF16, CodecId::kF16};
  options.on_rows = [&](RowKind kind, int layer, int n, std::span<const float> rows) {
    if (kind == RowKind::kQ) return;
    points.Add(kind == RowKind::kK ? Side::kK : Side::kV, layer, static_cast<size_t>(n), rows);
  };
  QKV_ASSIGN_OR_RETURN(const auto sequence, Sequence::Create(model, options));
  for (size_t done = 0; done < tokens.size();) {
    const size_t n = std::min<size_t>(tokens.size() - done, static_cast<size_t>(n_stretch));
    sequence->Clear();
    QKV_RETURN_IF_ERROR(sequence->Forward(tokens.subspan(done, n)));
    done += n;
    if (on_progress) on_progress(done, tokens.size());
  }
  std::vector<int8_t> all;
  for (int layer = 0; layer < geometry.n_layers; ++layer) {
    for (int head = 0; head < geometry.n_kv_heads; ++head) {
      for (const Side side : {Side::kK, Side::kV}) {
        for (const int n_centroids : {256, 16}) {
          QKV_ASSIGN_OR_RETURN(const auto book, TrainPq(points.Of(side, layer, head), n_centroids));
          all.insert(all.end(), book.begin(), book.end());
        }
      }
    }
    if (on_progress) on_progress(static_cast<size_t>(layer) + 1, static_cast<size_t>(geometry.n_layers));
  }
  return PqCodebooks::Make(ShapeOf(*model), model->weights_digest(), std::move(all));
}

}  // namespace qkv
