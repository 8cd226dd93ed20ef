// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/sequence.h"

#include <ggml-cpu.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <system_error>
#include <utility>

#include "qkv/engine/calibration.h"
#include "qkv/engine/codebooks.h"
#include "qkv/engine/context_card.h"
#include "qkv/engine/importance.h"
#include "qkv/engine/llama_graph.h"
#include "qkv/engine/model_internal.h"
#include "qkv/engine/paged_kv.h"
#include "qkv/engine/placement.h"
#include "qkv/engine/sequence_options.h"

namespace qkv {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kMaxParents = 64;  // docs/FORMAT.md §5

struct ThreadpoolFree {
  void operator()(ggml_threadpool* pool) const { ggml_threadpool_free(pool); }
};
struct AlignedFree {
  void operator()(void* p) const { std::free(p); }
};

// A buffer that only grows, cache-line aligned.
template <class T>
class Scratch {
 public:
  T* Get(size_t n) {
    if (n > capacity_) {
      capacity_ = (n * sizeof(T) + kCacheLine - 1) / kCacheLine * kCacheLine / sizeof(T);
      data_.reset(std::aligned_alloc(kCacheLine, capacity_ * sizeof(T)));
      QKV_CHECK(data_ != nullptr);
    }
    return static_cast<T*>(data_.get());
  }

 private:
  std::unique_ptr<void, AlignedFree> data_;
  size_t capacity_ = 0;
};

// What the custom operations of one step share; written before the graph runs.
struct Step {
  PagedKv* kv = nullptr;
  const RowObserver* on_rows = nullptr;
  AttentionSampler* sampler = nullptr;  // in a prefill whose tokens are to be grouped
  Trace* trace = nullptr;               // in the first step over an attached context
  std::optional<AttentionPlan> plan;
  int n_layers = 0;
  std::byte* scratch = nullptr;  // [threads][scratch_stride]
  size_t scratch_stride = 0;
  float* partials = nullptr;
  // A cache line per thread.
  struct alignas(kCacheLine) Counts {
    KeyCounts keys;
    double sample_ms = 0;
  };
  std::vector<Counts> counts;
};

// A layer's share: which items are still to be had. Any thread takes the next; results don't depend on who does.
struct alignas(kCacheLine) LayerStep {
  Step* step = nullptr;
  int layer = 0;
  std::atomic<int> next_sample{0};
  std::atomic<int> next_attend{0};
  std::atomic<int> next_merge{0};
};

// [head_dim, heads, tokens], the tokens perhaps apart.
void Observe(const LayerStep& layer, RowKind kind, const ggml_tensor* x) {
  const RowObserver& observer = *layer.step->on_rows;
  const size_t row = static_cast<size_t>(x->ne[0] * x->ne[1]);
  const auto n = static_cast<size_t>(x->ne[2]);
  std::vector<float> rows(row * n);
  for (size_t i = 0; i < n; ++i) {
    const auto* from = reinterpret_cast<const float*>(static_cast<const char*>(x->data) + i * x->nb[2]);
    std::copy_n(from, row, rows.data() + i * row);
  }
  observer(kind, layer.layer, static_cast<int>(n), rows);
}

void AppendOp(ggml_tensor* dst, int ith, int nth, void* userdata) {
  auto& layer = *static_cast<LayerStep*>(userdata);
  const ggml_tensor *k = dst->src[0], *v = dst->src[1];
  if (layer.step->on_rows != nullptr && ith == 0) {
    Observe(layer, RowKind::kK, k);
    Observe(layer, RowKind::kV, v);
  }
  layer.step->kv->AppendRows(layer.layer, static_cast<const float*>(k->data), static_cast<const float*>(v->data),
                             v->nb[2] / sizeof(float), ith, nth);
}

double MsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// Which keys the step's queries look at, a KV head at a time.
void Sample(LayerStep& layer, const float* q, int n_kv_heads, int ith) {
  Step& step = *layer.step;
  const auto start = std::chrono::steady_clock::now();
  for (int head; (head = layer.next_sample.fetch_add(1, std::memory_order_relaxed)) < n_kv_heads;) {
    step.sampler->Take(layer.layer, head, step.kv->pages(), q, ith);
  }
  step.counts[ith].sample_ms += MsSince(start);
}

void AttendOp(ggml_tensor* dst, int ith, int /*nth*/, void* userdata) {
  auto& layer = *static_cast<LayerStep*>(userdata);
  Step& step = *layer.step;
  const TraceSpan span(layer.layer == 0 && ith == 0 ? step.trace : nullptr, "first_attention");
  if (step.on_rows != nullptr && ith == 0) Observe(layer, RowKind::kQ, dst->src[0]);
  std::byte* scratch = step.scratch + step.scratch_stride * static_cast<size_t>(ith);
  if (step.sampler != nullptr) {
    Sample(layer, static_cast<const float*>(dst->src[0]->data), step.plan->shape.n_kv_heads, ith);
  }
  for (int item; (item = layer.next_attend.fetch_add(1, std::memory_order_relaxed)) < step.plan->n_attend_items();) {
    Attend(*step.plan, step.kv->pages(), step.n_layers, layer.layer, static_cast<const float*>(dst->src[0]->data), item,
           scratch, step.partials, static_cast<float*>(dst->data), &step.counts[ith].keys);
  }
}

void MergeOp(ggml_tensor* dst, int /*ith*/, int /*nth*/, void* userdata) {
  auto& layer = *static_cast<LayerStep*>(userdata);
  Step& step = *layer.step;
  for (int item; (item = layer.next_merge.fetch_add(1, std::memory_order_relaxed)) < step.plan->n_merge_items();) {
    Merge(*step.plan, step.partials, item, static_cast<float*>(dst->data));
  }
}

}  // namespace

