"""Turns of requests on the event loop, which models share fairly, and the tenants of each model."""

import asyncio

from baton.concurrency.fair_queue import FairQueue
from baton.core.ids import TenantId
from router.limits import BYTES_PER_ITERATION

MIN_TURN_BYTES = 1024
"""A shorter request counts as this many bytes, since there is more to do for it than tokenising."""

_Turn = tuple[int, "asyncio.Future[None]"]


class FairTurns:
    """Spreads the tokenising of many small prompts over iterations of the event loop, so that no
    iteration takes long. Models take turns, and within each model its tenants do: however many
    requests for one model arrive at once, a request for another one waits for few of them. Use it
    on one event loop.

    This only delays requests, and does not limit how many wait: each of them is a request in
    progress, and the router limits the number of these."""

    def __init__(self, bytes_per_iteration: int = BYTES_PER_ITERATION) -> None:
        self._bytes_per_iteration = bytes_per_iteration
        self._num_granted_bytes = 0
        """The bytes of the turns that fall into this iteration."""
        self._models: FairQueue[FairQueue[_Turn]] = FairQueue()
        """For each waiting request, the queue of its model's tenants."""
        self._tenants: dict[str, FairQueue[_Turn]] = {}
        self._has_callback = False

    async def wait(self, model: str, tenant: TenantId, size_bytes: int) -> None:
        """Wait until it is the turn of a request with a body of ``size_bytes``. Returns at once if
        nobody else waits and there is time left in this iteration."""
        size_bytes = max(size_bytes, MIN_TURN_BYTES)
        if not self._models and self._has_time:
            self._num_granted_bytes += size_bytes
            self._schedule()
            return
        turn = asyncio.get_running_loop().create_future()
        tenants = self._tenants.setdefault(model, FairQueue())
        tenants.add(tenant, (size_bytes, turn))
        self._models.add(model, tenants)
        await turn

    @property
    def num_waiting(self) -> int:
        return len(self._models)

    @property
    def _has_time(self) -> bool:
        return self._num_granted_bytes < self._bytes_per_iteration

    def _schedule(self) -> None:
        if not self._has_callback:
            self._has_callback = True
            asyncio.get_running_loop().call_soon(self._begin_iteration)

    def _begin_iteration(self) -> None:
        """Grant turns. The requests that get them continue in the next iteration, in which this is
        called again, after they have."""
        self._has_callback = False
        self._num_granted_bytes = 0
        while self._has_time and (next_model := self._models.take()) is not None:
            model, tenants = next_model
            next_turn = tenants.take()
            assert next_turn is not None, "a model has as many turns as requests"
            if not tenants:
                del self._tenants[model]
            size_bytes, turn = next_turn[1]
            if not turn.done():  # else the request was cancelled
                turn.set_result(None)
                self._num_granted_bytes += size_bytes
        if self._num_granted_bytes:
            self._schedule()
