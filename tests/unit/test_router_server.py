"""Tests the HTTP server over real sockets: invalid and slow clients, limits, and TLS."""

import asyncio
import contextlib
import functools
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from baton.clock import SystemClock
from baton.errors import Invalid
from baton.network.pinned_tls import pinned_tls_context
from router.http.connection import MAX_PIPELINED_BYTES
from router.http.connection_limits import ConnectionLimits
from router.http.server import HttpServer, open_listener
from router.http.tls import ReloadingCertificate
from tests import certificates

CLOCK = SystemClock()
LIMITS = ConnectionLimits(max_header_bytes=2048, max_headers=20, max_body_bytes=100_000)
QUICK = 0.03
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CLOSING_GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test on uvloop, like the router."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*arguments, **named))

    return run


class Bench:
    """A server whose app records the requests that it received, and how many clients have left."""

    def __init__(self, limits: ConnectionLimits, tls: ssl.SSLContext | None = None) -> None:
        self.refusals: list[str] = []
        self.requests: list[tuple[str, bytes]] = []
        self.left = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.chunks = [b"ok"]
        self.reads_body = True
        self.server = HttpServer(self._app, CLOCK, limits, self.refusals.append, tls)
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", self.reads_body
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body += message["body"]
            more = message["more_body"]
        self.requests.append((scope["path"], body))
        answer = asyncio.ensure_future(self._answer(send))
        leaving = asyncio.ensure_future(_left(receive))
        await asyncio.wait([answer, leaving], return_when=asyncio.FIRST_COMPLETED)
        self.left += not answer.done()
        for task in (answer, leaving):
            task.cancel()
        await asyncio.wait([answer, leaving])

    async def _answer(self, send: Any) -> None:
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def ask(self, data: bytes) -> bytes:
        """Send ``data``, and return everything received until the server closes the connection."""
        reader, writer = await self.connect()
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                return await reader.read()
            return b""


