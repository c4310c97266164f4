"""Client of one store node."""

from collections.abc import Sequence

from baton.core.handoff import Endpoint
from baton.core.ids import BlockKey
from baton.core.store import LeasedBlocks, PutRequest, PutResult, StoreStats
from baton.rpc.channel import open_channel, translated
from baton.rpc.convert import (
    block_from_proto,
    block_to_proto,
    endpoint_from_proto,
    endpoint_to_proto,
)
from baton.rpc.kvstore_service import STATS_FIELDS
from baton.rpc.v1 import kvstore_pb2 as pb
from baton.rpc.v1 import kvstore_pb2_grpc as pb_grpc

CALL_SECONDS = 2.0
PUT_SECONDS = 20.0


class KvStoreClient:
    """Methods raise Unavailable, DeadlineExceeded, and what the node says."""

    def __init__(self, address: str, secret: str | None) -> None:
        self._channel = open_channel(address, secret)
        self._stub = pb_grpc.KvStoreStub(self._channel)

    async def open(self, transports: Sequence[str], host: str) -> Endpoint:
        request = pb.OpenRequest(transports=transports, host=host)
        with translated():
            answer = await self._stub.Open(request, timeout=CALL_SECONDS)
        return endpoint_from_proto(answer.endpoint)

    async def put(self, request: PutRequest) -> PutResult:
        message = pb.PutRequest(
            source=endpoint_to_proto(request.source),
            checksum_algorithm=request.checksum_algorithm,
            blocks=[block_to_proto(block) for block in request.blocks],
        )
        with translated():
            answer = await self._stub.Put(message, timeout=PUT_SECONDS)
        return PutResult(answer.stored, answer.already_present)

    async def lease(self, keys: Sequence[BlockKey], seconds: float) -> LeasedBlocks:
        request = pb.LeaseRequest(keys=keys, lease_seconds=seconds)
        with translated():
            answer = await self._stub.Lease(request, timeout=CALL_SECONDS)
        blocks = tuple(block_from_proto(block) for block in answer.blocks)
        return LeasedBlocks(answer.lease_id, answer.checksum_algorithm, blocks)

    async def release(self, lease_id: str) -> None:
        with translated():
            await self._stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=CALL_SECONDS)

    async def stat(self) -> StoreStats:
        with translated():
            answer = await self._stub.Stat(pb.StatRequest(), timeout=CALL_SECONDS)
        return StoreStats(**{name: getattr(answer, name) for name in STATS_FIELDS})

    async def close(self) -> None:
        await self._channel.close()


async def stat_store(address: str, secret: str | None = None) -> StoreStats:
    client = KvStoreClient(address, secret)
    try:
        return await client.stat()
    finally:
        await client.close()
