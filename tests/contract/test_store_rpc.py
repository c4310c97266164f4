"""Tests a store node, over gRPC and over its Unix socket, and a conductor: responses, errors, and
the cluster secret."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.clock import ManualClock
from baton.config import load_settings
from baton.core.cost import DecodeCost, PrefillCost
from baton.core.credentials import ClusterCredentials
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TenantId, WorkerId
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef, WorkerRef
from baton.core.member import Member
from baton.core.placement import (
    MAX_ALTERNATIVES,
    Placement,
    PlacementQuery,
    ScoredWorker,
)
from baton.core.pool_plan import MAX_POOL_ALTERNATIVES, PoolAlternative, PoolPlan
from baton.core.states import Role, WorkerState
from baton.core.store import BlockFilter, LeaseRequest, PutRequest, PutResult, Tier
from baton.core.worker_load import WorkerLoad
from baton.errors import (
    Cancelled,
    Corrupt,
    DeadlineExceeded,
    Invalid,
    Overloaded,
    Unauthorized,
    Unavailable,
)
from baton.registry.member_codec import member_from_json
from baton.registry.membership import Membership
from baton.rpc.channel import call_member
from baton.rpc.conductor_client import fetch_pool_plan, request_placement
from baton.rpc.conductor_service import add_conductor_service, framed_conductor_services
from baton.rpc.framed.calls import CallClient
from baton.rpc.framed.server import FramedServer
from baton.rpc.kvstore_client import KvStoreClient, fetch_store_stats
from baton.rpc.kvstore_service import add_kvstore_service, local_kvstore_services
from baton.rpc.server import build_server, listen
from baton.rpc.service import CONDUCTOR
from baton.rpc.v1 import conductor_pb2 as pb
from conductor.conductor import Conductor, ConductorConfig
from conductor.program import ConductorProgram
from conductor.store_mirror import StoreMirror
from testkit.fakes.registry import MemoryRegistry
from tests.store_harness import KEYS, SIZE, UNLIMITED_BYTES, StoreHarness

SECRET = "a secret of the cluster"


@asynccontextmanager
async def served(add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    server = build_server(SECRET)
    add(server)
    port = await listen(server, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


@dataclass
class Served:
    harness: StoreHarness
    address: str
    socket_path: str
    client: KvStoreClient
    stop: Callable[[], Awaitable[None]]


@pytest.fixture(params=["grpc", "local_rpc"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    """A store node and its client, over gRPC or over its Unix socket."""
    harness = StoreHarness()
    server, path = None, ""
    if request.param == "local_rpc":
        path = str(tmp_path / "sockets" / "node.sock")
        server = FramedServer(ClusterCredentials(), local_kvstore_services(harness.node))
        await server.listen_locally(Path(path))
    async with contextlib.AsyncExitStack() as stack:
        serving = served(lambda grpc_server: add_kvstore_service(grpc_server, harness.node))
        address = await stack.enter_async_context(serving)

        async def stop() -> None:
            if server is not None:
                await server.close()
            await stack.aclose()

        client = KvStoreClient(address, SECRET, path)
        yield Served(harness, address, path, client, stop)
        await client.close()
        if server is not None:
            await server.close()


def query(*numbers: int, seconds: float = 5.0, max_bytes: int = UNLIMITED_BYTES) -> LeaseRequest:
    return LeaseRequest(tuple(KEYS[number] for number in numbers), seconds, max_bytes)


async def test_blocks_are_put_leased_and_released(store: Served) -> None:
    harness, client = store.harness, store.client
    endpoint = await client.open(["memory"], "here")
    assert (endpoint.owner, endpoint.region_size_bytes) == ("store", 4 * SIZE)
    assert await client.put(harness.request([0, 1])) == PutResult(2, 0)
    tagged = harness.request([0, 1, 2], tenant=b"t" * 16, model=b"m" * 16)
    assert await client.put(tagged) == PutResult(1, 2)
    assert await client.put(
        replace(tagged, blocks=(), preceding_keys=tuple(KEYS[:3]))
    ) == PutResult(0, 0)
    leased = await client.lease(query(0, 1, 2, 3))
    assert leased.blocks == tuple(
        replace(harness.ref(number), offset_bytes=number * SIZE) for number in range(3)
    )
    assert (leased.checksum_algorithm, leased.num_stored) == (CHECKSUM_XXH3, 3)
    assert (await fetch_store_stats(store.address, SECRET)).leased_blocks == 3
    for _ in range(2):
        await client.release(leased.lease_id)
    assert await fetch_store_stats(store.address, SECRET) == harness.node.stats()
    assert (await client.stat()).leased_blocks == 0
    nothing = await client.lease(query(5))
    assert (nothing.lease_id, nothing.blocks) == ("", ())
    assert await client.pin(KEYS[:2], 60.0) == 2
    harness.flip_bit(leased.blocks[2].offset_bytes)
    assert await client.report_damaged(KEYS[:3]) == 1
    blocks, total = await client.list_blocks(BlockFilter(), 1, 5)
    assert ([(b.key, b.tier, b.num_leases) for b in blocks], total) == (
        [(KEYS[1], Tier.DRAM, 1)],
        2,
    )
    assert await client.purge(BlockFilter(tenant=b"t" * 16)) == 0
    assert await client.purge(BlockFilter()) == 2


async def test_statistics_without_a_check_visit_no_block(
    store: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.harness.node, "_integrity_error", lambda: "a block is lost")
    assert (await store.client.stat()).violation == "a block is lost"
    assert (await store.client.stat(check=False)).violation == ""


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda request: replace(request, blocks=()), "blocks or preceding keys; it has neither"),
        (lambda request: replace(request, blocks=tuple(unsized(request))), "have a size"),
        (lambda request: replace(request, blocks=tuple(with_short_key(request))), "has 26 bytes"),
        (
            lambda request: replace(request, tenant=b"t" * 17),
            "`tenant` and `model` must have at most 16 bytes each, not 17",
        ),
        (lambda request: replace(request, first_block=2**32 - 1), "at most 2147483648"),
    ],
)
async def test_malformed_puts_are_refused(
    store: Served, spoil: Callable[[PutRequest], PutRequest], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        await store.client.put(spoil(store.harness.request([0, 1])))
    assert (await store.client.stat()).num_blocks == 0


def unsized(request: PutRequest) -> Iterator[BlockRef]:
    return (replace(block, size_bytes=0) for block in request.blocks)


def with_short_key(request: PutRequest) -> Iterator[BlockRef]:
    """Yield two blocks, the first with a 10-byte key: 26 bytes of keys in total instead of 32."""
    yield replace(request.blocks[0], key=BlockKey(b"ten bytes."))
    yield request.blocks[1]


async def test_errors_of_the_node_reach_the_client_unchanged(
    store: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, client = store.harness, store.client
    with pytest.raises(Corrupt, match="a block does not match its checksum"):
        await client.put(harness.request([0], checksum_error=1))
    monkeypatch.setattr("baton.rpc.convert.kvstore.keys_from_bytes.__defaults__", (2,))
    with pytest.raises(
        Invalid, match="`keys` has 48 bytes; it must consist of at most 2 keys of 16 bytes"
    ):
        await client.lease(query(0, 1, 2))
    monkeypatch.undo()
    await harness.put(0)
    for seconds in (0.0, 61.0, float("nan")):
        with pytest.raises(Invalid, match="must last more than 0 and up to 60 s"):
            await client.lease(query(0, seconds=seconds))
    monkeypatch.setattr("kvstore.put_handler.MAX_PUTS", 0)
    with pytest.raises(Overloaded) as refusal:
        await client.put(harness.request([1]))
    assert refusal.value.retry_after_seconds == 0.2


async def test_a_node_that_stops_during_a_call_is_unavailable(store: Served) -> None:
    gate = asyncio.Event()
    begun = asyncio.Event()

    async def hang(request: object) -> None:
        begun.set()
        await gate.wait()

    store.harness.node.lease = hang  # type: ignore[assignment,method-assign]
    store.harness.node.lease_from_dram = lambda query: None  # type: ignore[method-assign]
    leasing = asyncio.create_task(store.client.lease(query(0)))
    await begun.wait()
    await store.stop()
    with pytest.raises((Unavailable, Cancelled)):
        await leasing
    with pytest.raises(Unavailable):
        await store.client.lease(query(0))


async def test_a_call_to_a_silent_node_times_out(store: Served) -> None:
    async def hang(request: object) -> None:
        await asyncio.Event().wait()

    store.harness.node.lease = hang  # type: ignore[assignment,method-assign]
    store.harness.node.lease_from_dram = lambda query: None  # type: ignore[method-assign]
    client = KvStoreClient(store.address, SECRET, store.socket_path, call_seconds=0.05)
    with pytest.raises(DeadlineExceeded):
        await client.lease(query(0))
    await client.close()


async def test_a_watcher_gets_a_snapshot_and_then_every_change(store: Served) -> None:
    harness = store.harness
    await harness.put(0, 1)
    watching = store.client.watch(Incarnation(0), 0)
    first = await anext(watching)
    assert (first.is_reset, first.has_more, first.tier, set(first.keys)) == (
        True,
        False,
        Tier.DRAM,
        set(KEYS[:2]),
    )
    await harness.put(2)
    change = await anext(watching)
    assert (change.number, change.tier, change.keys) == (first.number + 1, Tier.DRAM, (KEYS[2],))
    assert await harness.node.purge(BlockFilter()) == 3
    numbers = [(await anext(watching)).number for _ in range(3)]
    assert numbers == [change.number + 1, change.number + 2, change.number + 3]
    # A watcher that is up to date gets only later changes, without a snapshot.
    again = store.client.watch(Incarnation(1), numbers[-1])
    await harness.put(3)
    page = await anext(again)
    assert (page.is_reset, page.number, page.keys) == (False, numbers[-1] + 1, (KEYS[3],))
    await store.stop()
    with pytest.raises(Unavailable):
        await anext(again)
    await watching.aclose()  # type: ignore[attr-defined]


async def test_the_store_requires_the_cluster_secret(store: Served) -> None:
    with pytest.raises(Unauthorized):
        await fetch_store_stats(store.address, "another")
    with pytest.raises(Unauthorized):
        await fetch_store_stats(store.address)
    stranger = KvStoreClient(store.address, "another")
    with pytest.raises(Unauthorized):
        await anext(stranger.watch(Incarnation(0), 0))
    await stranger.close()


def member(name: str, role: Role) -> Member:
    return Member(
        WorkerId(name), role, f"{name}:1", Incarnation(7), WorkerState.READY, block_tokens=16
    )


async def core_of(*members: Member, **config: Any) -> Conductor:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    for each in members:
        await registry.announce(each, 60.0)
    membership = Membership(registry, clock)
    await membership.refresh()
    return Conductor(membership, StoreMirror(), clock, ConductorConfig(**config))


@asynccontextmanager
async def asking(core: Any) -> AsyncIterator[CallClient]:
    """Serve a conductor's core as to routers, and yield a client."""
    trust = ClusterCredentials(SECRET)
    server = FramedServer(trust, framed_conductor_services(core))
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    client = CallClient(address, CONDUCTOR, trust)
    try:
        yield client
    finally:
        client.close()
        await server.close()


