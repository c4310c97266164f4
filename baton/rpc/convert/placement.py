"""Conversion of placements between protobuf and ``baton.core``. Incoming messages are validated
here."""

from collections.abc import Sequence
from typing import overload

from baton.core.block_key import BLOCK_KEY_BYTES
from baton.core.ids import BlockKey, Epoch, RequestId, TenantId, WorkerId
from baton.core.kv_codec import KvCodecName
from baton.core.placement import (
    MAX_ALTERNATIVES,
    Placement,
    PlacementQuery,
    ScoredCodec,
    ScoredWorker,
)
from baton.errors import Invalid, Overloaded, Unavailable
from baton.placement.refusal import PlacementRefused
from baton.rpc.convert.common import (
    adapter_from_proto,
    adapter_to_proto,
    codec_to_proto,
    hint_from_proto,
    hint_to_proto,
    ref_from_proto,
    ref_to_proto,
)
from baton.rpc.convert.error import error_from_proto
from baton.rpc.v1 import conductor_pb2 as pb

MAX_CODECS = len(KvCodecName)
"""Maximum number of codecs in a placement."""

MAX_KEYS = 65_536
"""Maximum number of block keys in a query."""

_CODEC_NAMES = frozenset(KvCodecName)


def placement_query_to_proto(query: PlacementQuery) -> pb.PlaceRequest:
    return pb.PlaceRequest(
        request_id=query.request_id,
        epoch=query.epoch,
        tenant=query.tenant,
        num_tokens=query.num_tokens,
        max_new_tokens=query.max_new_tokens,
        block_keys=query.block_keys,
        excluded_worker_ids=sorted(query.excluded),
        model=query.model,
        trace=query.trace,
        session=query.session,
        adapter=adapter_to_proto(query.adapter),
        exact_kv=query.exact_kv,
        max_attended_tokens=query.max_attended_tokens or 0,
        variant=query.variant,
    )


def placement_query_from_proto(request: pb.PlaceRequest) -> PlacementQuery:
    """Decode a query. Raises Invalid if there are too many keys, keys of the wrong size, or an
    invalid adapter."""
    return PlacementQuery(
        RequestId(request.request_id),
        Epoch(request.epoch),
        TenantId(request.tenant),
        request.num_tokens,
        request.max_new_tokens,
        _block_keys(request.block_keys),
        frozenset(map(WorkerId, request.excluded_worker_ids)),
        request.model,
        trace=request.trace,
        session=request.session,
        adapter=adapter_from_proto(request.adapter) if request.HasField("adapter") else None,
        exact_kv=request.exact_kv,
        max_attended_tokens=request.max_attended_tokens or None,
        variant=request.variant,
    )


def placement_to_proto(placement: Placement) -> pb.Placement:
    return pb.Placement(
        prefill=ref_to_proto(placement.prefill) if placement.prefill is not None else None,
        decode=ref_to_proto(placement.decode),
        reason=placement.reason,
        store_hint=hint_to_proto(placement.store_hint),
        policy=placement.policy,
        ttft_seconds=placement.ttft_seconds,
        itl_seconds=placement.itl_seconds,
        prefill_alternatives=_alternatives_to_proto(placement.prefill_alternatives),
        decode_alternatives=_alternatives_to_proto(placement.decode_alternatives),
        mixed_alternatives=_alternatives_to_proto(placement.mixed_alternatives),
        kv_codec=codec_to_proto(placement.kv_codec),
        codec_alternatives=[
            pb.CodecAlternative(
                codec=each.codec.value, decode_start_seconds=each.decode_start_seconds
            )
            for each in placement.codec_alternatives
        ],
    )


