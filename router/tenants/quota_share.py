"""A router's share of tenants' limits: an equal part, or quota drawn from the shared quota
store."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.tenants.quota_client import QuotaClient  # imports this module


@dataclass(frozen=True, slots=True)
class QuotaShare:
    """Describes how ``num_routers`` routers share tenants' limits: through ``quota_client``, or in
    equal parts if there is none or it can't reach the quota store."""

    num_routers: int = 1
    quota_client: "QuotaClient | None" = None

    @property
    def is_shared(self) -> bool:
        return self.num_routers > 1 and self.quota_client is not None and self.quota_client.is_open

    def equal_part(self, limit: int) -> float:
        """Return a router's equal part of a limit, but at least 1: otherwise no router could admit
        anything if the limit is below the number of routers."""
        return max(limit / self.num_routers, 1.0)

    def reported_limit(self, limit: int) -> float:
        """Return the limit that is reported to clients: the whole limit if the routers share it
        through the quota store, else this router's part."""
        return limit if self.is_shared else self.equal_part(limit)


UNSHARED = QuotaShare()
