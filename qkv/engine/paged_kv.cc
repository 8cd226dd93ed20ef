// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/paged_kv.h"

#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

namespace qkv {
namespace {

constexpr CodecPair kTailCodecs = {CodecId::kF16, CodecId::kF16};
constexpr uint64_t kFirstSegmentBytes = uint64_t{16} << 20;  // then doubling up to
constexpr uint64_t kLastSegmentBytes = uint64_t{256} << 20;
constexpr size_t kMaxSpareTailPages = 4;

double MsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// Pages one after the other, as spans: runs of pages of which only the last may be used in part.
class SpanBuilder {
 public:
  void Add(const std::shared_ptr<const Segment>& segment, size_t page, const PageRef& ref) {
    const bool goes_on = !spans_.empty() && spans_.back().segment == segment &&
                         spans_.back().first_page + spans_.back().n_pages == page &&
                         last_tokens_ == segment->pages()[page - 1].tokens &&
                         spans_.back().position_offset == ref.position_offset && !ref.hide_first;
    if (!goes_on) spans_.push_back({segment, page, 0, 0, ref.position_offset, ref.hide_first});
    spans_.back().n_pages += 1;
    spans_.back().n_tokens += ref.tokens;
    last_tokens_ = ref.tokens;
  }
  std::vector<SegmentSpan> Take() { return std::move(spans_); }

 private:
  std::vector<SegmentSpan> spans_;
  int last_tokens_ = 0;  // used of the last page
};

}  // namespace

void PagedKv::AlignedFree::operator()(std::byte* p) const {
  std::free(p);
}

PagedKv::PagedKv(const Geometry& geometry, CodecPair kv, const std::array<uint8_t, 16>& model_digest, Trace* trace)
    : geometry_(geometry),
      kv_(kv),
      model_digest_(model_digest),
      trace_(trace),
      layout_(geometry, kv),
      f16_layout_(geometry, kTailCodecs),
      encoder_([this] { EncoderMain(); }) {}

PagedKv::~PagedKv() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  encoder_.join();
}

void PagedKv::Reset(std::vector<SegmentSpan> spans) {
  (void)SettleSubmitted();  // the encoder must not touch what is dropped here
  records_.clear();
  record_refs_.clear();
  tail_.clear();
  writer_.reset();
  sealed_.clear();
  writer_serial_ = 0;
  n_tokens_ = 0;
  step_tokens_ = 0;
  Append(spans);
}

Status PagedKv::Flush() {
  QKV_CHECK(step_tokens_ == 0);
  int position = settled_tokens();
  for (TailPage& page : tail_) {
    if (page.submitted_at < 0) Submit(page, position);
    position += page.tokens;
  }
  const Status settled = SettleSubmitted();
  RebuildRefs();
  return settled;
}

void PagedKv::Append(const std::vector<SegmentSpan>& spans) {
  QKV_CHECK(tail_.empty() && step_tokens_ == 0);
  for (const SegmentSpan& span : spans) {
    int left = span.n_tokens;
    for (size_t i = 0; i < span.n_pages; ++i) {
      const size_t page = span.first_page + i;
      const int tokens = std::min<int>(left, span.segment->pages()[page].tokens);
      left -= tokens;
      records_.push_back({span.segment, -1, page, tokens});
      record_refs_.push_back({span.segment->page(page), span.segment->codecs(page), tokens, span.position_offset,
                              span.hide_first && i == 0});
    }
    n_tokens_ += span.n_tokens;
  }
  all_verified_ = false;
  RebuildRefs();
}

bool PagedKv::has_moved() const {
  return std::ranges::any_of(record_refs_, [](const PageRef& ref) { return ref.position_offset != 0; });
}

Status PagedKv::Verify(int threads) {
  if (all_verified_) return {};
  const TraceSpan span(trace_, "verify");
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < records_.size();) {
    size_t n = 1;  // a run of pages of one segment
    while (i + n < records_.size() && records_[i + n].segment == records_[i].segment &&
           records_[i + n].page == records_[i].page + n) {
      ++n;
    }
    if (records_[i].segment != nullptr) {
      QKV_RETURN_IF_ERROR(records_[i].segment->Verify(records_[i].page, n, threads));
    }
    i += n;
  }
  all_verified_ = true;
  verify_ms_ += MsSince(start);
  return {};
}

