"""Declarations of all metrics.

Knows Prometheus and the names that dashboards expect, not the source of a number: the engine counts and observes as it
runs, and the handler of a scrape first sets the current values (`set_load`, `set_cache`).

Metrics that vLLM's dashboards use have vLLM's names; all others are `kvstrata_*`. Prometheus adds `_total` to counters.
All methods are thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

# Seconds. A long prompt on a CPU takes minutes to its first token; a token on a GPU takes a few milliseconds.
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
INTER_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


# Counters of the cache since the start; exported as 0 until the first event.
CACHE_COUNTERS = {
    "queried_tokens": "Prompt tokens that were looked up",
    "hit_tokens": "Cached prompt tokens, which were not computed",
    "stored_spans": "Spans inserted into the cache",
    "stored_tokens": "Tokens inserted into the cache",
    "encoded_spans": "Spans quantized",
    "encoded_freed_bytes": "Bytes of memory that quantization freed",
    "stepped_down_spans": "Spans stepped down in precision to reclaim memory",
    "evicted_tokens": "Tokens evicted from memory",
    "ttl_pins": "Prompts pinned for a time by their request",
    "ttl_pins_over_quota": "Pins refused because the key's quota is used up",
}
# Gauges among the cache's counters.
CACHE_LEVELS = {
    "disk_queue_bytes": "Bytes that wait to be written to the disk",
    "disk_limit_bytes": "Limit of the disk tier",
    "disk_allowed_bytes": "Effective limit of the disk tier: less where its volume is full",
    "remote_queue_bytes": "Bytes that wait to be written to the shared store",
    "remote_is_paused": "Whether the shared store is paused after a fault",
    "disk_leaving_bytes": "Bytes of blocks that were cleared and whose files are being deleted",
}
EVENT_KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
REFUSED = "refused_"  # and the reason
DROPPED = "dropped_tokens_"  # and the reason
DISK = "disk_"  # and the event and reason, except names that end in _bytes
REMOTE = "remote_"  # likewise


class CacheCollector(Collector):
    """Collector that exports the last reported state of the cache. The cache counts; the collector only shows its
    counters."""

    def __init__(self) -> None:
        self.tiers: Mapping[str, Mapping[str, Any]] = {}
        self.counters: Mapping[str, int] = {}
        self.hot_budget_bytes = 0

    def collect(self) -> Iterator[Metric]:
        held = GaugeMetricFamily("kvstrata_cache_bytes", "KV that is stored", labels=["tier", "codec"])
        kinds = GaugeMetricFamily("kvstrata_cache_kind_bytes", "The same by kind of layer", labels=["tier", "kind"])
        spans = GaugeMetricFamily("kvstrata_cache_spans", "Spans that are stored", labels=["tier"])
        tokens = GaugeMetricFamily("kvstrata_cache_tokens", "Tokens that are stored", labels=["tier"])
        for name, tier in self.tiers.items():
            for codec, nbytes in tier["by_precision"].items():
                held.add_metric([name, codec], nbytes)
            for kind, nbytes in tier["by_kind"].items():
                kinds.add_metric([name, kind], nbytes)
            spans.add_metric([name], tier["spans"])
            tokens.add_metric([name], tier["tokens"])
        yield from (held, kinds, spans, tokens)
        yield GaugeMetricFamily(
            "kvstrata_cache_hot_budget_bytes", "Most that cached KV takes in memory", self.hot_budget_bytes
        )
        yield from self._counters()

    def _counters(self) -> Iterator[Metric]:
        refused = CounterMetricFamily("kvstrata_cache_refused", "Spans not stored, by reason", labels=["reason"])
        dropped = CounterMetricFamily(
            "kvstrata_cache_dropped_tokens", "Tokens that went and are on no disk, by reason", labels=["reason"]
        )
        disk = CounterMetricFamily(
            "kvstrata_cache_disk_events", "What happened to blocks on the disk", labels=["event", "reason"]
        )
        remote = CounterMetricFamily(
            "kvstrata_cache_remote_events",
            "What happened to blocks of the store that servers share",
            labels=["event", "reason"],
        )
        for name, value in {**dict.fromkeys(CACHE_COUNTERS, 0), **self.counters}.items():
            if name in CACHE_LEVELS:
                yield GaugeMetricFamily(f"kvstrata_cache_{name}", CACHE_LEVELS[name], value)
            elif name.startswith(REFUSED):
                refused.add_metric([name.removeprefix(REFUSED)], value)
            elif name.startswith(DROPPED):
                dropped.add_metric([name.removeprefix(DROPPED)], value)
            elif name.startswith(DISK) and not name.endswith("_bytes"):
                event, _, reason = name.removeprefix(DISK).partition("_")
                disk.add_metric([event, reason], value)
            elif name.startswith(REMOTE) and not name.endswith("_bytes"):
                event, _, reason = name.removeprefix(REMOTE).partition("_")
                remote.add_metric([event, reason], value)
            else:
                what = CACHE_COUNTERS.get(name, name.replace("_", " ").capitalize())
                yield CounterMetricFamily(f"kvstrata_cache_{name}", what, value)
        yield from (refused, dropped, disk, remote)


def _seconds(name: str, what: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"{name}_seconds", what, buckets=buckets, registry=registry)


def _total(counter: Counter) -> int:
    """Return the value of a counter without labels."""
    return int(next(iter(counter.collect())).samples[0].value)


class PromptMetrics:
    """Metrics of the prompt changes that keep prefixes stable."""

    def __init__(self, registry: CollectorRegistry) -> None:
        what = "Messages that a rule changed or kept in place so that prefixes stay the same, by rule"
        self._hygiene = Counter("kvstrata_prompt_hygiene", what, ["rule"], registry=registry)
        what = "Earlier replies that were put into prompts as they were sampled"
        self._replayed_turns = Counter("kvstrata_replayed_turns", what, registry=registry)
        self._replayed_tokens = Counter("kvstrata_replayed_tokens", "Tokens inserted into the cache", registry=registry)

    def count(self, hygiene: Mapping[str, int], *, replayed_turns: int, replayed_tokens: int) -> None:
        """Count one prompt. `hygiene` maps a rule to the number of times it was applied."""
        for rule, times in hygiene.items():
            self._hygiene.labels(rule=rule).inc(times)
        self._replayed_turns.inc(replayed_turns)
        self._replayed_tokens.inc(replayed_tokens)


class EventMetrics:
    """Metrics of the KV events that are published to routers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        what = "KV events that were published, by kind"
        self._published = Counter("kvstrata_kv_events_published", what, ["event"], registry=registry)
        for kind in EVENT_KINDS:
            self._published.labels(event=kind)
        what = "Changes of the cache that came faster than they could be published: then all is said to be gone"
        self.lost = Counter("kvstrata_kv_events_lost", what, registry=registry)

    def count(self, kind: str) -> None:
        self._published.labels(event=kind).inc()


