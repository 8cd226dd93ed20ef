// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "qkv/codec/blocks.h"
#include "qkv/codec/half.h"

namespace qkv::reference {
namespace {

// What every codec sees of an input value: finite and within the range of a half.
float Sanitized(float value) {
  if (std::isnan(value)) return 0;
  return std::clamp(value, -kHalfMax, kHalfMax);
}

void StoreHalf(uint16_t half, std::byte* to) {
  std::memcpy(to, &half, sizeof half);
}
float LoadHalf(const std::byte* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  return FloatFromHalf(half);
}

// A scale or minimum as it is stored. Never -0: which zero a minimum over +0 and -0 gives depends on the order.
uint16_t StoredHalf(float value) {
  const uint16_t half = HalfFromFloat(value);
  return half == 0x8000 ? uint16_t{0} : half;
}

float Inverse(float scale) {
  return scale == 0 ? 0 : 1 / scale;
}

float Rounded(float value, float low, float high) {
  return std::clamp(std::nearbyint(value), low, high);
}

size_t F16Offset(Side side, int t, int c, int head_dim) {
  return side == Side::kK ? blocks::F16KOffset(t, c) : blocks::F16VOffset(t, c, head_dim);
}

size_t I8Offset(Side side, int t, int c, int head_dim) {
  return side == Side::kK ? blocks::I8KOffset(t, c) : blocks::I8VOffset(t, c, head_dim);
}

int I8ScaleIndex(CodecId id, int t, int c) {
  return id == CodecId::kI8Channel ? c : id == CodecId::kI8Tensor ? 0 : t;
}

void EncodeI8(CodecId id, Side side, const float* rows, int tokens, int head_dim, std::byte* block) {
  std::array<float, kMaxHeadDim> extreme = {};  // largest magnitude under each scale
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < head_dim; ++c) {
      float& e = extreme[I8ScaleIndex(id, t, c)];
      e = std::max(e, std::abs(Sanitized(rows[t * head_dim + c])));
    }
  }
  for (int i = 0; i < blocks::I8ScaleCount(id, head_dim); ++i) {
    StoreHalf(StoredHalf(extreme[i] / 127), block + blocks::I8ScaleOffset(head_dim) + 2 * i);
  }
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < head_dim; ++c) {
      const float scale = LoadHalf(block + blocks::I8ScaleOffset(head_dim) + 2 * I8ScaleIndex(id, t, c));
      const float code = Rounded(Sanitized(rows[t * head_dim + c]) * Inverse(scale), -127, 127);
      block[I8Offset(side, t, c, head_dim)] = static_cast<std::byte>(static_cast<int8_t>(code));
    }
  }
}

// value = scale*u + base, u in 0..15
struct Grid {
  float scale;
  float base;
};

Grid LoadGrid(CodecId id, const std::byte* block, int index, int head_dim) {
  const float scale = LoadHalf(block + blocks::I4ScaleOffset(head_dim) + 2 * index);
  return {scale, id == CodecId::kI4 ? -8 * scale : LoadHalf(block + blocks::I4MinOffset(head_dim, id) + 2 * index)};
}

void EncodeI4(CodecId id, Side side, const float* rows, int tokens, int head_dim, std::byte* block) {
  const auto value = [&](int t, int c) { return Sanitized(rows[t * head_dim + c]); };
  std::array<float, blocks::kMaxI4Scales> low, high;  // under each scale
  low.fill(kHalfMax);
  high.fill(-kHalfMax);
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < head_dim; ++c) {
      const int i = blocks::I4ScaleIndex(id, t, c, head_dim);
      low[i] = std::min(low[i], value(t, c));
      high[i] = std::max(high[i], value(t, c));
    }
  }
  for (int i = 0; i < blocks::I4ScaleCount(id, head_dim); ++i) {
    if (low[i] > high[i]) continue;  // of absent tokens
    float scale;
    if (id == CodecId::kI4) {
      // The value of largest magnitude, whatever its sign, gets code 0 = -8 steps, so that a step is an eighth of it.
      // For Gaussian data this has 0.78x the squared error of the other usual choice, a seventh and codes -7..7.
      scale = (-low[i] >= high[i] ? low[i] : high[i]) * -0.125f;
    } else {
      const uint16_t stored_low = StoredHalf(low[i]);
      StoreHalf(stored_low, block + blocks::I4MinOffset(head_dim, id) + 2 * i);
      scale = std::max(high[i] - FloatFromHalf(stored_low), 0.0f) / 15;
    }
    StoreHalf(StoredHalf(scale), block + blocks::I4ScaleOffset(head_dim) + 2 * i);
  }
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < head_dim; ++c) {
      const Grid grid = LoadGrid(id, block, blocks::I4ScaleIndex(id, t, c, head_dim), head_dim);
      const int u = static_cast<int>(Rounded((value(t, c) - grid.base) * Inverse(grid.scale), 0, 15));
      if (side == Side::kK) {
        block[blocks::I4KOffset(t, c, head_dim)] |= static_cast<std::byte>(u << blocks::I4KShift(c, head_dim));
      } else {
        block[blocks::I4VOffset(t, c, head_dim)] |= static_cast<std::byte>(u << blocks::I4VShift(t));
      }
    }
  }
}

