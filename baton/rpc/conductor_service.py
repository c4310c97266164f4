"""A conductor's service, which decodes a request, calls the core, and encodes the answer."""

from collections.abc import Sequence
from typing import Protocol

import grpc.aio
import structlog

from baton.core.placement import Placement, PlacementQuery
from baton.core.pool_plan import PoolPlan
from baton.errors import BatonError
from baton.placement.refusal import PlacementRefused
from baton.rpc.convert.error import error_to_proto
from baton.rpc.convert.placement import placement_query_from_proto, placement_to_proto
from baton.rpc.convert.pool_plan import pool_plan_to_proto
from baton.rpc.framed.calls import call_services
from baton.rpc.framed.server import FramedServiceFactory
from baton.rpc.server import add_service
from baton.rpc.service import CONDUCTOR
from baton.rpc.v1 import conductor_pb2 as pb

log = structlog.get_logger(__name__)


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


class ConductorMethods:
    """The handlers of the methods of ``Conductor``, over gRPC and over framed connections."""

    def __init__(self, core: ConductorCore) -> None:
        self._core = core

    def place(self, request: pb.PlaceRequest) -> pb.PlaceAnswer:
        try:
            placement = self._core.place(placement_query_from_proto(request))
            return pb.PlaceAnswer(placement=placement_to_proto(placement))
        except PlacementRefused as error:
            refused = placement_to_proto(error.placement)
            return pb.PlaceAnswer(refusal=error_to_proto(error), refused=refused)
        except BatonError as error:
            return pb.PlaceAnswer(refusal=error_to_proto(error))
        except Exception:
            log.exception("placement_crashed", request_id=request.request_id)
            return pb.PlaceAnswer(refusal=error_to_proto(BatonError("internal error")))

    def describe(self, request: pb.DescribeRequest) -> pb.DescribeResponse:
        members, ring = self._core.describe()
        plan = pool_plan_to_proto(self._core.pool_plan(request.model))
        return pb.DescribeResponse(members_json=members, ring=ring, plan=plan)


def add_conductor_service(server: grpc.aio.Server, core: ConductorCore) -> None:
    add_service(server, CONDUCTOR, ConductorMethods(core))


def framed_conductor_services(core: ConductorCore) -> dict[str, FramedServiceFactory]:
    return call_services(CONDUCTOR, ConductorMethods(core))
