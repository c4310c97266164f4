"""Tests framed connections over loopback: handshake, messages, back-pressure, silence, and
malicious peers."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError, Invalid, Overloaded, Unauthorized, Unavailable
from baton.rpc import frames
from baton.rpc.framed import client, server
from baton.rpc.framed.client import FramedClientConnection, open_framed_connection
from baton.rpc.framed.connection import HANDSHAKE_BYTES, VERSION, FramedConnection, FrameKind
from baton.rpc.framed.server import FramedServer
from baton.rpc.framed.unauthenticated import UnauthenticatedConnections
from baton.rpc.frames import FRAME_HEADER, MAX_MESSAGE_BYTES
from baton.rpc.v1 import conductor_pb2, framed_pb2

TRUST = ClusterCredentials("a secret of the cluster")
NONCE = bytes(32)


class Echo:
    """Echoes every message, except that it raises Overloaded for ``refuse`` and ignores
    ``hush``."""

    def __init__(self, line: FramedConnection) -> None:
        self.line = line
        self.received: list[bytes] = []
        self.lost = asyncio.Event()

    def on_message(self, payload: bytes) -> None:
        self.received.append(payload)
        if payload == b"refuse":
            raise Overloaded("the server is overloaded", retry_after_seconds=2.5)
        if payload != b"hush":
            self.line.send_message(payload)

    def on_lost(self) -> None:
        assert not self.lost.is_set(), "on_lost must be called only once"
        self.lost.set()


class EchoServer:
    def __init__(self, server: FramedServer, address: str, echoes: list[Echo]) -> None:
        self.server = server
        self.address = address
        self.echoes = echoes

    async def open(
        self,
        deliver: Callable[[bytes], None] = lambda payload: None,
        trust: ClusterCredentials = TRUST,
    ) -> FramedClientConnection:
        return await open_framed_connection(self.address, "echo", trust, deliver, 5.0)


@asynccontextmanager
async def echo_server(trust: ClusterCredentials = TRUST) -> AsyncIterator[EchoServer]:
    echoes: list[Echo] = []

    def serve(line: FramedConnection) -> Echo:
        echoes.append(Echo(line))
        return echoes[-1]

    server = FramedServer(trust, {"echo": serve})
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    try:
        async with asyncio.timeout(20):
            yield EchoServer(server, address, echoes)
    finally:
        await server.close()


def frame(kind: int, payload: bytes = b"") -> bytes:
    return FRAME_HEADER.pack(len(payload), 0, kind) + payload


def hello(service: str = "echo", version: int = VERSION, nonce: bytes = NONCE) -> bytes:
    message = framed_pb2.Hello(version=version, service=service, nonce=nonce)
    return frame(FrameKind.HELLO, message.SerializeToString())


async def exchange(address: str, *parts: bytes) -> list[tuple[int, bytes]]:
    """Send ``parts``; return the (kind, payload) of each frame received until the server closes the
    connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answers = []
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        while True:
            size, _, kind = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
            answers.append((kind, await reader.readexactly(size)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return answers
    finally:
        writer.close()


def refusal(answers: Sequence[tuple[int, bytes]]) -> str:
    kind, payload = answers[-1]
    assert kind == FrameKind.REFUSAL
    return conductor_pb2.Refusal.FromString(payload).message


# -- well-behaved peers ---------------------------------------------------------------------


@pytest.mark.parametrize("trust", [ClusterCredentials(), TRUST])
async def test_messages_arrive_in_order_in_both_directions(trust: ClusterCredentials) -> None:
    received: list[bytes] = []
    done = asyncio.Event()

    def deliver(payload: bytes) -> None:
        received.append(payload)
        if payload == b"last":
            done.set()

    sent = [b"", b"x", os.urandom(300_000), b"y" * 5_000, b"last"]
    async with echo_server(trust) as there:
        line = await there.open(deliver, trust)
        for payload in sent:
            line.send_message(payload)
        await done.wait()
        peer = line.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        line.close()
        await there.echoes[0].lost.wait()
    assert received == sent == there.echoes[0].received


async def test_refusal_gives_its_reason_and_ends_both_sides() -> None:
    async with echo_server() as there:
        line = await there.open()
        line.send_message(b"refuse")
        why = await line.wait_until_ended()
        await there.echoes[0].lost.wait()
    assert isinstance(why, Overloaded) and str(why) == "the server is overloaded"
    assert why.retry_after_seconds == 2.5


async def test_invalid_message_ends_the_connection() -> None:
    def puzzled(payload: bytes) -> None:
        raise Invalid("what?")

    async with echo_server() as there:
        line = await there.open(puzzled)
        line.send_message(b"anything")
        assert str(await line.wait_until_ended()) == "what?"
        await there.echoes[0].lost.wait()


async def test_closing_the_server_closes_its_connections() -> None:
    async with echo_server() as there:
        line = await there.open()
        await there.server.close()
        why = await line.wait_until_ended()
        assert isinstance(why, Unavailable) and "stopped" in str(why)
        assert there.echoes[0].lost.is_set()
        with pytest.raises(Unavailable, match=f"can't connect to {there.address}: "):
            await there.open()


async def test_port_in_use_is_reported() -> None:
    async with echo_server() as there:
        port = int(there.address.rpartition(":")[2])
        with pytest.raises(Unavailable, match=f"can't listen on 127.0.0.1:{port}"):
            await FramedServer(TRUST, {}).listen("127.0.0.1", port)


# -- authentication -------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, "another", ""])
async def test_client_without_the_secret_is_rejected(secret: str | None) -> None:
    async with echo_server() as there:
        with pytest.raises(Unauthorized, match="the cluster secret is missing or wrong"):
            await there.open(trust=ClusterCredentials(secret))
        assert there.echoes == []
        assert not there.server.connections


async def test_client_with_a_secret_rejects_a_server_without_one() -> None:
    async with echo_server(ClusterCredentials()) as there:
        with pytest.raises(Unauthorized, match="does not know the cluster secret"):
            await there.open()
        await there.echoes[0].lost.wait()


async def test_replayed_proof_is_rejected() -> None:
    """A client's proof signs nonces of both sides, and the server's nonce is new for each
    connection."""
    received: list[bytes] = []

    class Listening(FramedClientConnection):
        def send(self, number: int, kind: int, payload: bytes) -> None:
            received.append(frame(kind, payload))
            super().send(number, kind, payload)

    async with echo_server() as there:
        host, _, port = there.address.rpartition(":")
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(
            lambda: Listening("echo", TRUST.secret, lambda payload: None), host, int(port)
        )
        await line.wait_until_open()
        line.close()
        answers = await exchange(there.address, *received)
        assert [kind for kind, _ in answers] == [FrameKind.CHALLENGE, FrameKind.REFUSAL]
        assert "cluster secret" in refusal(answers)
        assert TRUST.secret is not None
        assert all(TRUST.secret.encode() not in each for each in received)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (hello("nobody"), "this server has no service 'nobody'"),
        (hello(version=7), "the protocol version is 7; it must be 1"),
        (hello(nonce=b"short"), "the nonce of the handshake must have 32 bytes, not 5"),
        (frame(FrameKind.HELLO, b"\xff\xff"), "malformed Hello"),
        (frame(FrameKind.PROOF), "a frame of kind 7 is not allowed at this point of"),
        (
            frame(FrameKind.MESSAGE, b"let me in"),
            "a frame of kind 1 is not allowed at this point of",
        ),
        (frame(99), "a frame of kind 99 is not allowed at this point of"),
        (hello() + hello(), "a frame of kind 5 is not allowed at this point of"),
        (
            FRAME_HEADER.pack(HANDSHAKE_BYTES + 1, 0, FrameKind.HELLO),
            "a frame has 4097 bytes",
        ),
        (b"GET / HTTP/1.1\r\nhost: here\r\n\r\n", "a frame has 542393671 bytes"),
    ],
)
async def test_invalid_handshake_is_refused_with_a_reason(data: bytes, why: str) -> None:
    async with echo_server() as there:
        assert why in refusal(await exchange(there.address, data))
        assert there.echoes == [] and not there.server.connections


