"""``Worker.Run`` over a line: the same messages, and the same lease."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import structlog

from baton.errors import BatonError
from baton.rpc.encoded_service import EncodedCore, EncodedStream
from baton.rpc.line import Line, parsed
from baton.rpc.line_server import OpenService
from baton.rpc.outputs import write_outputs
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.worker_service import RouterStream, WorkerCore, take

WORKER_SERVICE = "worker"

log = structlog.get_logger(__name__)


class RunService:
    """One router's stream, seen from the worker."""

    def __init__(
        self, core: Any, next_message: Callable[[Any], Awaitable[bytes]], line: Line
    ) -> None:
        self._line = line
        self._stream: RouterStream = core.open_stream()
        self._writer = asyncio.create_task(self._write(next_message))

    def on_message(self, payload: bytes) -> None:
        take(self._stream, parsed(pb.RouterMessage, payload))

    def on_lost(self) -> None:
        self._writer.cancel()
        self._stream.close()

    async def _write(self, next_message: Callable[[Any], Awaitable[bytes]]) -> None:
        """While the router does not read, outputs wait in the stream, which has its bounds."""
        try:
            while True:
                self._line.send_message(await next_message(self._stream))
                await self._line.drained()
        except BatonError as error:
            self._line.refuse(error)
        except Exception:  # a bug; routers go elsewhere with what they have here
            log.exception("stream_crashed")
            self._line.refuse(BatonError("internal error"))


def worker_lines(core: WorkerCore) -> dict[str, OpenService]:
    """For :class:`baton.rpc.line_server.LineServer`."""
    return {WORKER_SERVICE: partial(RunService, core, _encoded_outputs)}


def encoded_worker_lines(core: EncodedCore) -> dict[str, OpenService]:
    """The same for a core that encodes its outputs itself."""
    return {WORKER_SERVICE: partial(RunService, core, _message)}


async def _encoded_outputs(stream: RouterStream) -> bytes:
    return write_outputs(await stream.outputs()).SerializeToString()


async def _message(stream: EncodedStream) -> bytes:
    return await stream.message()
