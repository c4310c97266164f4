"""Resizing over HTTP: the supervisor that started this router is asked on behalf of an admin."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from baton.runtime.control_client import ask
from router.problem import Problem
from router.service import Service

MAX_BODY_BYTES = 4096

PROXY_HEADERS = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})
"""A proxy on this machine sends them for clients that are elsewhere."""


def add_pools(app: FastAPI, service: Service) -> None:
    """Each route answers with the pools as they are: what was begun goes on for a while."""

    @app.get("/admin/pools")
    async def pools(request: Request) -> Response:
        check_admin(service, request)
        return await _ask(service, {"command": "pools"})

    @app.post("/admin/scale")
    async def scale(request: Request) -> Response:
        check_admin(service, request)
        sizes = await _object(request)
        if not sizes or not all(type(count) is int for count in sizes.values()):
            raise Problem(400, 'the body must be like {"prefill": 2, "decode": 3}')
        return await _ask(service, {"command": "scale", "pools": sizes})

    @app.post("/admin/drain")
    async def drain(request: Request) -> Response:
        check_admin(service, request)
        body = await _object(request)
        if body.keys() != {"worker"} or not isinstance(body["worker"], str):
            raise Problem(400, 'the body must be like {"worker": "decode-1"}')
        return await _ask(service, {"command": "drain", "worker": body["worker"]})


def check_admin(service: Service, request: Request) -> None:
    """Raises Problem (401, 403)."""
    host = request.client.host if request.client is not None else None
    service.doorkeeper.check_admin(request.headers.get("authorization"), host)
    if service.doorkeeper.has_admin_key:
        return
    if _is_of_a_page(request):
        raise Problem(403, "without an admin key, the admin API answers no web pages")
    if not PROXY_HEADERS.isdisjoint(request.headers.keys()):
        raise Problem(403, "without an admin key, the admin API answers nobody behind a proxy")


def _is_of_a_page(request: Request) -> bool:
    """A browser on this machine asks for whatever page it shows: it says so by an origin, or, where
    the page's own name was made to point here, by that name. An address is no such name."""
    host = request.url.hostname or ""
    is_name = "." in host and not host.replace(".", "").isdigit()
    return "origin" in request.headers or is_name


async def _ask(service: Service, command: dict[str, Any]) -> Response:
    socket = service.config.control_socket
    if socket is None:
        raise Problem(
            501,
            "this router was not started by `baton up`, and knows no pools; on Kubernetes, use "
            "`baton scale --on kubernetes`",
        )
    answer = await asyncio.to_thread(ask, Path(socket), command)
    return Response(orjson.dumps(answer), media_type="application/json")


async def _object(request: Request) -> dict[str, Any]:
    """The body. Only JSON that says so: a web page can't send that here behind its reader's back.
    Raises Problem."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Problem(415, "the body must have content-type application/json")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise Problem(413, f"the body must have at most {MAX_BODY_BYTES} bytes")
    try:
        value = orjson.loads(body)
    except ValueError as error:
        raise Problem(400, f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise Problem(400, "the body must be an object")
    return value
