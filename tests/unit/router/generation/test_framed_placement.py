"""Tests placement requests over a framed connection to a fake conductor, and so calls over framed
connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.clock import SystemClock
from baton.core.credentials import ClusterCredentials
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TenantId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.states import Role, WorkerState
from baton.errors import BatonError, DeadlineExceeded, Invalid, Overloaded, Unavailable
from baton.rpc.conductor_client import request_placement
from baton.rpc.conductor_service import framed_conductor_services
from baton.rpc.framed import calls
from baton.rpc.framed.calls import CallClient, call_services
from baton.rpc.framed.connection import FIRST_METHOD, FramedConnection, FrameKind
from baton.rpc.framed.server import FramedServer
from baton.rpc.service import CONDUCTOR
from baton.rpc.v1 import conductor_pb2 as pb
from router.generation.cluster import Cluster
from router.generation.conductor_placer import ConductorPlacer

TRUST = ClusterCredentials("hush")
DECODE = WorkerRef(WorkerId("d"), "d:1", Incarnation(4), "d:2")


@dataclass
class FakeCore:
    failure: BaseException | None = None
    requests: list[PlacementQuery] = field(default_factory=list)

    def place(self, query: PlacementQuery) -> Placement:
        self.requests.append(query)
        if self.failure is not None:
            raise self.failure
        return Placement(None, DECODE, query.request_id)


@asynccontextmanager
async def asking(services: Any) -> AsyncIterator[CallClient]:
    """Serve ``services``, and yield a client of the conductor among them."""
    server = FramedServer(TRUST, services)
    client = CallClient(f"127.0.0.1:{await server.listen('127.0.0.1', 0)}", CONDUCTOR, TRUST)
    try:
        async with asyncio.timeout(20):
            yield client
    finally:
        client.close()
        await server.close()


def placing(core: FakeCore) -> Any:
    return framed_conductor_services(core)  # type: ignore[arg-type]


def question(name: str = "r", key: bytes = bytes(16)) -> PlacementQuery:
    excluded = frozenset({WorkerId("x")})
    return PlacementQuery(
        RequestId(name), Epoch(1), TenantId("t"), 40, 8, (BlockKey(key),), excluded, "m"
    )


async def test_concurrent_calls_share_a_connection() -> None:
    connections: set[FramedConnection] = set()
    [(name, serve)] = placing(FakeCore()).items()

    def count(connection: FramedConnection) -> Any:
        connections.add(connection)
        return serve(connection)

    async with asking({name: count}) as client:
        names = [f"r{number}" for number in range(50)]
        for _ in range(2):  # first while the connection is being opened, then over the open one
            answers = await asyncio.gather(
                *(request_placement(client, question(each), 10.0) for each in names)
            )
            assert [answer.reason for answer in answers] == names
            assert {answer.decode for answer in answers} == {DECODE}
            assert answers[0].decode.framed_address == "d:2"
    assert len(connections) == 1


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (Overloaded("full", retry_after_seconds=3.5), Overloaded, "full"),
        (Invalid("too long"), Invalid, "too long"),
        (Unavailable("nobody"), Unavailable, "nobody"),
        (AssertionError("a bug"), BatonError, "internal error"),
    ],
)
async def test_refusal_is_returned_and_the_connection_stays_open(
    failure: BaseException, kind: type[BatonError], message: str
) -> None:
    core = FakeCore(failure)
    async with asking(placing(core)) as client:
        with pytest.raises(kind, match=message) as raised:
            await request_placement(client, question(), 10.0)
        if isinstance(raised.value, Overloaded):
            assert raised.value.retry_after_seconds == 3.5
        core.failure, connection = None, client._connection
        assert (await request_placement(client, question("again"), 10.0)).reason == "again"
        assert client._connection is connection


async def test_block_keys_of_a_wrong_size_are_refused() -> None:
    async with asking(placing(FakeCore())) as client:
        with pytest.raises(Invalid, match="16 bytes each"):
            await request_placement(client, question(key=b"short"), 10.0)


class Slow:
    """Handlers that wait until ``gate`` is set, and crash without it."""

    def __init__(self, gate: asyncio.Event | None) -> None:
        self._gate = gate
        self.num_cancelled = 0

    async def place(self, request: pb.PlaceRequest) -> pb.PlaceAnswer:
        assert self._gate is not None, "a bug"
        try:
            await self._gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return pb.PlaceAnswer(placement=pb.Placement(reason=request.request_id))


async def test_silent_conductor_times_out_and_a_closed_connection_fails() -> None:
    handlers = Slow(asyncio.Event())
    async with asking(call_services(CONDUCTOR, handlers)) as client:
        with pytest.raises(DeadlineExceeded):
            await request_placement(client, question(), 0.05)
        waiting = asyncio.create_task(request_placement(client, question(), 30.0))
        await asyncio.sleep(0.01)
        client.close()
        with pytest.raises(Unavailable):
            await waiting
        while handlers.num_cancelled < 2:
            await asyncio.sleep(0.001)


async def test_calls_beyond_the_maximum_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 2)
    gate = asyncio.Event()
    async with asking(call_services(CONDUCTOR, Slow(gate))) as client:
        waiting = [
            asyncio.create_task(client.call("Place", pb.PlaceRequest(request_id=name), 10.0))
            for name in "ab"
        ]
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="2 calls in progress"):
            await client.call("Place", pb.PlaceRequest(), 10.0)
        gate.set()
        assert [(await each).placement.reason for each in waiting] == ["a", "b"]


async def test_crash_of_a_handler_fails_only_its_call() -> None:
    async with asking(call_services(CONDUCTOR, Slow(None))) as client:
        for _ in range(2):
            with pytest.raises(BatonError, match="internal error"):
                await client.call("Place", pb.PlaceRequest(), 10.0)


async def test_unknown_method_is_refused() -> None:
    async with asking(placing(FakeCore())) as client:
        connection = await client.connect(5.0)
        number, answer = connection.begin_call(pb.PlaceAnswer)
        connection.send(number, FIRST_METHOD + 77, b"")
        with pytest.raises(Invalid, match="no method with number 77"):
            await answer


class Mute:
    """A conductor that answers every call with ``payload``."""

    def __init__(self, connection: FramedConnection, payload: bytes) -> None:
        connection.handle_call = lambda number, kind, _: connection.send(
            number, FrameKind.ANSWER, payload
        )

    def on_message(self, payload: bytes) -> None: ...

    def on_lost(self) -> None: ...


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (pb.PlaceAnswer().SerializeToString(), "no decode worker"),
        (b"\xff\xff", "malformed PlaceAnswer"),
    ],
)
async def test_invalid_answers_of_a_conductor_fail_the_request(payload: bytes, why: str) -> None:
    services = {CONDUCTOR.name: lambda connection: Mute(connection, payload)}
    async with asking(services) as client:
        with pytest.raises(Unavailable, match=why):
            await request_placement(client, question(), 10.0)


async def test_unreachable_conductor_fails_the_request() -> None:
    for address in ("127.0.0.1:9", ""):
        with pytest.raises(Unavailable, match=f"can't connect to {address}: "):
            await request_placement(CallClient(address, CONDUCTOR, TRUST), question(), 10.0)


class Registry:
    database_id = "1"

    def __init__(self, *members: Member) -> None:
        self.list = list(members)

    async def members(self) -> list[Member]:
        return self.list


async def test_placer_reconnects_when_its_framed_connection_breaks() -> None:
    core, query = FakeCore(), question()
    server = FramedServer(TRUST, placing(core))
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    conductor = Member(
        WorkerId("c"),
        Role.CONDUCTOR,
        "127.0.0.1:9",
        Incarnation(1),
        WorkerState.READY,
        framed_address=address,
    )
    cluster = Cluster(Registry(conductor), SystemClock())
    await cluster.refresh()
    placer = ConductorPlacer(cluster, SystemClock(), TRUST)
    async with asyncio.timeout(20):
        assert (await placer.place(query)).decode == DECODE
        for line in list(server.connections):
            line.close()
        while server.connections:
            await asyncio.sleep(0)
        while True:  # until the router has noticed, too, that the connection was closed
            try:
                assert (await placer.place(query)).decode == DECODE
                break
            except Unavailable:
                continue
    assert core.requests[0] == query
    placer.close()
    await server.close()
