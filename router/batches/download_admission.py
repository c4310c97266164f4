"""Limits the downloads of files that are under way."""

from collections.abc import Callable

from baton.core.ids import TenantId
from baton.errors import Overloaded
from router.tenants.fair_limiter import FairLimiter

MAX_DOWNLOADS = 128
"""The maximum number of downloads at the same time. Each keeps a file open, and its client may read
as slowly as it likes. A quarter of the 512 files that a router opens besides its connections."""

MAX_TENANT_DOWNLOADS = 8
"""The maximum number for one tenant. A file that is deleted while it is downloaded takes room on
the disk until the end of the download, and no longer counts against the tenant's limit."""

RETRY_SECONDS = 1.0


class DownloadAdmission:
    """Admits downloads, in total and per tenant. Use it on one event loop."""

    def __init__(
        self, limit: int = MAX_DOWNLOADS, tenant_limit: int = MAX_TENANT_DOWNLOADS
    ) -> None:
        self._limiter = FairLimiter(limit, "downloads")
        self._tenant_limit = tenant_limit
        self._num_by_tenant: dict[TenantId, int] = {}

    @property
    def num_downloads(self) -> int:
        return self._limiter.num_in_use

    def begin(self, tenant: TenantId, weight: float, *, shared: bool) -> Callable[[], None]:
        """Admit one download; return a function that ends it, to be called once. Raises
        Overloaded."""
        number = self._num_by_tenant.get(tenant, 0)
        if number >= self._tenant_limit:
            raise Overloaded(
                f"tenant {tenant} has {number} downloads under way, which is the most for a tenant "
                "of this router; read one of them to its end first",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._limiter.acquire(1, tenant, weight, shared)
        self._num_by_tenant[tenant] = number + 1

        def end() -> None:
            self._limiter.release(1, tenant)
            self._num_by_tenant[tenant] -= 1
            if not self._num_by_tenant[tenant]:
                del self._num_by_tenant[tenant]

        return end
