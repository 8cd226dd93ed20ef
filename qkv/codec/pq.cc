// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/pq.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>

#include "qkv/codec/blocks.h"
#include "qkv/codec/half.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "qkv/codec/pq.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::pq {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// For n points (x[i], y[i]), n a multiple of 16: the number of the nearest centroid, the first of equally near ones.
void NearestCentroids(const float* x, const float* y, size_t n, const float* centroids, int n_centroids,
                      int32_t* nearest) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> d32;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto px = hn::LoadU(d, x + i), py = hn::LoadU(d, y + i);
    auto least = hn::Set(d, std::numeric_limits<float>::infinity());
    auto best = hn::Zero(d32);
    for (int k = 0; k < n_centroids; ++k) {
      const auto dx = hn::Sub(px, hn::Set(d, centroids[2 * k])), dy = hn::Sub(py, hn::Set(d, centroids[2 * k + 1]));
      const auto distance = hn::Add(hn::Mul(dx, dx), hn::Mul(dy, dy));
      const auto nearer = hn::Lt(distance, least);
      least = hn::IfThenElse(nearer, distance, least);
      best = hn::IfThenElse(hn::RebindMask(d32, nearer), hn::Set(d32, k), best);
    }
    hn::StoreU(best, d32, nearest + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::pq
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv {
namespace pq {
namespace {
HWY_EXPORT(NearestCentroids);
}  // namespace
}  // namespace pq

namespace {

using blocks::Size;

constexpr std::array<char, 8> kMagic = {'Q', 'K', 'V', 'P', 'Q', 'C', 'B', '1'};
constexpr int kMostLayers = 512, kMostKvHeads = 512;  // as segment/layout.h has them
constexpr int kIterations = 12;
constexpr size_t kMostTrainingRows = 4096;

struct FileHeader {  // FORMAT.md §9
  std::array<char, 8> magic;
  uint32_t n_layers;
  uint32_t n_kv_heads;
  uint32_t head_dim;
  uint32_t n_centroids;
  std::array<uint8_t, 16> model_digest;
  uint64_t checksum;  // XXH3-64 of the file with this field zero
};
static_assert(sizeof(FileHeader) == 48);

Status CheckShape(const PqShape& shape) {
  if (shape.n_layers < 1 || shape.n_layers > kMostLayers || shape.n_kv_heads < 1 || shape.n_kv_heads > kMostKvHeads ||
      !blocks::IsHeadDim(shape.head_dim) || (shape.n_centroids != 16 && shape.n_centroids != 256)) {
    return Err(Code::kInvalidArgument, "codebooks of {} layers, {} KV heads, head dim {}, {} centroids", shape.n_layers,
               shape.n_kv_heads, shape.head_dim, shape.n_centroids);
  }
  return {};
}

// Points of one pair of channels.
struct Points {
  std::vector<float> x, y;  // of a size that is a multiple of 16, the last point repeated
  size_t n = 0;
};

void Assign(const Points& points, const std::vector<float>& centroids, std::vector<int32_t>& nearest) {
  HWY_DYNAMIC_DISPATCH(pq::NearestCentroids)
  (points.x.data(), points.y.data(), points.x.size(), centroids.data(), static_cast<int>(centroids.size() / 2),
   nearest.data());
}

double Distance(const Points& points, size_t i, const std::vector<float>& centroids, int k) {
  const double dx = double{points.x[i]} - centroids[2 * Size(k)], dy = double{points.y[i]} - centroids[2 * Size(k) + 1];
  return dx * dx + dy * dy;
}

// Lloyd's iteration from points drawn by their squared distance to those already drawn (k-means++).
std::vector<float> Cluster(const Points& points, int n_centroids, uint64_t seed) {
  std::mt19937_64 random(seed);
  const size_t first = random() % points.n;
  std::vector<float> centroids = {points.x[first], points.y[first]};
  std::vector<double> distance(points.n, std::numeric_limits<double>::infinity());
  for (int k = 0; k + 1 < n_centroids; ++k) {
    double total = 0;
    for (size_t i = 0; i < points.n; ++i)
      total += distance[i] = std::min(distance[i], Distance(points, i, centroids, k));
    // 53 bits of a uniform number: std::uniform_real_distribution is not the same everywhere.
    double left = static_cast<double>(random() >> 11) * 0x1p-53 * total;
    size_t drawn = 0;
    while (drawn + 1 < points.n && (left -= distance[drawn]) >= 0) ++drawn;
    centroids.push_back(points.x[drawn]);
    centroids.push_back(points.y[drawn]);
  }

  std::vector<int32_t> nearest(points.x.size());
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    Assign(points, centroids, nearest);
    std::vector<double> sums(centroids.size());
    std::vector<size_t> counts(Size(n_centroids));
    for (size_t i = 0; i < points.n; ++i) {
      const auto k = static_cast<size_t>(nearest[i]);
      sums[2 * k] += points.x[i];
      sums[2 * k + 1] += points.y[i];
      ++counts[k];
    }
    for (size_t k = 0; k < counts.size(); ++k) {
      if (counts[k] == 0) continue;  // stays where it is
      centroids[2 * k] = static_cast<float>(sums[2 * k] / static_cast<double>(counts[k]));
      centroids[2 * k + 1] = static_cast<float>(sums[2 * k + 1] / static_cast<double>(counts[k]));
    }
  }
  return centroids;
}

// Where the code of pair m of token t is: its byte, and how far it is shifted left there.
struct CodePlace {
  size_t at;
  int shift;
};
CodePlace PlaceOf(Side side, int t, int m, int head_dim, int n_centroids) {
  const int pairs = head_dim / 2;
  if (n_centroids == 256) return {Size(side == Side::kK ? m * kPageTokens + t : t * pairs + m), 0};
  if (side == Side::kK) return {Size(m * 16 + t % 16), t / 16 * 4};
  return {Size(t * pairs / 2 + m % (pairs / 2)), m / (pairs / 2) * 4};
}

}  // namespace

Result<std::vector<float>> TrainPq(std::span<const float> rows, int head_dim, int n_centroids) {
  QKV_RETURN_IF_ERROR(CheckShape({1, 1, head_dim, n_centroids}));
  const size_t dim = Size(head_dim), n_rows = rows.size() / dim;
  std::vector<size_t> usable;
  for (size_t r = 0; r < n_rows; ++r) {
    const auto row = rows.subspan(r * dim, dim);
    if (std::ranges::all_of(row, [](float x) { return std::abs(x) <= kHalfMax; })) usable.push_back(r);
  }
  if (usable.size() < 4 * Size(n_centroids)) {
    return Err(Code::kInvalidArgument, "codebooks of {} centroids from {} tokens, expected at least {}", n_centroids,
               usable.size(), 4 * n_centroids);
  }
  if (usable.size() > kMostTrainingRows) {  // evenly
    std::vector<size_t> some;
    for (size_t i = 0; i < kMostTrainingRows; ++i) some.push_back(usable[i * usable.size() / kMostTrainingRows]);
    usable = std::move(some);
  }
  std::vector<float> book;
  for (size_t m = 0; m < dim / 2; ++m) {
    Points points;
    points.n = usable.size();
    for (const size_t r : usable) {
      points.x.push_back(rows[r * dim + 2 * m]);
      points.y.push_back(rows[r * dim + 2 * m + 1]);
    }
    points.x.resize((points.n + 15) / 16 * 16, points.x.back());
    points.y.resize(points.x.size(), points.y.back());
    for (const float value : Cluster(points, n_centroids, m)) book.push_back(FloatFromHalf(HalfFromFloat(value)));
  }
  return book;
}

void PqEncode(Side side, const float* rows, int tokens, int head_dim, int n_centroids, const float* book,
              std::byte* block) {
  QKV_CHECK(blocks::IsHeadDim(head_dim) && tokens >= 1 && tokens <= kPageTokens);
  std::memset(block, 0, PqBlockBytes(n_centroids, head_dim));
  for (int m = 0; m < head_dim / 2; ++m) {
    float x[kPageTokens] = {}, y[kPageTokens] = {};
    int32_t nearest[kPageTokens];
    for (int t = 0; t < tokens; ++t) {
      const float* pair = rows + t * head_dim + 2 * m;
      x[t] = std::isnan(pair[0]) ? 0 : pair[0];
      y[t] = std::isnan(pair[1]) ? 0 : pair[1];
    }
    HWY_DYNAMIC_DISPATCH(pq::NearestCentroids)
    (x, y, kPageTokens, book + 2 * Size(m * n_centroids), n_centroids, nearest);
    for (int t = 0; t < tokens; ++t) {
      const CodePlace place = PlaceOf(side, t, m, head_dim, n_centroids);
      block[place.at] |= static_cast<std::byte>(nearest[t] << place.shift);
    }
  }
}

void PqUnpack(Side side, const std::byte* block, int head_dim, int n_centroids, const float* book, float* panel) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  for (int m = 0; m < head_dim / 2; ++m) {
    const float* centroids = book + 2 * Size(m * n_centroids);
    for (int t = 0; t < kPageTokens; ++t) {
      const CodePlace place = PlaceOf(side, t, m, head_dim, n_centroids);
      const int code = std::to_integer<int>(block[place.at]) >> place.shift & (n_centroids - 1);
      for (int i = 0; i < 2; ++i) {
        const int c = 2 * m + i;
        panel[side == Side::kK ? c * kPageTokens + t : t * head_dim + c] = centroids[2 * code + i];
      }
    }
  }
}

