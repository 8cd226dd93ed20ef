// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The KV cache of one Sequence: pages that are sealed (shared or own), own pages in a segment still open, and the tail.
// A page that the tail has filled is encoded by a thread of this object while the next tokens are computed, and takes the
// tail page's place kEncodeLagTokens later: late enough that nobody waits, and at a point that does not depend on timing.
//
// Rotated codecs need constants (page_encoder.h). They are taken from the tail when the first page since the last handoff
// (Reset, SealAll) goes to the encoder: the same for who goes on as for whoever attaches. Not from what was handed over:
// the keys of other texts have other means (docs/EVALUATION.md, Hops).
//
// A prompt's tokens may be grouped by importance (token_groups.h): they change places in the tail, so that from there on
// pages of two codecs are pages like any others, and attention, which asks for no order among past tokens, reads them so.
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
#include "qkv/engine/page_encoder.h"
#include "qkv/engine/token_groups.h"
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
  int position_offset = 0;                    // of use minus encoding
  bool hide_first = false;                    // the span's first token is not seen
  std::shared_ptr<const Segment> refinement;  // of these pages, one for one; null: they have none
  size_t first_refinement_page = 0;
};

class PagedKv {
 public:
  static constexpr int kEncodeLagTokens = 8;

  // `kv`: of the pages written here. `use_refinement`: attention is to see refinement pages, attached or own; without it
  // they are passed on all the same, but neither checked nor read. `trace` may be null, and must outlive this object.
  // `codebooks`: of all pages here that need some, attached or own.
  PagedKv(const Geometry& geometry, const PageCodecs& kv, const std::array<uint8_t, 16>& model_digest,
          bool use_refinement = true, Trace* trace = nullptr, const std::array<uint8_t, 16>& calibration_digest = {},
          std::shared_ptr<const PqCodebooks> codebooks = nullptr);
  ~PagedKv();
  PagedKv(const PagedKv&) = delete;
  PagedKv& operator=(const PagedKv&) = delete;

  int n_tokens() const { return n_tokens_ + groups_.n_dropped(); }

  // Replaces everything by these spans, whose first pages hold `groups`. They must fit the geometry.
  void Reset(std::vector<SegmentSpan> spans, GroupedTokens groups = {});

  // Everything in the tail becomes pages, in a segment that may stay open.
  Status Flush();
  // Behind what there is: pages of other contexts. They must fit the geometry. REQUIRES: nothing in the tail (Flush).
  void Append(const std::vector<SegmentSpan>& spans);

  bool has_moved() const;  // some page is not at the position that it was encoded at

  // Checks pages of attached segments that have not been checked yet.
  Status Verify(int threads);

  // Which encoded pages may take their place among pages() when a step begins: none, those whose time has come, or all
  // that were submitted, for a tail that has grown too large.
  enum class Settle : uint8_t { kNone, kDue, kAll };
  // Makes room for n new tokens. On error nothing has changed.
  Status BeginStep(int n, Settle settle);
  // With the n new tokens, whose rows are filled in by AppendRows layer by layer.
  std::span<const PageRef> pages() const { return refs_; }
  // k, v: [n][n_kv_heads][head_dim] fp32 of the step's tokens, V's v_stride apart; thread ith of nth does its share.
  void AppendRows(int layer, const float* k, const float* v, size_t v_stride, int ith, int nth);
  // The step's tokens are there. `submit`: full pages go to the encoder.
  void EndStep(bool submit);
  // Everything is in the tail, and nothing of it has gone to the encoder.
  bool only_tail() const;
  // Groups the first tokens and sends full pages to the encoder: high ones in the codecs of this object, the others in
  // pages of `low`, or nowhere if they are dropped. REQUIRES: only_tail(), groups.size() full pages, low unless dropped.
  void Group(GroupedTokens groups, std::optional<CodecPair> low);
  const GroupedTokens& groups() const { return groups_; }
  // Copies what is here, all of it f16 pages, into the tail, as if one step had brought it; each row goes through
  // `transform` (may be empty) on the way. Error: kInvalidArgument when a page is of another codec.
  using RowTransform =
      std::function<void(Side side, int layer, int kv_head, int first_position, int tokens, float* rows)>;
  Status CopyToTail(const RowTransform& transform);
  // Takes back what BeginStep made room for.
  void AbortStep();

