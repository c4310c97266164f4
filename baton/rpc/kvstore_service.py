"""A store node's gRPC service."""

from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from baton.core.ids import Incarnation
from baton.errors import BatonError
from baton.rpc.convert.kvstore import watch_event_to_proto
from baton.rpc.kvstore_methods import KvStoreCore, KvStoreMethods
from baton.rpc.server import abort, answer_call
from baton.rpc.v1 import kvstore_pb2 as pb
from baton.rpc.v1 import kvstore_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class KvStoreService(pb_grpc.KvStoreServicer):
    def __init__(self, core: KvStoreCore) -> None:
        self._core = core
        self._calls = KvStoreMethods(core)

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenResponse:
        return await answer_call(context, lambda: self._calls.open(request))  # type: ignore[no-any-return]

    async def Put(self, request: pb.PutRequest, context: Context) -> pb.PutResponse:
        return await answer_call(context, lambda: self._calls.put(request))  # type: ignore[no-any-return]

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseResponse:
        return await answer_call(context, lambda: self._calls.lease(request))  # type: ignore[no-any-return]

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        return await answer_call(context, lambda: self._calls.release(request))  # type: ignore[no-any-return]

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:
        return await answer_call(context, lambda: self._calls.report(request))  # type: ignore[no-any-return]

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        return await answer_call(context, lambda: self._calls.pin(request))  # type: ignore[no-any-return]

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:
        return await answer_call(context, lambda: self._calls.list(request))  # type: ignore[no-any-return]

    async def Purge(self, request: pb.PurgeRequest, context: Context) -> pb.PurgeResponse:
        return await answer_call(context, lambda: self._calls.purge(request))  # type: ignore[no-any-return]

    async def Stat(self, request: pb.StatRequest, context: Context) -> pb.StatResponse:
        return await answer_call(context, lambda: self._calls.stat(request))  # type: ignore[no-any-return]

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncGenerator[pb.WatchEvent]:
        try:
            async for page in self._core.watch(Incarnation(request.generation), request.number):
                yield watch_event_to_proto(page)
        except BatonError as error:
            await abort(context, error)


def add_kvstore_service(server: grpc.aio.Server, core: KvStoreCore) -> None:
    pb_grpc.add_KvStoreServicer_to_server(KvStoreService(core), server)
