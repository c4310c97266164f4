"""Records a worker's telemetry: metrics, and trace spans and log lines for each request."""

import structlog
from prometheus_client import CollectorRegistry

from baton.clock import Clock
from baton.core.request import RequestOutput
from baton.core.trace_context import parse_traceparent
from baton.engine.result import StepResult
from baton.errors import BatonError, error_mapping
from baton.obs.span import SpanSink, Value
from baton.worker.job import Job, JobOutcome
from baton.worker.job_table import JobTable
from baton.worker.job_trace import JobTrace, job_spans
from baton.worker.kv_transfer_stats import KvTransferStats
from baton.worker.metrics import EngineGauges, WorkerMetrics
from baton.worker.prefix_fetch_stats import PrefixFetchStats

log = structlog.get_logger(__name__)


class WorkerTelemetry:
    """Records the events of a worker's requests. ``name`` is the worker's name. If ``spans`` is
    None, nothing is traced. For speed, there is no call per token."""

    def __init__(
        self, name: str, registry: CollectorRegistry, clock: Clock, spans: SpanSink | None = None
    ) -> None:
        self.metrics = WorkerMetrics(registry)
        self.gauges = EngineGauges()
        registry.register(self.gauges)
        self._name = name
        self._clock = clock
        self._spans = spans

    def use_spans(self, spans: SpanSink | None) -> None:
        """From now on, emit spans to the sink ``spans``, or trace nothing if it is None."""
        self._spans = spans

    def record_started(self, job: Job) -> None:
        context = parse_traceparent(job.spec.trace) if self._spans and job.spec.trace else None
        if context is not None:
            job.trace = JobTrace(context, self._clock.monotonic())

    def record_step(self, result: StepResult, jobs: JobTable) -> None:
        """Record a step of the engine that runs ``jobs``."""
        if result.work is not None:
            self.metrics.record_step(result.work, result.admitted)
        for request_id in result.preempted:
            job = jobs.get(request_id)
            if job is not None:
                log.info("request_preempted", **_log_fields(job))
        if self._spans is None:
            return
        for admitted in result.admitted:
            job = jobs.get(admitted.request_id)
            if job is not None and job.trace is not None:
                job.trace.scheduled_prompt = admitted
        for progress in result.progress:
            job = jobs.get(progress.request_id)
            if job is not None and job.trace is not None:
                job.trace.record_chunk(self._clock.monotonic(), progress.num_computed_tokens)

    def record_first_output(self, job: Job, output: RequestOutput, fetch: PrefixFetchStats) -> None:
        """Record the first output of a request."""
        num_tokens = len(job.spec.token_ids)
        self.metrics.record_prompt(num_tokens, output.cached_tokens, fetch)
        if job.trace is not None:
            job.trace.prefix_fetch = fetch
            job.trace.first_output_at = self._clock.monotonic()

    def record_answer_finished(self, job: Job, output: RequestOutput) -> None:
        """Record the last output of an answer."""
        if job.trace is not None:
            answered = output.first_index + len(output.token_ids)
            job.trace.num_answer_tokens = answered - job.spec.num_emitted_tokens

    def record_import_started(self, job: Job, stats: KvTransferStats) -> None:
        """Record the start of a KV import; ``stats`` are updated as it progresses."""
        if job.trace is not None:
            job.trace.kv_transfer = stats

    def record_import_finished(self, stats: KvTransferStats) -> None:
        self.metrics.record_kv_import(stats)

    def record_rejected(self, request_id: str, error: BatonError) -> None:
        """Record a request that was rejected before it became a job."""
        status = error_mapping(error).grpc_status
        self.metrics.record_failure(status)
        log.info("request_refused", request_id=request_id, status=status, error=str(error))

    def record_failed(self, job: Job, error: BatonError) -> None:
        status = error_mapping(error).grpc_status
        job.error = str(error) or status
        self.metrics.record_failure(status)
        log.warning("request_failed", status=status, error=job.error, **_log_fields(job))

    def record_ended(self, job: Job, outcome: JobOutcome) -> None:
        """Record the end of a job; called once for each job."""
        now = self._clock.monotonic()
        self.metrics.record_ended(job.task, outcome)
        if job.prefilled_at is not None:
            self.metrics.record_export_duration(now - job.prefilled_at)
        if outcome in (JobOutcome.MIGRATED, JobOutcome.REROUTED):
            log.info(f"request_{outcome.value}", **_log_fields(job))
        else:
            log.debug("request_ended", outcome=outcome.value, **_log_fields(job))
        if job.trace is not None and self._spans is not None:
            if job.trace.first_output_at is None and job.prefilled_at is not None:
                job.trace.first_output_at = (
                    job.trace.started_at
                )  # a migrated answer, whose KV was computed before this job
            name = f"{self._name}/{job.spec.request_id}/{job.task.value}"
            attributes = _attributes(job, outcome)
            self._spans.emit(job_spans(job.trace, job.task, name, now, attributes, job.error))


def _log_fields(job: Job) -> dict[str, object]:
    fields: dict[str, object] = {
        "request_id": job.request_id,
        "epoch": job.spec.epoch,
        "task": job.task.value,
    }
    if job.trace is not None:
        fields["trace_id"] = job.trace.parent.trace_id
    return fields


def _attributes(job: Job, outcome: JobOutcome) -> dict[str, Value]:
    return {
        "baton.request_id": job.request_id,
        "baton.epoch": job.spec.epoch,
        "baton.task": job.task.value,
        "baton.outcome": outcome.value,
        "baton.prompt_tokens": len(job.spec.token_ids),
    }
