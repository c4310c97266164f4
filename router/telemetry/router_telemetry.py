"""Groups the metrics, records and traces of a router's requests."""

from dataclasses import dataclass, field

from router.generation.record import GenerationHistory
from router.http.peer_routers import PeerRouters
from router.telemetry.ignored_fields_log import IgnoredFieldsLog
from router.telemetry.metrics import RouterMetrics
from router.telemetry.tracing import RequestTracer


@dataclass(slots=True)
class RouterTelemetry:
    """Groups the metrics, the records of the latest requests on this router (``history``) and on
    other routers (``peer_routers``), the traces (``tracer`` is None if no request is traced), and
    the log of ignored fields."""

    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    history: GenerationHistory = field(default_factory=GenerationHistory)
    tracer: RequestTracer | None = None
    peer_routers: PeerRouters | None = None
    ignored_fields_log: IgnoredFieldsLog = field(default_factory=IgnoredFieldsLog)
