"""Tests the HTTP server over real sockets: invalid and slow clients, and limits."""

import asyncio
import contextlib
import json
import socket
from dataclasses import replace
from typing import Any

import pytest

from router.http.server import HttpServer, open_listener
from router.limits import MAX_PIPELINED_BYTES
from tests.http_server_bench import (
    CLOCK,
    CLOSING_GET,
    GET,
    LIMITS,
    Bench,
    bench,
    on_uvloop,
    status,
)
from tests.router_harness import eventually

QUICK = 0.03
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


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
async def test_number_of_connections_with_a_request_is_limited() -> None:
    async with bench(replace(LIMITS, max_connections=2)) as running:
        running.may_answer.clear()
        first, second = await running.connect(), await running.connect()
        first[1].write(GET)
        second[1].write(GET)
        await eventually(lambda: len(running.requests) == 2)
        assert status(await running.ask(b"")) == 503
        assert running.refusals == ["connections"]
        first[1].close()
        await eventually(lambda: running.server.num_connections == 1)
        running.may_answer.set()
        assert status(await running.ask(CLOSING_GET)) == 200
        assert (await second[0].readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n", GET])
@on_uvloop
async def test_idle_connections_of_the_largest_network_make_room_for_others(sent: bytes) -> None:
    """A crowd fills the server with connections that send nothing, half a head, or a request that
    has been answered."""
    async with bench(replace(LIMITS, max_connections=8)) as running:
        neighbour = await running.connect()
        neighbour[1].write(GET)
        await neighbour[0].readuntil(b"0\r\n\r\n")
        crowd = [await running.connect("127.0.0.2") for _ in range(7)]
        for reader, writer in crowd:
            writer.write(sent)
            if sent == GET:
                await reader.readuntil(b"0\r\n\r\n")
        await eventually(lambda: running.server.num_connections == 8)
        for _ in range(3):
            assert status(await running.ask(CLOSING_GET)) == 200
        assert set(running.refusals) == {"connections"}
        neighbour[1].write(GET)
        assert (await neighbour[0].readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")


@on_uvloop
async def test_sockets_use_nodelay_and_a_small_send_buffer() -> None:
    options: list[tuple[int, int]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        return None

    server = HttpServer(app, CLOCK)
    listener = open_listener("127.0.0.1", 0)
    make = server._connection

    class Look:
        def __init__(self, *arguments: Any) -> None:
            self._arguments = arguments

        def connection_made(self, transport: asyncio.Transport) -> None:
            accepted = transport.get_extra_info("socket")
            wanted = (socket.TCP_NODELAY, socket.TCP_NOTSENT_LOWAT)
            found = [accepted.getsockopt(socket.IPPROTO_TCP, name) for name in wanted]
            options.append((found[0], found[1]))
            transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            make(*self._arguments)

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
    async with asyncio.timeout(60):
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
