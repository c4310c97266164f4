"""Generates random HTTP/1.1 requests that are valid, or invalid in a known way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: x\r\n\r\n"
"""A request that no app may ever receive: it occurs only within bodies and after the last request
of a connection."""

METHODS = (b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS")
HOSTS = (b"x", b"localhost:8000", b"127.0.0.1", b"[::1]:8000", b"a.b.example:80", b"x:", b"")
HEADERS = (
    b"accept: */*", b"Accept-Encoding: gzip, deflate", b"connection: keep-alive", b"x-empty:",
    b"user-agent:  OpenAI/Python 1.0 \t", b"x-latin: \xe4\xff", b"TE: trailers", b"a: b: c",
    b"x-framing: chunked", b"content-lengthx: 3", b"x-content-length: 7",
    b"proxy-connection: keep-alive",
    b"keep-alive: timeout=5", b"cookie: a=b; c=d", b"accept: text/plain",
)  # fmt: skip
OFFERS = (b"h2c", b"websocket", b"foo/2, bar", b"TLS/1.0")
EXTENSIONS = (b"", b"", b"", b";a", b";a=b", b';a="b;c"', b";a=b;c", b";" + b"x" * 60)
TRAILERS = (b"x-t: 1", b"host: y", b"authorization: k", b"connection: close", b"upgrade: x")
PIECES = (
    HIDDEN, b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"\0", b"{}", b"\r\n0\r\n\r\n", b"\n", b"3;a\r\n",
)  # fmt: skip

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Request:
    """A request. If ``is_last`` is set, the server must close the connection after its response.
    ``fault`` names what is wrong with an invalid request, which the server must refuse; it is empty
    for a valid request."""

    data: bytes
    method: str
    path: str
    body: bytes
    is_last: bool = False
    fault: str = ""


class RequestMaker:
    def __init__(self, chance: np.random.Generator) -> None:
        self._chance = chance

    def valid(self, path: str) -> Request:
        """Return a request that every server must accept."""
        method, body = self.pick(METHODS), self._body()
        is_last = self.happens(0.1)
        version = b"HTTP/1.1"
        lines = [self.pick(HEADERS) for _ in range(int(self._chance.integers(6)))]
        target, host = path.encode(), self.pick(HOSTS)
        if self.happens(0.1):
            target = b"http://" + (host or b"y") + target
        if self.happens(0.15):
            target += b"?q=%20&a[]=/../"
        lines.append(self.pick((b"host: ", b"Host:", b"HOST: \t")) + host)
        framing, sent = self._framed(body)
        if is_last and b"chunked" not in b"".join(framing).lower() and self.happens(0.5):
            version = b"HTTP/1.0"
        elif is_last:
            lines.append(self.pick((b"connection: close", b"Connection: keep-alive, Close")))
        elif self.happens(0.15):
            lines += [b"connection: Upgrade, HTTP2-Settings", b"upgrade: " + self.pick(OFFERS)]
        if self.happens(0.05):
            lines.append(b"expect: 100-continue")
        lines += framing
        self._chance.shuffle(lines)
        front = b"\r\n" * int(self._chance.integers(3)) if self.happens(0.1) else b""
        head = b"\r\n".join([b"%b %b %b" % (method, target, version), *lines, b"", b""])
        return Request(front + head + sent, method.decode(), path, body, is_last)

    def invalid(self, path: str) -> Request:
        """Return a request that no server may accept. A server must ignore all bytes that follow
        it."""
        fault = self.pick(tuple(FAULTS))
        data = FAULTS[fault](self, path.encode())
        return Request(data, "", path, b"", True, fault)

    def mutated(self, data: bytes) -> bytes:
        """Replace bytes in some places; the result may be valid or invalid."""
        for _ in range(1 + int(self._chance.integers(4))):
            place = int(self._chance.integers(len(data) + 1))
            size = int(self._chance.integers(1, 12)) if self.happens(0.6) else 0
            put = self.pick(MUTATIONS) if self.happens(0.8) else self.random_bytes(4)
            data = data[:place] + put + data[place + size :]
        return data

    def cut(self, data: bytes) -> list[bytes]:
        """Split data as network packets might: not at all, into single bytes, or anywhere."""
        kind = self._chance.random()
        if kind < 0.2 or len(data) < 2:
            return [data]
        if kind < 0.3 and len(data) < 600:
            return [data[place : place + 1] for place in range(len(data))]
        count = int(self._chance.integers(1, 6))
        places = sorted({0, len(data), *self._chance.integers(1, len(data), count).tolist()})
        return [data[a:b] for a, b in pairwise(places)]

    def pick(self, values: Sequence[Value]) -> Value:
        return values[int(self._chance.integers(len(values)))]

    def happens(self, probability: float) -> bool:
        return bool(self._chance.random() < probability)

    def random_bytes(self, most: int) -> bytes:
        return self._chance.bytes(int(self._chance.integers(most + 1)))

    def _body(self) -> bytes:
        if self.happens(0.3):
            return b""
        parts = [
            self.pick(PIECES) if self.happens(0.7) else self.random_bytes(200)
            for _ in range(1 + int(self._chance.integers(4)))
        ]
        return b"".join(parts) * (1 if self.happens(0.95) else 60)

    def _framed(self, body: bytes) -> tuple[list[bytes], bytes]:
        """Return headers that delimit a body, by its length or by chunks, and the body as it is
        sent with these headers."""
        if not body and self.happens(0.5):
            return [], b""
        if self.happens(0.5):
            return [b"Content-Length: %b%d" % (b"0" * self.happens(0.1), len(body))], body
        return [b"transfer-encoding: " + self.pick((b"chunked", b"Chunked"))], self._chunked(body)

    def _chunked(self, body: bytes) -> bytes:
        sent = b""
        while body:
            size = int(self._chance.integers(1, len(body) + 1))
            digits = self.pick((b"%x", b"%X", b"0%x", b"000%x")) % size
            sent += digits + self.pick(EXTENSIONS) + b"\r\n" + body[:size] + b"\r\n"
            body = body[size:]
        trailers = [self.pick(TRAILERS) for _ in range(int(self._chance.integers(3)))]
        last = b"0" * int(self._chance.integers(1, 4)) + self.pick(EXTENSIONS)
        return sent + b"\r\n".join([last, *trailers, b"", b""])


def _line(line: bytes) -> Callable[[RequestMaker, bytes], bytes]:
    """Return a function that builds an invalid request with the request line ``line``, in which it
    replaces PATH with the path that is passed to it."""
    return lambda maker, path: line.replace(b"PATH", path) + b"\r\nhost: x\r\n\r\n"


def _with(lines: bytes, body: bytes = b"", method: bytes = b"POST") -> Callable[..., bytes]:
    """Return a function that builds a request with a ``host`` header, the header lines ``lines``
    and the body ``body``."""

    def make(maker: RequestMaker, path: bytes) -> bytes:
        first, last = b"host: x\r\n", lines + b"\r\n"
        if maker.happens(0.5):
            first, last = last, first
        return b"%b %b HTTP/1.1\r\n%b%b\r\n" % (method, path, first, last) + body

    return make


def _hosts(lines: bytes) -> Callable[[RequestMaker, bytes], bytes]:
    return lambda maker, path: b"GET %b HTTP/1.1\r\n%b\r\n" % (path, lines)


CHUNKED = b"transfer-encoding: chunked"
END = b"0\r\n\r\n"

FAULTS: dict[str, Callable[[RequestMaker, bytes], bytes]] = {
    "no host": _hosts(b"a: b\r\n"),
    "two hosts": _hosts(b"host: x\r\na: b\r\nHost: x\r\n"),
    "no such host": _hosts(b"host: a b\r\n"),
    "a host with a path": _hosts(b"host: x/y\r\n"),
    "HTTP/0.9": _line(b"GET PATH"),
    "HTTP/1.2": _line(b"GET PATH HTTP/1.2"),
    "HTTP/2.0": _line(b"GET PATH HTTP/2.0"),
    "RTSP": _line(b"DESCRIBE PATH RTSP/1.0"),
    "two spaces": _line(b"GET  PATH HTTP/1.1"),
    "a space behind": _line(b"GET PATH HTTP/1.1 "),
    "a tab": _line(b"GET\tPATH HTTP/1.1"),
    "lower case": _line(b"get PATH HTTP/1.1"),
    "a fragment": _line(b"GET PATH#a HTTP/1.1"),
    "CONNECT": _line(b"CONNECT x:80 HTTP/1.1"),
    "a star": _line(b"GET * HTTP/1.1"),
    "a user": _line(b"GET http://u@xPATH HTTP/1.1"),
    "NUL in the target": _line(b"GET PATH\0 HTTP/1.1"),
    "line feeds": _line(b"GET PATH HTTP/1.1\na: b"),
    "a fold": _with(b"a: b\r\n c"),
    "a space before a colon": _with(b"content-length : 3", b"abc"),
    "no colon": _with(b"abc"),
    "NUL": _with(b"a: b\0c"),
    "a bare CR": _with(b"a: b\rc: d"),
    "a bare LF": _with(b"a: b\nc: d"),
    "two keys": _with(b"authorization: a\r\nauthorization: b"),
    "cake": _with(b"expect: cake"),
    "many headers": _with(b"\r\n".join([b"a: b"] * 101)),
    "a large header": _with(b"a: " + b"x" * 40_000),
    "length and chunks": _with(b"content-length: 5\r\n" + CHUNKED, END),
    "chunks and length": _with(CHUNKED + b"\r\ncontent-length: 5", END),
    "two lengths": _with(b"content-length: 3\r\ncontent-length: 3", b"abc"),
    "a list of lengths": _with(b"content-length: 3,3", b"abc"),
    "a signed length": _with(b"content-length: +3", b"abc"),
    "a length in hex": _with(b"content-length: 0x3", b"abc"),
    "a length beyond 64 bits": _with(b"content-length: 18446744073709551619", b"abc"),
    "gzip": _with(b"transfer-encoding: gzip", END),
    "gzip, chunked": _with(b"transfer-encoding: gzip, chunked", END),
    "chunked, gzip": _with(b"transfer-encoding: chunked, gzip", END),
    "nearly chunked": _with(b"transfer-encoding: xchunked", END),
    "two codings": _with(b"transfer-encoding: identity\r\n" + CHUNKED, END),
    "a signed chunk": _with(CHUNKED, b"+3\r\nabc\r\n" + END),
    "0x": _with(CHUNKED, b"0x3\r\nabc\r\n" + END),
    "a space behind a size": _with(CHUNKED, b"3 \r\nabc\r\n" + END),
    "an empty size": _with(CHUNKED, b"\r\nabc\r\n" + END),
    "a chunk beyond 64 bits": _with(CHUNKED, b"10000000000000003\r\nabc\r\n" + END),
    "LF behind a size": _with(CHUNKED, b"3\nabc\r\n" + END),
    "a chunk too long": _with(CHUNKED, b"3\r\nabcd\r\n" + END),
    "LF in an extension": _with(CHUNKED, b"3;a\nabc\r\n" + END),
    "quoted LF in an extension": _with(CHUNKED, b'3;a="\n"\r\nabc\r\n' + END),
    "a large extension": _with(CHUNKED, b"3;" + b"x" * 5000 + b"\r\nabc\r\n" + END),
    "large trailers": _with(CHUNKED, b"0\r\na: " + b"x" * 5000 + b"\r\n\r\n"),
    "a length behind": _with(CHUNKED, b"0\r\ncontent-length: 33\r\n\r\n"),
    "tiny chunks": _with(CHUNKED, b"1\r\nx\r\n" * 9000 + END),
}

MUTATIONS = (
    b"", b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b":", b"\0", b"0", b"\x7f", b"\xff",
    b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n", b"host: y\r\n", b"HTTP/1.0",
    b"connection: close\r\n", b"connection: upgrade\r\nupgrade: h2c\r\n", b"0\r\n\r\n",
    b"3\r\nabc\r\n", b"expect: 100-continue\r\n", b"f" * 20, b"GET / HTTP/1.1\r\n", b";",
    b"chunked", b"%00", b"#",
    HIDDEN, b"\x0b", b"\x80", b"-1", b"99999999999999999999", b"identity", b", chunked",
)  # fmt: skip
