"""A limit on the stored responses, and the lists of files, that a router has in memory."""

from baton.core.ids import TenantId
from router.tenants.fair_limiter import FairLimiter
from router.tenants.limiter_share import LimiterShare

MAX_READ_BYTES = 128 * 2**20
"""The maximum size of the stored responses that are read, decoded or sent at the same time: eight
of the largest. A response may be in memory twice while it is sent."""

UNMETERED_BYTES = 32 * 1024
"""Smaller responses do not count, so that they are served whatever other clients read."""


class StoredBytesBudget:
    """Limits how many bytes of stored responses and of lists of files are in memory for requests:
    from before a response is read until it is decoded, or until the client has read it, which a
    client can delay for hours. The limit holds in total and per tenant (weighted max-min fairness,
    see :class:`FairLimiter`). Not thread-safe: use it on one event loop."""

    def __init__(self, limit_bytes: int = MAX_READ_BYTES) -> None:
        self._limiter = FairLimiter(limit_bytes, "bytes of stored responses and lists of files")

    @property
    def num_bytes(self) -> int:
        return self._limiter.num_in_use

    def new_share(self, tenant: TenantId, weight: float, *, shared: bool) -> "StoredBytesShare":
        """Return the share of one request. ``shared`` says whether more than one tenant is
        configured."""
        return StoredBytesShare(self._limiter, tenant, weight, shared)


class StoredBytesShare(LimiterShare):
    """The bytes of stored responses that one request has in memory. Leaving the ``with`` block, or
    :meth:`release`, returns them to the budget."""

    __slots__ = ()

    def require(self, size_bytes: int) -> None:
        """Hold memory for ``size_bytes`` in total, if it is more than is held so far. Raises
        Overloaded, and holds no more than before, when the budget is exhausted."""
        self._acquire(max(size_bytes - UNMETERED_BYTES - self._num_held, 0))
