"""The queue of requests that wait for free KV blocks, ordered by arrival, predicted length of the
answer, and priority."""

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

from baton.core.priority import Priority

T = TypeVar("T")

TOKENS_PER_WAITED_SECOND = 200.0
"""If the answer of a request is predicted to be this many tokens shorter than another's, the
request is treated as if it had waited one second longer."""

PATIENCE_SECONDS = 15.0
"""A request is never overtaken by one of the same priority that arrives more than this many seconds
later."""


@dataclass(slots=True, eq=False)
class _Waiter:
    turn_seconds: float
    woken: asyncio.Event = field(default_factory=asyncio.Event)


_turn = attrgetter("turn_seconds")


class ReservationQueue:
    """A queue of waiters. Only the first one tries to reserve; as long as it fails, it blocks those
    behind it."""

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def notify_blocks_freed(self) -> None:
        """Let the first waiter try again: blocks may have become free."""
        if self._waiters:
            self._waiters[0].woken.set()

    async def reserve(
        self,
        now_seconds: float,
        answer_tokens: int,
        try_reserve: Callable[[], Awaitable[T | None]],
        priority: Priority = Priority.NORMAL,
    ) -> T:
        """Wait for a reservation: call ``try_reserve`` whenever this waiter is the first and blocks
        may be free, until it returns a reservation. Each level of priority counts as
        :data:`PATIENCE_SECONDS` of waiting."""
        delay = min(answer_tokens / TOKENS_PER_WAITED_SECOND, PATIENCE_SECONDS)
        waiter = _Waiter(now_seconds + delay + priority * PATIENCE_SECONDS)
        insort(self._waiters, waiter, key=_turn)
        try:
            while True:
                waiter.woken.clear()
                if self._waiters[0] is waiter:
                    reserved = await try_reserve()
                    if reserved is not None:
                        return reserved
                await waiter.woken.wait()
        finally:
            self._waiters.remove(waiter)
            self.notify_blocks_freed()
