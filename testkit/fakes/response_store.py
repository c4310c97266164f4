"""An in-memory store of responses."""

from collections import OrderedDict
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.core.ids import TenantId
from router.responses.response_store import ResponseLimits
from router.responses.stored_response import (
    EncodedResponse,
    StoredResponse,
    encode_stored,
    read_encoded,
)


@dataclass(frozen=True, slots=True)
class _Entry:
    data: bytes
    size_bytes: int
    expires_at: float


@dataclass(slots=True)
class _TenantResponses:
    entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    """In the order in which they were stored."""
    size_bytes: int = 0


class MemoryResponseStore:
    """Implements :class:`router.responses.response_store.ResponseStore`."""

    def __init__(self, limits: ResponseLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._total_bytes = 0
        self._tenants: dict[TenantId, _TenantResponses] = {}
        self._order: OrderedDict[tuple[TenantId, str], None] = OrderedDict()
        """The responses of all tenants, in the order in which they were stored."""

    async def put(self, tenant: TenantId, stored: StoredResponse) -> None:
        data = encode_stored(stored)
        entry = _Entry(
            data,
            self._limits.check_size(data),
            self._clock.monotonic() + self._limits.ttl_seconds,
        )
        self._remove_expired()
        self._remove(tenant, stored.id)
        own = self._tenants.setdefault(tenant, _TenantResponses())
        own.entries[stored.id] = entry
        own.size_bytes += entry.size_bytes
        self._total_bytes += entry.size_bytes
        self._order[tenant, stored.id] = None
        self._remove_oldest(tenant, own)

    async def replace(self, tenant: TenantId, stored: StoredResponse) -> bool:
        if self._find(tenant, stored.id) is None:
            return False
        await self.put(tenant, stored)
        return True

    async def size_bytes(self, tenant: TenantId, response_id: str) -> int:
        entry = self._find(tenant, response_id)
        return len(entry.data) if entry is not None else 0

    async def get(self, tenant: TenantId, response_id: str) -> EncodedResponse | None:
        entry = self._find(tenant, response_id)
        return read_encoded(entry.data, response_id) if entry is not None else None

    async def delete(self, tenant: TenantId, response_id: str) -> bool:
        self._remove_expired()
        return self._remove(tenant, response_id)

    async def close(self) -> None:
        pass

    def _find(self, tenant: TenantId, response_id: str) -> _Entry | None:
        self._remove_expired()
        own = self._tenants.get(tenant)
        return own.entries.get(response_id) if own is not None else None

    def _remove_expired(self) -> None:
        now = self._clock.monotonic()
        while self._order:
            tenant, response_id = next(iter(self._order))
            if self._tenants[tenant].entries[response_id].expires_at > now:
                return
            self._remove(tenant, response_id)

    def _remove_oldest(self, tenant: TenantId, own: _TenantResponses) -> None:
        """Remove the oldest responses of the tenant, which has just stored one, while it exceeds
        its limits; then those of the tenant with most bytes, while all tenants together exceed
        theirs. The newest response alone exceeds no limit."""
        limits = self._limits
        while own.size_bytes > limits.tenant_bytes or len(own.entries) > limits.tenant_responses:
            self._remove(tenant, next(iter(own.entries)))
        while self._total_bytes > limits.total_bytes:
            can_lose = [
                (each.size_bytes, each is own, name)
                for name, each in self._tenants.items()
                if each is not own or len(own.entries) > 1
            ]
            fullest = max(can_lose)[-1]
            self._remove(fullest, next(iter(self._tenants[fullest].entries)))

    def _remove(self, tenant: TenantId, response_id: str) -> bool:
        own = self._tenants.get(tenant)
        entry = own.entries.pop(response_id, None) if own is not None else None
        if own is None or entry is None:
            return False
        own.size_bytes -= entry.size_bytes
        self._total_bytes -= entry.size_bytes
        del self._order[tenant, response_id]
        if not own.entries:
            del self._tenants[tenant]
        return True