async def test_silent_client_is_disconnected_after_the_handshake_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_SECONDS", 0.02)
    async with echo_server() as there:
        assert await exchange(there.address) == []
        assert await exchange(there.address, hello()[:-1]) == []
        assert [kind for kind, _ in await exchange(there.address, hello())] == [FrameKind.CHALLENGE]
        assert not there.server.connections


async def test_unauthenticated_connections_do_not_block_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When there are too many unauthenticated connections, the oldest one is closed. A member has
    authenticated its connection long before it is the oldest."""
    monkeypatch.setattr(server, "MAX_UNAUTHENTICATED", 3)
    async with echo_server() as there:
        idle = []
        for number in range(8):
            idle.append(await connected(there.address))
            await until(
                partial(
                    lambda count: len(there.server.unauthenticated) == count, min(number + 1, 3)
                )
            )
            if number == 4:
                line = await there.open()
        for reader, _ in idle[:4]:
            assert await reader.read() == b""
        assert line.is_open and len(there.server.connections) == 4
        for _, writer in idle:
            writer.close()
        line.close()
        await until(lambda: not there.server.connections)
        assert len(there.server.unauthenticated) == 0


async def connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_number_of_connections_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
    async with echo_server() as there:
        line = await there.open()
        with pytest.raises(Overloaded, match="already has 1 framed connections, its maximum"):
            await there.open()
        line.close()
        await until(lambda: not there.server.connections)
        (await there.open()).close()


class FakeConnection:
    def __init__(self, log: list["FakeConnection"]) -> None:
        self._log = log

    def close(self) -> None:
        self._log.append(self)


def test_network_with_the_most_unauthenticated_connections_loses_its_oldest() -> None:
    closed: list[FakeConnection] = []
    places = UnauthenticatedConnections(4)
    member = FakeConnection(closed)
    flood = [FakeConnection(closed) for _ in range(10)]
    places.add(member, "10.0.0.1")
    for number, each in enumerate(flood):
        places.add(each, f"2001:db8::{number}")  # all in one network
    assert closed == flood[:7] and len(places) == 4
    places.discard(member)
    places.discard(member)
    places.add(member, "fe80::1%eth0")
    assert closed == flood[:7]
    several = [FakeConnection(closed) for _ in range(4)]
    for number, each in enumerate(several):
        places.add(each, f"10.0.1.{number}")
    assert closed[:9] == flood[:9] and len(places) == 4
    assert several[-1] not in closed


# -- openings that are cancelled ------------------------------------------------------------


@pytest.mark.parametrize("is_complete", [False, True])
async def test_connection_is_closed_if_its_opener_is_cancelled_as_it_opens(
    monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    """The opening task is cancelled, by a timeout for example, just before or just after the last
    frame of the handshake is read, and before the task runs again. This can happen if the process
    was frozen: when it continues, its timeout has expired and the data has arrived."""

    class Interrupted(FramedClientConnection):
        def on_handshake(self, kind: int, payload: bytes) -> None:
            if kind != FrameKind.WELCOME:
                super().on_handshake(kind, payload)
                return
            if is_complete:
                super().on_handshake(kind, payload)
            opening.cancel()
            if not is_complete:
                super().on_handshake(kind, payload)

    monkeypatch.setattr(client, "FramedClientConnection", Interrupted)
    async with echo_server() as there:
        with capture_logs() as lines:
            opening = asyncio.create_task(there.open())
            await asyncio.wait([opening])
            assert opening.cancelled()
            async with asyncio.timeout(60):
                await there.echoes[0].lost.wait()
        assert lines == []


# -- malicious peers ------------------------------------------------------------------------


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_frames_may_arrive_in_pieces_of_any_size() -> None:
    received: list[tuple[int, int, bytes]] = []

    class Collecting(frames.FrameProtocol):
        is_closing = False  # type: ignore[assignment]

        def data_received(self, data: bytes) -> None:
            received.extend(self.split_frames(data))

    sent = [(1, 2, b""), (3, 4, b"abc"), (5, 6, bytes(100)), (7, 8, b"")]
    data = b"".join(FRAME_HEADER.pack(len(payload), n, kind) + payload for n, kind, payload in sent)
    for size in (1, 2, 5, 9, 10, 64, len(data)):
        end = Collecting()
        for begin in range(0, len(data), size):
            end.data_received(data[begin : begin + size])
        assert received == sent
        received.clear()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (
            FRAME_HEADER.pack(MAX_MESSAGE_BYTES + 1, 0, FrameKind.MESSAGE),
            "a frame has 16777217 bytes",
        ),
        (frame(99), "frames of kind 99 are not allowed after the handshake"),
        (frame(FrameKind.WELCOME), "frames of kind 8 are not allowed after the handshake"),
        (frame(FrameKind.REFUSAL, b"\xff\xff"), "malformed Refusal"),
    ],
)
async def test_open_connection_refuses_invalid_frames(data: bytes, why: str) -> None:
    async with echo_server() as there:
        line = await there.open()
        assert line.transport is not None
        line.transport.write(data)
        assert why in str(await line.wait_until_ended())
        await there.echoes[0].lost.wait()


async def test_incomplete_message_is_not_delivered() -> None:
    async with echo_server() as there:
        line = await there.open()
        assert line.transport is not None
        line.transport.write(
            frame(FrameKind.MESSAGE, b"whole") + frame(FrameKind.MESSAGE, b"half")[:-1]
        )
        await until(lambda: there.echoes and there.echoes[0].received)
        line.transport.close()
        await there.echoes[0].lost.wait()
        assert there.echoes[0].received == [b"whole"]


async def test_writer_waits_for_a_slow_reader() -> None:
    async with echo_server() as there:
        line = await there.open()
        assert line.transport is not None
        line.transport.pause_reading()
        await until(lambda: there.echoes)
        end = there.echoes[0].line
        while True:  # until the kernel takes no more of it
            end.send_message(bytes(64 * 1024))
            waiting = asyncio.create_task(end.wait_until_writable())
            await asyncio.sleep(0)
            if not waiting.done():
                break
        line.transport.resume_reading()
        await waiting
        line.close()


async def test_peer_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_UNSENT_BYTES", 100_000)
    async with echo_server() as there:
        line = await there.open()
        await until(lambda: there.echoes)
        server_side = there.echoes[0].line.transport
        assert server_side is not None
        server_side.pause_reading()
        while not line.is_closing:
            line.send_message(bytes(64 * 1024))
        assert str(await line.wait_until_ended()) == "the peer left too much data unread"
        server_side.resume_reading()
        await there.echoes[0].lost.wait()


# -- silence --------------------------------------------------------------------------------


async def test_silent_connection_is_pinged_and_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TICK_SECONDS", 0.002)
    pongs = 0

    class Counting(FramedClientConnection):
        def _on_control(self, number: int, kind: int, payload: bytes) -> None:
            nonlocal pongs
            pongs += kind == FrameKind.PONG
            super()._on_control(number, kind, payload)

    monkeypatch.setattr(client, "FramedClientConnection", Counting)
    async with echo_server() as there:
        line = await there.open()
        await until(lambda: pongs >= 20)
        assert not line.is_closing
        line.close()


async def test_frozen_peer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer completes the handshake and then sends nothing, although its kernel still
    acknowledges what it receives."""
    monkeypatch.setattr(client, "TICK_SECONDS", 0.002)
    gone = asyncio.Event()

    async def freeze(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(hello()))
        challenge = framed_pb2.Challenge(nonce=NONCE).SerializeToString()
        writer.write(frame(FrameKind.CHALLENGE, challenge) + frame(FrameKind.WELCOME))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        gone.set()

    server = await asyncio.start_server(freeze, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(20):
        line = await open_framed_connection(
            f"127.0.0.1:{port}", "echo", ClusterCredentials(), lambda payload: None, 5.0
        )
        why = await line.wait_until_ended()
        await gone.wait()
    assert isinstance(why, Unavailable) and "silent" in str(why)
    server.close()


async def test_frozen_router_is_disconnected_by_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "TICK_SECONDS", 0.002)
    async with echo_server(ClusterCredentials()) as there:
        host, _, port = there.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(hello() + frame(FrameKind.PROOF))
        await until(lambda: there.echoes)
        await there.echoes[0].lost.wait()
        writer.close()


async def test_own_stall_is_not_mistaken_for_a_dead_peer() -> None:
    """However long the event loop was blocked, it first reads the data that has arrived meanwhile;
    only then may the peer count as silent."""
    pings: list[int] = []
    failures: list[BatonError] = []

    class Held(FramedConnection):
        def on_lost(self, failure: BatonError) -> None:
            failures.append(failure)

        def send(self, number: int, kind: int, payload: bytes) -> None:
            pings.append(kind)

        def close(self) -> None: ...

        def data(self) -> None:
            self.data_received(b"")

    end = Held(1000.0, 3)
    end.complete_handshake(lambda payload: None)
    for _ in range(5):  # each after a long pause, as if the timer was late
        end._tick()
        end.data()
    assert failures == []
    for _ in range(4):
        end._tick()
    assert failures == [] and pings == [FrameKind.PING] * 3
    end._tick()
    assert "silent for 4000.0 s" in str(failures[0])
    end._stop_timer()
