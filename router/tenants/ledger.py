"""What tenants used: in metrics at once, and in a book that is brought to the store of usage."""

from collections import Counter
from itertools import islice

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.tenants.metrics import TenantMetrics
from router.tenants.spent import Spent
from router.tenants.usage import OTHER, Counts, Field, UsageStore, day_of

MAX_UNSENT = 100_000
"""Counters, of 200 bytes each: days of thousands of tenants. While the store of usage is gone for
longer, further tenants are counted together."""

DAY_NANOSECONDS = 86_400 * 10**9

MAX_SENT = 2000
"""Counters at once: a few milliseconds of Redis."""


class TenantLedger:
    """Implements :class:`router.tenants.visit.Ledger`."""

    def __init__(self, metrics: TenantMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._unsent: Counts = Counter()
        self._sending: Counts = Counter()
        self._number = 1
        self._day = (-1, "")

    def note_spent(self, tenant: TenantId, spent: Spent) -> None:
        self._metrics.note_spent(tenant, spent)
        day = self._today()
        self._count(day, tenant, Field.REQUESTS, spent.requests)
        self._count(day, tenant, Field.PROMPT, spent.prompt_tokens)
        self._count(day, tenant, Field.CACHED, spent.cached_tokens)
        self._count(day, tenant, Field.COMPLETION, spent.completion_tokens)

    def note_refused(self, tenant: TenantId, reason: str) -> None:
        self._metrics.note_refused(tenant, reason)
        self._count(self._today(), tenant, Field.REFUSED, 1)

    async def send(self, store: UsageStore, writer: str) -> None:
        """Brings what is new to the store, which counts each number of a ``writer`` once: what
        can't be told to have arrived is sent again under the same number. Raises Unavailable."""
        while self._sending or self._unsent:
            self._sending = self._sending or self._take()
            try:
                await store.add(writer, self._number, self._sending)
            except Unavailable:
                self._metrics.unsent.set(len(self._sending) + len(self._unsent))
                raise
            self._number += 1
            self._sending = Counter()
        self._metrics.unsent.set(0)

    def unsent(self) -> Counts:
        """What the store does not know, or not for sure."""
        return self._sending + self._unsent

    def _take(self) -> Counts:
        if len(self._unsent) <= MAX_SENT:
            taken, self._unsent = self._unsent, Counter()
            return taken
        keys = list(islice(self._unsent, MAX_SENT))
        return Counter({key: self._unsent.pop(key) for key in keys})

    def _today(self) -> str:
        """Looked up in the calendar once a day."""
        now = self._clock.wall_nanoseconds()
        if self._day[0] != now // DAY_NANOSECONDS:
            self._day = (now // DAY_NANOSECONDS, day_of(now))
        return self._day[1]

    def _count(self, day: str, tenant: TenantId, field: Field, amount: int) -> None:
        if not amount:
            return
        key = (day, tenant, field)
        if key not in self._unsent and len(self._unsent) >= MAX_UNSENT:
            key = (day, OTHER, field)
        self._unsent[key] += amount
