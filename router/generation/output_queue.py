"""What comes back for one placement of one request, from all of its workers."""

import asyncio
import math
from collections.abc import Callable, Sequence

from baton.core.ids import WorkerId
from baton.core.request import RequestOutput
from baton.errors import BatonError, Overloaded

QueuedOutput = tuple[WorkerId, RequestOutput | BatonError]
"""An output of a worker, or why nothing more will come from it."""

InlineConsumer = Callable[[RequestOutput], bool]
"""Does all that is to do with an output at once, or nothing, and says which."""

MAX_QUEUED_OUTPUTS = 8192
"""Outputs, of a token each and some hundred bytes. The reader waits only for its client, so
whoever leaves so many unread does not read at all."""


class OutputDeliveryError(BatonError):
    """A bug in what is done with an output: its request ends, and no other placement would help."""


class OutputQueue:
    """One reader; whoever writes never waits. Single event loop.

    While the reader waits, ``relay`` is offered each output first: no task has to wake for what it
    takes."""

    def __init__(self, max_unread: int = MAX_QUEUED_OUTPUTS) -> None:
        self.relay: Callable[[WorkerId, RequestOutput], bool] | None = None
        self._max_unread = max_unread
        self._items: list[QueuedOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # finding it takes a system call
        self._overflown = False

    def put(self, worker_id: WorkerId, item: RequestOutput | BatonError) -> None:
        waiter = self._waiter
        if waiter is not None and waiter.done():
            waiter = None
        relay = self.relay if waiter is not None else None
        if relay is not None and not isinstance(item, BatonError) and relay(worker_id, item):
            return
        if len(self._items) >= self._max_unread:
            self._overflown = True
            return
        self._items.append((worker_id, item))
        if waiter is not None:
            waiter.set_result(None)

    async def take(self, deadline: float = math.inf) -> Sequence[QueuedOutput]:
        """Waits for items and takes all. ``deadline`` is by the event loop's clock. Raises
        TimeoutError when it passes, Overloaded when some items were dropped."""
        while not self._items:
            await self._wait(deadline)
        if self._overflown:
            raise Overloaded("the client reads too slowly")
        items, self._items = self._items, []
        return items

    async def _wait(self, deadline: float) -> None:
        """A bare timer: this is done once for nearly each token, and ``asyncio.timeout`` takes ten
        times as long."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = loop.call_at(deadline, _time_out, waiter) if deadline < math.inf else None
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()


def _time_out(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
