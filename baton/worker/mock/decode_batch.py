"""The decode batch of a mock worker. A step generates one token per running request, and sends one
message to each router's stream."""

import asyncio
from collections.abc import Callable

from baton.core.request import FinishReason
from baton.worker.mock.job import MockJob
from baton.worker.mock.model import MockModel
from baton.worker.mock.output_stream import MockStream

OnEnd = Callable[[MockJob, FinishReason], None]


class MockDecodeBatch:
    """Runs a step every ``step_seconds``, with a single timer. If ``step_seconds`` is 0, a stream's
    next step runs on demand, when its router has read the previous step's outputs
    (:meth:`next_step`). ``on_end`` is called after an answer's last token."""

    def __init__(self, model: MockModel, step_seconds: float, on_end: OnEnd) -> None:
        self._model = model
        self._step_seconds = step_seconds
        self._on_end = on_end
        self._running: dict[MockStream, dict[MockJob, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self.num_late_steps = 0
        """Number of steps that were skipped because the process was too slow."""

    @property
    def is_on_demand(self) -> bool:
        return self._step_seconds == 0

    def add(self, job: MockJob) -> None:
        self._running.setdefault(job.stream, {})[job] = None
        if self.is_on_demand:
            job.stream.wake()
        elif self._timer is None:
            self._due_at = asyncio.get_running_loop().time()
            self._schedule_step()

    def remove(self, job: MockJob) -> None:
        """Remove a job; does nothing if it is not in the batch."""
        jobs = self._running.get(job.stream, {})
        jobs.pop(job, None)
        if not jobs:
            self._running.pop(job.stream, None)

    @property
    def running(self) -> list[MockJob]:
        return [job for jobs in self._running.values() for job in jobs]

    def next_step(self, stream: MockStream) -> bytes:
        """Generate the next token of each answer of the stream, and return these tokens as one
        encoded message; it is empty if the stream has no running answers."""
        messages, ended = [], []
        for job in self._running.get(stream, ()):
            message, reason = job.encode_next_token(self._model)
            messages.append(message)
            if reason is not None:
                ended.append((job, reason))
        for job, reason in ended:
            self.remove(job)
            self._on_end(job, reason)
        return b"".join(messages)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._running.clear()

    def _schedule_step(self) -> None:
        self._due_at += self._step_seconds
        self._timer = asyncio.get_running_loop().call_at(self._due_at, self._step)

    def _step(self) -> None:
        for stream in list(self._running):
            stream.put(self.next_step(stream))
        if not self._running:
            self._timer = None
            return
        num_late = int((asyncio.get_running_loop().time() - self._due_at) / self._step_seconds)
        self.num_late_steps += num_late
        self._due_at += num_late * self._step_seconds
        self._schedule_step()
