"""The store of responses, from which ``previous_response_id`` and ``GET /v1/responses/ID`` are
served."""

from typing import Protocol

from baton.core.ids import TenantId
from router.openai.stored_bytes import StoredBytesShare
from router.responses.response_json import EncodedResponse
from router.responses.stored_response import StoredResponse


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
