// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/frame.h"

#include <algorithm>
#include <array>

#include "qkv/base/error.h"
#include "qkv/codec/blocks.h"
#include "qkv/codec/half.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "qkv/codec/frame.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// The order of additions is fixed (butterflies of neighbours first, then of pairs, …, one product at the end), so that
// every vector length gives the same bits.
HWY_BEFORE_NAMESPACE();
namespace qkv::frame {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct Signs {  // D: ±1 per channel
  alignas(64) std::array<float, kMaxHeadDim> value;
};
constexpr Signs kSigns = [] {
  Signs signs{};
  for (int c = 0; c < kMaxHeadDim; ++c) signs.value[static_cast<size_t>(c)] = RotationFlips(c) ? -1.0f : 1.0f;
  return signs;
}();

// 1/sqrt(8), …, 1/sqrt(256), rounded to fp32.
float Gain(int run) {
  return run == 8     ? 0.35355338f
         : run == 16  ? 0.25f
         : run == 32  ? 0.17677669f
         : run == 64  ? 0.125f
         : run == 128 ? 0.088388346f
                      : 0.0625f;
}

#if HWY_TARGET == HWY_SCALAR

void Transform(float* x, int head_dim, int run, const float* before, const float* after) {
  for (int i = 0; i < head_dim && before != nullptr; ++i) x[i] *= before[i];
  for (int distance = 1; distance < run; distance *= 2) {
    for (int i = 0; i < head_dim; ++i) {
      if ((i & distance) != 0) continue;
      const float a = x[i], b = x[i + distance];
      x[i] = a + b;
      x[i + distance] = a - b;
    }
  }
  for (int i = 0; i < head_dim; ++i) x[i] = x[i] * Gain(run) * (after != nullptr ? after[i] : 1.0f);
}

#else

// For butterflies within a vector: which lanes are subtracted, and for the longer distances where a lane's partner is.
struct InVector {
  alignas(64) float flips[4][16];
  alignas(64) int32_t partners[2][16];
};
constexpr InVector kInVector = [] {
  InVector tables{};
  for (int lane = 0; lane < 16; ++lane) {
    for (int i = 0; i < 4; ++i) tables.flips[i][lane] = (lane >> i & 1) != 0 ? -0.0f : 0.0f;
    tables.partners[0][lane] = lane ^ 4;
    tables.partners[1][lane] = lane ^ 8;
  }
  return tables;
}();

// H of x, times `before` first and times `after` last, where they are given. Vectors are stored and loaded at one width
// only: a wide load of what narrow stores have just written has to wait for them.
void Transform(float* x, int head_dim, int run, const float* before, const float* after) {
  const hn::CappedTag<float, 16> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto flip1 = hn::Load(d, kInVector.flips[0]), flip2 = hn::Load(d, kInVector.flips[1]);
  for (int i = 0; i < head_dim; i += lanes) {
    auto v = hn::LoadU(d, x + i);
    if (before != nullptr) v = hn::Mul(v, hn::LoadU(d, before + i));
    v = hn::Add(hn::Shuffle2301(v), hn::Xor(v, flip1));
    v = hn::Add(hn::Shuffle1032(v), hn::Xor(v, flip2));
    for (int step = 0; 4 << step < std::min(lanes, run); ++step) {
      const auto partner = hn::TableLookupLanes(v, hn::SetTableIndices(d, kInVector.partners[step]));
      v = hn::Add(partner, hn::Xor(v, hn::Load(d, kInVector.flips[2 + step])));
    }
    hn::StoreU(v, d, x + i);
  }
  for (int distance = lanes; distance < run; distance *= 2) {
    for (int first = 0; first < head_dim; first += 2 * distance) {
      for (int i = first; i < first + distance; i += lanes) {
        const auto a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + i + distance);
        hn::StoreU(hn::Add(a, b), d, x + i);
        hn::StoreU(hn::Sub(a, b), d, x + i + distance);
      }
    }
  }
  const auto gain = hn::Set(d, Gain(run));
  for (int i = 0; i < head_dim; i += lanes) {
    auto v = hn::Mul(hn::LoadU(d, x + i), gain);
    if (after != nullptr) v = hn::Mul(v, hn::LoadU(d, after + i));
    hn::StoreU(v, d, x + i);
  }
}

#endif

void RotateRow(float* x, int head_dim, bool bands) {
  Transform(x, head_dim, RotationRun(head_dim, bands), kSigns.value.data(), nullptr);
}

void RotateRowBack(float* x, int head_dim, bool bands) {
  Transform(x, head_dim, RotationRun(head_dim, bands), nullptr, kSigns.value.data());
}

void RotateRows(const float* rows, int n, int head_dim, const float* mean, float* out, bool bands) {
  const hn::CappedTag<float, 16> d;
  const auto low = hn::Set(d, -kHalfMax), high = hn::Set(d, kHalfMax);
  for (int r = 0; r < n; ++r, rows += head_dim, out += head_dim) {
    for (size_t c = 0; c < blocks::Size(head_dim); c += hn::Lanes(d)) {
      auto x = hn::LoadU(d, rows + c);
      x = hn::Min(hn::Max(hn::IfThenElseZero(hn::Eq(x, x), x), low), high);
      if (mean != nullptr) x = hn::Sub(x, hn::LoadU(d, mean + c));
      hn::StoreU(x, d, out + c);
    }
    RotateRow(out, head_dim, bands);
  }
}

void RotateRowsBack(const float* rows, int n, int head_dim, const float* mean, float* out, bool bands) {
  const hn::CappedTag<float, 16> d;
  for (int r = 0; r < n; ++r, rows += head_dim, out += head_dim) {
    if (out != rows) {
      for (size_t c = 0; c < blocks::Size(head_dim); c += hn::Lanes(d)) hn::StoreU(hn::LoadU(d, rows + c), d, out + c);
    }
    RotateRowBack(out, head_dim, bands);
    if (mean == nullptr) continue;
    for (size_t c = 0; c < blocks::Size(head_dim); c += hn::Lanes(d)) {
      hn::StoreU(hn::Add(hn::LoadU(d, out + c), hn::LoadU(d, mean + c)), d, out + c);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::frame
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv {
namespace frame {
HWY_EXPORT(RotateRow);
HWY_EXPORT(RotateRowBack);
HWY_EXPORT(RotateRows);
HWY_EXPORT(RotateRowsBack);
}  // namespace frame

void ToRotated(const float* rows, int n, int head_dim, const float* mean, float* out, bool bands) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  HWY_DYNAMIC_DISPATCH(frame::RotateRows)(rows, n, head_dim, mean, out, bands);
}

void FromRotated(const float* rows, int n, int head_dim, const float* mean, float* out, bool bands) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  HWY_DYNAMIC_DISPATCH(frame::RotateRowsBack)(rows, n, head_dim, mean, out, bands);
}

void Rotate(float* vector, int head_dim, bool bands) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  HWY_DYNAMIC_DISPATCH(frame::RotateRow)(vector, head_dim, bands);
}

void RotateBack(float* vector, int head_dim) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  HWY_DYNAMIC_DISPATCH(frame::RotateRowBack)(vector, head_dim, false);
}

}  // namespace qkv
#endif  // HWY_ONCE
