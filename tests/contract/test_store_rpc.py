"""A store node and a conductor over real gRPC on loopback: answers, refusals, the secret."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from baton.clock import ManualClock
from baton.core.handoff import CHECKSUM_XXH3, WorkerRef
from baton.core.ids import BlockKey, Generation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.store import PutRequest, PutResult
from baton.errors import Corrupt, Invalid, Overloaded, Unauthorized, Unavailable
from baton.registry.codec import member_from_json
from baton.registry.membership import Membership
from baton.registry.memory import MemoryRegistry
from baton.rpc.channel import open_channel
from baton.rpc.conductor_client import ask_placement
from baton.rpc.conductor_service import add_conductor_service
from baton.rpc.kvstore_client import KvStoreClient, stat_store
from baton.rpc.kvstore_service import add_kvstore_service
from baton.rpc.server import build_server
from baton.rpc.v1 import conductor_pb2 as pb
from baton.rpc.v1 import conductor_pb2_grpc as pb_grpc
from conductor.conductor import Conductor
from conductor.policy.placement import PlacementConfig
from conductor.program import Door
from tests.unit.test_kvstore_node import KEYS, SIZE, House

SECRET = "a secret of the cluster"


@asynccontextmanager
async def served(add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    server = build_server(SECRET)
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


@asynccontextmanager
async def store() -> AsyncIterator[tuple[House, KvStoreClient, str]]:
    house = House()
    async with served(lambda server: add_kvstore_service(server, house.node)) as address:
        client = KvStoreClient(address, SECRET)
        try:
            yield house, client, address
        finally:
            await client.close()


async def test_blocks_are_put_lent_and_given_back() -> None:
    async with store() as (house, client, address):
        endpoint = await client.open(["memory"], "here")
        assert (endpoint.owner, endpoint.region_size_bytes) == ("store", 4 * SIZE)
        assert await client.put(house.request([0, 1])) == PutResult(2, 0)
        assert await client.put(house.request([0, 1, 2])) == PutResult(1, 2)
        leased = await client.lease(KEYS, 5.0)
        expected = house.request([0, 1, 2]).blocks
        assert [(block.key, block.checksum) for block in leased.blocks] == [
            (block.key, block.checksum) for block in expected
        ]
        assert leased.checksum_algorithm == CHECKSUM_XXH3
        assert (await client.stat()).leased_blocks == 3
        for _ in range(2):
            await client.release(leased.lease_id)
        assert await stat_store(address, SECRET) == house.node.stats()
        assert (await client.stat()).leased_blocks == 0
        nothing = await client.lease(KEYS[5:], 5.0)
        assert (nothing.lease_id, nothing.blocks) == ("", ())


def short(request: PutRequest) -> PutRequest:
    last = replace(request.blocks[-1], size_bytes=SIZE // 2)
    return replace(request, blocks=(*request.blocks[:-1], last))


def empty(request: PutRequest) -> PutRequest:
    return replace(request, blocks=tuple(replace(b, size_bytes=0) for b in request.blocks))


def keyless(request: PutRequest) -> PutRequest:
    return replace(request, blocks=(replace(request.blocks[0], key=BlockKey(b"")),))


def odd_key(request: PutRequest) -> PutRequest:
    return replace(request, blocks=(replace(request.blocks[0], key=BlockKey(b"short")),))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda request: replace(request, blocks=()), "a put has 1 to 2 blocks, not 0"),
        (lambda request: replace(request, blocks=request.blocks * 2), "1 to 2 blocks, not 4"),
        (short, "the blocks of a put have one size"),
        (empty, "the blocks of a put have one size"),
        (keyless, "every block of a put has a key"),
        (odd_key, "a block key has 16 bytes, not 5"),
    ],
)
async def test_malformed_puts_are_refused(
    spoil: Callable[[PutRequest], PutRequest], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.rpc.kvstore_service.MAX_KEYS", 2)
    async with store() as (house, client, _):
        with pytest.raises(Invalid, match=message):
            await client.put(spoil(house.request([0, 1])))
        assert (await client.stat()).num_blocks == 0


async def test_refusals_of_the_node_arrive_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.rpc.kvstore_service.MAX_KEYS", 4)
    async with store() as (house, client, _):
        with pytest.raises(Corrupt, match="not what was announced"):
            await client.put(house.request([0], wrong=1))
        with pytest.raises(Invalid, match="a lease asks for at most 4 keys"):
            await client.lease(KEYS, 1.0)
        for seconds in (0.0, 61.0, float("nan")):
            with pytest.raises(Invalid, match="a lease lasts up to 60 s"):
                await client.lease(KEYS[:1], seconds)
        monkeypatch.setattr("kvstore.node.MAX_PUTS", 0)
        with pytest.raises(Overloaded) as refusal:
            await client.put(house.request([0]))
        assert refusal.value.retry_after_seconds == 0.2


async def test_the_store_asks_for_the_secret() -> None:
    async with store() as (_, _, address):
        with pytest.raises(Unauthorized):
            await stat_store(address, "another")
        with pytest.raises(Unauthorized):
            await stat_store(address)


async def test_a_store_that_is_gone() -> None:
    async with store() as (_, _, address):
        pass
    with pytest.raises(Unavailable):
        await stat_store(address, SECRET)


def member(name: str, role: Role) -> Member:
    return Member(
        WorkerId(name), role, f"{name}:1", Generation(7), WorkerState.READY, block_tokens=16
    )


@asynccontextmanager
async def conductor(*members: Member, **config: Any) -> AsyncIterator[grpc.aio.Channel]:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    for one in members:
        await registry.announce(one, 60.0)
    membership = Membership(registry, clock)
    await membership.refresh()
    door = Door(Conductor(membership, clock, PlacementConfig(**config)))
    async with (
        served(lambda server: add_conductor_service(server, door)) as address,
        open_channel(address, SECRET) as channel,
    ):
        yield channel


async def ask(
    channel: grpc.aio.Channel, *excluded: str, keys: tuple[BlockKey, ...] = tuple(KEYS)
) -> tuple[WorkerRef | None, WorkerRef, str]:
    return await ask_placement(
        channel, request_id="r", epoch=1, tenant="t", num_tokens=133, max_new_tokens=16,
        block_keys=keys, excluded=excluded, model="m", timeout_seconds=30.0,
    )  # fmt: skip


async def test_a_placement_and_the_same_again() -> None:
    async with conductor(member("p", Role.PREFILL), member("d", Role.DECODE)) as channel:
        prefill = WorkerRef(WorkerId("p"), "p:1", Generation(7))
        decode = WorkerRef(WorkerId("d"), "d:1", Generation(7))
        reason = "0 of 8 blocks cached, 0 tokens queued, best of 1"
        assert await ask(channel) == (prefill, decode, reason)
        reason = "8 of 8 blocks cached, 133 tokens queued, best of 1"
        assert await ask(channel) == (prefill, decode, reason)
        assert await ask(channel, "p") == (None, decode, "no prefill worker is ready")
        with pytest.raises(Unavailable, match="no worker is ready"):
            await ask(channel, "p", "d")


async def test_a_conductor_refuses() -> None:
    async with conductor(member("d", Role.DECODE), max_requests_per_worker=0) as channel:
        with pytest.raises(Overloaded, match="all 1 workers have 0 requests") as refusal:
            await ask(channel)
        assert refusal.value.retry_after_seconds == 1.0
        with pytest.raises(Invalid, match="of 16 bytes each"):
            await ask(channel, keys=(BlockKey(b"short"),))


async def test_too_many_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.rpc.conductor_service.MAX_KEYS", len(KEYS) - 1)
    async with conductor(member("d", Role.DECODE)) as channel:
        with pytest.raises(Invalid, match="block_keys are at most 7"):
            await ask(channel)


async def test_a_conductor_describes_the_cluster() -> None:
    members = [member("d", Role.DECODE), member("p", Role.PREFILL), member("s", Role.KVSTORE)]
    async with conductor(*members) as channel:
        answer = await pb_grpc.ConductorStub(channel).Describe(pb.DescribeRequest(), timeout=30.0)
    assert [member_from_json(text.encode()) for text in answer.members_json] == members
    assert answer.ring == "d p"
