"""Offers what this worker has computed to the store, in the background."""

import asyncio
from functools import partial

import structlog

from baton.core.ids import BlockId
from baton.engine.engine import Engine
from baton.engine.result import SealedRun
from baton.errors import BatonError
from baton.kv.store_client import StoreClient
from baton.worker.engine_thread import EngineDoor
from baton.worker.kv_layout import KvLayout

MAX_UNPUBLISHED = 256
"""Runs of blocks that wait to be stored; a further one is forgotten (it is only a cache)."""

MAX_PUT_BYTES = 64 * 1024 * 1024
"""Pinned at a time for the store to read."""

log = structlog.get_logger(__name__)


class StorePublisher:
    """One run at a time. Blocks are pinned while the store reads them; what was evicted before
    its turn is left out."""

    def __init__(
        self, engine: EngineDoor, client: StoreClient, layout: KvLayout, model_tag: bytes
    ) -> None:
        self._engine = engine
        self._client = client
        self._layout = layout
        self._model_tag = model_tag
        self._runs: asyncio.Queue[SealedRun] = asyncio.Queue(MAX_UNPUBLISHED)
        self._told = ""

    def offer(self, run: SealedRun) -> None:
        if not self._runs.full():
            self._runs.put_nowait(run)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            run = await self._runs.get()
            try:
                await self._publish(run)
            except BatonError as error:
                self._tell(str(error))
            else:
                self._told = ""

    def _tell(self, failure: str) -> None:
        """Once, until it is another one or all is well again."""
        if failure != self._told:
            log.warning("store_put_failed", error=failure)
        self._told = failure

    async def _publish(self, run: SealedRun) -> None:
        """What the store has already is only named, so that it counts as used."""
        per_put = max(MAX_PUT_BYTES // self._layout.block_bytes, 1)
        first = max(run.first, await self._client.count(run.keys))
        if first >= len(run.keys):
            await self._put(run, len(run.keys), [])
        while first < len(run.keys):
            pin = partial(Engine.pin_cached, keys=run.keys[: first + per_put], first=first)
            block_ids = await self._engine.call(pin)
            if not block_ids:
                return
            try:
                await self._put(run, first, block_ids)
            finally:
                self._engine.send(partial(Engine.unpin, block_ids=block_ids))
            first += len(block_ids)

    async def _put(self, run: SealedRun, first: int, block_ids: list[BlockId]) -> None:
        keys = run.keys[first : first + len(block_ids)]
        await self._client.put(
            await self._layout.refs(block_ids, keys),
            self._layout.checksum_algorithm,
            head=run.keys[:first],
            tenant=run.tenant,
            model=self._model_tag,
        )
