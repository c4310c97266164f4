"""The router's side of its stream to a worker: messages out, outputs in."""

from collections.abc import AsyncIterator, Callable
from functools import lru_cache

import grpc.aio

from baton.core.handoff import WorkerRef
from baton.core.ids import Epoch, RequestId
from baton.core.request import RequestOutput, RequestSpec
from baton.core.task import Task
from baton.rpc.channel import translated
from baton.rpc.convert import output_from_proto, ref_to_proto, spec_to_proto
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.v1 import worker_pb2_grpc as pb_grpc

_TASKS = {Task.PREFILL: pb.TASK_PREFILL, Task.DECODE: pb.TASK_DECODE, Task.WHOLE: pb.TASK_WHOLE}

RouterMessage = pb.RouterMessage


def submit_message(spec: RequestSpec, task: Task, source: WorkerRef | None) -> RouterMessage:
    submit = pb.Submit(spec=_spec(spec), task=_TASKS[task])
    if source is not None:
        submit.source.CopyFrom(ref_to_proto(source))
    return RouterMessage(submit=submit)


@lru_cache(maxsize=2)
def _spec(spec: RequestSpec) -> common.RequestSpec:
    """The same one goes to two workers, one right after the other."""
    return spec_to_proto(spec)


def cancel_message(request_id: RequestId, epoch: Epoch) -> RouterMessage:
    return RouterMessage(cancel=pb.Cancel(request_id=request_id, epoch=epoch))


async def converse(
    channel: grpc.aio.Channel,
    messages: AsyncIterator[RouterMessage],
    deliver: Callable[[RequestOutput], None],
) -> None:
    """Sends ``messages`` and delivers outputs until the worker ends the stream. Raises what
    breaks it."""
    call = pb_grpc.WorkerStub(channel).Run(messages)
    try:
        with translated():
            async for message in call:
                for output in message.outputs:
                    deliver(output_from_proto(output))
    finally:
        call.cancel()
