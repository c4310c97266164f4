"""Client of a conductor."""

import grpc.aio

from baton.core.credentials import ClusterCredentials
from baton.core.ids import WorkerId
from baton.core.placement import Placement, PlacementQuery
from baton.core.pool_plan import PoolPlan
from baton.core.states import WORKER_ROLES, WorkerState
from baton.registry.member_codec import member_from_json
from baton.rpc.channel import open_channel, translated_rpc_errors
from baton.rpc.convert.placement import placement_from_proto, placement_query_to_proto
from baton.rpc.convert.pool_plan import pool_plan_from_proto
from baton.rpc.placement_stream import PlacementStream
from baton.rpc.v1 import conductor_pb2 as pb
from baton.rpc.v1 import conductor_pb2_grpc as pb_grpc


async def request_placement(
    channel: grpc.aio.Channel | None,
    query: PlacementQuery,
    *,
    timeout_seconds: float,
    stream: PlacementStream | None = None,
) -> Placement:
    """Request a placement over ``stream``, if there is one, else by a separate call over
    ``channel``. Raises the conductor's errors, and Unavailable if the answer names no decode
    worker."""
    request = placement_query_to_proto(query)
    if stream is not None:
        return await stream.request_placement(request, timeout_seconds)
    assert channel is not None, "a stream or a channel is required"
    with translated_rpc_errors():
        answer = await pb_grpc.ConductorStub(channel).Place(request, timeout=timeout_seconds)
    return placement_from_proto(answer)


async def fetch_pool_plan(
    address: str,
    trust: ClusterCredentials | str | None = None,
    timeout_seconds: float = 5.0,
    model: str = "",
) -> PoolPlan | None:
    """Return a conductor's plan for the sizes of a model's pools, or None if the conductor has seen
    no request for it yet. ``model`` may be empty if the cluster serves one model. Raises
    Unavailable, DeadlineExceeded."""
    return pool_plan_from_proto(await _describe(address, trust, timeout_seconds, model))


async def fetch_ready_workers(
    address: str,
    trust: ClusterCredentials | str | None = None,
    timeout_seconds: float = 5.0,
) -> frozenset[WorkerId]:
    """Return the workers of all models that a conductor places requests on. Raises Unavailable,
    DeadlineExceeded."""
    answer = await _describe(address, trust, timeout_seconds, "")
    members = [member_from_json(each.encode()) for each in answer.members_json]
    return frozenset(
        member.id
        for member in members
        if member.role in WORKER_ROLES and member.state is WorkerState.READY
    )


async def _describe(
    address: str, trust: ClusterCredentials | str | None, timeout_seconds: float, model: str
) -> pb.DescribeResponse:
    async with open_channel(address, trust) as channel:
        with translated_rpc_errors():
            stub = pb_grpc.ConductorStub(channel)
            request = pb.DescribeRequest(model=model)
            answer: pb.DescribeResponse = await stub.Describe(request, timeout=timeout_seconds)
    return answer
