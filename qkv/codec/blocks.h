// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where every number of a block is (docs/FORMAT.md §3): for the codecs and for qkv/attention's fused kernels; nobody
// else needs it. A block here is one side, K or V, of 32 tokens of one layer and KV head. `t` is a token 0..31, `c` a
// channel 0..D-1, D the head dim; offsets and sizes are bytes from the start of the block. Little-endian. Scales and
// minima are IEEE halves. Any change bumps kSegmentVersion. Pure functions.
//
//   f16         K [D][32 t] u16                     V [32 t][D] u16
//   i8*         K [D/2][32 t][2 ch] s8              V [16][D][2 t] s8         then scale, padded to 64 bytes:
//                 i8 [32 t] · i8-channel [D] · i8-tensor [1]                  value = scale * code, code -127..127
//   i4*         K [D/8 p][32 t][4 j] u4 pairs       V [4][D][4] u4 pairs      then scale and, but for i4, minimum:
//                 i4, i4z [groups][32 t] · i4-channel [D]
//                 i4         value = scale * (u - 8) = scale*u + (-8*scale), exact in fp32; scale may be negative
//                 i4z, i4-channel  value = scale*u + minimum, the product and the sum each rounded to fp32
//   3 … 7       planes of w, in the order of i8         the same              then scale [32 t]
//                 value = scale * c, c = 2w + 1 - 2^bits: an odd signed byte, so that all widths are i8 once expanded
//   5/3         K: planes of w: [first half of D] upper 4 bits, [second half] upper 2, [D] lowest bit; then scale [32 t]
//                 value = scale * c, c = 2w - 31 in the first half, 4 * (2w - 7) in the second
//   8           as i8
//   pq4, pq2    K [D/4][32 t][2 pairs]              V [16][D/2 pairs][2 t]    numbers of centroids, of pair m = channels
//                 m, D/2 + m: pq4 u8 · pq2 a plane of 4 bits                  then scale [32 t]
//                 value = scale * centroid, signed bytes: i8 too once looked up
//   +4          [32 t][D/2] u4 pairs: low nibble = channel j, high nibble = channel D/2+j; then scale [32 t]; K as V
//                 value = scale * (2w - 15)
//
// Planes: w is cut into its upper 4 (3 bits: 2) bits, then the 2 and the 1 that are left, as its width has them. A plane
// of p bits is in groups of 64 bytes: byte b of group n holds the codes 64*(8/p)*n + 64k + b, code k from bit p*k on.
//
// i4's K byte p,t,j: low nibble = channel 4p+j, high nibble = channel D/2+4p+j. i4's V dword of 8 tokens and channel c:
// bits 0..15 = nibbles of tokens 0,2,4,6, bits 16..31 = of tokens 1,3,5,7.

#include <array>
#include <cstddef>

#include "qkv/codec/codec.h"

