"""Groups the router's services for tenants: authentication, admission and usage."""

from collections.abc import Callable

from baton.clock import Clock
from baton.concurrency.budget import Budget
from router.tenants.admission import AdmissionController
from router.tenants.authentication import Authenticator
from router.tenants.metrics import TenantMetrics
from router.tenants.quota_client import QuotaClient
from router.tenants.quota_store import QuotaStore
from router.tenants.usage_flusher import UsageFlusher
from router.tenants.usage_recorder import UsageRecorder
from router.tenants.usage_store import MemoryUsageStore, UsageStore


class TenantServices:
    """Authentication, admission and usage of all tenants. All routers share the quotas in
    ``quota_store``; without a store, each router has an equal part of each limit. ``usage_flusher``
    sends usage to ``usage_store``; it is None until the router's program sets it."""

    def __init__(
        self,
        authenticator: Authenticator,
        max_concurrent_requests: int,
        metrics: TenantMetrics,
        clock: Clock,
        *,
        router_id: str,
        num_routers: Callable[[], int],
        usage_store: UsageStore | None = None,
        quota_store: QuotaStore | None = None,
    ) -> None:
        self.authenticator = authenticator
        self.request_limiter = Budget(max_concurrent_requests)
        self.usage_recorder = UsageRecorder(metrics, clock)
        self.usage_store = usage_store if usage_store is not None else MemoryUsageStore()
        self.usage_flusher: UsageFlusher | None = None
        quota_client = None
        if quota_store is not None:
            quota_client = QuotaClient(
                quota_store, router_id, clock, metrics.quota_store_unreachable
            )
        self.admission = AdmissionController(
            self.request_limiter,
            lambda: self.authenticator.directory,
            num_routers,
            self.usage_recorder,
            clock,
            quota_client,
        )
