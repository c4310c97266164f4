"""Tests listing and resizing the worker pools and draining workers over HTTP, with and without a
supervisor's control socket."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid, Overloaded
from baton.pools.base import PoolWorker
from baton.pools.model_pools import ModelPools
from baton.text.tokenizer import Tokenizer
from orchestrator.control_server import start_control_server
from tests import router_harness
from tests.router_harness import open_harness

tokenizer = router_harness.tokenizer
JSON = {"content-type": "application/json"}


class FakePools:
    """Worker pools that record the requested sizes in ``scaled`` and the workers to be removed in
    ``removed``."""

    def __init__(self) -> None:
        self.scaled: list[Mapping[Role, int]] = []
        self.removed: list[str] = []
        self.is_last = False

    async def sizes(self) -> Mapping[Role, int]:
        return {Role.PREFILL: 1, Role.DECODE: 2}

    async def workers(self) -> list[PoolWorker]:
        return [PoolWorker(WorkerId("decode-1"), Role.DECODE, "starting", "10.0.0.2", "soon")]

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        if wanted.get(Role.DECODE) == 9:
            raise Overloaded("somebody else is changing the pool")
        self.scaled.append(wanted)

    async def remove(self, worker_id: WorkerId) -> None:
        if self.is_last:
            raise Invalid(f"{worker_id} is the last decode worker")
        self.removed.append(worker_id)


@pytest.fixture
async def pools(tmp_path: Path) -> FakePools:
    return FakePools()


async def test_pools_are_listed_scaled_and_drained(
    tokenizer: Tokenizer,
    pools: FakePools,
    tmp_path: Path,
) -> None:
    path = tmp_path / "control.sock"
    control = await start_control_server(path, ModelPools({"demo": pools}))
    async with control, open_harness(tokenizer, control_socket=str(path)) as (_, client):
        expected = {
            "sizes": {"prefill": 1, "decode": 2},
            "workers": [
                {
                    "id": "decode-1", "role": "decode", "state": "starting", "node": "10.0.0.2",
                    "message": "soon", "model": "",
                }
            ],
        }  # fmt: skip
        assert (await client.get("/admin/pools")).json() == expected
        answer = await client.post("/admin/scale", json={"prefill": 2, "decode": 3})
        assert (answer.status_code, answer.json()) == (200, expected)
        assert pools.scaled == [{Role.PREFILL: 2, Role.DECODE: 3}]
        answer = await client.post("/admin/drain", json={"worker": "decode-1"})
        assert (answer.status_code, pools.removed) == (200, ["decode-1"])


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("scale", b"{}", 400, 'like {"prefill": 2, "decode": 3}'),
        ("scale", b'{"prefill": true}', 400, "like"),
        ("scale", b'{"prefill": "2"}', 400, "like"),
        (
            "scale",
            b'{"router": 2}',
            400,
            "there is no pool 'router'; the pools are prefill, decode",
        ),
        ("scale", b'{"decode": -1}', 400, "not decode=-1"),
        ("scale", b'{"decode": 9}', 429, "somebody else"),
        ("scale", b"[1]", 400, "must be a JSON object"),
        ("scale", b"{", 400, "not JSON"),
        ("scale", b" " * 5000, 413, "at most 4096 bytes"),
        ("drain", b'{"worker": 1}', 400, 'like {"worker": "decode-1"}'),
        ("drain", b'{"worker": "decode-1", "now": true}', 400, "like"),
        ("drain", b'{"worker": "decode-7"}', 404, "no worker 'decode-7'"),
    ],
)
async def test_invalid_requests_are_rejected(
    tokenizer: Tokenizer,
    pools: FakePools,
    tmp_path: Path,
    path: str,
    body: bytes,
    status: int,
    message: str,
) -> None:
    socket = tmp_path / "control.sock"
    control = await start_control_server(socket, ModelPools({"demo": pools}))
    async with control, open_harness(tokenizer, control_socket=str(socket)) as (_, client):
        answer = await client.post(f"/admin/{path}", content=body, headers=JSON)
        assert (answer.status_code, pools.scaled, pools.removed) == (status, [], [])
        assert message in answer.json()["error"]["message"]
        plain = await client.post(f"/admin/{path}", content=body)
        assert plain.status_code == 415


async def test_the_last_worker_of_a_pool_is_not_drained(
    tokenizer: Tokenizer, pools: FakePools, tmp_path: Path
) -> None:
    pools.is_last = True
    socket = tmp_path / "control.sock"
    control = await start_control_server(socket, ModelPools({"demo": pools}))
    async with control, open_harness(tokenizer, control_socket=str(socket)) as (_, client):
        answer = await client.post("/admin/drain", json={"worker": "decode-1"})
        assert (answer.status_code, pools.removed) == (400, [])
        assert "the last decode worker" in answer.json()["error"]["message"]


async def test_missing_supervisor_is_reported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with open_harness(tokenizer) as (_, client):
        answer = await client.get("/admin/pools")
        assert answer.status_code == 501
        assert "not started by `baton up`" in answer.json()["error"]["message"]
    async with open_harness(tokenizer, control_socket=str(tmp_path / "gone")) as (_, client):
        answer = await client.get("/admin/pools")
        assert answer.status_code == 503
        assert "the supervisor does not answer" in answer.json()["error"]["message"]


async def test_admin_api_needs_the_admin_key(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, admin_key="root") as (_, client):
        responses = [
            client.get("/admin/pools"),
            client.post("/admin/scale", json={"decode": 2}),
            client.post("/admin/drain", json={"worker": "decode-1"}),
        ]
        assert [answer.status_code for answer in await asyncio.gather(*responses)] == [401] * 3
        key = {"authorization": "Bearer root"}
        assert (await client.get("/admin/pools", headers=key)).status_code == 501


async def test_web_pages_are_rejected_without_an_admin_key(tokenizer: Tokenizer) -> None:
    page = {"origin": "http://evil.example"}
    async with open_harness(tokenizer) as (_, client):
        scaled = await client.post("/admin/scale", json={"decode": 2}, headers=page)
        assert scaled.status_code == 403
        renamed = await client.get("/admin/pools", headers={"host": "evil.example:8000"})
        assert renamed.status_code == 403
        for host in ("127.0.0.1:8000", "localhost:8000", "[::1]:8000"):
            answer = await client.get("/admin/pools", headers={"host": host})
            assert answer.status_code == 501, host
    async with open_harness(tokenizer, admin_key="root") as (_, client):
        key = {"authorization": "Bearer root", "host": "baton.example"}
        assert (await client.get("/admin/pools", headers=key)).status_code == 501
