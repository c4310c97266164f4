"""A few concurrency slots for expensive work, shared fairly among owners."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from baton.errors import Overloaded


class FairSlots:
    """Shares ``num_slots`` slots among owners. An owner holds at most one slot, so that no owner
    can take all of them; waiting owners are served in turn. At most ``max_waiting`` calls may wait,
    and at most a quarter of that number for one owner. ``what`` names the work in errors. For use
    in a single event loop."""

    def __init__(self, num_slots: int, max_waiting: int, what: str) -> None:
        assert num_slots > 0 and max_waiting > 0
        self._num_slots = num_slots
        self._max_waiting = max_waiting
        self._max_waiting_per_owner = max(max_waiting // 4, 1)
        self._what = what
        self._busy: set[str] = set()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self.num_waiting = 0

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncGenerator[None]:
        """Hold a slot, waiting for one if necessary. Raises Overloaded when too many calls wait."""
        await self._acquire(owner)
        try:
            yield
        finally:
            self._release(owner)

    async def _acquire(self, owner: str) -> None:
        if owner not in self._busy and len(self._busy) < self._num_slots:
            self._busy.add(owner)
            return
        mine = len(self._waiting.get(owner, ()))
        if self.num_waiting >= self._max_waiting or mine >= self._max_waiting_per_owner:
            raise Overloaded(
                f"too many {self._what} are waiting: {self.num_waiting} in total (limit "
                f"{self._max_waiting}), {mine} of this tenant (limit "
                f"{self._max_waiting_per_owner})"
            )
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(granted)
        self.num_waiting += 1
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._remove_waiter(owner, granted)
            else:
                self._release(owner)
            raise

    def _release(self, owner: str) -> None:
        self._busy.discard(owner)
        for next_owner in list(self._waiting):
            if len(self._busy) >= self._num_slots:
                return
            if next_owner not in self._busy:
                self._grant(next_owner)

    def _grant(self, owner: str) -> None:
        """Give the owner's oldest waiting call a slot. The owner's other calls then wait behind
        those of all other owners."""
        queue = self._waiting.pop(owner)
        while queue:
            granted = queue.popleft()
            self.num_waiting -= 1
            if not granted.done():  # else: a cancelled call whose task has not run since
                self._busy.add(owner)
                granted.set_result(None)
                break
        if queue:
            self._waiting[owner] = queue

    def _remove_waiter(self, owner: str, granted: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(owner)
        if queue is None or granted not in queue:
            return
        queue.remove(granted)
        self.num_waiting -= 1
        if not queue:
            del self._waiting[owner]
