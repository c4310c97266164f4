"""Resizing over HTTP: the supervisor that started this router is asked on behalf of an admin."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from baton.pools.control_client import send_control_command
from router.errors import ApiError
from router.openai.context import RouterContext

MAX_BODY_BYTES = 4096

PROXY_HEADERS = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})
"""A proxy on this machine sends them for clients that are elsewhere."""


def add_admin_routes(app: FastAPI, service: RouterContext) -> None:
    """Each route answers with the pools as they are: what was begun goes on for a while."""

    @app.get("/admin/pools")
    async def pools(request: Request) -> Response:
        check_admin(service, request)
        return await _call_supervisor(service, {"command": "pools"})

    @app.post("/admin/scale")
    async def scale(request: Request) -> Response:
        check_admin(service, request)
        sizes = await _read_json_object(request)
        if not sizes or not all(type(count) is int for count in sizes.values()):
            raise ApiError(400, 'the body must be like {"prefill": 2, "decode": 3}')
        return await _call_supervisor(service, {"command": "scale", "pools": sizes})

    @app.post("/admin/drain")
    async def drain(request: Request) -> Response:
        check_admin(service, request)
        body = await _read_json_object(request)
        if body.keys() != {"worker"} or not isinstance(body["worker"], str):
            raise ApiError(400, 'the body must be like {"worker": "decode-1"}')
        return await _call_supervisor(service, {"command": "drain", "worker": body["worker"]})


def check_admin(service: RouterContext, request: Request) -> None:
    """Raises Problem (401, 403)."""
    host = request.client.host if request.client is not None else None
    service.doorkeeper.check_admin(request.headers.get("authorization"), host)
    if service.doorkeeper.has_admin_key:
        return
    if _comes_from_browser_page(request):
        raise ApiError(403, "without an admin key, the admin API answers no web pages")
    if not PROXY_HEADERS.isdisjoint(request.headers.keys()):
        raise ApiError(403, "without an admin key, the admin API answers nobody behind a proxy")


def _comes_from_browser_page(request: Request) -> bool:
    """A browser on this machine asks for whatever page it shows: it says so by an origin, or, where
    the page's own name was made to point here, by that name. An address is no such name."""
    host = request.url.hostname or ""
    is_name = "." in host and not host.replace(".", "").isdigit()
    return "origin" in request.headers or is_name


async def _call_supervisor(service: RouterContext, command: dict[str, Any]) -> Response:
    socket = service.config.control_socket
    if socket is None:
        raise ApiError(
            501,
            "this router was not started by `baton up`, and knows no pools; on Kubernetes, use "
            "`baton scale --on kubernetes`",
        )
    answer = await asyncio.to_thread(send_control_command, Path(socket), command)
    return Response(orjson.dumps(answer), media_type="application/json")


async def _read_json_object(request: Request) -> dict[str, Any]:
    """The body. Only JSON that says so: a web page can't send that here behind its reader's back.
    Raises Problem."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "the body must have content-type application/json")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body must have at most {MAX_BODY_BYTES} bytes")
    try:
        value = orjson.loads(body)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be an object")
    return value
