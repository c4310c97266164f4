"""The client's side of :mod:`orchestrator.control_server`, for commands and for the router."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton.errors import Unavailable, error_from_grpc_status

MAX_LINE_BYTES = 256 * 1024
"""Enough for both pools at their largest."""

TIMEOUT_SECONDS = 10.0


def send_control_command(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Sends one command (``scale`` with ``pools``, ``drain`` with ``worker``, or ``pools``), and
    returns the pools: ``{"sizes": {role: count}, "workers": [{"id", "role", "state", "node",
    "message"}]}``. Blocks. Raises what the supervisor says, Unavailable when it doesn't answer."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(TIMEOUT_SECONDS)
            with short_socket_path(path) as name:
                client.connect(name)
            client.sendall(json.dumps(request).encode() + b"\n")
            told = json.loads(client.makefile().readline(MAX_LINE_BYTES))
    except (OSError, ValueError) as error:
        raise Unavailable(f"the supervisor does not answer: {error}") from error
    if "error" in told:
        raise error_from_grpc_status(str(told["status"]), str(told["error"]))
    answer: dict[str, Any] = told["answer"]
    return answer


@contextmanager
def short_socket_path(path: Path) -> Iterator[str]:
    """Another name for ``path``: that of a socket has at most 107 bytes, and homes are long."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
