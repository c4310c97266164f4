"""Fuzzes framed connections and the store's Unix socket. Clients and servers send valid and
invalid frames, split into pieces of any size, before and after the handshake.

After every few cases, each server must still serve a well-behaved client.
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
from baton.rpc.framed.calls import CallClient
from baton.rpc.framed.client import FramedClientConnection, open_framed_connection
from baton.rpc.framed.connection import (
    FIRST_METHOD,
    HANDSHAKE_BYTES,
    NONCE_BYTES,
    VERSION,
    FrameKind,
    handshake_proof,
)
from baton.rpc.framed.server import FramedServer
from baton.rpc.frames import FRAME_HEADER, MAX_MESSAGE_BYTES
from baton.rpc.kvstore_service import local_kvstore_services
from baton.rpc.service import KV_STORE
from baton.rpc.v1 import conductor_pb2, framed_pb2, kvstore_pb2
from tests.fuzz.messages import MessageMaker
from tests.fuzz.result import HANG_SECONDS, FuzzResult, Recorder
from tests.fuzz.unhandled_errors import record_hidden_errors
from tests.store_harness import KEYS, StoreHarness
from tests.unit.baton.rpc.framed.test_framed_connection import TRUST, EchoServer, echo_server

NAME = "frames"
CLOCK = SystemClock()
CASES_PER_CHECK = 20
LINGER_SECONDS = 0.01
OPENING_SECONDS = 0.3
NO_SECRET = ClusterCredentials(None)

_CLIENTS_MESSAGES = (framed_pb2.Hello, framed_pb2.Proof)
_SERVERS_MESSAGES = (framed_pb2.Challenge, framed_pb2.Welcome, conductor_pb2.Refusal)
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
    """A server of framed connections that echoes messages, and a store node's Unix socket."""

    lines: EchoServer
    socket: str
    store: StoreHarness


def fuzz(seconds: float, seed: int) -> FuzzResult:
    return asyncio.run(_fuzz(seconds, seed))


async def _fuzz(seconds: float, seed: int) -> FuzzResult:
    recorder, chance = Recorder(NAME, seed), np.random.default_rng(seed)
    until = CLOCK.monotonic() + seconds
    with record_hidden_errors(recorder):
        while CLOCK.monotonic() < until:
            # Start new servers each time: the test helper stops them after twenty seconds at most.
            async with servers() as running:
                fuzzer = Fuzzer(running, recorder, chance)
                for _ in range(CASES_PER_CHECK):
                    await fuzzer.case()
                await fuzzer.check()
    return recorder.result()


