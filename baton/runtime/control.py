"""How ``baton scale`` and ``baton drain`` reach a running supervisor: a socket in its folder.

One JSON object a line each way. The socket is the user's own (mode 600).
"""

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton.errors import BatonError, Invalid, Unavailable
from baton.runtime.supervisor import Supervisor

MAX_LINE_BYTES = 64 * 1024
TIMEOUT_SECONDS = 10.0


async def open_control(path: Path, supervisor: Supervisor) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                line = await reader.readline()
            writer.write(json.dumps(await _handle(supervisor, line)).encode() + b"\n")
            await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass
        finally:
            writer.close()

    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        with _short(path) as name:
            listener.bind(name)
    finally:
        os.umask(mask)
    return await asyncio.start_unix_server(answer, sock=listener, limit=MAX_LINE_BYTES)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Another name for ``path``: that of a socket has at most 107 bytes, and homes are long."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


async def _handle(supervisor: Supervisor, line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        if request["command"] == "scale":
            await supervisor.scale({str(k): int(v) for k, v in request["pools"].items()})
        elif request["command"] == "drain":
            await supervisor.drain(str(request["worker"]))
        else:
            raise Invalid(f"unknown command {request['command']!r}")
    except BatonError as error:
        return {"error": str(error), "invalid": isinstance(error, Invalid)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {"error": f"malformed request: {error}", "invalid": True}
    return {"error": ""}


def ask(path: Path, request: dict[str, Any]) -> None:
    """Sends one command. Raises what the supervisor says, Unavailable when it doesn't."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(TIMEOUT_SECONDS)
            with _short(path) as name:
                client.connect(name)
            client.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(client.makefile().readline(MAX_LINE_BYTES))
    except (OSError, ValueError) as error:
        raise Unavailable(f"the supervisor does not answer: {error}") from error
    if answer["error"]:
        raise (Invalid if answer.get("invalid") else BatonError)(answer["error"])
