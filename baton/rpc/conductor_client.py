"""Client of a conductor."""

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import grpc.aio

from baton.core.ids import BlockKey
from baton.core.placement import Placement
from baton.core.pool_plan import PoolPlan
from baton.rpc.channel import open_channel, translated
from baton.rpc.placement_convert import placement_from_proto
from baton.rpc.pool_plan_convert import pool_plan_from_proto
from baton.rpc.v1 import conductor_pb2 as pb
from baton.rpc.v1 import conductor_pb2_grpc as pb_grpc

_STUBS: WeakKeyDictionary[grpc.aio.Channel, pb_grpc.ConductorStub] = WeakKeyDictionary()


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
        answer = await _stub(channel).Place(request, timeout=timeout_seconds)
    return placement_from_proto(answer)


def _stub(channel: grpc.aio.Channel) -> pb_grpc.ConductorStub:
    """To make one takes a good part of what a call does."""
    stub = _STUBS.get(channel)
    if stub is None:
        stub = _STUBS[channel] = pb_grpc.ConductorStub(channel)
    return stub


async def ask_pool_plan(
    address: str, secret: str | None = None, timeout_seconds: float = 5.0
) -> PoolPlan | None:
    """None: it has seen no request yet. Raises Unavailable."""
    async with open_channel(address, secret) as channel:
        with translated():
            stub = pb_grpc.ConductorStub(channel)
            answer = await stub.Describe(pb.DescribeRequest(), timeout=timeout_seconds)
    return pool_plan_from_proto(answer)
