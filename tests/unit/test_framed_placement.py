"""Tests placement requests over a framed connection to a fake conductor."""

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
from baton.rpc.conductor_service import add_conductor_service
from baton.rpc.framed.conductor_service import (
    CONDUCTOR_SERVICE,
    FramedConductorService,
    framed_conductor_services,
)
from baton.rpc.framed.connection import FramedConnection
from baton.rpc.framed.server import FramedServer
from baton.rpc.placement_stream import FramedPlacementStream
from baton.rpc.server import build_server, listen
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
async def listening(services: Any) -> AsyncIterator[str]:
    server = FramedServer(TRUST, services)
    port = await server.listen("127.0.0.1", 0)
    try:
        async with asyncio.timeout(20):
            yield f"127.0.0.1:{port}"
    finally:
        await server.close()


@asynccontextmanager
async def asking(address: str) -> AsyncIterator[FramedPlacementStream]:
    stream = FramedPlacementStream(address, TRUST)
    running = asyncio.create_task(stream.run())
    try:
        yield stream
    finally:
        running.cancel()
        await asyncio.wait([running])


def question(name: str = "r", **fields: Any) -> pb.PlaceRequest:
    return pb.PlaceRequest(request_id=name, epoch=1, num_tokens=40, max_new_tokens=8, **fields)


async def test_requests_of_one_event_loop_turn_share_a_message() -> None:
    core, messages = FakeCore(), 0

    class Counting(FramedConductorService):
        def on_message(self, payload: bytes) -> None:
            nonlocal messages
            messages += 1
            super().on_message(payload)

    def serve(line: FramedConnection) -> Counting:
        return Counting(core, line)  # type: ignore[arg-type]

    async with listening({CONDUCTOR_SERVICE: serve}) as address, asking(address) as stream:
        names = [f"r{number}" for number in range(50)]
        for _ in range(2):  # first while the connection is being opened, then over the open one
            answers = await asyncio.gather(
                *(stream.request_placement(question(n), 10.0) for n in names)
            )
            assert [answer.reason for answer in answers] == names
            assert {answer.decode for answer in answers} == {DECODE}
            assert answers[0].decode.framed_address == "d:2"
        assert messages == 2


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
    async with (
        listening(framed_conductor_services(core)) as address,  # type: ignore[arg-type]
        asking(address) as stream,
    ):
        with pytest.raises(kind, match=message) as raised:
            await stream.request_placement(question(), 10.0)
        if isinstance(raised.value, Overloaded):
            assert raised.value.retry_after_seconds == 3.5
        core.failure = None
        assert (await stream.request_placement(question("again"), 10.0)).reason == "again"


async def test_block_keys_of_a_wrong_size_are_refused() -> None:
    core = FakeCore()
    async with (
        listening(framed_conductor_services(core)) as address,  # type: ignore[arg-type]
        asking(address) as stream,
    ):
        with pytest.raises(Invalid, match="16 bytes each"):
            await stream.request_placement(question(block_keys=[b"short"]), 10.0)


class Mute:
    """A conductor that answers every message with ``answers``: with nothing, or with something that
    was not requested."""

    def __init__(self, line: FramedConnection, answers: list[bytes]) -> None:
        self._line = line
        self._answers = answers

    def on_message(self, payload: bytes) -> None:
        for answer in self._answers:
            self._line.send_message(answer)

    def on_lost(self) -> None: ...


async def test_silent_conductor_times_out_and_a_closed_stream_fails() -> None:
    async with listening({CONDUCTOR_SERVICE: lambda line: Mute(line, [])}) as address:
        async with asking(address) as stream:
            with pytest.raises(DeadlineExceeded):
                await stream.request_placement(question(), 0.01)
            waiting = asyncio.create_task(stream.request_placement(question(), 30.0))
            await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(Unavailable, match="placement requests to the conductor has ended"):
            await stream.request_placement(question(), 1.0)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (pb.PlaceAnswers().SerializeToString(), "answers do not match the requests"),
        (b"\xff\xff", "malformed PlaceAnswers"),
    ],
)
async def test_invalid_answers_of_a_conductor_fail_the_request(answer: bytes, why: str) -> None:
    services = {CONDUCTOR_SERVICE: lambda line: Mute(line, [answer])}
    async with listening(services) as address, asking(address) as stream:
        with pytest.raises(BatonError, match=why):
            await stream.request_placement(question(), 10.0)


async def test_unreachable_conductor_fails_the_request() -> None:
    async with asking("127.0.0.1:9") as stream:
        with pytest.raises(Unavailable, match=r"can't connect to 127\.0\.0\.1:9: "):
            await stream.request_placement(question(), 10.0)


class Registry:
    database_id = "1"

    def __init__(self, *members: Member) -> None:
        self.list = list(members)

    async def members(self) -> list[Member]:
        return self.list


async def test_placer_reconnects_when_its_framed_connection_breaks() -> None:
    core = FakeCore()
    key = BlockKey(bytes(16))
    query = PlacementQuery(
        RequestId("r"), Epoch(1), TenantId("t"), 40, 8, (key,), frozenset({WorkerId("x")}), "m"
    )
    server = FramedServer(TRUST, framed_conductor_services(core))  # type: ignore[arg-type]
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
    running = asyncio.create_task(placer.run())
    await asyncio.sleep(0)
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
    running.cancel()
    await asyncio.wait([running])
    await placer.close()
    await server.close()


async def test_placer_falls_back_to_grpc_if_the_framed_connection_fails() -> None:
    core, server = FakeCore(), build_server(TRUST)
    add_conductor_service(server, core)  # type: ignore[arg-type]
    address = f"127.0.0.1:{await listen(server, '127.0.0.1', 0)}"
    conductor = Member(
        WorkerId("c"),
        Role.CONDUCTOR,
        address,
        Incarnation(1),
        WorkerState.READY,
        framed_address="127.0.0.1:9",
    )
    cluster = Cluster(Registry(conductor), SystemClock())
    await cluster.refresh()
    placer = ConductorPlacer(cluster, SystemClock(), TRUST)
    running = asyncio.create_task(placer.run())
    await asyncio.sleep(0)
    query = PlacementQuery(
        RequestId("r"), Epoch(1), TenantId("t"), 40, 8, (BlockKey(bytes(16)),), frozenset(), "m"
    )
    async with asyncio.timeout(20):
        with pytest.raises(Unavailable, match=r"can't connect to 127\.0\.0\.1:9: "):
            await placer.place(query)
        assert (await placer.place(query)).decode == DECODE
    running.cancel()
    await asyncio.wait([running])
    await placer.close()
    await server.stop(None)
