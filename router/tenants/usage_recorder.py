"""Records what tenants used: in metrics at once, and in counters that are sent to the usage
store."""

from collections import Counter
from itertools import islice

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.limits import MAX_COUNTERS_PER_FLUSH, MAX_PENDING_COUNTERS
from router.tenants.metrics import TenantMetrics
from router.tenants.request_usage import RequestUsage
from router.tenants.usage_store import OTHER_TENANTS, UsageCounts, UsageField, UsageStore, day_of

DAY_NANOSECONDS = 86_400 * 10**9


class UsageRecorder:
    """Counts what tenants used, and sends it to a usage store."""

    def __init__(self, metrics: TenantMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._unsent: UsageCounts = Counter()
        self._sending: UsageCounts = Counter()
        self._number = 1
        self._day = (-1, "")

    def record_usage(self, tenant: TenantId, spent: RequestUsage) -> None:
        self._metrics.record_usage(tenant, spent)
        day = self._today()
        self._count(day, tenant, UsageField.REQUESTS, spent.requests)
        self._count(day, tenant, UsageField.PROMPT, spent.prompt_tokens)
        self._count(day, tenant, UsageField.CACHED, spent.cached_tokens)
        self._count(day, tenant, UsageField.COMPLETION, spent.completion_tokens)

    def record_refusal(self, tenant: TenantId, reason: str) -> None:
        self._metrics.record_refusal(tenant, reason)
        self._count(self._today(), tenant, UsageField.REFUSED, 1)

    async def flush(self, store: UsageStore, writer: str) -> None:
        """Send new usage to the store in numbered messages. The store counts each number of a
        ``writer`` only once, so a message that may have arrived can be sent again under the same
        number. Raises Unavailable; the unconfirmed message is then sent again in the next flush."""
        while self._sending or self._unsent:
            self._sending = self._sending or self._take_unsent()
            try:
                await store.add(writer, self._number, self._sending)
            except Unavailable:
                self._metrics.unsent_counters.set(len(self._sending) + len(self._unsent))
                raise
            self._number += 1
            self._sending = Counter()
        self._metrics.unsent_counters.set(0)

    def unsent(self) -> UsageCounts:
        """Return the counters that the :class:`UsageStore` has not confirmed."""
        return self._sending + self._unsent

    def _take_unsent(self) -> UsageCounts:
        if len(self._unsent) <= MAX_COUNTERS_PER_FLUSH:
            taken, self._unsent = self._unsent, Counter()
            return taken
        keys = list(islice(self._unsent, MAX_COUNTERS_PER_FLUSH))
        return Counter({key: self._unsent.pop(key) for key in keys})

    def _today(self) -> str:
        """Return today's date, which is computed once a day."""
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
