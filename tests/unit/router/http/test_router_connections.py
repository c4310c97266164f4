"""Tests a router's framed connections to fake workers and conductors, and its placement by hash
ring, which needs no conductor."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from baton.clock import ManualClock, SystemClock
from baton.core.credentials import ClusterCredentials
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TenantId, TokenId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.request import RequestOutput, RequestSpec, SamplingParams
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.core.worker_load import WorkerLoad
from baton.errors import BatonError, Overloaded, Unavailable, Unresponsive
from baton.rpc.convert.common import output_from_proto
from baton.rpc.convert.error import error_to_proto
from baton.rpc.framed.calls import CallClient, call_services
from baton.rpc.framed.server import FramedServer
from baton.rpc.service import CONDUCTOR
from baton.rpc.v1 import common_pb2, conductor_pb2
from baton.rpc.worker_service import framed_worker_services
from baton.worker.output_stream import OutputStream
from router.generation.cluster import Cluster
from router.generation.conductor_placer import ConductorPlacer
from router.generation.output_queue import OutputDeliveryError, OutputQueue
from router.generation.placement import FallbackPlacer
from router.generation.ring_placer import RingPlacer
from router.generation.worker_connection import FramedWorkerConnection, NotConnected, WorkerLost
from router.generation.worker_connection_pool import WorkerConnectionPool

SPEC = RequestSpec(
    RequestId("r"), Epoch(1), (TokenId(1), TokenId(2)), 2, SamplingParams(max_tokens=4)
)


Stop = Callable[[], Awaitable[None]]


class FakeCore:
    """A fake worker behind the RPC services, which records requests. A test puts the outputs into
    its streams."""

    def __init__(self) -> None:
        self.streams: list[OutputStream] = []
        self.submitted: list[tuple[RequestSpec, Task, WorkerRef | None]] = []
        self.cancelled: list[tuple[str, int]] = []
        self.closed = 0
        self.changed = asyncio.Event()

    def open_stream(self) -> OutputStream:
        stream = OutputStream(self._submit, self._cancel, self._on_close)
        self.streams.append(stream)
        return stream

    def _submit(
        self, stream: OutputStream, spec: RequestSpec, task: Task, source: WorkerRef | None
    ) -> None:
        self.submitted.append((spec, task, source))
        self.changed.set()

    def _cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        self.cancelled.append((request_id, epoch))
        self.changed.set()

    def _on_close(self, stream: OutputStream) -> None:
        self.closed += 1
        self.changed.set()

    async def wait(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def framed_worker(
    secret: str | None = None,
) -> AsyncIterator[tuple[FakeCore, WorkerRef, Stop]]:
    core = FakeCore()
    server = FramedServer(ClusterCredentials(secret), framed_worker_services(core))  # type: ignore[arg-type]
    port = await server.listen("127.0.0.1", 0)
    try:
        ref = WorkerRef(WorkerId("w"), "127.0.0.1:9", Incarnation(1), f"127.0.0.1:{port}")
        yield core, ref, server.close
    finally:
        await server.close()


@asynccontextmanager
async def open_connections(secret: str | None = None) -> AsyncIterator[WorkerConnectionPool]:
    links = WorkerConnectionPool(secret)
    running = asyncio.create_task(links.run())
    await asyncio.sleep(0)
    try:
        yield links
    finally:
        running.cancel()
        await asyncio.wait([running])


def output(request_id: str, *tokens: int, epoch: int = 1) -> RequestOutput:
    ids = tuple(TokenId(token) for token in tokens)
    return RequestOutput(RequestId(request_id), Epoch(epoch), 0, ids)


async def test_one_connection_carries_all_requests() -> None:
    async with framed_worker("s") as (core, ref, _), open_connections("s") as links:
        link, one, two = links.connect(ref), OutputQueue(), OutputQueue()
        source = WorkerRef(WorkerId("p"), "p:1", Incarnation(7))
        link.submit(SPEC, Task.DECODE, source, one.put)
        other = replace(SPEC, request_id=RequestId("q"))
        links.connect(ref).submit(other, Task.PREFILL_AND_DECODE, None, two.put)
        await core.wait(lambda: len(core.submitted) == 2)
        assert core.submitted == [
            (SPEC, Task.DECODE, source),
            (other, Task.PREFILL_AND_DECODE, None),
        ]
        assert len(core.streams) == 1
        for each in (output("q", 5), output("r", 9, epoch=2), output("x", 1), output("r", 6)):
            core.streams[0].put(each)
        assert await one.get_batch() == [("w", output("r", 6))]
        assert await two.get_batch() == [("w", output("q", 5))]
        link.cancel(RequestId("r"), Epoch(1))
        await core.wait(lambda: core.cancelled)
        assert core.cancelled == [("r", 1)]
        core.streams[0].put(output("r", 7))
        core.streams[0].put(output("q", 8))
        assert await two.get_batch() == [("w", output("q", 8))]
        one.put(WorkerId("w"), Unavailable("the end"))
        assert [type(item) for _, item in await one.get_batch()] == [Unavailable]


async def test_broken_connection_fails_all_requests_and_a_new_one_connects() -> None:
    async with framed_worker() as (core, ref, stop), open_connections() as links:
        inboxes = [OutputQueue(), OutputQueue()]
        for number, inbox in enumerate(inboxes):
            spec = replace(SPEC, request_id=RequestId(str(number)))
            links.connect(ref).submit(spec, Task.PREFILL_AND_DECODE, None, inbox.put)
        await core.wait(lambda: len(core.submitted) == 2)
        assert links.is_alive(ref)
        dead = links.connect(ref)
        await stop()
        for inbox in inboxes:
            [(worker_id, error)] = await inbox.get_batch()
            assert worker_id == "w"
            assert isinstance(error, WorkerLost)
        assert not links.is_alive(ref)
        late = OutputQueue()
        dead.submit(SPEC, Task.PREFILL_AND_DECODE, None, late.put)
        assert isinstance((await late.get_batch())[0][1], Unavailable)
    async with framed_worker() as (core, ref, _), open_connections() as links:
        links.connect(ref).submit(SPEC, Task.PREFILL_AND_DECODE, None, OutputQueue().put)
        await core.wait(lambda: core.submitted)


async def test_failing_output_receiver_ends_only_its_request() -> None:
    async with framed_worker() as (core, ref, _), open_connections() as links:
        spoiled, other = OutputQueue(), OutputQueue()

        def crash(worker_id: WorkerId, item: RequestOutput | BatonError) -> None:
            if not isinstance(item, BatonError):
                raise ZeroDivisionError
            spoiled.put(worker_id, item)

        link = links.connect(ref)
        link.submit(SPEC, Task.PREFILL_AND_DECODE, None, crash)
        link.submit(
            replace(SPEC, request_id=RequestId("q")), Task.PREFILL_AND_DECODE, None, other.put
        )
        await core.wait(lambda: len(core.submitted) == 2)
        for each in (output("r", 1), output("q", 2)):
            core.streams[0].put(each)
        [(_, error)] = await spoiled.get_batch()
        assert isinstance(error, OutputDeliveryError)
        assert await other.get_batch() == [("w", output("q", 2))]
        assert link.is_alive and not links.recently_broken()


async def test_unconvertible_output_ends_only_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker of another version may send a field value that this version does not know."""

    def odd(message: Any) -> RequestOutput:
        if message.request_id == "r":
            raise KeyError(77)
        return output_from_proto(message)

    monkeypatch.setattr("baton.rpc.convert.outputs.output_from_proto", odd)
    async with framed_worker() as (core, ref, _), open_connections() as links:
        inboxes = {name: OutputQueue() for name in "rqs"}
        for name, inbox in inboxes.items():
            spec = replace(SPEC, request_id=RequestId(name))
            links.connect(ref).submit(spec, Task.PREFILL_AND_DECODE, None, inbox.put)
        await core.wait(lambda: len(core.submitted) == 3)
        for each in (output("r", 1), output("q", -1), output("s", 3)):
            core.streams[0].put(each)
        statuses = {}
        for name in "rq":
            [(_, result)] = await inboxes[name].get_batch()
            assert isinstance(result, RequestOutput)
            statuses[name] = result.details["error_status"]
        assert statuses == {"r": "DATA_LOSS", "q": "INTERNAL"}
        assert await inboxes["s"].get_batch() == [("w", output("s", 3))]
        assert links.is_alive(ref)


