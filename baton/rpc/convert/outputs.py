"""Conversion of the outputs that a worker sends to a router. Many requests share a message, so each
output is converted separately: an output that can't be converted fails only its own request."""

from collections.abc import Iterable, Iterator, Sequence

import structlog

from baton.core.ids import Epoch, RequestId
from baton.core.request import FinishReason, RequestOutput
from baton.errors import BatonError, Corrupt, Invalid, error_mapping
from baton.rpc.convert.common import output_from_proto, output_to_proto
from baton.rpc.v1 import worker_pb2 as pb

MAX_OUTPUTS = 1 << 17
"""Maximum number of outputs in one message: twice as many as a worker buffers for a router that
does not read."""

log = structlog.get_logger(__name__)


def failed_output(
    request_id: str, epoch: int, error: BatonError, first_index: int = 0
) -> RequestOutput:
    """Return the last output of a request that failed with ``error``."""
    return RequestOutput(
        RequestId(request_id),
        Epoch(epoch),
        first_index,
        (),
        finish_reason=FinishReason.ERROR,
        error=str(error),
        details={"error_status": error_mapping(error).grpc_status},
    )


def outputs_to_proto(outputs: Iterable[RequestOutput]) -> pb.WorkerMessage:
    """Encode outputs. An output that can't be encoded is replaced by an error, with which its
    request fails."""
    message = pb.WorkerMessage()
    for output in outputs:
        try:
            proto = output_to_proto(output)
        except Exception:
            log.exception("output_not_written", request_id=output.request_id)
            failure = failed_output(output.request_id, output.epoch, BatonError("internal error"))
            proto = output_to_proto(failure)
        message.outputs.append(proto)
    return message


def outputs_from_proto(message: pb.WorkerMessage) -> Sequence[RequestOutput]:
    """Decode outputs. An output that can't be decoded is replaced by a retryable error, with which
    its request fails; the first such output of a message is logged. Raises Invalid if there are
    more outputs than any worker sends."""
    if len(message.outputs) > MAX_OUTPUTS:
        raise Invalid(
            f"a message must have at most {MAX_OUTPUTS} outputs, not {len(message.outputs)}"
        )
    try:
        return [output_from_proto(each) for each in message.outputs]
    except Exception:
        return list(_read_each(message))


def _read_each(message: pb.WorkerMessage) -> Iterator[RequestOutput]:
    is_first = True
    for each in message.outputs:
        try:
            output = output_from_proto(each)
        except Exception as error:
            flaw = Corrupt(
                f"an output of the worker can't be decoded: {type(error).__name__}: {error}"
            )
            if is_first:
                log.warning("output_unreadable", request_id=each.request_id, error=str(flaw))
            is_first = False
            output = failed_output(each.request_id, each.epoch, flaw, each.first_index)
        yield output
