"""Tests the script that ``helm test`` runs in its pod: it requests one completion, and reports
failures."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import CHART, release_of

SCRIPT = CHART / "files/completion.py"
GOOD = {"choices": [{"text": " there was"}], "usage": {"completion_tokens": 2}}


class Router(ThreadingHTTPServer):
    """A fake router with a fixed response, which records its requests."""

    def __init__(self, status: int = 200, answer: Any = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.answer = status, answer or GOOD
        self.requests: list[tuple[str, str | None, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "demo"}]}, None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._reply(self.server.status, self.server.answer, body)

    def _reply(self, status: int, answer: Any, body: Any) -> None:
        self.server.requests.append((self.path, self.headers["authorization"], body))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def router(request: pytest.FixtureRequest) -> Iterator[Router]:
    server = Router(*getattr(request, "param", ()))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def run(url: str, *key_file: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", SCRIPT.read_text(), url, "20", *map(str, key_file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_completion_is_printed(router: Router, tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text("sk-1\n")
    answer = run(router.url, tmp_path / "api-key")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == "demo: ' there was' (2 tokens)\n"
    (models, completions) = router.requests
    assert models == ("/v1/models", "Bearer sk-1", None)
    assert completions[0] == "/v1/completions"
    assert completions[2]["model"] == "demo"


@pytest.mark.parametrize(
    ("router", "message"),
    [
        ((429, {"error": {"message": "full"}}), '/v1/completions: 429: {"error": {"message"'),
        ((200, {"choices": [{"text": ""}], "usage": {"completion_tokens": 0}}), "no answer: "),
        ((200, {"choices": [{"text": "a"}], "usage": {"completion_tokens": 17}}), "no answer: "),
    ],
    indirect=["router"],
)
def test_a_failed_completion_is_reported_with_its_reason(router: Router, message: str) -> None:
    answer = run(router.url)
    assert answer.returncode == 1
    assert answer.stderr.startswith(message)
    assert router.requests[0][1] is None


def test_an_unreachable_router_is_reported() -> None:
    with Router() as server:
        url = server.url
    answer = run(url)
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"{url}/v1/models can't be reached: ")


@pytest.mark.parametrize(
    ("scenario", "url", "key_file"),
    [
        ("demo", "http://demo-baton-router.models", []),
        ("everything", "https://baton-router.models", ["/etc/baton-test/api-key"]),
    ],
)
def test_the_test_pod_calls_the_routers_service(
    scenario: str, url: str, key_file: list[str]
) -> None:
    (pod,) = release_of(scenario).all("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    script, *arguments = container["args"]
    assert script.strip() == SCRIPT.read_text().strip()
    assert arguments == [url, "120", *key_file]
    assert "env" not in container
    mounts = {each["name"]: each["mountPath"] for each in container.get("volumeMounts", [])}
    files = [
        f"{mounts[volume['name']]}/{item['path']}"
        for volume in pod["spec"].get("volumes", [])
        for item in volume["secret"]["items"]
    ]
    assert files == key_file
