"""Who of several leads: whoever holds a lease that all can see, and has renewed it in time.

No clock of another machine is believed. Who holds the lease counts from the moment before it asked
for the renewal, and stops leading after two thirds of the lease's time; who waits counts from the
moment when it first saw that renewal, and takes the lease over after its whole time. So two never
lead at once, as long as their clocks run about equally fast, whatever they show.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from baton.clock import Clock
from baton.errors import BatonError

LEASE_SECONDS = 15
RENEW_SECONDS = 5.0
"""Between two looks, of those who wait, too."""

LEADING_SHARE = 2 / 3
"""Of the lease's time, that its holder counts on after a renewal: it may miss one."""

NO_HOLDER = ""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """``holder`` is :data:`NO_HOLDER` for one that was given back. ``renewals`` tells one renewal
    from the next. ``version`` is the store's, and empty for a record that is new to it."""

    holder: str
    renewals: str = ""
    transitions: int = 0
    version: str = ""


class LeaseStore(Protocol):
    """Where the lease is kept. All methods raise Unavailable and Unauthorized."""

    async def read(self) -> LeaseRecord | None:
        """None when there is none yet."""
        ...

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        """As it is then: renewed now. Raises Overloaded when it has changed since ``version`` was
        read, or is there already."""
        ...


class LeaderElection:
    """``me`` is unique among those that want the lease. ``on_lead`` is called when it begins to
    lead; whoever is about to act asks :attr:`leads`."""

    def __init__(
        self,
        store: LeaseStore,
        me: str,
        clock: Clock,
        on_lead: Callable[[], None] = lambda: None,
        lease_seconds: float = LEASE_SECONDS,
        renew_seconds: float = RENEW_SECONDS,
    ) -> None:
        assert me != NO_HOLDER
        self._store = store
        self._me = me
        self._clock = clock
        self._on_lead = on_lead
        self._lease_seconds = lease_seconds
        self._renew_seconds = renew_seconds
        self._seen: LeaseRecord | None = None
        self._seen_at = 0.0
        self._leads_until = float("-inf")
        self._told = ""

    @property
    def leads(self) -> bool:
        return self._clock.monotonic() < self._leads_until

    async def run(self) -> None:
        """Until cancelled. Whoever leaves calls :meth:`resign` then."""
        while True:
            await self.look()
            await self._clock.sleep(self._renew_seconds)

    async def look(self) -> None:
        """Renews the lease, or takes it when nobody holds it. A store that can't be reached is no
        reason to fail: leadership ends by itself."""
        try:
            record = await self._store.read()
            self._note(record)
            if record is None or self._may_have(record):
                await self._take(record)
        except BatonError as error:
            self._tell(str(error))
        else:
            self._told = ""

    async def resign(self) -> None:
        """Gives the lease back, so that nobody waits for its end."""
        seen, was_leading = self._seen, self.leads
        self._leads_until = float("-inf")
        if seen is None or not was_leading:
            return
        try:
            self._seen = await self._store.write(replace(seen, holder=NO_HOLDER))
        except BatonError as error:
            self._tell(f"the lease ends by itself: {error}")

    def _note(self, record: LeaseRecord | None) -> None:
        """When a renewal was first seen."""
        if record is None or self._seen is None or _renewal(record) != _renewal(self._seen):
            self._seen_at = self._clock.monotonic()
        self._seen = record

    def _may_have(self, record: LeaseRecord) -> bool:
        if record.holder in (self._me, NO_HOLDER):
            return True
        return self._clock.monotonic() - self._seen_at > self._lease_seconds

    async def _take(self, record: LeaseRecord | None) -> None:
        led, began = self.leads, self._clock.monotonic()
        was_mine = record is not None and record.holder == self._me
        transitions = record.transitions + (not was_mine) if record is not None else 0
        version = record.version if record is not None else ""
        wanted = LeaseRecord(self._me, transitions=transitions, version=version)
        self._seen = await self._store.write(wanted)
        self._seen_at = began
        self._leads_until = began + LEADING_SHARE * self._lease_seconds
        if not led:
            log.info("leads", holder=self._me)
            self._on_lead()

    def _tell(self, failure: str) -> None:
        """Once, until all is well again."""
        if failure != self._told:
            log.warning("election", failure=failure)
        self._told = failure


def _renewal(record: LeaseRecord) -> tuple[str, str, int]:
    return record.holder, record.renewals, record.transitions
