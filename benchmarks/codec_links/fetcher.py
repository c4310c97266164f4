"""A prefill worker that fetches a prefix from a store node of another host.

    python -m benchmarks.codec_links.fetcher NUM_BLOCKS TRANSPORT STORE_ADDRESS

A command is the size of the stored prefix in bytes. The worker fetches a part of it, which tells
the speed of the link, and then all of it. It answers with times and with its own estimate.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from baton.core.ids import BlockId, BlockKey, Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.member import Member
from baton.core.request import RequestSpec, SamplingParams
from baton.core.states import Role, WorkerState
from baton.core.store import RAW_ONLY
from baton.engine.config import EngineConfig
from baton.kv.cluster_store_client import ClusterStoreClient
from baton.kv.memory_index import MemoryKvIndex
from baton.kv_codec.registry import open_codecs
from baton.registry.membership import Membership
from baton.registry.memory import MemoryRegistry
from baton.rpc.kvstore_client import KvStoreClient
from baton.worker.block_reader import BlockReader
from benchmarks.codec_links.commands import answer, keep_output_for_answers, next_command
from benchmarks.codec_links.kv_pool import (
    BLOCK_TOKENS,
    FORMAT,
    BenchPool,
    block_of_key,
    new_pool,
    prefix_keys,
    touch,
)
from benchmarks.codec_links.network import READER_ADDRESS
from benchmarks.codec_links.store import STORE_ID
from benchmarks.codec_links.transfers import CLOCK, open_transport
from benchmarks.machine import SYSTEM_CLOCK
from prefill_worker.cluster_prefix_store import ClusterPrefixStore
from prefill_worker.prefix_fetch import PrefixFetch
from prefill_worker.store_publisher import StorePublisher

CALL_SECONDS = 5.0
"""More than the default of ``store_timeout_seconds``: a busy machine must not end a fetch."""

PROBE_BLOCKS = 32
LINK = f"{STORE_ID}/dram"
"""The name of the link in the worker's link meter."""


class IdleEngine:
    """The part of an engine that a prefix fetch uses: each key has its own block."""

    def begin_import(
        self, keys: Sequence[BlockKey], *, preceding_keys: Sequence[BlockKey] = ()
    ) -> list[BlockId]:
        return [block_of_key(key) for key in keys]

    def finish_import(
        self, keys: object, block_ids: object, num_valid: int, *, quarantine: bool = False
    ) -> None:
        """Do nothing: a block is overwritten by the next fetch."""


class IdleEngineHandle:
    """Runs commands at once, as an engine without work does."""

    def __init__(self) -> None:
        self._engine: Any = IdleEngine()

    async def call(self, command: Callable[[Any], Any]) -> Any:
        return command(self._engine)

    def send(self, command: Callable[[Any], object]) -> None:
        command(self._engine)


class Fetcher:
    """A worker's client of the store. Each measurement has a :class:`ClusterPrefixStore` of its
    own, which knows only this link and this codec."""

    def __init__(
        self, pool: BenchPool, transport_name: str, membership: Membership, max_tokens: int
    ) -> None:
        self._layout = pool.layout
        self._handle = IdleEngineHandle()
        self._config = EngineConfig(block_tokens=BLOCK_TOKENS, max_model_tokens=max_tokens)
        self._reader = BlockReader(
            pool.layout, pool.staging, open_codecs(FORMAT), CLOCK, CALL_SECONDS
        )
        transport = open_transport(transport_name, pool.memory, "fetcher", READER_ADDRESS)
        self._client = ClusterStoreClient(
            membership, MemoryKvIndex(), {transport.name: transport},
            lambda node: KvStoreClient(node.address, None, "", CALL_SECONDS),
            "reader-host", CLOCK, CALL_SECONDS, RAW_ONLY.union(self._reader.accepted(exact=False)),
        )  # fmt: skip

    async def measure(self, num_blocks: int, stored_bytes: int) -> dict[str, object]:
        """Fetch a part of the prefix, then all of it."""
        store = self._new_store()
        await self._fetch(store, min(PROBE_BLOCKS, num_blocks))
        estimate = store._link_meter.estimate_seconds(LINK, stored_bytes)
        began, processor = SYSTEM_CLOCK(), time.process_time()
        fetch = await self._fetch(store, num_blocks)
        return {
            "seconds": SYSTEM_CLOCK() - began,
            "cpu_seconds": time.process_time() - processor,
            "num_blocks": fetch.stats.dram_tokens // BLOCK_TOKENS,
            "error": fetch.stats.error,
            "estimate_seconds": estimate,
            "link_bytes_per_second": store.bytes_per_second,
        }

    def _new_store(self) -> ClusterPrefixStore:
        handle: Any = self._handle
        publisher = StorePublisher(handle, self._client, self._layout, b"")
        return ClusterPrefixStore(
            handle, self._client, publisher, self._layout, self._config, CLOCK, CALL_SECONDS,
            reader=self._reader,
        )  # fmt: skip

    async def _fetch(self, store: ClusterPrefixStore, num_blocks: int) -> PrefixFetch:
        tokens = (TokenId(0),) * (num_blocks * BLOCK_TOKENS + 1)
        sampling = SamplingParams(max_tokens=1)
        spec = RequestSpec(RequestId("r"), Epoch(1), tokens, len(tokens), sampling)
        fetch = await store.find_prefix(spec, prefix_keys(num_blocks))
        await store.fetch_prefix(fetch, 0)
        return fetch


async def serve(num_blocks: int, transport_name: str, store_address: str) -> None:
    pool = new_pool(num_blocks)
    touch(pool)
    registry = MemoryRegistry(CLOCK)
    node = Member(
        WorkerId(STORE_ID), Role.KVSTORE, store_address, Incarnation(1), WorkerState.READY,
        host="store-host", transports=(transport_name,),
    )  # fmt: skip
    await registry.announce(node, 3600.0)
    membership = Membership(registry, CLOCK)
    await membership.refresh()
    fetcher = Fetcher(pool, transport_name, membership, 2 * num_blocks * BLOCK_TOKENS)
    answer("ready")
    while stored_bytes := await next_command():
        answer(await fetcher.measure(num_blocks, stored_bytes))


if __name__ == "__main__":
    keep_output_for_answers()
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
