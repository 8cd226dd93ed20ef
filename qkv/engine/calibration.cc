// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/calibration.h"

#include <xxhash.h>

#include <Eigen/Cholesky>
#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "qkv/codec/half.h"
#include "qkv/engine/whole_file.h"

namespace qkv {
namespace {

using Matrix64 = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using MatrixView = Eigen::Map<const Matrix64>;

constexpr double kRidge = 1e-4;  // of the mean diagonal: keeps directions that the text never used from blowing up
constexpr std::array<char, 8> kMagic = {'Q', 'K', 'V', 'B', 'A', 'L', '0', '1'};

struct FileHeader {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t byte_order;
  uint32_t n_layers;
  uint32_t n_kv_heads;
  uint32_t head_dim;
  uint32_t reserved;
  std::array<uint8_t, 16> model_digest;
  std::array<uint8_t, 16> digest;  // XXH3-128 of the halves behind the header: per layer and KV head A and the spread
};
static_assert(sizeof(FileHeader) == 64 && std::is_trivially_copyable_v<FileHeader>);
constexpr uint32_t kVersion = 2;
constexpr size_t kMostBytes = size_t{512} << 20;  // of another model's, which is read to say so
constexpr double kLargestSpread = 1024;
constexpr double kBandsReach = 1.15;  // the best of those in docs/EVALUATION.md, Two bands

std::array<uint8_t, 16> DigestOf(std::span<const uint16_t> halves, uint64_t seed) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_withSeed(halves.data(), halves.size_bytes(), seed));
  std::array<uint8_t, 16> digest;
  std::copy_n(canonical.digest, digest.size(), digest.begin());
  return digest;
}

size_t CountOf(const Geometry& g) {
  return size_t{1} * g.n_layers * g.n_kv_heads * (size_t{1} * g.head_dim * g.head_dim + 1);
}

// variances: of the balanced channels, descending.
double SpreadOf(const Eigen::VectorXd& variances) {
  const Eigen::Index half = variances.size() / 2;
  return std::min(std::sqrt(variances.head(half).sum() / variances.tail(half).sum()), kLargestSpread);
}

}  // namespace

BalanceStatistics::BalanceStatistics(const Geometry& geometry, int n_heads)
    : geometry_(geometry), group_(n_heads / geometry.n_kv_heads) {
  const auto d = static_cast<size_t>(geometry.head_dim);
  heads_.assign(static_cast<size_t>(geometry.n_layers) * geometry.n_kv_heads,
                {std::vector<double>(d), std::vector<double>(d * d), std::vector<double>(d * d)});
}

void BalanceStatistics::Add(RowKind kind, int layer, int first_position, int n_tokens, std::span<const float> rows) {
  if (kind == RowKind::kV) return;
  const int d = geometry_.head_dim;
  const int skipped = kind == RowKind::kK && first_position == 0 ? 1 : 0;
  const int heads = kind == RowKind::kK ? geometry_.n_kv_heads : geometry_.n_kv_heads * group_;
  QKV_CHECK(rows.size() == static_cast<size_t>(n_tokens) * heads * d);
  if (layer == 0) (kind == RowKind::kK ? n_keys_ : n_queries_) += n_tokens - skipped;
  for (int head = 0; head < heads; ++head) {
    Head& sums = heads_[static_cast<size_t>(layer) * geometry_.n_kv_heads + head / (heads / geometry_.n_kv_heads)];
    using Rows = Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>, 0,
                            Eigen::OuterStride<>>;
    const Rows all(rows.data() + (static_cast<size_t>(skipped) * heads + head) * d, n_tokens - skipped, d,
                   Eigen::OuterStride<>(static_cast<Eigen::Index>(heads) * d));
    const Matrix64 x = all.cast<double>();
    auto& products = kind == RowKind::kK ? sums.kk : sums.qq;
    Eigen::Map<Matrix64>(products.data(), d, d).noalias() += x.transpose() * x;
    if (kind == RowKind::kK) Eigen::Map<Eigen::VectorXd>(sums.k_sum.data(), d) += x.colwise().sum().transpose();
  }
}

