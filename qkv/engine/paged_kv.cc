// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/paged_kv.h"

#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>

#include "qkv/engine/preset.h"

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
  struct Page {
    std::shared_ptr<const Segment> segment;
    size_t index = 0;
  };
  // `refinement` with a null segment: the page has none.
  void Add(const Page& page, const Page& refinement, const PageRef& ref) {
    const bool goes_on = !broken_ && !spans_.empty() && spans_.back().segment == page.segment &&
                         spans_.back().first_page + spans_.back().n_pages == page.index &&
                         spans_.back().refinement == refinement.segment &&
                         (refinement.segment == nullptr ||
                          spans_.back().first_refinement_page + spans_.back().n_pages == refinement.index) &&
                         last_tokens_ == page.segment->pages()[page.index - 1].tokens &&
                         spans_.back().position_offset == ref.position_offset && !ref.hide_first;
    broken_ = false;
    if (!goes_on) {
      spans_.push_back(
          {page.segment, page.index, 0, 0, ref.position_offset, ref.hide_first, refinement.segment, refinement.index});
    }
    spans_.back().n_pages += 1;
    spans_.back().n_tokens += ref.tokens;
    last_tokens_ = ref.tokens;
  }
  // The next page begins a span.
  void Break() { broken_ = true; }
  std::vector<SegmentSpan> Take() { return std::move(spans_); }

 private:
  std::vector<SegmentSpan> spans_;
  int last_tokens_ = 0;  // used of the last page
  bool broken_ = false;
};

}  // namespace

void PagedKv::AlignedFree::operator()(std::byte* p) const {
  std::free(p);
}

PagedKv::PagedKv(const Geometry& geometry, const PageCodecs& kv, const std::array<uint8_t, 16>& model_digest,
                 bool use_refinement, Trace* trace, const std::array<uint8_t, 16>& calibration_digest,
                 std::shared_ptr<const PqCodebooks> codebooks)
    : geometry_(geometry),
      codebooks_(std::move(codebooks)),
      encoder_of_kv_(geometry, kv, codebooks_.get()),
      use_refinement_(use_refinement),
      model_digest_(model_digest),
      calibration_digest_(calibration_digest),
      trace_(trace),
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

void PagedKv::Reset(std::vector<SegmentSpan> spans, GroupedTokens groups) {
  (void)SettleSubmitted();  // the encoder must not touch what is dropped here
  done_.clear();
  records_.clear();
  record_refs_.clear();
  tail_.clear();
  DropWriter();
  sealed_.clear();
  writer_serial_ = 0;
  constants_.reset();
  constants_fixed_ = false;
  groups_ = std::move(groups);
  encoder_of_low_.reset();
  n_tokens_ = 0;
  step_tokens_ = 0;
  Append(spans);
}

Status PagedKv::Flush() {
  QKV_CHECK(step_tokens_ == 0);
  int position = settled_tokens() + groups_.n_dropped();
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
      const PageEntry& entry = span.segment->pages()[span.first_page + i];
      const int tokens = std::min<int>(left, entry.tokens);
      left -= tokens;
      PageRecord record{.segment = span.segment, .page = span.first_page + i, .tokens = tokens, .bytes = entry.bytes};
      PageRef ref{.data = span.segment->page(record.page),
                  .codecs = span.segment->codecs(record.page),
                  .tokens = tokens,
                  .position_offset = span.position_offset,
                  .hide_first = span.hide_first && i == 0};
      if (NeedsConstants(ref.codecs)) {
        ref.constants = span.segment->constants();
        ref.exact_first = entry.first_position == 0;
      }
      if (ref.codecs == kLayersPair) ref.layers = span.segment->layers().get();
      if (NeedsBooks(ref.codecs)) ref.codebooks = codebooks_.get();
      if (span.refinement != nullptr) {
        record.refinement = span.refinement;
        record.refinement_page = span.first_refinement_page + i;
        if (use_refinement_) {
          ref.refinement = span.refinement->page(record.refinement_page);
          record.bytes += span.refinement->pages()[record.refinement_page].bytes;
        }
      }
      records_.push_back(std::move(record));
      record_refs_.push_back(ref);
    }
    n_tokens_ += span.n_tokens;
  }
  all_verified_ = false;
  RebuildRefs();
}

