"""Tests which requests of web pages the router rejects: those with a foreign origin, and those with
a foreign host name that resolves to this machine. Also tests that, without an admin key, the admin
API rejects proxied requests, and that only admins see the tenants' metrics."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.config import load_settings
from baton.network.browser_guard import BrowserGuard
from baton.text.tokenizer import Tokenizer
from router.tenants.authentication import PUBLIC_PATHS
from tests import router_harness
from tests.router_harness import CHAT, RouterHarness, chat, wrong_error

tokenizer = router_harness.tokenizer
HERE = "127.0.0.1:8000"
EVIL = "http://evil.example"
KEYS = {"key": "tenant"}


@asynccontextmanager
async def open_here(
    tokenizer: Tokenizer, folder: Path, host: str = "127.0.0.1", **settings: Any
) -> AsyncIterator[tuple[RouterHarness, httpx.AsyncClient]]:
    """Open a router that listens at ``host``, and a client that uses the router's address as the
    host name."""
    names = load_settings(host=host, allow_open_http=True).accepted_hosts(host)
    router = RouterHarness(tokenizer, "Hi", True, **{"known_hosts": names, **settings})
    router.make_batch_service(folder)
    async with await router.client() as client:
        client.headers["host"] = HERE
        yield router, client


REQUESTS = [
    ("POST", CHAT, {"json": chat()}, 200),
    # Requests that a page may send without a CORS preflight: without a content type, or as a form
    ("POST", CHAT, {"content": b'{"model": "demo", "messages": []}'}, 400),
    ("POST", "/v1/files", {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}, 200),
    ("POST", "/v1/batches", {"content": b"{}"}, 400),
    ("GET", "/v1/files", {}, 200),
    ("GET", "/v1/models", {}, 200),
    ("DELETE", "/v1/files/x", {}, 404),
    ("GET", "/metrics", {}, 200),
    ("GET", "/openapi.json", {}, 200),
    ("GET", "/admin/pools", {}, 501),
    ("GET", "/load", {}, 200),
    ("GET", "/nothing", {}, 404),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), REQUESTS)
async def test_foreign_web_pages_are_rejected(
    tokenizer: Tokenizer, tmp_path: Path, method: str, path: str, body: Any, status: int
) -> None:
    async with open_here(tokenizer, tmp_path) as (router, client):
        for headers in (
            {"origin": EVIL},
            {"origin": "null"},
            {"origin": "http://127.0.0.1.evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"host": "evil.example:8000"},
            {"host": "evil.example:8000", "origin": "http://evil.example:8000"},
            {"host": "localhost.evil.example"},
        ):
            refused = await client.request(method, path, headers=headers, **body)
            error = wrong_error(refused, 403)
            assert error["code"] == "page_not_allowed", headers
            assert "setting" in error["message"]
        assert router.service.telemetry.history.explain("chatcmpl-0") is None
        answer = await client.request(method, path, **body)
        assert answer.status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost:8000"},
        {"host": "LOCALHOST"},
        {"host": "baton.localhost:8000"},
        {"host": "127.9.9.9"},
        {"host": "[::1]:8000"},
        {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"},
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
    ],
)
async def test_pages_of_this_machine_are_allowed(
    tokenizer: Tokenizer, tmp_path: Path, headers: dict[str, str]
) -> None:
    async with open_here(tokenizer, tmp_path) as (_, client):
        assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 200


async def test_probes_are_allowed_by_any_host_name(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with open_here(tokenizer, tmp_path) as (_, client):
        for path in PUBLIC_PATHS:
            answer = await client.get(path, headers={"host": "10.1.2.3:8000", "origin": EVIL})
            assert answer.status_code == 200


async def test_configured_origins_and_hosts_are_allowed(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    invited = {"cors_origins": (EVIL,), "known_hosts": ("baton.example",)}
    async with open_here(tokenizer, tmp_path, **invited) as (_, client):
        page = {"origin": EVIL, "host": "baton.example", "sec-fetch-site": "cross-site"}
        assert (await client.post(CHAT, json=chat(), headers=page)).status_code == 200
        assert (await client.get("/admin/pools", headers=page)).status_code == 403
    async with open_here(tokenizer, tmp_path, cors_origins=("*",)) as (_, client):
        assert (await client.post(CHAT, json=chat(), headers={"origin": EVIL})).status_code == 200
        refused = await client.post(CHAT, json=chat(), headers={"host": "evil.example"})
        assert refused.status_code == 403


async def test_router_open_to_a_network_accepts_any_host_name(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A router can't know the names by which clients on a network reach it."""
    async with open_here(tokenizer, tmp_path, host="0.0.0.0") as (_, client):
        named = {"host": "baton.lan:8000"}
        assert (await client.post(CHAT, json=chat(), headers=named)).status_code == 200
        own = {"host": "baton.lan", "origin": "http://baton.lan:80"}
        assert (await client.post(CHAT, json=chat(), headers=own)).status_code == 200
        refused = await client.post(CHAT, json=chat(), headers={**named, "origin": EVIL})
        assert refused.status_code == 403