Result<Calibration> Calibration::Compute(const BalanceStatistics& statistics) {
  const Geometry& geometry = statistics.geometry_;
  const int d = geometry.head_dim;
  if (statistics.n_keys_ < int64_t{4} * d) {
    return Err(Code::kInvalidArgument, "{} tokens are too few to calibrate heads of {} channels, expected at least {}",
               statistics.n_keys_, d, 4 * d);
  }
  const auto n_keys = static_cast<double>(statistics.n_keys_);
  const double n_queries = static_cast<double>(statistics.n_queries_) * statistics.group_;
  const auto with_ridge = [&](Matrix64 m) {
    // A head that is always zero has nothing to balance.
    const double ridge = kRidge * m.trace() / d;
    return Matrix64(m + Matrix64::Identity(d, d) * (ridge > 0 ? ridge : 1));
  };
  std::vector<uint16_t> halves;
  for (const BalanceStatistics::Head& head : statistics.heads_) {
    const Eigen::Map<const Eigen::VectorXd> sum(head.k_sum.data(), d);
    const Eigen::VectorXd mean = sum / n_keys;
    const Matrix64 ck = with_ridge(MatrixView(head.kk.data(), d, d) / n_keys - mean * mean.transpose());
    const Matrix64 cq = with_ridge(MatrixView(head.qq.data(), d, d) / n_queries);
    const Eigen::LLT<Matrix64> cholesky(ck);
    if (cholesky.info() != Eigen::Success) {
      return Err(Code::kInvalidArgument, "the text's keys have no covariance that could be inverted");
    }
    const Matrix64 l = cholesky.matrixL();
    const Eigen::SelfAdjointEigenSolver<Matrix64> eigen(l.transpose() * cq * l);
    // Ascending; values of S^2, so S^1/2 is their fourth root.
    const Eigen::VectorXd root = eigen.eigenvalues().cwiseMax(1e-12 * eigen.eigenvalues().maxCoeff()).array().pow(0.25);
    const Matrix64 right = eigen.eigenvectors().rowwise().reverse().transpose();
    // U^T L^-1 = (L^-T U)^T
    const Matrix64 solved = cholesky.matrixU().solve(Matrix64(right.transpose())).transpose();
    Matrix64 a = root.reverse().asDiagonal() * solved;
    // A factor of the whole matrix changes nothing but where the numbers lie: about 1, for fp16's sake.
    a *= std::sqrt(static_cast<double>(d)) / a.norm();
    for (Eigen::Index i = 0; i < a.rows(); ++i) {
      for (Eigen::Index j = 0; j < a.cols(); ++j) halves.push_back(HalfFromFloat(static_cast<float>(a(i, j))));
    }
    halves.push_back(HalfFromFloat(static_cast<float>(SpreadOf(root.reverse().array().square()))));
  }
  return FromHalves(geometry, std::move(halves));
}

Result<Calibration> Calibration::FromHalves(const Geometry& geometry, std::vector<uint16_t> halves) {
  Calibration calibration;
  calibration.geometry_ = geometry;
  const int d = geometry.head_dim;
  const size_t size = static_cast<size_t>(d) * d;
  for (size_t at = 0; at < halves.size(); at += size + 1) {
    for (size_t i = 0; i < size; ++i) calibration.keys_.push_back(FloatFromHalf(halves[at + i]));
    const float spread = FloatFromHalf(halves[at + size]);
    if (!(spread > 0 && spread <= kLargestSpread)) {
      return Err(Code::kCorrupt, "the calibration has a spread of {}, expected one of 0 to {}", spread, kLargestSpread);
    }
    const Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>> stored(
        calibration.keys_.data() + calibration.keys_.size() - size, d, d);
    const Eigen::PartialPivLU<Matrix64> lu(stored.cast<double>());
    const Matrix64 inverse = lu.inverse();
    const double largest = inverse.cwiseAbs().maxCoeff();
    if (!stored.allFinite() || !std::isfinite(largest) || largest > 1e6) {
      return Err(Code::kCorrupt, "a matrix of the calibration cannot be inverted");
    }
    for (Eigen::Index i = 0; i < d; ++i) {
      for (Eigen::Index j = 0; j < d; ++j) calibration.queries_.push_back(static_cast<float>(inverse(j, i)));
    }
  }
  calibration.digest_ = DigestOf(halves, 0);
  calibration.halves_ = std::move(halves);
  return calibration;
}

Calibration Calibration::ForBands() const {
  QKV_CHECK(!halves_.empty());
  Calibration result = *this;
  const size_t size = static_cast<size_t>(geometry_.head_dim) * geometry_.head_dim;
  for (size_t head = 0; head < keys_.size() / size; ++head) {
    const auto factor = static_cast<float>(FloatFromHalf(halves_[(head + 1) * (size + 1) - 1]) * kBandsReach);
    for (size_t i = head * size + size / 2; i < (head + 1) * size; ++i) {
      result.keys_[i] *= factor;
      result.queries_[i] /= factor;
    }
  }
  result.digest_ = DigestOf(halves_, static_cast<uint64_t>(CodecId::kBands));
  result.halves_.clear();
  return result;
}

