"""Sees what becomes of each request at a worker, and tells of it: metrics, spans, the log."""

from collections.abc import Mapping

import structlog
from prometheus_client import CollectorRegistry

from baton.clock import Clock
from baton.core.ids import RequestId
from baton.core.request import RequestOutput
from baton.core.trace_context import parse_traceparent
from baton.engine.result import StepResult
from baton.errors import BatonError, error_mapping
from baton.obs.span import SpanSink, Value
from baton.worker.job import Job, JobOutcome
from baton.worker.job_trace import JobTrace, job_spans
from baton.worker.kv_import import KvTransferStats
from baton.worker.metrics import EngineGauges, WorkerMetrics
from baton.worker.prefix_fetch import PrefixFetch

log = structlog.get_logger(__name__)


class WorkerTelemetry:
    """``name`` is the worker's; without ``spans`` nothing is traced. What happens once per token is
    not seen here."""

    def __init__(
        self, name: str, registry: CollectorRegistry, clock: Clock, spans: SpanSink | None = None
    ) -> None:
        self.metrics = WorkerMetrics(registry)
        self.gauges = EngineGauges()
        registry.register(self.gauges)
        self._name = name
        self._clock = clock
        self._spans = spans

    def began(self, job: Job) -> None:
        context = parse_traceparent(job.spec.trace) if self._spans and job.spec.trace else None
        if context is not None:
            job.times = JobTrace(context, self._clock.monotonic())

    def stepped(self, result: StepResult, jobs: Mapping[RequestId, Job]) -> None:
        """``jobs`` by placement."""
        if result.work is not None:
            self.metrics.note_step(result.work, result.admitted)
        for request_id in result.preempted:
            job = jobs.get(request_id)
            if job is not None:
                log.info("request_preempted", **_named(job))
        if self._spans is None:
            return
        for admitted in result.admitted:
            job = jobs.get(admitted.request_id)
            if job is not None and job.times is not None:
                job.times.admitted = admitted
        for progress in result.progress:
            job = jobs.get(progress.request_id)
            if job is not None and job.times is not None:
                job.times.note_chunk(self._clock.monotonic(), progress.num_computed_tokens)

    def answered(self, job: Job, output: RequestOutput, extension: PrefixFetch) -> None:
        """The first output of a prompt."""
        num_tokens = len(job.spec.token_ids)
        self.metrics.note_prompt(num_tokens, output.cached_tokens, extension)
        if job.times is not None:
            job.times.extension = extension
            job.times.first_at = self._clock.monotonic()

    def finished(self, job: Job, output: RequestOutput) -> None:
        """The last output of an answer."""
        if job.times is not None:
            answered = output.first_index + len(output.token_ids)
            job.times.num_tokens = answered - job.spec.num_emitted_tokens

    def pulls(self, job: Job, shipment: KvTransferStats) -> None:
        """Its hand-off begins; ``shipment`` is filled as it goes on."""
        if job.times is not None:
            job.times.shipment = shipment

    def pulled(self, shipment: KvTransferStats) -> None:
        self.metrics.note_pull(shipment)

    def refused(self, request_id: str, error: BatonError) -> None:
        """Before it became a job."""
        status = error_mapping(error).grpc_status
        self.metrics.note_failure(status)
        log.info("request_refused", request_id=request_id, status=status, error=str(error))

    def failed(self, job: Job, error: BatonError) -> None:
        status = error_mapping(error).grpc_status
        job.error = str(error) or status
        self.metrics.note_failure(status)
        log.warning("request_failed", status=status, error=job.error, **_named(job))

    def ended(self, job: Job, outcome: JobOutcome) -> None:
        """Once for each job."""
        now = self._clock.monotonic()
        self.metrics.note_end(job.task, outcome)
        if job.prefilled_at is not None:
            self.metrics.note_held(now - job.prefilled_at)
        if outcome in (JobOutcome.MOVED, JobOutcome.TURNED_AWAY):
            log.info(f"request_{outcome.value}", **_named(job))
        else:
            log.debug("request_ended", outcome=outcome.value, **_named(job))
        if job.times is not None and self._spans is not None:
            if job.times.first_at is None and job.prefilled_at is not None:
                job.times.first_at = job.times.began_at  # it is passed on, and was computed before
            name = f"{self._name}/{job.spec.request_id}/{job.task.value}"
            told = _attributes(job, outcome)
            self._spans.emit(job_spans(job.times, job.task, name, now, told, job.error))


def _named(job: Job) -> dict[str, object]:
    named: dict[str, object] = {
        "request_id": job.request_id,
        "epoch": job.spec.epoch,
        "task": job.task.value,
    }
    if job.times is not None:
        named["trace_id"] = job.times.above.trace_id
    return named


def _attributes(job: Job, outcome: JobOutcome) -> dict[str, Value]:
    return {
        "baton.request_id": job.request_id,
        "baton.epoch": job.spec.epoch,
        "baton.task": job.task.value,
        "baton.outcome": outcome.value,
        "baton.prompt_tokens": len(job.spec.token_ids),
    }
