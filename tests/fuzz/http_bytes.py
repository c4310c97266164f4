"""Fuzzes the router's HTTP/1.1 connection with requests whose bytes are split anywhere.

The app must receive valid requests unchanged and in order, and each must get exactly one response.
An invalid request must be refused and end the connection, and the app must not receive anything
that follows it. If bytes were changed at random, the app must receive no other requests than those
that h11 parses, in the same order; h11 is stricter than most parsers.

    python -m tests.fuzz.http_bytes --url http://127.0.0.1:8000 [--seconds 60] [--seed S]

sends such requests to a running router.
"""

import argparse
import asyncio
import json
import sys
import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict

import h11
import numpy as np
import psutil

from baton.clock import SystemClock
from router.http.connection_limits import ConnectionLimits
from router.limits import MAX_PIPELINED_BYTES
from tests.fuzz.http_grammar import HIDDEN, Request, RequestMaker
from tests.fuzz.result import HANG_SECONDS, FuzzResult, Recorder
from tests.http_connection_harness import ConnectionHarness, ConnectionResult

NAME = "http"
CLOCK = SystemClock()
REFUSALS = {400, 413, 414, 417, 431, 501}
"""The statuses of refusals. 501 is for HTTP features that the router does not support."""

MAX_GROWTH_BYTES = 64 * 2**20
CASES_UNTIL_WARM = 200
LINGER_SECONDS = 0.2


def fuzz(seconds: float, seed: int) -> FuzzResult:
    with asyncio.Runner() as runner:
        return runner.run(_fuzz(seconds, seed))


async def _fuzz(seconds: float, seed: int) -> FuzzResult:
    recorder, maker = Recorder(NAME, seed), RequestMaker(np.random.default_rng(seed))
    harness = ConnectionHarness(ConnectionLimits())
    until, memory = CLOCK.monotonic() + seconds, 0
    cases = 0
    while CLOCK.monotonic() < until:
        await _case(harness, maker, recorder)
        cases += 1
        if cases == CASES_UNTIL_WARM:
            memory = _memory()
    if memory and _memory() - memory > MAX_GROWTH_BYTES:
        recorder.crash(f"memory grew from {memory} to {_memory()} bytes")
    return recorder.result()


async def _case(harness: ConnectionHarness, maker: RequestMaker, recorder: Recorder) -> None:
    """Fuzz one connection."""
    requests = make_requests(maker)
    data = b"".join(request.data for request in requests)
    kind = maker.pick(("meant", "meant", "broken off", "changed"))
    if kind == "changed":
        data = maker.mutated(data)
    elif kind == "broken off":
        data = data[: len(data) - 1 - len(maker.random_bytes(len(data) - 2))]
    elif requests[-1].is_last:
        data += HIDDEN
    pieces = maker.cut(data)
    recorder.begin(f"{kind} {[len(piece) for piece in pieces][:50]} {data[:1500]!r}")
    began_at = CLOCK.monotonic()
    try:
        result = await harness.send(pieces)
    except TimeoutError as error:
        recorder.hang(error)
        return
    except Exception as error:
        recorder.crash(repr(error))
        return
    if CLOCK.monotonic() - began_at > HANG_SECONDS:
        recorder.hang(f"{CLOCK.monotonic() - began_at:.1f} s")
    fault = _common_fault(result) or _fault(kind, requests, result, data)
    if fault and any(status >= 500 and status != 501 for status in result.statuses):
        recorder.server_error(fault)
    elif fault:
        recorder.crash(fault)


def make_requests(maker: RequestMaker) -> list[Request]:
    """Return random requests for one connection; only the last one may end it."""
    requests: list[Request] = []
    while not requests or (maker.happens(0.5) and not requests[-1].is_last):
        if sum(len(request.data) for request in requests) > MAX_PIPELINED_BYTES // 4:
            break  # more requests would exceed the limit on pipelined bytes
        path = f"/{len(requests)}"
        requests.append(maker.invalid(path) if maker.happens(0.3) else maker.valid(path))
    return requests


def _common_fault(result: ConnectionResult) -> str:
    """Check the rules that hold for any bytes; return what is wrong, or ""."""
    if result.errors:
        return f"errors: {result.errors}"
    refused = [status for status in result.statuses if status != 200]
    if result.statuses != [200] * len(result.requests) + refused or len(refused) > result.is_closed:
        num_requests = len(result.requests)
        return f"{num_requests} requests, answers {result.statuses}, closed: {result.is_closed}"
    if not set(refused) <= REFUSALS:
        return f"answered with {refused}"
    bodies = [answer.partition(b"\r\n\r\n")[2] for answer in result.responses]
    if bodies[: len(result.requests)] != [
        each.path.encode(errors="replace") for each in result.requests
    ]:
        return "answers out of order"
    return ""


