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

#include "qkv/codec/pq-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::pq {
namespace HWY_NAMESPACE {

// For n points (x[i], y[i]), n a multiple of 64: the number of the nearest centroid, the first of equally near ones. Of
// |p - c|^2 / 2 = |p|^2 / 2 - (p.c - |c|^2 / 2) the part in brackets is what differs; half_squares are |c|^2 / 2.
void NearestCentroids(const float* x, const float* y, size_t n, const float* first, const float* second,
                      const float* half_squares, int n_centroids, uint8_t* nearest) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> d32;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0; i < n; i += 4 * lanes) {
    // Four vectors at a time: one alone would wait for its own comparisons.
    const auto x0 = hn::LoadU(d, x + i), x1 = hn::LoadU(d, x + i + lanes), x2 = hn::LoadU(d, x + i + 2 * lanes),
               x3 = hn::LoadU(d, x + i + 3 * lanes);
    const auto y0 = hn::LoadU(d, y + i), y1 = hn::LoadU(d, y + i + lanes), y2 = hn::LoadU(d, y + i + 2 * lanes),
               y3 = hn::LoadU(d, y + i + 3 * lanes);
    auto most0 = hn::Set(d, -std::numeric_limits<float>::infinity());
    auto most1 = most0, most2 = most0, most3 = most0;
    auto best0 = hn::Zero(d32), best1 = best0, best2 = best0, best3 = best0;
    for (int k = 0; k < n_centroids; ++k) {
      const auto cx = hn::Set(d, first[k]), cy = hn::Set(d, second[k]), half_square = hn::Set(d, half_squares[k]);
      const auto number = hn::Set(d32, k);
      const auto consider = [&](auto px, auto py, auto& most, auto& best) HWY_ATTR {
        const auto nearness = hn::Sub(hn::Add(hn::Mul(px, cx), hn::Mul(py, cy)), half_square);
        const auto nearer = hn::Gt(nearness, most);
        most = hn::IfThenElse(nearer, nearness, most);
        best = hn::IfThenElse(hn::RebindMask(d32, nearer), number, best);
      };
      consider(x0, y0, most0, best0);
      consider(x1, y1, most1, best1);
      consider(x2, y2, most2, best2);
      consider(x3, y3, most3, best3);
    }
    hn::StoreU(hn::DemoteTo(d8, best0), d8, nearest + i);
    hn::StoreU(hn::DemoteTo(d8, best1), d8, nearest + i + lanes);
    hn::StoreU(hn::DemoteTo(d8, best2), d8, nearest + i + 2 * lanes);
    hn::StoreU(hn::DemoteTo(d8, best3), d8, nearest + i + 3 * lanes);
  }
}

