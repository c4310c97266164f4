"""Simulates KV transfers between the mock workers of one process. It keeps track of which decode
job waits for which prompt, and which prompts were prefilled before a decode job waited for them. No
data is transferred."""

from collections import OrderedDict
from collections.abc import Callable

from baton.core.ids import RequestId, WorkerId
from baton.worker.limits import MAX_UNCLAIMED_PROMPTS

PlacementKey = tuple[WorkerId, RequestId]
"""The prefill worker and the placement id."""

OnComputed = Callable[[bool], None]
"""Called when a prompt is prefilled. The argument says whether the answer ended with its first
token."""


class MockKvTransfers:
    """Notifies decode jobs when their prompt is prefilled."""

    def __init__(self) -> None:
        self._waiting: dict[PlacementKey, OnComputed] = {}
        self._unclaimed: OrderedDict[PlacementKey, bool] = OrderedDict()

    def mark_prefilled(self, worker: WorkerId, placement: RequestId, finished: bool) -> None:
        """Record that a placement's prompt is prefilled, and notify the job that waits for it."""
        key = worker, placement
        on_prefilled = self._waiting.pop(key, None)
        if on_prefilled is not None:
            on_prefilled(finished)
            return
        self._unclaimed[key] = finished
        if len(self._unclaimed) > MAX_UNCLAIMED_PROMPTS:
            self._unclaimed.popitem(last=False)

    def wait_for(self, worker: WorkerId, placement: RequestId, on_prefilled: OnComputed) -> None:
        """Call ``on_prefilled`` once, when the prompt is prefilled: immediately, if it already
        is."""
        finished = self._unclaimed.pop((worker, placement), None)
        if finished is None:
            self._waiting[worker, placement] = on_prefilled
        else:
            on_prefilled(finished)

    def cancel_wait(self, worker: WorkerId, placement: RequestId) -> None:
        """Undo :meth:`wait_for`: don't call ``on_prefilled`` when the placement's prompt has been
        prefilled."""
        self._waiting.pop((worker, placement), None)
