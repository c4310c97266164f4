"""The routes of stored responses, ``/v1/responses/ID``, as in OpenAI's API."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from baton.core.ids import TenantId
from router.errors import ApiError, invalid_field
from router.http.api_key_header import api_key_header
from router.http.held_response import HeldResponse
from router.http.item_list import list_page
from router.responses.response_service import ResponseService, response_not_found
from router.responses.stored_response import EncodedResponse, log_damage
from router.serving.context import RouterContext
from router.serving.memory_budgets import StoredBytesShare

MAX_INPUT_ITEMS = 100
"""The largest ``limit`` for a list of input items, as in OpenAI's API."""


def add_response_routes(
    app: FastAPI, context: RouterContext, service: ResponseService | None
) -> None:
    """Add the routes. If ``service`` is None, responses are not stored, so none is ever found."""

    @app.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str) -> Response:
        _check_get_query(dict(request.query_params))
        with _admitted(context, request) as (tenant, memory):
            stored = await _required(service).get(tenant, response_id, memory)
            return HeldResponse(stored.response_json, memory.detach())

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        with _admitted(context, request) as (tenant, memory):
            await _required(service).delete(tenant, response_id, memory)
        data = orjson.dumps({"id": response_id, "object": "response", "deleted": True})
        return Response(data, media_type="application/json")

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        with _admitted(context, request) as (tenant, memory):
            stored = await _required(service).cancel(tenant, response_id, memory)
            return HeldResponse(stored.response_json, memory.detach())

    @app.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(request: Request, response_id: str) -> Response:
        query = dict(request.query_params)
        _refuse_include(query)
        is_ascending = _pop_order(query) == "asc"
        with _admitted(context, request) as (tenant, memory):
            stored = await _required(service).get(tenant, response_id, memory)
            page = await context.resources.offload_executor.run(
                tenant,
                stored.size_bytes,
                lambda: _encode_page(stored, query, is_ascending=is_ascending),
            )
            return HeldResponse(page, memory.detach())


def _encode_page(stored: EncodedResponse, query: Mapping[str, str], *, is_ascending: bool) -> bytes:
    """Return the JSON of the page of input items that the query selects. Raises ApiError (400), or
    ApiError (404) if the response is damaged."""
    try:
        items = stored.input_items.split()
    except ValueError as error:
        log_damage(stored.id, stored.size_bytes)
        raise response_not_found(stored.id) from error
    page = list_page(items if is_ascending else items[::-1], query, MAX_INPUT_ITEMS)
    return orjson.dumps(page)


def _required(service: ResponseService | None) -> ResponseService:
    """Return the service. Raises ApiError (404) if this router stores no responses."""
    if service is None:
        message = "responses are not stored, because response_ttl_seconds is 0"
        raise ApiError(404, message, param="response_id", code="not_found")
    return service


def _check_get_query(query: dict[str, str]) -> None:
    """Raise ApiError (400) for a query parameter that has no effect here."""
    _refuse_include(query)
    if query.pop("stream", "false") != "false":
        message = "stream: a stored response can't be streamed; get it without stream"
        raise invalid_field("stream", message, "unsupported_parameter")
    if query:
        name = min(query)
        raise ApiError(
            400,
            f"unknown query parameter {name!r}; the only known one is stream",
            param=name,
            code="unknown_parameter",
        )


def _refuse_include(query: Mapping[str, str]) -> None:
    for name in query.keys() & {"include", "include[]"}:
        message = (
            "include: not supported; a stored response has what was included when it was created"
        )
        raise invalid_field(name, message, "unsupported_parameter")


def _pop_order(query: dict[str, str]) -> str:
    order = query.pop("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_field("order", "order must be 'asc' or 'desc'")
    return order


@contextmanager
def _admitted(
    context: RouterContext, request: Request
) -> Iterator[tuple[TenantId, StoredBytesShare]]:
    """Authenticate the client. Hold a slot of the request limiter and a share of the memory for
    stored responses during the ``with`` block. Raises ApiError (401) or Overloaded."""
    tenants = context.tenants
    tenant = tenants.authenticator.tenant_of(api_key_header(request.scope))
    slots = tenants.admission.hold_slots(tenants.authenticator.directory.tenant(tenant), 1)
    with slots, context.stored_bytes(tenant) as memory:
        yield tenant, memory
