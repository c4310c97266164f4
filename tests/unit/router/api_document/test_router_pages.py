"""Tests the routes about the server itself: pages for people, health probes under the paths that
other inference servers use, version and load."""

import asyncio
import re
from importlib.metadata import version

import pytest

from baton.text.tokenizer import Tokenizer
from router.api_document.document import build_document
from router.tenants.authentication import PUBLIC_PATHS
from tests import router_harness
from tests.router_harness import CHAT, chat, eventually, open_harness, step_until_done, wrong_error

tokenizer = router_harness.tokenizer

KEYS = {"sk-a": "alice"}


@pytest.mark.parametrize("path", sorted(PUBLIC_PATHS))
async def test_public_paths_need_no_key(tokenizer: Tokenizer, path: str) -> None:
    async with open_harness(tokenizer, api_keys=KEYS) as (_, client):
        assert (await client.get(path)).status_code == 200
        assert (await client.head(path)).status_code == 200


async def test_probes_of_other_servers(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        for path in ("/health", "/healthz", "/ping"):
            assert (await client.get(path)).json() == {"status": "ok"}
        assert (await client.post("/ping", content=b"x")).status_code == 200
        assert (await client.get("/version")).json() == {"version": version("baton")}


async def test_start_page_is_html_for_browsers_only(tokenizer: Tokenizer) -> None:
    accept = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    async with open_harness(tokenizer) as (_, client):
        page = await client.get("/", headers=accept)
        links = (await client.get("/")).json()["links"]
        for path in links:
            assert (await client.get(path)).status_code == 200
            assert f'href="{path}"' in page.text
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert f"Baton {version('baton')}" in page.text


async def test_docs_list_every_route_and_load_nothing(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        page = await client.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"<script|src=|https?://", page.text)
    for path, item in build_document("1")["paths"].items():
        for method in item:
            assert f"<code>{method.upper()}</code></td><td><code>{path}</code>" in page.text
    assert "<code>/admin/scale</code></td><td>Resize pools</td><td>admins</td>" in page.text


async def test_load_counts_answers_in_progress(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, automatic=False, api_keys=KEYS) as (router, client):
        key = {"authorization": "Bearer sk-a"}
        wrong_error(await client.get("/load"), 401)
        assert (await client.get("/load", headers=key)).json() == {"server_load": 0}
        asked = asyncio.create_task(client.post(CHAT, json=chat(n=2), headers=key))
        await eventually(lambda: router.service.tenants.request_limiter.num_in_use == 2)
        assert (await client.get("/load", headers=key)).json() == {"server_load": 2}
        await step_until_done(router, asked)