PagedKv::TailPage PagedKv::NewTailPage() {
  TailPage page;
  if (!spare_.empty()) {
    page.data = std::move(spare_.back());
    spare_.pop_back();
  } else {
    auto* data = static_cast<std::byte*>(std::aligned_alloc(kPageAlignment, f16_layout_.bytes));
    if (data == nullptr) throw std::bad_alloc();
    page.data.reset(data);
  }
  std::memset(page.data.get(), 0, f16_layout_.bytes);
  return page;
}

void PagedKv::RebuildRefs() {
  refs_.assign(record_refs_.begin(), record_refs_.end());
  for (const TailPage& page : tail_) refs_.push_back({page.data.get(), kTailCodecs, page.tokens});
}

int PagedKv::settled_tokens() const {
  int n = 0;
  for (const PageRecord& record : records_) n += record.tokens;
  return n;
}

Status PagedKv::BeginStep(int n, bool settle) {
  QKV_CHECK(step_tokens_ == 0);
  while (settle && !tail_.empty() && tail_.front().submitted_at >= 0 &&
         n_tokens_ >= tail_.front().submitted_at + kEncodeLagTokens) {
    QKV_RETURN_IF_ERROR(SettleFront());
  }
  for (int left = n; left > 0;) {
    if (tail_.empty() || tail_.back().tokens == kPageTokens || tail_.back().submitted_at >= 0) {
      tail_.push_back(NewTailPage());
    }
    const int take = std::min(left, kPageTokens - tail_.back().tokens);
    tail_.back().tokens += take;
    left -= take;
  }
  step_tokens_ = n;
  RebuildRefs();
  return {};
}

void PagedKv::AbortStep() {
  for (int left = std::exchange(step_tokens_, 0); left > 0;) {
    const int take = std::min(left, tail_.back().tokens);
    tail_.back().tokens -= take;
    left -= take;
    if (tail_.back().tokens == 0) tail_.pop_back();
  }
  RebuildRefs();
}

void PagedKv::AppendRows(int layer, const float* k, const float* v, size_t v_stride, int ith, int nth) {
  const int head_dim = geometry_.head_dim;
  const size_t row = static_cast<size_t>(geometry_.n_kv_heads) * head_dim;
  // The page and place of the step's first token.
  size_t first_page = tail_.size();
  int skipped = 0;  // tokens of tail pages from first_page on
  while (skipped < step_tokens_) skipped += tail_[--first_page].tokens;
  const int first_token = skipped - step_tokens_;

  uint16_t half[kMaxHeadDim];
  for (int head = ith; head < geometry_.n_kv_heads; head += nth) {
    size_t page = first_page;
    int token = first_token;
    for (int i = 0; i < step_tokens_; ++i, ++token) {
      if (token == tail_[page].tokens) {
        ++page;
        token = 0;
      }
      std::byte* base = tail_[page].data.get();
      // f16 blocks (FORMAT.md §3): K [head_dim][32], V [32][head_dim].
      auto* k_block = reinterpret_cast<uint16_t*>(base + f16_layout_.BlockOffset(Side::kK, layer, head));
      auto* v_block = reinterpret_cast<uint16_t*>(base + f16_layout_.BlockOffset(Side::kV, layer, head));
      ggml_fp32_to_fp16_row(k + i * row + static_cast<size_t>(head) * head_dim, half, head_dim);
      for (int c = 0; c < head_dim; ++c) k_block[c * kPageTokens + token] = half[c];
      ggml_fp32_to_fp16_row(v + i * v_stride + static_cast<size_t>(head) * head_dim, v_block + token * head_dim,
                            head_dim);
    }
  }
}

void PagedKv::EndStep(bool submit) {
  n_tokens_ += std::exchange(step_tokens_, 0);
  if (!submit) return;
  int position = settled_tokens();
  for (TailPage& page : tail_) {
    if (page.tokens == kPageTokens && page.submitted_at < 0) Submit(page, position);
    position += page.tokens;
  }
}

