"""What a router may give of a tenant's limits: its equal part, or what all routers share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from baton.core.ids import TenantId
from router.tenants.quota_store import QuotaRequest


class QuotaClient(Protocol):
    """A router's dealings with the treasury, :class:`router.tenants.quota_client.QuotaClient`, as
    visits need them. ``is_open``: the treasury can be asked, as far as is known."""

    is_open: bool

    async def draw(self, account: Any, wanted: Callable[[], QuotaRequest | None]) -> bool: ...

    async def look_again(self, account: Any, wanted: Callable[[], QuotaRequest | None]) -> None: ...

    def watch(self, tenant: TenantId, account: Any, *, is_due: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class QuotaShare:
    """``num_routers`` give the limits together; ``bank`` None: each by itself."""

    num_routers: int = 1
    bank: QuotaClient | None = None

    @property
    def is_common(self) -> bool:
        return self.num_routers > 1 and self.bank is not None and self.bank.is_open

    def part(self, limit: int) -> float:
        """Of what a router gives by itself. At least one: a limit of fewer than there are routers
        is not nothing."""
        return max(limit / self.num_routers, 1.0)

    def told(self, limit: int) -> float:
        """The limit that a client is told."""
        return limit if self.is_common else self.part(limit)


UNSHARED = QuotaShare()
