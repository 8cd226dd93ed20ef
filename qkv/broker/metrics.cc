// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/metrics.h"

#include <arpa/inet.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <array>
#include <charconv>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "qkv/broker/event_line.h"

namespace qkv {
namespace {

using ::prometheus::Counter;
using ::prometheus::Gauge;
using ::prometheus::Histogram;

constexpr size_t kReasons = static_cast<size_t>(Reason::kVersion) + 1;
constexpr size_t kEvents = static_cast<size_t>(Event::Kind::kAlarmEnded) + 1;
constexpr std::array<const char*, 5> kModes = {"none", "attach", "copy", "splice", "text"};
const Histogram::BucketBoundaries kHandoffSeconds = {1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025,
                                                     0.05, 0.1,    0.25, 0.5,  1,      2.5,  5,    10};
// Between what the codecs store, a reader's share of the refinement planes included.
const Histogram::BucketBoundaries kBitsPerValue = {2, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9, 12, 16};
const Histogram::BucketBoundaries kTtftSeconds = {0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100};

// Labels come from clients: a few short ones, in letters that every reader of the text can show.
constexpr size_t kMostSeries = 64;
constexpr size_t kMostLabelBytes = 64;

std::string LabelOf(std::string text) {
  if (text.size() > kMostLabelBytes) text.resize(kMostLabelBytes);
  for (char& c : text) {
    if (c < ' ' || c > '~' || c == '"' || c == '\\') c = '_';
  }
  return text;
}

uint64_t Whole(const Counter& counter) {
  return static_cast<uint64_t>(counter.Value());
}

}  // namespace

struct BrokerMetrics::Impl {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();