std::string Calibration::digest_text() const {
  std::string text;
  for (const uint8_t byte : digest_) text += fmt::format("{:02x}", byte);
  return text;
}

void Calibration::MultiplyKeys(int layer, int kv_head, int tokens, float* rows) const {
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const int d = geometry_.head_dim;
  const Eigen::Map<const Rows> a(key_matrix(layer, kv_head).data(), d, d);
  Eigen::Map<Rows> x(rows, tokens, d);
  x = (x * a.transpose()).eval();
}

std::string Calibration::PathFor(const Model& model) {
  const std::filesystem::path path(model.path());
  return (path.parent_path() / (model.identity().weights_digest() + ".qkvbal")).string();
}

Status Calibration::Write(const Model& model, const std::string& path) const {
  QKV_CHECK(!halves_.empty());
  FileHeader header{};
  header.magic = kMagic;
  header.version = kVersion;
  header.byte_order = kByteOrderMark;
  header.n_layers = static_cast<uint32_t>(geometry_.n_layers);
  header.n_kv_heads = static_cast<uint32_t>(geometry_.n_kv_heads);
  header.head_dim = static_cast<uint32_t>(geometry_.head_dim);
  header.model_digest = model.weights_digest();
  header.digest = digest_;
  return WriteWholeFile(path, {std::as_bytes(std::span(&header, 1)), std::as_bytes(std::span(halves_))});
}

Result<Calibration> Calibration::Read(const Model& model, const std::string& path) {
  const Geometry geometry = model.geometry();
  std::vector<uint16_t> halves(CountOf(geometry));
  const size_t expected = sizeof(FileHeader) + halves.size() * sizeof(uint16_t);
  const auto bytes = ReadWholeFile(path, std::max(expected, kMostBytes));
  if (!bytes && bytes.error().code == Code::kNotFound) {
    return Err(Code::kNotFound, "there is no calibration for this model at '{}'; make one with: qkvshare calibrate",
               path);
  }
  if (!bytes) return tl::unexpected(bytes.error());
  FileHeader header{};
  if (bytes->size() >= sizeof header) std::memcpy(&header, bytes->data(), sizeof header);
  if (header.magic != kMagic || header.reserved != 0) {
    return Err(Code::kCorrupt, "'{}' is not a calibration", path);
  }
  if (header.version != kVersion || header.byte_order != kByteOrderMark) {
    return Err(Code::kIncompatible, "calibration '{}' is of version {}, expected {} in this machine's byte order", path,
               header.version, kVersion);
  }
  if (header.model_digest != model.weights_digest() || header.n_layers != static_cast<uint32_t>(geometry.n_layers) ||
      header.n_kv_heads != static_cast<uint32_t>(geometry.n_kv_heads) ||
      header.head_dim != static_cast<uint32_t>(geometry.head_dim)) {
    return Err(Code::kIncompatible, "calibration '{}' is of another model; make one with: qkvshare calibrate", path);
  }
  if (bytes->size() != expected) {
    return Err(Code::kCorrupt, "calibration '{}' has {} bytes, expected {}", path, bytes->size(), expected);
  }
  std::memcpy(halves.data(), bytes->data() + sizeof header, expected - sizeof header);
  if (DigestOf(halves, 0) != header.digest) return Err(Code::kCorrupt, "calibration '{}' is damaged", path);
  return FromHalves(geometry, std::move(halves));
}

Result<Calibration> Calibrate(std::shared_ptr<const Model> model, std::span<const Token> tokens, int n_stretch,
                              int n_threads, const std::function<void(size_t done, size_t total)>& on_progress) {
  BalanceStatistics statistics(model->geometry(), model->params().n_heads);
  int position = 0;  // of the batch at hand; Q comes last of a batch's rows
  SequenceOptions options;
  options.n_ctx = n_stretch;
  options.n_threads = n_threads;
  options.kv = {CodecId::kF16, CodecId::kF16};
  const int last_layer = model->params().n_layers - 1;
  options.on_rows = [&](RowKind kind, int layer, int n, std::span<const float> rows) {
    statistics.Add(kind, layer, position, n, rows);
    if (kind == RowKind::kQ && layer == last_layer) position += n;
  };
  QKV_ASSIGN_OR_RETURN(const auto sequence, Sequence::Create(model, options));
  for (size_t done = 0; done < tokens.size();) {
    const size_t n = std::min<size_t>(tokens.size() - done, static_cast<size_t>(n_stretch));
    sequence->Clear();
    position = 0;
    QKV_RETURN_IF_ERROR(sequence->Forward(tokens.subspan(done, n)));
    done += n;
    if (on_progress) on_progress(done, tokens.size());
  }
  return Calibration::Compute(statistics);
}

}  // namespace qkv
