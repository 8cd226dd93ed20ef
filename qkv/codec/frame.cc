// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/codec/frame.h"

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

// 1/sqrt(16), …, 1/sqrt(256), rounded to fp32.
float Gain(int run) {
  return run == 16 ? 0.25f : run == 32 ? 0.17677669f : run == 64 ? 0.125f : run == 128 ? 0.088388346f : 0.0625f;
}

void Transform(float* x, int head_dim) {
  const int run = RotationRun(head_dim);
#if HWY_TARGET == HWY_SCALAR
  for (int distance = 1; distance < run; distance *= 2) {
    for (int i = 0; i < head_dim; ++i) {
      if ((i & distance) != 0) continue;
      const float a = x[i], b = x[i + distance];
      x[i] = a + b;
      x[i + distance] = a - b;
    }
  }
  for (int i = 0; i < head_dim; ++i) x[i] *= Gain(run);
#else
  const hn::CappedTag<float, 4> d4;
  alignas(16) static constexpr float kFlipOdd[] = {0.0f, -0.0f, 0.0f, -0.0f};
  alignas(16) static constexpr float kFlipUpper[] = {0.0f, 0.0f, -0.0f, -0.0f};
  const auto flip_odd = hn::Load(d4, kFlipOdd), flip_upper = hn::Load(d4, kFlipUpper);
  for (int i = 0; i < head_dim; i += 4) {
    auto v = hn::LoadU(d4, x + i);
    v = hn::Add(hn::Reverse2(d4, v), hn::Xor(v, flip_odd));
    v = hn::Add(hn::Shuffle1032(v), hn::Xor(v, flip_upper));
    hn::StoreU(v, d4, x + i);
  }
  const hn::CappedTag<float, 16> dw;
  const int lanes = static_cast<int>(hn::Lanes(dw));
  const auto butterflies = [&](auto d, int distance) HWY_ATTR {
    const int step = static_cast<int>(hn::Lanes(d));
    for (int first = 0; first < head_dim; first += 2 * distance) {
      for (int i = first; i < first + distance; i += step) {
        const auto a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + i + distance);
        hn::StoreU(hn::Add(a, b), d, x + i);
        hn::StoreU(hn::Sub(a, b), d, x + i + distance);
      }
    }
  };
  for (int distance = 4; distance < run; distance *= 2) {
    distance < lanes ? butterflies(d4, distance) : butterflies(dw, distance);
  }
  const auto gain = hn::Set(dw, Gain(run));
  for (int i = 0; i < head_dim; i += lanes) hn::StoreU(hn::Mul(hn::LoadU(dw, x + i), gain), dw, x + i);
#endif
}

void TurnSigns(float* x, int head_dim) {
  const hn::CappedTag<float, 16> d;
  for (size_t c = 0; c < blocks::Size(head_dim); c += hn::Lanes(d)) {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + c), hn::Load(d, kSigns.value.data() + c)), d, x + c);
  }
}

void RotateRow(float* x, int head_dim) {
  TurnSigns(x, head_dim);
  Transform(x, head_dim);
}

void RotateRowBack(float* x, int head_dim) {
  Transform(x, head_dim);
  TurnSigns(x, head_dim);
}

void RotateRows(const float* rows, int n, int head_dim, const float* mean, float* out) {
  const hn::CappedTag<float, 16> d;
  const auto low = hn::Set(d, -kHalfMax), high = hn::Set(d, kHalfMax);
  for (int r = 0; r < n; ++r, rows += head_dim, out += head_dim) {
    for (size_t c = 0; c < blocks::Size(head_dim); c += hn::Lanes(d)) {
      auto x = hn::LoadU(d, rows + c);
      x = hn::Min(hn::Max(hn::IfThenElseZero(hn::Eq(x, x), x), low), high);
      if (mean != nullptr) x = hn::Sub(x, hn::LoadU(d, mean + c));
      hn::StoreU(x, d, out + c);
    }
    RotateRow(out, head_dim);
  }
}

void RotateRowsBack(const float* rows, int n, int head_dim, const float* mean, float* out) {
  const hn::CappedTag<float, 16> d;
  for (int r = 0; r < n; ++r, rows += head_dim, out += head_dim) {
    if (out != rows) {
      for (size_t c = 0; c < blocks::Size(head_dim); c += hn::Lanes(d)) hn::StoreU(hn::LoadU(d, rows + c), d, out + c);
    }
    RotateRowBack(out, head_dim);
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

void ToRotated(const float* rows, int n, int head_dim, const float* mean, float* out) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  HWY_DYNAMIC_DISPATCH(frame::RotateRows)(rows, n, head_dim, mean, out);
}

void FromRotated(const float* rows, int n, int head_dim, const float* mean, float* out) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  HWY_DYNAMIC_DISPATCH(frame::RotateRowsBack)(rows, n, head_dim, mean, out);
}

void Rotate(float* vector, int head_dim) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  HWY_DYNAMIC_DISPATCH(frame::RotateRow)(vector, head_dim);
}

void RotateBack(float* vector, int head_dim) {
  QKV_CHECK(blocks::IsHeadDim(head_dim));
  HWY_DYNAMIC_DISPATCH(frame::RotateRowBack)(vector, head_dim);
}

}  // namespace qkv
#endif  // HWY_ONCE
