"""A request's body as it arrives, and a memory budget for the bodies of all requests."""

from baton.concurrency.budget import Budget, BudgetShare
from baton.core.ids import TenantId
from router.limits import UNMETERED_BYTES


class BodyBudget(Budget):
    """Limits how many bytes the requests that are not processed yet hold in memory: their bodies,
    and the stored conversations that were read for them. The limit holds in total and per tenant
    (weighted max-min fairness, see :class:`Budget`)."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes, "bytes of request bodies")

    def new_body(self, tenant: TenantId, weight: float, *, shared: bool) -> "RawBody":
        """Return an empty body. ``shared`` says whether more than one tenant is configured."""
        return RawBody(self, tenant, weight, shared)


class RawBody(BudgetShare):
    """A body that counts against a budget. :meth:`add` the data, then :meth:`take` it once. Leaving
    the ``with`` block, or :meth:`release`, returns its bytes to the budget. ``size_bytes`` is the
    size of the decompressed body and of all that was added with :meth:`charge`."""

    __slots__ = ("_data", "size_bytes")

    def __init__(self, budget: Budget, tenant: TenantId, weight: float, shared: bool) -> None:
        super().__init__(budget, tenant, weight, shared)
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

    @property
    def data(self) -> bytes | bytearray:
        """The data, which must not be changed."""
        return self._data

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