class Metrics:
    """All metrics of one server, in a registry of their own, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry

        # vLLM's names, which dashboards use.
        self.running = Gauge("vllm:num_requests_running", "Requests in the batch", registry=registry)
        self.waiting = Gauge("vllm:num_requests_waiting", "Requests in the queue", registry=registry)
        self.kv_usage = Gauge("vllm:kv_cache_usage_perc", "Share of the KV budget in use, 0 to 1", registry=registry)
        self.gpu_usage = Gauge("vllm:gpu_cache_usage_perc", "The same by its older name", registry=registry)
        self._blocks = Gauge(
            "vllm:cache_config_info",
            "How many blocks of how many tokens the KV budget holds at full precision; always 1",
            ["block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_dtype", "enable_prefix_caching"],
            registry=registry,
        )
        self.prefix_queries = Counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", registry=registry
        )
        self.prefix_hits = Counter(
            "vllm:prefix_cache_hits", "Prompt tokens found there and really not computed", registry=registry
        )
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens, cached ones included", registry=registry)
        self.generation_tokens = Counter("vllm:generation_tokens", "Tokens generated", registry=registry)
        self.first_token_s = _seconds(
            "vllm:time_to_first_token", "From arrival to the first token", FIRST_TOKEN_BUCKETS, registry
        )
        self.inter_token_s = _seconds(
            "vllm:inter_token_latency", "Between two tokens of one reply", INTER_TOKEN_BUCKETS, registry
        )
        self.request_s = _seconds(
            "vllm:e2e_request_latency", "From arrival to the end of the reply", REQUEST_BUCKETS, registry
        )

        # kvstrata's own names.
        self.prefill_tokens = Counter(
            "kvstrata_prefill_tokens", "Prompt tokens really computed (again after being set aside)", registry=registry
        )
        self.requests = Counter(
            "kvstrata_requests",
            "Requests that ended, by outcome: stop, length, cancelled, failed",
            ["outcome"],
            registry=registry,
        )
        self.refused = Counter(
            "kvstrata_requests_refused", "Requests that were never queued, by reason", ["reason"], registry=registry
        )
        self.preemptions = Counter(
            "kvstrata_preemptions",
            "Sequences preempted: they gave up their memory and are resumed later",
            registry=registry,
        )
        self.step_s = Histogram(
            "kvstrata_step_seconds",
            "One step of the engine, by kind: decode, prefill",
            ["kind"],
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.prompts = PromptMetrics(registry)
        self.events = EventMetrics(registry)
        self.kv_bytes = Gauge("kvstrata_kv_bytes", "KV of running sequences, and stored", registry=registry)
        self.kv_budget_bytes = Gauge("kvstrata_kv_budget_bytes", "Most that KV may take", registry=registry)
        self.active_bytes = Gauge("kvstrata_mlx_active_bytes", "What MLX has allocated and in use", registry=registry)
        self.peak_bytes = Gauge("kvstrata_mlx_peak_bytes", "The most that MLX had in use", registry=registry)
        self.sessions = Gauge("kvstrata_sessions", "Sessions that are known, of all keys", registry=registry)
        self._cache = CacheCollector()
        registry.register(self._cache)

    def set_load(
        self, *, running: int, waiting: int, kv_bytes: int, kv_budget_bytes: int, active_bytes: int, peak_bytes: int
    ) -> None:
        """Set the gauges of the engine's current load."""
        self.running.set(running)
        self.waiting.set(waiting)
        self.kv_bytes.set(kv_bytes)
        self.kv_budget_bytes.set(kv_budget_bytes)
        usage = kv_bytes / kv_budget_bytes if kv_budget_bytes else 0.0
        self.kv_usage.set(usage)
        self.gpu_usage.set(usage)
        self.active_bytes.set(active_bytes)
        self.peak_bytes.set(peak_bytes)

    def set_blocks(self, *, block_tokens: int, num_blocks: int, dtype: str) -> None:
        """Set the cache configuration in the block units that routers expect."""
        self._blocks.labels(
            block_size=block_tokens,
            num_gpu_blocks=num_blocks,
            num_cpu_blocks=0,
            cache_dtype=dtype,
            enable_prefix_caching=True,
        ).set(1)

    def set_cache(
        self, tiers: Mapping[str, Mapping[str, Any]], counters: Mapping[str, int], *, hot_budget_bytes: int
    ) -> None:
        """Set the current state of the cache; `tiers` has the shape of /cache/usage."""
        self._cache.tiers, self._cache.counters = tiers, counters
        self._cache.hot_budget_bytes = hot_budget_bytes

    def generated_tokens(self) -> int:
        return _total(self.generation_tokens)

    def num_preemptions(self) -> int:
        return _total(self.preemptions)

    def render(self) -> bytes:
        return generate_latest(self.registry)
