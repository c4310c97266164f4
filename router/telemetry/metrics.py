"""The router's metrics, in a registry of their own. No request ids in labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.generation.record import GenerationRecord
from router.telemetry.slo import SloOutcome, SloTargets
from router.tenants.metrics import TenantMetrics

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
FETCH_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
INTER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)

RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2, 4, 10)


class RouterMetrics:
    """One per router program, in ``registry``; :meth:`render` is what ``/metrics`` answers."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, slo: SloTargets = SloTargets()) -> None:
        self._slo = slo
        registry = self.registry = CollectorRegistry()
        self.tenants = TenantMetrics(registry)
        self.requests = Counter(
            "baton_requests_total",
            "HTTP requests for answers, by endpoint and status (499: the client left).",
            ["endpoint", "status"],
            registry=registry,
        )
        self.running = Gauge(
            "baton_running_requests", "Answers that are under way.", registry=registry
        )
        self.connections = Gauge(
            "baton_connections", "Clients' connections that are open.", registry=registry
        )
        self.refusals = Counter(
            "baton_refused_connections_total",
            "Connections that were ended for what their client did, by what it overstepped.",
            ["reason"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "baton_request_seconds",
            "From a request's arrival to the end of its answer.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.placement_seconds = Histogram(
            "baton_placement_seconds",
            "From a request's arrival to its placement.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "baton_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.token_gap_seconds = Histogram(
            "baton_token_gap_seconds",
            "Mean time between the tokens of an answer.",
            buckets=INTER_TOKEN_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "baton_prompt_tokens_total", "Tokens of prompts.", registry=registry
        )
        self.cached_tokens = Counter(
            "baton_cached_tokens_total",
            "Tokens of prompts that were not computed, by the tier that they came from.",
            ["tier"],
            registry=registry,
        )
        self.store_fetch_seconds = Histogram(
            "baton_store_fetch_seconds",
            "What requests waited for the store, of those that got something from it.",
            buckets=FETCH_BUCKETS,
            registry=registry,
        )
        self.completion_tokens = Counter(
            "baton_completion_tokens_total", "Tokens of answers.", registry=registry
        )
        self.shipped_bytes = Counter(
            "baton_shipped_bytes_total",
            "KV that went from prefill to decode workers, by transport.",
            ["transport"],
            registry=registry,
        )
        self.failovers = Counter(
            "baton_failovers_total",
            "Placements that failed and were made again.",
            registry=registry,
        )
        self.answers = Counter(
            "baton_answers_total", "Answers, by how they ended.", ["reason"], registry=registry
        )
        judged = Counter(
            "baton_slo_answers_total",
            "Answers by whether they met the SLO; batches, and those whose client left, count not.",
            ["verdict"],
            registry=registry,
        )
        self._judged = {verdict: judged.labels(verdict.value) for verdict in SloOutcome}
        self._predicted = Histogram(
            "baton_first_token_prediction_ratio",
            "Time to the first token, by what the conductor had predicted.",
            buckets=RATIO_BUCKETS,
            registry=registry,
        )

    def note_answer(self, record: GenerationRecord) -> None:
        """Once per answer, at its end."""
        self.answers.labels(record.finish_reason).inc()
        self.prompt_tokens.inc(record.num_prompt_tokens)
        for tier, tokens in record.cached_by_tier.items():
            if tokens:
                self.cached_tokens.labels(tier).inc(tokens)
        if record.cached_by_tier.get("dram") or record.cached_by_tier.get("disk"):
            self.store_fetch_seconds.observe(record.store_seconds)
        self.completion_tokens.inc(record.num_tokens)
        if len(record.placements) > 1:
            self.failovers.inc(len(record.placements) - 1)
        if record.bytes_shipped:
            self.shipped_bytes.labels(record.transport).inc(record.bytes_shipped)
        self._note_seconds(record)
        self._judge(record)

    def _judge(self, record: GenerationRecord) -> None:
        verdict = self._slo.verdict(record)
        if verdict is not None:
            self._judged[verdict].inc()
            self.tenants.note_judged(record.tenant, met=verdict is SloOutcome.MET)
        predicted = record.placements[0].placement.ttft_seconds if record.placements else None
        if predicted and record.ttft_seconds is not None:
            self._predicted.observe(record.ttft_seconds / predicted)

    def note_refusal(self, reason: str) -> None:
        self.refusals.labels(reason).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _note_seconds(self, record: GenerationRecord) -> None:
        if record.total_seconds is not None:
            self.request_seconds.observe(record.total_seconds)
        if record.queue_seconds is not None:
            self.placement_seconds.observe(record.queue_seconds)
        if record.ttft_seconds is None:
            return
        self.first_token_seconds.observe(record.ttft_seconds)
        if record.tbt_seconds is not None:
            self.token_gap_seconds.observe(record.tbt_seconds)