  Counter& NewCounter(const char* name, const char* help, const prometheus::Labels& labels = {}) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(*registry).Add(labels);
  }
  Gauge& NewGauge(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(*registry).Add({});
  }
  Histogram& NewHistogram(const char* name, const char* help, const prometheus::Labels& labels,
                          const Histogram::BucketBoundaries& bounds) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(*registry).Add(labels, bounds);
  }

  using SeriesKey = std::pair<std::string, std::string>;  // model and codec pair
  // What clients report, by their model and the codec pair that they write; without labels: of those that did not say.
  struct Series {
    Series(Impl& impl, const prometheus::Labels& labels)
        : reused(
              impl.NewCounter("qkvshare:reused_tokens_total", "Prompt tokens taken over without reading them", labels)),
          recomputed(impl.NewCounter("qkvshare:recomputed_tokens_total", "Prompt tokens read", labels)),
          copied(impl.NewCounter("qkvshare:copied_bytes_total", "Bytes of segments that consumers copied", labels)),
          refinable_keys(impl.NewCounter("qkvshare:refinable_keys_total",
                                         "Keys that attention saw in pages with a refinement plane", labels)),
          refined_keys(
              impl.NewCounter("qkvshare:refined_keys_total", "Of those, keys that it read at full width", labels)),
          read_bits(impl.NewHistogram("qkvshare:read_bits_per_value",
                                      "What attention read of the pages per value, on average over a turn", labels,
                                      kBitsPerValue)),
          attach_seconds(impl.NewHistogram("qkvshare:attach_seconds", "Asking for a context until it is mapped", labels,
                                           kHandoffSeconds)),
          publish_seconds(impl.NewHistogram("qkvshare:publish_seconds",
                                            "Sealing a context and handing it to the broker", labels, kHandoffSeconds)),
          ttft_seconds(impl.NewHistogram("qkvshare:time_to_first_token_seconds",
                                         "Start of a turn until its first token", labels, kTtftSeconds)) {
      for (size_t i = 0; i < kModes.size(); ++i) {
        prometheus::Labels with_mode = labels;
        with_mode["mode"] = kModes[i];
        handoffs[i] = &impl.NewCounter("qkvshare:handoffs_total", "Turns by how they took over a context", with_mode);
      }
    }
    Counter &reused, &recomputed, &copied, &refinable_keys, &refined_keys;
    std::array<Counter*, kModes.size()> handoffs{};
    Histogram &read_bits, &attach_seconds, &publish_seconds, &ttft_seconds;
  };
  Series& SeriesOf(const TurnReport& report) {
    SeriesKey key(LabelOf(report.model), LabelOf(report.kv));
    const std::lock_guard lock(mutex);
    if (!series.contains(key) && series.size() >= kMostSeries) key = {"other", "other"};
    if (const auto known = series.find(key); known != series.end()) return known->second;
    const prometheus::Labels labels{{"model_name", key.first}, {"kv_type", key.second}};
    return series.try_emplace(key, *this, labels).first->second;
  }

  Counter& checksum_failures =
      NewCounter("qkvshare:checksum_failures_total", "Handoffs refused because bytes differ from what was published");
  Gauge& pool_bytes = NewGauge("qkvshare:pool_bytes", "Bytes of segments and cards, each counted once");
  Gauge& pool_budget_bytes = NewGauge("qkvshare:pool_budget_bytes", "What the pool may take");
  Gauge& contexts = NewGauge("qkvshare:contexts", "Contexts that the broker holds");
  Gauge& leases = NewGauge("qkvshare:leases", "Contexts that clients hold, once per client and attach");
  Gauge& clients = NewGauge("qkvshare:clients", "Connections");
  // Every label value from the start, so that a rate exists before the first failure.
  std::array<Counter*, kEvents> events{};
  std::array<std::array<Counter*, 2>, kReasons> fallbacks{};  // by reason; then: did the turn fail
  std::array<Counter*, kReasons> refused{};
  mutable std::mutex mutex;
  std::map<SeriesKey, Series> series;

  Impl() {
    series.try_emplace(SeriesKey(), *this, prometheus::Labels{});
    for (size_t i = 0; i < kEvents; ++i) {
      const std::string name(EventName(static_cast<Event::Kind>(i)));
      events[i] = &NewCounter("qkvshare:events_total", "Life-cycle events of contexts", {{"event", name}});
    }
    for (size_t i = 0; i < kReasons; ++i) {
      const std::string name = i == 0 ? "other" : std::string(ReasonName(static_cast<Reason>(i)));
      for (const bool failed : {false, true}) {
        fallbacks[i][failed] =
            &NewCounter("qkvshare:fallback_total", "Handoffs that stepped down from attach, by why and to what",
                        {{"reason", name}, {"on_miss", failed ? "fail" : "text"}});
      }
      refused[i] = &NewCounter("qkvshare:refused_total", "Requests that the broker refused", {{"reason", name}});
    }
  }
};

BrokerMetrics::BrokerMetrics() : impl_(std::make_unique<Impl>()) {}
BrokerMetrics::~BrokerMetrics() = default;

void BrokerMetrics::SetPool(const Pool& pool) {
  impl_->pool_bytes.Set(static_cast<double>(pool.bytes));
  impl_->pool_budget_bytes.Set(static_cast<double>(pool.budget_bytes));
  impl_->contexts.Set(static_cast<double>(pool.contexts));
  impl_->leases.Set(static_cast<double>(pool.leases));
  impl_->clients.Set(static_cast<double>(pool.clients));
}

void BrokerMetrics::Count(Event::Kind kind) {
  impl_->events[static_cast<size_t>(kind)]->Increment();
}

void BrokerMetrics::CountRefusal(Reason reason) {
  impl_->refused[static_cast<size_t>(reason)]->Increment();
}

