// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/repack.h"

#include <ggml-cpu.h>
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <string_view>
#include <thread>
#include <vector>

namespace qkv {
namespace {

constexpr size_t kAlignment = 64;

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

// ggml asks nothing of the tensors but that their data is set; so it is put where `base` says.
void PlaceAt(std::span<const std::pair<ggml_tensor*, ggml_tensor*>> packed, std::byte* base) {
  for (const auto& [weight, twin] : packed) {
    twin->data = base;
    base += GGML_PAD(ggml_nbytes(twin), kAlignment);
  }
}

void PackAll(std::span<const std::pair<ggml_tensor*, ggml_tensor*>> packed) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < packed.size();) {
      ggml_backend_tensor_set(packed[i].second, packed[i].first->data, 0, ggml_nbytes(packed[i].first));
    }
  };
  const size_t n_threads = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 16);
  std::vector<std::jthread> threads;
  for (size_t i = 1; i < n_threads; ++i) threads.emplace_back(work);
  work();
}

}  // namespace

Result<std::unique_ptr<RepackedWeights>> RepackedWeights::Create(std::span<ggml_tensor* const> weights, Fd shared) {
  ggml_backend_buffer_type_t type = RepackBufferType();
  if (type == nullptr) return nullptr;
  std::unique_ptr<RepackedWeights> result(new RepackedWeights());
  result->buffer_.reset(ggml_backend_buft_alloc_buffer(type, kAlignment));
  result->context_.reset(ggml_init({ggml_tensor_overhead() * weights.size(), nullptr, /*no_alloc=*/true}));
  if (result->buffer_ == nullptr || result->context_ == nullptr) {
    return Err(Code::kExhausted, Reason::kPoolFull, "no memory for {} packed weights", weights.size());
  }
  size_t bytes = 0;
  for (ggml_tensor* weight : weights) {
    ggml_tensor* twin = ggml_dup_tensor(result->context_.get(), weight);
    ggml_set_name(twin, weight->name);
    twin->buffer = result->buffer_.get();
    // Sets `extra` to the packing, if there is one for this type and shape.
    if (ggml_backend_buffer_init_tensor(twin->buffer, twin) != GGML_STATUS_SUCCESS || twin->extra == nullptr) continue;
    result->packed_.emplace_back(weight, twin);
    bytes += GGML_PAD(ggml_nbytes(twin), kAlignment);
  }
  if (bytes == 0) return nullptr;

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
      PlaceAt(result->packed_, window.data());
      PackAll(result->packed_);
    }
    QKV_RETURN_IF_ERROR(Seal(writable));
  }
  QKV_ASSIGN_OR_RETURN(result->mapping_, Mapping::Map(result->fd_, Mapping::Access::kReadOnly, 0, bytes));
  PlaceAt(result->packed_, result->mapping_.data());
  std::ranges::sort(result->packed_);
  return result;
}

ggml_tensor* RepackedWeights::Packed(ggml_tensor* weight) const {
  const auto at = std::ranges::lower_bound(packed_, weight, {}, &std::pair<ggml_tensor*, ggml_tensor*>::first);
  return at != packed_.end() && at->first == weight ? at->second : weight;
}

}  // namespace qkv