class Fuzzer:
    """Runs cases in which clients send frames to running servers, and servers send frames to
    clients."""

    def __init__(self, servers: Servers, recorder: Recorder, chance: np.random.Generator) -> None:
        self._servers = servers
        self._recorder = recorder
        self._chance = chance
        self._maker = MessageMaker(chance)

    async def case(self) -> None:
        """Open one connection between a client and a server, one of which misbehaves."""
        kinds: Sequence[Callable[[], Awaitable[None]]] = (
            self._before_handshake, self._after_handshake, self._false_server, self._local_client,
            self._false_store,
        )  # fmt: skip
        await self._bounded(kinds[int(self._chance.integers(len(kinds)))]())

    async def check(self) -> None:
        """Check that well-behaved clients are served, that no connection stays open, and that the
        store has kept its integrity."""
        self._recorder.begin("check")
        await self._bounded(self._served())
        await self._bounded(self._until_alone())
        if not self._servers.store.has_integrity():
            self._recorder.crash(self._servers.store.node.stats().violation)

    async def _bounded(self, work: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await work
        except TimeoutError:
            self._recorder.hang(f"{HANG_SECONDS:g} s")
        except ConnectionError:
            pass  # the peer may close the connection
        except BatonError:
            pass  # expected: the peer reported an error, or misbehaved
        except Exception as error:
            self._recorder.crash(repr(error))

    # -- well-behaved clients ---------------------------------------------------------------------

    async def _served(self) -> None:
        try:
            await self._talk()
            await self._ask_the_store()
        except (BatonError, OSError) as error:
            self._recorder.crash(f"a well-behaved client was refused: {error!r}")

    async def _talk(self) -> None:
        messages: asyncio.Queue[bytes] = asyncio.Queue()
        line = await self._servers.lines.open(messages.put_nowait)
        line.send_message(b"again")
        if (received := await messages.get()) != b"again":
            self._recorder.crash(f"a well-behaved client received {received!r}")
        line.close()

    async def _ask_the_store(self) -> None:
        client = CallClient(self._servers.socket, KV_STORE)
        request = kvstore_pb2.LeaseRequest(keys=KEYS[0], lease_seconds=0.01, max_bytes=0)
        await client.call("Lease", request, HANG_SECONDS)
        client.close()

    async def _until_alone(self) -> None:
        while self._servers.lines.server.connections:
            await asyncio.sleep(0.01)

    # -- misbehaving clients ----------------------------------------------------------------------

    async def _before_handshake(self) -> None:
        """Send random frames before or during the handshake."""
        host, _, port = self._servers.lines.address.rpartition(":")
        frames = self._frames(_CLIENTS_MESSAGES)
        if self._chance.random() < 0.5:
            hello = framed_pb2.Hello(version=VERSION, service="echo", nonce=bytes(NONCE_BYTES))
            frames = [
                FRAME_HEADER.pack(hello.ByteSize(), 0, FrameKind.HELLO) + hello.SerializeToString()
            ]
            frames += self._frames(_CLIENTS_MESSAGES)
        reader, writer = await asyncio.open_connection(host, int(port))
        await self._say(reader, writer, b"".join(frames))

    async def _after_handshake(self) -> None:
        """Send random frames after a valid handshake."""
        line = await self._servers.lines.open()
        data = b"".join(self._frames(()))
        self._recorder.begin(f"friend {data[:500].hex()}")
        try:
            await self._write(line, data)
        finally:
            line.close()

    async def _write(self, connection: FramedClientConnection, data: bytes) -> None:
        for piece in self._pieces(data):
            if connection.transport is not None and not connection.is_closing:
                connection.transport.write(piece)
            await asyncio.sleep(0)
        await asyncio.sleep(LINGER_SECONDS)

    async def _local_client(self) -> None:
        """Send random frames to the store's Unix socket, after a valid handshake."""
        client = CallClient(self._servers.socket, KV_STORE)
        connection = await client.connect(HANG_SECONDS)
        data = b"".join(self._frames(_CALLS, FIRST_METHOD))
        self._recorder.begin(f"local {data[:500].hex()}")
        try:
            await self._write(connection, data)
        finally:
            client.close()

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

    # -- misbehaving servers ----------------------------------------------------------------------

    async def _false_server(self) -> None:
        """Answer a client with random frames, in half of the cases after a valid handshake."""
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
                await line.wait_until_ended()
        line.close()

    async def _false_store(self) -> None:
        """Answer a store client's call with random frames."""
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
                client = CallClient(path, KV_STORE)
                request = kvstore_pb2.LeaseRequest(keys=KEYS[0])
                await client.call("Lease", request, OPENING_SECONDS)
            finally:
                server.close()

    # -- generators -------------------------------------------------------------------------------

    def _frames(self, kinds: Sequence[type], first_kind: int = 0) -> list[bytes]:
        return [self._frame(kinds, first_kind) for _ in range(int(self._chance.integers(0, 6)))]

    def _frame(self, kinds: Sequence[type], first_kind: int) -> bytes:
        """Return a frame whose length may be wrong, whose payload is a message or random bytes, and
        whose kind is mostly one of the 12 from ``first_kind`` on."""
        payload = self._payload(kinds)
        sizes = (0, 1, HANDSHAKE_BYTES + 1, MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES + 1, 2**32 - 1)
        lies = self._chance.random() < 0.15
        size = int(self._chance.choice(sizes)) if lies else len(payload)
        kind = (
            first_kind + int(self._chance.integers(0, 12)) if self._chance.random() < 0.9 else 255
        )
        return FRAME_HEADER.pack(size, int(self._chance.integers(0, 4)), kind) + payload

    def _payload(self, kinds: Sequence[type]) -> bytes:
        if kinds and self._chance.random() < 0.8:
            return self._maker.encode(kinds[int(self._chance.integers(len(kinds)))])
        size = int(self._chance.choice((0, 1, 7, 100, HANDSHAKE_BYTES, 50_000)))
        return bytes(self._chance.bytes(size))

    def _pieces(self, data: bytes) -> list[bytes]:
        """Split data at a few random places."""
        cuts = sorted(self._chance.integers(0, len(data) + 1, int(self._chance.integers(0, 6))))
        ends = [0, *map(int, cuts), len(data)]
        return [data[start:end] for start, end in itertools.pairwise(ends)]


async def _welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Do the server's part of a valid handshake."""
    hello = framed_pb2.Hello.FromString(await _payload_of(reader))
    nonce = bytes(NONCE_BYTES)
    _write(writer, FrameKind.CHALLENGE, framed_pb2.Challenge(nonce=nonce).SerializeToString())
    await _payload_of(reader)
    code = handshake_proof(TRUST.secret or "", "server", "echo", hello.nonce + nonce)
    _write(writer, FrameKind.WELCOME, framed_pb2.Welcome(code=code).SerializeToString())


async def _payload_of(reader: asyncio.StreamReader) -> bytes:
    size, _, _ = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
    return await reader.readexactly(size)


def _write(writer: asyncio.StreamWriter, kind: int, payload: bytes) -> None:
    writer.write(FRAME_HEADER.pack(len(payload), 0, kind) + payload)


def _hear(payload: bytes) -> None:
    """Accept any message."""


@asynccontextmanager
async def servers() -> AsyncIterator[Servers]:
    store = StoreHarness(clock=CLOCK)
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        path = Path(folder) / "node.sock"
        server = FramedServer(NO_SECRET, local_kvstore_services(store.node))
        await server.listen_locally(path)
        try:
            async with echo_server() as lines:
                yield Servers(lines, str(path), store)
        finally:
            await server.close()
