"""A conductor's gRPC service: decode, call the core, encode."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc.aio
import structlog

from baton.core.block_key import BLOCK_KEY_BYTES
from baton.core.ids import BlockKey
from baton.core.placement import Placement
from baton.core.pool_plan import PoolPlan
from baton.errors import BatonError, Invalid
from baton.rpc.convert.error import error_to_proto
from baton.rpc.convert.placement import placement_to_proto
from baton.rpc.convert.pool_plan import pool_plan_to_proto
from baton.rpc.server import answer_call
from baton.rpc.v1 import conductor_pb2 as pb
from baton.rpc.v1 import conductor_pb2_grpc as pb_grpc

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
MAX_KEYS = 65_536


class ConductorCore(Protocol):
    def place(
        self,
        *,
        request_id: str,
        epoch: int,
        num_tokens: int,
        max_new_tokens: int,
        keys: tuple[BlockKey, ...],
        excluded: frozenset[str],
        trace: str = "",
        session: str = "",
    ) -> Placement:
        """Place one request. ``trace`` is the span of this call. Raises Unavailable, Overloaded,
        Invalid."""
        ...

    def describe(self) -> tuple[Sequence[str], str]:
        """The members as JSON, and the hash ring as text."""
        ...

    def pool_plan(self) -> PoolPlan | None:
        """The latest plan; None before the first request."""
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
        plan = pool_plan_to_proto(self._core.pool_plan())
        return pb.DescribeResponse(members_json=members, ring=ring, plan=plan)


def place_all(core: ConductorCore, batch: pb.PlaceRequests) -> pb.PlaceAnswers:
    """Place all requests of a batch; the answers are in the same order."""
    return pb.PlaceAnswers(answers=[_answer(core, request) for request in batch.requests])


def _answer(core: ConductorCore, request: pb.PlaceRequest) -> pb.PlaceAnswer:
    try:
        return pb.PlaceAnswer(placement=_place(core, request))
    except BatonError as error:
        return pb.PlaceAnswer(refusal=error_to_proto(error))
    except Exception:  # a bug, which must not fail the other placements of the batch
        log.exception("placement_crashed", request_id=request.request_id)
        return pb.PlaceAnswer(refusal=error_to_proto(BatonError("internal error")))


def _place(core: ConductorCore, request: pb.PlaceRequest) -> pb.Placement:
    placement = core.place(
        request_id=request.request_id,
        epoch=request.epoch,
        num_tokens=request.num_tokens,
        max_new_tokens=request.max_new_tokens,
        keys=_keys(request.block_keys),
        excluded=frozenset(request.excluded_worker_ids),
        trace=request.trace,
        session=request.session,
    )
    return placement_to_proto(placement)


def add_conductor_service(server: grpc.aio.Server, core: ConductorCore) -> None:
    pb_grpc.add_ConductorServicer_to_server(ConductorService(core), server)


def _keys(raw: Sequence[bytes]) -> tuple[BlockKey, ...]:
    if len(raw) > MAX_KEYS or any(len(key) != BLOCK_KEY_BYTES for key in raw):
        raise Invalid(f"block_keys must be at most {MAX_KEYS}, of {BLOCK_KEY_BYTES} bytes each")
    return tuple(BlockKey(key) for key in raw)
