"""Times one request's TTFT over its own connection, with little work for the client."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from testkit.machine import SYSTEM_CLOCK

SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One timed request; ``ttft_seconds`` is None if no token arrived."""

    status: int
    ttft_seconds: float | None


async def time_request(url: str, key: str, prompt: Sequence[int], max_tokens: int) -> TimedRequest:
    """Request a streamed completion and read it to its end. Raises OSError or TimeoutError."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None, url
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    data = json.dumps(body).encode()
    headers = {
        "host": parts.netloc,
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        "content-length": str(len(data)),
        "connection": "close",
    }
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    head = "".join(["POST /v1/completions HTTP/1.1\r\n", *lines, "\r\n"])
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        began = SYSTEM_CLOCK()
        try:
            writer.write(head.encode() + data)
            status = int((await reader.readline()).split()[1])
            first = await _first_event(reader, began) if status == 200 else None
            await reader.read()
        finally:
            writer.close()
    return TimedRequest(status, first)


async def _first_event(reader: asyncio.StreamReader, began: float) -> float | None:
    while line := await reader.readline():
        if line.startswith(b"data: "):
            return SYSTEM_CLOCK() - began
    return None
