"""The queue of outputs for one placement of one request, from all of its workers."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence

from baton.core.ids import WorkerId
from baton.core.request import RequestOutput, count_logprobs
from baton.errors import BatonError, Overloaded
from baton.rpc.convert.outputs import outputs_to_proto
from baton.rpc.worker_stream import decode_outputs
from router.limits import MAX_QUEUED_LOGPROBS, MAX_QUEUED_OUTPUTS, PACKED_OUTPUTS

QueuedOutput = tuple[WorkerId, RequestOutput | BatonError]
"""An output from a worker, or the error that ended the worker's outputs."""

OutputReceiver = Callable[[WorkerId, RequestOutput | BatonError], None]
"""Takes an output from a worker, or the error that ended the worker's outputs. Does not wait."""


class OutputDeliveryError(BatonError):
    """An output could not be delivered because of a bug. The error ends the request; another
    placement would not help."""


class OutputQueue:
    """A queue with one reader, and writers that never wait. Logprobs are counted with their
    alternatives, but not those of a prompt, which have a budget of their own
    (:class:`~router.serving.memory_budgets.LogprobsBudget`). Not thread-safe: use it on one event
    loop."""

    def __init__(
        self, max_unread: int = MAX_QUEUED_OUTPUTS, max_logprobs: int = MAX_QUEUED_LOGPROBS
    ) -> None:
        self._max_unread = max_unread
        self._max_logprobs = max_logprobs
        self._num_logprobs = 0
        self._num_items = 0
        self._items: list[QueuedOutput] = []
        self._packed: deque[tuple[WorkerId, bytes] | list[QueuedOutput]] = deque()
        """The items before those of ``_items``. Those from several workers, and errors, are not
        packed."""
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
        :meth:`get_batch` then raises Overloaded."""
        num_logprobs = self._num_logprobs + _num_logprobs(item)
        if self._num_items >= self._max_unread or num_logprobs > self._max_logprobs:
            self._has_overflown = True
        else:
            self._num_logprobs = num_logprobs
            self._num_items += 1
            self._items.append((worker_id, item))
            if len(self._items) == PACKED_OUTPUTS:
                self._packed.append(_pack(self._items))
                self._items = []
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get_batch(self, deadline: float = math.inf) -> Sequence[QueuedOutput]:
        """Wait for items and return the oldest ones. ``deadline`` is a time of the event loop's
        clock. Raises TimeoutError when the deadline passes, and Overloaded if items were
        dropped."""
        while not self._num_items and not self._has_overflown:
            await self._wait(deadline)
        if self._has_overflown:
            raise Overloaded("the client reads too slowly")
        if self._packed:
            items = _unpack(self._packed.popleft())
        else:
            items, self._items = self._items, []
        self._num_items -= len(items)
        self._num_logprobs -= sum(_num_logprobs(item) for _, item in items)
        return items

    def clear(self) -> None:
        """Drop all items."""
        self._items, self._num_items, self._num_logprobs = [], 0, 0
        self._packed.clear()

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


def _num_logprobs(item: RequestOutput | BatonError) -> int:
    return count_logprobs(item.logprobs) if isinstance(item, RequestOutput) and item.logprobs else 0


def _pack(items: list[QueuedOutput]) -> tuple[WorkerId, bytes] | list[QueuedOutput]:
    """Return a worker's outputs as the message in which a worker sends them."""
    worker_id = items[0][0]
    outputs = [
        item for sender, item in items if isinstance(item, RequestOutput) and sender == worker_id
    ]
    if len(outputs) < len(items):
        return items
    return worker_id, outputs_to_proto(outputs).SerializeToString()


def _unpack(batch: tuple[WorkerId, bytes] | list[QueuedOutput]) -> list[QueuedOutput]:
    if isinstance(batch, list):
        return batch
    worker_id, message = batch
    return [(worker_id, output) for output in decode_outputs(message)]


def _time_out(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
