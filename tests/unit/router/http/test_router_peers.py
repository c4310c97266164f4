"""Tests how routers query each other's request records. A queried router must not learn the admin
key, since an attacker may have put its address into the registry."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.network.call_signing import PROOF_HEADER, CallSigner
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.http.peer_routers import PEER_HEADER, PURPOSE, PeerRouters, explain_path
from tests import router_harness
from tests.router_harness import RouterHarness, member, open_harness

tokenizer = router_harness.tokenizer

KEY = "the admin's own key"
ANSWER = b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"id": "c1"}'


def peers_of(router: RouterHarness, address: str, key: str | None = KEY) -> PeerRouters:
    return PeerRouters(WorkerId("r0"), lambda: address, router.service.cluster, None, key)


@asynccontextmanager
async def listening(received: list[bytes]) -> AsyncIterator[str]:
    """Listen as another router does, or as an attacker does who has put an address into the
    registry. Append each request to ``received``."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(ANSWER)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_queried_peer_learns_no_key(tokenizer: Tokenizer) -> None:
    received: list[bytes] = []
    async with (
        open_harness(tokenizer, admin_key=KEY) as (router, client),
        listening(received) as there,
    ):
        router.members.list.append(replace(member("r1", Role.ROUTER), address=there))
        await router.service.cluster.refresh()
        router.service.telemetry.peer_routers = peers_of(router, "10.0.0.1:8000")
        response = await client.get(explain_path("c1"), headers={"authorization": f"Bearer {KEY}"})
        assert response.status_code == 200 and response.json() == {"id": "c1"}
    assert len(received) == 1
    assert KEY.encode() not in received[0] and b"authorization" not in received[0].lower()
    head = dict(line.split(": ", 1) for line in received[0].decode().split("\r\n")[1:-2])
    proof = head[PROOF_HEADER]
    peers_of(router, there).check(explain_path("c1"), proof)  # a router there would accept it
    for elsewhere in (peers_of(router, "10.0.0.2:8000"), peers_of(router, there, "another")):
        with pytest.raises(ApiError):
            elsewhere.check(explain_path("c1"), proof)
    with pytest.raises(ApiError):
        peers_of(router, there).check(explain_path("c2"), proof)


@pytest.mark.parametrize(
    ("target", "key", "status"),
    [
        ("10.0.0.1:8000", KEY, 404),
        ("10.0.0.2:8000", KEY, 401),
        ("10.0.0.1:8000", "guessed", 401),
    ],
)
async def test_signed_query_of_a_peer_is_answered(
    tokenizer: Tokenizer, target: str, key: str, status: int
) -> None:
    async with open_harness(tokenizer, admin_key=KEY) as (router, client):
        router.service.telemetry.peer_routers = peers_of(router, "10.0.0.1:8000")
        signer = CallSigner(key, target, purpose=PURPOSE)
        headers = {PEER_HEADER: "1", **dict(signer.metadata(explain_path("c1")))}
        assert (await client.get(explain_path("c1"), headers=headers)).status_code == status
        assert (
            await client.get(explain_path("c1"), headers=headers)
        ).status_code == 401  # used already, or invalid
        assert (await client.get("/admin/pools", headers=headers)).status_code == 401


async def test_without_an_admin_key_no_peer_signature_is_accepted(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        router.service.telemetry.peer_routers = peers_of(router, "10.0.0.1:8000", None)
        response = await client.get(explain_path("c1"), headers={PROOF_HEADER: "anything"})
        assert response.status_code == 401