bool PagedKv::has_moved() const {
  return std::ranges::any_of(record_refs_, [](const PageRef& ref) { return ref.position_offset != 0; });
}

void PagedKv::DropUnusedConstants() {
  const auto unsealed = [](const PageRecord& record) { return record.writer_serial >= 0; };
  const auto at_encoder = [](const TailPage& page) { return page.submitted_at >= 0; };
  if (std::ranges::any_of(records_, unsealed) || std::ranges::any_of(tail_, at_encoder)) return;
  constants_.reset();
  constants_fixed_ = false;
  // The open segment would pass the old ones on; all its pages were truncated away.
  if (WritesRotated()) DropWriter();
}

bool PagedKv::WritesRotated() const {
  return NeedsConstants(encoder_of_kv_.kv()) || (encoder_of_low_ && NeedsConstants(encoder_of_low_->kv()));
}

Status PagedKv::Verify(int threads) {
  if (all_verified_) return {};
  const TraceSpan span(trace_, "verify");
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < records_.size();) {
    const PageRecord& first = records_[i];
    size_t n = 1;  // a run of pages of one segment
    while (i + n < records_.size() && records_[i + n].segment == first.segment &&
           records_[i + n].page == first.page + n && records_[i + n].refinement == first.refinement &&
           (first.refinement == nullptr || records_[i + n].refinement_page == first.refinement_page + n)) {
      ++n;
    }
    if (first.segment != nullptr) QKV_RETURN_IF_ERROR(first.segment->Verify(first.page, n, threads));
    if (first.refinement != nullptr && use_refinement_) {
      QKV_RETURN_IF_ERROR(first.refinement->Verify(first.refinement_page, n, threads));
    }
    i += n;
  }
  all_verified_ = true;
  verify_ms_ += MsSince(start);
  return {};
}

PagedKv::TailPage PagedKv::NewTailPage() {
  TailPage page;
  page.encoder = &encoder_of_kv_;
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

Status PagedKv::BeginStep(int n, Settle settle) {
  QKV_CHECK(step_tokens_ == 0);
  const int lag = settle == Settle::kAll ? 0 : kEncodeLagTokens;
  while (settle != Settle::kNone && !tail_.empty() && tail_.front().submitted_at >= 0 &&
         n_tokens_ >= tail_.front().submitted_at + lag) {
    if (Status settled = SettleFront(); !settled) {
      RebuildRefs();
      return settled;
    }
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
  if (submit) SubmitFull();
}

void PagedKv::SubmitFull() {
  int position = settled_tokens() + groups_.n_dropped();
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
  if (page.submitted_at < 0) page.submitted_at = n_tokens_;
  page.first_position = first_position;
  Job job{.page = {page.data.get(), page.tokens},
          .first_position = static_cast<uint32_t>(first_position),
          .encoder = page.encoder};
  if (WritesRotated() && !constants_fixed_) {
    for (const TailPage& other : tail_) job.constants_of.push_back({other.data.get(), other.tokens});
    constants_fixed_ = true;
  }
  {
    std::lock_guard lock(mutex_);
    job.ticket = page.ticket = next_ticket_++;
    jobs_.push_back(std::move(job));
  }
  changed_.notify_all();
}

Status PagedKv::SettleFront() {
  TailPage& page = tail_.front();
  const auto start = std::chrono::steady_clock::now();
  const auto result = [&] {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_.contains(page.ticket); });  // the encoder always answers
    return std::move(done_.extract(page.ticket).mapped());
  };
  Encoded encoded = result();
  if (!encoded.status) {  // perhaps long ago
    Submit(page, page.first_position);
    encoded = result();
  }
  encode_wait_ms_ += MsSince(start);
  if (!encoded.status) {
    Submit(page, page.first_position);
    return encoded.status;
  }
  records_.push_back({.writer_serial = encoded.writer_serial,
                      .own = true,
                      .page = encoded.page,
                      .tokens = page.tokens,
                      .refinement_page = encoded.refinement_page,
                      .bytes = page.encoder->page_bytes()});
  record_refs_.push_back(encoded.ref);
  record_refs_.back().tokens = page.tokens;
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
  if (!groups_.empty() && n_tokens() == groups_.size()) {
    return Err(Code::kInvalidArgument,
               "the {} tokens are all grouped by importance; a context has at least one behind such", n_tokens());
  }
  QKV_RETURN_IF_ERROR(Flush());
  if (writer_ != nullptr) QKV_RETURN_IF_ERROR(SealWriter());
  SpanBuilder spans;
  const int n_high = groups_.n_high(), n_grouped = groups_.n_in_pages();
  int place = 0;
  for (size_t i = 0; i < records_.size(); ++i) {
    PageRecord& record = records_[i];
    if (record.writer_serial >= 0) {
      const Sealed& sealed = sealed_[std::exchange(record.writer_serial, -1)];
      record.segment = sealed.segment;
      record.refinement = sealed.refinement;
    }
    if (place == n_high || place == n_grouped) spans.Break();
    place += record.tokens;
    spans.Add({record.segment, record.page}, {record.refinement, record.refinement_page}, record_refs_[i]);
  }
  DropUnusedConstants();
  encoder_of_low_.reset();  // as for whoever attaches: groups are of the first tokens only
  // Whose pages were all truncated away: nothing of this object reads them any more.
  std::erase_if(sealed_, [&](const Sealed& sealed) {
    return std::ranges::find(records_, sealed.segment, &PageRecord::segment) == records_.end();
  });
  return spans.Take();
}

