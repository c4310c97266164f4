"""In-memory leases of background responses."""

from collections.abc import Sequence

from baton.clock import Clock
from router.responses.response_lease import LEASE_SECONDS, LeaseKey, LeaseState


class MemoryResponseLeases:
    """Implements :class:`router.responses.response_lease.ResponseLeases` for routers in one
    process. An ended lease stays in memory for ever."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._leases: dict[LeaseKey, tuple[LeaseState, float]] = {}

    async def renew(self, keys: Sequence[LeaseKey]) -> list[LeaseState]:
        return [self._renew(key) for key in keys]

    async def cancel(self, key: LeaseKey) -> bool:
        if self._state(key) not in (LeaseState.HELD, LeaseState.CANCELLED):
            return False
        self._leases[key] = LeaseState.CANCELLED, self._leases[key][1]
        return True

    async def end_if_lapsed(self, key: LeaseKey) -> bool:
        if self._state(key) in (LeaseState.HELD, LeaseState.CANCELLED):
            return False
        self._leases[key] = LeaseState.ENDED, float("inf")
        return True

    async def release(self, key: LeaseKey) -> None:
        self._leases.pop(key, None)

    async def close(self) -> None:
        pass

    def _renew(self, key: LeaseKey) -> LeaseState:
        state = self._state(key) or LeaseState.HELD
        if state is not LeaseState.ENDED:
            self._leases[key] = state, self._clock.monotonic() + LEASE_SECONDS
        return state

    def _state(self, key: LeaseKey) -> LeaseState | None:
        state, lapses_at = self._leases.get(key, (None, 0.0))
        return state if lapses_at > self._clock.monotonic() else None