@asynccontextmanager
async def conductor(*members: Member, **config: Any) -> AsyncIterator[CallClient]:
    async with asking(await core_of(*members, **config)) as client:
        yield client


def placement_query(*excluded: str, keys: tuple[BlockKey, ...] = tuple(KEYS)) -> PlacementQuery:
    workers = frozenset(WorkerId(name) for name in excluded)
    return PlacementQuery(RequestId("r"), Epoch(1), TenantId("t"), 133, 16, keys, workers, "m")


async def ask(
    client: CallClient, *excluded: str, keys: tuple[BlockKey, ...] = tuple(KEYS)
) -> Placement:
    return await request_placement(client, placement_query(*excluded, keys=keys), 30.0)


def loaded(member: Member, **load: Any) -> Member:
    return replace(member, load=WorkerLoad(at_seconds=1.0, num_blocks=100, **load))


async def test_a_placement_is_returned_with_its_reason_and_alternatives() -> None:
    prefill_cost, decode_cost = PrefillCost(0.0, 0.001, 0.0), DecodeCost(0.01, 0.0, 0.0)
    workers = [
        loaded(member("p", Role.PREFILL), prefill_cost=prefill_cost),
        loaded(member("d", Role.DECODE), decode_cost=decode_cost),
    ]
    async with conductor(*workers) as client:
        placement = await ask(client)
    assert placement.prefill == WorkerRef(WorkerId("p"), "p:1", Incarnation(7))
    assert placement.decode == WorkerRef(WorkerId("d"), "d:1", Incarnation(7))
    assert placement.reason == (
        "0 of 16 blocks cached, 0 to fetch, starts in 0.000 s, prefill takes 0.133 s, best of 1"
    )
    assert (placement.policy, placement.store_hint) == ("baton", None)
    assert (placement.ttft_seconds, placement.itl_seconds) == (0.133, 0.01)
    assert placement.prefill_alternatives == (
        ScoredWorker(WorkerId("p"), 4 * 0.133, 0.0, 0.133, 0, 0, 0.0),
    )
    # 133 prompt tokens and at most 16 generated ones, of 1,600.
    assert placement.decode_alternatives == (
        ScoredWorker(WorkerId("d"), 149 / 1600, 0.0, 0.01, 0, 0, 0.0),
    )


