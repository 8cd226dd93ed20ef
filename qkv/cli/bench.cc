// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/bench.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "qkv/cli/commands.h"
#include "qkv/cli/options.h"
#include "qkv/segment/writer.h"

namespace qkv::cli {

int PrintMeasured(const Result<Json>& json, bool as_json, void (*table)(const Json&)) {
  if (!json) return Fail(json.error());
  as_json ? fmt::print("{}\n", json->dump(2)) : table(*json);
  return 0;
}

double MsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(q * static_cast<double>(values.size())))];
}

double Median(std::vector<double> values) {
  return Quantile(std::move(values), 0.5);
}

std::vector<Token> SomeTokens(const Model& model, size_t n, uint64_t seed) {
  const Vocab vocab(model);
  std::vector<Token> tokens;
  for (uint64_t x = seed; tokens.size() < n;) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    const auto token = static_cast<Token>((x >> 33) % static_cast<uint64_t>(model.params().n_vocab));
    if (!vocab.Piece(token).empty() && !vocab.IsEndOfGeneration(token)) tokens.push_back(token);
  }
  return tokens;
}

namespace {

// Pages of a context, and their copies as another one. A refinement page goes beside its page, into a segment of its own.
class DeepWriter {
 public:
  DeepWriter(const Model& model, const Context& source) : model_(model) {
    deep_.card = source.card;
    deep_.card.clear_segments();
    deep_.card.clear_spans();
    deep_.card.clear_token_ids();
    for (const auto& span : source.card.spans()) {
      const Segment& segment = *source.segments[span.segment()];
      const Segment* refinement =
          span.refinement_segment() == 0 ? nullptr : source.segments[span.refinement_segment() - 1].get();
      for (size_t i = 0; i < span.n_pages(); ++i) {
        const size_t page = span.first_page() + i;
        pages_.push_back({segment.page(page), segment.codecs(page), segment.pages()[page].tokens,
                          refinement == nullptr ? nullptr : refinement->page(span.refinement_first_page() + i)});
      }
      if (segment.layers() != nullptr) layers_ = segment.layers();
      if (segment.constants() == nullptr || constants_) continue;
      constants_.emplace(model.geometry());
      std::memcpy(constants_->halves.data(), segment.constants(), constants_->layout.bytes);
      constants_->calibration_digest = segment.header().calibration_digest;
    }
  }

  Result<Context> Write(int depth) {
    for (size_t i = 0; position_ < depth; ++i) {
      const Page& page = pages_[i % pages_.size()];
      const int tokens = std::min(page.tokens, depth - position_);
      const bool full = writer_ != nullptr && !writer_->Fits(page.codecs);
      const bool refinement_full = refinement_writer_ != nullptr && !refinement_writer_->Fits(kRefinementCodecs);
      if (full || refinement_full) QKV_RETURN_IF_ERROR(Seal());
      if (writer_ == nullptr) {
        QKV_ASSIGN_OR_RETURN(writer_, NewWriter(constants_ ? &*constants_ : nullptr));
      }
      if (page.refinement != nullptr && refinement_writer_ == nullptr) {
        QKV_ASSIGN_OR_RETURN(refinement_writer_, NewWriter(nullptr));
      }
      QKV_RETURN_IF_ERROR(Append(*writer_, page.codecs, tokens, page.data));
      if (page.refinement != nullptr) {
        QKV_RETURN_IF_ERROR(Append(*refinement_writer_, kRefinementCodecs, tokens, page.refinement));
      }
      position_ += tokens;
    }
    QKV_RETURN_IF_ERROR(Seal());
    return std::move(deep_);
  }

 private:
  struct Page {
    const std::byte* data;
    CodecPair codecs;
    int tokens;
    const std::byte* refinement;  // null: none
  };

  Result<std::unique_ptr<SegmentWriter>> NewWriter(const SegmentConstants* constants) const {
    return SegmentWriter::Create(model_.geometry(), uint64_t{256} << 20, model_.weights_digest(), constants, layers_);
  }

  Status Append(SegmentWriter& writer, CodecPair codecs, int tokens, const std::byte* data) const {
    const size_t bytes = PageLayout(model_.geometry(), codecs, layers_.get()).bytes;
    QKV_RETURN_IF_ERROR(
        writer.Append(codecs, tokens, position_, [&](std::byte* page) { std::memcpy(page, data, bytes); }));
    return {};
  }

  // Returns the segment's index in the card.
  Result<uint32_t> Add(std::unique_ptr<SegmentWriter>& writer) {
    QKV_ASSIGN_OR_RETURN(auto segment, SegmentWriter::Seal(writer));
    auto* named = deep_.card.add_segments();
    named->set_digest(segment->digest());
    named->set_bytes(segment->bytes());
    named->set_n_pages(segment->pages().size());
    deep_.segments.push_back(std::move(segment));
    return static_cast<uint32_t>(deep_.segments.size() - 1);
  }

  Status Seal() {
    QKV_ASSIGN_OR_RETURN(const uint32_t index, Add(writer_));
    auto* span = deep_.card.add_spans();
    span->set_segment(index);
    span->set_n_pages(deep_.segments[index]->pages().size());
    span->set_first_position(sealed_tokens_);
    span->set_n_tokens(position_ - sealed_tokens_);
    sealed_tokens_ = position_;
    if (refinement_writer_ == nullptr) return {};
    QKV_ASSIGN_OR_RETURN(const uint32_t refinement, Add(refinement_writer_));
    span->set_refinement_segment(refinement + 1);
    return {};
  }

  const Model& model_;
  std::vector<Page> pages_;
  std::optional<SegmentConstants> constants_;
  std::shared_ptr<const LayerCodecs> layers_;  // one sequence wrote all pages
  Context deep_;
  std::unique_ptr<SegmentWriter> writer_, refinement_writer_;
  int position_ = 0, sealed_tokens_ = 0;
};

}  // namespace

Result<Context> DeepContext(Sequence& sequence, int depth, std::span<const Token> read) {
  sequence.Clear();
  QKV_RETURN_IF_ERROR(sequence.Forward(read.first(std::min(static_cast<size_t>(depth), read.size()))));
  QKV_ASSIGN_OR_RETURN(Context context, sequence.Publish({}));
  if (static_cast<size_t>(depth) <= read.size()) return context;
  QKV_ASSIGN_OR_RETURN(Context deep, DeepWriter(sequence.model(), context).Write(depth));
  const auto& ids = context.card.token_ids();
  for (int i = 0; i < depth; ++i) deep.card.add_token_ids(ids[i % ids.size()]);
  return deep;
}

void AddBench(CLI::App& app, int& status) {
  CLI::App* bench = app.add_subcommand("bench", "measure");
  bench->require_subcommand(1);
  bench->footer("Example: qkvshare bench engine --depth 0,8192 --kv i8 --peer llama.cpp --json");
  AddBenchHandoff(*bench, status);
  AddBenchEngine(*bench, status);
  AddBenchScale(*bench, status);
  AddBenchModel(*bench, status);
  AddBenchFlow(*bench, status);
}

}  // namespace qkv::cli
