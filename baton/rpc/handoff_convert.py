"""Conversion of the hand-off's messages."""

from baton.core.handoff import (
    Inspection,
    PullChunk,
    PullDone,
    PullEvent,
    PullOpen,
    PullScheduled,
)
from baton.core.ids import Epoch, Generation, RequestId, TokenId
from baton.errors import Invalid
from baton.rpc.convert import (
    block_from_proto,
    block_to_proto,
    endpoint_from_proto,
    endpoint_to_proto,
)
from baton.rpc.v1 import worker_pb2 as pb

_INSPECTION_FIELDS = tuple(Inspection.__dataclass_fields__)


def open_to_proto(opening: PullOpen) -> pb.PullOpen:
    return pb.PullOpen(
        request_id=opening.request_id,
        epoch=opening.epoch,
        source_generation=opening.source_generation,
        model_digest=opening.model_digest,
        kv_layout=opening.kv_layout,
        transports=opening.transports,
        host=opening.host,
    )


def open_from_proto(message: pb.PullOpen) -> PullOpen:
    return PullOpen(
        request_id=RequestId(message.request_id),
        epoch=Epoch(message.epoch),
        source_generation=Generation(message.source_generation),
        model_digest=message.model_digest,
        kv_layout=message.kv_layout,
        transports=tuple(message.transports),
        host=message.host,
    )


def event_to_proto(event: PullEvent) -> pb.PullEvent:
    match event:
        case PullScheduled():
            scheduled = pb.PullScheduled(
                endpoint=endpoint_to_proto(event.endpoint),
                num_tokens=event.num_tokens,
                checksum_algorithm=event.checksum_algorithm,
            )
            return pb.PullEvent(scheduled=scheduled)
        case PullChunk():
            blocks = [block_to_proto(block) for block in event.blocks]
            return pb.PullEvent(chunk=pb.PullChunk(first_block=event.first_block, blocks=blocks))
        case PullDone():
            done = pb.PullDone(token_id=event.token_id, finished=event.finished)
            return pb.PullEvent(done=done)


def event_from_proto(message: pb.PullEvent) -> PullEvent:
    """Raises Invalid for an event of a kind that this version does not know."""
    match message.WhichOneof("event"):
        case "scheduled":
            return PullScheduled(
                endpoint=endpoint_from_proto(message.scheduled.endpoint),
                num_tokens=message.scheduled.num_tokens,
                checksum_algorithm=message.scheduled.checksum_algorithm,
            )
        case "chunk":
            blocks = tuple(block_from_proto(block) for block in message.chunk.blocks)
            return PullChunk(first_block=message.chunk.first_block, blocks=blocks)
        case "done":
            return PullDone(TokenId(message.done.token_id), message.done.finished)
        case other:
            raise Invalid(f"unknown pull event {other!r}")


def inspection_to_proto(inspection: Inspection) -> pb.InspectResponse:
    return pb.InspectResponse(**{name: getattr(inspection, name) for name in _INSPECTION_FIELDS})


def inspection_from_proto(message: pb.InspectResponse) -> Inspection:
    return Inspection(**{name: getattr(message, name) for name in _INSPECTION_FIELDS})
