"""Frames of lines and of the store's local socket, right and wrong, in pieces of any size, before
and after the handshake, from either side.

A friend of each server says something after each few cases, and must hear it again.
"""

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.clock import SystemClock
from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError
from baton.rpc.framed.client import FramedClientConnection, open_framed_connection
from baton.rpc.framed.connection import (
    HANDSHAKE_BYTES,
    NONCE_BYTES,
    VERSION,
    FrameKind,
    handshake_proof,
)
from baton.rpc.frames import FRAME_HEADER, MAX_MESSAGE_BYTES
from baton.rpc.kvstore_methods import KvStoreMethods
from baton.rpc.local_rpc import LocalRpcClient, LocalRpcServer
from baton.rpc.v1 import kvstore_pb2, line_pb2
from tests.fuzz.messages import MessageMaker
from tests.fuzz.overheard import overheard
from tests.fuzz.result import HANG_SECONDS, FuzzResult, Recorder
from tests.store_house import KEYS
from tests.store_house import House as StoreHouse
from tests.unit.test_line import TRUST, House, house

NAME = "frames"
CLOCK = SystemClock()
CASES_PER_CHECK = 20
LINGER_SECONDS = 0.01
OPENING_SECONDS = 0.3
NO_SECRET = ClusterCredentials(None)

_CLIENTS_MESSAGES = (line_pb2.Hello, line_pb2.Proof)
_SERVERS_MESSAGES = (line_pb2.Challenge, line_pb2.Welcome, kvstore_pb2.DoorError)
_CALLS = (
    kvstore_pb2.OpenRequest,
    kvstore_pb2.PutRequest,
    kvstore_pb2.LeaseRequest,
    kvstore_pb2.ReleaseRequest,
    kvstore_pb2.ReportRequest,
    kvstore_pb2.PinRequest,
)


@dataclass
class Servers:
    """A server of lines that repeats what it hears, and a store node's local socket."""

    lines: House
    socket: str
    store: StoreHouse


def fuzz(seconds: float, seed: int) -> FuzzResult:
    return asyncio.run(_fuzz(seconds, seed))


async def _fuzz(seconds: float, seed: int) -> FuzzResult:
    recorder, chance = Recorder(NAME, seed), np.random.default_rng(seed)
    until = CLOCK.monotonic() + seconds
    with overheard(recorder):
        while CLOCK.monotonic() < until:
            # Anew each time: the server of a test lives for twenty seconds at most.
            async with servers() as running:
                fuzzer = Fuzzer(running, recorder, chance)
                for _ in range(CASES_PER_CHECK):
                    await fuzzer.case()
                await fuzzer.check()
    return recorder.result()


