"""A fake worker for OpenAI-compatible routers: an HTTP server that streams fixed chunks.

    python -m benchmarks.peers.sse_worker --port P [--gap-seconds G]

It answers a POST with ``max_tokens`` chunks (by default 16): the first one at once, and each
further one ``gap-seconds`` after the previous one. It also answers the requests that a router sends
when it starts. It reads only ``max_tokens`` from the body, so that it costs as little as possible.
"""

import argparse
import asyncio
import re

import orjson

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\nconnection: keep-alive\r\n\r\n"
)
INFO = orjson.dumps(
    {
        "model_path": "demo",
        "served_model_name": "demo",
        "is_generation": True,
        "tokenizer_path": "demo",
        "tp_size": 1,
        "dp_size": 1,
        "object": "list",
        "data": [{"id": "demo", "object": "model", "created": 0, "owned_by": "peer"}],
    }
)
MAX_TOKENS = re.compile(rb'"max_tokens":\s*(\d+)')
DEFAULT_TOKENS = 16


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    body = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "demo",
        "choices": [choice],
    }
    return _chunk(b"data: " + orjson.dumps(body) + b"\n\n")


EVENT, LAST = _event(" token"), _event("") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class SseConnection(asyncio.Protocol):
    """One connection, with one request at a time, as in HTTP/1.1."""

    def __init__(self, gap_seconds: float) -> None:
        self._gap_seconds = gap_seconds
        self._data = b""
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length:\s*(\d+)", head, re.IGNORECASE)
        if not found or len(body) < (int(length[1]) if length else 0):
            return
        self._data = b""
        if head.startswith(b"POST"):
            wanted = MAX_TOKENS.search(body)
            self._transport.write(HEAD)
            self._stream(int(wanted[1]) if wanted else DEFAULT_TOKENS)
        else:
            answer = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            )
            self._transport.write(answer % len(INFO) + INFO)

    def _stream(self, left: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(EVENT if left > 1 else EVENT + LAST)
        if left > 1:
            self._loop.call_later(self._gap_seconds, self._stream, left - 1)


async def serve(port: int, gap_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: SseConnection(gap_seconds), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gap-seconds", type=float, default=0.0)
    options = parser.parse_args()
    try:
        asyncio.run(serve(options.port, options.gap_seconds))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