float DecodeI4(CodecId id, Side side, const std::byte* block, int t, int c, int head_dim) {
  const Grid grid = LoadGrid(id, block, blocks::I4ScaleIndex(id, t, c, head_dim), head_dim);
  const int u = side == Side::kK
                    ? std::to_integer<int>(block[blocks::I4KOffset(t, c, head_dim)]) >> blocks::I4KShift(c, head_dim)
                    : std::to_integer<int>(block[blocks::I4VOffset(t, c, head_dim)]) >> blocks::I4VShift(t);
  return grid.scale * static_cast<float>(u & 15) + grid.base;
}

// ---- 3 to 7, +4, 5/3: docs/FORMAT.md §3.5 ----

// Where a code's planes are; the refinement plane is one of 4 bits in an order of its own.
template <class Plane>
void ForEachPlane(CodecId id, Side side, int t, int c, int head_dim, const Plane& plane) {
  if (id == CodecId::kRefine4) {
    plane(4, blocks::Refine4Offset(t, c, head_dim), blocks::Refine4Shift(c, head_dim));
    return;
  }
  const size_t i = I8Offset(side, t, c, head_dim);
  if (id == CodecId::kBands) {
    if (c < head_dim / 2) {
      plane(4, blocks::PlaneOffset(4, i), blocks::PlaneShift(4, i));
    } else {
      const size_t in_half = i - I8Offset(side, 0, head_dim / 2, head_dim);
      plane(2, blocks::BandsUpper3Offset(head_dim) + blocks::PlaneOffset(2, in_half), blocks::PlaneShift(2, in_half));
    }
    plane(1, blocks::BandsLowestOffset(head_dim) + blocks::PlaneOffset(1, i), blocks::PlaneShift(1, i));
    return;
  }
  size_t start = 0;
  int left = blocks::RotatedBits(id);
  for (int bits = blocks::FirstPlaneBits(left); left > 0; bits /= 2) {
    if (left < bits) continue;
    plane(bits, start + blocks::PlaneOffset(bits, i), blocks::PlaneShift(bits, i));
    start += 4 * blocks::Size(bits) * blocks::Size(head_dim);
    left -= bits;
  }
}

void EncodeRotated(CodecId id, Side side, const float* rows, int tokens, int head_dim, std::byte* block) {
  const auto bands = blocks::BandsOf(id, head_dim);
  const auto odd_code = [&](float value, float inverse, int bits) {
    const float half_range = static_cast<float>(1 << (bits - 1));
    return 2 * std::clamp(std::floor(value * inverse), -half_range, half_range - 1) + 1;
  };
  for (int t = 0; t < tokens; ++t) {
    std::array<float, kMaxHeadDim> x;  // in units
    std::array<float, 2> largest = {};
    for (size_t b = 0; b < bands.size(); ++b) {
      for (int c = bands[b].first; c < bands[b].end; ++c) {
        x[c] = Sanitized(rows[t * head_dim + c]) / static_cast<float>(bands[b].unit);
        largest[b] = std::max(largest[b], std::abs(x[c]));
      }
    }
    const auto step_of = [&](size_t b, float clip) {
      return clip * largest[b] / static_cast<float>((1 << bands[b].bits) - 1);
    };

    float best_gain = 0, best_inverse = 0;
    uint16_t best_scale = 0;
    for (const float clip : blocks::kClipFactors) {
      // Half of the width of a cell.
      const float step = FloatFromHalf(StoredHalf(std::max(step_of(0, clip), step_of(1, clip))));
      if (step == 0) continue;
      const float inverse = 0.5f / step;
      float products = 0, squares = 0;  // of values and codes; of codes, an integer
      for (const blocks::Band& band : bands) {
        for (int c = band.first; c < band.end; ++c) {
          const float code = odd_code(x[c], inverse, band.bits);
          products += x[c] * code;
          squares += code * code;
        }
      }
      const uint16_t stored = StoredHalf(products / squares);
      const float scale = FloatFromHalf(stored);
      // By how much the squared error is below that of all zeros.
      const float gain = scale * (2 * products - scale * squares);
      if (gain > best_gain) best_gain = gain, best_inverse = inverse, best_scale = stored;
    }
    if (best_scale == 0) continue;

    StoreHalf(best_scale, block + blocks::RotatedScaleOffset(blocks::RotatedBits(id), head_dim) + 2 * t);
    for (const blocks::Band& band : bands) {
      for (int c = band.first; c < band.end; ++c) {
        const int w = (static_cast<int>(odd_code(x[c], best_inverse, band.bits)) + (1 << band.bits) - 1) / 2;
        int left = band.bits;
        ForEachPlane(id, side, t, c, head_dim, [&](int plane_bits, size_t at, int shift) {
          left -= plane_bits;
          block[at] |= static_cast<std::byte>((w >> left & ((1 << plane_bits) - 1)) << shift);
        });
      }
    }
  }
}

