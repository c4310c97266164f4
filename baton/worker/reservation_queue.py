"""Who asks the engine for room next: of those that wait, the shortest predicted answer first."""

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

from baton.core.priority import Priority

T = TypeVar("T")

TOKENS_PER_WAITED_SECOND = 200.0
"""How many tokens less outweigh a second of waiting."""

PATIENCE_SECONDS = 15.0
"""Nobody is passed by who asks later than this after it: well below what may be waited in all."""


@dataclass(slots=True, eq=False)
class _Waiter:
    turn_seconds: float
    woken: asyncio.Event = field(default_factory=asyncio.Event)


_turn = attrgetter("turn_seconds")


class ReservationQueue:
    """One asks at a time, the first in line; who gets nothing blocks those behind it."""

    def __init__(self) -> None:
        self._asks: list[_Waiter] = []

    def __len__(self) -> int:
        return len(self._asks)

    def notice(self) -> None:
        """There may be more room than there was."""
        if self._asks:
            self._asks[0].woken.set()

    async def get(
        self,
        now_seconds: float,
        answer_tokens: int,
        ask: Callable[[], Awaitable[T | None]],
        priority: Priority = Priority.NORMAL,
    ) -> T:
        """Calls ``ask`` when it is its turn and there may be room, until it gives something. Each
        step of priority is worth as much as the patience."""
        own = min(answer_tokens / TOKENS_PER_WAITED_SECOND, PATIENCE_SECONDS)
        mine = _Waiter(now_seconds + own + priority * PATIENCE_SECONDS)
        insort(self._asks, mine, key=_turn)
        try:
            while True:
                mine.woken.clear()
                if self._asks[0] is mine:
                    got = await ask()
                    if got is not None:
                        return got
                await mine.woken.wait()
        finally:
            self._asks.remove(mine)
            self.notice()
