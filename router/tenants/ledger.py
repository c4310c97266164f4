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

    def note_spent(self, tenant: TenantId, spent: Spent) -> None:
        self._metrics.note_spent(tenant, spent)
        self._count(tenant, Field.REQUESTS, spent.requests)
        self._count(tenant, Field.PROMPT, spent.prompt_tokens)
        self._count(tenant, Field.CACHED, spent.cached_tokens)
        self._count(tenant, Field.COMPLETION, spent.completion_tokens)

    def note_refused(self, tenant: TenantId, reason: str) -> None:
        self._metrics.note_refused(tenant, reason)
        self._count(tenant, Field.REFUSED, 1)

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

    def _count(self, tenant: TenantId, field: Field, amount: int) -> None:
        if not amount:
            return
        key = (day_of(self._clock.wall_nanoseconds()), tenant, field)
        if key not in self._unsent and len(self._unsent) >= MAX_UNSENT:
            key = (key[0], OTHER, field)
        self._unsent[key] += amount
