"""A placement between protobuf and ``baton.core``. What comes in is checked here."""

from collections.abc import Iterable, Sequence
from itertools import islice

from baton.core.ids import WorkerId
from baton.core.placement import MAX_ALTERNATIVES, Alternative, Placement
from baton.errors import Unavailable
from baton.rpc.convert import hint_from_proto, hint_to_proto, ref_from_proto, ref_to_proto
from baton.rpc.v1 import conductor_pb2 as pb


def placement_to_proto(placement: Placement) -> pb.Placement:
    return pb.Placement(
        prefill=ref_to_proto(placement.prefill) if placement.prefill is not None else None,
        decode=ref_to_proto(placement.decode),
        reason=placement.reason,
        store_hint=hint_to_proto(placement.store_hint),
        policy=placement.policy,
        ttft_seconds=placement.ttft_seconds,
        tbt_seconds=placement.tbt_seconds,
        prefill_alternatives=_alternatives_to_proto(placement.prefill_alternatives),
        decode_alternatives=_alternatives_to_proto(placement.decode_alternatives),
    )


def placement_from_proto(message: pb.Placement) -> Placement:
    """Raises Unavailable for an answer without a worker."""
    if not message.decode.address:
        raise Unavailable("a conductor answered without a decode worker")
    return Placement(
        ref_from_proto(message.prefill) if message.HasField("prefill") else None,
        ref_from_proto(message.decode),
        message.reason,
        hint_from_proto(message.store_hint),
        policy=message.policy,
        ttft_seconds=message.ttft_seconds if message.HasField("ttft_seconds") else None,
        tbt_seconds=message.tbt_seconds if message.HasField("tbt_seconds") else None,
        prefill_alternatives=_alternatives_from_proto(message.prefill_alternatives),
        decode_alternatives=_alternatives_from_proto(message.decode_alternatives),
    )


def _alternatives_to_proto(alternatives: Sequence[Alternative]) -> list[pb.Alternative]:
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


def _alternatives_from_proto(messages: Iterable[pb.Alternative]) -> tuple[Alternative, ...]:
    return tuple(
        Alternative(
            WorkerId(each.worker_id),
            each.score,
            each.queue_seconds,
            each.service_seconds,
            each.local_blocks,
            each.fetched_blocks,
            each.late_seconds,
        )
        for each in islice(messages, MAX_ALTERNATIVES)
    )
