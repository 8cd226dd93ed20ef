// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/segment/writer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "qkv/base/kill_point.h"
#include "qkv/codec/frame.h"

namespace qkv {
namespace {

size_t SmallestPageBytes(const Geometry& geometry) {
  size_t smallest = std::numeric_limits<size_t>::max();
  for (const Codec& k : Codecs()) {
    for (const Codec& v : Codecs()) smallest = std::min(smallest, PageLayout(geometry, {k.id, v.id}).bytes);
  }
  return smallest;
}

// Writing to a mapped memory file when no memory is left raises SIGBUS; taking the memory first turns that into an
// error.
Status TakeMemory(const Fd& fd, uint64_t offset, size_t bytes) {
  int rc;
  do {
    rc = ::fallocate(fd.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (rc != 0 && errno == EINTR);
  if (rc != 0) return ErrnoError(fmt::format("segment: take {} bytes of memory", bytes));
  return {};
}

Status WriteAt(const Fd& fd, uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoError("segment: write header, page table or constants");
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return {};
}

Status Truncate(const Fd& fd, uint64_t bytes) {
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return ErrnoError(fmt::format("segment: set the size to {} bytes", bytes));
  }
  return {};
}

Status CheckConstants(const SegmentConstants& constants, const Geometry& geometry) {
  const size_t expected = ConstantsLayout(geometry).bytes / sizeof(uint16_t);
  if (constants.halves.size() != expected) {
    return Err(Code::kInvalidArgument, "segment: {} constants, expected {}", constants.halves.size(), expected);
  }
  if (std::ranges::any_of(constants.halves, [](uint16_t half) { return (half & 0x7c00) == 0x7c00; })) {
    return Err(Code::kInvalidArgument, "segment: a constant is not finite");
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<SegmentWriter>> SegmentWriter::Create(const Geometry& geometry, uint64_t capacity_bytes,
                                                             const std::array<uint8_t, 16>& model_digest,
                                                             const SegmentConstants* constants,
                                                             std::shared_ptr<const LayerCodecs> layers) {
  QKV_RETURN_IF_ERROR(ValidateGeometry(geometry));
  if (layers != nullptr && layers->geometry() != geometry) {
    return Err(Code::kInvalidArgument, "segment: layers' codecs of another geometry");
  }
  if (constants != nullptr) QKV_RETURN_IF_ERROR(CheckConstants(*constants, geometry));
  const uint64_t smallest = SmallestPageBytes(geometry);
  if (capacity_bytes < smallest || capacity_bytes > kMaxSegmentBytes) {
    return Err(Code::kInvalidArgument, "segment: capacity of {} bytes, expected {} (one page) to {}", capacity_bytes,
               smallest, kMaxSegmentBytes);
  }
  std::unique_ptr<SegmentWriter> writer(new SegmentWriter);
  writer->geometry_ = geometry;
  writer->model_digest_ = model_digest;
  writer->max_pages_ = std::min<uint64_t>(capacity_bytes / smallest, kMaxPagesPerSegment);
  writer->table_.reserve(writer->max_pages_);
  const uint64_t head_bytes = sizeof(SegmentHeader) + writer->max_pages_ * sizeof(PageEntry);
  uint64_t end = head_bytes;
  if (constants != nullptr) {
    writer->constants_offset_ = (head_bytes + 63) / 64 * 64;
    writer->constants_bytes_ = constants->halves.size() * sizeof(uint16_t);
    writer->constants_checksum_ = XXH3_64bits(constants->halves.data(), writer->constants_bytes_);
    writer->calibration_digest_ = constants->calibration_digest;
    end = writer->constants_offset_ + writer->constants_bytes_;
  }
  const std::vector<uint8_t> layer_bytes = layers != nullptr ? layers->Bytes() : std::vector<uint8_t>();
  if (layers != nullptr) {
    writer->layers_offset_ = (end + 63) / 64 * 64;
    end = writer->layers_offset_ + layer_bytes.size();
    writer->layers_ = std::move(layers);
  }
  writer->data_offset_ = (end + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
  writer->next_offset_ = writer->data_offset_;
  writer->file_bytes_ = std::min(writer->data_offset_ + capacity_bytes, kMaxSegmentBytes);

  QKV_ASSIGN_OR_RETURN(writer->fd_, CreateMemfd("qkv-segment"));
  QKV_RETURN_IF_ERROR(Truncate(writer->fd_, writer->file_bytes_));
  QKV_ASSIGN_OR_RETURN(writer->read_only_fd_, writer->fd_.ReopenReadOnly());
  QKV_ASSIGN_OR_RETURN(writer->mapping_,
                       Mapping::Map(writer->read_only_fd_, Mapping::Access::kReadOnly, 0, writer->file_bytes_));
  if (constants != nullptr) {
    QKV_RETURN_IF_ERROR(WriteAt(writer->fd_, writer->constants_offset_, std::as_bytes(std::span(constants->halves))));
  }
  QKV_RETURN_IF_ERROR(WriteAt(writer->fd_, writer->layers_offset_, std::as_bytes(std::span(layer_bytes))));
  return writer;
}

bool SegmentWriter::Fits(CodecPair codecs) const {
  return table_.size() < max_pages_ && PageLayout(geometry_, codecs, layers_.get()).bytes <= file_bytes_ - next_offset_;
}

Result<size_t> SegmentWriter::Append(CodecPair codecs, int tokens, uint32_t first_position,
                                     const std::function<void(std::byte* page)>& fill) {
  if (tokens < 1 || tokens > kPageTokens) {
    return Err(Code::kInvalidArgument, "segment: page of {} tokens, expected 1 to {}", tokens, kPageTokens);
  }
  if (first_position > kMaxPosition - static_cast<uint32_t>(tokens)) {
    return Err(Code::kInvalidArgument, "segment: page at position {}, expected positions below {}", first_position,
               kMaxPosition);
  }
  const bool of_layers = codecs.k == CodecId::kLayers || codecs.v == CodecId::kLayers;
  if (of_layers && (layers_ == nullptr || codecs != kLayersPair)) {
    return Err(Code::kInvalidArgument, "segment: a page of layers' codecs, but the segment names none");
  }
  if ((codecs.k == CodecId::kRefine4) != (codecs.v == CodecId::kRefine4)) {
    return Err(Code::kInvalidArgument, "segment: a page with a refinement on one side only");
  }
  if (NeedsConstants(codecs) && constants_bytes_ == 0) {
    return Err(Code::kInvalidArgument, "segment: a page in codecs {}, but no constants", ToString(codecs));
  }
  const size_t bytes = PageLayout(geometry_, codecs, layers_.get()).bytes;
  if (!Fits(codecs)) {
    return Err(Code::kExhausted, Reason::kPoolFull,
               "segment: page of {} bytes does not fit: {} of {} bytes and {} of {} pages are used", bytes,
               next_offset_, file_bytes_, table_.size(), max_pages_);
  }

  // A system page may be larger than ours; a mapping starts at a system page.
  const uint64_t skew = next_offset_ % static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  QKV_ASSIGN_OR_RETURN(Mapping window,
                       Mapping::Map(fd_, Mapping::Access::kReadWrite, next_offset_ - skew, bytes + skew));
  // A child forked right now by another thread must not inherit it: a writable mapping anywhere stops F_SEAL_WRITE.
  if (::madvise(window.data(), window.size(), MADV_DONTFORK) != 0) return ErrnoError("segment: madvise");
  QKV_RETURN_IF_ERROR(TakeMemory(fd_, next_offset_, bytes));
  KillPoint("segment.append");
  std::byte* const page = window.data() + skew;
  fill(page);

  PageEntry entry{};
  entry.k_codec = static_cast<uint8_t>(codecs.k);
  entry.v_codec = static_cast<uint8_t>(codecs.v);
  entry.tokens = static_cast<uint16_t>(tokens);
  entry.first_position = first_position;
  entry.offset = next_offset_;
  entry.bytes = bytes;
  entry.checksum = XXH3_64bits(page, bytes);
  table_.push_back(entry);
  rotated_ |= IsRotated(codecs);
  next_offset_ += bytes;
  return table_.size() - 1;
}

void SegmentWriter::DropLast() {
  next_offset_ = table_.back().offset;
  table_.pop_back();
}

Result<std::shared_ptr<const Segment>> SegmentWriter::Seal(std::unique_ptr<SegmentWriter>& writer) {
  if (writer->table_.empty()) return Err(Code::kInvalidArgument, "segment: sealed without a page");
  SegmentHeader header{};
  header.magic = kSegmentMagic;
  header.version = kSegmentVersion;
  header.byte_order = kByteOrderMark;
  header.n_layers = static_cast<uint32_t>(writer->geometry_.n_layers);
  header.n_kv_heads = static_cast<uint32_t>(writer->geometry_.n_kv_heads);
  header.k_head_dim = static_cast<uint32_t>(writer->geometry_.head_dim);
  header.v_head_dim = static_cast<uint32_t>(writer->geometry_.head_dim);
  header.page_tokens = kPageTokens;
  header.n_pages = static_cast<uint32_t>(writer->table_.size());
  header.table_offset = sizeof(SegmentHeader);
  header.data_offset = writer->data_offset_;
  header.file_bytes = writer->next_offset_;
  header.rotation_seed = writer->rotated_ ? kRotationSeed : 0;
  header.model_digest = writer->model_digest_;
  header.calibration_digest = writer->calibration_digest_;
  header.constants_offset = writer->constants_offset_;
  header.constants_bytes = writer->constants_bytes_;
  header.constants_checksum = writer->constants_checksum_;
  if (writer->layers_ != nullptr) {
    const std::vector<uint8_t> bytes = writer->layers_->Bytes();
    header.layers_offset = writer->layers_offset_;
    header.layers_bytes = bytes.size();
    header.layers_checksum = XXH3_64bits(bytes.data(), bytes.size());
  }
  header.header_checksum = HeaderChecksum(header, writer->table_);

  // The unused part of the table's room as well: a hole would be filled when somebody reads it, and then nobody has
  // accounted for it.
  QKV_RETURN_IF_ERROR(TakeMemory(writer->fd_, 0, writer->data_offset_));
  QKV_RETURN_IF_ERROR(WriteAt(writer->fd_, 0, HeadBytes(header, writer->table_)));
  QKV_RETURN_IF_ERROR(Truncate(writer->fd_, writer->next_offset_));
  writer->file_bytes_ = writer->next_offset_;
  KillPoint("segment.seal");
  QKV_RETURN_IF_ERROR(qkv::Seal(writer->fd_));
  KillPoint("segment.sealed");
  std::shared_ptr<const Segment> segment(new Segment(std::move(writer->read_only_fd_), std::move(writer->mapping_),
                                                     header, std::move(writer->table_), std::move(writer->layers_),
                                                     /*verified=*/true));
  writer.reset();
  return segment;
}

}  // namespace qkv
