"""A conductor's gRPC service, which decodes a request, calls the core, and encodes the answer."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc.aio
import structlog

from baton.core.placement import Placement, PlacementQuery
from baton.core.pool_plan import PoolPlan
from baton.errors import BatonError
from baton.placement_refusal import PlacementRefused
from baton.rpc.convert.error import error_to_proto
from baton.rpc.convert.placement import placement_query_from_proto, placement_to_proto
from baton.rpc.convert.pool_plan import pool_plan_to_proto
from baton.rpc.server import answer_call
from baton.rpc.v1 import conductor_pb2 as pb
from baton.rpc.v1 import conductor_pb2_grpc as pb_grpc

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class ConductorCore(Protocol):
    def place(self, query: PlacementQuery) -> Placement:
        """Place one request. Raises Unavailable, Overloaded, Invalid."""
        ...

    def describe(self) -> tuple[Sequence[str], str]:
        """Return the cluster's members, each as JSON, and the hash ring: the ids of all workers,
        sorted and separated by spaces."""
        ...

    def pool_plan(self, model: str = "") -> PoolPlan | None:
        """Return the latest plan for the sizes of a model's pools. Return None if there is none
        yet: no plan is made before the first request to place. ``model`` may be empty if the
        cluster serves one model."""
        ...


class ConductorService(pb_grpc.ConductorServicer):
    def __init__(self, core: ConductorCore) -> None:
        self._core = core

    async def Place(self, request: pb.PlaceRequest, context: Context) -> pb.Placement:
        async def call() -> pb.Placement:
            return _place(self._core, request)

        return await answer_call(context, call)  # type: ignore[no-any-return]

    async def PlaceMany(
        self, batches: AsyncIterator[pb.PlaceRequests], context: Context
    ) -> AsyncIterator[pb.PlaceAnswers]:
        async for batch in batches:
            yield place_all(self._core, batch)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        members, ring = self._core.describe()
        plan = pool_plan_to_proto(self._core.pool_plan(request.model))
        return pb.DescribeResponse(members_json=members, ring=ring, plan=plan)


def place_all(core: ConductorCore, batch: pb.PlaceRequests) -> pb.PlaceAnswers:
    """Place all requests of a batch. The answers are in the order of the requests."""
    return pb.PlaceAnswers(answers=[_answer(core, request) for request in batch.requests])


def _answer(core: ConductorCore, request: pb.PlaceRequest) -> pb.PlaceAnswer:
    try:
        return pb.PlaceAnswer(placement=_place(core, request))
    except PlacementRefused as error:
        refused = placement_to_proto(error.placement)
        return pb.PlaceAnswer(refusal=error_to_proto(error), refused=refused)
    except BatonError as error:
        return pb.PlaceAnswer(refusal=error_to_proto(error))
    except Exception:  # a bug, which must not fail the other placements of the batch
        log.exception("placement_crashed", request_id=request.request_id)
        return pb.PlaceAnswer(refusal=error_to_proto(BatonError("internal error")))


def _place(core: ConductorCore, request: pb.PlaceRequest) -> pb.Placement:
    return placement_to_proto(core.place(placement_query_from_proto(request)))


def add_conductor_service(server: grpc.aio.Server, core: ConductorCore) -> None:
    pb_grpc.add_ConductorServicer_to_server(ConductorService(core), server)
