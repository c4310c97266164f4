"""Tests the console's routes: its files and their headers, who may read its data and change pools
from a browser, and the stream of frames."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.config import load_settings
from baton.core.ids import WorkerId
from baton.core.states import Role, WorkerState
from baton.text.tokenizer import Tokenizer
from orchestrator.control_server import start_control_server
from router.console.assets import load_assets
from tests import router_harness
from tests.router_harness import (
    CHAT,
    RouterHarness,
    chat,
    eventually,
    open_harness,
    step_until_done,
    wrong_error,
)
from tests.unit.router.admin.test_router_admin import FakePools

tokenizer = router_harness.tokenizer
LOCAL = "http://127.0.0.1:8000"
KEY = {"authorization": "Bearer root"}
VENDOR_LICENSES = {f"vendor/LICENSE.{name}.txt" for name in ("htm", "preact", "uPlot")}


# -- the page ------------------------------------------------------------------------------------


async def test_page_and_its_files_are_served_without_a_key(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, admin_key="root", api_keys={"sk": "a"}) as (_, client):
        page = await client.get("/ui")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for path in load_assets():
            answer = await client.get(f"/ui/assets/{path}")
            assert (answer.status_code, bool(answer.content)) == (200, True), path
        script = await client.get("/ui/assets/app.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"


async def test_page_may_load_only_from_this_router(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        answer = await client.get("/ui")
    policy = dict(part.strip().split(" ", 1) for part in
                  answer.headers["content-security-policy"].split(";"))  # fmt: skip
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert answer.headers["x-frame-options"] == "DENY"
    assert "<script>" not in answer.text
    assert "style=" not in answer.text


def test_files_name_no_other_host_and_insert_no_html() -> None:
    for path, asset in load_assets().items():
        text = asset.content.decode()
        if path.startswith("vendor/") or path.endswith(".svg"):
            continue
        assert "innerHTML" not in text, path
        assert "//" not in text.replace("http://localhost", "").replace("// ", ""), path


def test_libraries_have_their_licences() -> None:
    assert load_assets().keys() >= VENDOR_LICENSES


async def test_unchanged_file_is_not_sent_again(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        first = await client.get("/ui/assets/app.js")
        again = await client.get(
            "/ui/assets/app.js", headers={"if-none-match": first.headers["etag"]}
        )
        assert (again.status_code, again.content) == (304, b"")
        other = await client.get("/ui/assets/app.js", headers={"if-none-match": '"other"'})
        assert other.status_code == 200


@pytest.mark.parametrize(
    "path", ["nothing.js", "../routes.py", "%2e%2e/routes.py", "vendor", "vendor/README.md", ""]
)
async def test_only_the_pages_files_are_served(tokenizer: Tokenizer, path: str) -> None:
    async with open_harness(tokenizer) as (_, client):
        assert (await client.get(f"/ui/assets/{path}")).status_code == 404


async def test_start_page_leads_to_the_console(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        page = await client.get("/", headers={"accept": "text/html"})
        assert '<a href="/ui">Open the console</a>' in page.text
        assert "/ui" in (await client.get("/")).json()["links"]


# -- its data ------------------------------------------------------------------------------------


async def test_state_shows_workers_and_an_answer_in_progress(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, automatic=False) as (router, client):
        asked = asyncio.create_task(client.post(CHAT, json=chat()))
        await eventually(lambda: bool(router.prefill.jobs))
        state = (await client.get("/admin/state")).json()
        tables = {name: table["rows"] for name, table in state["tables"].items()}
        assert set(tables["workers"]) == {"p0", "d0"}
        assert set(tables["pools"]) == {"demo|prefill", "demo|decode"}
        [row] = tables["requests"].values()
        assert (row["phase"], row["prefill"], row["decode"]) == ("prefill", "p0", "d0")
        assert tables["tenants"]["default"]["inflight"] == 1
        assert tables["rings"]["demo"]["shares"] == {"p0": 1.0}
        cluster = state["cluster"]
        assert (cluster["num_inflight"], cluster["can_change_pools"]) == (1, False)
        assert cluster["num_ready"]["conductor"] == 0
        await step_until_done(router, asked)
        assert list(router.service.telemetry.history.inflight) == []


async def test_data_need_the_admin_key(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, admin_key="root") as (_, client):
        for path in ("/admin/state", "/admin/events"):
            wrong_error(await client.get(path), 401)
            wrong_error(await client.get(path, headers={"authorization": "Bearer no"}), 401)
        assert (await client.get("/admin/state", headers=KEY)).status_code == 200


@asynccontextmanager
async def open_events(client: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[Any]]:
    """Open the stream of frames, and yield an iterator over them."""
    async with client.stream("GET", "/admin/events", headers=KEY) as response:
        assert response.headers["content-type"].startswith("text/event-stream")

        async def frames() -> AsyncIterator[Any]:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])

        yield frames()


async def test_events_show_a_drain_as_it_happens(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, admin_key="root") as (router, client):
        async with open_events(client) as frames:
            assert (await anext(frames))["is_full"]
            members = router.members.list
            members[1] = replace(members[1], state=WorkerState.DRAINING)
            await router.service.cluster.refresh()
            frame = await anext(frames)
            assert not frame["is_full"]
            assert frame["tables"]["workers"] == {"fields": {"d0": {"state": "draining"}}}
            router.members.list = members[:1]
            await router.service.cluster.refresh()
            assert (await anext(frames))["tables"]["workers"]["removed"] == ["d0"]


async def test_stream_ends_when_the_router_drains(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, admin_key="root") as (router, client):
        async with open_events(client) as frames:
            await anext(frames)
            router.service.draining = True
            async with asyncio.timeout(60):
                [last] = [frame async for frame in frames]
        assert last["cluster"]["is_draining"]


async def test_too_many_pages_are_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.console.feed.MAX_PAGES", 2)
    async with open_harness(tokenizer, admin_key="root") as (_, client):
        async with open_events(client) as one, open_events(client) as two:
            await anext(one)
            await anext(two)
            refused = await client.get("/admin/events", headers=KEY)
            assert "2 pages of the console are open" in wrong_error(refused, 429)["message"]


# -- who may change pools from a browser ---------------------------------------------------------


@asynccontextmanager
async def open_with_pools(
    tokenizer: Tokenizer, folder: Path
) -> AsyncIterator[tuple[FakePools, RouterHarness, httpx.AsyncClient]]:
    """Open a router as `baton up` starts it on a laptop: on loopback, and without keys."""
    pools, socket = FakePools(), folder / "control.sock"
    names = load_settings(host="127.0.0.1").accepted_hosts("127.0.0.1")
    control = await start_control_server(socket, pools)
    settings = {"control_socket": str(socket), "known_hosts": names}
    async with control, open_harness(tokenizer, **settings) as (router, client):
        client.headers["host"] = "127.0.0.1:8000"
        yield pools, router, client


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8123", "[::1]:8000", "localhost"])
async def test_own_page_may_drain_without_a_key(
    tokenizer: Tokenizer, tmp_path: Path, host: str
) -> None:
    page = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    async with open_with_pools(tokenizer, tmp_path) as (pools, _, client):
        answer = await client.post("/admin/drain", json={"worker": "decode-1"}, headers=page)
        assert (answer.status_code, pools.removed) == (200, ["decode-1"])
        read = {"host": host, "sec-fetch-site": "same-origin"}
        assert (await client.get("/admin/state", headers=read)).status_code == 200


FOREIGN_PAGES = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    # another program on this machine
    {"origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-site"},
    {"origin": "http://localhost:8000", "sec-fetch-site": "cross-site"},
    {"origin": "https://127.0.0.1:8000"},
    {"origin": "http://127.0.0.1"},
    # names that were made to resolve to this machine
    {"host": "evil.example:8000", "origin": "http://evil.example:8000"},
    {"host": "evil:8000", "origin": "http://evil:8000"},
    {"host": "127.0.0.1.evil.example", "origin": "http://127.0.0.1.evil.example"},
    # an address of this machine that others can have as well
    {"host": "192.0.2.1:8000", "origin": "http://192.0.2.1:8000"},
    {"host": "127.0.0.1:8000", "origin": LOCAL, "sec-fetch-site": "cross-site"},
    {"host": "127.0.0.1:8000", "origin": LOCAL, "x-forwarded-for": "203.0.113.7"},
]


@pytest.mark.parametrize("page", FOREIGN_PAGES, ids=str)
async def test_foreign_pages_change_and_read_nothing(
    tokenizer: Tokenizer, tmp_path: Path, page: dict[str, str]
) -> None:
    async with open_with_pools(tokenizer, tmp_path) as (pools, _, client):
        for path, body in (("drain", {"worker": "decode-1"}), ("scale", {"decode": 2})):
            wrong_error(await client.post(f"/admin/{path}", json=body, headers=page), 403)
        wrong_error(await client.get("/admin/state", headers=page), 403)
        wrong_error(await client.get("/admin/events", headers=page), 403)
        assert (pools.removed, pools.scaled) == ([], [])


async def test_page_of_another_port_can_not_read_without_an_origin(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """An ``<img>`` of a page at another port sends no Origin, but names its relation."""
    async with open_with_pools(tokenizer, tmp_path) as (_, _, client):
        image = {"sec-fetch-site": "same-site"}
        wrong_error(await client.get("/admin/events", headers=image), 403)


async def test_form_of_the_own_page_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Only requests with JSON bodies change anything."""
    async with open_with_pools(tokenizer, tmp_path) as (pools, _, client):
        form = {"origin": LOCAL, "content-type": "text/plain"}
        answer = await client.post("/admin/drain", content=b'{"worker": "decode-1"}', headers=form)
        assert (answer.status_code, pools.removed) == (415, [])


async def test_state_contains_what_the_supervisor_reports(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with open_with_pools(tokenizer, tmp_path) as (_, router, client):
        router.members.list.append(
            replace(router.members.list[1], id=WorkerId("d1"), role=Role.DECODE)
        )
        await router.service.cluster.refresh()
        state = (await client.get("/admin/state")).json()
        assert state["tables"]["supervised"]["rows"]["decode-1"]["state"] == "starting"
        pool = state["tables"]["pools"]["rows"]["demo|decode"]
        assert (pool["desired"], pool["num_workers"]) == (2, 2)
        assert state["cluster"]["can_change_pools"]


async def test_supervisor_that_is_gone_is_reported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with open_harness(tokenizer, control_socket=str(tmp_path / "gone")) as (_, client):
        cluster = (await client.get("/admin/state")).json()["cluster"]
        assert "the supervisor does not answer" in cluster["pools_error"]
