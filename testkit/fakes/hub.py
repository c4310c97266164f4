"""A Hugging Face hub on loopback that has one model, moves its branch, and can misbehave."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

MODEL_ID = "someone/tiny"
SLOW_BYTE_SECONDS = 0.05

Behaviour = Literal["answers", "is silent", "is slow", "fails"]


class FakeHub:
    """Serves ``MODEL_ID``. ``folders`` are the files of each commit; ``main`` is a commit. Once it
    ``is silent``, it accepts connections and never answers; if it ``is slow``, each byte of an
    answer takes ``SLOW_BYTE_SECONDS``; if it ``fails``, each answer is a 503."""

    def __init__(self, url: str, closed: threading.Event) -> None:
        self.url = url
        self.behaviour: Behaviour = "answers"
        self.folders: dict[str, Path] = {}
        self.main = ""
        self.requests: list[str] = []
        self.closed = closed

    def push(self, folder: Path) -> str:
        """Make ``folder`` the newest commit, and return the commit."""
        self.main = hashlib.sha1(str(folder).encode()).hexdigest()
        self.folders[self.main] = folder
        return self.main

    def answer(self, path: str) -> tuple[bytes, dict[str, str]]:
        """Return a body and headers; KeyError or FileNotFoundError mean 404."""
        commits = {commit: commit for commit in self.folders} | {"main": self.main}
        prefix, _, rest = path.removeprefix("/api/models").partition(f"/{MODEL_ID}/")
        kind, _, rest = rest.partition("/")
        if prefix or kind not in ("revision", "tree", "resolve"):
            raise FileNotFoundError(path)
        name, _, file = rest.partition("/")
        commit = commits[name]
        folder = self.folders[commit]
        if kind == "resolve":
            data = (folder / file).read_bytes()
            tag = hashlib.sha1(data).hexdigest()
            return data, {"etag": f'"{tag}"', "x-repo-commit": commit}
        if kind == "tree":
            files = [each for each in sorted(folder.rglob("*")) if each.is_file()]
            return _json([_tree_entry(each, folder) for each in files])
        return _json({"id": MODEL_ID, "sha": commit, "siblings": []})


def _json(value: Any) -> tuple[bytes, dict[str, str]]:
    return json.dumps(value).encode(), {"content-type": "application/json"}


def _tree_entry(file: Path, folder: Path) -> dict[str, Any]:
    data = file.read_bytes()
    oid = hashlib.sha1(data).hexdigest()
    return {
        "type": "file",
        "path": file.relative_to(folder).as_posix(),
        "size": len(data),
        "oid": oid,
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(path)
        if self.hub.behaviour == "is silent":
            self.hub.closed.wait()
            self.close_connection = True
            return
        status, body, headers = self._response(path)
        self.send_response(status)
        for name, value in (headers | {"content-length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self._write(body)

    def _response(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        if self.hub.behaviour == "fails":
            return 503, b"", {}
        try:
            return 200, *self.hub.answer(path)
        except (KeyError, OSError):
            return 404, b"", {}

    def _write(self, body: bytes) -> None:
        if self.hub.behaviour != "is slow":
            self.wfile.write(body)
            return
        for at in range(len(body)):
            if self.hub.closed.wait(SLOW_BYTE_SECONDS):
                return
            self.wfile.write(body[at : at + 1])

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not report clients that have left."""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    closed = threading.Event()
    handler = type("Handler", (_Handler,), {})
    with _Server(("127.0.0.1", 0), handler) as server:
        hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}", closed)
        handler.hub = hub  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            closed.set()
            server.shutdown()
            thread.join()
