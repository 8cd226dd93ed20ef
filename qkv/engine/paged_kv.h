// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The KV cache of one Sequence: pages that are sealed (shared or own), own pages in a segment still open, and the tail.
// A page that the tail has filled is encoded by a thread of this object while the next tokens are computed, and takes the
// tail page's place kEncodeLagTokens later: late enough that nobody waits, and at a point that does not depend on timing.
//
// The owner's thread calls everything but AppendRows, which ggml's threads call between BeginStep and EndStep.

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "qkv/attention/attention.h"
#include "qkv/base/trace.h"
#include "qkv/segment/segment.h"
#include "qkv/segment/writer.h"

namespace qkv {

// Part of what this cache reads: pages [first_page, first_page + n_pages) of a segment, n_tokens in all (of the last page
// perhaps not all of its tokens).
struct SegmentSpan {
  std::shared_ptr<const Segment> segment;
  size_t first_page = 0;
  size_t n_pages = 0;
  int n_tokens = 0;
  int position_offset = 0;  // of use minus encoding
  bool hide_first = false;  // the span's first token is not seen
};

class PagedKv {
 public:
  static constexpr int kEncodeLagTokens = 8;

  // `trace` may be null, and must outlive this object.
  PagedKv(const Geometry& geometry, CodecPair kv, const std::array<uint8_t, 16>& model_digest, Trace* trace = nullptr);
  ~PagedKv();
  PagedKv(const PagedKv&) = delete;
  PagedKv& operator=(const PagedKv&) = delete;

  int n_tokens() const { return n_tokens_; }

  // Replaces everything by these spans. They must fit the geometry.
  void Reset(std::vector<SegmentSpan> spans);

  // Everything in the tail becomes pages, in a segment that may stay open.
  Status Flush();
  // Behind what there is: pages of other contexts. They must fit the geometry. REQUIRES: nothing in the tail (Flush).
  void Append(const std::vector<SegmentSpan>& spans);

  bool has_moved() const;  // some page is not at the position that it was encoded at

  // Checks pages of attached segments that have not been checked yet.
  Status Verify(int threads);

  // Makes room for n new tokens. `settle`: encoded pages whose time has come may take their place among pages(). On error
  // nothing has changed.
  Status BeginStep(int n, bool settle);
  // With the n new tokens, whose rows are filled in by AppendRows layer by layer.
  std::span<const PageRef> pages() const { return refs_; }
  // k, v: [n][n_kv_heads][head_dim] fp32 of the step's tokens, V's v_stride apart; thread ith of nth does its share.
  void AppendRows(int layer, const float* k, const float* v, size_t v_stride, int ith, int nth);
  // The step's tokens are there. `submit`: full pages go to the encoder.
  void EndStep(bool submit);
  // Copies what is here, all of it f16 pages, into the tail, as if one step had brought it; each row goes through
  // `transform` (may be empty) on the way. Error: kInvalidArgument when a page is of another codec.
  using RowTransform =
      std::function<void(Side side, int layer, int kv_head, int first_position, int tokens, float* rows)>;
  Status CopyToTail(const RowTransform& transform);
  // Takes back what BeginStep made room for.
  void AbortStep();

  // Everything becomes sealed pages; the tail is empty afterwards.
  Result<std::vector<SegmentSpan>> SealAll();
  Status Truncate(int n_tokens);
  // The pages from the first on that are in sealed segments already, other sequences' or own. Changes nothing. Empty also
  // while the encoder is at work.
  std::vector<SegmentSpan> SealedPrefix() const;

  uint64_t shared_bytes() const;  // pages of attached segments, referenced here
  uint64_t own_bytes() const;     // pages that this object wrote
  uint64_t tail_bytes() const { return tail_.size() * f16_layout_.bytes; }
  double encode_ms() const;
  double encode_wait_ms() const { return encode_wait_ms_; }
  double verify_ms() const { return verify_ms_; }

 private:
  struct AlignedFree {
    void operator()(std::byte* p) const;
  };
  struct TailPage {
    std::unique_ptr<std::byte[], AlignedFree> data;  // f16_layout_.bytes
    int tokens = 0;
    int submitted_at = -1;  // n_tokens_ when it went to the encoder; -1: has not
    uint64_t ticket = 0;    // of its job
  };
  // A page that is no longer in the tail. Own pages know their writer's serial until that is sealed.
  struct PageRecord {
    std::shared_ptr<const Segment> segment;
    int writer_serial = -1;
    size_t page = 0;
    int tokens = 0;
  };
  struct Job {
    uint64_t ticket;
    const std::byte* tail_data;
    int tokens;
    uint32_t first_position;
  };
  struct Encoded {
    int writer_serial;
    size_t page;
    const std::byte* data;
    Status status;
  };

  TailPage NewTailPage();
  void RebuildRefs();
  void Submit(TailPage& page, int first_position);
  // Waits for the front tail page, which has been submitted, and moves it to the records. On error it stays in the tail
  // and goes to the encoder again.
  Status SettleFront();
  Status SettleSubmitted();
  int settled_tokens() const;
  void EncoderMain();
  Encoded Encode(const Job& job);
  Status OpenWriter();
  Status SealWriter();

  const Geometry geometry_;
  const CodecPair kv_;
  const std::array<uint8_t, 16> model_digest_;
  Trace* const trace_;
  const PageLayout layout_;
  const PageLayout f16_layout_;

  int n_tokens_ = 0;
  int step_tokens_ = 0;
  std::vector<PageRecord> records_;
  std::vector<PageRef> record_refs_;  // parallel to records_
  std::deque<TailPage> tail_;
  std::vector<std::unique_ptr<std::byte[], AlignedFree>> spare_;
  std::vector<PageRef> refs_;  // record_refs_ and the tail's
  double encode_wait_ms_ = 0;
  double verify_ms_ = 0;
  bool all_verified_ = true;

  // writer_, writer_serial_ and sealed_ belong to the encoder while there are jobs, else to the owner (SettleSubmitted
  // first).
  std::unique_ptr<SegmentWriter> writer_;
  int writer_serial_ = 0;
  std::vector<std::shared_ptr<const Segment>> sealed_;  // by writer serial
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::map<uint64_t, Encoded> done_;  // by ticket
  uint64_t next_ticket_ = 1;
  bool stop_ = false;
  double encode_ms_ = 0;
  std::thread encoder_;
};

}  // namespace qkv
