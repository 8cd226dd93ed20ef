// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/cli/bench.h"

#include <algorithm>
#include <cstring>

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

Result<Context> DeepContext(Sequence& sequence, int depth, int n_read) {
  constexpr uint64_t kSegmentBytes = uint64_t{256} << 20;
  sequence.Clear();
  QKV_RETURN_IF_ERROR(sequence.Forward(SomeTokens(sequence.model(), std::min(depth, n_read), 1)));
  QKV_ASSIGN_OR_RETURN(Context context, sequence.Publish({}));
  if (depth <= n_read) return context;

  struct Source {
    const std::byte* data;
    CodecPair codecs;
    int tokens;
  };
  std::vector<Source> sources;
  for (const auto& span : context.card.spans()) {
    const Segment& segment = *context.segments[span.segment()];
    for (size_t page = span.first_page(); page < span.first_page() + span.n_pages(); ++page) {
      sources.push_back({segment.page(page), segment.codecs(page), segment.pages()[page].tokens});
    }
  }
  Context deep;
  deep.card = context.card;
  deep.card.clear_segments();
  deep.card.clear_spans();
  deep.card.clear_token_ids();
  const Model& model = sequence.model();
  std::unique_ptr<SegmentWriter> writer;
  int first_position = 0;
  const auto seal = [&]() -> Status {
    const size_t n_pages = writer->n_pages();
    QKV_ASSIGN_OR_RETURN(auto segment, SegmentWriter::Seal(std::move(writer)));
    auto* named = deep.card.add_segments();
    named->set_digest(segment->digest());
    named->set_bytes(segment->bytes());
    named->set_n_pages(n_pages);
    auto* span = deep.card.add_spans();
    span->set_segment(static_cast<uint32_t>(deep.segments.size()));
    span->set_n_pages(n_pages);
    span->set_first_position(first_position);
    int tokens = 0;
    for (const PageEntry& page : segment->pages()) tokens += page.tokens;
    span->set_n_tokens(tokens);
    first_position += tokens;
    deep.segments.push_back(std::move(segment));
    return {};
  };
  for (int position = 0, i = 0; position < depth; ++i) {
    const Source& source = sources[i % sources.size()];
    const int tokens = std::min(source.tokens, depth - position);
    if (writer != nullptr && !writer->Fits(source.codecs)) QKV_RETURN_IF_ERROR(seal());
    if (writer == nullptr) {
      QKV_ASSIGN_OR_RETURN(writer, SegmentWriter::Create(model.geometry(), kSegmentBytes, model.weights_digest()));
    }
    const size_t bytes = PageLayout(model.geometry(), source.codecs).bytes;
    QKV_RETURN_IF_ERROR(writer->Append(source.codecs, tokens, position,
                                       [&](std::byte* page) { std::memcpy(page, source.data, bytes); }));
    position += tokens;
  }
  QKV_RETURN_IF_ERROR(seal());
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
