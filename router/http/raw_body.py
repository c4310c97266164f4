"""A request's body as it arrives, and the account of the memory that all of them take."""

from types import TracebackType
from typing import Self

from baton.core.ids import TenantId
from router.tenants.fair_limiter import FairLimiter

UNMETERED_BYTES = 32 * 1024
"""Of each body: small requests are answered whatever others send. ``max_concurrent_requests``
bounds how many there are."""


class BodyBudget:
    """Bytes of bodies that were received and not yet made a prompt of, in all and of each tenant:
    weighted max-min, as :class:`FairLimiter` has it for requests."""

    def __init__(self, limit_bytes: int) -> None:
        self._gate = FairLimiter(limit_bytes, "bytes of bodies")

    @property
    def inside(self) -> int:
        return self._gate.inside

    def body(self, tenant: TenantId, weight: float, *, shared: bool) -> "RawBody":
        """``shared``: other tenants may come."""
        return RawBody(self._gate, tenant, weight, shared)


class RawBody:
    """:meth:`add` what comes, then :meth:`take` it once. Leaving it by ``with`` gives back what it
    still counts, and so does :meth:`release`."""

    __slots__ = ("_counted", "_data", "_gate", "_shared", "_tenant", "_weight", "size_bytes")

    def __init__(self, gate: FairLimiter, tenant: TenantId, weight: float, shared: bool) -> None:
        self._gate = gate
        self._tenant = tenant
        self._weight = weight
        self._shared = shared
        self._data: bytes | bytearray = b""
        self._counted = 0
        self.size_bytes = 0

    def add(self, data: bytes) -> None:
        """Raises Overloaded when there is no room for it."""
        self.size_bytes += len(data)
        more = max(self.size_bytes - UNMETERED_BYTES, 0) - self._counted
        self._gate.take(more, self._tenant, self._weight, self._shared)
        self._counted += more
        if not self._data:
            self._data = data
        elif isinstance(self._data, bytearray):
            self._data += data
        else:  # few bodies come in parts, and parts may be small
            self._data = bytearray(self._data) + data

    def take(self) -> bytes:
        """All of it. Nothing of it is kept here, and it is counted until it is released."""
        data, self._data = bytes(self._data), b""
        return data

    def release(self) -> None:
        """Whoever took it has forgotten it."""
        self._gate.give(self._counted, self._tenant)
        self._counted = 0
        self._data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
