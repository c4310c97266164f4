"""Tests that HTTP syntax is enforced strictly (RFC 9110, RFC 9112), so that no request can be
smuggled inside another one."""

import asyncio
import json
from collections.abc import Iterator, Sequence

import pytest

from router.http.connection_limits import ConnectionLimits
from router.limits import MAX_PIPELINED_BYTES, MAX_SMALL_CHUNKS, SMALL_CHUNK_BYTES
from tests.http_connection_harness import ConnectionHarness, ConnectionResult, ReceivedRequest

LIMITS = ConnectionLimits(max_header_bytes=10_000)
GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: x\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"

INVALID_REQUESTS = {
    # The request line (RFC 9112, 3)
    "HTTP/0.9": (b"GET /\r\n\r\n", 400),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nhost: x\r\n\r\n", 400),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", 400),
    "lower case version": (b"GET / http/1.1\r\nhost: x\r\n\r\n", 400),
    "another protocol": (b"DESCRIBE / RTSP/1.0\r\nhost: x\r\n\r\n", 400),
    "yet another protocol": (b"SOURCE / ICE/1.1\r\nhost: x\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x00\xf5\x01\x00\x00\xf1\x03\x03" + b"x" * 50, 400),
    "two spaces": (b"GET  / HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "two spaces before the version": (b"GET /  HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a tab": (b"GET\t/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a space in front": (b" GET / HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a space behind": (b"GET / HTTP/1.1 \r\nhost: x\r\n\r\n", 400),
    "a space in the target": (b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a line feed in front": (b"\nGET / HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a method in lower case": (b"get / HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a long target": (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
    # The target (3.2)
    "CONNECT": (b"CONNECT x:1 HTTP/1.1\r\nhost: x:1\r\n\r\n" + HIDDEN, 501),
    "authority form": (b"GET x:80 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "no slash": (b"GET v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a star for GET": (b"GET * HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a fragment": (b"GET /a#b HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "another scheme": (b"GET ftp://x/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "somebody's name": (b"GET http://u:p@x/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "no ASCII": (b"GET /\xc3\xa4 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    # Host (3.2)
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
    "the same host twice": (b"GET / HTTP/1.1\r\nhost: x\r\nHost: x\r\n\r\n", 400),
    "a list of hosts": (b"GET / HTTP/1.1\r\nhost: a, b\r\n\r\n", 400),
    "a host with a path": (b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n", 400),
    "a host with a user": (b"GET / HTTP/1.1\r\nhost: u@b\r\n\r\n", 400),
    "no host beside an absolute target": (b"GET http://x/ HTTP/1.1\r\n\r\n", 400),
    # Lines (2.2, 5)
    "line feeds alone": (b"GET / HTTP/1.1\nhost: x\n\n", 400),
    "one line feed alone": (GET + b"a: b\nc: d\r\n\r\n", 400),
    "an end of line feeds": (GET + b"a: b\n\n", 400),
    "a carriage return alone": (GET + b"a: b\rc: d\r\n\r\n", 400),
    "a folded line": (GET + b"a: b\r\n c\r\n\r\n", 400),
    "a folded coding": (POST + b"transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400),
    "a folded first line": (b"GET / HTTP/1.1\r\n host: x\r\n\r\n", 400),
    "a space before the colon": (b"GET / HTTP/1.1\r\nhost : x\r\n\r\n", 400),
    "a length with a space before the colon": (POST + b"content-length : 3\r\n\r\nabc", 400),
    "no colon": (GET + b"abc\r\n\r\n", 400),
    "no name": (GET + b": b\r\n\r\n", 400),
    "a parenthesis in a name": (GET + b"a(b: c\r\n\r\n", 400),
    "NUL": (GET + b"a: b\0\r\n\r\n", 400),
    "DEL": (GET + b"a: b\x7f\r\n\r\n", 400),
    "many spaces": (GET + b"a:" + b" " * 12_000 + b"b\r\n\r\n", 431),
    "headers that mean one thing": (GET + b"origin: http://a\r\norigin: http://b\r\n\r\n", 400),
    "two keys": (GET + b"authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n", 400),
    "two of Anthropic's keys": (GET + b"x-api-key: a\r\nX-Api-Key: b\r\n\r\n", 400),
    "another expectation": (POST + b"expect: cake\r\ncontent-length: 3\r\n\r\nabc", 417),
    # Where a body ends (6)
    "a length and chunks": (POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    "chunks and a length": (POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n", 400),
    "two lengths": (POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabc", 400),
    "the same length twice": (POST + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc", 400),
    "a list of lengths": (POST + b"content-length: 3, 3\r\n\r\nabc", 400),
    "a signed length": (POST + b"content-length: +3\r\n\r\nabc", 400),
    "a length in hex": (POST + b"content-length: 0x3\r\n\r\nabc", 400),
    "an empty length": (POST + b"content-length:\r\n\r\nabc", 400),
    "a length beyond 64 bits": (POST + b"content-length: 18446744073709551619\r\n\r\nabc", 400),
    "a length of many zeros": (POST + b"content-length: " + b"0" * 6000 + b"3\r\n\r\nabc", 400),
    "not chunked in the end": (POST + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    "gzip in chunks": (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "gzip": (POST + b"transfer-encoding: gzip\r\n\r\n0\r\n\r\n", 501),
    "nearly chunked": (POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    "quoted": (POST + b'transfer-encoding: "chunked"\r\n\r\n0\r\n\r\n', 501),
    "an empty coding first": (POST + b"transfer-encoding: , chunked\r\n\r\n0\r\n\r\n", 501),
    "two codings": (
        POST + b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400
    ),
    "chunked twice": (POST + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks in HTTP/1.0": (
        b"POST / HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400
    ),
    # Chunks (7.1)
    "a signed chunk": (CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n", 400),
    "a chunk with 0x": (CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n", 400),
    "a space before a chunk": (CHUNKED + b" 3\r\nabc\r\n0\r\n\r\n", 400),
    "a space behind a chunk's size": (CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n", 400),
    "a chunk without a size": (CHUNKED + b"\r\nabc\r\n0\r\n\r\n", 400),
    "a chunk beyond 64 bits": (CHUNKED + b"10000000000000003\r\nabc\r\n0\r\n\r\n", 400),
    "a line feed behind a size": (CHUNKED + b"3\nabc\r\n0\r\n\r\n", 400),
    "a line feed behind a chunk": (CHUNKED + b"3\r\nabc\n0\r\n\r\n", 400),
    "a chunk that is too long": (CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", 400),
    "a line feed in an extension": (CHUNKED + b"3;a\nabc\r\n0\r\n\r\n", 400),
    "a quoted line feed in an extension": (CHUNKED + b'3;a="\n"\r\nabc\r\n0\r\n\r\n', 400),
    "a large extension": (CHUNKED + b"3;a=" + b"x" * 5000 + b"\r\nabc\r\n0\r\n\r\n", 431),
    "extensions that are large together": (
        CHUNKED + (b"3;a=" + b"x" * 500 + b"\r\nabc\r\n") * 10 + b"0\r\n\r\n", 431
    ),
    "many zeros": (CHUNKED + b"0" * 5000 + b"3\r\nabc\r\n0\r\n\r\n", 431),
    "large trailers": (CHUNKED + b"0\r\na: " + b"x" * 5000 + b"\r\n\r\n", 431),
    "a length behind": (CHUNKED + b"0\r\ncontent-length: 5\r\n\r\n", 400),
    "a coding behind": (CHUNKED + b"0\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    "a folded trailer": (CHUNKED + b"0\r\na: b\r\n c\r\n\r\n", 400),
}  # fmt: skip

JAVA = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
LENGTH = b"content-length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN
IN_CHUNKS = b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(HIDDEN) + HIDDEN + b"\r\n0\r\n\r\n"

VALID_REQUESTS = {
    "a length": (POST + LENGTH, HIDDEN),
    "chunks": (POST + IN_CHUNKS, HIDDEN),
    "a body for GET": (GET + LENGTH, HIDDEN),
    "websocket": (POST + b"connection: upgrade\r\nupgrade: websocket\r\n" + LENGTH, HIDDEN),
    "h2c, as Java's client offers it": (POST + JAVA + LENGTH, HIDDEN),
    "h2c in chunks": (POST + JAVA + IN_CHUNKS, HIDDEN),
    "any other word": (POST + b"connection: upgrade\r\nupgrade: foo/1\r\n" + LENGTH, HIDDEN),
    "an offer without a body": (GET + JAVA + b"\r\n", b""),
    "an offer with trailers": (
        POST + JAVA + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nhost: y\r\n\r\n", b"a"
    ),
    "an offer behind a body": (
        CHUNKED + b"1\r\na\r\n0\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", b"a"
    ),
    "extensions": (CHUNKED + b'3;a=b;c="d;e"\r\nabc\r\n0;x\r\n\r\n', b"abc"),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\nhost: y\r\nx: y\r\n\r\n", b"a"),
    "a trailer that would close": (CHUNKED + b"0\r\nconnection: close\r\n\r\n", b""),
    "empty lines in a chunk": (CHUNKED + b"8\r\n\r\n\r\n\r\n\r\n\r\n0\r\n\r\n", b"\r\n" * 4),
    "an end within a chunk": (CHUNKED + b"9\r\n\r\n0\r\n\r\nab\r\n0\r\n\r\n", b"\r\n0\r\n\r\nab"),
    "a coding in capitals": (POST + b"Transfer-Encoding: Chunked\r\n\r\n0\r\n\r\n", b""),
    "empty lines in front": (b"\r\n\r\n\r\n" + GET + b"\r\n", b""),
    "an empty host": (b"GET / HTTP/1.1\r\nhost:\r\n\r\n", b""),
    "an address": (b"GET / HTTP/1.1\r\nhost: [::1]:8000\r\n\r\n", b""),
    "Latin-1": (GET + b"a: \xe4\r\n\r\n", b""),
}  # fmt: skip


def splits(data: bytes) -> Iterator[Sequence[bytes]]:
    """Yield ``data`` as one piece, byte by byte unless it is long, and as two pieces, split where
    the head or the body may end."""
    yield [data]
    if len(data) < 1000:
        yield [data[i : i + 1] for i in range(len(data))]
    end = data.find(b"\r\n\r\n")
    for place in (1, end, end + 1, end + 2, end + 3, end + 4, end + 5, len(data) - 1):
        if 0 < place < len(data):
            yield [data[:place], data[place:]]


def send(data: bytes, *splittings: Sequence[bytes]) -> list[ConnectionResult]:
    async def in_turn() -> list[ConnectionResult]:
        connection = ConnectionHarness(LIMITS)
        return [await connection.send(pieces) for pieces in splittings or [[data]]]

    return asyncio.run(in_turn())


def send_all(data: bytes) -> list[ConnectionResult]:
    return send(data, *splits(data))


@pytest.mark.parametrize("name", INVALID_REQUESTS)
def test_invalid_request_is_refused_however_it_is_split(name: str) -> None:
    data, status = INVALID_REQUESTS[name]
    for result in send_all(data + HIDDEN):
        assert result.statuses == [status] and result.requests == [] and result.errors == []
        assert result.is_closed and len(result.refusals) == 1
        error = json.loads(result.responses[0].partition(b"\r\n\r\n")[2])["error"]
        assert error["type"] == "invalid_request_error" and error["message"]
        assert b"\r\nconnection: close\r\n" in result.responses[0]


@pytest.mark.parametrize("name", VALID_REQUESTS)
def test_valid_request_is_read_exactly_however_it_is_split(name: str) -> None:
    data, body = VALID_REQUESTS[name]
    for result in send_all(data + NEXT):
        assert [(each.path, each.body) for each in result.requests] == [("/", body), ("/next", b"")]
        assert result.statuses == [200, 200] and result.errors == result.refusals == []
        assert not result.is_closed


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"http://y/p?q", "/p", b"y"),
        (b"HTTP://y:80", "/", b"y:80"),
        (b"https://[::1]?q", "/", b"[::1]"),
    ],
)
def test_host_of_an_absolute_target_overrides_the_header(
    target: bytes, path: str, host: bytes
) -> None:
    for result in send_all(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % target):
        assert result.requests == [ReceivedRequest("GET", path, b"", host)]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_nothing_is_read_after_connection_close(version: bytes) -> None:
    head = b"GET / HTTP/%b\r\nhost: x\r\nconnection: close\r\n\r\n" % version
    for result in send_all(head + HIDDEN):
        assert [each.path for each in result.requests] == ["/"]
        assert result.statuses == [200] and result.is_closed


def test_http_1_0_needs_no_host_and_gets_no_100() -> None:
    data = b"POST / HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\na"
    for result in send_all(data):
        assert result.requests == [ReceivedRequest("POST", "/", b"a")] and result.statuses == [200]
        assert result.responses[0].startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_parsed_one_at_a_time() -> None:
    """If one read returns thousands of requests, the second is parsed only after the first was
    answered."""
    many = MAX_PIPELINED_BYTES // len(NEXT)
    [result] = send(NEXT * many)
    assert result.statuses == [200] * many and result.refusals == []
    [result] = send(NEXT * (many + 2))
    assert result.requests == result.statuses == [] and result.refusals == ["ahead"]


def chunks(count: int, size: int) -> bytes:
    return CHUNKED + (b"%x\r\n%b\r\n" % (size, b"x" * size)) * count + b"0\r\n\r\n"


def test_too_many_tiny_chunks_are_refused() -> None:
    [result] = send(chunks(MAX_SMALL_CHUNKS - 1, 1))
    assert result.statuses == [200]
    [result] = send(chunks(2 * MAX_SMALL_CHUNKS, 1))
    assert result.statuses == [413] and result.refusals == ["body"] and result.requests == []
    [result] = send(chunks(MAX_SMALL_CHUNKS + 500, SMALL_CHUNK_BYTES))
    assert result.statuses == [200]
