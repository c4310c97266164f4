"""Lines over loopback: opening, messages, back-pressure, silence, and peers that cheat."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError, Invalid, Overloaded, Unauthorized, Unavailable
from baton.rpc import frames
from baton.rpc.framed import client, server
from baton.rpc.framed.client import FramedClientConnection, open_framed_connection
from baton.rpc.framed.connection import HANDSHAKE_BYTES, VERSION, FramedConnection, FrameKind
from baton.rpc.framed.server import FramedServer
from baton.rpc.framed.unauthenticated import UnauthenticatedConnections, source_network
from baton.rpc.frames import FRAME_HEADER, MAX_MESSAGE_BYTES
from baton.rpc.v1 import conductor_pb2, line_pb2

TRUST = ClusterCredentials("a secret of the cluster")
NONCE = bytes(32)


class Echo:
    """Says everything again, but for what it is told to do otherwise."""

    def __init__(self, line: FramedConnection) -> None:
        self.line = line
        self.heard: list[bytes] = []
        self.lost = asyncio.Event()

    def on_message(self, payload: bytes) -> None:
        self.heard.append(payload)
        if payload == b"refuse":
            raise Overloaded("too much", retry_after_seconds=2.5)
        if payload != b"hush":
            self.line.send_message(payload)

    def on_lost(self) -> None:
        assert not self.lost.is_set(), "a line is lost once"
        self.lost.set()


class House:
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
async def house(trust: ClusterCredentials = TRUST) -> AsyncIterator[House]:
    echoes: list[Echo] = []

    def serve(line: FramedConnection) -> Echo:
        echoes.append(Echo(line))
        return echoes[-1]

    server = FramedServer(trust, {"echo": serve})
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    try:
        async with asyncio.timeout(20):
            yield House(server, address, echoes)
    finally:
        await server.close()


def frame(kind: int, payload: bytes = b"") -> bytes:
    return FRAME_HEADER.pack(len(payload), 0, kind) + payload


def hello(service: str = "echo", version: int = VERSION, nonce: bytes = NONCE) -> bytes:
    message = line_pb2.Hello(version=version, service=service, nonce=nonce)
    return frame(FrameKind.HELLO, message.SerializeToString())


async def say(address: str, *parts: bytes) -> list[tuple[int, bytes]]:
    """Sends ``parts`` and returns what is answered until the other side ends the connection."""
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


# -- between friends ------------------------------------------------------------------------


@pytest.mark.parametrize("trust", [ClusterCredentials(), TRUST])
async def test_messages_both_ways_in_order(trust: ClusterCredentials) -> None:
    heard: list[bytes] = []
    done = asyncio.Event()

    def deliver(payload: bytes) -> None:
        heard.append(payload)
        if payload == b"last":
            done.set()

    sent = [b"", b"x", os.urandom(300_000), b"y" * 5_000, b"last"]
    async with house(trust) as there:
        line = await there.open(deliver, trust)
        for payload in sent:
            line.send_message(payload)
        await done.wait()
        peer = line.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        line.close()
        await there.echoes[0].lost.wait()
    assert heard == sent == there.echoes[0].heard


async def test_a_refusal_says_why_and_ends_both_sides() -> None:
    async with house() as there:
        line = await there.open()
        line.send_message(b"refuse")
        why = await line.ended()
        await there.echoes[0].lost.wait()
    assert isinstance(why, Overloaded) and str(why) == "too much"
    assert why.retry_after_seconds == 2.5


async def test_a_message_that_makes_no_sense_ends_the_line() -> None:
    def puzzled(payload: bytes) -> None:
        raise Invalid("what?")

    async with house() as there:
        line = await there.open(puzzled)
        line.send_message(b"anything")
        assert str(await line.ended()) == "what?"
        await there.echoes[0].lost.wait()


async def test_a_server_that_closes_takes_its_lines_with_it() -> None:
    async with house() as there:
        line = await there.open()
        await there.server.close()
        why = await line.ended()
        assert isinstance(why, Unavailable) and "stopped" in str(why)
        assert there.echoes[0].lost.is_set()
        with pytest.raises(Unavailable, match="does not accept connections"):
            await there.open()


async def test_a_port_in_use() -> None:
    async with house() as there:
        port = int(there.address.rpartition(":")[2])
        with pytest.raises(Unavailable, match=f"can't listen on 127.0.0.1:{port}"):
            await FramedServer(TRUST, {}).listen("127.0.0.1", port)


# -- who may come in ------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, "another", ""])
async def test_without_the_secret_nobody_comes_in(secret: str | None) -> None:
    async with house() as there:
        with pytest.raises(Unauthorized, match="the cluster secret is missing or wrong"):
            await there.open(trust=ClusterCredentials(secret))
        assert there.echoes == []
        assert not there.server.lines


async def test_whoever_has_a_secret_does_not_speak_with_those_that_lack_it() -> None:
    async with house(ClusterCredentials()) as there:
        with pytest.raises(Unauthorized, match="does not know the cluster secret"):
            await there.open()
        await there.echoes[0].lost.wait()


async def test_a_proof_that_was_heard_is_worth_nothing() -> None:
    """The server's half of what is signed is new each time."""
    heard: list[bytes] = []

    class Listening(FramedClientConnection):
        def send(self, number: int, kind: int, payload: bytes) -> None:
            heard.append(frame(kind, payload))
            super().send(number, kind, payload)

    async with house() as there:
        host, _, port = there.address.rpartition(":")
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(
            lambda: Listening("echo", TRUST.secret, lambda payload: None), host, int(port)
        )
        await line.opened()
        line.close()
        answers = await say(there.address, *heard)
        assert [kind for kind, _ in answers] == [FrameKind.CHALLENGE, FrameKind.REFUSAL]
        assert "cluster secret" in refusal(answers)
        assert TRUST.secret is not None
        assert all(TRUST.secret.encode() not in each for each in heard)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (hello("nobody"), "there is no service 'nobody' here"),
        (hello(version=7), "version 7 of lines: here is 1"),
        (hello(nonce=b"short"), "a nonce has 32 bytes"),
        (frame(FrameKind.HELLO, b"\xff\xff"), "malformed Hello"),
        (frame(FrameKind.PROOF), "a frame of kind 7 is no part of"),
        (frame(FrameKind.MESSAGE, b"let me in"), "a frame of kind 1 is no part of"),
        (frame(99), "a frame of kind 99 is no part of"),
        (hello() + hello(), "a frame of kind 5 is no part of"),
        (
            FRAME_HEADER.pack(HANDSHAKE_BYTES + 1, 0, FrameKind.HELLO),
            "a frame of 4097 bytes: 4096 are allowed",
        ),
        (b"GET / HTTP/1.1\r\nhost: here\r\n\r\n", "a frame of 542393671 bytes"),
    ],
)
async def test_strangers_are_told_why_and_shown_out(said: bytes, why: str) -> None:
    async with house() as there:
        assert why in refusal(await say(there.address, said))
        assert there.echoes == [] and not there.server.lines


