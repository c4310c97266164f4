"""An event loop whose clock jumps to the next timer: time-outs cost nothing, and a seed replays
everything, since there is neither a thread nor a socket in it."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from baton.concurrency.threads import RUN_INLINE

T = TypeVar("T")


class _Jumping(selectors.PollSelector):
    """Nothing ever arrives from outside; a wait is a jump."""

    jumped = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everybody waits for somebody else"
            self.jumped += max(timeout, 0.0)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.jumped


class LoopClock:
    """The running loop's time, as a :class:`baton.clock.Clock`."""

    def monotonic(self) -> float:
        return asyncio.get_event_loop().time()

    def wall_nanoseconds(self) -> int:
        return int(self.monotonic() * 1e9)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Runs ``main`` in virtual time."""
    token = RUN_INLINE.set(True)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)
    finally:
        RUN_INLINE.reset(token)
