"""An event loop whose clock jumps to the next timer, so that timeouts take no real time. The loop
has neither threads nor sockets, so a run is fully determined by its seed."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from baton.concurrency.threads import RUN_INLINE

T = TypeVar("T")


class _Jumping(selectors.PollSelector):
    """A selector for a loop without external events: instead of waiting, it advances the clock."""

    jumped = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "deadlock: no callback is ready and no timer is set"
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
    """Run ``main`` in virtual time."""
    token = RUN_INLINE.set(True)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)
    finally:
        RUN_INLINE.reset(token)