  // Everything becomes sealed pages; the tail is empty afterwards. Error: kInvalidArgument when nothing is left behind
  // grouped tokens.
  Result<std::vector<SegmentSpan>> SealAll();
  // To the first n_tokens, dropped ones included; so also what a step brought that failed behind it. Error:
  // kInvalidArgument when some of them are grouped with others that are to go; nothing has changed.
  Status Truncate(int n_tokens);
  // The pages from the first on that are in sealed segments already, other sequences' or own. Changes nothing. Empty also
  // while the encoder is at work, and where tokens are grouped.
  std::vector<SegmentSpan> SealedPrefix() const;

  // Refinement pages are counted where attention sees them; own ones always.
  uint64_t shared_bytes() const;  // pages of attached segments, referenced here
  uint64_t own_bytes() const;     // pages that this object wrote
  // Stored bits of all pages' base planes, and of their refinement planes, per value of the tokens in them.
  struct PlaneBits {
    double base = 0;
    double refinement = 0;
  };
  PlaneBits plane_bits() const;
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
    int submitted_at = -1;                 // n_tokens_ when it went to the encoder; -1: has not
    uint64_t ticket = 0;                   // of its job
    const PageEncoder* encoder = nullptr;  // which it goes to or went to
    int first_position = 0;                // known from then on
  };
  // A page that is no longer in the tail. Own pages know their writer's serial until that is sealed.
  struct PageRecord {
    std::shared_ptr<const Segment> segment;
    int writer_serial = -1;
    bool own = false;
    size_t page = 0;
    int tokens = 0;
    std::shared_ptr<const Segment> refinement;  // of an own page from sealing on
    size_t refinement_page = 0;
    uint64_t bytes = 0;  // with its refinement page if that counts
  };
  struct Job {
    uint64_t ticket = 0;
    F16Page page;
    uint32_t first_position = 0;
    std::vector<F16Page> constants_of = {};  // not empty: the constants are to be taken from these first
    const PageEncoder* encoder = nullptr;
  };
  struct Encoded {
    int writer_serial = 0;
    size_t page = 0;
    size_t refinement_page = 0;
    PageRef ref = {};
    Status status;
  };

  TailPage NewTailPage();
  void RebuildRefs();
  void Submit(TailPage& page, int first_position);
  void SubmitFull();
  // Waits for the front tail page, which has been submitted, and moves it to the records. If it could not be encoded it
  // goes to the encoder once more, and on error again, for the next call; it then stays in the tail.
  Status SettleFront();
  Status SettleSubmitted();
  int settled_tokens() const;
  // The owner's, with no job at the encoder: when no page that was written since the last handoff is left.
  void DropUnusedConstants();
  bool WritesRotated() const;
  // The tail's tokens at these positions, at most a page of them.
  TailPage CopyOfTokens(std::span<const int> positions);
  void EncoderMain();
  Encoded Encode(const Job& job);
  Status OpenWriter(const PageEncoder& encoder);
  // On error the pages not sealed are read on from where they are, and the next call takes it up again.
  Status SealWriter();
  void DropWriter();  // no page of it is read any more, or all are sealed

  const Geometry geometry_;
  const std::shared_ptr<const PqCodebooks> codebooks_;
  const PageEncoder encoder_of_kv_;
  std::optional<PageEncoder> encoder_of_low_;  // of grouped tokens; as long as there may be jobs for it
  const bool use_refinement_;
  const std::array<uint8_t, 16> model_digest_;
  const std::array<uint8_t, 16> calibration_digest_;
  Trace* const trace_;
  const PageLayout f16_layout_;

  int n_tokens_ = 0;  // in pages
  int step_tokens_ = 0;
  std::vector<PageRecord> records_;
  std::vector<PageRef> record_refs_;  // parallel to records_
  std::deque<TailPage> tail_;
  std::vector<std::unique_ptr<std::byte[], AlignedFree>> spare_;
  std::vector<PageRef> refs_;  // record_refs_ and the tail's
  double encode_wait_ms_ = 0;
  double verify_ms_ = 0;
  bool all_verified_ = true;
  bool constants_fixed_ = false;  // or will be, by a job
  GroupedTokens groups_;          // the first tokens of records_ and tail_

  // From here to sealed_, everything belongs to the encoder while there are jobs, else to the owner (SettleSubmitted
  // first).
  std::optional<SegmentConstants> constants_;  // of the rotated pages written here
  std::unique_ptr<SegmentWriter> writer_;
  std::unique_ptr<SegmentWriter> refinement_writer_;  // beside writer_ if there is anything to write
  std::shared_ptr<const Segment> sealed_refinement_;  // refinement_writer_'s, while writer_ could not be sealed
  int writer_serial_ = 0;
  struct Sealed {
    std::shared_ptr<const Segment> segment;
    std::shared_ptr<const Segment> refinement;  // may be null
  };
  std::vector<Sealed> sealed_;  // by writer serial
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
