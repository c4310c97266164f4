"""A server with just enough of OpenAI's API to be benchmarked, which misbehaves on request."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "secret"


class Handler(BaseHTTPRequestHandler):
    """Answers requests. It counts one token per word of a prompt, plus three for a chat; each token
    id counts as one token. The requested model's name selects how the server misbehaves."""

    protocol_version = "HTTP/1.1"
    server: "FakeServer"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": self.server.model, "max_model_len": 4096}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers.get("authorization") not in self.server.accepted:
            self._answer(401, {"error": {"message": "no such key", "code": "invalid_api_key"}})
            return
        self.server.bodies.append(body)
        num_prompt = self._length(body)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": num_prompt // 2},
        }
        if not body.get("stream"):
            self._answer(200, {"choices": [{"finish_reason": "length"}], "usage": usage})
        elif body["model"] == "busy" and len(self.server.bodies) % 2:
            error = {"message": "later", "type": "overloaded", "code": "rate_limit_exceeded"}
            self._answer(429, {"error": error})
        else:
            self._stream(body, usage)

    def _length(self, body: dict[str, Any]) -> int:
        if "messages" in body:
            return 3 + len(body["messages"][0]["content"].split())
        prompt = body["prompt"]
        return len(prompt.split()) if isinstance(prompt, str) else len(prompt)

    def _stream(self, body: dict[str, Any], usage: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if body["model"] == "hanging" and self.server.load_requests.index(body) >= 2:
            self.server.released.wait(30)
        for number in range(body["max_tokens"]):
            last = number + 1 == body["max_tokens"]
            if body["model"] == "torn" and number == 1:
                self.close_connection = True
                return
            if body["model"] == "failing" and number == 1:
                self._chunk({"error": {"message": "worker died", "code": "unavailable"}})
                break
            piece = {"content": "word "} if "messages" in body else None
            choice = {"delta": piece} if piece else {"text": "word "}
            self._chunk({"choices": [{**choice, "finish_reason": "length" if last else None}]})
        self._chunk({"choices": [], "usage": usage})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        if body["model"] == "closing":
            self.close_connection = True

    def _chunk(self, event: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, model: str, needs_key: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = model
        self.accepted = (f"Bearer {KEY}",) if needs_key else (None, f"Bearer {KEY}")
        self.bodies: list[dict[str, Any]] = []
        self.released = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore exceptions: clients may disconnect early."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def load_requests(self) -> list[dict[str, Any]]:
        """The requests of the measured load. Only these stream; the requests that the benchmark
        sends before the load do not."""
        return [body for body in self.bodies if body.get("stream")]


@contextmanager
def fake_server(model: str = "good", needs_key: bool = False) -> Iterator[FakeServer]:
    with FakeServer(model, needs_key) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()