async def test_a_router_gets_a_bounded_number_of_alternatives() -> None:
    class ManyAlternatives:
        def place(self, query: PlacementQuery) -> Placement:
            others = tuple(ScoredWorker(WorkerId(f"p{n}"), float(n)) for n in range(20))
            ref = WorkerRef(WorkerId("d"), "d:1", Incarnation(7))
            return Placement(None, ref, "", prefill_alternatives=others)

        def describe(self) -> tuple[list[str], str]:
            return [], ""

    async with asking(ManyAlternatives()) as client:
        placement = await ask(client)
    assert [each.score for each in placement.prefill_alternatives] == list(range(MAX_ALTERNATIVES))


async def test_without_prefill_workers_a_decode_worker_serves_alone() -> None:
    async with conductor(member("p", Role.PREFILL), member("d", Role.DECODE)) as client:
        decode = WorkerRef(WorkerId("d"), "d:1", Incarnation(7))
        alone = await ask(client, "p")
        assert (alone.prefill, alone.decode) == (None, decode)
        assert (alone.ttft_seconds, alone.itl_seconds) == (None, None)
        with pytest.raises(Unavailable, match="no worker is ready"):
            await ask(client, "p", "d")


async def test_errors_of_the_conductor_reach_the_router() -> None:
    full = loaded(member("d", Role.DECODE), decode_requests=3, promised_tokens=1590,
                  short_answer_tokens=1.0)  # fmt: skip
    small = replace(full, load=replace(full.load, num_blocks=8))
    async with conductor(member("p", Role.PREFILL), full) as client:
        with pytest.raises(Overloaded, match="room for 10 tokens, and 149 are needed") as refusal:
            await ask(client)
        # 139 of 1,590 tokens must be freed, at 10 ms for each of 256 generated tokens, less 40 ms
        # of slack.
        assert refusal.value.retry_after_seconds == pytest.approx(0.184, abs=0.001)
        with pytest.raises(Invalid, match="of 16 bytes each"):
            await ask(client, keys=(BlockKey(b"short"),))
    async with conductor(member("p", Role.PREFILL), small) as client:
        with pytest.raises(Invalid, match="133 tokens, and the largest decode worker has memory"):
            await ask(client)


