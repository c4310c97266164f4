"""Limits on a tenant's files: how many it may keep, upload and download."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from baton.clock import Clock
from baton.concurrency.budget import Budget
from baton.core.ids import TenantId
from baton.errors import Overloaded
from router.limits import MAX_DOWNLOADS, MAX_TENANT_DOWNLOADS, MAX_TRACKED_TENANTS
from router.tenants.leaky_bucket import LeakyBucket
from router.tenants.rate_limit_errors import RateLimited, format_duration
from router.tenants.tenant import Tenant
from router.tenants.usage_recorder import UsageRecorder


@dataclass(frozen=True, slots=True)
class FileLimits:
    """The limits of one tenant: how many files it may keep, their total size, and how many uploads
    it may send per minute and at the same time."""

    files: int = 10_000
    file_bytes: int = 2**30
    uploads_per_minute: int = 60
    concurrent_uploads: int = 4

    def with_tenant_limits(self, tenant: Tenant) -> "FileLimits":
        """Return a copy in which the limits that the tenants file sets for ``tenant`` replace the
        limits of this object."""
        own = tenant.limits
        return FileLimits(
            self.files if own.files is None else own.files,
            self.file_bytes if own.file_bytes is None else own.file_bytes,
            self.uploads_per_minute if own.uploads_per_minute is None else own.uploads_per_minute,
            self.concurrent_uploads if own.concurrent_uploads is None else own.concurrent_uploads,
        )


class UploadAdmission:
    """Admits uploads within the tenants' limits. All calls come from one event loop. Each router
    allows an equal part of each limit, but at least 1."""

    def __init__(
        self, clock: Clock, num_routers: Callable[[], int], usage_sink: UsageRecorder
    ) -> None:
        self._clock = clock
        self._num_routers = num_routers
        self._usage_sink = usage_sink
        self._num_uploads: Counter[TenantId] = Counter()
        self._upload_buckets: dict[TenantId, LeakyBucket] = {}

    @contextmanager
    def admit(self, tenant: TenantId, limits: FileLimits) -> Iterator[None]:
        """Admit one upload for the duration of a ``with`` block. Call this before the body is read.
        Raises RateLimited."""
        try:
            self._check_number(tenant, limits.concurrent_uploads)
            self._begin(tenant, limits.uploads_per_minute)
        except RateLimited as refusal:
            self._usage_sink.record_refusal(tenant, refusal.reason)
            raise
        self._num_uploads[tenant] += 1
        try:
            yield
        finally:
            self._num_uploads[tenant] -= 1
            if not self._num_uploads[tenant]:
                del self._num_uploads[tenant]

    def _check_number(self, tenant: TenantId, limit: int) -> None:
        at_once = math.ceil(self._equal_part(limit))
        if self._num_uploads[tenant] >= at_once:
            raise _too_many(tenant, "concurrent uploads", at_once, 1.0)

    def _begin(self, tenant: TenantId, per_minute: int) -> None:
        part, now = self._equal_part(per_minute), self._clock.monotonic()
        bucket = self._upload_buckets.get(tenant)
        if bucket is None:
            self._forget_idle(part, now)
            bucket = self._upload_buckets[tenant] = LeakyBucket()
        wait = bucket.wait_seconds(1, part, now)
        if wait > 0:
            raise _too_many(tenant, "uploads per minute", math.floor(part), wait)
        bucket.spend(1)

    def _equal_part(self, limit: int) -> float:
        return max(limit / max(self._num_routers(), 1), 1.0)

    def _forget_idle(self, part: float, now: float) -> None:
        if len(self._upload_buckets) >= MAX_TRACKED_TENANTS:
            self._upload_buckets = {
                tenant: bucket
                for tenant, bucket in self._upload_buckets.items()
                if bucket.remaining(part, now) < part
            }


class DownloadAdmission(Budget):
    """Admits downloads, in total and per tenant."""

    def __init__(
        self, limit: int = MAX_DOWNLOADS, tenant_limit: int = MAX_TENANT_DOWNLOADS
    ) -> None:
        super().__init__(limit, "downloads")
        self._tenant_limit = tenant_limit

    def begin(self, tenant: TenantId, weight: float, *, shared: bool) -> Callable[[], None]:
        """Admit one download; return a function that ends it, to be called once. Raises
        Overloaded."""
        number = self.num_in_use_by(tenant)
        if number >= self._tenant_limit:
            raise Overloaded(
                f"tenant {tenant} has {number} downloads under way, which is the most for a tenant "
                "of this router; read one of them to its end first",
                retry_after_seconds=1.0,
            )
        self.acquire(1, tenant, weight, shared)
        return partial(self.release, 1, tenant)


def _too_many(tenant: TenantId, what: str, limit: int, wait: float) -> RateLimited:
    message = (
        f"Rate limit reached for tenant {tenant} on {what}: limit {limit}. "
        f"Please try again in {format_duration(wait)}."
    )
    return RateLimited("uploads", message, "requests", wait)
