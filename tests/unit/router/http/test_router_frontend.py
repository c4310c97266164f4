"""Tests what applies to all requests: request ids, CORS, HEAD, the access log, and time limits."""

import asyncio
import io
import json
from typing import Any

import httpx
import pytest

from baton.clock import ManualClock
from baton.network.browser_guard import BrowserGuard
from baton.text.tokenizer import Tokenizer
from router.http.browser_check import BrowserRequestCheck
from router.http.cors import Cors
from router.http.frontend import HttpFrontend
from router.tenants.authentication import Authenticator
from tests import router_harness
from tests.http_transport import HttpServerTransport
from tests.router_harness import CHAT, RouterHarness, chat, events, open_harness, wrong_error

tokenizer = router_harness.tokenizer
NO_CHECK = BrowserRequestCheck(Authenticator({}, None), BrowserGuard())
PAGE = "https://chat.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def test_request_ids_are_taken_over_or_made(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        given = await client.post(CHAT, json=chat(), headers={"x-request-id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        assert given.headers["x-baton-request-id"] == "chatcmpl-0"
        made = [
            await client.get("/health"),
            await client.post(CHAT, json={}),
            await client.get("/"),
        ]
        assert [answer.headers["x-request-id"] for answer in made] == [
            f"req-{router.service.ids.instance_id}-{number}" for number in (1, 2, 3)
        ]
        for wrong in (b"a b", b"x" * 129, b"\xff", b'a"b', b""):
            answer = await client.get("/health", headers={b"x-request-id": wrong})  # type: ignore[dict-item]
            assert answer.headers["x-request-id"].startswith("req-")


async def test_only_configured_origins_get_cors_headers(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, cors_origins=(PAGE,)) as (_, client):
        allowed = await client.options(CHAT, headers=PREFLIGHT)
        assert (allowed.status_code, allowed.content) == (204, b"")
        assert allowed.headers["access-control-allow-origin"] == PAGE
        requested = PREFLIGHT["access-control-request-headers"]
        assert allowed.headers["access-control-allow-headers"] == requested
        answer = await client.post(CHAT, json=chat(), headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert answer.headers["vary"] == "origin"
        wrong = await client.post(CHAT, json={}, headers={"origin": PAGE})
        assert wrong.headers["access-control-allow-origin"] == PAGE
        for origin in ("https://evil.example", f"{PAGE}.evil.example", "null", f"{PAGE}:8443"):
            refused = await client.options(CHAT, headers={**PREFLIGHT, "origin": origin})
            assert refused.status_code == 405
            answer = await client.post(CHAT, json=chat(), headers={"origin": origin})
            assert "access-control-allow-origin" not in answer.headers
            assert answer.headers["vary"] == "origin"


async def test_wildcard_origin_excludes_the_admin_api(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, cors_origins=("*",)) as (_, client):
        answer = await client.get("/health", headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "vary" not in answer.headers
        for path in ("/admin/pools", "/admin/scale", "/admin/requests/x"):
            refused = await client.options(path, headers=PREFLIGHT)
            assert refused.status_code == 405
            answer = await client.get(path, headers={"origin": PAGE})
            assert "access-control-allow-origin" not in answer.headers


async def test_without_origins_there_are_no_cors_headers(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        assert (await client.options(CHAT, headers=PREFLIGHT)).status_code == 405
        answer = await client.get("/health", headers={"origin": PAGE})
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_head_is_get_without_a_body(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        assert (await client.head("/health")).status_code == 200
        assert (await client.head("/ready")).status_code == 200
        assert (await client.head(CHAT)).status_code == 405
        assert "server" not in (await client.head("/health")).headers


async def test_access_log_has_a_json_line_per_request() -> None:
    clock, log = ManualClock(), io.StringIO()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        clock.advance(0.25)
        headers = [(b"x-baton-request-id", b"cmpl-7")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": b"secret"})

    async def crash(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError

    front = HttpFrontend(
        app, {"/crash": lambda: crash}, Cors(()), NO_CHECK, clock, "r", lambda: False, log
    )
    transport = HttpServerTransport(front)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.get("/a%0Ab?key=secret", headers={"x-request-id": "i"})
        await client.post("/crash")
    first, second = map(json.loads, log.getvalue().splitlines())
    assert first.pop("at") == pytest.approx(clock.wall_nanoseconds() / 1e9, abs=0.01)
    assert first == {
        "event": "request", "request_id": "i", "client": "127.0.0.1", "method": "GET",
        "path": "/a\nb", "status": 201, "seconds": 0.25, "answered_as": "cmpl-7",
    }  # fmt: skip
    assert (second["status"], second["path"]) == (0, "/crash")


async def test_draining_router_closes_connections(tokenizer: Tokenizer) -> None:
    router = RouterHarness(tokenizer, "x", automatic=True)
    async with await router.client() as client:
        assert "connection" not in (await client.get("/health")).headers
        router.service.draining = True
        assert (await client.get("/health")).headers["connection"] == "close"
        refused = await client.post(CHAT, json=chat())
        assert wrong_error(refused, 503) and refused.headers["connection"] == "close"
        router.service.refuses_when_draining = False  # other routers listen on the same port
        assert (await client.post(CHAT, json=chat())).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_request_beyond_its_time_limit_gets_504(tokenizer: Tokenizer, stream: bool) -> None:
    limits = {"automatic": False, "request_timeout_seconds": 0.05}
    async with open_harness(tokenizer, **limits) as (router, client):  # type: ignore[arg-type]
        answer = await client.post(CHAT, json=chat(stream=stream))
        assert wrong_error(answer, 504)["type"] == "timeout_error"
        explained = router.service.telemetry.history.explain("chatcmpl-0")
        assert explained is not None and explained["finish_reason"] == "cancelled"


async def test_stream_beyond_its_time_limit_ends_with_an_error(tokenizer: Tokenizer) -> None:
    limits = {"automatic": False, "request_timeout_seconds": 0.2}
    async with open_harness(tokenizer, **limits) as (router, client):  # type: ignore[arg-type]
        task = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
        await router_harness.eventually(lambda: bool(router.decode.jobs))
        router.prefill.step()
        *_, last = events(await task)
        assert last["error"]["type"] == "timeout_error"
        assert router.decode.cancelled == [("chatcmpl-0", 1)]
