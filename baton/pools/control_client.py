"""Client of :mod:`orchestrator.control_server`, for CLI commands and for the router."""

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton.errors import Unavailable, error_from_grpc_status
from baton.system.portability import uses_linux

MAX_LINE_BYTES = 256 * 1024
"""Maximum size of an answer: enough for both pools at their largest."""

TIMEOUT_SECONDS = 10.0


def send_control_command(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Send one command: ``scale`` (with the argument ``pools``), ``drain`` (with the argument
    ``worker``) or ``pools`` (without arguments). Wait for the reply, and return the state of the
    pools: ``{"sizes": {pool: count}, "workers": [{"id", "role", "state", "node", "message",
    "model"}]}``. A pool is named ``decode``, or ``MODEL/decode`` if the cluster serves several
    models. Raises the supervisor's errors, and Unavailable if the supervisor doesn't answer."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(TIMEOUT_SECONDS)
            with short_socket_path(path) as name:
                client.connect(name)
            client.sendall(json.dumps(request).encode() + b"\n")
            response = json.loads(client.makefile().readline(MAX_LINE_BYTES))
    except (OSError, ValueError) as error:
        raise Unavailable(f"the supervisor does not answer: {error}") from error
    if "error" in response:
        raise error_from_grpc_status(str(response["status"]), str(response["error"]))
    answer: dict[str, Any] = response["answer"]
    return answer


@contextmanager
def short_socket_path(path: Path) -> Iterator[str]:
    """Context manager that yields a short alias of ``path``, because the path of a socket may have
    at most 107 bytes, and the path of a home directory may be longer. The portable alias is a
    symbolic link."""
    if uses_linux():
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{folder}/{path.name}"
        finally:
            os.close(folder)
    else:
        with tempfile.TemporaryDirectory(prefix="baton-") as folder_name:
            alias = Path(folder_name) / "c"
            alias.symlink_to(path.parent.absolute(), target_is_directory=True)
            yield str(alias / path.name)