class Fuzzer:
    """Cases against running servers, and against clients."""

    def __init__(self, servers: Servers, recorder: Recorder, chance: np.random.Generator) -> None:
        self._servers = servers
        self._recorder = recorder
        self._chance = chance
        self._maker = MessageMaker(chance)

    async def case(self) -> None:
        """One connection."""
        kinds: Sequence[Callable[[], Awaitable[None]]] = (
            self._stranger, self._friend, self._false_server, self._local_visitor,
            self._false_store,
        )  # fmt: skip
        await self._bounded(kinds[int(self._chance.integers(len(kinds)))]())

    async def check(self) -> None:
        """Friends are heard, and nobody else is left."""
        self._recorder.begin("check")
        await self._bounded(self._served())
        await self._bounded(self._until_alone())
        if not self._servers.store.sound():
            self._recorder.crash(self._servers.store.node.stats().violation)

    async def _bounded(self, work: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await work
        except TimeoutError:
            self._recorder.hang(f"{HANG_SECONDS:g} s")
        except ConnectionError:
            pass  # whoever was addressed has closed, which is its right
        except BatonError:
            pass  # told by the peer, or because of it
        except Exception as error:
            self._recorder.crash(repr(error))

    # -- friends ----------------------------------------------------------------------------------

    async def _served(self) -> None:
        try:
            await self._talk()
            await self._ask_the_store()
        except (BatonError, OSError) as error:
            self._recorder.crash(f"a friend was refused: {error!r}")

    async def _talk(self) -> None:
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        line = await self._servers.lines.open(heard.put_nowait)
        line.send_message(b"again")
        if (said := await heard.get()) != b"again":
            self._recorder.crash(f"a friend heard {said!r}")
        line.close()

    async def _ask_the_store(self) -> None:
        door = await LocalRpcClient.connect(self._servers.socket)
        request = kvstore_pb2.LeaseRequest(keys=KEYS[0], lease_seconds=0.01, max_bytes=0)
        await door.call(request, HANG_SECONDS)
        door.close()

    async def _until_alone(self) -> None:
        while self._servers.lines.server.lines:
            await asyncio.sleep(0.01)

    # -- clients that cheat -----------------------------------------------------------------------

    async def _stranger(self) -> None:
        """Before the handshake, or in the middle of it."""
        host, _, port = self._servers.lines.address.rpartition(":")
        frames = self._frames(_CLIENTS_MESSAGES)
        if self._chance.random() < 0.5:
            hello = line_pb2.Hello(version=VERSION, service="echo", nonce=bytes(NONCE_BYTES))
            frames = [
                FRAME_HEADER.pack(hello.ByteSize(), 0, FrameKind.HELLO) + hello.SerializeToString()
            ]
            frames += self._frames(_CLIENTS_MESSAGES)
        reader, writer = await asyncio.open_connection(host, int(port))
        await self._say(reader, writer, b"".join(frames))

    async def _friend(self) -> None:
        """After the handshake."""
        line = await self._servers.lines.open()
        data = b"".join(self._frames(()))
        self._recorder.begin(f"friend {data[:500].hex()}")
        try:
            for piece in self._pieces(data):
                if line.transport is not None and not line.is_closing:
                    line.transport.write(piece)
                await asyncio.sleep(0)
            await asyncio.sleep(LINGER_SECONDS)
        finally:
            line.close()

    async def _local_visitor(self) -> None:
        """At the store's socket."""
        frames = self._frames(_CALLS)
        reader, writer = await asyncio.open_unix_connection(self._servers.socket)
        await self._say(reader, writer, b"".join(frames))

    async def _say(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes
    ) -> None:
        self._recorder.begin(f"said {data[:500].hex()}")
        try:
            for piece in self._pieces(data):
                writer.write(piece)
                await asyncio.sleep(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await reader.read(1 << 16)
        finally:
            writer.transport.abort()

    # -- servers that cheat -----------------------------------------------------------------------

    async def _false_server(self) -> None:
        """Answers a client's greeting with anything; half the time it knows the secret."""
        knows = self._chance.random() < 0.5
        data = b"".join(self._frames(_SERVERS_MESSAGES))
        self._recorder.begin(f"false server, {knows=}: {data[:500].hex()}")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, EOFError):
                if knows:
                    await _welcome(reader, writer)
                for piece in self._pieces(data):
                    writer.write(piece)
                await writer.drain()
                await reader.read(1 << 16)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            trust = TRUST if knows else NO_SECRET
            line = await open_framed_connection(address, "echo", trust, _hear, OPENING_SECONDS)
            await self._until_lost(line)
        finally:
            server.close()

    async def _until_lost(self, line: FramedClientConnection) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await line.ended()
        line.close()

    async def _false_store(self) -> None:
        """A node that answers a call with anything."""
        data = b"".join(self._frames(_SERVERS_MESSAGES))
        self._recorder.begin(f"false store {data[:500].hex()}")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, EOFError):
                await reader.read(1 << 16)
                for piece in self._pieces(data):
                    writer.write(piece)
                await writer.drain()
            writer.close()

        with tempfile.TemporaryDirectory(prefix="baton-") as folder:
            path = str(Path(folder) / "socket")
            server = await asyncio.start_unix_server(serve, path)
            try:
                door = await LocalRpcClient.connect(path)
                await door.call(kvstore_pb2.LeaseRequest(keys=KEYS[0]), OPENING_SECONDS)
            finally:
                server.close()

    # -- what is said -----------------------------------------------------------------------------

    def _frames(self, kinds: Sequence[type]) -> list[bytes]:
        return [self._frame(kinds) for _ in range(int(self._chance.integers(0, 6)))]

    def _frame(self, kinds: Sequence[type]) -> bytes:
        """Its length may be a lie, and its payload a message or noise."""
        payload = self._payload(kinds)
        sizes = (0, 1, HANDSHAKE_BYTES + 1, MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES + 1, 2**32 - 1)
        lies = self._chance.random() < 0.15
        size = int(self._chance.choice(sizes)) if lies else len(payload)
        kind = int(self._chance.integers(0, 12)) if self._chance.random() < 0.9 else 255
        return FRAME_HEADER.pack(size, int(self._chance.integers(0, 4)), kind) + payload

    def _payload(self, kinds: Sequence[type]) -> bytes:
        if kinds and self._chance.random() < 0.8:
            return self._maker.wire(kinds[int(self._chance.integers(len(kinds)))])
        size = int(self._chance.choice((0, 1, 7, 100, HANDSHAKE_BYTES, 50_000)))
        return bytes(self._chance.bytes(size))

    def _pieces(self, data: bytes) -> list[bytes]:
        """Cut at a few places."""
        cuts = sorted(self._chance.integers(0, len(data) + 1, int(self._chance.integers(0, 6))))
        ends = [0, *map(int, cuts), len(data)]
        return [data[start:end] for start, end in itertools.pairwise(ends)]


async def _welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The server's part of a handshake, as one that knows the secret says it."""
    hello = line_pb2.Hello.FromString(await _payload_of(reader))
    nonce = bytes(NONCE_BYTES)
    _write(writer, FrameKind.CHALLENGE, line_pb2.Challenge(nonce=nonce).SerializeToString())
    await _payload_of(reader)
    code = handshake_proof(TRUST.secret or "", "server", "echo", hello.nonce + nonce)
    _write(writer, FrameKind.WELCOME, line_pb2.Welcome(code=code).SerializeToString())


async def _payload_of(reader: asyncio.StreamReader) -> bytes:
    size, _, _ = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
    return await reader.readexactly(size)


def _write(writer: asyncio.StreamWriter, kind: int, payload: bytes) -> None:
    writer.write(FRAME_HEADER.pack(len(payload), 0, kind) + payload)


def _hear(payload: bytes) -> None:
    """A friend that takes whatever it is told."""


@asynccontextmanager
async def servers() -> AsyncIterator[Servers]:
    store = StoreHouse(clock=CLOCK)
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        path = Path(folder) / "socket"
        server = LocalRpcServer(KvStoreMethods(store.node), path)
        await server.start()
        try:
            async with house() as lines:
                yield Servers(lines, str(path), store)
        finally:
            await server.close()
