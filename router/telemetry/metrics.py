"""The router's metrics, in a Prometheus registry of their own. Labels contain no request ids."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.obs.renamed_metrics import render_metrics
from router.generation.record import GenerationRecord
from router.telemetry.latency_metrics import LatencyMetrics
from router.telemetry.slo import SloOutcome, SloTargets
from router.tenants.metrics import TenantMetrics

FETCH_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2, 4, 10)


class RouterMetrics:
    """The metrics of one router, in ``registry``. :meth:`render` gives the body of ``/metrics``."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, slo: SloTargets = SloTargets()) -> None:
        self._slo = slo
        registry = self.registry = CollectorRegistry()
        self.tenants = TenantMetrics(registry)
        self.requests = Counter(
            "baton_requests_total",
            "HTTP requests for answers, by endpoint and status (499: the client disconnected).",
            ["endpoint", "status"],
            registry=registry,
        )
        self.running = Gauge("baton_running_requests", "Answers in progress.", registry=registry)
        self.background_responses = Gauge(
            "baton_background_responses", "Background responses in progress.", registry=registry
        )
        self.connections = Gauge("baton_connections", "Open client connections.", registry=registry)
        self.refusals = Counter(
            "baton_refused_connections_total",
            "Client connections closed or refused, by the limit that was exceeded.",
            ["reason"],
            registry=registry,
        )
        self.latencies = LatencyMetrics(registry)
        self.prompt_tokens = Counter(
            "baton_prompt_tokens_total", "Tokens of prompts.", registry=registry
        )
        self.cached_tokens = Counter(
            "baton_cached_tokens_total",
            "Prompt tokens whose KV was cached, by the tier that it came from.",
            ["tier"],
            registry=registry,
        )
        self.store_fetch_seconds = Histogram(
            "baton_store_fetch_seconds",
            "Seconds that a request waited for the KV store; only requests that loaded KV from it.",
            buckets=FETCH_BUCKETS,
            registry=registry,
        )
        self.completion_tokens = Counter(
            "baton_completion_tokens_total", "Tokens of answers.", registry=registry
        )
        self.transferred_bytes = Counter(
            "baton_kv_transfer_bytes_total",
            "Bytes of KV transferred from prefill to decode workers, by transport.",
            ["transport"],
            registry=registry,
        )
        self.failovers = Counter(
            "baton_failovers_total",
            "Placements that failed, or whose worker drained, and were replaced by another one.",
            registry=registry,
        )
        self.answers = Counter(
            "baton_answers_total", "Answers, by how they ended.", ["reason"], registry=registry
        )
        judged = Counter(
            "baton_slo_answers_total",
            "Answers by SLO outcome, without batches and answers whose client disconnected.",
            ["verdict"],
            registry=registry,
        )
        self._slo_answers = {verdict: judged.labels(verdict.value) for verdict in SloOutcome}
        self._ttft_prediction_ratio = Histogram(
            "baton_time_to_first_token_prediction_ratio",
            "Time to first token, divided by the conductor's prediction.",
            buckets=RATIO_BUCKETS,
            registry=registry,
        )

    def record_answer(self, record: GenerationRecord) -> None:
        """Record an answer. Call this once, when the answer has ended."""
        self.answers.labels(record.finish_reason).inc()
        self.prompt_tokens.inc(record.num_prompt_tokens)
        for tier, tokens in record.cached_by_tier.items():
            if tokens:
                self.cached_tokens.labels(tier).inc(tokens)
        if record.cached_by_tier.get("dram") or record.cached_by_tier.get("disk"):
            self.store_fetch_seconds.observe(record.store_wait_seconds)
        self.completion_tokens.inc(record.num_tokens)
        if len(record.placements) > 1:
            self.failovers.inc(len(record.placements) - 1)
        if record.kv_bytes_transferred:
            self.transferred_bytes.labels(record.transport).inc(record.kv_bytes_transferred)
        self.latencies.record(record)
        self._record_slo(record)

    @property
    def slo(self) -> SloTargets:
        """The targets by which answers are judged now."""
        return self._slo

    def set_slo(self, slo: SloTargets) -> None:
        """Use the targets ``slo`` to judge all answers that end from now on."""
        self._slo = slo

    def _record_slo(self, record: GenerationRecord) -> None:
        verdict = self._slo.judge(record)
        if verdict is not None:
            self._slo_answers[verdict].inc()
            self.tenants.record_slo_outcome(record.tenant, met=verdict is SloOutcome.MET)
        predicted = record.placements[0].placement.ttft_seconds if record.placements else None
        if predicted and record.ttft_seconds is not None:
            self._ttft_prediction_ratio.observe(record.ttft_seconds / predicted)

    def record_refused_connection(self, reason: str) -> None:
        self.refusals.labels(reason).inc()

    def render(self) -> bytes:
        return render_metrics(self.registry)
