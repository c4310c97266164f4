"""Leader election with a shared lease: the leader is the process that holds the lease and renews it
in time.

Clocks of other machines are not trusted. The holder measures time from just before it requested a
renewal, and stops leading after two thirds of the lease's duration. A candidate measures time from
when it first saw the latest renewal, and takes the lease over after the lease's whole duration. So
two processes never lead at once, as long as their clocks run about equally fast, whatever time they
show.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from baton.clock import Clock
from baton.errors import BatonError

LEASE_SECONDS = 15
RENEW_SECONDS = 5.0
"""Interval between two checks, of the holder and of candidates."""

LEADING_FRACTION = 2 / 3
"""Fraction of the lease's duration for which its holder leads after a renewal: it may miss one
renewal."""

NO_HOLDER = ""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The content of the lease. ``holder`` is :data:`NO_HOLDER` after a resignation. ``renewals``
    changes with each renewal. ``version`` is assigned by the store; it is empty in a record that is
    to be created."""

    holder: str
    renewals: str = ""
    transitions: int = 0
    version: str = ""


class LeaseStore(Protocol):
    """Stores the lease. All methods raise Unavailable when the store can't be reached, and
    Unauthorized when it refuses access."""

    async def read(self) -> LeaseRecord | None:
        """Return the lease; None if it does not exist yet."""
        ...

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        """Write the lease with a new time of renewal, or create it if ``record.version`` is empty.
        Return the new record. Raises Overloaded if the lease has changed since ``record.version``
        was read, or if another candidate has created it first."""
        ...


class LeaderElection:
    """One candidate in the election. ``candidate_id`` is unique among the candidates. ``on_lead``
    is called when this candidate becomes the leader; check :attr:`is_leader` before each action
    that only the leader may take."""

    def __init__(
        self,
        store: LeaseStore,
        candidate_id: str,
        clock: Clock,
        on_lead: Callable[[], None] = lambda: None,
        lease_seconds: float = LEASE_SECONDS,
        renew_seconds: float = RENEW_SECONDS,
    ) -> None:
        assert candidate_id != NO_HOLDER
        self._store = store
        self._candidate_id = candidate_id
        self._clock = clock
        self._on_lead = on_lead
        self._lease_seconds = lease_seconds
        self._renew_seconds = renew_seconds
        self._seen: LeaseRecord | None = None
        self._seen_at = 0.0
        self._leads_until = float("-inf")
        self._last_failure = ""

    @property
    def is_leader(self) -> bool:
        return self._clock.monotonic() < self._leads_until

    async def run(self) -> None:
        """Take part in the election until cancelled. Call :meth:`resign` after that."""
        while True:
            await self.check_lease()
            await self._clock.sleep(self._renew_seconds)

    async def check_lease(self) -> None:
        """Renew the lease, or take it if it is free. If the store can't be reached, nothing is
        raised: leadership then ends by itself."""
        try:
            record = await self._store.read()
            self._observe(record)
            if record is None or self._may_take(record):
                await self._take_or_renew(record)
        except BatonError as error:
            self._log_failure(str(error))
        else:
            self._last_failure = ""

    async def resign(self) -> None:
        """Release the lease, so that no candidate has to wait for its expiry."""
        seen, was_leading = self._seen, self.is_leader
        self._leads_until = float("-inf")
        if seen is None or not was_leading:
            return
        try:
            self._seen = await self._store.write(replace(seen, holder=NO_HOLDER))
        except BatonError as error:
            self._log_failure(f"could not release the lease, which will expire: {error}")

    def _observe(self, record: LeaseRecord | None) -> None:
        """Remember the record, and the time when its latest renewal was first seen."""
        if record is None or self._seen is None or _renewal(record) != _renewal(self._seen):
            self._seen_at = self._clock.monotonic()
        self._seen = record

    def _may_take(self, record: LeaseRecord) -> bool:
        if record.holder in (self._candidate_id, NO_HOLDER):
            return True
        return self._clock.monotonic() - self._seen_at > self._lease_seconds

    async def _take_or_renew(self, record: LeaseRecord | None) -> None:
        was_leading, began = self.is_leader, self._clock.monotonic()
        was_mine = record is not None and record.holder == self._candidate_id
        transitions = record.transitions + (not was_mine) if record is not None else 0
        version = record.version if record is not None else ""
        wanted = LeaseRecord(self._candidate_id, transitions=transitions, version=version)
        self._seen = await self._store.write(wanted)
        self._seen_at = began
        self._leads_until = began + LEADING_FRACTION * self._lease_seconds
        if not was_leading:
            log.info("became_leader", holder=self._candidate_id)
            self._on_lead()

    def _log_failure(self, failure: str) -> None:
        """Log a failure, unless it is the same as the last one."""
        if failure != self._last_failure:
            log.warning("leader_lease_failed", error=failure)
        self._last_failure = failure


def _renewal(record: LeaseRecord) -> tuple[str, str, int]:
    return record.holder, record.renewals, record.transitions
