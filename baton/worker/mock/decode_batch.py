"""Answers at a mock worker: a step gives one token to each that runs, and one message to each
router's stream."""

import asyncio
from collections.abc import Callable

from baton.core.request import FinishReason
from baton.worker.mock.job import MockJob
from baton.worker.mock.model import MockModel
from baton.worker.mock.output_stream import MockStream

OnEnd = Callable[[MockJob, FinishReason], None]


class MockDecodeBatch:
    """Steps are ``step_seconds`` apart, by one timer. 0: a stream has its next step when its router
    has taken the last one (:meth:`pull`). ``on_end`` is called after an answer's last token."""

    def __init__(self, lexicon: MockModel, step_seconds: float, on_end: OnEnd) -> None:
        self._lexicon = lexicon
        self._step_seconds = step_seconds
        self._on_end = on_end
        self._running: dict[MockStream, dict[MockJob, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self.num_late_steps = 0
        """That were left out, since this process did not get to them in time."""

    @property
    def pulled(self) -> bool:
        return self._step_seconds == 0

    def join(self, job: MockJob) -> None:
        self._running.setdefault(job.stream, {})[job] = None
        if self.pulled:
            job.stream.wake()
        elif self._timer is None:
            self._due_at = asyncio.get_running_loop().time()
            self._arm()

    def leave(self, job: MockJob) -> None:
        """Does nothing for one that is not here."""
        jobs = self._running.get(job.stream, {})
        jobs.pop(job, None)
        if not jobs:
            self._running.pop(job.stream, None)

    @property
    def running(self) -> list[MockJob]:
        return [job for jobs in self._running.values() for job in jobs]

    def pull(self, stream: MockStream) -> bytes:
        """A step of the answers that run for it; empty when there are none."""
        said, ended = [], []
        for job in self._running.get(stream, ()):
            message, reason = job.say(self._lexicon)
            said.append(message)
            if reason is not None:
                ended.append((job, reason))
        for job, reason in ended:
            self.leave(job)
            self._on_end(job, reason)
        return b"".join(said)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._running.clear()

    def _arm(self) -> None:
        self._due_at += self._step_seconds
        self._timer = asyncio.get_running_loop().call_at(self._due_at, self._step)

    def _step(self) -> None:
        for stream in list(self._running):
            stream.put(self.pull(stream))
        if not self._running:
            self._timer = None
            return
        late = int((asyncio.get_running_loop().time() - self._due_at) / self._step_seconds)
        self.num_late_steps += late
        self._due_at += late * self._step_seconds
        self._arm()