async def _left(receive: Callable[[], Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def bench(
    limits: ConnectionLimits = LIMITS, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Bench]:
    running = Bench(limits, tls)
    listener = open_listener("127.0.0.1", 0)
    running.port = listener.getsockname()[1]
    running.server.listen(listener)
    try:
        yield running
    finally:
        running.may_answer.set()
        await running.server.close()
        for writer in running.writers:
            writer.close()
        await asyncio.gather(
            *(each.wait_closed() for each in running.writers), return_exceptions=True
        )
    assert running.server.num_connections == 0


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


# -- what clients send ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 21 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 2048 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabc", 400),
        (HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"content-length: -1\r\n\r\n", 400),
        (HEAD + b"content-length: " + b"9" * 30 + b"\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 30 + b"\r\n", 431),
    ],
)
@on_uvloop
async def test_invalid_requests_are_refused(data: bytes, wanted: int) -> None:
    async with bench() as running:
        answer = await running.ask(data)
        assert status(answer) == wanted
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["type"] == "invalid_request_error" and error["message"]
        await eventually(lambda: running.server.num_connections == 0)
        assert running.refusals == [
            "http" if wanted == 400 and error["code"] == "invalid_http" else "headers"
        ]
        assert running.requests == []


@on_uvloop
async def test_endless_header_is_refused() -> None:
    async with bench() as running:
        reader, writer = await running.connect()
        writer.write(b"GET / HTTP/1.1\r\na: x")
        with contextlib.suppress(ConnectionError):
            while running.refusals == []:
                writer.write(b"x" * 100)
                await writer.drain()
        assert running.refusals == ["headers"]
        with contextlib.suppress(ConnectionError):  # a client still writing may lose the answer
            assert status(await reader.read()) == 431


@on_uvloop
async def test_chunked_body_is_read_and_its_trailers_ignored() -> None:
    async with bench() as running:
        chunked = b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        body = b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nauthorization: Bearer x\r\n\r\n"
        assert status(await running.ask(HEAD + chunked + body)) == 200
        assert running.requests == [("/", b"abcde")]


@on_uvloop
async def test_expect_100_continue_is_answered() -> None:
    async with bench() as running:
        reader, writer = await running.connect()
        writer.write(
            HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\nconnection: close\r\n\r\n"
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert status(await reader.read()) == 200


@on_uvloop
async def test_http_1_0_response_is_not_chunked() -> None:
    async with bench() as running:
        running.chunks = [b"o", b"", b"k"]
        head, _, body = (await running.ask(b"GET / HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert body == b"ok" and b"transfer-encoding" not in head
        assert b"\r\nconnection: close" in head


@on_uvloop
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with bench() as running:
        last = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        paths = [b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(5)]
        answer = await running.ask(b"".join(paths) + last)
        assert answer.count(b"HTTP/1.1 200") == 6
        assert [path for path, _ in running.requests] == ["/0", "/1", "/2", "/3", "/4", "/last"]


@on_uvloop
async def test_too_many_pipelined_bytes_are_refused() -> None:
    async with bench() as running:
        running.may_answer.clear()
        _, writer = await running.connect()
        writer.write(GET)
        await eventually(lambda: len(running.requests) == 1)
        writer.write(GET * (MAX_PIPELINED_BYTES // len(GET) + 1))
        await eventually(lambda: running.refusals == ["ahead"])
        await eventually(lambda: running.left == 1)


@on_uvloop
async def test_disconnect_ends_the_current_request_and_drops_pipelined_ones() -> None:
    """The app learns immediately that the client of the current request has left, and never gets
    the pipelined requests."""
    async with bench() as running:
        running.may_answer.clear()
        _, writer = await running.connect()
        writer.write(GET * 3)
        await eventually(lambda: len(running.requests) == 1)
        writer.close()
        await eventually(lambda: running.left == 1)
        await eventually(lambda: running.server.num_connections == 0)
        assert len(running.requests) == 1


@on_uvloop
async def test_unread_body_is_drained_up_to_a_limit() -> None:
    async with bench() as running:
        running.reads_body = False
        reader, writer = await running.connect()
        writer.write(HEAD + b"content-length: 90000\r\n\r\n")
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"x" * 90_000 + GET)  # read, dropped, and the next request is answered
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(HEAD + b"content-length: 900000\r\n\r\n")
        await reader.readuntil(b"0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(10):
                writer.write(b"x" * 90_000)
                await writer.drain()
        await eventually(lambda: running.refusals == ["body"])


@on_uvloop
async def test_unread_upload_is_drained_to_its_end() -> None:
    """The app answers without reading the upload, which may be longer than other bodies. The server
    reads the upload to its end, so that the client gets the answer and can send its next
    request."""
    async with bench(replace(LIMITS, max_file_bytes=1_000_000)) as running:
        running.reads_body = False
        reader, writer = await running.connect()
        writer.write(HEAD + b"content-length: 900000\r\n\r\n" + b"x" * 900_000 + GET)
        for _ in range(2):
            await reader.readuntil(b"0\r\n\r\n")
        assert running.refusals == []


@on_uvloop
async def test_garbage_after_a_request_does_not_corrupt_its_answer() -> None:
    async with bench() as running:
        running.chunks = [b"ok"] * 3
        running.may_answer.clear()
        reader, writer = await running.connect()
        writer.write(GET)
        await eventually(lambda: len(running.requests) == 1)
        writer.write(b"garbage\r\n\r\n")
        running.may_answer.set()
        answer = await reader.read()
        whole = b"2\r\nok\r\n" * 3 + b"0\r\n\r\n"
        first, end, second = answer.partition(whole)
        assert status(first) == 200 and end and status(second) == 400


# -- slow clients ---------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\r\n", b"GET / HTTP/1.1\r\nhost:"])
@on_uvloop
async def test_incomplete_header_times_out(data: bytes) -> None:
    async with bench(replace(LIMITS, header_timeout_seconds=QUICK)) as running:
        answer = await running.ask(data)
        assert status(answer) == (408 if b"GET" in data else 0)
        assert running.refusals == ["slow"]


@pytest.mark.parametrize("data", [b"", b"\r\n", b"GET / HTTP/1.1\r\nhost:"])
@on_uvloop
async def test_idle_keep_alive_connection_times_out(data: bytes) -> None:
    limits = replace(LIMITS, header_timeout_seconds=0.2, keep_alive_timeout_seconds=QUICK)
    async with bench(limits) as running:
        answer = await running.ask(GET + data)
        assert answer.count(b"HTTP/1.1 200") == 1
        assert answer.count(b"HTTP/1.1 408") == (b"GET" in data)


@on_uvloop
async def test_client_that_does_not_read_is_disconnected_and_others_are_served() -> None:
    async with bench(replace(LIMITS, write_timeout_seconds=0.1)) as running:
        running.chunks = [b"x" * 65_536] * 1000
        lazy = socket.create_connection(("127.0.0.1", running.port))
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.sendall(GET)
        await eventually(lambda: len(running.requests) == 1)
        await eventually(lambda: running.refusals == ["unread"])
        await eventually(lambda: running.server.num_connections == 0)
        lazy.close()
        running.chunks = [b"ok"]
        assert status(await running.ask(CLOSING_GET)) == 200


@on_uvloop
async def test_unread_end_of_an_answer_times_out() -> None:
    """The whole answer is in the write buffer, and the connection is to be closed once it has been
    sent."""
    async with bench(replace(LIMITS, write_timeout_seconds=0.1)) as running:
        running.chunks = [b"x" * 5_000_000]
        lazy = socket.create_connection(("127.0.0.1", running.port))
        lazy.sendall(CLOSING_GET)
        await eventually(lambda: running.refusals == ["unread"])
        await eventually(lambda: running.server.num_connections == 0)
        lazy.close()


# -- connections ----------------------------------------------------------------------------


@on_uvloop
async def test_number_of_connections_is_limited() -> None:
    async with bench(replace(LIMITS, max_connections=2)) as running:
        first, second = await running.connect(), await running.connect()
        await eventually(lambda: running.server.num_connections == 2)
        assert status(await running.ask(b"")) == 503
        assert running.refusals == ["connections"]
        first[1].close()
        await eventually(lambda: running.server.num_connections == 1)
        second[1].write(GET)
        assert (await second[0].readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")


@on_uvloop
async def test_sockets_use_nodelay_and_a_small_send_buffer() -> None:
    options: list[tuple[int, int]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        return None

    server = HttpServer(app, CLOCK)
    listener = open_listener("127.0.0.1", 0)
    make = server._connection

    class Look:
        def connection_made(self, transport: asyncio.Transport) -> None:
            accepted = transport.get_extra_info("socket")
            wanted = (socket.TCP_NODELAY, socket.TCP_NOTSENT_LOWAT)
            found = [accepted.getsockopt(socket.IPPROTO_TCP, name) for name in wanted]
            options.append((found[0], found[1]))
            transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            make()

    server._connection = Look  # type: ignore[method-assign, assignment]
    server.listen(listener)
    with socket.create_connection(listener.getsockname()):
        await eventually(lambda: bool(options))
    await server.close()
    assert options == [(1, 65_536)]


def accept_waiting(listener: socket.socket, accepted: list[socket.socket]) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            accepted.append(listener.accept()[0])


@on_uvloop
async def test_connections_in_the_accept_queue_are_served_when_leaving_a_port() -> None:
    running = Bench(LIMITS)
    listener = open_listener("127.0.0.1", 0, reuse_port=True)
    address = listener.getsockname()
    running.server.listen(listener)
    other = open_listener("127.0.0.1", address[1], reuse_port=True)
    waiting = [socket.create_connection(address) for _ in range(20)]
    running.server.stop_accepting(listener)
    for each in waiting:
        each.setblocking(False)
        each.sendall(GET)
    other.setblocking(False)
    theirs: list[socket.socket] = []
    accept_waiting(other, theirs)
    others = {each.getpeername() for each in theirs}
    loop = asyncio.get_running_loop()
    mine = [each for each in waiting if each.getsockname() not in others]
    async with asyncio.timeout(5):
        for each in mine:
            assert (await loop.sock_recv(each, 100)).startswith(b"HTTP/1.1 200")
    assert len(mine) + len(others) == 20 and mine
    late = [socket.create_connection(address) for _ in range(10)]
    accept_waiting(other, theirs)
    assert {each.getsockname() for each in late} <= {each.getpeername() for each in theirs}
    for each in (*waiting, *late, *theirs, other):
        each.close()
    await running.server.close()


@on_uvloop
async def test_finishing_server_closes_connections_after_their_current_request() -> None:
    async with bench() as running:
        running.may_answer.clear()
        idle, busy = await running.connect(), await running.connect()
        idle[1].write(GET)
        running.may_answer.set()
        await idle[0].readuntil(b"0\r\n\r\n")
        running.may_answer.clear()
        busy[1].write(GET)
        await eventually(lambda: len(running.requests) == 2)
        finishing = asyncio.ensure_future(running.server.drain())
        assert await idle[0].read() == b""
        running.may_answer.set()
        assert b"connection: close" in await busy[0].read()
        await finishing


# -- TLS ------------------------------------------------------------------------------------


@on_uvloop
async def test_replaced_certificate_is_reloaded(tmp_path: Path) -> None:
    files = tmp_path / "one.pem", tmp_path / "one.key"
    files[0].write_text(certificates.ONE_CERTIFICATE)
    files[1].write_text(certificates.ONE_KEY)
    other = tmp_path / "two.pem"
    other.write_text(certificates.TWO_CERTIFICATE)
    certificate = ReloadingCertificate(str(files[0]), str(files[1]), CLOCK)
    async with bench(tls=certificate.context) as running:

        async def ask(trusted: Path) -> int:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", running.port, ssl=pinned_tls_context(str(trusted))
            )
            writer.write(CLOSING_GET)
            answer = await reader.read()
            writer.close()
            return status(answer)

        assert await ask(files[0]) == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(other)
        files[0].write_text(certificates.TWO_CERTIFICATE)
        certificate.refresh()  # the key file is still the old one, so that nothing is reloaded yet
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(other)
        files[1].write_text(certificates.TWO_KEY)
        certificate.refresh()
        assert await ask(other) == 200


@on_uvloop
async def test_failed_handshake_ends_its_connection_and_no_other(tmp_path: Path) -> None:
    files = tmp_path / "one.pem", tmp_path / "one.key"
    files[0].write_text(certificates.ONE_CERTIFICATE)
    files[1].write_text(certificates.ONE_KEY)
    certificate = ReloadingCertificate(str(files[0]), str(files[1]), CLOCK)
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    limits = replace(LIMITS, header_timeout_seconds=0.2)
    async with bench(limits, certificate.context) as running:
        assert status(await running.ask(GET)) == 0
        assert await running.ask(b"") == b"", "a client that begins no handshake is disconnected"
        assert running.requests == [] and errors == []


def test_invalid_certificate_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("nonsense")
    with pytest.raises(Invalid, match="tls_certificate"):
        ReloadingCertificate(str(tmp_path / "a.pem"), str(tmp_path / "a.pem"), CLOCK)