std::vector<SegmentSpan> PagedKv::SealedPrefix() const {
  // With no job to do, the encoder leaves sealed_ alone.
  std::lock_guard lock(mutex_);
  SpanBuilder spans;
  if (!jobs_.empty() || !groups_.empty()) return {};
  for (size_t i = 0; i < records_.size(); ++i) {
    const PageRecord& record = records_[i];
    Sealed sealed{record.segment, record.refinement};
    if (record.segment == nullptr) {
      if (static_cast<size_t>(record.writer_serial) >= sealed_.size()) break;
      sealed = sealed_[record.writer_serial];
    }
    spans.Add({sealed.segment, record.page}, {sealed.refinement, record.refinement_page}, record_refs_[i]);
  }
  return spans.Take();
}

Status PagedKv::Truncate(int n_tokens) {
  if (n_tokens > 0 && n_tokens < groups_.size()) {
    return Err(Code::kInvalidArgument, "the first {} tokens are grouped by importance and cannot be cut to {}",
               groups_.size(), n_tokens);
  }
  if (n_tokens > 0) n_tokens -= groups_.n_dropped();
  QKV_CHECK(n_tokens >= 0 && n_tokens <= n_tokens_ && step_tokens_ == 0);
  (void)SettleSubmitted();  // a page that could not be encoded stays in the tail, and may be cut there
  if (n_tokens == 0) groups_ = {};
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
      if (tail_.back().submitted_at >= 0) done_.erase(tail_.back().ticket);
      tail_.pop_back();
    } else {
      records_.pop_back();
      record_refs_.pop_back();
    }
  }
  n_tokens_ = n_tokens;
  if (constants_fixed_) DropUnusedConstants();
  RebuildRefs();
  return {};
}

bool PagedKv::only_tail() const {
  return records_.empty() && std::ranges::all_of(tail_, [](const TailPage& page) { return page.submitted_at < 0; });
}

