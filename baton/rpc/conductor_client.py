"""Client of a conductor."""

from collections.abc import Iterable, Sequence

import grpc.aio

from baton.core.ids import BlockKey
from baton.core.placement import Placement
from baton.rpc.channel import translated
from baton.rpc.placement_convert import placement_from_proto
from baton.rpc.v1 import conductor_pb2 as pb
from baton.rpc.v1 import conductor_pb2_grpc as pb_grpc


async def ask_placement(
    channel: grpc.aio.Channel,
    *,
    request_id: str,
    epoch: int,
    tenant: str,
    num_tokens: int,
    max_new_tokens: int,
    block_keys: Sequence[BlockKey],
    excluded: Iterable[str],
    model: str,
    timeout_seconds: float,
) -> Placement:
    """Raises what the conductor does, Unavailable for an answer without a worker."""
    request = pb.PlaceRequest(
        request_id=request_id,
        epoch=epoch,
        tenant=tenant,
        num_tokens=num_tokens,
        max_new_tokens=max_new_tokens,
        block_keys=block_keys,
        excluded_worker_ids=sorted(excluded),
        model=model,
    )
    with translated():
        answer = await pb_grpc.ConductorStub(channel).Place(request, timeout=timeout_seconds)
    return placement_from_proto(answer)
