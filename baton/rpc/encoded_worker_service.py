"""The worker's gRPC service for a core that encodes its outputs itself (the mock worker)."""

from typing import Any, Protocol, cast

import grpc
import grpc.aio

from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import WorkerInspection, WorkerRef
from baton.core.request import RequestOutput, RequestSpec
from baton.core.states import Role
from baton.core.task import Task
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.worker_service import Context, WorkerCore, WorkerService

_SERVICE = pb.DESCRIPTOR.services_by_name["Worker"].full_name


class EncodedStream(Protocol):
    """Like :class:`baton.rpc.worker_service.RouterStream`, but its outputs are encoded already."""

    def submit(self, spec: RequestSpec, task: Task, source: WorkerRef | None) -> None: ...

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None: ...

    def refuse(self, output: RequestOutput) -> None: ...

    async def next_message(self) -> bytes:
        """Wait for outputs, and return all available outputs as one encoded ``WorkerMessage``.
        Raises Overloaded when the router has left too many outputs unread."""
        ...

    def close(self) -> None: ...


class EncodedCore(Protocol):
    """Like :class:`baton.rpc.worker_service.WorkerCore`, but its streams yield encoded outputs, and
    it exports no KV."""

    def open_stream(self) -> EncodedStream: ...

    async def inspect(self) -> WorkerInspection: ...

    def start_drain(self, permanent: bool = True) -> None: ...

    def convert(self, role: Role) -> None: ...


async def _write_messages(stream: EncodedStream, context: Context) -> None:
    while True:
        await context.write(await stream.next_message())


class EncodedWorkerService(WorkerService):
    write_outputs = staticmethod(_write_messages)

    def __init__(self, core: EncodedCore) -> None:
        super().__init__(cast(WorkerCore, core))


def add_encoded_worker_service(server: grpc.aio.Server, core: EncodedCore) -> None:
    """Add the service to the server. The generated code can't be used for this: it would serialize
    the responses of ``Run``, which are bytes already."""
    service, unary = EncodedWorkerService(core), grpc.unary_unary_rpc_method_handler
    handlers: dict[str, Any] = {
        "Run": grpc.stream_stream_rpc_method_handler(service.Run, pb.RouterMessage.FromString),
        "Inspect": unary(
            service.Inspect,
            pb.InspectRequest.FromString,
            pb.InspectResponse.SerializeToString,
        ),
        "Drain": unary(
            service.Drain, pb.DrainRequest.FromString, pb.DrainResponse.SerializeToString
        ),
        "Convert": unary(
            service.Convert, pb.ConvertRequest.FromString, pb.ConvertResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
