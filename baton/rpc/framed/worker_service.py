"""``Worker.Run`` over a framed connection, with the same messages and semantics as over gRPC."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import structlog

from baton.errors import BatonError
from baton.rpc.convert.outputs import outputs_to_proto
from baton.rpc.encoded_worker_service import EncodedCore, EncodedStream
from baton.rpc.framed.connection import FramedConnection, parse_message
from baton.rpc.framed.server import FramedServiceFactory
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.worker_service import RouterStream, WorkerCore, dispatch_message

WORKER_SERVICE = "worker"

log = structlog.get_logger(__name__)


class FramedWorkerService:
    """The worker's side of one router's stream."""

    def __init__(
        self,
        core: Any,
        next_message: Callable[[Any], Awaitable[bytes]],
        connection: FramedConnection,
    ) -> None:
        self._connection = connection
        self._stream: RouterStream = core.open_stream()
        self._writer = asyncio.create_task(self._write(next_message))

    def on_message(self, payload: bytes) -> None:
        dispatch_message(self._stream, parse_message(pb.RouterMessage, payload))

    def on_lost(self) -> None:
        self._writer.cancel()
        self._stream.close()

    async def _write(self, next_message: Callable[[Any], Awaitable[bytes]]) -> None:
        """Send outputs. While the router does not read, outputs wait in ``self._stream``, which is
        bounded."""
        try:
            while True:
                self._connection.send_message(await next_message(self._stream))
                await self._connection.wait_until_writable()
        except BatonError as error:
            self._connection.refuse(error)
        except Exception:  # a bug; the router fails over its requests to other workers
            log.exception("stream_crashed")
            self._connection.refuse(BatonError("internal error"))


def framed_worker_services(core: WorkerCore) -> dict[str, FramedServiceFactory]:
    """Return the worker's services, for :class:`baton.rpc.framed.server.FramedServer`."""
    return {WORKER_SERVICE: partial(FramedWorkerService, core, _encoded_outputs)}


def framed_encoded_worker_services(core: EncodedCore) -> dict[str, FramedServiceFactory]:
    """Return the services of a core that encodes its outputs itself (the mock worker)."""
    return {WORKER_SERVICE: partial(FramedWorkerService, core, _message)}


async def _encoded_outputs(stream: RouterStream) -> bytes:
    return outputs_to_proto(await stream.next_outputs()).SerializeToString()


async def _message(stream: EncodedStream) -> bytes:
    return await stream.next_message()