struct Sequence::Impl {
  explicit Impl(int n_threads) : placement(n_threads) {}

  std::shared_ptr<const Model> model;
  SequenceOptions options;
  ModelIdentity identity;  // the model's, and the digests of calibration and codebooks
  std::unique_ptr<ggml_threadpool, ThreadpoolFree> pool;
  std::unique_ptr<PagedKv> kv;
  std::vector<Token> tokens;
  std::vector<std::string> parents;
  bool just_attached = false;

  // What an Attach replaced, until a Forward has shown that the new context can be read.
  struct Before {
    std::unique_ptr<PagedKv> kv;  // null: it was empty
    std::vector<Token> tokens;
    std::vector<std::string> parents;
    std::vector<float> logits;
    Stats stats;
  };
  std::optional<Before> before;

  std::unique_ptr<AttentionSampler> sampler;  // during a Forward whose tokens are to be grouped
  std::vector<float> importance;

  AttentionShape shape;
  Rope rope;
  Placement placement;
  Step step;
  std::vector<LayerStep> layer_steps;
  std::vector<LayerOps> layer_ops;
  std::unique_ptr<LlamaGraph> decode_graph;   // of one token
  std::unique_ptr<LlamaGraph> prefill_graph;  // of the last other size
  Scratch<std::byte> scratch;
  Scratch<float> partials;
  Scratch<uint8_t> work;

  bool keep_all_logits = false;
  std::vector<float> logits;
  std::vector<float> all_logits;
  Stats stats;

  Result<std::unique_ptr<PagedKv>> NewKv() const {
    try {
      return std::make_unique<PagedKv>(
          model->geometry(), options.kv, model->weights_digest(), options.refine > 0, options.trace,
          options.calibration ? options.calibration->digest() : std::array<uint8_t, 16>{}, options.codebooks);
    } catch (const std::system_error& e) {
      return Err(Code::kExhausted, Reason::kPoolFull, "could not start a thread: {}", e.what());
    }
  }
  void UseKv(std::unique_ptr<PagedKv> other) {
    kv = std::move(other);
    step.kv = kv.get();
  }