void Expand(const PqBook& book, Side side, const uint8_t* block, size_t dim, int8_t* out) {
  ExpandPq(book, side, block, dim, out);
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::pq
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv {
namespace pq {
namespace {
HWY_EXPORT(NearestCentroids);
HWY_EXPORT(Expand);
}  // namespace
}  // namespace pq

namespace {

using blocks::Size;

constexpr std::array<char, 8> kMagic = {'Q', 'K', 'V', 'P', 'Q', 'C', 'B', '1'};
constexpr int kMostLayers = 512, kMostKvHeads = 512;  // as segment/layout.h has them
constexpr int kIterations = 16;
constexpr size_t kMostPoints = 16384;
constexpr float kUnitsPerRms = 32;
// The scales that the encoder tries, times the row's root mean square: the largest values of a row cost most.
constexpr float kGains[] = {1.0f, 1.1f, 0.9f, 0.8f};

struct FileHeader {  // FORMAT.md §9
  std::array<char, 8> magic;
  uint32_t n_layers;
  uint32_t n_kv_heads;
  uint32_t head_dim;
  uint32_t reserved;
  std::array<uint8_t, 16> model_digest;
  uint64_t checksum;  // XXH3-64 of the file with this field zero
};
static_assert(sizeof(FileHeader) == 48);

Status CheckShape(const PqShape& shape) {
  if (shape.n_layers < 1 || shape.n_layers > kMostLayers || shape.n_kv_heads < 1 || shape.n_kv_heads > kMostKvHeads ||
      !blocks::IsHeadDim(shape.head_dim)) {
    return Err(Code::kInvalidArgument, "codebooks of {} layers, {} KV heads, head dim {}", shape.n_layers,
               shape.n_kv_heads, shape.head_dim);
  }
  return {};
}

// Coordinates of points or centroids.
struct Points {
  std::vector<float> x, y;
  size_t size() const { return x.size(); }
};

// Centroids as NearestCentroids wants them.
struct Centroids {
  std::array<float, 256> first, second, half_squares;
  int n = 0;

  void Set(int k, float x, float y) {
    first[Size(k)] = x;
    second[Size(k)] = y;
    half_squares[Size(k)] = (x * x + y * y) / 2;
  }
};

// n: a multiple of 64.
void FindNearest(const float* x, const float* y, size_t n, const Centroids& centroids, uint8_t* nearest) {
  HWY_DYNAMIC_DISPATCH(pq::NearestCentroids)
  (x, y, n, centroids.first.data(), centroids.second.data(), centroids.half_squares.data(), centroids.n, nearest);
}

// Drawn by their squared distance to those already drawn (k-means++).
Centroids Draw(const Points& points, int n_centroids) {
  std::mt19937_64 random(1);
  Centroids centroids;
  const auto take = [&](size_t i) { centroids.Set(centroids.n++, points.x[i], points.y[i]); };
  take(random() % points.size());
  std::vector<double> distance(points.size(), std::numeric_limits<double>::infinity());
  while (centroids.n < n_centroids) {
    const size_t last = Size(centroids.n) - 1;
    const double x = centroids.first[last], y = centroids.second[last];
    double total = 0;
    for (size_t i = 0; i < points.size(); ++i) {
      const double dx = points.x[i] - x, dy = points.y[i] - y;
      total += distance[i] = std::min(distance[i], dx * dx + dy * dy);
    }
    // 53 bits of a uniform number: std::uniform_real_distribution is not the same everywhere.
    double left = static_cast<double>(random() >> 11) * 0x1p-53 * total;
    size_t drawn = 0;
    while (drawn + 1 < points.size() && (left -= distance[drawn]) >= 0) ++drawn;
    take(drawn);
  }
  return centroids;
}

// One step of Lloyd's iteration; what is nearest to no point stays where it is.
void MoveToMeans(const Points& points, const std::vector<uint8_t>& nearest, Centroids& centroids) {
  std::array<double, 256> x{}, y{};
  std::array<size_t, 256> counts{};
  for (size_t i = 0; i < points.size(); ++i) {
    x[nearest[i]] += points.x[i];
    y[nearest[i]] += points.y[i];
    ++counts[nearest[i]];
  }
  for (int k = 0; k < centroids.n; ++k) {
    const auto n = static_cast<double>(counts[Size(k)]);
    if (n > 0) centroids.Set(k, static_cast<float>(x[Size(k)] / n), static_cast<float>(y[Size(k)] / n));
  }
}

float Sanitized(float value) {
  if (std::isnan(value)) return 0;
  return std::clamp(value, -kHalfMax, kHalfMax);
}

// Never -0, as in all codecs.
uint16_t StoredHalf(float value) {
  const uint16_t half = HalfFromFloat(value);
  return half == 0x8000 ? uint16_t{0} : half;
}

// Every token's best scale so far, and the codes that go with it: [D/2][32].
struct Best {
  alignas(64) uint8_t codes[kMaxHeadDim / 2 * kPageTokens] = {};
  float gains[kPageTokens] = {};
  uint16_t scales[kPageTokens] = {};
};

// Takes a token's codes, with the scale that fits them, if its squared error is less so. values: [D][32 tokens].
void TryCodes(const float* values, int head_dim, const float* inverses, const uint8_t* codes,
              const Centroids& centroids, Best& best) {
  const int pairs = head_dim / 2;
  float products[kPageTokens] = {}, squares[kPageTokens] = {};
  for (int m = 0; m < pairs; ++m) {
    const float *x = values + m * kPageTokens, *y = values + (pairs + m) * kPageTokens;
    for (int t = 0; t < kPageTokens; ++t) {
      const float cx = centroids.first[codes[m * kPageTokens + t]], cy = centroids.second[codes[m * kPageTokens + t]];
      products[t] += x[t] * cx;
      products[t] += y[t] * cy;
      squares[t] += cx * cx + cy * cy;
    }
  }
  for (int t = 0; t < kPageTokens; ++t) {
    if (squares[t] == 0 || inverses[t] == 0) continue;
    const uint16_t stored = StoredHalf(products[t] / squares[t]);
    const float scale = FloatFromHalf(stored);
    const float gain = scale * (2 * products[t] - scale * squares[t]);  // of squared error, against all zeros
    if (!(gain > best.gains[t])) continue;
    best.gains[t] = gain;
    best.scales[t] = stored;
    for (int m = 0; m < pairs; ++m) best.codes[m * kPageTokens + t] = codes[m * kPageTokens + t];
  }
}

}  // namespace

Result<std::vector<int8_t>> TrainPq(std::span<const float> points, int n_centroids) {
  QKV_CHECK(n_centroids == 16 || n_centroids == 256);
  Points all;
  for (size_t i = 0; i + 2 <= points.size(); i += 2) {
    if (!std::isfinite(points[i]) || !std::isfinite(points[i + 1])) continue;
    all.x.push_back(points[i]);
    all.y.push_back(points[i + 1]);
  }
  if (all.size() < 4 * Size(n_centroids)) {
    return Err(Code::kInvalidArgument, "a codebook of {} centroids from {} pairs of values, expected at least {}",
               n_centroids, all.size(), 4 * n_centroids);
  }
  const size_t n = std::min(all.size(), kMostPoints);  // evenly; at least one round of 64
  Points some;
  for (size_t i = 0; i < n; ++i) {
    some.x.push_back(all.x[i * all.size() / n]);
    some.y.push_back(all.y[i * all.size() / n]);
  }
  Centroids centroids = Draw(some, n_centroids);
  const size_t rounded = (n + 63) / 64 * 64;
  std::vector<float> x = some.x, y = some.y;
  x.resize(rounded);
  y.resize(rounded);
  std::vector<uint8_t> nearest(rounded);
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    FindNearest(x.data(), y.data(), rounded, centroids, nearest.data());
    MoveToMeans(some, nearest, centroids);
  }
  std::vector<int8_t> book;
  for (const auto* coordinates : {&centroids.first, &centroids.second}) {
    for (int k = 0; k < n_centroids; ++k) {
      const float units = std::clamp(std::nearbyint(kUnitsPerRms * (*coordinates)[Size(k)]), -127.0f, 127.0f);
      book.push_back(static_cast<int8_t>(units));
    }
  }
  return book;
}

void PqEncode(Side side, const float* rows, int tokens, int head_dim, const PqBook& book, std::byte* block) {
  QKV_CHECK(blocks::IsHeadDim(head_dim) && tokens >= 1 && tokens <= kPageTokens);
  Centroids centroids;
  for (; centroids.n < book.n_centroids; ++centroids.n) {
    centroids.Set(centroids.n, book.first[centroids.n], book.second[centroids.n]);
  }
  const int pairs = head_dim / 2;
  alignas(64) float values[kMaxHeadDim * kPageTokens] = {};  // [D][32]
  float squares[kPageTokens] = {};
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < head_dim; ++c) {
      const float value = Sanitized(rows[t * head_dim + c]);
      values[c * kPageTokens + t] = value;
      squares[t] += value * value;
    }
  }
  Best best;
  alignas(64) float scaled[kMaxHeadDim * kPageTokens];
  alignas(64) uint8_t codes[kMaxHeadDim / 2 * kPageTokens];
  for (const float gain : kGains) {
    float inverses[kPageTokens];
    for (int t = 0; t < kPageTokens; ++t) {
      const float rms = std::sqrt(squares[t] / static_cast<float>(head_dim));
      const float step = FloatFromHalf(StoredHalf(gain * rms / kUnitsPerRms));
      inverses[t] = step == 0 ? 0 : 1 / step;
    }
    for (int c = 0; c < head_dim; ++c) {
      for (int t = 0; t < kPageTokens; ++t) {
        scaled[c * kPageTokens + t] = values[c * kPageTokens + t] * inverses[t];
      }
    }
    const size_t n = Size(pairs * kPageTokens);
    FindNearest(scaled, scaled + n, n, centroids, codes);
    TryCodes(values, head_dim, inverses, codes, centroids, best);
  }

  std::memset(block, 0, blocks::PqScaleOffset(book.n_centroids, head_dim));
  for (int m = 0; m < pairs; ++m) {
    for (int t = 0; t < kPageTokens; ++t) {
      const size_t i = blocks::PqCodeIndex(side, t, m, head_dim);
      const uint8_t code = best.codes[m * kPageTokens + t];
      if (book.n_centroids == 256) {
        block[i] = static_cast<std::byte>(code);
      } else {
        block[blocks::PlaneOffset(4, i)] |= static_cast<std::byte>(code << blocks::PlaneShift(4, i));
      }
    }
  }
  std::memcpy(block + blocks::PqScaleOffset(book.n_centroids, head_dim), best.scales, sizeof best.scales);
}

