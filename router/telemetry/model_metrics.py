"""The router's metrics of requests and answers, by model.

A request has several answers if it has several prompts, or if its ``n`` or ``best_of`` is above 1.
Each metric counts either requests or answers; its help text says which.
"""

from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.config.values import TRANSPORTS
from baton.core.request import FinishReason
from router.generation.record import GenerationRecord
from router.telemetry.slo import SloOutcome
from router.tenants.request_usage import counted_prompts

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
INTER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
FETCH_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2, 4, 10)

FINISH_REASONS = (
    FinishReason.STOP.value, FinishReason.LENGTH.value, "tool_calls", "cancelled", "error",
)  # fmt: skip
TIERS = ("device", "dram", "disk")


class ModelMetrics:
    """All metrics with the label ``model``, whose values are the names of the served models. A
    request for a LoRA adapter counts for the adapter's base model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(Histogram, labelnames=["model"], registry=registry)
        self._register_request_metrics(registry, histogram)
        self._register_answer_metrics(registry, histogram)

    def _register_request_metrics(
        self, registry: CollectorRegistry, histogram: Callable[..., Histogram]
    ) -> None:
        """Register the metrics that count a request once, or each of its prompts once."""
        self._request_seconds = histogram(
            "baton_request_seconds",
            "From a request's arrival to the end of its last answer; once per request.",
            buckets=LATENCY_BUCKETS,
        )
        self._placement_seconds = histogram(
            "baton_placement_seconds",
            "From a request's arrival to its first placement; once per request.",
            buckets=LATENCY_BUCKETS,
        )
        self._ttft_seconds = histogram(
            "baton_time_to_first_token_seconds",
            "From a request's arrival to the first token of any of its answers; once per request.",
            buckets=LATENCY_BUCKETS,
        )
        self._prompt_tokens = Counter(
            "baton_prompt_tokens_total",
            "Tokens of prompts; each prompt counts once, however many answers it gets.",
            ["model"],
            registry=registry,
        )
        self._cached_tokens = Counter(
            "baton_cached_tokens_total",
            "Prompt tokens whose KV was cached for all answers to the prompt, by the tier that it "
            "came from; each prompt counts once.",
            ["model", "tier"],
            registry=registry,
        )

    def _register_answer_metrics(
        self, registry: CollectorRegistry, histogram: Callable[..., Histogram]
    ) -> None:
        """Register the metrics that count each answer."""
        counter = partial(Counter, registry=registry)
        self._running = Gauge(
            "baton_running_requests", "Answers in progress.", ["model"], registry=registry
        )
        self._itl_seconds = histogram(
            "baton_inter_token_latency_seconds",
            "Mean time between the tokens of an answer; once per answer.",
            buckets=INTER_TOKEN_BUCKETS,
        )
        self._completion_tokens = counter(
            "baton_completion_tokens_total", "Tokens of all answers.", ["model"]
        )
        self._answers = counter(
            "baton_answers_total", "Answers, by how they ended.", ["model", "reason"]
        )
        self._slo_answers = counter(
            "baton_slo_answers_total",
            "Answers by SLO outcome, without batches and answers whose client disconnected.",
            ["model", "verdict"],
        )
        self._ttft_prediction_ratio = histogram(
            "baton_time_to_first_token_prediction_ratio",
            "Time to the first token of an answer, divided by the conductor's prediction; once per "
            "answer.",
            buckets=RATIO_BUCKETS,
        )
        self._store_fetch_seconds = histogram(
            "baton_store_fetch_seconds",
            "Seconds that an answer waited for the KV store; only answers whose prompt loaded KV "
            "from it.",
            buckets=FETCH_BUCKETS,
        )
        self._transferred_bytes = counter(
            "baton_kv_transfer_bytes_total",
            "Bytes of KV transferred from prefill to decode workers, by transport.",
            ["model", "transport"],
        )
        self._failovers = counter(
            "baton_failovers_total",
            "Placements that failed, or whose worker drained, and were replaced by another one.",
            ["model"],
        )

    def add_model(self, model: str) -> None:
        """Create the model's series, with all known values of the other labels, at 0. A scraper
        would miss the first increase of a series that does not exist before."""
        for family in (
            self._request_seconds, self._placement_seconds, self._ttft_seconds, self._itl_seconds,
            self._prompt_tokens, self._completion_tokens, self._running, self._failovers,
            self._ttft_prediction_ratio, self._store_fetch_seconds,
        ):  # fmt: skip
            family.labels(model)
        for counter, values in (
            (self._cached_tokens, TIERS),
            (self._answers, FINISH_REASONS),
            (self._slo_answers, SloOutcome),
            (self._transferred_bytes, TRANSPORTS),
        ):
            for value in values:
                counter.labels(model, value)

    def record_begin(self, record: GenerationRecord) -> None:
        """Record that an answer is in progress now."""
        self._running.labels(record.model).inc()

    def record_answer(self, record: GenerationRecord, verdict: SloOutcome | None) -> None:
        """Record an answer that has ended. ``verdict`` is None if the SLO does not apply to it."""
        model = record.model
        self._running.labels(model).dec()
        self._answers.labels(model, record.finish_reason).inc()
        self._completion_tokens.labels(model).inc(record.num_tokens)
        if record.cached_by_tier.get("dram") or record.cached_by_tier.get("disk"):
            self._store_fetch_seconds.labels(model).observe(record.store_wait_seconds)
        if len(record.placements) > 1:
            self._failovers.labels(model).inc(len(record.placements) - 1)
        if record.kv_bytes_transferred:
            moved = self._transferred_bytes.labels(model, record.transport)
            moved.inc(record.kv_bytes_transferred)
        if verdict is not None:
            self._slo_answers.labels(model, verdict.value).inc()
        predicted = record.placements[0].placement.ttft_seconds if record.placements else None
        if predicted and record.ttft_seconds is not None:
            self._ttft_prediction_ratio.labels(model).observe(record.ttft_seconds / predicted)
        if record.ttft_seconds is not None and record.mean_itl_seconds is not None:
            self._itl_seconds.labels(model).observe(record.mean_itl_seconds)

    def record_request(self, records: Sequence[GenerationRecord], per_prompt: int) -> None:
        """Record a request, all of whose answers have ended. Each prompt has ``per_prompt``
        consecutive records, one per answer."""
        model = records[0].model
        for prompt in counted_prompts(records, per_prompt):
            self._prompt_tokens.labels(model).inc(prompt.num_prompt_tokens)
            for tier, tokens in prompt.cached_by_tier.items():
                self._cached_tokens.labels(model, tier).inc(tokens)
        total = [each.total_seconds for each in records if each.total_seconds is not None]
        placement = [each.queue_seconds for each in records if each.queue_seconds is not None]
        ttft = [each.ttft_seconds for each in records if each.ttft_seconds is not None]
        if total:
            self._request_seconds.labels(model).observe(max(total))
        if placement:
            self._placement_seconds.labels(model).observe(min(placement))
        if ttft:
            self._ttft_seconds.labels(model).observe(min(ttft))