Status PagedKv::CopyToTail(const RowTransform& transform) {
  QKV_CHECK(step_tokens_ == 0);
  QKV_RETURN_IF_ERROR(SettleSubmitted());
  for (const PageRef& ref : record_refs_) {
    if (!(ref.codecs == kTailCodecs)) {
      return Err(Code::kInvalidArgument, "a page is in codec '{}', expected '{}'", ToString(ref.codecs),
                 ToString(kTailCodecs));
    }
  }
  const Codec& f16 = CodecOf(CodecId::kF16);
  std::vector<float> rows(static_cast<size_t>(kPageTokens) * geometry_.head_dim);
  std::deque<TailPage> tail;
  int position = 0;
  for (const PageRef& ref : record_refs_) {
    TailPage page = NewTailPage();
    page.tokens = ref.tokens;
    for (int layer = 0; layer < geometry_.n_layers; ++layer) {
      for (int head = 0; head < geometry_.n_kv_heads; ++head) {
        for (const Side side : {Side::kK, Side::kV}) {
          const size_t offset = f16_layout_.BlockOffset(side, layer, head);
          f16.decode(side, ref.data + offset, ref.tokens, geometry_.head_dim, rows.data());
          if (transform) transform(side, layer, head, position, ref.tokens, rows.data());
          f16.encode(side, rows.data(), ref.tokens, geometry_.head_dim, page.data.get() + offset);
        }
      }
    }
    position += ref.tokens;
    tail.push_back(std::move(page));
  }
  for (TailPage& page : tail_) tail.push_back(std::move(page));
  tail_ = std::move(tail);
  records_.clear();
  record_refs_.clear();
  RebuildRefs();
  return {};
}

void PagedKv::Submit(TailPage& page, int first_position) {
  page.submitted_at = n_tokens_;
  {
    std::lock_guard lock(mutex_);
    page.ticket = next_ticket_++;
    jobs_.push_back({page.ticket, page.data.get(), page.tokens, static_cast<uint32_t>(first_position)});
  }
  changed_.notify_all();
}

Status PagedKv::SettleFront() {
  TailPage& page = tail_.front();
  const auto start = std::chrono::steady_clock::now();
  Encoded encoded;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_.contains(page.ticket); });  // the encoder always answers
    encoded = std::move(done_.extract(page.ticket).mapped());
  }
  encode_wait_ms_ += MsSince(start);
  if (!encoded.status) {
    Submit(page, settled_tokens());
    return encoded.status;
  }
  records_.push_back({nullptr, encoded.writer_serial, encoded.page, page.tokens});
  record_refs_.push_back({encoded.data, kv_, page.tokens});
  if (spare_.size() < kMaxSpareTailPages) spare_.push_back(std::move(page.data));
  tail_.pop_front();
  return {};
}

Status PagedKv::SettleSubmitted() {
  Status status;
  while (status && !tail_.empty() && tail_.front().submitted_at >= 0) status = SettleFront();
  // After a failure, pages behind the failed one may still be with the encoder.
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return jobs_.empty(); });
  return status;
}

Result<std::vector<SegmentSpan>> PagedKv::SealAll() {
  QKV_RETURN_IF_ERROR(Flush());
  if (writer_ != nullptr) QKV_RETURN_IF_ERROR(SealWriter());
  SpanBuilder spans;
  for (size_t i = 0; i < records_.size(); ++i) {
    PageRecord& record = records_[i];
    if (record.writer_serial >= 0) record.segment = sealed_[std::exchange(record.writer_serial, -1)];
    spans.Add(record.segment, record.page, record_refs_[i]);
  }
  // Whose pages were all truncated away: nothing of this object reads them any more.
  std::erase_if(sealed_, [&](const auto& segment) {
    return std::ranges::find(records_, segment, &PageRecord::segment) == records_.end();
  });
  return spans.Take();
}

std::vector<SegmentSpan> PagedKv::SealedPrefix() const {
  // With no job to do, the encoder leaves sealed_ alone.
  std::lock_guard lock(mutex_);
  SpanBuilder spans;
  if (!jobs_.empty()) return {};
  for (size_t i = 0; i < records_.size(); ++i) {
    const PageRecord& record = records_[i];
    const auto serial = static_cast<size_t>(std::max(record.writer_serial, 0));
    if (record.segment == nullptr && serial >= sealed_.size()) break;
    spans.Add(record.segment != nullptr ? record.segment : sealed_[serial], record.page, record_refs_[i]);
  }
  return spans.Take();
}

