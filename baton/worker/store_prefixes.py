"""Prefixes over the store nodes of the cluster."""

import asyncio
from collections.abc import Sequence

import structlog

from baton.clock import Clock
from baton.core.block_key import block_keys
from baton.core.handoff import BlockRef
from baton.core.ids import BlockId, BlockKey
from baton.core.request import RequestSpec
from baton.errors import BatonError
from baton.kv.store_client import StoreClient, StoreLease
from baton.transport.base import Transport
from baton.transport.flow import TransferFailed, transfer
from baton.worker.engine_thread import EngineDoor
from baton.worker.kv_layout import KvLayout

MAX_UNPUBLISHED = 64
"""Prompts whose blocks wait to be stored; a further one is forgotten (it is only a cache)."""

MIN_FETCH_BLOCKS = 2
"""A gain below this is not worth a round trip to the store."""

LEASE_SECONDS = 10.0
FETCH_SECONDS = 5.0

log = structlog.get_logger(__name__)


class StorePrefixes:
    """Implements :class:`baton.worker.prefix_store.PrefixStore`."""

    def __init__(
        self,
        engine: EngineDoor,
        client: StoreClient,
        transports: dict[str, Transport],
        layout: KvLayout,
        block_tokens: int,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._client = client
        self._transports = transports
        self._layout = layout
        self._block_tokens = block_tokens
        self._clock = clock
        self._unpublished: asyncio.Queue[list[BlockRef]] = asyncio.Queue(MAX_UNPUBLISHED)

    async def extend(self, spec: RequestSpec) -> dict[str, str]:
        cached, keys = await self._engine.call(
            lambda engine: (
                engine.cached_prefix_tokens(spec) // self._block_tokens,
                # The last token is always computed, so a block that ends with it is no gain.
                block_keys(
                    engine.key_root(spec.tenant_salt), spec.token_ids[:-1], self._block_tokens
                ),
            )
        )
        if len(keys) - cached < MIN_FETCH_BLOCKS:
            return {}
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                num_blocks = await self._fetch(keys[:cached], keys[cached:])
        except (BatonError, TimeoutError) as error:
            log.warning("store_fetch_failed", error=str(error))
            return {"store_error": str(error) or "timeout"}
        seconds = self._clock.monotonic() - began
        return {
            "store_tokens": str(num_blocks * self._block_tokens),
            "store_seconds": f"{seconds:.6f}",
        }

    def publish(self, blocks: Sequence[BlockRef]) -> None:
        if blocks and not self._unpublished.full():
            self._unpublished.put_nowait(list(blocks))

    async def run(self) -> None:
        while True:
            blocks = await self._unpublished.get()
            try:
                await self._client.put(self._transports, blocks, self._layout.checksum_algorithm)
            except BatonError as error:
                log.info("store_put_failed", error=str(error), num_blocks=len(blocks))

    async def _fetch(self, cached: list[BlockKey], missing: list[BlockKey]) -> int:
        """Blocks that came in."""
        lease = await self._client.lease(missing, LEASE_SECONDS)
        if lease is None:
            return 0
        try:
            return await self._import(lease, cached, missing[: len(lease.blocks)])
        finally:
            await self._client.release(lease)

    async def _import(self, lease: StoreLease, cached: list[BlockKey], keys: list[BlockKey]) -> int:
        block_ids = await self._engine.call(lambda engine: engine.begin_import(keys, after=cached))
        if block_ids is None:
            return 0
        num_good = 0
        unsafe = False
        try:
            if await self._read(lease, block_ids):
                num_good = len(block_ids)
        except TransferFailed as error:
            # Such blocks stay out of use until the worker restarts: there are few, if any.
            unsafe = error.stray is not None
            log.warning("store_read_failed", error=str(error))
        finally:
            self._engine.send(
                lambda engine: engine.finish_import(keys, block_ids, num_good, quarantine=unsafe)
            )
        return num_good

    async def _read(self, lease: StoreLease, block_ids: list[BlockId]) -> bool:
        transport = self._transports[lease.endpoint.transport]
        peer = await asyncio.to_thread(transport.connect, lease.endpoint)
        spans = self._layout.spans(lease.blocks, block_ids)
        await transfer(transport, peer, spans, FETCH_SECONDS, self._clock)
        return await self._layout.matches(lease.blocks, block_ids)
