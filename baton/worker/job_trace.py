"""The times of a traced job's stages, and the trace spans made from them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.core.task import Task
from baton.core.trace_context import TraceContext
from baton.engine.result import ScheduledPrompt
from baton.obs.span import Span, SpanEvent, SpanKind, Value
from baton.worker.kv_transfer_stats import KvTransferStats
from baton.worker.limits import MAX_CHUNK_EVENTS
from baton.worker.prefix_fetch_stats import PrefixFetchStats


@dataclass(slots=True)
class JobTrace:
    """The events of a traced job. Times are in seconds of the monotonic clock; fields of events
    that have not happened are None. ``parent`` is the router's span."""

    parent: TraceContext
    started_at: float
    prefix_fetch: PrefixFetchStats | None = None
    scheduled_prompt: ScheduledPrompt | None = None
    kv_transfer: KvTransferStats | None = None
    first_output_at: float | None = None
    num_answer_tokens: int = 0
    chunks: list[SpanEvent] = field(default_factory=list)

    def record_chunk(self, now: float, num_computed: int) -> None:
        if len(self.chunks) < MAX_CHUNK_EVENTS:
            self.chunks.append(SpanEvent("chunk", now, {"baton.computed_tokens": num_computed}))


def job_spans(
    trace: JobTrace,
    task: Task,
    name: str,
    ended_at: float,
    attributes: dict[str, Value],
    error: str,
) -> Iterator[Span]:
    """Yield the job's span and a child span for each stage that the job reached. The id of the
    job's span is derived from ``name``, which must be unique within the trace."""
    job = trace.parent.child(name)
    yield Span(
        job,
        trace.parent.span_id,
        f"{task.value} job",
        trace.started_at,
        ended_at,
        attributes,
        error=error,
        kind=SpanKind.SERVER,
    )
    for stage, start, end, stage_attributes, events in _stages(trace, task, ended_at):
        context = job.child(stage)
        yield Span(context, job.span_id, stage, start, end, stage_attributes, events)


_Stage = tuple[str, float, float, dict[str, Value], tuple[SpanEvent, ...]]
"""Name, start, end, attributes, events."""


def _stages(times: JobTrace, task: Task, ended_at: float) -> Iterator[_Stage]:
    if task is Task.DECODE:
        yield from _import_stages(times, ended_at)
        return
    yield from _fetch_stages(times)
    yield from _prefill_stages(times, ended_at)
    if times.first_output_at is None:
        return
    if task is Task.PREFILL:
        yield "kv export", times.first_output_at, ended_at, {}, ()
    else:
        yield (
            "decode",
            times.first_output_at,
            ended_at,
            {"baton.tokens": times.num_answer_tokens},
            (),
        )


def _fetch_stages(times: JobTrace) -> Iterator[_Stage]:
    fetch = times.prefix_fetch
    if fetch is not None and fetch.wait_seconds > 0:
        attributes: dict[str, Value] = {
            "baton.fetch_mode": fetch.mode or "none",
            "baton.dram_tokens": fetch.dram_tokens,
            "baton.disk_tokens": fetch.disk_tokens,
        }
        if fetch.error:
            attributes["baton.error"] = fetch.error
        start = fetch.started_at
        yield "store fetch", start, start + fetch.wait_seconds, attributes, ()


def _prefill_stages(times: JobTrace, ended_at: float) -> Iterator[_Stage]:
    admitted = times.scheduled_prompt
    if admitted is None:
        return
    at = admitted.start_seconds
    yield "queue", at - admitted.waited_seconds, at, {}, ()
    computed_at = ended_at if times.first_output_at is None else times.first_output_at
    yield "prefill", at, computed_at, {}, tuple(times.chunks)


def _import_stages(times: JobTrace, ended_at: float) -> Iterator[_Stage]:
    """Yield the stages that a decode job reached. In order, they are: waiting until the prompt is
    nearly prefilled, waiting for free blocks, importing the KV, decoding."""
    transfer = times.kv_transfer
    if transfer is None or transfer.scheduled_at is None:
        yield "kv transfer wait", times.started_at, ended_at, {}, ()
        return
    scheduled_at = transfer.scheduled_at
    yield "kv transfer wait", times.started_at, scheduled_at, {}, ()
    reserved_at = ended_at if transfer.reserved_at is None else transfer.reserved_at
    yield "queue", scheduled_at, reserved_at, {}, ()
    if transfer.reserved_at is None:
        return
    attributes: dict[str, Value] = {
        "baton.transport": transfer.transport,
        "baton.bytes": transfer.size_bytes,
        "baton.raw_bytes": transfer.raw_bytes,
        "baton.codec": transfer.codec.value,
        "baton.read_seconds": transfer.read_seconds,
        "baton.cached_blocks": transfer.num_cached_blocks,
    }
    imported_at = ended_at if transfer.completed_at is None else transfer.completed_at
    yield "kv import", reserved_at, imported_at, attributes, ()
    if transfer.completed_at is not None:
        yield "decode", imported_at, ended_at, {"baton.tokens": times.num_answer_tokens}, ()
