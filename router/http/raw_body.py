"""A request's body as it arrives, and a memory budget for the bodies of all requests."""

from baton.core.ids import TenantId
from router.tenants.fair_limiter import FairLimiter
from router.tenants.limiter_share import LimiterShare

UNMETERED_BYTES = 32 * 1024
"""This many bytes of each request do not count against the budget, so that small requests are
served however much other clients send. ``max_concurrent_requests`` bounds the number of
requests."""


class BodyBudget:
    """Limits how many bytes the requests that are not processed yet hold in memory: their bodies,
    and the stored conversations that were read for them. The limit holds in total and per tenant
    (weighted max-min fairness, see :class:`FairLimiter`)."""

    def __init__(self, limit_bytes: int) -> None:
        self._limiter = FairLimiter(limit_bytes, "bytes of request bodies")

    @property
    def num_bytes(self) -> int:
        return self._limiter.num_in_use

    def set_limit(self, limit_bytes: int) -> None:
        self._limiter.set_limit(limit_bytes)

    def new_body(self, tenant: TenantId, weight: float, *, shared: bool) -> "RawBody":
        """Return an empty body. ``shared`` says whether more than one tenant is configured."""
        return RawBody(self._limiter, tenant, weight, shared)


class RawBody(LimiterShare):
    """A body that counts against a budget. :meth:`add` the data, then :meth:`take` it once. Leaving
    the ``with`` block, or :meth:`release`, returns its bytes to the budget. ``size_bytes`` is the
    size of the decompressed body and of all that was added with :meth:`charge`."""

    __slots__ = ("_data", "size_bytes")

    def __init__(self, limiter: FairLimiter, tenant: TenantId, weight: float, shared: bool) -> None:
        super().__init__(limiter, tenant, weight, shared)
        self._data: bytes | bytearray = b""
        self.size_bytes = 0

    def add(self, data: bytes) -> None:
        """Append data. Raises Overloaded when the budget is exhausted."""
        self.charge(len(data))
        if not self._data:
            self._data = data
        elif isinstance(self._data, bytearray):
            self._data += data
        else:  # a body in several parts is rare; its parts may be small, so appending must be cheap
            self._data = bytearray(self._data) + data

    def charge(self, num_bytes: int) -> None:
        """Count bytes that the request holds in memory besides its body, such as the stored
        conversation that it continues. Call before :meth:`release`. Raises Overloaded when the
        budget is exhausted."""
        self.size_bytes += num_bytes
        self._acquire(max(self.size_bytes - UNMETERED_BYTES, 0) - self._num_held)

    def take(self) -> bytes:
        """Return the data and drop this object's reference to it. The bytes count against the
        budget until :meth:`release`."""
        data, self._data = bytes(self._data), b""
        return data

    def release(self, kept_bytes: int = 0) -> None:
        """Return the counted bytes to the budget, except for ``kept_bytes`` bytes that are still in
        use, and drop the data."""
        self._keep(min(max(kept_bytes - UNMETERED_BYTES, 0), self._num_held))
        self._data = b""
