"""A timeout that takes a quarter of the CPU time of ``asyncio.timeout``, for code that runs several
times per request."""

import asyncio
from types import TracebackType
from typing import Self


class TimeLimit:
    """``with TimeLimit(seconds):`` limits the time of the awaits in its body: when the time is up,
    the current await is cancelled, and TimeoutError is raised. ``expired`` distinguishes this
    timeout from others. Must be used within a task, and only once per instance."""

    __slots__ = ("_being_cancelled", "_seconds", "_task", "_timer", "expired")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "TimeLimit must be used within a task"
        self._task = task
        self._being_cancelled = task.cancelling()
        self._timer = task.get_loop().call_later(self._seconds, self._expire)
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

    def _expire(self) -> None:
        self.expired = True
        self._task.cancel()