float DecodeRotated(CodecId id, Side side, const std::byte* block, int t, int c, int head_dim) {
  const auto bands = blocks::BandsOf(id, head_dim);
  const blocks::Band band = c < bands[0].end ? bands[0] : bands[1];
  int w = 0;
  ForEachPlane(id, side, t, c, head_dim, [&](int plane_bits, size_t at, int shift) {
    w = w << plane_bits | (std::to_integer<int>(block[at]) >> shift & ((1 << plane_bits) - 1));
  });
  const float scale = LoadHalf(block + blocks::RotatedScaleOffset(blocks::RotatedBits(id), head_dim) + 2 * t);
  return scale * static_cast<float>(band.unit * (2 * w + 1 - (1 << band.bits))) + 0.0f;  // not -0 where the scale is 0
}

float Value(CodecId id, Side side, const std::byte* block, int t, int c, int head_dim) {
  switch (id) {
    case CodecId::kF16: return LoadHalf(block + F16Offset(side, t, c, head_dim));
    case CodecId::kI8:
    case CodecId::kI8Channel:
    case CodecId::kI8Tensor:
    case CodecId::k8: {
      const float scale = LoadHalf(block + blocks::I8ScaleOffset(head_dim) + 2 * I8ScaleIndex(id, t, c));
      return scale * static_cast<float>(static_cast<int8_t>(block[I8Offset(side, t, c, head_dim)]));
    }
    case CodecId::kI4:
    case CodecId::kI4Z:
    case CodecId::kI4Channel: return DecodeI4(id, side, block, t, c, head_dim);
    case CodecId::k3:
    case CodecId::k4:
    case CodecId::k5:
    case CodecId::k6:
    case CodecId::k7:
    case CodecId::kBands:
    case CodecId::kRefine4: return DecodeRotated(id, side, block, t, c, head_dim);
    case CodecId::kPq4:
    case CodecId::kPq2: break;  // codec/pq.h
    case CodecId::kLayers: break;
  }
  return 0;
}

}  // namespace

void Encode(CodecId id, Side side, const float* rows, int tokens, int head_dim, std::byte* block) {
  std::memset(block, 0, blocks::BlockBytes(id, head_dim));
  switch (id) {
    case CodecId::kF16:
      for (int t = 0; t < tokens; ++t) {
        for (int c = 0; c < head_dim; ++c) {
          StoreHalf(HalfFromFloat(rows[t * head_dim + c]), block + F16Offset(side, t, c, head_dim));
        }
      }
      break;
    case CodecId::kI8:
    case CodecId::kI8Channel:
    case CodecId::kI8Tensor:
    case CodecId::k8: EncodeI8(id, side, rows, tokens, head_dim, block); break;
    case CodecId::kI4:
    case CodecId::kI4Z:
    case CodecId::kI4Channel: EncodeI4(id, side, rows, tokens, head_dim, block); break;
    case CodecId::k3:
    case CodecId::k4:
    case CodecId::k5:
    case CodecId::k6:
    case CodecId::k7:
    case CodecId::kBands:
    case CodecId::kRefine4: EncodeRotated(id, side, rows, tokens, head_dim, block); break;
    case CodecId::kPq4:
    case CodecId::kPq2: break;
    case CodecId::kLayers: break;
  }
}

void Decode(CodecId id, Side side, const std::byte* block, int tokens, int head_dim, float* rows) {
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < head_dim; ++c) rows[t * head_dim + c] = Value(id, side, block, t, c, head_dim);
  }
}

void Unpack(CodecId id, Side side, const std::byte* block, int head_dim, float* panel) {
  for (int t = 0; t < kPageTokens; ++t) {
    for (int c = 0; c < head_dim; ++c) {
      panel[side == Side::kK ? c * kPageTokens + t : t * head_dim + c] = Value(id, side, block, t, c, head_dim);
    }
  }
}

}  // namespace qkv::reference
