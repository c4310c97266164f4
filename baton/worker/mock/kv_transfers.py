"""Hand-offs between the mock workers of one process: who waits for which prompt, and which were
computed before anybody waited. There is nothing to ship."""

from collections import OrderedDict
from collections.abc import Callable

from baton.core.ids import RequestId, WorkerId

MAX_UNCLAIMED_PROMPTS = 4096
"""Computed prompts that nobody has come for; what came first is forgotten first."""

PlacementKey = tuple[WorkerId, RequestId]
"""Whose, and of which placement."""

OnComputed = Callable[[bool], None]
"""Gets whether the answer has ended with its first token."""


class MockKvTransfers:
    def __init__(self) -> None:
        self._waiting: dict[PlacementKey, OnComputed] = {}
        self._unread: OrderedDict[PlacementKey, bool] = OrderedDict()

    def computed(self, worker: WorkerId, placement: RequestId, finished: bool) -> None:
        name = worker, placement
        reader = self._waiting.pop(name, None)
        if reader is not None:
            reader(finished)
            return
        self._unread[name] = finished
        if len(self._unread) > MAX_UNCLAIMED_PROMPTS:
            self._unread.popitem(last=False)

    def expect(self, worker: WorkerId, placement: RequestId, reader: OnComputed) -> None:
        """``reader`` is called once, perhaps at once, unless it is forgotten before."""
        finished = self._unread.pop((worker, placement), None)
        if finished is None:
            self._waiting[worker, placement] = reader
        else:
            reader(finished)

    def forget(self, worker: WorkerId, placement: RequestId) -> None:
        """Its reader left."""
        self._waiting.pop((worker, placement), None)
