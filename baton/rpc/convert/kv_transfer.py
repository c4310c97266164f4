"""Conversion of the messages of a KV transfer."""

from baton.core.ids import Epoch, Incarnation, RequestId, TokenId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import (
    KvTransferChunk,
    KvTransferDone,
    KvTransferEvent,
    KvTransferOpen,
    KvTransferScheduled,
    ServerKv,
    WorkerInspection,
)
from baton.errors import Invalid
from baton.rpc.convert.common import (
    block_from_proto,
    block_to_proto,
    endpoint_from_proto,
    endpoint_to_proto,
)
from baton.rpc.v1 import worker_pb2 as pb

_CODEC_NAMES = frozenset(KvCodecName)
_INSPECTION_FIELDS = tuple(WorkerInspection.__dataclass_fields__)


def transfer_open_to_proto(opening: KvTransferOpen) -> pb.PullOpen:
    return pb.PullOpen(
        request_id=opening.request_id,
        epoch=opening.epoch,
        source_generation=opening.source_generation,
        model_digest=opening.model_digest,
        kv_layout=opening.kv_layout,
        transports=opening.transports,
        host=opening.host,
        codecs=[codec.value for codec in opening.codecs],
    )


def transfer_open_from_proto(message: pb.PullOpen) -> KvTransferOpen:
    return KvTransferOpen(
        request_id=RequestId(message.request_id),
        epoch=Epoch(message.epoch),
        source_generation=Incarnation(message.source_generation),
        model_digest=message.model_digest,
        kv_layout=message.kv_layout,
        transports=tuple(message.transports),
        host=message.host,
        codecs=tuple(KvCodecName(name) for name in message.codecs if name in _CODEC_NAMES),
    )


def transfer_event_to_proto(event: KvTransferEvent) -> pb.PullEvent:
    match event:
        case KvTransferScheduled():
            scheduled = pb.PullScheduled(
                endpoint=endpoint_to_proto(event.endpoint),
                num_tokens=event.num_tokens,
                checksum_algorithm=event.checksum_algorithm,
            )
            return pb.PullEvent(scheduled=scheduled)
        case KvTransferChunk():
            blocks = [block_to_proto(block) for block in event.blocks]
            return pb.PullEvent(chunk=pb.PullChunk(first_block=event.first_block, blocks=blocks))
        case KvTransferDone():
            done = pb.PullDone(token_id=event.token_id, finished=event.is_finished)
            return pb.PullEvent(done=done)
        case ServerKv():
            server_kv = pb.PullServerKv(
                parameters=event.parameters,
                num_tokens=event.num_tokens,
                token_id=event.token_id,
                cached_tokens=event.cached_tokens,
            )
            return pb.PullEvent(server_kv=server_kv)


def transfer_event_from_proto(message: pb.PullEvent) -> KvTransferEvent:
    """Decode an event. Raises Invalid for an unknown kind of event."""
    match message.WhichOneof("event"):
        case "scheduled":
            return KvTransferScheduled(
                endpoint=endpoint_from_proto(message.scheduled.endpoint),
                num_tokens=message.scheduled.num_tokens,
                checksum_algorithm=message.scheduled.checksum_algorithm,
            )
        case "chunk":
            blocks = tuple(block_from_proto(block) for block in message.chunk.blocks)
            return KvTransferChunk(first_block=message.chunk.first_block, blocks=blocks)
        case "done":
            return KvTransferDone(TokenId(message.done.token_id), message.done.finished)
        case "server_kv":
            kv = message.server_kv
            token = TokenId(kv.token_id) if kv.HasField("token_id") else None
            return ServerKv(kv.parameters, kv.num_tokens, token, kv.cached_tokens)
        case other:
            raise Invalid(
                "a KV transfer event must be `scheduled`, `chunk`, `done` or `server_kv`, not "
                f"{other!r}"
            )


def inspection_to_proto(inspection: WorkerInspection) -> pb.InspectResponse:
    return pb.InspectResponse(**{name: getattr(inspection, name) for name in _INSPECTION_FIELDS})


def inspection_from_proto(message: pb.InspectResponse) -> WorkerInspection:
    return WorkerInspection(**{name: getattr(message, name) for name in _INSPECTION_FIELDS})
