"""Client of a conductor."""

import structlog

from baton.core.credentials import ClusterCredentials
from baton.core.ids import WorkerId
from baton.core.placement import Placement, PlacementQuery
from baton.core.pool_plan import PoolPlan
from baton.core.states import WorkerState
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import BatonError, Unavailable
from baton.registry.member_codec import member_from_json
from baton.rpc.channel import call_member
from baton.rpc.convert.placement import place_answer_from_proto, placement_query_to_proto
from baton.rpc.convert.pool_plan import pool_plan_from_proto
from baton.rpc.framed.calls import CallClient
from baton.rpc.service import CONDUCTOR
from baton.rpc.v1 import conductor_pb2 as pb

log = structlog.get_logger(__name__)


async def request_placement(
    conductor: CallClient, query: PlacementQuery, timeout_seconds: float
) -> Placement:
    """Request a placement. Raises the conductor's errors, DeadlineExceeded, and Unavailable if the
    conductor can't be reached, or if its answer can't be decoded or names no decode worker."""
    request = placement_query_to_proto(query)
    answer: pb.PlaceAnswer = await conductor.call("Place", request, timeout_seconds)
    try:
        return place_answer_from_proto(answer)
    except BatonError:
        raise
    except Exception as error:
        flaw = f"the conductor's answer can't be decoded: {type(error).__name__}: {error}"
        log.warning("placement_unreadable", error=flaw)
        raise Unavailable(flaw) from error


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
        if member.role in WORKER_KINDS and member.state is WorkerState.READY
    )


async def _describe(
    address: str, trust: ClusterCredentials | str | None, timeout_seconds: float, model: str
) -> pb.DescribeResponse:
    request = pb.DescribeRequest(model=model)
    answer: pb.DescribeResponse = await call_member(
        address, trust, CONDUCTOR, "Describe", request, timeout_seconds
    )
    return answer
