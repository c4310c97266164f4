"""The store of responses, from which ``previous_response_id`` and ``GET /v1/responses/ID`` are
served."""

from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import TenantId
from baton.errors import Invalid
from router.responses.stored_response import EncodedResponse, StoredResponse
from router.serving.memory_budgets import StoredBytesShare

MAX_RESPONSE_BYTES = 16 * 2**20
"""The maximum size of a stored response, input included: twice the default of ``max_body_bytes``,
and half the largest reply that is read from Redis
(:data:`baton.registry.bounded_parser.MAX_REPLY_BYTES`)."""

ENTRY_OVERHEAD_BYTES = 512
"""The size that is counted for each response in addition to its JSON: roughly what keys and indexes
take."""


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """How long a response is stored, how many responses, with how many bytes in total, are stored
    for one tenant, and how many bytes for all tenants. A tenant beyond its limits loses its oldest
    responses; when all tenants exceed ``total_bytes``, the one with most bytes loses its oldest."""

    ttl_seconds: float = 86_400.0
    tenant_bytes: int = 64 * 2**20
    tenant_responses: int = 100_000
    total_bytes: int = 128 * 2**20

    def check_size(self, data: bytes) -> int:
        """Return the size that is counted for a response with this JSON, in bytes. Raises Invalid
        if it exceeds a limit by itself."""
        size_bytes = len(data) + ENTRY_OVERHEAD_BYTES
        limit = min(self.tenant_bytes, self.total_bytes, MAX_RESPONSE_BYTES)
        if size_bytes > limit:
            raise Invalid(
                f"the response and its input have {size_bytes} bytes, and at most {limit} can be "
                "stored; pass store: false",
                param="store",
            )
        return size_bytes


class ResponseStore(Protocol):
    """Keeps each tenant's responses for a while. Tenants don't see one another's responses. All
    methods raise Unavailable if the store can't be reached."""

    async def put(self, tenant: TenantId, stored: StoredResponse) -> None:
        """Store a response. A stored response with the same id is replaced. The tenant's oldest
        responses are removed while the tenant exceeds its limits; then, while all tenants together
        exceed theirs, the oldest of the tenant with most bytes. Raises Invalid for a response that
        exceeds a limit by itself."""
        ...

    async def replace(self, tenant: TenantId, stored: StoredResponse) -> bool:
        """Store a response like :meth:`put`, but only if the tenant still has one with this id.
        Return whether it was stored. So a response that is deleted while it is being generated
        does not come back."""
        ...

    async def size_bytes(self, tenant: TenantId, response_id: str) -> int:
        """Return the size of a stored response with its input, or 0 if the tenant has no response
        with this id (any more)."""
        ...

    async def get(self, tenant: TenantId, response_id: str) -> EncodedResponse | None:
        """Return a response, or None if the tenant has no response with this id (any more)."""
        ...

    async def delete(self, tenant: TenantId, response_id: str) -> bool:
        """Remove a response. Returns False if the tenant has no response with this id."""
        ...


async def read_response(
    store: ResponseStore, tenant: TenantId, response_id: str, memory: StoredBytesShare
) -> EncodedResponse | None:
    """Return a response, or None if the tenant has no response with this id (any more). ``memory``
    holds room for it before it is read. Raises Overloaded if there is none, or Unavailable."""
    memory.require(await store.size_bytes(tenant, response_id))
    stored = await store.get(tenant, response_id)
    if stored is not None:
        memory.require(stored.size_bytes)  # it may have been replaced by a larger one
    return stored