namespace qkv::blocks {

constexpr bool IsHeadDim(int head_dim) {
  return head_dim >= kMinHeadDim && head_dim <= kMaxHeadDim && head_dim % 16 == 0;
}

constexpr size_t RoundUp64(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}
constexpr size_t Size(int number) {
  return static_cast<size_t>(number);
}

// f16
constexpr size_t F16Bytes(int head_dim) {
  return 64 * Size(head_dim);
}
constexpr size_t F16KOffset(int t, int c) {
  return 64 * Size(c) + 2 * Size(t);
}
constexpr size_t F16VOffset(int t, int c, int head_dim) {
  return 2 * (Size(t) * Size(head_dim) + Size(c));
}

// i8, i8-channel, i8-tensor. "Tensor" is the block: one layer and KV head of a page.
constexpr size_t I8ScaleOffset(int head_dim) {
  return 32 * Size(head_dim);
}
constexpr int I8ScaleCount(CodecId id, int head_dim) {
  return id == CodecId::kI8Channel ? head_dim : id == CodecId::kI8Tensor ? 1 : kPageTokens;
}
constexpr size_t I8Bytes(CodecId id, int head_dim) {
  return I8ScaleOffset(head_dim) + RoundUp64(2 * Size(I8ScaleCount(id, head_dim)));
}
constexpr size_t I8KOffset(int t, int c) {
  return 64 * Size(c / 2) + 2 * Size(t) + Size(c % 2);
}
constexpr size_t I8VOffset(int t, int c, int head_dim) {
  return 2 * (Size(t / 2) * Size(head_dim) + Size(c)) + Size(t % 2);
}

// i4, i4z, i4-channel. A group is a run of channels with one scale: 32 of them where D is a multiple of 64, else half of D.
constexpr int I4Groups(int head_dim) {
  return head_dim % 64 == 0 ? head_dim / 32 : 2;
}
constexpr int I4GroupChannels(int head_dim) {
  return head_dim / I4Groups(head_dim);
}
inline constexpr int kMaxI4Scales = kMaxHeadDim / 32 * kPageTokens;  // of a block; beside it, as many minima
constexpr size_t I4ScaleOffset(int head_dim) {
  return 16 * Size(head_dim);
}
constexpr int I4ScaleCount(CodecId id, int head_dim) {
  return id == CodecId::kI4Channel ? head_dim : kPageTokens * I4Groups(head_dim);
}
constexpr size_t I4MinOffset(int head_dim, CodecId id = CodecId::kI4Z) {
  return I4ScaleOffset(head_dim) + 2 * Size(I4ScaleCount(id, head_dim));
}
constexpr size_t I4Bytes(CodecId id, int head_dim) {
  return I4MinOffset(head_dim, id) + (id == CodecId::kI4 ? 0 : 2 * Size(I4ScaleCount(id, head_dim)));
}
// Index into scale and minimum.
constexpr int I4ScaleIndex(CodecId id, int t, int c, int head_dim) {
  return id == CodecId::kI4Channel ? c : c / I4GroupChannels(head_dim) * kPageTokens + t;
}
// The byte that holds a code, and how far the code is shifted left in it (0 or 4).
constexpr size_t I4KOffset(int t, int c, int head_dim) {
  const int low = c % (head_dim / 2);
  return 128 * Size(low / 4) + 4 * Size(t) + Size(low % 4);
}
constexpr int I4KShift(int c, int head_dim) {
  return c < head_dim / 2 ? 0 : 4;
}
constexpr size_t I4VOffset(int t, int c, int head_dim) {
  return 4 * (Size(t / 8) * Size(head_dim) + Size(c)) + 2 * Size(t % 2) + Size(t / 4 % 2);
}
constexpr int I4VShift(int t) {
  return t / 2 % 2 * 4;
}

// 3 to 8, 5/3, pq4, pq2: rows in the rotated frame (codec/frame.h).
constexpr bool IsRotated(CodecId id) {
  return (id >= CodecId::k3 && id <= CodecId::kBands) || id == CodecId::kPq2 || id == CodecId::kLayers;
}
// Of k3 … k8 and of the refinement plane; of kBands, on average.
constexpr int RotatedBits(CodecId id) {
  const bool four = id == CodecId::kRefine4 || id == CodecId::kBands;
  return four ? 4 : static_cast<int>(id) - static_cast<int>(CodecId::k3) + 3;
}
constexpr int FirstPlaneBits(int bits) {
  return bits == 3 ? 2 : 4;
}
// Channels first to end - 1, in codes of `bits` bits; value = scale * unit * code. Encoders divide values by the unit, and
// weigh errors so.
struct Band {
  int first;
  int end;
  int bits;
  int unit;
};
// Of kBands two; of other mid-rise codecs one, and a second one without channels.
constexpr std::array<Band, 2> BandsOf(CodecId id, int head_dim) {
  if (id == CodecId::kBands) return {Band{0, head_dim / 2, 5, 1}, Band{head_dim / 2, head_dim, 3, 4}};
  return {Band{0, head_dim, RotatedBits(id), 1}, Band{head_dim, head_dim, 1, 1}};
}
// kBands: where a plane starts.
constexpr size_t BandsUpper3Offset(int head_dim) {
  return 8 * Size(head_dim);
}
constexpr size_t BandsLowestOffset(int head_dim) {
  return 12 * Size(head_dim);
}
// The scales that an encoder tries before it fits the best one: the step, as a part of largest magnitude / largest code.
inline constexpr float kClipFactors[] = {1.0f, 0.93f, 0.86f, 0.79f, 0.72f};
constexpr size_t RotatedScaleOffset(int bits, int head_dim) {
  return 4 * Size(bits) * Size(head_dim);
}
constexpr size_t RotatedBytes(int bits, int head_dim) {
  return RotatedScaleOffset(bits, head_dim) + 2 * kPageTokens;
}
// In a plane of `plane_bits` per code: the byte that holds code i of the block (i as in I8KOffset, I8VOffset), and how
// far it is shifted left there.
constexpr size_t PlaneOffset(int plane_bits, size_t i) {
  return i / (512 / Size(plane_bits)) * 64 + i % 64;
}
constexpr int PlaneShift(int plane_bits, size_t i) {
  return plane_bits * static_cast<int>(i / 64 % Size(8 / plane_bits));
}
// +4
constexpr size_t Refine4Offset(int t, int c, int head_dim) {
  return Size(t) * Size(head_dim / 2) + Size(c % (head_dim / 2));
}
constexpr int Refine4Shift(int c, int head_dim) {
  return c < head_dim / 2 ? 0 : 4;
}

// pq4, pq2
constexpr bool IsPq(CodecId id) {
  return id == CodecId::kPq4 || id == CodecId::kPq2;
}
constexpr size_t PqCodes(int head_dim) {  // of a block
  return 16 * Size(head_dim);
}
constexpr size_t PqScaleOffset(int n_centroids, int head_dim) {
  return PqCodes(head_dim) / (n_centroids == 16 ? 2 : 1);
}
constexpr int PqCentroids(CodecId id) {
  return id == CodecId::kPq2 ? 16 : 256;
}
// Of the code of pair m: as i8 would have it in a head of half as many channels.
constexpr size_t PqCodeIndex(Side side, int t, int m, int head_dim) {
  return side == Side::kK ? I8KOffset(t, m) : I8VOffset(t, m, head_dim / 2);
}

constexpr size_t BlockBytes(CodecId id, int head_dim) {
  switch (id) {
    case CodecId::kF16: return F16Bytes(head_dim);
    case CodecId::kI8:
    case CodecId::kI8Channel:
    case CodecId::kI8Tensor: return I8Bytes(id, head_dim);
    case CodecId::kI4:
    case CodecId::kI4Z:
    case CodecId::kI4Channel: return I4Bytes(id, head_dim);
    case CodecId::k3:
    case CodecId::k4:
    case CodecId::k5:
    case CodecId::k6:
    case CodecId::k7:
    case CodecId::k8:
    case CodecId::kBands:
    case CodecId::kRefine4: return RotatedBytes(RotatedBits(id), head_dim);
    case CodecId::kPq4:
    case CodecId::kPq2: return PqScaleOffset(PqCentroids(id), head_dim) + 2 * kPageTokens;
    case CodecId::kLayers: break;
  }
  return 0;
}

static_assert(I8Bytes(CodecId::kI8, 64) == 2112 && I8Bytes(CodecId::kI8Channel, 80) == 32 * 80 + 192);
static_assert(RotatedBytes(8, 64) == I8Bytes(CodecId::kI8, 64) && RotatedBytes(3, 64) == 832);
static_assert(I4Bytes(CodecId::kI4, 64) == 1152 && I4Bytes(CodecId::kI4Z, 64) == 1280 && I4Groups(80) == 2 &&
              I4GroupChannels(80) == 40);

}  // namespace qkv::blocks
