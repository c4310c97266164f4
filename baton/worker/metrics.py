"""The Prometheus metrics of a worker's steps and requests. Series with known labels exist at 0 from
the start, since a scraper can't see the increase with which a series begins.

Nothing here is called per token: recording a step costs a few microseconds, whatever its batch
size.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.config.values import TRANSPORTS
from baton.core.kv_codec import KvCodecName
from baton.core.task import Task
from baton.engine.result import EngineStats, ScheduledPrompt, StepWork
from baton.errors import ERROR_MAPPINGS
from baton.worker.adapter_stats import AdapterStats
from baton.worker.job import JobOutcome
from baton.worker.kv_transfer_stats import KvTransferStats
from baton.worker.prefix_fetch_stats import PrefixFetchStats

STEP_SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
WAIT_SECONDS_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
KV_TRANSFER_SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class WorkerMetrics:
    """Metrics that are updated in the event loop as events happen."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._register_step_metrics(registry)
        self._register_request_metrics(registry)
        self._register_kv_transfer_metrics(registry)
        self._register_store_metrics(registry)

    def _register_step_metrics(self, registry: CollectorRegistry) -> None:
        seconds = Histogram(
            "baton_worker_step_seconds",
            "Duration of a step on the device, by what it computes: prefill, decode, or mixed.",
            ["kind"],
            buckets=STEP_SECONDS_BUCKETS,
            registry=registry,
        )
        self._prefill, self._decode = seconds.labels("prefill"), seconds.labels("decode")
        self._mixed = seconds.labels("mixed")
        self._batch_sizes = Histogram(
            "baton_worker_batch_requests",
            "Requests in a step's batch.",
            buckets=BATCH_SIZE_BUCKETS,
            registry=registry,
        )
        tokens = Counter(
            "baton_worker_computed_tokens_total",
            "Tokens computed, by phase: prefill or decode.",
            ["phase"],
            registry=registry,
        )
        self._prompt_tokens, self._answer_tokens = tokens.labels("prefill"), tokens.labels("decode")
        self._queue_seconds = Histogram(
            "baton_worker_queue_seconds",
            "Time that prompts wait for the first step that computes a part of them.",
            buckets=WAIT_SECONDS_BUCKETS,
            registry=registry,
        )

    def _register_request_metrics(self, registry: CollectorRegistry) -> None:
        jobs = Counter(
            "baton_worker_requests_total",
            "Requests that have ended on this worker, by task and outcome.",
            ["task", "outcome"],
            registry=registry,
        )
        self._jobs = {(t, o): jobs.labels(t.value, o.value) for t in Task for o in JobOutcome}
        self._failures = Counter(
            "baton_worker_failures_total",
            "Requests that failed or were refused here, by the gRPC status of their error.",
            ["status"],
            registry=registry,
        )
        for mapping in ERROR_MAPPINGS.values():
            self._failures.labels(mapping.grpc_status)
        prefix = Counter(
            "baton_worker_prefix_tokens_total",
            "Tokens of prompts started on this worker, by where their KV came from: computed, this "
            "worker's own prefix cache, or the store's DRAM or SSD.",
            ["source"],
            registry=registry,
        )
        sources = ("computed", "device", "dram", "disk")
        self._prefix_tokens = {source: prefix.labels(source) for source in sources}

    def _register_kv_transfer_metrics(self, registry: CollectorRegistry) -> None:
        self._transfer_bytes = Counter(
            "baton_worker_kv_transfer_bytes_total",
            "Bytes of KV read from other workers.",
            ["transport"],
            registry=registry,
        )
        self._transfer_raw_bytes = Counter(
            "baton_worker_kv_transfer_raw_bytes_total",
            "Size of the KV blocks read from other workers, before they were encoded, by the "
            "strongest codec of the request.",
            ["transport", "codec"],
            registry=registry,
        )
        self._transfer_read_seconds = Counter(
            "baton_worker_kv_transfer_read_seconds_total",
            "Time spent on reading KV from other workers, and on decoding it; bytes divided by it "
            "is the link's speed.",
            ["transport"],
            registry=registry,
        )
        for transport in TRANSPORTS:
            self._transfer_bytes.labels(transport)
            self._transfer_read_seconds.labels(transport)
            for codec in KvCodecName:
                self._transfer_raw_bytes.labels(transport, codec.value)
        self._transfer_exposed_seconds = Histogram(
            "baton_worker_kv_transfer_exposed_seconds",
            "Time that the KV transfer adds to the wait for the second token.",
            buckets=KV_TRANSFER_SECONDS_BUCKETS,
            registry=registry,
        )
        self._export_seconds = Histogram(
            "baton_worker_kv_export_seconds",
            "Time that a prefilled prompt's KV was pinned until another worker had imported it.",
            buckets=WAIT_SECONDS_BUCKETS,
            registry=registry,
        )

    def _register_store_metrics(self, registry: CollectorRegistry) -> None:
        self._store_lookups = Counter(
            "baton_worker_store_lookups_total",
            "Prompts whose prefix was looked up in the store, by what was done: fetch, recompute, "
            "split (both), none (it had no more blocks), or error.",
            ["mode"],
            registry=registry,
        )
        for mode in ("fetch", "recompute", "split", "none", "error"):
            self._store_lookups.labels(mode)
        self._store_seconds = Histogram(
            "baton_worker_store_wait_seconds",
            "Time that prompts waited for the store before they were queued.",
            buckets=KV_TRANSFER_SECONDS_BUCKETS,
            registry=registry,
        )

    # -- events ----------------------------------------------------------------------------

    def record_step(self, work: StepWork, admitted: tuple[ScheduledPrompt, ...]) -> None:
        if work.is_decode:
            self._decode.observe(work.seconds)
        else:
            (self._mixed if work.num_decodes else self._prefill).observe(work.seconds)
            self._prompt_tokens.inc(work.num_tokens - work.num_decodes)
        if work.num_decodes:
            self._answer_tokens.inc(work.num_decodes + work.num_drafts)
        self._batch_sizes.observe(work.num_rows)
        for each in admitted:
            self._queue_seconds.observe(each.waited_seconds)

    def record_prompt(self, num_tokens: int, cached_tokens: int, fetch: PrefixFetchStats) -> None:
        """Record a prompt when its first token has been computed."""
        tiers = fetch.tokens_by_tier(cached_tokens)
        self._prefix_tokens["computed"].inc(max(num_tokens - cached_tokens, 0))
        for source, tokens in tiers.items():
            self._prefix_tokens[source].inc(tokens)
        if fetch.wait_seconds > 0:
            self._store_seconds.observe(fetch.wait_seconds)
            mode = "error" if fetch.error else fetch.mode or "none"
            self._store_lookups.labels(mode).inc()

    def record_kv_import(self, stats: KvTransferStats) -> None:
        self._transfer_bytes.labels(stats.transport).inc(stats.size_bytes)
        self._transfer_raw_bytes.labels(stats.transport, stats.codec.value).inc(stats.raw_bytes)
        self._transfer_read_seconds.labels(stats.transport).inc(stats.read_seconds)
        self._transfer_exposed_seconds.observe(stats.exposed_seconds)

    def record_export_duration(self, seconds: float) -> None:
        self._export_seconds.observe(seconds)

    def record_ended(self, task: Task, outcome: JobOutcome) -> None:
        self._jobs[task, outcome].inc()

    def record_failure(self, status: str) -> None:
        self._failures.labels(status).inc()


