// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Writes rows and what the codecs 3 to 8, +4, 5/3, pq4 and pq2 make of them to standard output, for
// tests/codec_reference.py to compare with its own. Records, back to back, little-endian: int32 {codec, side (0 K, 1
// V), head_dim, tokens, block bytes, centroids}; float32 rows, mean, rotated rows, encoded rows (for +4 what 4 bits
// left over, else the rotated rows); the block; the codebook, int8 first coordinates and second ones; float32 decoded
// rows, decoded rows turned back. A mean is [head_dim] (0 for V), rows are [tokens][head_dim].

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "qkv/codec/codec.h"
#include "qkv/codec/frame.h"
#include "qkv/codec/test_support.h"

namespace qkv {
namespace {

template <class T>
void Write(const std::vector<T>& values) {
  if (std::fwrite(values.data(), sizeof(T), values.size(), stdout) != values.size()) std::exit(1);
}

void WriteRecord(CodecId id, Side side, int head_dim, const std::vector<float>& rows, const std::vector<float>& mean) {
  const int tokens = static_cast<int>(rows.size()) / head_dim;
  std::vector<float> rotated(rows.size()), decoded(rows.size()), back(rows.size());
  const bool bands = id == CodecId::kBands;
  ToRotated(rows.data(), tokens, head_dim, side == Side::kK ? mean.data() : nullptr, rotated.data(), bands);

  // Blocks start on 64 bytes.
  std::vector<std::byte> memory(CodecOf(CodecId::k8).block_bytes(head_dim) + 64);
  std::byte* const block = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  std::vector<float> encoded = rotated;
  if (id == CodecId::kRefine4) {
    CodecOf(CodecId::k4).encode(side, rotated.data(), tokens, head_dim, block);
    CodecOf(CodecId::k4).decode(side, block, tokens, head_dim, decoded.data());
    for (size_t i = 0; i < encoded.size(); ++i) encoded[i] -= decoded[i];
  }
  const Codec& codec = CodecOf(id);
  const PqCodebooks books = test::TestCodebooks({1, 1, head_dim});
  const PqBook book = codec.needs_book ? books.book(id, 0, 0, side) : PqBook();
  codec.encode(side, encoded.data(), tokens, head_dim, block, &book);
  codec.decode(side, block, tokens, head_dim, decoded.data(), &book);
  FromRotated(decoded.data(), tokens, head_dim, side == Side::kK ? mean.data() : nullptr, back.data(), bands);

  const size_t bytes = codec.block_bytes(head_dim);
  Write(std::vector<int32_t>{static_cast<int32_t>(id), side == Side::kV, head_dim, tokens, static_cast<int32_t>(bytes),
                             book.n_centroids});
  Write(rows);
  Write(side == Side::kK ? mean : std::vector<float>(mean.size()));
  Write(rotated);
  Write(encoded);
  Write(std::vector<std::byte>(block, block + bytes));
  Write(std::vector<int8_t>(book.first, book.first + book.n_centroids));
  Write(std::vector<int8_t>(book.second, book.second + book.n_centroids));
  Write(decoded);
  Write(back);
}

}  // namespace
}  // namespace qkv

int main() {
  using namespace qkv;  // NOLINT: this is the program
  std::mt19937_64 random(20260101);
  std::normal_distribution<float> normal;
  const std::function<float(int, int)> kinds[] = {
      [&](int, int) { return normal(random); },
      [&](int, int c) { return normal(random) * (c == 3 ? 40.0f : 1.0f) + static_cast<float>(c % 7); },
      [&](int t, int) { return std::ldexp(normal(random), t % 2 == 0 ? -23 : -12); },  // scales that are half denormals
      [&](int, int) { return std::exp(3 * normal(random)) * (random() % 2 == 0 ? 1.0f : -1.0f); },
      [&](int t, int) { return t % 3 == 0 ? 0.0f : static_cast<float>(static_cast<int>(random() % 9) - 4); },  // ties
      [&](int, int c) {
        const float special[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                                 -1e30f};
        return c % 29 == 0 ? special[random() % 3] : normal(random) * 100;
      },
  };
  for (const int head_dim : {64, 80, 128}) {
    for (const auto& kind : kinds) {
      for (const int tokens : {kPageTokens, 5}) {
        std::vector<float> rows, mean;
        for (int c = 0; c < head_dim; ++c) mean.push_back(normal(random));
        for (int t = 0; t < tokens; ++t) {
          for (int c = 0; c < head_dim; ++c) rows.push_back(kind(t, c));
        }
        for (const CodecId id : {CodecId::k3, CodecId::k4, CodecId::k5, CodecId::k6, CodecId::k7, CodecId::k8,
                                 CodecId::kRefine4, CodecId::kPq4, CodecId::kPq2}) {
          for (const Side side : {Side::kK, Side::kV}) WriteRecord(id, side, head_dim, rows, mean);
        }
        WriteRecord(CodecId::kBands, Side::kK, head_dim, rows, mean);
      }
    }
  }
  return std::fflush(stdout) == 0 ? 0 : 1;
}
