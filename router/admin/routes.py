"""Admin routes for worker pools: requests to resize a pool or drain a worker go to the supervisor
that started this router."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from baton.network.browser_guard import is_loopback_name, normalized_host
from baton.pools.control_client import send_control_command
from router.errors import ApiError, not_json
from router.limits import MAX_ADMIN_BODY_BYTES
from router.serving.context import RouterContext

NO_RESET = (
    "cached prefixes can't be dropped: they are evicted when their memory is needed; to find none "
    "of those of earlier requests, send another cache_salt; `baton kv purge` drops what is stored"
)

PROXY_HEADERS = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})
"""Headers that proxies add. A request with one of them may come from a remote client, even if the
address that it arrives from (the proxy's) is local."""


def add_admin_routes(app: FastAPI, context: RouterContext) -> None:
    """Add the routes. Each route responds with the current state of the pools; a requested change
    completes later."""

    @app.get("/admin/pools")
    async def pools(request: Request) -> Response:
        check_admin(context, request)
        return await _call_supervisor(context, {"command": "pools"})

    @app.post("/admin/scale")
    async def scale(request: Request) -> Response:
        check_admin(context, request)
        sizes = await read_json_object(request)
        if not sizes or not all(type(count) is int for count in sizes.values()):
            raise ApiError(400, 'the body must be like {"prefill": 2, "decode": 3}')
        return await _call_supervisor(context, {"command": "scale", "pools": sizes})

    @app.post("/reset_prefix_cache")
    @app.post("/flush_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        """Refuse to drop cached prefixes, which load generators ask vLLM and SGLang for."""
        check_admin(context, request)
        raise ApiError(501, NO_RESET, code="unsupported_endpoint")

    @app.post("/admin/drain")
    async def drain(request: Request) -> Response:
        check_admin(context, request)
        body = await read_json_object(request)
        if body.keys() != {"worker"} or not isinstance(body["worker"], str):
            raise ApiError(400, 'the body must be like {"worker": "decode-1"}')
        return await _call_supervisor(context, {"command": "drain", "worker": body["worker"]})


def check_admin(context: RouterContext, request: Request) -> None:
    """Raise ApiError (401, 403) unless the client is an admin. If no admin key is configured,
    requests that a web page in a browser may have sent, except this router's own console, and
    requests that came through a proxy, are also refused (403)."""
    host = request.client.host if request.client is not None else None
    context.tenants.authenticator.check_admin(request.headers.get("authorization"), host)
    if context.tenants.authenticator.has_admin_key:
        return
    if _comes_from_browser_page(request):
        raise ApiError(
            403,
            "no admin key is configured, so the admin API refuses requests sent by web pages",
        )
    if not PROXY_HEADERS.isdisjoint(request.headers.keys()):
        raise ApiError(
            403,
            "no admin key is configured, so the admin API refuses requests that came through a "
            "proxy",
        )


def _comes_from_browser_page(request: Request) -> bool:
    """Whether a web page that is open in a browser may have sent the request, other than this
    router's console. Such a request has an ``Origin`` header, or says that it comes from another
    site or origin (``Sec-Fetch-Site``), or, if the page's host name was made to resolve to this
    machine (DNS rebinding), has that host name in its ``Host`` header. A ``Host`` that is an IP
    address or has no dot is no sign of a web page."""
    host = request.url.hostname or ""
    is_name = "." in host and not host.replace(".", "").isdigit()
    is_foreign = request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    has_foreign_origin = "origin" in request.headers and not _comes_from_own_console(request)
    return is_foreign or is_name or has_foreign_origin


def _comes_from_own_console(request: Request) -> bool:
    """Whether the request's ``Origin`` is this router itself, under a name that always means this
    machine. No foreign page has such an origin: a page of another site or of another port has
    another one, and a page whose own name was made to resolve to this machine has that name."""
    authority = request.headers.get("host", "")
    is_loopback = is_loopback_name(normalized_host(authority.encode("latin-1")))
    own_origin = f"{request.url.scheme}://{authority}"
    return is_loopback and request.headers["origin"].lower() == own_origin.lower()


async def _call_supervisor(context: RouterContext, command: dict[str, Any]) -> Response:
    socket = context.config.control_socket
    if socket is None:
        raise ApiError(
            501,
            "this router was not started by `baton up`, so it manages no pools; on Kubernetes, use "
            "`baton scale --on kubernetes`",
        )
    answer = await asyncio.to_thread(send_control_command, Path(socket), command)
    return Response(orjson.dumps(answer), media_type="application/json")


async def read_json_object(request: Request) -> dict[str, Any]:
    """Read the body, a JSON object. Its content type must be JSON, which a web page of another
    origin can't send without a CORS preflight. Raises ApiError (400, 413, 415)."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "the body must have content-type application/json")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_ADMIN_BODY_BYTES:
            raise ApiError(413, f"the body must have at most {MAX_ADMIN_BODY_BYTES} bytes")
    try:
        value = orjson.loads(body)
    except ValueError as error:
        raise ApiError(400, not_json("the body", error)) from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return value
