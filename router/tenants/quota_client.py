"""One router's dealings with the treasury: for a request that waits, and ahead of those to come."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import structlog
from prometheus_client import Gauge

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.tenants.quota import Quota
from router.tenants.quota_share import QuotaShare
from router.tenants.quota_store import QuotaRequest, QuotaStore
from router.tenants.tenant_directory import TenantDirectory

MAINTENANCE_SECONDS = 0.5
"""Between two looks at what is held here and not used."""

SYNC_DELAY_SECONDS = 0.005
"""What is due meanwhile goes with it."""

SLOT_RETRY_SECONDS = (0.02, 0.05, 0.1)
"""Before nobody's seat is free: what another router has just given up is on its way."""

MAX_REQUESTS_PER_SYNC = 200
"""In one message: some milliseconds of Redis."""

QuotaRequestBuilder = Callable[[], QuotaRequest | None]

log = structlog.get_logger(__name__)


class QuotaClient:
    """``router`` names this life of this router. While the treasury can't be asked the bank is
    closed, and each router gives its part of the limits."""

    def __init__(
        self, treasury: QuotaStore, router: str, clock: Clock, closed: Gauge | None = None
    ) -> None:
        self.is_open = True
        self._treasury = treasury
        self._router = router
        self._clock = clock
        self._closed = closed
        self._accounts: dict[TenantId, Quota] = {}
        """Those that the treasury may have to hear of."""
        self._due: set[TenantId] = set()
        self._hurry = asyncio.Event()

    async def draw(self, account: Quota, wanted: QuotaRequestBuilder) -> bool:
        """Asks what is wanted when it is this one's turn. Whether a seat was asked for in vain."""
        async with account.exchanging:
            ask = wanted()
            if ask is None or not await self._exchange([(account, ask)]):
                return False
            return ask.hold is not None and not account.has_seat

    async def look_again(self, account: Quota, wanted: QuotaRequestBuilder) -> None:
        """For a seat. One request does at a time: the others of a flood are refused at once."""
        if account.is_looking:
            return
        account.is_looking = True
        try:
            for seconds in SLOT_RETRY_SECONDS:
                await self._clock.sleep(seconds)
                if not await self.draw(account, wanted):
                    return
        finally:
            account.is_looking = False

    def watch(self, tenant: TenantId, account: Quota, *, is_due: bool) -> None:
        """Something was used, or given back."""
        self._accounts[tenant] = account
        if is_due:
            self._hurry_for(tenant)

    async def run(
        self, roll: Callable[[], TenantDirectory], share: Callable[[], QuotaShare]
    ) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_turns(roll, share))
            tasks.create_task(self._hurry_for_ever(roll, share))

    async def turn(self, roll: TenantDirectory, share: QuotaShare) -> None:
        """Looks at all that is held here; asks whether the treasury is there again."""
        if not self.is_open:
            await self._knock()
        if not share.is_common:
            return
        await self._keep(list(self._accounts), roll, share, is_turn=True)
        for tenant in [name for name, account in self._accounts.items() if account.is_closed]:
            del self._accounts[tenant]

    async def hurry(self, roll: TenantDirectory, share: QuotaShare) -> None:
        """Does what is due."""
        due, self._due = self._due, set()
        if share.is_common:
            await self._keep(due, roll, share, is_turn=False)

    def _hurry_for(self, tenant: TenantId) -> None:
        self._due.add(tenant)
        self._hurry.set()

    async def _take_turns(
        self, roll: Callable[[], TenantDirectory], share: Callable[[], QuotaShare]
    ) -> None:
        while True:
            await self._clock.sleep(MAINTENANCE_SECONDS)
            await self.turn(roll(), share())

    async def _hurry_for_ever(
        self, roll: Callable[[], TenantDirectory], share: Callable[[], QuotaShare]
    ) -> None:
        while True:
            await self._hurry.wait()
            await self._clock.sleep(SYNC_DELAY_SECONDS)
            self._hurry.clear()
            await self.hurry(roll(), share())

    async def _keep(
        self,
        tenants: Iterable[TenantId],
        roll: TenantDirectory,
        share: QuotaShare,
        *,
        is_turn: bool,
    ) -> None:
        left = [tenant for tenant in tenants if tenant in self._accounts]
        while left and self.is_open:
            now, few = self._clock.monotonic(), left[:MAX_REQUESTS_PER_SYNC]
            left = left[MAX_REQUESTS_PER_SYNC:]
            with ExitStack() as locks:
                asks = []
                for name in few:
                    account = self._accounts[name]
                    if account.exchanging.locked():  # by who asks for one request only
                        self._hurry_for(name)
                        continue
                    await account.exchanging.acquire()
                    locks.callback(account.exchanging.release)
                    ask = account.upkeep(roll.tenant(name), share, now, is_turn=is_turn)
                    if ask is not None:
                        asks.append((account, ask))
                if asks:
                    await self._exchange(asks)

    async def _exchange(self, asks: list[tuple[Quota, QuotaRequest]]) -> bool:
        """False, and the bank is closed, if the treasury can't be asked."""
        try:
            grants = await self._treasury.exchange(self._router, [ask for _, ask in asks])
        except Unavailable as error:
            self._close(error)
            return False
        now = self._clock.monotonic()
        for (account, ask), grant in zip(asks, grants, strict=True):
            account.note(ask, grant, now)
        return True

    async def _knock(self) -> None:
        try:
            await self._treasury.ping()
        except Unavailable:
            return
        self.is_open = True
        log.info("limits_common", until_now="each router gave its part of tenants' limits")
        if self._closed is not None:
            self._closed.set(0)

    def _close(self, error: Unavailable) -> None:
        if self.is_open:
            log.warning("limits_split", error=str(error), now="each router gives its part")
        self.is_open = False
        if self._closed is not None:
            self._closed.set(1)