def _fault(kind: str, requests: Sequence[Request], result: ConnectionResult, data: bytes) -> str:
    served = [(each.method, each.path, each.body) for each in result.requests]
    if kind == "changed":
        known = reference(data)
        return (
            ""
            if served == known[: len(served)]
            else f"served {_shown(served)}, by h11 {_shown(known)}"
        )
    meant = [(each.method, each.path, each.body) for each in requests if not each.fault]
    if served != (meant[: len(served)] if kind == "broken off" else meant):
        return (
            f"served {_shown(served)}, meant {_shown(meant)}, {result.statuses} {result.refusals}"
        )
    if kind == "broken off":
        return ""
    last = requests[-1]
    if last.fault and result.statuses[-1:] == [200]:
        return f"{last.fault} was not refused"
    return "" if result.is_closed == last.is_last else f"closed: {result.is_closed}"


def reference(data: bytes) -> list[tuple[str, str, bytes]]:
    """Return the requests that h11 parses from ``data``, up to the first error."""
    served: list[tuple[str, str, bytes]] = []
    rest: bytes | None = data
    while rest:
        found, rest = _first(rest)
        served += found
    return served


def _first(data: bytes) -> tuple[list[tuple[str, str, bytes]], bytes | None]:
    """Parse one request. Return two values: a list with the request, which is empty if the request
    is incomplete or invalid, and the bytes that follow the request. The bytes are None if no
    further request can be parsed."""
    while data.startswith(b"\r\n"):  # RFC 9112 asks servers to ignore empty lines; h11 does not
        data = data[2:]
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
    parser.receive_data(data)
    request, body = None, b""
    try:
        while not isinstance(event := parser.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return [], None
        parser.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        parser.send(h11.EndOfMessage())
    except h11.ProtocolError:
        return [], None
    assert request is not None
    is_last = parser.their_state is not h11.DONE
    served = [(request.method.decode(), _path(request.target), body)]
    return served, None if is_last else parser.trailing_data[0]


def _shown(served: Sequence[tuple[str, str, bytes]]) -> str:
    return " ".join(f"{method} {path} {body[:50]!r}" for method, path, body in served)


def _path(target: bytes) -> str:
    if target[:4].lower() == b"http":
        target = b"/" + target.partition(b"//")[2].partition(b"/")[2]
    return urllib.parse.unquote(target.partition(b"?")[0].decode())


def _memory() -> int:
    return int(psutil.Process().memory_info().rss)


# -- a running router -----------------------------------------------------------------------------


async def fuzz_url(url: str, seconds: float, seed: int) -> FuzzResult:
    """Send random requests, some of them changed at random, to a running router over TCP. Check
    only that the responses are HTTP and not server errors, and that the router is healthy at the
    end."""
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    recorder, maker = Recorder(NAME, seed), RequestMaker(np.random.default_rng(seed))
    until = CLOCK.monotonic() + seconds
    while CLOCK.monotonic() < until:
        data = b"".join(request.data for request in make_requests(maker))
        if maker.happens(0.5):
            data = maker.mutated(data)
        recorder.begin(repr(data[:1500]))
        answer = await _send(host, port, maker.cut(data))
        status = answer.rpartition(b"HTTP/1.1 ")[2][:3]
        if answer and not answer.startswith(b"HTTP/1.1 "):
            recorder.crash(f"not an HTTP response: {answer[:100]!r}")
        elif status.startswith(b"5") and status != b"501":
            recorder.server_error(answer[-500:])
    recorder.begin("health")
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    if not (await _send(host, port, [health])).startswith(b"HTTP/1.1 200"):
        recorder.hang("the router is no longer healthy")
    return recorder.result()


async def _send(host: str, port: int, pieces: Sequence[bytes]) -> bytes:
    answer = b""
    try:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            for piece in pieces:
                if writer.transport.is_closing():
                    break
                writer.write(piece)
                await asyncio.sleep(0)
            async with asyncio.timeout(LINGER_SECONDS):
                while part := await reader.read(1 << 16):
                    answer += part
        finally:
            writer.transport.abort()
    except (OSError, TimeoutError):
        pass
    return answer


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Fuzz the HTTP parser of a running router.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    result = asyncio.run(fuzz_url(options.url, options.seconds, options.seed))
    print(json.dumps(asdict(result)))
    return 0 if result.is_clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
