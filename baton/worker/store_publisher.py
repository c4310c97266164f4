"""Offers what this worker has computed to the store, in the background."""

import asyncio
from functools import partial

import structlog

from baton.core.ids import BlockId
from baton.engine.engine import Engine
from baton.engine.result import SealedRun
from baton.errors import BatonError
from baton.kv.cluster_store_client import ClusterStoreClient
from baton.worker.computed_chains import ComputedChains
from baton.worker.engine_thread import EngineHandle
from baton.worker.kv_layout import KvLayout

MAX_UNPUBLISHED = 256
"""Runs of blocks that wait to be stored; a further one is forgotten (it is only a cache)."""

MAX_PUT_BYTES = 64 * 1024 * 1024
"""Pinned at a time for the store to read."""

log = structlog.get_logger(__name__)


class StorePublisher:
    """One run at a time. Blocks are pinned while the store reads them; what was evicted before
    its turn is left out. Whoever leaves calls :meth:`hand_over`."""

    def __init__(
        self, engine: EngineHandle, client: ClusterStoreClient, layout: KvLayout, model_tag: bytes
    ) -> None:
        self._engine = engine
        self._client = client
        self._layout = layout
        self._model_tag = model_tag
        self._runs: asyncio.Queue[SealedRun] = asyncio.Queue(MAX_UNPUBLISHED)
        self._chains = ComputedChains()
        self._told = ""

    def offer(self, run: SealedRun) -> None:
        self._chains.add(run)
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
            except Exception:  # a bug: these blocks are not kept
                log.exception("store_put_crashed")
            else:
                self._told = ""
            finally:
                self._runs.task_done()

    async def hand_over(self) -> None:
        """What the store did not take when it was offered, or has lost since, and this worker still
        holds, is offered once more, newest first; until the store can't be reached. Beside
        :meth:`run`, and after the last :meth:`offer`."""
        await self._runs.join()
        num_blocks = 0
        for chain in self._chains.newest_first():
            try:
                num_blocks += await self._publish(chain, names_known=False)
            except BatonError as error:
                self._tell(str(error))
                break
        log.info("handed_over", num_chains=len(self._chains), num_blocks=num_blocks)

    def _tell(self, failure: str) -> None:
        """Once, until it is another one or all is well again."""
        if failure != self._told:
            log.warning("store_put_failed", error=failure)
        self._told = failure

    async def _publish(self, run: SealedRun, *, names_known: bool = True) -> int:
        """How many blocks the store took. What it has already is only named, so that it counts as
        used."""
        per_put = max(MAX_PUT_BYTES // self._layout.block_bytes, 1)
        first = max(run.first, await self._client.count(run.keys))
        if first >= len(run.keys) and names_known:
            await self._put(run, len(run.keys), [])
        num_taken = 0
        while first < len(run.keys):
            pin = partial(Engine.pin_cached, keys=run.keys[: first + per_put], first=first)
            block_ids = await self._engine.call(pin)
            if not block_ids:
                break
            try:
                await self._put(run, first, block_ids)
            finally:
                self._engine.send(partial(Engine.unpin, block_ids=block_ids))
            first += len(block_ids)
            num_taken += len(block_ids)
        return num_taken

    async def _put(self, run: SealedRun, first: int, block_ids: list[BlockId]) -> None:
        keys = run.keys[first : first + len(block_ids)]
        await self._client.put(
            await self._layout.refs(block_ids, keys),
            self._layout.checksum_algorithm,
            head=run.keys[:first],
            tenant=run.tenant,
            model=self._model_tag,
        )
