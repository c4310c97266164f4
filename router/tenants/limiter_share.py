"""A request's share of a limit that several tenants use."""

from collections.abc import Callable
from typing import Self

from baton.core.ids import TenantId
from router.tenants.fair_limiter import FairLimiter


class LimiterShare:
    """The amount of a limit that one request uses. Leaving the ``with`` block, or :meth:`release`,
    returns it. ``shared`` says whether more than one tenant is configured."""

    __slots__ = ("_is_detached", "_limiter", "_num_held", "_shared", "_tenant", "_weight")

    def __init__(self, limiter: FairLimiter, tenant: TenantId, weight: float, shared: bool) -> None:
        self._limiter = limiter
        self._tenant = tenant
        self._weight = weight
        self._shared = shared
        self._num_held = 0
        self._is_detached = False

    def _acquire(self, count: int) -> None:
        """Use ``count`` more. Raises Overloaded when the limit is reached; nothing is counted
        then."""
        self._limiter.acquire(count, self._tenant, self._weight, self._shared)
        self._num_held += count

    def _keep(self, count: int) -> None:
        """Return all but ``count``, which is at most what is held."""
        self._limiter.release(self._num_held - count, self._tenant)
        self._num_held = count

    def release(self) -> None:
        self._keep(0)

    def detach(self) -> Callable[[], None]:
        """Hold the share also after the ``with`` block. Return a function that releases it."""
        self._is_detached = True
        return self.release

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._is_detached:
            self.release()
