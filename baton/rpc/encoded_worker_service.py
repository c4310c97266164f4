"""The worker's service over a core that encodes its outputs itself."""

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
    """A :class:`baton.rpc.worker_service.RouterStream` but for what it gives."""

    def submit(self, spec: RequestSpec, task: Task, source: WorkerRef | None) -> None: ...

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None: ...

    def refuse(self, output: RequestOutput) -> None: ...

    async def message(self) -> bytes:
        """Waits for outputs and takes all that are there, as one ``WorkerMessage``. Raises
        Overloaded when the router has left too many unread."""
        ...

    def close(self) -> None: ...


class EncodedCore(Protocol):
    """A :class:`baton.rpc.worker_service.WorkerCore` without blocks to pull."""

    def open_stream(self) -> EncodedStream: ...

    async def inspect(self) -> WorkerInspection: ...

    def start_drain(self, for_good: bool = True) -> None: ...

    def convert(self, role: Role) -> None: ...


async def _write_messages(stream: EncodedStream, context: Context) -> None:
    while True:
        await context.write(await stream.message())


class EncodedWorkerService(WorkerService):
    write_outputs = staticmethod(_write_messages)

    def __init__(self, core: EncodedCore) -> None:
        super().__init__(cast(WorkerCore, core))


def add_encoded_worker_service(server: grpc.aio.Server, core: EncodedCore) -> None:
    """Of Run, what goes out is bytes already, so that the generated code is of no use."""
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
