"""A worker's service, which decodes messages, calls the core, and encodes its answers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import grpc.aio
import structlog

from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import KvTransferEvent, KvTransferOpen, WorkerInspection, WorkerRef
from baton.core.request import RequestOutput, RequestSpec
from baton.core.server_api import ForwardedHead, ForwardRequest
from baton.core.states import Role
from baton.core.task import Task
from baton.errors import BatonError, Invalid
from baton.rpc.convert.common import MAX_ID_BYTES, ref_from_proto, spec_from_proto
from baton.rpc.convert.forwarding import forward_from_proto, forwarded_to_proto
from baton.rpc.convert.kv_transfer import (
    inspection_to_proto,
    transfer_event_to_proto,
    transfer_open_from_proto,
)
from baton.rpc.convert.outputs import failed_output
from baton.rpc.framed.connection import FramedConnection, parse_message
from baton.rpc.framed.server import FramedServiceFactory
from baton.rpc.server import add_service
from baton.rpc.service import WORKER
from baton.rpc.v1 import worker_pb2 as pb

WriteEvent = Callable[[pb.PullEvent], Awaitable[None]]

log = structlog.get_logger(__name__)

_TASKS = {
    pb.TASK_PREFILL: Task.PREFILL,
    pb.TASK_DECODE: Task.DECODE,
    pb.TASK_WHOLE: Task.PREFILL_AND_DECODE,
}
_ROLES = {
    number: Role[name.removeprefix("WORKER_ROLE_")]
    for name, number in pb.WorkerRole.items()
    if number != pb.WORKER_ROLE_UNSPECIFIED
}


class RouterStream(Protocol):
    """One router's stream of requests. When the stream ends, its requests are cancelled."""

    def refuse(self, output: RequestOutput) -> None:
        """Send the failure of a request that could not be accepted."""
        ...

    def submit(self, spec: RequestSpec, task: Task, source: WorkerRef | None) -> None:
        """Accept the request. Never raises: errors are reported in an output."""
        ...

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None: ...

    async def next_message(self) -> bytes:
        """Wait for outputs, and return all available outputs as one encoded ``WorkerMessage``,
        which is empty if the worker has made progress. Raises Overloaded when the router has left
        too many outputs unread."""
        ...

    def close(self) -> None:
        """Cancel all requests of this stream. Idempotent."""
        ...


class KvExportStream(Protocol):
    """The source's side of one KV transfer: it exports one request's blocks to one reader."""

    def events(self) -> AsyncGenerator[KvTransferEvent]: ...

    def acknowledge(self, num_blocks: int) -> None: ...

    def close(self) -> None:
        """End the export: the reader has read everything, or has disconnected. Idempotent."""
        ...


class WorkerCore(Protocol):
    def open_stream(self) -> RouterStream: ...

    async def open_kv_export(self, opening: KvTransferOpen) -> KvExportStream:
        """Attach a reader to an export. Raises NotFound if the export is not opened in time,
        Invalid if the reader's KV is incompatible, and Unavailable if the export already has a
        reader."""
        ...

    async def inspect(self) -> WorkerInspection: ...

    def start_drain(self, permanent: bool = True) -> None: ...

    def convert(self, role: Role) -> None:
        """Begin to change the role to ``role``. If that is the current role, end a drain instead.
        Raises Unavailable when the worker is shutting down, and Invalid for a role that workers
        can't have."""
        ...


class Forwarder(Protocol):
    """A worker to whose server requests can be forwarded."""

    def forward(self, request: ForwardRequest) -> AsyncGenerator[ForwardedHead | bytes]:
        """Yield the head of the server's answer, then its body. Closing the generator cancels at
        the server. Raises NotFound if the worker does not serve the path now, Unavailable if the
        server has failed, and Overloaded if there are too many requests."""
        ...