Result<PqCodebooks> PqCodebooks::Make(const PqShape& shape, const std::array<uint8_t, 16>& model_digest,
                                      std::vector<float> books) {
  QKV_RETURN_IF_ERROR(CheckShape(shape));
  if (books.size() != shape.n_books() * shape.book_values()) {
    return Err(Code::kInvalidArgument, "codebooks of {} values, expected {}", books.size(),
               shape.n_books() * shape.book_values());
  }
  PqCodebooks made;
  made.shape_ = shape;
  made.model_digest_ = model_digest;
  made.books_ = std::move(books);
  for (float& value : made.books_) {
    if (!(std::abs(value) <= kHalfMax)) return Err(Code::kInvalidArgument, "a centroid is not finite");
    value = FloatFromHalf(HalfFromFloat(value));
  }
  const std::vector<std::byte> bytes = made.Serialize();
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  for (const unsigned char byte : canonical.digest) made.digest_ += fmt::format("{:02x}", byte);
  return made;
}

std::vector<std::byte> PqCodebooks::Serialize() const {
  static_assert(std::endian::native == std::endian::little, "files are little-endian");
  FileHeader header{kMagic,
                    static_cast<uint32_t>(shape_.n_layers),
                    static_cast<uint32_t>(shape_.n_kv_heads),
                    static_cast<uint32_t>(shape_.head_dim),
                    static_cast<uint32_t>(shape_.n_centroids),
                    model_digest_,
                    0};
  std::vector<std::byte> bytes(sizeof header + 2 * books_.size());
  for (size_t i = 0; i < books_.size(); ++i) {
    const uint16_t half = HalfFromFloat(books_[i]);
    std::memcpy(bytes.data() + sizeof header + 2 * i, &half, sizeof half);
  }
  std::memcpy(bytes.data(), &header, sizeof header);
  header.checksum = XXH3_64bits(bytes.data(), bytes.size());
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

Result<PqCodebooks> PqCodebooks::Parse(std::span<const std::byte> bytes) {
  const auto corrupt = [](const std::string& what) {
    return Err(Code::kCorrupt, Reason::kChecksum, "codebooks: {}", what);
  };
  FileHeader header;
  if (bytes.size() < sizeof header)
    return corrupt(fmt::format("{} bytes, expected {} at least", bytes.size(), sizeof header));
  std::memcpy(&header, bytes.data(), sizeof header);
  if (std::memcmp(header.magic.data(), kMagic.data(), 7) != 0) return corrupt("the file does not start with QKVPQCB");
  if (header.magic != kMagic)
    return Err(Code::kIncompatible, Reason::kVersion, "codebooks: of another version, expected 1");
  // A number beyond int becomes a negative one, which CheckShape refuses.
  const PqShape shape{static_cast<int>(header.n_layers), static_cast<int>(header.n_kv_heads),
                      static_cast<int>(header.head_dim), static_cast<int>(header.n_centroids)};
  if (Status status = CheckShape(shape); !status) return corrupt(status.error().message);
  const size_t values = shape.n_books() * shape.book_values();
  if (bytes.size() != sizeof header + 2 * values) {
    return corrupt(fmt::format("{} bytes, expected {}", bytes.size(), sizeof header + 2 * values));
  }
  std::vector<std::byte> copy(bytes.begin(), bytes.end());
  const uint64_t found = std::exchange(header.checksum, 0);
  std::memcpy(copy.data(), &header, sizeof header);
  if (const uint64_t checksum = XXH3_64bits(copy.data(), copy.size()); checksum != found) {
    return corrupt(fmt::format("checksum {:016x}, expected {:016x}", checksum, found));
  }
  std::vector<float> books(values);
  for (size_t i = 0; i < values; ++i) {
    uint16_t half;
    std::memcpy(&half, copy.data() + sizeof header + 2 * i, sizeof half);
    books[i] = FloatFromHalf(half);
  }
  auto made = Make(shape, header.model_digest, std::move(books));
  if (!made) return corrupt(made.error().message);
  return made;
}

const float* PqCodebooks::book(int layer, int kv_head, Side side) const {
  const size_t index = 2 * (Size(layer) * Size(shape_.n_kv_heads) + Size(kv_head)) + (side == Side::kV ? 1 : 0);
  return books_.data() + index * shape_.book_values();
}

}  // namespace qkv
#endif  // HWY_ONCE