void PqUnpack(Side side, const std::byte* block, int head_dim, const PqBook& book, float* panel) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  alignas(64) int8_t bytes[kPageTokens * kMaxHeadDim + 64];
  HWY_DYNAMIC_DISPATCH(pq::Expand)
  (book, side, reinterpret_cast<const uint8_t*>(block), Size(head_dim), bytes);
  uint16_t scales[kPageTokens];
  std::memcpy(scales, block + blocks::PqScaleOffset(book.n_centroids, head_dim), sizeof scales);
  for (int t = 0; t < kPageTokens; ++t) {
    const float scale = FloatFromHalf(scales[t]);
    for (int c = 0; c < head_dim; ++c) {
      const size_t i = side == Side::kK ? blocks::I8KOffset(t, c) : blocks::I8VOffset(t, c, head_dim);
      const float value = scale * static_cast<float>(bytes[i]) + 0.0f;  // not -0 where the scale is 0
      panel[side == Side::kK ? c * kPageTokens + t : t * head_dim + c] = value;
    }
  }
}

Result<PqCodebooks> PqCodebooks::Make(const PqShape& shape, const std::array<uint8_t, 16>& model_digest,
                                      std::vector<int8_t> centroids) {
  QKV_RETURN_IF_ERROR(CheckShape(shape));
  if (const size_t expected = 2 * kSideBytes * shape.n_heads(); centroids.size() != expected) {
    return Err(Code::kInvalidArgument, "codebooks of {} bytes, expected {}", centroids.size(), expected);
  }
  if (std::ranges::find(centroids, int8_t{-128}) != centroids.end()) {
    return Err(Code::kInvalidArgument, "a centroid has a coordinate of -128, expected -127 to 127");
  }
  PqCodebooks made;
  made.shape_ = shape;
  made.model_digest_ = model_digest;
  made.centroids_ = std::move(centroids);
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
                    0,
                    model_digest_,
                    0};
  std::vector<std::byte> bytes(sizeof header + centroids_.size());
  std::memcpy(bytes.data() + sizeof header, centroids_.data(), centroids_.size());
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
                      static_cast<int>(header.head_dim)};
  if (Status status = CheckShape(shape); !status) return corrupt(status.error().message);
  if (header.reserved != 0) return corrupt("a reserved field is not 0");
  const size_t values = 2 * kSideBytes * shape.n_heads();
  if (bytes.size() != sizeof header + values) {
    return corrupt(fmt::format("{} bytes, expected {}", bytes.size(), sizeof header + values));
  }
  std::vector<std::byte> copy(bytes.begin(), bytes.end());
  const uint64_t found = std::exchange(header.checksum, 0);
  std::memcpy(copy.data(), &header, sizeof header);
  if (const uint64_t checksum = XXH3_64bits(copy.data(), copy.size()); checksum != found) {
    return corrupt(fmt::format("checksum {:016x}, expected {:016x}", checksum, found));
  }
  std::vector<int8_t> centroids(values);
  std::memcpy(centroids.data(), copy.data() + sizeof header, values);
  auto made = Make(shape, header.model_digest, std::move(centroids));
  if (!made) return corrupt(made.error().message);
  return made;
}

PqBook PqCodebooks::book(CodecId codec, int layer, int kv_head, Side side) const {
  QKV_CHECK(blocks::IsPq(codec));
  const size_t index = 2 * (Size(layer) * Size(shape_.n_kv_heads) + Size(kv_head)) + (side == Side::kV ? 1 : 0);
  const int n = blocks::PqCentroids(codec);
  const int8_t* first = centroids_.data() + index * kSideBytes + (n == 16 ? 512 : 0);
  return {n, first, first + n};
}

}  // namespace qkv
#endif  // HWY_ONCE