void BrokerMetrics::Count(const TurnReport& report) {
  Impl::Series& series = impl_->SeriesOf(report);
  for (size_t i = 0; i < kModes.size(); ++i) {
    if (report.mode == kModes[i]) series.handoffs[i]->Increment();
  }
  if (report.reason != Reason::kNone) impl_->fallbacks[static_cast<size_t>(report.reason)][report.failed]->Increment();
  if (report.reason == Reason::kChecksum) impl_->checksum_failures.Increment();
  series.copied.Increment(static_cast<double>(report.bytes_copied));
  series.reused.Increment(static_cast<double>(report.tokens_reused));
  series.recomputed.Increment(static_cast<double>(report.tokens_recomputed));
  series.refinable_keys.Increment(static_cast<double>(report.keys_with_refinement));
  series.refined_keys.Increment(static_cast<double>(report.keys_refined));
  if (report.kv_bits_read > 0) series.read_bits.Observe(report.kv_bits_read);
  if (report.attach_seconds > 0) series.attach_seconds.Observe(report.attach_seconds);
  if (report.publish_seconds > 0) series.publish_seconds.Observe(report.publish_seconds);
  if (report.ttft_seconds > 0) series.ttft_seconds.Observe(report.ttft_seconds);
}

BrokerTotals BrokerMetrics::totals() const {
  const auto event = [&](Event::Kind kind) { return Whole(*impl_->events[static_cast<size_t>(kind)]); };
  BrokerTotals totals{.published = event(Event::Kind::kPublished),
                      .attached = event(Event::Kind::kAttached),
                      .evicted = event(Event::Kind::kEvicted),
                      .expired = event(Event::Kind::kExpired),
                      .checksum_failures = Whole(impl_->checksum_failures)};
  {
    const std::lock_guard lock(impl_->mutex);
    for (const auto& [labels, series] : impl_->series) {
      totals.tokens_reused += Whole(series.reused);
      totals.tokens_recomputed += Whole(series.recomputed);
    }
  }
  for (const Counter* counter : impl_->refused) totals.refused += Whole(*counter);
  for (const auto& counters : impl_->fallbacks) totals.fallbacks += Whole(*counters[0]) + Whole(*counters[1]);
  return totals;
}

std::string BrokerMetrics::Text() const {
  return prometheus::TextSerializer().Serialize(impl_->registry->Collect());
}

std::shared_ptr<prometheus::Collectable> BrokerMetrics::collectable() const {
  return impl_->registry;
}

struct MetricsEndpoint::Impl {
  std::shared_ptr<const BrokerMetrics> metrics;
  std::unique_ptr<prometheus::Exposer> exposer;
};

MetricsEndpoint::MetricsEndpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsEndpoint::~MetricsEndpoint() = default;

Result<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Start(const std::string& address,
                                                                std::shared_ptr<const BrokerMetrics> metrics) {
  const size_t colon = address.rfind(':');
  const std::string host = address.substr(0, colon);
  int port = -1;
  if (colon != std::string::npos) {
    const char* const end = address.data() + address.size();
    const auto parsed = std::from_chars(address.data() + colon + 1, end, port);
    if (parsed.ec != std::errc() || parsed.ptr != end) port = -1;
  }
  in_addr v4{};
  const bool is_v4 = ::inet_pton(AF_INET, host.c_str(), &v4) == 1;
  if (port < 0 || port > 65535 || !(host == "[::1]" || is_v4)) {
    return Err(Code::kInvalidArgument, "metrics: '{}' is not an address such as 127.0.0.1:9464", address);
  }
  if (is_v4 && (ntohl(v4.s_addr) >> 24) != 127) {
    return Err(
        Code::kInvalidArgument,
        "metrics: '{}' can be reached from other machines, and nobody is asked who they are; expected a loopback "
        "address such as 127.0.0.1:{}",
        address, port);
  }
  auto impl = std::make_unique<Impl>();
  impl->metrics = std::move(metrics);
  try {
    impl->exposer = std::make_unique<prometheus::Exposer>(address, /*num_threads=*/1);
    impl->exposer->RegisterCollectable(impl->metrics->collectable());
  } catch (const std::exception& error) {
    return Err(Code::kIo, "metrics: cannot listen at '{}': {}", address, error.what());
  }
  return std::unique_ptr<MetricsEndpoint>(new MetricsEndpoint(std::move(impl)));
}

int MetricsEndpoint::port() const {
  const std::vector<int> ports = impl_->exposer->GetListeningPorts();
  return ports.empty() ? 0 : ports.front();
}

}  // namespace qkv
