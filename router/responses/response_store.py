"""The store of responses, from which ``previous_response_id`` and ``GET /v1/responses/ID`` are
served."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from baton.core.ids import TenantId


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the input that it answers.

    ``response`` is the JSON object that the client got, with its ``id``, ``status``, ``output`` and
    ``previous_response_id``. ``input_items`` are the items of this request alone, in the form in
    which ``GET /v1/responses/ID/input_items`` lists them; the items of earlier turns belong to
    earlier responses."""

    response: Mapping[str, Any]
    input_items: tuple[Mapping[str, Any], ...]

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def previous_id(self) -> str | None:
        return self.response.get("previous_response_id")


class ResponseStore(Protocol):
    """Keeps each tenant's responses for a while. Tenants don't see one another's responses. All
    methods raise Unavailable if the store can't be reached."""

    async def put(self, tenant: TenantId, stored: StoredResponse) -> None:
        """Store a response. A stored response with the same id is replaced. The tenant's oldest
        responses are removed while the tenant exceeds its limits. Raises Invalid for a response
        that exceeds a limit by itself."""
        ...

    async def replace(self, tenant: TenantId, stored: StoredResponse) -> bool:
        """Store a response like :meth:`put`, but only if the tenant still has one with this id.
        Return whether it was stored. So a response that is deleted while it is being generated
        does not come back."""
        ...

    async def get(self, tenant: TenantId, response_id: str) -> StoredResponse | None:
        """Return a response, or None if the tenant has no response with this id (any more)."""
        ...

    async def delete(self, tenant: TenantId, response_id: str) -> bool:
        """Remove a response. Returns False if the tenant has no response with this id."""
        ...
