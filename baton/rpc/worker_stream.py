"""The router's side of its stream to a worker: it sends messages and receives outputs."""

from collections.abc import Sequence

from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestOutput, RequestSpec
from baton.core.task import Task
from baton.rpc.convert.common import ref_to_proto, spec_to_proto
from baton.rpc.convert.outputs import outputs_from_proto
from baton.rpc.framed.connection import parse_message
from baton.rpc.output_encoder import encode_varint
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import worker_pb2 as pb

_TASKS = {
    Task.PREFILL: pb.TASK_PREFILL,
    Task.DECODE: pb.TASK_DECODE,
    Task.PREFILL_AND_DECODE: pb.TASK_WHOLE,
}


class SubmitEncoder:
    """Encodes submissions, each as a whole ``RouterMessage``. A spec that is sent to two workers in
    a row is encoded once."""

    def __init__(self) -> None:
        self._spec: RequestSpec | None = None
        self._encoded = b""

    def encode(self, spec: RequestSpec, task: Task, source: WorkerRef | None) -> bytes:
        if spec is not self._spec:
            self._spec, self._encoded = spec, _field(_SPEC, spec_to_proto(spec).SerializeToString())
        rest = pb.Submit(task=_TASKS[task], source=ref_to_proto(source) if source else None)
        return _field(_SUBMIT, self._encoded + rest.SerializeToString())


def encode_cancel(request_id: RequestId, epoch: Epoch) -> bytes:
    cancel = pb.Cancel(request_id=request_id, epoch=epoch)
    return pb.RouterMessage(cancel=cancel).SerializeToString()


def _field(tag: bytes, body: bytes) -> bytes:
    """Encode a field whose value is the encoded message ``body``. The concatenation of several
    fields is a message with all of them."""
    return tag + encode_varint(len(body)) + body


_SPEC = pb.Submit(spec=common.RequestSpec()).SerializeToString()[:1]
_SUBMIT = pb.RouterMessage(submit=pb.Submit()).SerializeToString()[:1]


def decode_outputs(payload: bytes) -> Sequence[RequestOutput]:
    """Parse a ``WorkerMessage``. Raises Invalid if it is malformed."""
    return outputs_from_proto(parse_message(pb.WorkerMessage, payload))