def placement_from_proto(message: pb.Placement) -> Placement:
    """Decode a placement. Raises Unavailable if it names no decode worker."""
    if not message.decode.address:
        raise Unavailable("the conductor's placement names no decode worker")
    encoded = message.SerializeToString()
    return Placement(
        ref_from_proto(message.prefill) if message.HasField("prefill") else None,
        ref_from_proto(message.decode),
        message.reason,
        hint_from_proto(message.store_hint),
        policy=message.policy,
        ttft_seconds=message.ttft_seconds if message.HasField("ttft_seconds") else None,
        itl_seconds=message.itl_seconds if message.HasField("itl_seconds") else None,
        prefill_alternatives=_Alternatives(encoded, "prefill_alternatives"),
        decode_alternatives=_Alternatives(encoded, "decode_alternatives"),
        mixed_alternatives=_Alternatives(encoded, "mixed_alternatives"),
        kv_codec=_codec(message.kv_codec) or KvCodecName.NONE,
        codec_alternatives=_codec_alternatives(message.codec_alternatives),
    )


def place_answer_from_proto(message: pb.PlaceAnswer) -> Placement:
    """Decode the answer to a placement request. If the answer is a refusal, raise its error:
    PlacementRefused if the placement that the request would have got is known. Raises Unavailable
    if the placement names no decode worker."""
    if message.HasField("refusal"):
        error = error_from_proto(message.refusal)
        if isinstance(error, Overloaded) and message.HasField("refused"):
            error = PlacementRefused(error, placement_from_proto(message.refused))
        try:
            raise error
        finally:
            del error  # else the error's traceback refers to this frame, and the frame to the error
    return placement_from_proto(message.placement)


def _alternatives_to_proto(alternatives: Sequence[ScoredWorker]) -> list[pb.Alternative]:
    return [
        pb.Alternative(
            worker_id=each.worker,
            score=each.score,
            queue_seconds=each.queue_seconds,
            service_seconds=each.service_seconds,
            local_blocks=each.local_blocks,
            fetched_blocks=each.fetched_blocks,
            late_seconds=each.late_seconds,
        )
        for each in alternatives
    ]


def _codec(name: str) -> KvCodecName | None:
    """Return the codec; None if a newer conductor names one that this version doesn't know."""
    return KvCodecName(name) if name in _CODEC_NAMES else None


def _codec_alternatives(messages: Sequence[pb.CodecAlternative]) -> tuple[ScoredCodec, ...]:
    found = ((_codec(each.codec), each.decode_start_seconds) for each in messages[:MAX_CODECS])
    return tuple(ScoredCodec(codec, seconds) for codec, seconds in found if codec is not None)


class _Alternatives(Sequence[ScoredWorker]):
    """The workers in ``field`` that the conductor scored for a placement, decoded when they are
    read. Until then they are kept as bytes, since parsed messages would take four times as much
    memory: a placement has dozens of alternatives, and a router keeps the alternatives of thousands
    of requests, but hardly ever reads them."""

    __slots__ = ("_encoded", "_field")

    def __init__(self, encoded: bytes, field: str) -> None:
        self._encoded = encoded
        self._field = field

    @property
    def _messages(self) -> Sequence[pb.Alternative]:
        found: Sequence[pb.Alternative]
        found = getattr(pb.Placement.FromString(self._encoded), self._field)
        return found

    def __len__(self) -> int:
        return min(len(self._messages), MAX_ALTERNATIVES)

    @overload
    def __getitem__(self, index: int) -> ScoredWorker: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ScoredWorker, ...]: ...

    def __getitem__(self, index: int | slice) -> ScoredWorker | tuple[ScoredWorker, ...]:
        messages = self._messages[:MAX_ALTERNATIVES]
        if isinstance(index, slice):
            return tuple(_alternative(message) for message in messages[index])
        return _alternative(messages[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def _alternative(message: pb.Alternative) -> ScoredWorker:
    return ScoredWorker(
        WorkerId(message.worker_id),
        message.score,
        message.queue_seconds,
        message.service_seconds,
        message.local_blocks,
        message.fetched_blocks,
        message.late_seconds,
    )


def _block_keys(raw: Sequence[bytes]) -> tuple[BlockKey, ...]:
    if len(raw) > MAX_KEYS or any(len(key) != BLOCK_KEY_BYTES for key in raw):
        raise Invalid(
            f"`block_keys` must have at most {MAX_KEYS} keys of {BLOCK_KEY_BYTES} bytes each"
        )
    return tuple(BlockKey(key) for key in raw)