  LlamaGraph& GraphFor(int n) {
    std::unique_ptr<LlamaGraph>& graph = n == 1 ? decode_graph : prefill_graph;
    if (graph == nullptr || graph->n_tokens() != n || graph->all_logits() != keep_all_logits) {
      graph.reset();  // before the new one takes its memory
      graph = std::make_unique<LlamaGraph>(model->internal(), n, keep_all_logits, layer_ops, options.calibration.get());
    }
    return *graph;
  }

  Context Describe(const std::vector<SegmentSpan>& spans, const PublishInfo& info) const {
    return DescribeContext(spans, kv->groups(), identity, options.kv.pair, tokens, parents, info);
  }
  Status Attach(const Context& context, const ModelIdentity& expected);
  // Forward without taking over: reads behind what is here, batch by batch.
  Status ReadAll(std::span<const Token> batch);

  // A card has room for so many; a context made of more names the first ones.
  void AddParent(const std::string& id) {
    if (parents.size() < kMaxParents && std::ranges::find(parents, id) == parents.end()) parents.push_back(id);
  }

  bool TailOverBudget() const { return kv->tail_bytes() > options.tail_budget_bytes; }
  PagedKv::Settle SettleNow(bool first) const {
    if (options.tail_budget_bytes == 0) return PagedKv::Settle::kAll;
    return first || TailOverBudget() ? PagedKv::Settle::kDue : PagedKv::Settle::kNone;
  }

  // As AttentionPlan takes it.
  float refine_threshold() const { return options.refine > 0 ? static_cast<float>(-std::log(options.refine)) : -1; }

  // Before and behind the first Forward.
  void BeginGrouping() {
    importance.clear();
    if (!options.groups || !tokens.empty()) return;
    const bool all = options.groups->by == TokenGroups::By::kAllQueries;
    sampler = std::make_unique<AttentionSampler>(shape, model->params().n_layers, all ? 1 : AttentionSampler::kEvery);
  }
  void EndGrouping() {
    if (sampler == nullptr) return;
    const auto start = std::chrono::steady_clock::now();
    const TokenGroups& by = *options.groups;
    importance = by.by == TokenGroups::By::kRandom ? RandomImportance(tokens.size()) : sampler->importance();
    sampler.reset();
    const auto first = std::span(importance).first(TokensToGroup(static_cast<int>(tokens.size())));
    kv->Group(PlanGroups(first, by.percent, !by.low), by.low);
    if (kv->groups().empty()) importance.clear();
    stats.group_ms += MsSince(start);
  }

  // One graph. On error nothing has changed.
  Status Compute(std::span<const Token> batch, bool first, bool last) {
    const int n = static_cast<int>(batch.size());
    QKV_RETURN_IF_ERROR(kv->BeginStep(n, SettleNow(first)));
    LlamaGraph& graph = GraphFor(n);
    std::copy(batch.begin(), batch.end(), graph.tokens().begin());
    for (int i = 0; i < n; ++i) graph.positions()[i] = kv->n_tokens() + i;

    step.plan.emplace(shape, n, kv->pages(), &rope, refine_threshold());
    step.sampler = sampler.get();
    if (sampler != nullptr) sampler->BeginStep(n, options.n_threads);
    step.trace = std::exchange(just_attached, false) ? options.trace : nullptr;
    step.scratch_stride = (step.plan->scratch_bytes() + kCacheLine - 1) / kCacheLine * kCacheLine;
    step.scratch = scratch.Get(step.scratch_stride * static_cast<size_t>(options.n_threads));
    step.partials = partials.Get(step.plan->partial_floats());
    for (LayerStep& layer : layer_steps) {
      layer.next_sample.store(0, std::memory_order_relaxed);
      layer.next_attend.store(0, std::memory_order_relaxed);
      layer.next_merge.store(0, std::memory_order_relaxed);
    }
    ggml_cplan cplan = ggml_graph_plan(graph.graph(), options.n_threads, pool.get());
    if (cplan.work_size > 0) cplan.work_data = work.Get(cplan.work_size);
    ggml_threadpool_resume(pool.get());
    placement.Begin();
    const ggml_status status = ggml_graph_compute(graph.graph(), &cplan);
    placement.End();
    if (status != GGML_STATUS_SUCCESS) {
      kv->AbortStep();
      return Err(Code::kInternal, "ggml could not compute the graph: {}", ggml_status_to_string(status));
    }
    for (Step::Counts& counts : step.counts) {
      const KeyCounts keys = std::exchange(counts.keys, {});
      stats.keys_with_refinement += keys.seen;
      stats.keys_refined += keys.refined;
      stats.sample_ms += std::exchange(counts.sample_ms, 0.0);
    }
    // Pages of what may still be grouped are sent off behind that.
    kv->EndStep((last && sampler == nullptr) || TailOverBudget());
    if (!kv->only_tail()) sampler.reset();
    tokens.insert(tokens.end(), batch.begin(), batch.end());
    const std::span<const float> out = graph.logits();
    if (keep_all_logits) all_logits.insert(all_logits.end(), out.begin(), out.end());
    if (last) logits.assign(out.end() - model->params().n_vocab, out.end());
    return {};
  }
};

