"""The router's metrics, in a Prometheus registry of their own. Labels contain no request ids."""

from collections.abc import Iterable, Sequence
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.core.server_api import SERVER_ROUTES
from baton.obs.metric_aliases import MetricAlias, render_metrics
from router.generation.record import GenerationRecord
from router.telemetry.model_metrics import ModelMetrics
from router.telemetry.slo import SloOutcome, SloTargets
from router.tenants.metrics import TenantMetrics

UNKNOWN_MODEL = "unknown"
"""The label ``model`` of HTTP requests that ended before their model was found."""

ENDPOINTS = (
    "chat", "completions", "responses", "messages", "input_tokens", "count_tokens", "tokenize",
    "detokenize", "batches", *dict.fromkeys(route.name for route in SERVER_ROUTES.values()),
)  # fmt: skip
STATUSES = (200, 400, 401, 404, 408, 413, 429, 499, 500, 503, 504)
REFUSALS = ("connections", "headers", "http", "slow", "unread", "ahead")


class RouterMetrics:
    """The metrics of one router, in ``registry``. :meth:`render` gives the body of ``/metrics``."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, slo: SloTargets = SloTargets(), aliases: Sequence[MetricAlias] = ()) -> None:
        self._slo = slo
        self._aliases = aliases
        registry = self.registry = CollectorRegistry()
        self.tenants = TenantMetrics(registry)
        self._requests = Counter(
            "baton_requests_total",
            "HTTP requests for answers, by endpoint, model and status (499: the client "
            "disconnected).",
            ["endpoint", "model", "status"],
            registry=registry,
        )
        self.background_responses = Gauge(
            "baton_background_responses", "Background responses in progress.", registry=registry
        )
        self.connections = Gauge("baton_connections", "Open client connections.", registry=registry)
        self._refusals = Counter(
            "baton_refused_connections_total",
            "Client connections closed or refused, by the limit that was exceeded.",
            ["reason"],
            registry=registry,
        )
        for reason in REFUSALS:
            self._refusals.labels(reason)
        self._models = ModelMetrics(registry)

    def add_models(self, names: Iterable[str]) -> None:
        """Create the series of these models, at 0."""
        for name in names:
            self._models.add_model(name)
            self._add_requests(name)
        self._add_requests(UNKNOWN_MODEL)

    def _add_requests(self, model: str) -> None:
        for endpoint, status in product(ENDPOINTS, STATUSES):
            self._requests.labels(endpoint, model, status)

    def record_http_request(self, endpoint: str, model: str, status: int) -> None:
        """Record that an HTTP request has ended. ``model`` is the name of the served model, or
        :data:`UNKNOWN_MODEL`."""
        self._requests.labels(endpoint, model, status).inc()

    def record_begin(self, record: GenerationRecord) -> None:
        """Record that an answer is in progress now. Call :meth:`record_answer` when it has
        ended."""
        self._models.record_begin(record)

    def record_answer(self, record: GenerationRecord) -> None:
        """Record an answer. Call this once, when the answer has ended."""
        verdict = self._slo.judge(record)
        self._models.record_answer(record, verdict)
        if verdict is not None:
            self.tenants.record_slo_outcome(record.tenant, met=verdict is SloOutcome.MET)

    def record_request(self, records: Sequence[GenerationRecord], per_prompt: int) -> None:
        """Record a request. Call this once, when all its answers have ended; each prompt has
        ``per_prompt`` consecutive records."""
        self._models.record_request(records, per_prompt)

    @property
    def slo(self) -> SloTargets:
        """The targets by which answers are judged now."""
        return self._slo

    def set_slo(self, slo: SloTargets) -> None:
        """Use the targets ``slo`` to judge all answers that end from now on."""
        self._slo = slo

    def record_refused_connection(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def render(self) -> bytes:
        return render_metrics(self.registry, self._aliases)
