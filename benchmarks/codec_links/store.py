"""A store node on another host.

    python -m benchmarks.codec_links.store NUM_BLOCKS TRANSPORT

Answers first with its address. A command is a codec: all blocks of the prompt are encoded as a
prefill worker encodes them for ``kv_codec_store``, and put. The answer has their size.
"""

import asyncio
import sys

from baton.core.ids import BlockId, Incarnation
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.core.store import BlockFilter, PutRequest
from baton.kv_codec.registry import open_codecs
from baton.rpc.kvstore_service import add_kvstore_service
from baton.rpc.server import build_server, listen
from baton.system.host import host_id
from baton.transport.base import Transport
from baton.transport.host_memory import HostMemory
from baton.transport.selection import open_transports
from baton.worker.block_encoder import BlockEncoder
from benchmarks.codec_links.commands import answer, keep_output_for_answers, next_command
from benchmarks.codec_links.kv_pool import (
    FORMAT,
    LAYOUT_NAME,
    NUM_DISTINCT_BLOCKS,
    BenchPool,
    fill,
    new_pool,
    prefix_keys,
)
from benchmarks.codec_links.network import SOURCE_ADDRESS
from benchmarks.codec_links.transfers import CLOCK, open_transport
from kvstore.dram_tier import DramTier
from kvstore.node import StoreNode
from prefill_worker.store_encoder import StoreEncoder

STORE_ID = "store"
SPARE_BYTES = 256 * 2**20
MAX_PUT_BYTES = 64 * 2**20


class Publisher:
    """A worker beside the store, whose KV it puts. The worker has NUM_DISTINCT_BLOCKS blocks, each
    of which is put under many keys."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._pool: BenchPool = new_pool(NUM_DISTINCT_BLOCKS)
        fill(self._pool, NUM_DISTINCT_BLOCKS)
        self._transport = _open_shm(self._pool.memory, "publisher")
        self._codecs = open_codecs(FORMAT)

    async def publish(self, num_blocks: int, codec: KvCodecName) -> None:
        """Put all blocks of a prompt."""
        pool = self._pool
        encoder = StoreEncoder(BlockEncoder(pool.layout, pool.staging, self._codecs), codec)
        per_put = MAX_PUT_BYTES // FORMAT.size_bytes
        keys, done = prefix_keys(num_blocks), 0
        while done < num_blocks:
            end = min(done + per_put, num_blocks)
            ids = [BlockId(index % NUM_DISTINCT_BLOCKS) for index in range(done, end)]
            staged = await encoder.stage(ids, keys[done:end], done, exact=False)
            request = PutRequest(
                self._transport.export(), CHECKSUM_XXH3, staged.refs, first_block=done,
                layout=LAYOUT_NAME,
            )  # fmt: skip
            result = await self._node.put(request)
            staged.release()
            assert result.num_stored == len(staged.refs), result
            done += len(staged.refs)


def _open_shm(memory: HostMemory, owner: str) -> Transport:
    (transport,) = open_transports(
        ["shm"], owner=owner, generation=1, region=memory.region, clock=CLOCK,
        listen_host="127.0.0.1",
    ).values()  # fmt: skip
    return transport


async def serve(num_blocks: int, transport_name: str) -> None:
    arena_bytes = num_blocks * FORMAT.size_bytes + SPARE_BYTES
    memory = HostMemory("codec-links-store", arena_bytes)
    transports = {
        transport_name: open_transport(transport_name, memory, STORE_ID, SOURCE_ADDRESS),
        "shm": _open_shm(memory, STORE_ID),
    }
    dram = DramTier(arena_bytes)
    node = StoreNode(Incarnation(1), memory, transports, host_id(), CLOCK, dram)
    server = build_server()
    add_kvstore_service(server, node)
    port = await listen(server, SOURCE_ADDRESS, 0)
    publisher = Publisher(node)
    answer({"address": f"{SOURCE_ADDRESS}:{port}"})
    while name := await next_command():
        await node.purge(BlockFilter())
        await publisher.publish(num_blocks, KvCodecName(name))
        stats = node.stats()
        assert (stats.num_blocks, stats.violation) == (num_blocks, ""), stats
        answer({"bytes": sum(block.size_bytes for block in node.list_blocks(
            BlockFilter(), 0, num_blocks)[0])})  # fmt: skip
    await server.stop(grace=None)


if __name__ == "__main__":
    keep_output_for_answers()
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
