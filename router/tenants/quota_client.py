"""One router's exchanges with the quota store: while a request waits for quota, and in the
background."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import structlog
from prometheus_client import Gauge

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.limits import MAX_REQUESTS_PER_SYNC
from router.tenants.quota import Quota
from router.tenants.quota_share import QuotaShare
from router.tenants.quota_store import QuotaRequest, QuotaStore
from router.tenants.tenant_directory import TenantDirectory

MAINTENANCE_SECONDS = 0.5
"""How often unused quota is returned and leases are renewed, in seconds."""

SYNC_DELAY_SECONDS = 0.005
"""A short delay before an early exchange, so that it includes other tenants' early exchanges."""

SLOT_RETRY_SECONDS = (0.02, 0.05, 0.1)
"""Pauses before a slot is requested again: another router may be returning one right now."""

QuotaRequestBuilder = Callable[[], QuotaRequest | None]

log = structlog.get_logger(__name__)


class QuotaClient:
    """Exchanges quota with the quota store. ``router_id`` identifies this incarnation of this
    router. While the store can't be reached, ``is_open`` is False, and each router has an equal
    part of the limits. The metric ``split_gauge``, if given, is 1 during that time, and 0
    otherwise."""

    def __init__(
        self,
        quota_store: QuotaStore,
        router_id: str,
        clock: Clock,
        split_gauge: Gauge | None = None,
    ) -> None:
        self.is_open = True
        self._quota_store = quota_store
        self._router = router_id
        self._clock = clock
        self._split_gauge = split_gauge
        self._quotas: dict[TenantId, Quota] = {}
        """The quotas that may have to be settled with the store, by tenant."""
        self._due: set[TenantId] = set()
        self._early_exchange = asyncio.Event()

    async def exchange_quota(self, quota: Quota, build_request: QuotaRequestBuilder) -> bool:
        """Wait until no other exchange of this quota is in progress; then send the request that
        ``build_request`` returns to the store, unless it is None. Return True if the request was
        for a slot and this router still has no free slot."""
        async with quota.exchange_lock:
            request = build_request()
            if request is None or not await self._exchange([(quota, request)]):
                return False
            return request.slots is not None and not quota.has_free_slot

    async def retry_slot(self, quota: Quota, build_request: QuotaRequestBuilder) -> None:
        """Ask the store for a slot a few more times. Only one request per tenant does so at a time:
        meanwhile, a call for another request returns at once, without a slot."""
        if quota.is_retrying_slot:
            return
        quota.is_retrying_slot = True
        try:
            for seconds in SLOT_RETRY_SECONDS:
                await self._clock.sleep(seconds)
                if not await self.exchange_quota(quota, build_request):
                    return
        finally:
            quota.is_retrying_slot = False

    def notify_change(self, tenant: TenantId, quota: Quota, *, is_due: bool) -> None:
        """Record that some of a quota was used or given back, so that :meth:`run` includes the
        quota in the next periodic exchange with the store. If ``is_due`` is True, there is an
        exchange before the period ends."""
        self._quotas[tenant] = quota
        if is_due:
            self._schedule_early(tenant)

    async def run(
        self, directory: Callable[[], TenantDirectory], share: Callable[[], QuotaShare]
    ) -> None:
        """Exchange quotas with the store until cancelled: all quotas periodically, and those that
        are due (:meth:`notify_change`) before the next periodic exchange. Every exchange uses what
        ``directory`` and ``share`` return at that time."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._exchange_regularly(directory, share))
            tasks.create_task(self._exchange_early(directory, share))

    async def exchange_all(self, directory: TenantDirectory, share: QuotaShare) -> None:
        """If the store could not be reached, check whether it can be reached again. Then exchange
        all quotas with it if routers share the limits."""
        if not self.is_open:
            await self._try_reconnect()
        if not share.is_shared:
            return
        await self._exchange_tenants(list(self._quotas), directory, share, is_turn=True)
        for tenant in [name for name, quota in self._quotas.items() if quota.is_settled]:
            del self._quotas[tenant]

    async def exchange_due(self, directory: TenantDirectory, share: QuotaShare) -> None:
        """Exchange the quotas that should not wait for the next periodic exchange."""
        due, self._due = self._due, set()
        if share.is_shared:
            await self._exchange_tenants(due, directory, share, is_turn=False)

    def _schedule_early(self, tenant: TenantId) -> None:
        self._due.add(tenant)
        self._early_exchange.set()

    async def _exchange_regularly(
        self, directory: Callable[[], TenantDirectory], share: Callable[[], QuotaShare]
    ) -> None:
        while True:
            await self._clock.sleep(MAINTENANCE_SECONDS)
            await self.exchange_all(directory(), share())

    async def _exchange_early(
        self, directory: Callable[[], TenantDirectory], share: Callable[[], QuotaShare]
    ) -> None:
        while True:
            await self._early_exchange.wait()
            await self._clock.sleep(SYNC_DELAY_SECONDS)
            self._early_exchange.clear()
            await self.exchange_due(directory(), share())

    async def _exchange_tenants(
        self,
        tenants: Iterable[TenantId],
        directory: TenantDirectory,
        share: QuotaShare,
        *,
        is_turn: bool,
    ) -> None:
        remaining = [tenant for tenant in tenants if tenant in self._quotas]
        while remaining and self.is_open:
            now, chunk = self._clock.monotonic(), remaining[:MAX_REQUESTS_PER_SYNC]
            remaining = remaining[MAX_REQUESTS_PER_SYNC:]
            with ExitStack() as locks:
                asks = []
                for name in chunk:
                    quota = self._quotas[name]
                    if quota.exchange_lock.locked():  # a client request is exchanging this quota
                        self._schedule_early(name)
                        continue
                    await quota.exchange_lock.acquire()
                    locks.callback(quota.exchange_lock.release)
                    request = quota.build_maintenance_request(
                        directory.tenant(name), share, now, is_turn=is_turn
                    )
                    if request is not None:
                        asks.append((quota, request))
                if asks:
                    await self._exchange(asks)

    async def _exchange(self, asks: list[tuple[Quota, QuotaRequest]]) -> bool:
        """Send the requests to the store, and record its grants in the quotas. If the store can't
        be reached, set ``is_open`` to False and return False."""
        try:
            grants = await self._quota_store.exchange(
                self._router, [request for _, request in asks]
            )
        except Unavailable as error:
            self._close(error)
            return False
        now = self._clock.monotonic()
        for (quota, request), grant in zip(asks, grants, strict=True):
            quota.record_grant(request, grant, now)
        return True

    async def _try_reconnect(self) -> None:
        try:
            await self._quota_store.ping()
        except Unavailable:
            return
        self.is_open = True
        log.info("quota_store_reachable", effect="tenants' limits hold for all routers together")
        if self._split_gauge is not None:
            self._split_gauge.set(0)

    def _close(self, error: Unavailable) -> None:
        if self.is_open:
            log.warning(
                "quota_store_unreachable",
                error=str(error),
                effect="each router grants an equal part of tenants' limits",
            )
        self.is_open = False
        if self._split_gauge is not None:
            self._split_gauge.set(1)
