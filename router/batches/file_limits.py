"""What a tenant may keep and send of files, and who may upload now."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.clock import Clock
from baton.core.ids import TenantId
from router.tenants.admission import UsageSink
from router.tenants.leaky_bucket import LeakyBucket
from router.tenants.rate_limit_errors import RateLimited, format_duration
from router.tenants.tenant import Tenant

MAX_TRACKED_TENANTS = 65_536
"""Of tenants, a hundred bytes each; those that are full again leave when there are too many."""


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Of one tenant: files and their bytes kept, uploads begun and under way."""

    files: int = 10_000
    file_bytes: int = 2**30
    uploads_per_minute: int = 60
    concurrent_uploads: int = 4

    def of(self, tenant: Tenant) -> "FileLimits":
        """With those that the tenants file says in their places."""
        own = tenant.limits
        return FileLimits(
            self.files if own.files is None else own.files,
            self.file_bytes if own.file_bytes is None else own.file_bytes,
            self.uploads_per_minute if own.uploads_per_minute is None else own.uploads_per_minute,
            self.concurrent_uploads if own.concurrent_uploads is None else own.concurrent_uploads,
        )


class UploadAdmission:
    """Single event loop. Of several routers each gives its equal part, and at least one."""

    def __init__(self, clock: Clock, num_routers: Callable[[], int], ledger: UsageSink) -> None:
        self._clock = clock
        self._num_routers = num_routers
        self._ledger = ledger
        self._under_way: Counter[TenantId] = Counter()
        self._begun: dict[TenantId, LeakyBucket] = {}

    @contextmanager
    def enter(self, tenant: TenantId, limits: FileLimits) -> Iterator[None]:
        """As long as one upload is under way. Raises RateLimited before anything was read."""
        try:
            self._check_number(tenant, limits.concurrent_uploads)
            self._begin(tenant, limits.uploads_per_minute)
        except RateLimited as refusal:
            self._ledger.note_refused(tenant, refusal.reason)
            raise
        self._under_way[tenant] += 1
        try:
            yield
        finally:
            self._under_way[tenant] -= 1
            if not self._under_way[tenant]:
                del self._under_way[tenant]

    def _check_number(self, tenant: TenantId, limit: int) -> None:
        at_once = math.ceil(self._part(limit))
        if self._under_way[tenant] >= at_once:
            raise _too_many(tenant, "concurrent uploads", at_once, 1.0)

    def _begin(self, tenant: TenantId, per_minute: int) -> None:
        part, now = self._part(per_minute), self._clock.monotonic()
        meter = self._begun.get(tenant)
        if meter is None:
            self._forget_idle(part, now)
            meter = self._begun[tenant] = LeakyBucket()
        wait = meter.wait_seconds(1, part, now)
        if wait > 0:
            raise _too_many(tenant, "uploads per minute", math.floor(part), wait)
        meter.spend(1)

    def _part(self, limit: int) -> float:
        return max(limit / max(self._num_routers(), 1), 1.0)

    def _forget_idle(self, part: float, now: float) -> None:
        if len(self._begun) >= MAX_TRACKED_TENANTS:
            self._begun = {
                tenant: meter
                for tenant, meter in self._begun.items()
                if meter.remaining(part, now) < part
            }


def _too_many(tenant: TenantId, what: str, limit: int, wait: float) -> RateLimited:
    message = (
        f"Rate limit reached for tenant {tenant} on {what}: limit {limit}. "
        f"Please try again in {format_duration(wait)}."
    )
    return RateLimited("uploads", message, "requests", wait)