Status PagedKv::Truncate(int n_tokens) {
  QKV_CHECK(n_tokens >= 0 && n_tokens <= n_tokens_ && step_tokens_ == 0);
  QKV_RETURN_IF_ERROR(SettleSubmitted());
  int left = n_tokens_ - n_tokens;
  while (left > 0) {
    const bool in_tail = !tail_.empty();
    int& tokens = in_tail ? tail_.back().tokens : records_.back().tokens;
    const int take = std::min(left, tokens);
    tokens -= take;
    left -= take;
    if (!in_tail) record_refs_.back().tokens = tokens;
    if (tokens > 0) continue;
    if (in_tail) {
      tail_.pop_back();
    } else {
      records_.pop_back();
      record_refs_.pop_back();
    }
  }
  n_tokens_ = n_tokens;
  RebuildRefs();
  return {};
}

uint64_t PagedKv::shared_bytes() const {
  uint64_t bytes = 0;
  for (const PageRecord& record : records_) {
    const bool own =
        record.writer_serial >= 0 || std::find(sealed_.begin(), sealed_.end(), record.segment) != sealed_.end();
    if (!own) bytes += record.segment->pages()[record.page].bytes;
  }
  return bytes;
}

uint64_t PagedKv::own_bytes() const {
  uint64_t bytes = 0;
  for (const PageRecord& record : records_) {
    const bool own =
        record.writer_serial >= 0 || std::find(sealed_.begin(), sealed_.end(), record.segment) != sealed_.end();
    if (own) bytes += layout_.bytes;
  }
  return bytes;
}

double PagedKv::encode_ms() const {
  std::lock_guard lock(mutex_);
  return encode_ms_;
}

void PagedKv::EncoderMain() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    const Job job = jobs_.front();
    lock.unlock();
    const auto start = std::chrono::steady_clock::now();
    Encoded encoded = Encode(job);
    const double ms = MsSince(start);
    lock.lock();
    encode_ms_ += ms;
    jobs_.pop_front();
    done_.emplace(job.ticket, std::move(encoded));
    changed_.notify_all();
  }
}

PagedKv::Encoded PagedKv::Encode(const Job& job) {
  const TraceSpan span(trace_, "encode");
  if (writer_ != nullptr && !writer_->Fits(kv_)) {
    if (auto status = SealWriter(); !status) return {0, 0, nullptr, status};
  }
  if (writer_ == nullptr) {
    if (auto status = OpenWriter(); !status) return {0, 0, nullptr, status};
  }
  const Codec& f16 = CodecOf(CodecId::kF16);
  const Codec& k_codec = CodecOf(kv_.k);
  const Codec& v_codec = CodecOf(kv_.v);
  std::vector<float> rows(static_cast<size_t>(kPageTokens) * geometry_.head_dim);
  const auto page = writer_->Append(kv_, job.tokens, job.first_position, [&](std::byte* out) {
    for (int layer = 0; layer < geometry_.n_layers; ++layer) {
      for (int head = 0; head < geometry_.n_kv_heads; ++head) {
        for (const Side side : {Side::kK, Side::kV}) {
          f16.decode(side, job.tail_data + f16_layout_.BlockOffset(side, layer, head), job.tokens, geometry_.head_dim,
                     rows.data());
          (side == Side::kK ? k_codec : v_codec)
              .encode(side, rows.data(), job.tokens, geometry_.head_dim, out + layout_.BlockOffset(side, layer, head));
        }
      }
    }
  });
  if (!page) return {0, 0, nullptr, tl::unexpected(page.error())};
  return {writer_serial_, *page, writer_->page(*page), {}};
}

Status PagedKv::OpenWriter() {
  const uint64_t wanted = std::min(kFirstSegmentBytes << std::min<size_t>(sealed_.size(), 8), kLastSegmentBytes);
  const uint64_t at_least =
      2 * layout_.bytes + (uint64_t{1} << 20);  // header, table and a page however large the model
  QKV_ASSIGN_OR_RETURN(writer_, SegmentWriter::Create(geometry_, std::max(wanted, at_least), model_digest_));
  writer_serial_ = static_cast<int>(sealed_.size());
  return {};
}

Status PagedKv::SealWriter() {
  const TraceSpan span(trace_, "seal");
  if (writer_->n_pages() == 0) {
    writer_.reset();
    return {};
  }
  QKV_ASSIGN_OR_RETURN(auto segment, SegmentWriter::Seal(std::move(writer_)));
  writer_.reset();
  sealed_.push_back(std::move(segment));
  return {};
}

}  // namespace qkv
