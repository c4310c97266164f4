"""A few places for dear work, shared out among owners in turn."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from baton.errors import Overloaded


class FairSlots:
    """``num_slots`` at once, and of one owner one at a time, so that nobody can take all of them;
    owners who wait take turns. At most ``max_waiting`` wait, of one owner a quarter of those.
    Single event loop."""

    def __init__(self, num_slots: int, max_waiting: int, what: str) -> None:
        assert num_slots > 0 and max_waiting > 0
        self._num_slots = num_slots
        self._max_waiting = max_waiting
        self._max_of_one = max(max_waiting // 4, 1)
        self._what = what
        self._busy: set[str] = set()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self.num_waiting = 0

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncGenerator[None]:
        """Raises Overloaded when too many wait."""
        await self._take(owner)
        try:
            yield
        finally:
            self._give(owner)

    async def _take(self, owner: str) -> None:
        if owner not in self._busy and len(self._busy) < self._num_slots:
            self._busy.add(owner)
            return
        mine = len(self._waiting.get(owner, ()))
        if self.num_waiting >= self._max_waiting or mine >= self._max_of_one:
            raise Overloaded(
                f"too many {self._what} wait: {self.num_waiting}, {mine} of them yours"
            )
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(granted)
        self.num_waiting += 1
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._forget(owner, granted)
            else:
                self._give(owner)
            raise

    def _give(self, owner: str) -> None:
        self._busy.discard(owner)
        for next_owner in list(self._waiting):
            if len(self._busy) >= self._num_slots:
                return
            if next_owner not in self._busy:
                self._grant(next_owner)

    def _grant(self, owner: str) -> None:
        """The owner's oldest begins; its others wait behind all owners."""
        queue = self._waiting.pop(owner)
        while queue:
            granted = queue.popleft()
            self.num_waiting -= 1
            if not granted.done():  # else it was cancelled, and has not run since
                self._busy.add(owner)
                granted.set_result(None)
                break
        if queue:
            self._waiting[owner] = queue

    def _forget(self, owner: str, granted: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(owner)
        if queue is None or granted not in queue:
            return
        queue.remove(granted)
        self.num_waiting -= 1
        if not queue:
            del self._waiting[owner]