async def test_too_many_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.rpc.convert.placement.MAX_KEYS", len(KEYS) - 1)
    async with conductor(member("d", Role.DECODE)) as client:
        with pytest.raises(Invalid, match="`block_keys` must have at most 15 keys"):
            await ask(client)


async def test_a_conductor_does_not_start_with_an_unknown_policy() -> None:
    settings = load_settings(redis_url="redis://127.0.0.1:1/0", placement_policy="best")
    program = ConductorProgram(settings)
    with pytest.raises(Invalid, match="unknown policy 'best'; known policies: baton, full_scan"):
        await program.start()
    await program.stop()


async def test_a_conductor_serves_its_pool_plan() -> None:
    plan = PoolPlan(
        2, 3, "why", 1, 2, 4.5, 1000.0, 100.0, 0.25,
        tuple(PoolAlternative("prefill", count, 1.5 / count) for count in range(1, 20)),
    )  # fmt: skip

    class Planning:
        plan: PoolPlan | None = None

        def describe(self) -> tuple[list[str], str]:
            return [], ""

        def pool_plan(self, model: str = "") -> PoolPlan | None:
            return self.plan

    core = Planning()
    async with served(lambda server: add_conductor_service(server, core)) as address:
        assert await fetch_pool_plan(address, SECRET, 30.0) is None
        core.plan = plan
        fetched = await fetch_pool_plan(address, SECRET, 30.0)
    assert fetched == replace(plan, alternatives=plan.alternatives[:MAX_POOL_ALTERNATIVES])


async def test_a_conductor_describes_the_cluster() -> None:
    members = [member("d", Role.DECODE), member("p", Role.PREFILL), member("s", Role.KVSTORE)]
    core = await core_of(*members)
    async with served(lambda server: add_conductor_service(server, core)) as address:
        request = pb.DescribeRequest()
        answer = await call_member(address, SECRET, CONDUCTOR, "Describe", request, 30.0)
    assert [member_from_json(text.encode()) for text in answer.members_json] == members
    assert answer.ring == "d p"
