"""What a worker tells Prometheus: what its steps computed, and what became of its requests.

Nothing here has a cost per token: a step costs a few microseconds, whatever its batch.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.core.task import Task
from baton.engine.result import EngineStats, ScheduledPrompt, StepWork
from baton.worker.job import JobOutcome
from baton.worker.kv_import import KvTransferStats
from baton.worker.prefix_fetch import PrefixFetch

STEP_SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
WAIT_SECONDS_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
KV_TRANSFER_SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class WorkerMetrics:
    """Counted in the event loop as things happen."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._count_steps(registry)
        self._count_jobs(registry)
        self._count_handoffs(registry)
        self._count_store(registry)

    def _count_steps(self, registry: CollectorRegistry) -> None:
        seconds = Histogram(
            "baton_worker_step_seconds",
            "What a step takes on the device, by what it computes: prompts, answers, or both.",
            ["kind"],
            buckets=STEP_SECONDS_BUCKETS,
            registry=registry,
        )
        self._prefill, self._decode = seconds.labels("prefill"), seconds.labels("decode")
        self._mixed = seconds.labels("mixed")
        self._rows = Histogram(
            "baton_worker_batch_requests",
            "Requests of which a step computes something.",
            buckets=BATCH_SIZE_BUCKETS,
            registry=registry,
        )
        tokens = Counter(
            "baton_worker_computed_tokens_total",
            "Tokens that were computed, of prompts and of answers.",
            ["phase"],
            registry=registry,
        )
        self._prompt_tokens, self._answer_tokens = tokens.labels("prefill"), tokens.labels("decode")
        self._queue_seconds = Histogram(
            "baton_worker_queue_seconds",
            "That prompts wait for the first step that computes something of them.",
            buckets=WAIT_SECONDS_BUCKETS,
            registry=registry,
        )

    def _count_jobs(self, registry: CollectorRegistry) -> None:
        jobs = Counter(
            "baton_worker_requests_total",
            "Requests that are over here, by what was asked and what became of them.",
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
        prefix = Counter(
            "baton_worker_prefix_tokens_total",
            "Tokens of prompts that were begun here, by where their KV came from: computed, this "
            "worker's own cache, or the store's DRAM or SSD.",
            ["source"],
            registry=registry,
        )
        sources = ("computed", "device", "dram", "disk")
        self._prefix = {source: prefix.labels(source) for source in sources}

    def _count_handoffs(self, registry: CollectorRegistry) -> None:
        self._handoff_bytes = Counter(
            "baton_worker_handoff_bytes_total",
            "KV that was read from other workers.",
            ["transport"],
            registry=registry,
        )
        self._handoff_reads = Counter(
            "baton_worker_handoff_read_seconds_total",
            "What reading it took; bytes by seconds is the speed of the link.",
            ["transport"],
            registry=registry,
        )
        self._handoff_exposed = Histogram(
            "baton_worker_handoff_exposed_seconds",
            "What shipping adds to the wait for the second token.",
            buckets=KV_TRANSFER_SECONDS_BUCKETS,
            registry=registry,
        )
        self._handoff_held = Histogram(
            "baton_worker_handoff_held_seconds",
            "That a computed prompt was held until its reader had it.",
            buckets=WAIT_SECONDS_BUCKETS,
            registry=registry,
        )

    def _count_store(self, registry: CollectorRegistry) -> None:
        self._store_ways = Counter(
            "baton_worker_store_lookups_total",
            "Prompts of which the store was asked for more, by what was done: fetch, recompute, "
            "split (both), none (it had no more), or error.",
            ["way"],
            registry=registry,
        )
        self._store_seconds = Histogram(
            "baton_worker_store_wait_seconds",
            "That prompts waited for the store before they were queued.",
            buckets=KV_TRANSFER_SECONDS_BUCKETS,
            registry=registry,
        )

    # -- what happens ----------------------------------------------------------------------

    def note_step(self, work: StepWork, admitted: tuple[ScheduledPrompt, ...]) -> None:
        if work.is_decode:
            self._decode.observe(work.seconds)
        else:
            (self._mixed if work.num_decodes else self._prefill).observe(work.seconds)
            self._prompt_tokens.inc(work.num_tokens - work.num_decodes)
        if work.num_decodes:
            self._answer_tokens.inc(work.num_decodes)
        self._rows.observe(work.num_rows)
        for each in admitted:
            self._queue_seconds.observe(each.waited_seconds)

    def note_prompt(self, num_tokens: int, cached_tokens: int, extension: PrefixFetch) -> None:
        """Once its first token is there."""
        tiers = extension.tiers(cached_tokens)
        self._prefix["computed"].inc(max(num_tokens - cached_tokens, 0))
        for source, tokens in tiers.items():
            self._prefix[source].inc(tokens)
        if extension.seconds > 0:
            self._store_seconds.observe(extension.seconds)
            way = "error" if extension.error else extension.way or "none"
            self._store_ways.labels(way).inc()

    def note_pull(self, shipment: KvTransferStats) -> None:
        self._handoff_bytes.labels(shipment.transport).inc(shipment.size_bytes)
        self._handoff_reads.labels(shipment.transport).inc(shipment.reading_seconds)
        self._handoff_exposed.observe(shipment.exposed_seconds)

    def note_held(self, seconds: float) -> None:
        self._handoff_held.observe(seconds)

    def note_end(self, task: Task, outcome: JobOutcome) -> None:
        self._jobs[task, outcome].inc()

    def note_failure(self, status: str) -> None:
        self._failures.labels(status).inc()


_BLOCKS = ("free", "filling", "idle", "referenced", "quarantined")
_REQUESTS = ("running", "waiting", "held", "reserved")


class EngineGauges(Collector):
    """The engine as of its worker's last sweep: ``stats`` is replaced as a whole, and read by the
    thread that answers Prometheus. ``labels`` describe the worker; its role may change."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None
        self.labels: dict[str, str] = {}
        self.block_bytes = 0

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "baton_worker_info",
            "1; what the worker is, in labels.",
            labels=list(self.labels),
        )
        info.add_metric(list(self.labels.values()), 1)
        yield info
        stats = self.stats
        if stats is not None:
            yield from self._of_engine(stats)

    def _of_engine(self, stats: EngineStats) -> Iterator[Metric]:
        requests = GaugeMetricFamily(
            "baton_worker_sequences",
            "Requests in the engine: waiting, running (prompts and answers), held for their "
            "reader, or with room reserved for what is being read.",
            labels=["state"],
        )
        for state in _REQUESTS:
            requests.add_metric([state], getattr(stats, state))
        yield requests
        blocks = GaugeMetricFamily(
            "baton_worker_blocks",
            "Blocks of KV on the device by state; idle ones are cache, and room.",
            labels=["state"],
        )
        for state in _BLOCKS:
            blocks.add_metric([state], getattr(stats.pool, state))
        yield blocks
        yield GaugeMetricFamily(
            "baton_worker_pool_bytes",
            "Memory for KV on the device.",
            stats.pool.num_blocks * self.block_bytes,
        )
        yield GaugeMetricFamily(
            "baton_worker_queued_tokens",
            "Tokens of prompts that are here and not computed.",
            stats.queued_tokens,
        )
        yield CounterMetricFamily(
            "baton_worker_preemptions",
            "Answers that lost their memory to earlier ones, and are computed again.",
            stats.num_preemptions,
        )
        yield CounterMetricFamily(
            "baton_worker_pauses",
            "Prompts that stood still for one whose turn came first.",
            stats.num_pauses,
        )
