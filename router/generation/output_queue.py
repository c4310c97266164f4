"""The queue of outputs for one placement of one request, from all of its workers."""

import asyncio
import math
from collections.abc import Callable, Sequence

from baton.core.ids import WorkerId
from baton.core.request import RequestOutput
from baton.errors import BatonError, Overloaded

QueuedOutput = tuple[WorkerId, RequestOutput | BatonError]
"""An output from a worker, or the error that ended the worker's outputs."""

OutputReceiver = Callable[[WorkerId, RequestOutput | BatonError], None]
"""Takes an output from a worker, or the error that ended the worker's outputs. Does not wait."""

MAX_QUEUED_OUTPUTS = 8192
"""The maximum number of queued outputs, of one token and some hundred bytes each. The queue's
reader waits for nothing but the client, so if this many outputs are unread, the client has stopped
reading."""


class OutputDeliveryError(BatonError):
    """An output could not be delivered because of a bug. The error ends the request; another
    placement would not help."""


class OutputQueue:
    """A queue with one reader, and writers that never wait. Not thread-safe: use it on one event
    loop."""

    def __init__(self, max_unread: int = MAX_QUEUED_OUTPUTS) -> None:
        self._max_unread = max_unread
        self._items: list[QueuedOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop, kept because finding it takes a system call."""
        self._has_overflown = False

    @property
    def has_waiting_reader(self) -> bool:
        """Whether the reader is waiting and has not been woken; if so, the queue is empty."""
        return self._waiter is not None and not self._waiter.done()

    def put(self, worker_id: WorkerId, item: RequestOutput | BatonError) -> None:
        """Append an item, and wake the reader. If the queue is full, drop the item; every later
        :meth:`get_all` then raises Overloaded."""
        if len(self._items) >= self._max_unread:
            self._has_overflown = True
            return
        self._items.append((worker_id, item))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get_all(self, deadline: float = math.inf) -> Sequence[QueuedOutput]:
        """Wait for items and return all of them. ``deadline`` is a time of the event loop's clock.
        Raises TimeoutError when the deadline passes, and Overloaded if items were dropped."""
        while not self._items:
            await self._wait(deadline)
        if self._has_overflown:
            raise Overloaded("the client reads too slowly")
        items, self._items = self._items, []
        return items

    async def _wait(self, deadline: float) -> None:
        """Wait until an item is put. Raises TimeoutError at ``deadline``. This runs about once per
        token, so it uses a bare timer of the event loop: ``asyncio.timeout`` takes ten times as
        long."""
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