async def test_request_with_a_key_is_allowed_from_any_page(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with open_here(tokenizer, tmp_path, api_keys=KEYS) as (_, client):
        page = {"authorization": "Bearer key", "origin": EVIL, "host": "evil.example"}
        assert (await client.post(CHAT, json=chat(), headers=page)).status_code == 200
        # The admin API has no key here, and trusts only this machine.
        refused = await client.get("/admin/pools", headers={"host": "evil"})
        assert wrong_error(refused, 403)["code"] == "page_not_allowed"


async def test_proxied_requests_are_rejected_without_an_admin_key(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with open_here(tokenizer, tmp_path) as (_, client):
        for name in ("forwarded", "via", "x-forwarded-for", "x-real-ip"):
            refused = await client.get("/admin/pools", headers={name: "203.0.113.7"})
            assert "through a proxy" in wrong_error(refused, 403)["message"]


async def test_tenant_metrics_are_for_admins_only(tokenizer: Tokenizer, tmp_path: Path) -> None:
    user, admin = {"authorization": "Bearer key"}, {"authorization": "Bearer root"}
    async with open_here(tokenizer, tmp_path, api_keys=KEYS, admin_key="root") as (_, client):
        await client.post(CHAT, json=chat(), headers=user)
        for headers in ({}, user):
            assert "tenant" not in (await client.get("/metrics", headers=headers)).text
        metrics = await client.get("/metrics", headers=admin)
        assert 'baton_tenant_requests_total{tenant="tenant"' in metrics.text
    async with open_here(tokenizer, tmp_path, api_keys=KEYS) as (_, client):
        refused = await client.get("/metrics", headers=user)
        assert "admin_key" in wrong_error(refused, 403)["message"]


def test_similar_host_names_are_rejected() -> None:
    guard = BrowserGuard(hosts=("Baton.example",))
    for name in (
        b"baton.example",
        b"BATON.example.:80",
        b"localhost.",
        b"127.0.0.1",
        b"[::1]",
        b"",
    ):
        is_own = name != b""
        assert (guard.refusal(name, None, None) == "") == is_own, name
    for name in (b"0.0.0.0", b"[::]", b"127.0.0.1.x", b"localhost.x", b"xlocalhost", b"2130706433"):
        assert guard.refusal(name, None, None) != "", name
    for origin in (b"ftp://localhost", b"http://localhost@evil", b"http://", b"localhost"):
        assert guard.refusal(b"localhost", origin, None) != "", origin
    assert guard.refusal(None, None, None) == ""


async def test_page_without_an_origin_is_allowed_as_its_error_says(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    page = {"origin": "null"}
    async with open_here(tokenizer, tmp_path) as (_, client):
        error = wrong_error(await client.post(CHAT, json=chat(), headers=page), 403)
    assert error["message"].endswith(
        "add null to the setting cors_origins, which allows every site to send requests, since "
        "every site can show a page without an origin"
    )
    origins = load_settings(cors_origins="null").cors_origins
    async with open_here(tokenizer, tmp_path, cors_origins=origins) as (_, client):
        answer = await client.post(CHAT, json=chat(), headers=page)
        other = await client.post(CHAT, json=chat(), headers={"origin": EVIL})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "null")
    assert other.status_code == 403


async def test_page_that_sends_its_origin_is_allowed_as_the_error_says(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A request without ``Origin``, by a link for example, can't be allowed by its origin."""
    page = "https://chat.example"
    async with open_here(tokenizer, tmp_path, cors_origins=(page,)) as (_, client):
        link = {"sec-fetch-site": "cross-site"}
        error = wrong_error(await client.get("/v1/models", headers=link), 403)
        fetched = await client.get("/v1/models", headers={**link, "origin": page})
    assert "let the page send the request by fetch, and add its origin" in error["message"]
    assert fetched.status_code == 200