_BLOCKS = ("free", "filling", "idle", "referenced", "quarantined")
_REQUESTS = ("running", "waiting", "exported", "reserved")


class EngineGauges(Collector):
    """Gauges of the engine's state, as of the worker's last periodic check. ``stats`` is replaced
    as a whole, since the thread that serves Prometheus reads it. ``labels`` describe the worker;
    they are replaced when its role changes. :class:`baton.worker.adapters.WorkerAdapters` updates
    ``adapters``."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None
        self.labels: dict[str, str] = {}
        self.block_bytes = 0
        self.adapters = AdapterStats()

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "baton_worker_info",
            "Always 1; the labels describe the worker.",
            labels=list(self.labels),
        )
        info.add_metric(list(self.labels.values()), 1)
        yield info
        stats = self.stats
        if stats is not None:
            yield from self._engine_metrics(stats)
        yield from self._adapter_metrics()

    def _adapter_metrics(self) -> Iterator[Metric]:
        adapters = self.adapters
        yield GaugeMetricFamily(
            "baton_worker_adapters",
            "LoRA adapters in memory, including those that are unloaded once no request uses them.",
            adapters.num_loaded,
        )
        yield GaugeMetricFamily(
            "baton_worker_adapter_bytes", "Memory of the LoRA adapters.", adapters.size_bytes
        )
        loads = CounterMetricFamily(
            "baton_worker_adapter_loads",
            "Attempts to load a LoRA adapter, by outcome: loaded or failed.",
            labels=["outcome"],
        )
        loads.add_metric(["loaded"], adapters.num_loads)
        loads.add_metric(["failed"], adapters.num_load_failures)
        yield loads

    def _engine_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        requests = GaugeMetricFamily(
            "baton_worker_sequences",
            "Requests in the engine: waiting, running (prefill and decode), exported until another "
            "worker has imported their KV, or with blocks reserved for KV that is being imported.",
            labels=["state"],
        )
        for state in _REQUESTS:
            requests.add_metric([state], getattr(stats, state))
        yield requests
        blocks = GaugeMetricFamily(
            "baton_worker_blocks",
            "KV blocks on the device by state; idle ones are cached and evictable.",
            labels=["state"],
        )
        for state in _BLOCKS:
            blocks.add_metric([state], getattr(stats.pool, state))
        yield blocks
        yield GaugeMetricFamily(
            "baton_worker_pool_bytes",
            "Bytes of the KV pool on the device.",
            stats.pool.num_blocks * self.block_bytes,
        )
        yield GaugeMetricFamily(
            "baton_worker_queued_tokens",
            "Prompt tokens that are not computed yet.",
            stats.queued_tokens,
        )
        yield CounterMetricFamily(
            "baton_worker_preemptions",
            "Answers preempted for lack of free blocks; their KV is recomputed.",
            stats.num_preemptions,
        )
        yield CounterMetricFamily(
            "baton_worker_pauses",
            "Prefills paused in favour of a prompt with higher rank.",
            stats.num_pauses,
        )
        yield CounterMetricFamily(
            "baton_worker_drafted_tokens",
            "Tokens of answers drafted by speculative decoding.",
            stats.num_drafted_tokens,
        )
        yield CounterMetricFamily(
            "baton_worker_accepted_tokens",
            "Drafted tokens that were right, and became part of an answer.",
            stats.num_accepted_tokens,
        )