async def test_whoever_says_nothing_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_SECONDS", 0.02)
    async with house() as there:
        assert await say(there.address) == []
        assert await say(there.address, hello()[:-1]) == []
        assert [kind for kind, _ in await say(there.address, hello())] == [FrameKind.CHALLENGE]
        assert not there.server.lines


async def test_strangers_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many the one that came first goes, and a member has proved who it is by then."""
    monkeypatch.setattr(server, "MAX_UNAUTHENTICATED", 3)
    async with house() as there:
        idle = []
        for number in range(8):
            idle.append(await connected(there.address))
            await until(
                partial(lambda count: len(there.server.strangers) == count, min(number + 1, 3))
            )
            if number == 4:
                line = await there.open()
        for reader, _ in idle[:4]:
            assert await reader.read() == b""
        assert line.is_open and len(there.server.lines) == 4
        for _, writer in idle:
            writer.close()
        line.close()
        await until(lambda: not there.server.lines)
        assert len(there.server.strangers) == 0


async def connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
    async with house() as there:
        line = await there.open()
        with pytest.raises(Overloaded, match="there are 1 lines already"):
            await there.open()
        line.close()
        await until(lambda: not there.server.lines)
        (await there.open()).close()


class Visitor:
    def __init__(self, log: list["Visitor"]) -> None:
        self._log = log

    def close(self) -> None:
        self._log.append(self)


def test_whoever_takes_most_places_gives_up_the_oldest() -> None:
    closed: list[Visitor] = []
    places = UnauthenticatedConnections(4)
    member = Visitor(closed)
    flood = [Visitor(closed) for _ in range(10)]
    places.add(member, "10.0.0.1")
    for number, each in enumerate(flood):
        places.add(each, f"2001:db8::{number}")  # all of one site
    assert closed == flood[:7] and len(places) == 4
    places.discard(member)
    places.discard(member)
    places.add(member, "fe80::1%eth0")
    assert closed == flood[:7]
    several = [Visitor(closed) for _ in range(4)]
    for number, each in enumerate(several):
        places.add(each, f"10.0.1.{number}")
    assert closed[:9] == flood[:9] and len(places) == 4
    assert several[-1] not in closed
    assert [source_network(host) for host in ("10.0.0.1", "", "2001:db8::9", "x:y")] == [
        "10.0.0.1", "", "2001:db8::/64", "x:y",
    ]  # fmt: skip


# -- peers that cheat -----------------------------------------------------------------------


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_frames_in_pieces_of_any_size() -> None:
    heard: list[tuple[int, int, bytes]] = []

    class Collecting(frames.FrameProtocol):
        is_closing = False  # type: ignore[assignment]

        def on_frame(self, number: int, kind: int, payload: bytes) -> None:
            heard.append((number, kind, payload))

    told = [(1, 2, b""), (3, 4, b"abc"), (5, 6, bytes(100)), (7, 8, b"")]
    data = b"".join(FRAME_HEADER.pack(len(payload), n, kind) + payload for n, kind, payload in told)
    for size in (1, 2, 5, 9, 10, 64, len(data)):
        end = Collecting()
        for begin in range(0, len(data), size):
            end.data_received(data[begin : begin + size])
        assert heard == told
        heard.clear()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            FRAME_HEADER.pack(MAX_MESSAGE_BYTES + 1, 0, FrameKind.MESSAGE),
            "a frame of 16777217 bytes",
        ),
        (frame(99), "no frames of kind 99 once it is open"),
        (frame(FrameKind.WELCOME), "no frames of kind 8 once it is open"),
        (frame(FrameKind.REFUSAL, b"\xff\xff"), "malformed Refusal"),
    ],
)
async def test_an_open_line_refuses_nonsense(said: bytes, why: str) -> None:
    async with house() as there:
        line = await there.open()
        assert line.transport is not None
        line.transport.write(said)
        assert why in str(await line.ended())
        await there.echoes[0].lost.wait()


async def test_half_a_message_is_no_message() -> None:
    async with house() as there:
        line = await there.open()
        assert line.transport is not None
        line.transport.write(
            frame(FrameKind.MESSAGE, b"whole") + frame(FrameKind.MESSAGE, b"half")[:-1]
        )
        await until(lambda: there.echoes and there.echoes[0].heard)
        line.transport.close()
        await there.echoes[0].lost.wait()
        assert there.echoes[0].heard == [b"whole"]


async def test_a_writer_waits_for_a_slow_reader() -> None:
    async with house() as there:
        line = await there.open()
        assert line.transport is not None
        line.transport.pause_reading()
        await until(lambda: there.echoes)
        end = there.echoes[0].line
        while True:  # until the kernel takes no more of it
            end.send_message(bytes(64 * 1024))
            waiting = asyncio.create_task(end.drained())
            await asyncio.sleep(0)
            if not waiting.done():
                break
        line.transport.resume_reading()
        await waiting
        line.close()


async def test_whoever_reads_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_UNSENT_BYTES", 100_000)
    async with house() as there:
        line = await there.open()
        await until(lambda: there.echoes)
        server_side = there.echoes[0].line.transport
        assert server_side is not None
        server_side.pause_reading()
        while not line.is_closing:
            line.send_message(bytes(64 * 1024))
        assert str(await line.ended()) == "it does not read"
        server_side.resume_reading()
        await there.echoes[0].lost.wait()


# -- silence --------------------------------------------------------------------------------


async def test_a_silent_line_is_pinged_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TICK_SECONDS", 0.002)
    pongs = 0

    class Counting(FramedClientConnection):
        def _on_control(self, kind: int, payload: bytes) -> None:
            nonlocal pongs
            pongs += kind == FrameKind.PONG
            super()._on_control(kind, payload)

    monkeypatch.setattr(client, "FramedClientConnection", Counting)
    async with house() as there:
        line = await there.open()
        await until(lambda: pongs >= 20)
        assert not line.is_closing
        line.close()


async def test_a_frozen_peer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens a line, and then answers nothing; its kernel goes on acknowledging."""
    monkeypatch.setattr(client, "TICK_SECONDS", 0.002)
    gone = asyncio.Event()

    async def freeze(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(hello()))
        challenge = line_pb2.Challenge(nonce=NONCE).SerializeToString()
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
        why = await line.ended()
        await gone.wait()
    assert isinstance(why, Unavailable) and "silent" in str(why)
    server.close()


async def test_a_router_that_stands_still_gives_back_what_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "TICK_SECONDS", 0.002)
    async with house(ClusterCredentials()) as there:
        host, _, port = there.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(hello() + frame(FrameKind.PROOF))
        await until(lambda: there.echoes)
        await there.echoes[0].lost.wait()
        writer.close()


async def test_whoever_stood_still_itself_takes_nobody_for_dead() -> None:
    """A loop that was held up for any time has read what there was before it counts again."""
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
    end.open()
    for _ in range(5):  # each after an age, as if a timer was late
        end._tick()
        end.data()
    assert failures == []
    for _ in range(4):
        end._tick()
    assert failures == [] and pings == [FrameKind.PING] * 3
    end._tick()
    assert "silent for 4000.0 s" in str(failures[0])
    end._disarm()
