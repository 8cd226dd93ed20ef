// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/repack.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string_view>
#include <thread>

#include "qkv/codec/half.h"

namespace qkv {
namespace {

constexpr size_t kAlignment = 64;

// As ggml lays them out: 32 weights along the input.
struct Q4_0Block {
  uint16_t d;
  uint8_t codes[16];
};
struct Q4_1Block {
  uint16_t d, m;
  uint8_t codes[16];
};
static_assert(sizeof(Q4_0Block) == 18 && sizeof(Q4_1Block) == 20);

ggml_backend_buffer_type_t RepackBufferType() {
  ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (cpu == nullptr) return nullptr;
  const auto extra_types = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
      ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
  if (extra_types == nullptr) return nullptr;
  for (ggml_backend_buffer_type_t* type = extra_types(cpu); type != nullptr && *type != nullptr; ++type) {
    if (std::string_view(ggml_backend_buft_name(*type)) == "CPU_REPACK") return *type;
  }
  return nullptr;
}

// Appends a Q4_1 matrix to `blocks` as Q4_0, and writes its offsets into columns first_out.. of `offsets`.
void SplitQ4_1(const ggml_tensor* weight, std::vector<std::byte>& blocks, uint16_t* offsets, size_t first_out,
               size_t n_out) {
  const size_t n_blocks = static_cast<size_t>(weight->ne[0]) / kOffsetBlock;
  for (size_t row = 0; row < static_cast<size_t>(weight->ne[1]); ++row) {
    const std::byte* from = static_cast<const std::byte*>(weight->data) + row * weight->nb[1];
    for (size_t b = 0; b < n_blocks; ++b) {
      Q4_1Block in;
      std::memcpy(&in, from + b * sizeof in, sizeof in);
      Q4_0Block out;
      out.d = in.d;
      std::memcpy(out.codes, in.codes, sizeof out.codes);
      const auto* bytes = reinterpret_cast<const std::byte*>(&out);
      blocks.insert(blocks.end(), bytes, bytes + sizeof out);
      offsets[b * n_out + first_out + row] = HalfFromFloat(FloatFromHalf(in.m) + 8 * FloatFromHalf(in.d));
    }
  }
}

}  // namespace

void RepackedWeights::PlaceAt(std::byte* base) {
  for (Item& item : items_) {
    if (item.bytes == 0) continue;
    item.packed.weight->data = base;
    base += item.bytes;
    if (item.offset_bytes > 0) item.packed.offsets.values = reinterpret_cast<const uint16_t*>(base);
    base += item.offset_bytes;
  }
}

void RepackedWeights::PackAll() {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    std::vector<std::byte> plain;
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items_.size();) {
      const Item& item = items_[i];
      if (item.bytes == 0) continue;
      plain.clear();
      plain.reserve(ggml_nbytes(item.packed.weight));
      size_t first_out = 0;
      for (const ggml_tensor* weight : item.group) {
        if (weight->type == GGML_TYPE_Q4_1) {
          SplitQ4_1(weight, plain, const_cast<uint16_t*>(item.packed.offsets.values), first_out,
                    static_cast<size_t>(item.packed.offsets.n_out));
        } else {
          const auto* data = static_cast<const std::byte*>(weight->data);
          plain.insert(plain.end(), data, data + ggml_nbytes(weight));
        }
        first_out += static_cast<size_t>(weight->ne[1]);
      }
      ggml_backend_tensor_set(item.packed.weight, plain.data(), 0, plain.size());
    }
  };
  const size_t n_threads = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 16);
  std::vector<std::jthread> threads;
  for (size_t i = 1; i < n_threads; ++i) threads.emplace_back(work);
  work();
}

Result<std::unique_ptr<RepackedWeights>> RepackedWeights::Create(std::span<const Group> groups, Fd shared) {
  std::unique_ptr<RepackedWeights> result(new RepackedWeights());
  ggml_backend_buffer_type_t type = RepackBufferType();
  if (type == nullptr) return result;
  result->buffer_.reset(ggml_backend_buft_alloc_buffer(type, kAlignment));
  result->context_.reset(ggml_init({ggml_tensor_overhead() * groups.size(), nullptr, /*no_alloc=*/true}));
  if (result->buffer_ == nullptr || result->context_ == nullptr) {
    return Err(Code::kExhausted, Reason::kPoolFull, "no memory for {} packed matrices", groups.size());
  }
  size_t bytes = 0;
  for (const Group& group : groups) {
    Item& item = result->items_.emplace_back();
    item.group = group;
    const ggml_tensor* first = group.front();
    int64_t n_out = 0;
    bool alike = true;
    for (const ggml_tensor* weight : group) {
      alike = alike && weight->type == first->type && weight->ne[0] == first->ne[0] && weight->ne[1] % 8 == 0;
      n_out += weight->ne[1];
    }
    if (!alike) continue;
    const bool has_offsets = first->type == GGML_TYPE_Q4_1;
    ggml_tensor* packed =
        ggml_new_tensor_2d(result->context_.get(), has_offsets ? GGML_TYPE_Q4_0 : first->type, first->ne[0], n_out);
    packed->buffer = result->buffer_.get();
    // Sets `extra` to the packing, if there is one for this type and shape.
    if (ggml_backend_buffer_init_tensor(packed->buffer, packed) != GGML_STATUS_SUCCESS || packed->extra == nullptr) {
      continue;
    }
    item.packed.weight = packed;
    item.bytes = GGML_PAD(ggml_nbytes(packed), kAlignment);
    if (has_offsets) {
      item.packed.offsets = {nullptr, static_cast<int>(first->ne[0]), static_cast<int>(n_out)};
      item.offset_bytes =
          GGML_PAD(static_cast<size_t>(first->ne[0] / kOffsetBlock * n_out) * sizeof(uint16_t), kAlignment);
    }
    bytes += item.bytes + item.offset_bytes;
  }
  if (bytes == 0) return result;

  if (shared.valid()) {
    QKV_ASSIGN_OR_RETURN(const uint64_t found, shared.SizeBytes());
    if (found != bytes || !IsSealed(shared)) {
      return Err(Code::kCorrupt, "shared packed weights are {} bytes{}, expected {} sealed ones", found,
                 IsSealed(shared) ? "" : " and not sealed", bytes);
    }
    result->fd_ = std::move(shared);
  } else {
    QKV_ASSIGN_OR_RETURN(const Fd writable, CreateMemfd("qkvshare-weights"));
    // Takes the memory now: without it, writing to a full system would raise SIGBUS.
    if (::fallocate(writable.get(), 0, 0, static_cast<off_t>(bytes)) != 0) return ErrnoError("reserve packed weights");
    QKV_ASSIGN_OR_RETURN(result->fd_, writable.ReopenReadOnly());
    {
      QKV_ASSIGN_OR_RETURN(const Mapping window, Mapping::Map(writable, Mapping::Access::kReadWrite, 0, bytes));
      result->PlaceAt(window.data());
      result->PackAll();
    }
    QKV_RETURN_IF_ERROR(Seal(writable));
  }
  QKV_ASSIGN_OR_RETURN(result->mapping_, Mapping::Map(result->fd_, Mapping::Access::kReadOnly, 0, bytes));
  result->PlaceAt(result->mapping_.data());
  return result;
}

const Matrix* RepackedWeights::Packed(size_t group) const {
  return group < items_.size() && items_[group].bytes > 0 ? &items_[group].packed : nullptr;
}

}  // namespace qkv