class WorkerMethods:
    """The handlers of the methods of ``Worker`` that gRPC serves: all but ``Run``
    (:class:`FramedWorkerService`)."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core

    async def pull(self, requests: AsyncIterator[pb.PullRequest], write: WriteEvent) -> None:
        lease = await self._core.open_kv_export(await _opening(requests))
        try:
            await _until_either(_read_acks(lease, requests), _write_events(lease, write))
        finally:
            lease.close()

    async def inspect(self, request: pb.InspectRequest) -> pb.InspectResponse:
        return inspection_to_proto(await self._core.inspect())

    def drain(self, request: pb.DrainRequest) -> pb.DrainResponse:
        self._core.start_drain(permanent=False)
        return pb.DrainResponse()

    def convert(self, request: pb.ConvertRequest) -> pb.ConvertResponse:
        if request.role not in _ROLES:
            known = ", ".join(_ROLES.values())
            raise Invalid(f"unknown role {request.role}; known roles: {known}", param="role")
        self._core.convert(_ROLES[request.role])
        return pb.ConvertResponse()


class ForwardingMethods(WorkerMethods):
    """The handlers of a worker with an attached server. Forwarded requests don't travel with the
    tokens: a body of some megabytes would delay those of everybody else, and gRPC already has
    windows for each call."""

    def __init__(self, core: WorkerCore, forwarder: Forwarder) -> None:
        super().__init__(core)
        self._forwarder = forwarder

    async def forward(
        self,
        requests: AsyncIterator[pb.ForwardRequest],
        write: Callable[[pb.ForwardResponse], Awaitable[None]],
    ) -> None:
        request = await forward_from_proto(requests)
        async with aclosing(self._forwarder.forward(request)) as parts:
            async for part in parts:
                await write(forwarded_to_proto(part))


def add_worker_service(
    server: grpc.aio.Server, core: WorkerCore, forwarder: Forwarder | None = None
) -> None:
    """Serve the worker; with ``forwarder``, also requests to its server."""
    methods = WorkerMethods(core) if forwarder is None else ForwardingMethods(core, forwarder)
    add_service(server, WORKER, methods)


def framed_worker_services(core: WorkerCore) -> dict[str, FramedServiceFactory]:
    return {WORKER.name: partial(FramedWorkerService, core)}


class FramedWorkerService:
    """The worker's side of one router's stream, ``Run``."""

    def __init__(self, core: WorkerCore, connection: FramedConnection) -> None:
        self._connection = connection
        self._stream = core.open_stream()
        self._writer = asyncio.create_task(self._write())

    def on_message(self, payload: bytes) -> None:
        dispatch_message(self._stream, parse_message(pb.RouterMessage, payload))

    def on_lost(self) -> None:
        self._writer.cancel()
        self._stream.close()

    async def _write(self) -> None:
        """Send outputs. While the router does not read, outputs wait in ``self._stream``, which is
        bounded."""
        try:
            while True:
                self._connection.send_message(await self._stream.next_message())
                await self._connection.wait_until_writable()
        except BatonError as error:
            self._connection.refuse(error)
        except Exception:  # a bug; the router fails over its requests to other workers
            log.exception("stream_crashed")
            self._connection.refuse(BatonError("internal error"))


def dispatch_message(stream: RouterStream, message: pb.RouterMessage) -> None:
    """Pass one message from the router to the core. A request that can't be parsed is refused.
    Raises Invalid, which ends the stream, if such a request has no valid id either."""
    match message.WhichOneof("message"):
        case "submit":
            _submit(stream, message.submit)
        case "cancel":
            stream.cancel(RequestId(message.cancel.request_id), Epoch(message.cancel.epoch))


def _submit(stream: RouterStream, submit: pb.Submit) -> None:
    """Submit one request. An exception fails only this request, not the others of the stream."""
    name, epoch = submit.spec.request_id, submit.spec.epoch
    try:
        source = ref_from_proto(submit.source) if submit.HasField("source") else None
        if submit.task not in _TASKS:
            known = ", ".join(_TASKS.values())
            raise Invalid(f"unknown task {submit.task}; known tasks: {known}", param="task")
        stream.submit(spec_from_proto(submit.spec), _TASKS[submit.task], source)
    except Exception as error:
        if not 0 < len(name) <= MAX_ID_BYTES:
            raise Invalid(
                f"request_id must have 1 to {MAX_ID_BYTES} characters, not {len(name)}",
                param="request_id",
            ) from error
        if not isinstance(error, BatonError):
            log.exception("submit_crashed", request_id=name, epoch=epoch)
            stream.cancel(RequestId(name), Epoch(epoch))
            error = BatonError("internal error")
        stream.refuse(failed_output(name, epoch, error))


async def _opening(requests: AsyncIterator[pb.PullRequest]) -> KvTransferOpen:
    async for message in requests:
        if message.WhichOneof("message") == "open":
            return transfer_open_from_proto(message.open)
        break
    raise Invalid("the first message of a KV transfer must be `open`")


async def _read_acks(lease: KvExportStream, requests: AsyncIterator[pb.PullRequest]) -> None:
    async for message in requests:
        lease.acknowledge(message.ack.num_blocks)


async def _write_events(lease: KvExportStream, write: WriteEvent) -> None:
    async for event in lease.events():
        await write(transfer_event_to_proto(event))


async def _until_either(
    first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]
) -> None:
    """Run both coroutines until one ends, then cancel the other. If the one that ended raised a
    BatonError, raise that error itself, not an exception group."""
    failure: BatonError | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            one, other = tasks.create_task(first), tasks.create_task(second)
            one.add_done_callback(lambda _: other.cancel())
            other.add_done_callback(lambda _: one.cancel())
    except* BatonError as group:
        failure = group.exceptions[0]  # type: ignore[assignment]
    if failure is not None:
        raise failure
