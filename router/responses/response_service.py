"""The service behind the routes for stored responses."""

from contextlib import suppress

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Invalid
from router.errors import ApiError
from router.responses.background_responses import BackgroundResponses
from router.responses.response_lease import LeaseKey, ResponseLeases
from router.responses.response_status import is_unfinished, router_ended
from router.responses.response_store import ResponseStore, read_response
from router.responses.stored_response import EncodedResponse, encode_stored, read_encoded
from router.serving.memory_budgets import StoredBytesShare

CANCEL_SECONDS = 5.0
"""How long a cancellation waits until the router that generates the response has stored its final
status. Usually this takes about as long as a renewal of leases
(:data:`router.responses.response_lease.RENEWAL_SECONDS`)."""

CANCEL_POLL_SECONDS = 0.25


class ResponseService:
    """Reads, deletes and cancels the tenants' stored responses. All methods raise Unavailable if
    the store can't be reached, ApiError (404) if the tenant has no such response, and Overloaded if
    ``memory``, the request's share of the memory for stored responses, has no room for it."""

    def __init__(
        self,
        store: ResponseStore,
        leases: ResponseLeases,
        background: BackgroundResponses,
        clock: Clock,
    ) -> None:
        self.store = store
        self.background = background
        self._leases = leases
        self._clock = clock

    async def get(
        self, tenant: TenantId, response_id: str, memory: StoredBytesShare
    ) -> EncodedResponse:
        """Return a response. An unfinished response whose router has died becomes a failed one."""
        stored = await self._read(tenant, response_id, memory)
        if not is_unfinished(stored):
            return stored
        if not await self._leases.end_if_lapsed(LeaseKey(tenant, response_id)):
            return stored
        # Its router may have stored its end just before it released its lease.
        stored = await self._read(tenant, response_id, memory)
        return await self._end(tenant, stored) if is_unfinished(stored) else stored

    async def delete(self, tenant: TenantId, response_id: str, memory: StoredBytesShare) -> None:
        """Delete a response. If it is still being generated, its generation is cancelled."""
        stored = await self._read(tenant, response_id, memory)
        await self.store.delete(tenant, response_id)
        if is_unfinished(stored):
            await self._request_cancellation(LeaseKey(tenant, response_id))

    async def cancel(
        self, tenant: TenantId, response_id: str, memory: StoredBytesShare
    ) -> EncodedResponse:
        """Cancel a background response, and return it with its final status, or with its current
        status if its router needs longer than CANCEL_SECONDS. Raises ApiError (400) for a response
        that was not generated in the background."""
        stored = await self.get(tenant, response_id, memory)
        if not stored.is_background:
            message = "only responses that were created with background: true can be cancelled"
            raise ApiError(400, message, param="response_id")
        if not is_unfinished(stored):
            return stored
        await self._request_cancellation(LeaseKey(tenant, response_id))
        give_up_at = self._clock.monotonic() + CANCEL_SECONDS
        while is_unfinished(stored) and self._clock.monotonic() < give_up_at:
            await self._clock.sleep(CANCEL_POLL_SECONDS)
            stored = await self.get(tenant, response_id, memory)
        return stored

    async def _request_cancellation(self, key: LeaseKey) -> None:
        if not self.background.cancel(key):
            await self._leases.cancel(key)

    async def _end(self, tenant: TenantId, stored: EncodedResponse) -> EncodedResponse:
        """Store an unfinished response, whose router has died, as a failed one, and return it."""
        decoded = stored.decode()
        if decoded is None:
            raise response_not_found(stored.id)
        ended = router_ended(decoded)
        with suppress(Invalid):  # it has just been read, so it hardly exceeds a limit
            await self.store.replace(tenant, ended)
        encoded = read_encoded(encode_stored(ended), ended.id)
        assert encoded is not None, "it has just been encoded"
        return encoded

    async def _read(
        self, tenant: TenantId, response_id: str, memory: StoredBytesShare
    ) -> EncodedResponse:
        stored = await read_response(self.store, tenant, response_id, memory)
        if stored is None:
            raise response_not_found(response_id)
        return stored


def response_not_found(response_id: str) -> ApiError:
    message = f"Response with id {response_id!r} not found."
    return ApiError(404, message, param="response_id", code="not_found")
