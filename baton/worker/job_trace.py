"""When the stages of a traced job were, and the spans that they make."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.core.task import Task
from baton.core.trace_context import TraceContext
from baton.engine.result import ScheduledPrompt
from baton.obs.span import Span, SpanEvent, SpanKind, Value
from baton.worker.kv_import import KvTransferStats
from baton.worker.prefix_fetch import PrefixFetch

MAX_CHUNKS = 128
"""Events of one span, as many as OpenTelemetry keeps; of a longer prompt, the first ones."""


@dataclass(slots=True)
class JobTrace:
    """Seconds of the clock; None is what has not come (yet). ``above`` is the router's span."""

    above: TraceContext
    began_at: float
    extension: PrefixFetch | None = None
    admitted: ScheduledPrompt | None = None
    shipment: KvTransferStats | None = None
    first_at: float | None = None
    num_tokens: int = 0
    chunks: list[SpanEvent] = field(default_factory=list)

    def note_chunk(self, now: float, num_computed: int) -> None:
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(SpanEvent("chunk", now, {"baton.computed_tokens": num_computed}))


def job_spans(
    times: JobTrace,
    task: Task,
    name: str,
    ended_at: float,
    attributes: dict[str, Value],
    error: str,
) -> Iterator[Span]:
    """The job, and below it a span for each stage that it came to. ``name`` tells this job from all
    others of its trace."""
    job = times.above.child(name)
    yield Span(
        job,
        times.above.span_id,
        f"{task.value} job",
        times.began_at,
        ended_at,
        attributes,
        error=error,
        kind=SpanKind.SERVER,
    )
    for stage, began, ended, told, events in _stages(times, task, ended_at):
        context = job.child(stage)
        yield Span(context, job.span_id, stage, began, ended, told, events)


_Stage = tuple[str, float, float, dict[str, Value], tuple[SpanEvent, ...]]


def _stages(times: JobTrace, task: Task, ended_at: float) -> Iterator[_Stage]:
    if task is Task.DECODE:
        yield from _intake(times, ended_at)
        return
    yield from _fetch(times)
    yield from _prompt(times, ended_at)
    if times.first_at is not None:
        name = "hand-off" if task is Task.PREFILL else "decode"
        told: dict[str, Value] = {} if task is Task.PREFILL else {"baton.tokens": times.num_tokens}
        yield name, times.first_at, ended_at, told, ()


def _fetch(times: JobTrace) -> Iterator[_Stage]:
    extension = times.extension
    if extension is not None and extension.seconds > 0:
        told: dict[str, Value] = {
            "baton.way": extension.way or "none",
            "baton.dram_tokens": extension.dram_tokens,
            "baton.disk_tokens": extension.disk_tokens,
        }
        if extension.error:
            told["baton.error"] = extension.error
        began = extension.began_at
        yield "store fetch", began, began + extension.seconds, told, ()


def _prompt(times: JobTrace, ended_at: float) -> Iterator[_Stage]:
    admitted = times.admitted
    if admitted is None:
        return
    at = admitted.at_seconds
    yield "queue", at - admitted.waited_seconds, at, {}, ()
    computed_at = ended_at if times.first_at is None else times.first_at
    yield "prefill", at, computed_at, {}, tuple(times.chunks)


def _intake(times: JobTrace, ended_at: float) -> Iterator[_Stage]:
    """What a decode worker waits for: that the prompt is nearly computed, room, and the KV."""
    shipment = times.shipment
    if shipment is None or shipment.scheduled_at is None:
        yield "hand-off wait", times.began_at, ended_at, {}, ()
        return
    scheduled_at = shipment.scheduled_at
    yield "hand-off wait", times.began_at, scheduled_at, {}, ()
    reserved_at = ended_at if shipment.reserved_at is None else shipment.reserved_at
    yield "queue", scheduled_at, reserved_at, {}, ()
    if shipment.reserved_at is None:
        return
    told: dict[str, Value] = {
        "baton.transport": shipment.transport,
        "baton.bytes": shipment.size_bytes,
        "baton.read_seconds": shipment.reading_seconds,
        "baton.cached_blocks": shipment.num_cached_blocks,
    }
    landed_at = ended_at if shipment.landed_at is None else shipment.landed_at
    yield "pull", reserved_at, landed_at, told, ()
    if shipment.landed_at is not None:
        yield "decode", landed_at, ended_at, {"baton.tokens": times.num_tokens}, ()
