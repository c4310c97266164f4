"""The supervisor's control server, on a Unix socket in its cluster's folder.

Requests and responses are JSON objects, one per line. Only the user may connect (mode 600).
:mod:`baton.pools.control_client` is the client.
"""

import asyncio
import json
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baton.core.ids import WorkerId
from baton.errors import BatonError, Invalid, error_mapping
from baton.pools.control_client import MAX_LINE_BYTES, TIMEOUT_SECONDS, short_socket_path
from baton.pools.model_pools import ModelPools


async def start_control_server(path: Path, pools: ModelPools) -> asyncio.Server:
    """Listen on the Unix socket ``path``, and execute commands on ``pools``."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                line = await reader.readline()
            writer.write(json.dumps(await _respond(pools, line)).encode() + b"\n")
            await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass
        finally:
            writer.close()

    return await asyncio.start_unix_server(handle, sock=_bind(path), limit=MAX_LINE_BYTES)


def _bind(path: Path) -> socket.socket:
    """Return a socket that is bound to ``path`` and to which only this user may connect. It does
    not listen yet, so nobody connects before its mode is set."""
    listener = socket.socket(socket.AF_UNIX)
    with short_socket_path(path) as name:
        listener.bind(name)
    path.chmod(0o600)
    return listener


async def _respond(pools: ModelPools, line: bytes) -> dict[str, Any]:
    try:
        return {"answer": await _execute(pools, json.loads(line))}
    except BatonError as error:
        return {"error": str(error), "status": error_mapping(error).grpc_status}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {
            "error": f"malformed request: {error}",
            "status": error_mapping(Invalid("")).grpc_status,
        }


async def _execute(pools: ModelPools, request: dict[str, Any]) -> dict[str, Any]:
    """Execute one command. Return the sizes of the pools and the workers after it."""
    if request["command"] == "scale":
        await pools.scale({str(name): int(size) for name, size in request["pools"].items()})
    elif request["command"] == "drain":
        await pools.remove(WorkerId(str(request["worker"])))
    elif request["command"] != "pools":
        raise Invalid(
            f"unknown command {request['command']!r}; known commands: scale, drain, pools"
        )
    return {
        "sizes": await pools.sizes(),
        "workers": [asdict(worker) for worker in await pools.workers()],
    }