PagedKv::TailPage PagedKv::CopyOfTokens(std::span<const int> positions) {
  TailPage page = NewTailPage();
  page.tokens = static_cast<int>(positions.size());
  const int head_dim = geometry_.head_dim;
  const auto halves = [](std::byte* data, size_t offset) { return reinterpret_cast<uint16_t*>(data + offset); };
  for (int layer = 0; layer < geometry_.n_layers; ++layer) {
    for (int head = 0; head < geometry_.n_kv_heads; ++head) {
      // f16 blocks (FORMAT.md §3): K [head_dim][32], V [32][head_dim].
      const size_t k = f16_layout_.BlockOffset(Side::kK, layer, head);
      const size_t v = f16_layout_.BlockOffset(Side::kV, layer, head);
      for (int t = 0; t < page.tokens; ++t) {
        std::byte* const from = tail_[positions[t] / kPageTokens].data.get();
        const int place = positions[t] % kPageTokens;
        const uint16_t* const k_from = halves(from, k) + place;
        uint16_t* const k_to = halves(page.data.get(), k) + t;
        for (int c = 0; c < head_dim; ++c) k_to[c * kPageTokens] = k_from[c * kPageTokens];
        std::copy_n(halves(from, v) + place * head_dim, head_dim, halves(page.data.get(), v) + t * head_dim);
      }
    }
  }
  return page;
}

void PagedKv::Group(GroupedTokens groups, std::optional<CodecPair> low) {
  QKV_CHECK(only_tail() && step_tokens_ == 0 && groups.size() <= n_tokens_ && groups.size() % kPageTokens == 0);
  if (groups.empty()) return SubmitFull();
  QKV_CHECK(groups.dropped || low);
  if (low) encoder_of_low_.emplace(geometry_, *low, codebooks_.get());
  const TraceSpan span(trace_, "group");
  const std::vector<int> order = groups.Order();
  const auto n_high = static_cast<size_t>(groups.n_high());
  std::vector<TailPage> grouped;
  for (size_t at = 0; at < order.size();) {
    const bool high = at < n_high;
    const size_t n = std::min<size_t>(kPageTokens, (high ? n_high : order.size()) - at);
    TailPage& page = grouped.emplace_back(CopyOfTokens(std::span(order).subspan(at, n)));
    page.encoder = high ? &encoder_of_kv_ : &*encoder_of_low_;
    page.first_position = order[at];
    at += n;
  }
  tail_.erase(tail_.begin(), tail_.begin() + groups.size() / kPageTokens);
  tail_.insert(tail_.begin(), std::make_move_iterator(grouped.begin()), std::make_move_iterator(grouped.end()));
  n_tokens_ -= groups.n_dropped();
  groups_ = std::move(groups);
  for (size_t i = 0; i < grouped.size(); ++i) Submit(tail_[i], tail_[i].first_position);
  SubmitFull();
  RebuildRefs();
}

uint64_t PagedKv::shared_bytes() const {
  uint64_t bytes = 0;
  for (const PageRecord& record : records_) bytes += record.own ? 0 : record.bytes;
  return bytes;
}

uint64_t PagedKv::own_bytes() const {
  uint64_t bytes = 0;
  for (const PageRecord& record : records_) bytes += record.own ? record.bytes : 0;
  return bytes;
}

