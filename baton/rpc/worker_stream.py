"""The router's side of its stream to a worker: messages out, outputs in."""

from collections.abc import AsyncIterator, Callable, Sequence

import grpc.aio

from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestOutput, RequestSpec
from baton.core.task import Task
from baton.rpc.channel import translated_rpc_errors
from baton.rpc.convert.common import ref_to_proto, spec_to_proto
from baton.rpc.convert.outputs import outputs_from_proto
from baton.rpc.framed.connection import parse_message
from baton.rpc.output_encoder import encode_varint
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.v1 import worker_pb2_grpc as pb_grpc

_TASKS = {Task.PREFILL: pb.TASK_PREFILL, Task.DECODE: pb.TASK_DECODE, Task.WHOLE: pb.TASK_WHOLE}

RouterMessage = pb.RouterMessage


class SubmitEncoder:
    """Submissions as they travel: each a whole ``RouterMessage``. What goes to two workers, one
    right after the other, is encoded once."""

    def __init__(self) -> None:
        self._spec: RequestSpec | None = None
        self._encoded = b""

    def submit(self, spec: RequestSpec, task: Task, source: WorkerRef | None) -> bytes:
        if spec is not self._spec:
            self._spec, self._encoded = spec, _field(_SPEC, spec_to_proto(spec).SerializeToString())
        rest = pb.Submit(task=_TASKS[task], source=ref_to_proto(source) if source else None)
        return _field(_SUBMIT, self._encoded + rest.SerializeToString())


def encode_cancel(request_id: RequestId, epoch: Epoch) -> bytes:
    return RouterMessage(cancel=pb.Cancel(request_id=request_id, epoch=epoch)).SerializeToString()


def _field(tag: bytes, body: bytes) -> bytes:
    """A field that is a message. Fields behind one another are the message that has them all."""
    return tag + encode_varint(len(body)) + body


_SPEC = pb.Submit(spec=common.RequestSpec()).SerializeToString()[:1]
_SUBMIT = RouterMessage(submit=pb.Submit()).SerializeToString()[:1]


async def run_worker_stream(
    channel: grpc.aio.Channel,
    messages: AsyncIterator[RouterMessage],
    deliver: Callable[[RequestOutput], None],
) -> None:
    """Over gRPC: sends ``messages`` and delivers outputs until the worker ends the stream. Raises
    what breaks it."""
    call = pb_grpc.WorkerStub(channel).Run(messages)
    try:
        with translated_rpc_errors():
            async for message in call:
                for output in outputs_from_proto(message):
                    deliver(output)
    finally:
        call.cancel()


def decode_outputs(payload: bytes) -> Sequence[RequestOutput]:
    """Reads a ``WorkerMessage``. Raises Invalid for one that is none."""
    return outputs_from_proto(parse_message(pb.WorkerMessage, payload))
