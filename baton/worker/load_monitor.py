"""Keeps the load that a worker reports in its heartbeats."""

from collections.abc import Iterable
from dataclasses import replace

from baton.core.worker_load import WorkerLoad
from baton.engine.result import StepResult
from baton.worker.answer_lengths import AnswerLengthStats
from baton.worker.context import WorkerContext
from baton.worker.job import Job
from baton.worker.load_report import IncomingRequest, measure_load
from baton.worker.prompt_time import PromptTime
from baton.worker.sides import DecodeSide, PrefillSide


class LoadMonitor:
    """Measures the worker's load. ``load`` is the load at the last :meth:`refresh`."""

    def __init__(self, context: WorkerContext, prefill: PrefillSide, decode: DecodeSide) -> None:
        self.load = WorkerLoad()
        self._engine = context.engine
        self._clock = context.clock
        self._gauges = context.telemetry.gauges
        self._prefill = prefill
        self._decode = decode
        self._answer_lengths = AnswerLengthStats()
        self._prompt_time = PromptTime()

    def record_answer(self, num_tokens: int) -> None:
        """Record the length of an answer that has ended."""
        self._answer_lengths.record(num_tokens)

    def record_step(self, result: StepResult) -> None:
        """Record for how long a step has computed prompts."""
        if result.work is not None and not result.work.is_decode:
            self._prompt_time.record(self._clock.monotonic(), result.work.seconds)

    async def refresh(self, jobs: Iterable[Job]) -> None:
        """Measure the load and the engine's gauges between two steps."""
        waiting = [job for job in jobs if job.admission_task]
        incoming = [IncomingRequest(job.spec, job.task, job.keys) for job in waiting]
        clock, mean = self._clock, self._answer_lengths.mean
        load, self._gauges.stats = await self._engine.call(
            lambda engine: (measure_load(engine, incoming, clock, mean), engine.stats())
        )
        link_rate = self._prefill.link_bytes_per_second or self._decode.link_bytes_per_second
        self.load = replace(
            load,
            answer_tokens=mean,
            short_answer_tokens=self._answer_lengths.short,
            link_bytes_per_second=link_rate,
            prompt_share=self._prompt_time.share(clock.monotonic()),
        )
