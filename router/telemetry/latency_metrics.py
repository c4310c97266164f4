"""The router's latencies, by model."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram

from router.generation.record import GenerationRecord

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
INTER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


@dataclass(frozen=True, slots=True)
class _ModelLatencies:
    """The histograms of one model. They are looked up once, since looking up a label takes longer
    than observing a value."""

    request: Histogram
    placement: Histogram
    ttft: Histogram
    itl: Histogram


class LatencyMetrics:
    """Records how long answers took. The models are those that the router serves."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._request_seconds = Histogram(
            "baton_request_seconds",
            "From a request's arrival to the end of its answer, by model.",
            ["model"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._placement_seconds = Histogram(
            "baton_placement_seconds",
            "From a request's arrival to its placement, by model.",
            ["model"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._ttft_seconds = Histogram(
            "baton_time_to_first_token_seconds",
            "From a request's arrival to its first token, by model.",
            ["model"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._itl_seconds = Histogram(
            "baton_inter_token_latency_seconds",
            "Mean time between the tokens of an answer, by model.",
            ["model"],
            buckets=INTER_TOKEN_BUCKETS,
            registry=registry,
        )
        self._by_model: dict[str, _ModelLatencies] = {}

    def record(self, record: GenerationRecord) -> None:
        """Record the latencies of an answer that has ended."""
        model = self._by_model.get(record.model) or self._add_model(record.model)
        if record.total_seconds is not None:
            model.request.observe(record.total_seconds)
        if record.queue_seconds is not None:
            model.placement.observe(record.queue_seconds)
        if record.ttft_seconds is None:
            return
        model.ttft.observe(record.ttft_seconds)
        itl_seconds = record.mean_itl_seconds
        if itl_seconds is not None:
            model.itl.observe(itl_seconds)

    def _add_model(self, model: str) -> _ModelLatencies:
        latencies = self._by_model[model] = _ModelLatencies(
            self._request_seconds.labels(model),
            self._placement_seconds.labels(model),
            self._ttft_seconds.labels(model),
            self._itl_seconds.labels(model),
        )
        return latencies