async def test_crashed_connection_fails_only_its_own_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def crash(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("router.generation.worker_connection.open_framed_connection", crash)
    async with framed_worker() as (_, ref, _), open_connections() as links:
        inbox = OutputQueue()
        links.connect(ref).submit(SPEC, Task.PREFILL_AND_DECODE, None, inbox.put)
        [(_, error)] = await inbox.get_batch()
        assert isinstance(error, Unavailable) and "internal error" in str(error)
        assert links.connect(ref).is_alive  # a new connection


@pytest.mark.parametrize(
    "failure", [Unresponsive("no answer"), Overloaded("full"), BatonError("bug")]
)
async def test_connection_that_ends_otherwise_does_not_report_a_dead_worker(
    failure: BatonError,
) -> None:
    """If the worker is silent, or an error closes the connection, the requests on it fail with
    Unavailable itself. :class:`WorkerLost` would mean that one of them may have killed the worker,
    but a silent worker may be alive, and another request may have caused the error."""

    class Ending(FramedWorkerConnection):
        async def serve(self) -> BatonError:
            self.was_connected = True
            raise failure

    link, inbox = (
        Ending(WorkerRef(WorkerId("w"), "w:1", Incarnation(1)), ClusterCredentials()),
        OutputQueue(),
    )
    link.submit(SPEC, Task.PREFILL_AND_DECODE, None, inbox.put)
    await link.run()
    [(_, error)] = await inbox.get_batch()
    assert type(error) is Unavailable


@pytest.mark.parametrize("line", ["", "127.0.0.1:9"])
async def test_unreachable_worker_fails_the_request(line: str) -> None:
    async with open_connections() as links:
        ref, inbox = WorkerRef(WorkerId("w"), "127.0.0.1:9", Incarnation(1), line), OutputQueue()
        links.connect(ref).submit(SPEC, Task.PREFILL_AND_DECODE, None, inbox.put)
        async with asyncio.timeout(4):
            [(_, error)] = await inbox.get_batch()
    assert isinstance(error, NotConnected)
    assert f"can't connect to {line}: " in str(error)


async def test_wrong_secret_fails_the_request() -> None:
    async with framed_worker("right") as (core, ref, _), open_connections("wrong") as links:
        inbox = OutputQueue()
        links.connect(ref).submit(SPEC, Task.PREFILL_AND_DECODE, None, inbox.put)
        [(_, error)] = await inbox.get_batch()
        assert isinstance(error, Unavailable) and "secret" in str(error)
        assert core.streams == []


async def test_pool_can_stop_while_a_connection_is_being_opened() -> None:
    """A router that stops opens no new connections, and logs no error."""
    knocked = asyncio.Event()

    def knock() -> asyncio.Protocol:
        knocked.set()
        return asyncio.Protocol()

    silent = await asyncio.get_running_loop().create_server(knock, "127.0.0.1", 0)
    line = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    links = WorkerConnectionPool()
    running = asyncio.create_task(links.run())
    await asyncio.sleep(0)
    link = links.connect(WorkerRef(WorkerId("w"), line, Incarnation(1), line))
    await knocked.wait()
    running.cancel()
    await asyncio.wait([running])
    silent.close()
    assert running.cancelled() and not link.is_alive


async def test_closing_the_connections_frees_the_worker() -> None:
    async with framed_worker() as (core, ref, _):
        async with open_connections() as links:
            links.connect(ref).submit(SPEC, Task.PREFILL_AND_DECODE, None, OutputQueue().put)
            await core.wait(lambda: core.submitted)
        await core.wait(lambda: core.closed)


# -- placement ------------------------------------------------------------------------------


class StaticMembers:
    database_id = "1"

    def __init__(self, members: Sequence[Member]) -> None:
        self.list = list(members)

    async def members(self) -> list[Member]:
        return self.list


def member(name: str, role: Role, address: str = "", **fields: Any) -> Member:
    return Member(
        WorkerId(name), role, address or f"{name}:1", Incarnation(1), WorkerState.READY, **fields
    )


async def cluster_of(*members: Member) -> Cluster:
    cluster = Cluster(StaticMembers(members), SystemClock())
    await cluster.refresh()
    return cluster


async def ring_of(*members: Member) -> RingPlacer:
    return RingPlacer((await cluster_of(*members)).workers_of("", 100))


def query(
    request: str = "r", keys: int = 0, prefix: bytes = b"k", *excluded: str
) -> PlacementQuery:
    names = tuple(BlockKey(prefix + bytes([number])) for number in range(keys))
    ids = frozenset(WorkerId(name) for name in excluded)
    return PlacementQuery(RequestId(request), Epoch(1), TenantId("t"), 40, 8, names, ids, "m")


class FakeConductor:
    def __init__(self) -> None:
        self.requests: list[conductor_pb2.PlaceRequest] = []
        self.failure: BatonError | None = None
        self.delay_seconds = 0.0

    async def place(self, request: conductor_pb2.PlaceRequest) -> conductor_pb2.PlaceAnswer:
        self.requests.append(request)
        await asyncio.sleep(self.delay_seconds)
        if self.failure is not None:
            return conductor_pb2.PlaceAnswer(refusal=error_to_proto(self.failure))
        ref = common_pb2.WorkerRef
        placement = conductor_pb2.Placement(
            prefill=ref(id="p", address="p:1", generation=3),
            decode=ref(id="d", address="d:1", generation=4),
            reason="because",
        )
        return conductor_pb2.PlaceAnswer(placement=placement)


@asynccontextmanager
async def conductor() -> AsyncIterator[tuple[FakeConductor, ConductorPlacer, ManualClock]]:
    fake, clock, trust = FakeConductor(), ManualClock(), ClusterCredentials()
    server = FramedServer(trust, call_services(CONDUCTOR, fake))
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    cluster = await cluster_of(
        member("c", Role.CONDUCTOR, framed_address=address), member("d0", Role.DECODE)
    )
    placer = ConductorPlacer(cluster, clock, None)
    try:
        yield fake, placer, clock
    finally:
        placer.close()
        await server.close()


async def test_conductor_places_a_request() -> None:
    async with conductor() as (fake, placer, _):
        placement = await placer.place(query("r", 2, b"k", "x"))
    prefill = WorkerRef(WorkerId("p"), "p:1", Incarnation(3))
    decode = WorkerRef(WorkerId("d"), "d:1", Incarnation(4))
    assert placement == Placement(prefill, decode, "because")
    [request] = fake.requests
    assert (request.request_id, request.epoch, request.tenant, request.model) == ("r", 1, "t", "m")
    assert (request.num_tokens, request.max_new_tokens) == (40, 8)
    assert list(request.block_keys) == [b"k\x00", b"k\x01"]
    assert list(request.excluded_worker_ids) == ["x"]


async def test_conductors_overload_is_final() -> None:
    async with conductor() as (fake, placer, _):
        fake.failure = Overloaded("full", retry_after_seconds=3)
        with pytest.raises(Overloaded) as caught:
            await FallbackPlacer([placer, placer]).place(query())
    assert caught.value.retry_after_seconds == 3
    assert len(fake.requests) == 1


async def test_silent_conductor_is_skipped_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.generation.conductor_placer.CONDUCTOR_TIMEOUT_SECONDS", 0.25)
    async with conductor() as (fake, placer, clock):
        fake.delay_seconds = 5
        both = FallbackPlacer([placer, await ring_of(member("d", Role.DECODE))])
        for _ in range(2):
            assert (await both.place(query())).reason.startswith("ring")
        assert len(fake.requests) == 1
        clock.advance(3)
        fake.delay_seconds = 0
        assert (await both.place(query())).reason == "because"


async def test_requests_are_spread_over_conductors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different requests are first sent to different conductors. If a conductor does not answer,
    the next one is asked."""
    names = [f"c{number}" for number in range(3)]
    cluster = await cluster_of(
        *(member(name, Role.CONDUCTOR, framed_address=f"{name}:1") for name in names)
    )
    addresses: list[str] = []

    async def refuse(client: CallClient, query: PlacementQuery, seconds: float) -> Placement:
        addresses.append(client._address)
        raise Unavailable("the conductor is gone")

    monkeypatch.setattr("router.generation.conductor_placer.request_placement", refuse)
    placer = ConductorPlacer(cluster, ManualClock(), None)
    firsts = []
    for number in range(60):
        addresses.clear()
        with pytest.raises(Unavailable, match="the conductor is gone"):
            await placer.place(query(f"r{number}"))
        assert sorted(addresses) == [f"{name}:1" for name in names]
        firsts.append(addresses[0])
    assert all(firsts.count(f"{name}:1") >= 12 for name in names)


async def test_placement_without_a_conductor_fails() -> None:
    placer = ConductorPlacer(await cluster_of(), SystemClock(), None)
    with pytest.raises(Unavailable, match="no conductor is ready"):
        await placer.place(query())


async def test_ring_keeps_prefixes_together_and_spreads_the_rest() -> None:
    names = [f"p{n}" for n in range(4)]
    members = [*(member(n, Role.PREFILL) for n in names), member("d0", Role.DECODE)]
    ring, again, third = [await ring_of(*each) for each in (members, members[::-1], members)]
    by_prefix = set()
    for number in range(24):
        first = await ring.place(query("a", 9, bytes([number])))
        assert first == await again.place(query("b", 20, bytes([number])))
        assert first.prefill is not None
        by_prefix.add(first.prefill.id)
        moved = await third.place(query("a", 9, bytes([number]), first.prefill.id))
        assert moved.prefill is not None and moved.prefill.id != first.prefill.id
    assert by_prefix == set(names)


async def test_ring_avoids_an_overloaded_worker() -> None:
    idle = [member("p0", Role.PREFILL), member("p1", Role.PREFILL), member("d0", Role.DECODE)]
    favourite = (await (await ring_of(*idle)).place(query("r", 8))).prefill
    assert favourite is not None
    busy = [replace(m, load=WorkerLoad(running=50)) if m.id == favourite.id else m for m in idle]
    other = (await (await ring_of(*busy)).place(query("r", 8))).prefill
    assert other is not None and other.id != favourite.id


async def test_ring_with_an_empty_pool() -> None:
    alone = await ring_of(member("d0", Role.DECODE))
    assert (await alone.place(query())).prefill is None
    prefill_only = await ring_of(member("p0", Role.PREFILL))
    placement = await prefill_only.place(query())
    assert placement.prefill == placement.decode and placement.decode.id == "p0"
    with pytest.raises(Unavailable, match="no worker is ready"):
        await alone.place(query("r", 0, b"k", "d0"))


async def test_cluster_view_survives_an_unreachable_registry() -> None:
    class Members(StaticMembers):
        broken = False

        async def members(self) -> list[Member]:
            if self.broken:
                raise Unavailable("Redis can't be reached")
            return self.list

    registry = Members([member("d0", Role.DECODE, max_model_tokens=50)])
    cluster = Cluster(registry, SystemClock())
    workers = cluster.workers_of("", 100)
    assert (workers.is_ready, workers.max_model_tokens) == (False, 100)
    await cluster.refresh()
    registry.broken = True
    await cluster.refresh()
    assert (workers.is_ready, workers.max_model_tokens) == (True, 50)