Sequence::Sequence(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Sequence::~Sequence() = default;

Result<std::unique_ptr<Sequence>> Sequence::Create(std::shared_ptr<const Model> model, const SequenceOptions& options) {
  QKV_RETURN_IF_ERROR(CheckOptions(options, *model));
  auto impl = std::make_unique<Impl>(options.n_threads);
  const HyperParams& p = model->params();
  ggml_threadpool_params pool_params = ggml_threadpool_params_default(options.n_threads);
  // Asleep until there is something to compute: waiting threads spin for a while, and would keep the broker off its core
  // just when it is asked for a context.
  pool_params.paused = true;
  // And soon asleep again: ggml's default spins for some tenths of a second after every step, on cores that the process's
  // other sequences may need; this is a few milliseconds, enough for the sampler between two tokens.
  pool_params.poll = 1;
  impl->placement.Assign(pool_params);
  impl->pool.reset(ggml_threadpool_new(&pool_params));
  if (impl->pool == nullptr)
    return Err(Code::kExhausted, Reason::kPoolFull, "could not start {} threads", options.n_threads);
  impl->options = options;
  impl->shape = {p.n_heads, p.n_kv_heads, p.head_dim, 1.0f / std::sqrt(static_cast<float>(p.head_dim))};
  impl->rope = RopeOf(model->internal());
  impl->step.n_layers = p.n_layers;
  if (impl->options.on_rows) impl->step.on_rows = &impl->options.on_rows;
  impl->step.counts.resize(options.n_threads);
  impl->layer_steps = std::vector<LayerStep>(p.n_layers);
  for (int il = 0; il < p.n_layers; ++il) {
    impl->layer_steps[il].step = &impl->step;
    impl->layer_steps[il].layer = il;
    impl->layer_ops.push_back({AppendOp, AttendOp, MergeOp, &impl->layer_steps[il]});
  }
  impl->model = std::move(model);
  impl->identity = impl->model->identity();
  if (auto& calibration = impl->options.calibration) {
    if (calibration->geometry() != impl->model->geometry()) {
      return Err(Code::kIncompatible, "the calibration is of another model");
    }
    if (options.kv.pair.k == CodecId::kBands)
      calibration = std::make_shared<const Calibration>(calibration->ForBands());
    impl->identity.set_calibration_digest(calibration->digest_text());
  }
  if (impl->options.codebooks == nullptr) {
    auto codebooks = ReadCodebooks(*impl->model, CodebooksPath(*impl->model));
    if (codebooks) {
      impl->options.codebooks = *std::move(codebooks);
    } else if (NeedsBooks(KvChoice(options.kv, options.groups))) {
      return tl::unexpected(codebooks.error());
    }
  }
  if (const auto& codebooks = impl->options.codebooks) {
    if (!Fits(*codebooks, *impl->model)) return Err(Code::kIncompatible, "the codebooks are of another model");
    impl->identity.set_codebooks_digest(codebooks->digest());
  }
  QKV_ASSIGN_OR_RETURN(auto kv, impl->NewKv());
  impl->UseKv(std::move(kv));
  return std::unique_ptr<Sequence>(new Sequence(std::move(impl)));
}

const ModelIdentity& Sequence::identity() const {
  return impl_->identity;
}

const PqCodebooks* Sequence::codebooks() const {
  return impl_->options.codebooks.get();
}

Status Sequence::Attach(const Context& context) {
  return impl_->Attach(context, impl_->identity);
}

Status Sequence::CheckAttach(const Context& context) const {
  QKV_RETURN_IF_ERROR(SpansOf(context, *impl_->model, impl_->identity, impl_->options.n_ctx));
  return {};
}

Status Sequence::Impl::Attach(const Context& context, const ModelIdentity& expected) {
  Impl& s = *this;
  const CacheCard& card = context.card;
  QKV_ASSIGN_OR_RETURN(std::vector<SegmentSpan> spans, SpansOf(context, *s.model, expected, s.options.n_ctx));
  GroupedTokens groups = GroupsOf(card);
  if (!s.before) {  // else nothing that was attached since has been read
    const bool was_empty = s.tokens.empty();
    std::unique_ptr<PagedKv> other;
    if (!was_empty) {
      QKV_ASSIGN_OR_RETURN(other, s.NewKv());
    }
    s.before.emplace(Impl::Before{was_empty ? nullptr : std::move(s.kv), std::move(s.tokens), std::move(s.parents),
                                  std::move(s.logits), s.stats});
    if (!was_empty) s.UseKv(std::move(other));
  }
  s.kv->Reset(std::move(spans), std::move(groups));
  s.tokens.assign(card.token_ids().begin(), card.token_ids().end());
  s.parents = {card.id()};
  s.logits.clear();
  s.importance.clear();
  s.stats = Stats{};
  s.just_attached = true;
  s.stats.tokens_reused = card.token_ids_size();
  return {};
}

Status Sequence::CopyExact(const Context& exact, const RowTransform& transform) {
  Impl& s = *impl_;
  Clear();
  if (!GroupsOf(exact.card).empty()) {
    return Err(Code::kInvalidArgument, "context '{}' has pages of grouped tokens", exact.card.id());
  }
  QKV_RETURN_IF_ERROR(s.Attach(exact, s.model->identity()));
  const auto balanced = [&, calibration = s.options.calibration](Side side, int layer, int kv_head, int first_position,
                                                                 int tokens, float* rows) {
    if (transform) transform(side, layer, kv_head, first_position, tokens, rows);
    if (side == Side::kK) calibration->MultiplyKeys(layer, kv_head, tokens, rows);
  };
  Status copied = s.kv->has_moved()
                      ? Err(Code::kInvalidArgument, "context '{}' has pages that were moved", exact.card.id())
                      : s.kv->Verify(s.options.n_threads);
  if (copied) copied = s.kv->CopyToTail(s.options.calibration ? RowTransform(balanced) : transform);
  if (!copied) {
    Clear();
    return copied;
  }
  s.before.reset();
  s.parents.clear();
  s.just_attached = false;
  s.stats = Stats{};
  return {};
}

void Sequence::Revert() {
  Impl& s = *impl_;
  if (!s.before) return;
  if (s.before->kv != nullptr) {
    s.UseKv(std::move(s.before->kv));
  } else {
    s.kv->Reset({});
  }
  s.tokens = std::move(s.before->tokens);
  s.parents = std::move(s.before->parents);
  s.logits = std::move(s.before->logits);
  s.stats = s.before->stats;
  s.just_attached = false;
  s.before.reset();
}

Status Sequence::Forward(std::span<const Token> tokens) {
  Impl& s = *impl_;
  QKV_RETURN_IF_ERROR(s.kv->Verify(s.options.n_threads));
  std::vector<Token> again;
  if (tokens.empty()) {
    if (s.tokens.empty()) return Err(Code::kInvalidArgument, "there is nothing to read: no context and no tokens");
    again = {s.tokens.back()};
    QKV_RETURN_IF_ERROR(Truncate(static_cast<int>(s.tokens.size()) - 1));
    s.stats.tokens_reused = std::min<int64_t>(s.stats.tokens_reused, static_cast<int64_t>(s.tokens.size()));
    tokens = again;
  }
  const size_t before = s.tokens.size();
  if (tokens.size() > static_cast<size_t>(s.options.n_ctx) - before) {
    return Err(Code::kInvalidArgument, Reason::kTooLong,
               "{} tokens in the context and {} more do not fit a context size of {}", before, tokens.size(),
               s.options.n_ctx);
  }
  for (const Token token : tokens) {
    if (token < 0 || token >= s.model->params().n_vocab) {
      return Err(Code::kInvalidArgument, "token {} is outside the vocabulary of {}", token, s.model->params().n_vocab);
    }
  }
  s.all_logits.clear();
  s.BeginGrouping();
  if (auto status = s.ReadAll(tokens); !status) {
    s.sampler.reset();
    (void)Truncate(static_cast<int>(before));
    return status;
  }
  s.EndGrouping();
  s.before.reset();
  return {};
}

Status Sequence::Impl::ReadAll(std::span<const Token> batch) {
  for (size_t done = 0; done < batch.size();) {
    const size_t n = std::min<size_t>(batch.size() - done, options.n_batch);
    QKV_RETURN_IF_ERROR(Compute(batch.subspan(done, n), done == 0, done + n == batch.size()));
    done += n;
    if (options.on_progress && n < batch.size()) options.on_progress(done, batch.size());
  }
  stats.tokens_recomputed += static_cast<int64_t>(batch.size());
  return {};
}

Status Sequence::AppendRows(std::span<const Token> tokens, std::span<const float> k, std::span<const float> v) {
  Impl& s = *impl_;
  const Geometry geometry = s.model->geometry();
  const size_t row = static_cast<size_t>(geometry.n_kv_heads) * geometry.head_dim;
  const size_t layer_floats = row * tokens.size();
  if (tokens.empty() || k.size() != layer_floats * geometry.n_layers || v.size() != k.size()) {
    return Err(Code::kInvalidArgument, "{} and {} values for {} tokens, expected {}", k.size(), v.size(), tokens.size(),
               layer_floats * geometry.n_layers);
  }
  if (tokens.size() > static_cast<size_t>(s.options.n_ctx) - s.tokens.size()) {
    return Err(Code::kInvalidArgument, Reason::kTooLong,
               "{} tokens in the context and {} more do not fit a context size of {}", s.tokens.size(), tokens.size(),
               s.options.n_ctx);
  }
  QKV_RETURN_IF_ERROR(s.kv->BeginStep(static_cast<int>(tokens.size()), s.SettleNow(/*first=*/true)));
  for (int layer = 0; layer < geometry.n_layers; ++layer) {
    const size_t at = layer_floats * static_cast<size_t>(layer);
    s.kv->AppendRows(layer, &k[at], &v[at], row, 0, 1);
  }
  s.kv->EndStep(/*submit=*/true);
  s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  s.logits.clear();
  return {};
}

const Rope& Sequence::rope() const {
  return impl_->rope;
}

Result<SpliceResult> Sequence::Splice(std::span<const SpliceSource> sources, const SpliceOptions& options) {
  Impl& s = *impl_;
  if (options.repair < 0 || (options.repair % kPageTokens != 0 && options.repair != kRepairAll)) {
    return Err(Code::kInvalidArgument, "repair of {} tokens, expected a multiple of {}", options.repair, kPageTokens);
  }
  const int before = static_cast<int>(s.tokens.size());
  // All is checked before anything changes.
  if (s.options.calibration) {
    return Err(Code::kIncompatible, Reason::kCodecUnsupported,
               "keys that were multiplied by a calibration's matrices cannot be moved to other positions");
  }
  SpliceResult result;
  GroupedTokens groups;  // of the first source
  std::vector<SplicePlan> plans;
  std::vector<Token> tokens = s.tokens;
  for (const SpliceSource& source : sources) {
    const CacheCard& card = source.context->card;
    QKV_ASSIGN_OR_RETURN(const std::vector<SegmentSpan> spans,
                         SpansOf(*source.context, *s.model, s.identity, s.options.n_ctx));
    const int position = static_cast<int>(tokens.size());
    if (source.first_token < 0 || source.first_token >= card.token_ids_size()) {
      return Err(Code::kInvalidArgument, "context '{}' has {} tokens, it cannot be used from token {} on", card.id(),
                 card.token_ids_size(), source.first_token);
    }
    if (GroupedTokens grouped = GroupsOf(card); !grouped.empty()) {
      if (position > 0 || source.first_token > 0) {
        return Err(Code::kIncompatible, Reason::kCodecUnsupported,
                   "the first {} tokens of context '{}' are grouped by importance: it can be gone on from, but not be "
                   "used in part or behind something else",
                   grouped.size(), card.id());
      }
      groups = std::move(grouped);
      plans.push_back({0, spans, card.token_ids_size()});
      tokens.assign(card.token_ids().begin(), card.token_ids().end());
      result.tokens_spliced += plans.back().n_spliced;
      continue;
    }
    // Behind the very tokens that it was made behind, and these are all there is or were not moved themselves.
    const bool exact = position == source.first_token && result.spans == 0 && !s.kv->has_moved() &&
                       std::equal(tokens.begin(), tokens.end(), card.token_ids().begin());
    plans.push_back(PlanSplice(spans, source.first_token, position, exact, options));
    const SplicePlan& plan = plans.back();
    if (position == 0 && plan.n_recompute == 0 && (plan.spans[0].position_offset != 0 || plan.spans[0].hide_first)) {
      return Err(
          Code::kIncompatible, Reason::kQualityGate,
          "context '{}' from token {} on has nothing before it, and no token is seen that was encoded at the start;"
          " repair it, or put something before it",
          card.id(), source.first_token);
    }
    tokens.insert(tokens.end(), card.token_ids().begin() + source.first_token, card.token_ids().end());
    result.tokens_spliced += plan.n_spliced;
    result.tokens_recomputed += plan.n_recompute;
    for (const SegmentSpan& span : plan.spans) {
      result.spans += span.position_offset != 0;
      result.hidden += span.hide_first;
    }
  }
  if (tokens.size() > static_cast<size_t>(s.options.n_ctx)) {
    return Err(Code::kInvalidArgument, Reason::kTooLong,
               "{} tokens in the context and {} to splice do not fit a context size of {}", before,
               tokens.size() - static_cast<size_t>(before), s.options.n_ctx);
  }
  QKV_RETURN_IF_ERROR(s.kv->Verify(s.options.n_threads));
  for (const SplicePlan& plan : plans) {
    for (const SegmentSpan& span : plan.spans) {
      QKV_RETURN_IF_ERROR(span.segment->Verify(span.first_page, span.n_pages, s.options.n_threads));
    }
  }

  s.logits.clear();
  s.all_logits.clear();
  const std::span<const Token> all = tokens;
  for (const SplicePlan& plan : plans) {
    Status status = s.ReadAll(all.subspan(s.tokens.size(), static_cast<size_t>(plan.n_recompute)));
    if (status) status = s.kv->Flush();
    if (!status) {
      (void)Truncate(before);
      return tl::unexpected(std::move(status).error());
    }
    if (groups.empty()) {
      s.kv->Append(plan.spans);
    } else {
      s.kv->Reset(plan.spans, std::exchange(groups, {}));
    }
    const auto next = tokens.begin() + static_cast<int>(s.tokens.size());
    s.tokens.insert(s.tokens.end(), next, next + plan.n_spliced);
  }
  for (const SpliceSource& source : sources) s.AddParent(source.context->card.id());
  s.stats.tokens_spliced += result.tokens_spliced;
  s.before.reset();
  return result;
}

std::span<const float> Sequence::logits() const {
  return impl_->logits;
}
void Sequence::KeepAllLogits(bool keep) {
  impl_->keep_all_logits = keep;
}
std::span<const float> Sequence::all_logits() const {
  return impl_->all_logits;
}
const std::vector<Token>& Sequence::tokens() const {
  return impl_->tokens;
}
Trace* Sequence::trace() const {
  return impl_->options.trace;
}
const GroupedTokens& Sequence::groups() const {
  return impl_->kv->groups();
}
std::span<const float> Sequence::importance() const {
  return impl_->importance;
}
const PageCodecs& Sequence::kv() const {
  return impl_->options.kv;
}
int Sequence::n_threads() const {
  return impl_->options.n_threads;
}
int Sequence::n_ctx() const {
  return impl_->options.n_ctx;
}
const Model& Sequence::model() const {
  return *impl_->model;
}

void Sequence::Clear() {
  impl_->before.reset();
  impl_->kv->Reset({});
  impl_->tokens.clear();
  impl_->parents.clear();
  impl_->logits.clear();
  impl_->importance.clear();
  impl_->stats = Stats{};
}

Status Sequence::Truncate(int n_tokens) {
  Impl& s = *impl_;
  if (n_tokens < 0 || n_tokens > static_cast<int>(s.tokens.size())) {
    return Err(Code::kInvalidArgument, "cannot truncate {} tokens to {}", s.tokens.size(), n_tokens);
  }
  QKV_RETURN_IF_ERROR(s.kv->Truncate(n_tokens));
  s.tokens.resize(n_tokens);
  return {};
}

Result<Context> Sequence::Publish(const PublishInfo& info) {
  Impl& s = *impl_;
  if (s.tokens.empty()) return Err(Code::kInvalidArgument, "cannot publish an empty context");
  if (!info.name.empty()) QKV_RETURN_IF_ERROR(ValidateContextName(info.name));
  QKV_ASSIGN_OR_RETURN(const std::vector<SegmentSpan> spans, s.kv->SealAll());
  Context context = s.Describe(spans, info);
  s.parents = {context.card.id()};
  return context;
}

Context Sequence::Sealed(const PublishInfo& info) const {
  const std::vector<SegmentSpan> spans = impl_->kv->SealedPrefix();
  return spans.empty() ? Context() : impl_->Describe(spans, info);
}

int Sequence::sealed_tokens() const {
  int n = 0;
  for (const SegmentSpan& span : impl_->kv->SealedPrefix()) n += span.n_tokens;
  return n;
}

const Sequence::Stats& Sequence::stats() const {
  Stats& stats = impl_->stats;
  stats.shared_kv_bytes = impl_->kv->shared_bytes();
  stats.own_kv_bytes = impl_->kv->own_bytes();
  stats.tail_bytes = impl_->kv->tail_bytes();
  stats.tokens_dropped = impl_->kv->groups().n_dropped();
  stats.verify_ms = impl_->kv->verify_ms();
  stats.encode_ms = impl_->kv->encode_ms();
  stats.encode_wait_ms = impl_->kv->encode_wait_ms();
  const PagedKv::PlaneBits bits = impl_->kv->plane_bits();
  stats.base_bits = bits.base;
  stats.stored_bits = bits.base + bits.refinement;
  return stats;
}

}  // namespace qkv
