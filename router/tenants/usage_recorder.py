"""What tenants used: in metrics at once, and in a book that is brought to the store of usage."""

from collections import Counter
from itertools import islice

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.tenants.metrics import TenantMetrics
from router.tenants.request_usage import RequestUsage
from router.tenants.usage_store import OTHER_TENANTS, UsageCounts, UsageField, UsageStore, day_of

MAX_PENDING_COUNTERS = 100_000
"""Counters, of 200 bytes each: days of thousands of tenants. While the store of usage is gone for
longer, further tenants are counted together."""

DAY_NANOSECONDS = 86_400 * 10**9

MAX_COUNTERS_PER_FLUSH = 2000
"""Counters at once: a few milliseconds of Redis."""


class UsageRecorder:
    """Implements :class:`router.tenants.admission.UsageSink`."""

    def __init__(self, metrics: TenantMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._unsent: UsageCounts = Counter()
        self._sending: UsageCounts = Counter()
        self._number = 1
        self._day = (-1, "")

    def note_spent(self, tenant: TenantId, spent: RequestUsage) -> None:
        self._metrics.note_spent(tenant, spent)
        day = self._today()
        self._count(day, tenant, UsageField.REQUESTS, spent.requests)
        self._count(day, tenant, UsageField.PROMPT, spent.prompt_tokens)
        self._count(day, tenant, UsageField.CACHED, spent.cached_tokens)
        self._count(day, tenant, UsageField.COMPLETION, spent.completion_tokens)

    def note_refused(self, tenant: TenantId, reason: str) -> None:
        self._metrics.note_refused(tenant, reason)
        self._count(self._today(), tenant, UsageField.REFUSED, 1)

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

    def unsent(self) -> UsageCounts:
        """What the store does not know, or not for sure."""
        return self._sending + self._unsent

    def _take(self) -> UsageCounts:
        if len(self._unsent) <= MAX_COUNTERS_PER_FLUSH:
            taken, self._unsent = self._unsent, Counter()
            return taken
        keys = list(islice(self._unsent, MAX_COUNTERS_PER_FLUSH))
        return Counter({key: self._unsent.pop(key) for key in keys})

    def _today(self) -> str:
        """Looked up in the calendar once a day."""
        now = self._clock.wall_nanoseconds()
        if self._day[0] != now // DAY_NANOSECONDS:
            self._day = (now // DAY_NANOSECONDS, day_of(now))
        return self._day[1]

    def _count(self, day: str, tenant: TenantId, field: UsageField, amount: int) -> None:
        if not amount:
            return
        key = (day, tenant, field)
        if key not in self._unsent and len(self._unsent) >= MAX_PENDING_COUNTERS:
            key = (day, OTHER_TENANTS, field)
        self._unsent[key] += amount