PagedKv::PlaneBits PagedKv::plane_bits() const {
  PlaneBits sum;
  int n = 0;
  for (const PageRef& ref : record_refs_) {
    sum.base +=
        ref.tokens * (ref.layers != nullptr ? BitsPerValue(*ref.layers) : BitsPerValue(ref.codecs, geometry_.head_dim));
    n += ref.tokens;
  }
  for (const PageRecord& record : records_) {
    const bool open_with_refinement = record.writer_serial >= 0 && encoder_of_kv_.kv().refine;
    if (record.refinement == nullptr && !open_with_refinement) continue;
    sum.refinement += record.tokens * BitsPerValue(kRefinementCodecs, geometry_.head_dim);
  }
  return n == 0 ? PlaneBits{} : PlaneBits{sum.base / n, sum.refinement / n};
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
  const PageEncoder& encoder = *job.encoder;
  const auto failed = [](Error error) { return Encoded{0, 0, 0, {}, tl::unexpected(std::move(error))}; };
  if (!job.constants_of.empty()) {
    // Token 0 is among them unless there are pages before.
    constants_ = ConstantsOf(geometry_, job.constants_of, job.first_position == 0);
    constants_->calibration_digest = calibration_digest_;
  }
  const auto fits = [&] {
    return writer_->Fits(encoder.base()) &&
           (!encoder.kv().refine || (refinement_writer_ != nullptr && refinement_writer_->Fits(kRefinementCodecs)));
  };
  if (writer_ != nullptr && !fits()) {
    if (auto status = SealWriter(); !status) return failed(status.error());
  }
  if (writer_ == nullptr) {
    if (auto status = OpenWriter(encoder); !status) return failed(status.error());
  }
  const bool exact_first = NeedsConstants(encoder.kv()) && job.first_position == 0;
  Result<size_t> page = size_t{0}, refinement = size_t{0};
  const auto encode = [&](std::byte* refinement_out) {
    page = writer_->Append(encoder.base(), job.page.tokens, job.first_position, [&](std::byte* out) {
      encoder.Encode(job.page, exact_first, constants_ ? &*constants_ : nullptr, out, refinement_out);
    });
  };
  if (encoder.kv().refine) {
    refinement = refinement_writer_->Append(kRefinementCodecs, job.page.tokens, job.first_position, encode);
    if (!refinement) return failed(refinement.error());
  } else {
    encode(nullptr);
  }
  if (!page) {
    if (encoder.kv().refine) refinement_writer_->DropLast();
    return failed(page.error());
  }
  PageRef ref{.data = writer_->page(*page), .codecs = encoder.base(), .tokens = job.page.tokens};
  if (NeedsConstants(encoder.kv())) {
    ref.constants = writer_->constants();
    ref.exact_first = exact_first;
  }
  if (encoder.kv() == kLayersPair) ref.layers = writer_->layers();
  if (NeedsBooks(encoder.kv())) ref.codebooks = codebooks_.get();
  if (encoder.kv().refine && use_refinement_) ref.refinement = refinement_writer_->page(*refinement);
  return {writer_serial_, *page, *refinement, ref, {}};
}

Status PagedKv::OpenWriter(const PageEncoder& encoder) {
  const uint64_t wanted = std::min(kFirstSegmentBytes << std::min<size_t>(sealed_.size(), 8), kLastSegmentBytes);
  const uint64_t slack = uint64_t{1} << 20;  // header, table and a page however large the model
  const uint64_t capacity = std::max(wanted, 2 * encoder.layout().bytes + slack);
  QKV_ASSIGN_OR_RETURN(auto writer, SegmentWriter::Create(geometry_, capacity, model_digest_,
                                                          constants_ ? &*constants_ : nullptr, encoder.layers()));
  if (encoder.kv().refine) {
    const uint64_t pages = capacity / encoder.layout().bytes + 1;
    QKV_ASSIGN_OR_RETURN(
        refinement_writer_,
        SegmentWriter::Create(geometry_, pages * encoder.refinement_layout().bytes + slack, model_digest_));
  }
  writer_ = std::move(writer);
  writer_serial_ = static_cast<int>(sealed_.size());
  return {};
}

Status PagedKv::SealWriter() {
  const TraceSpan span(trace_, "seal");
  if (writer_->n_pages() > 0) {
    if (refinement_writer_ != nullptr && refinement_writer_->n_pages() > 0) {
      QKV_ASSIGN_OR_RETURN(sealed_refinement_, SegmentWriter::Seal(refinement_writer_));
    }
    QKV_ASSIGN_OR_RETURN(auto segment, SegmentWriter::Seal(writer_));
    sealed_.push_back({std::move(segment), std::move(sealed_refinement_)});
  }
  DropWriter();
  return {};
}

void PagedKv::DropWriter() {
  writer_.reset();
  refinement_writer_.reset();
  sealed_refinement_.reset();
}

}  // namespace qkv
