"""Publishes the blocks that this worker has computed to the KV store, in the background."""

import asyncio
from functools import partial

import structlog

from baton.core.ids import BlockId
from baton.engine.engine import Engine
from baton.engine.result import SealedRun
from baton.errors import BatonError
from baton.kv.cluster_store_client import ClusterStoreClient
from baton.worker.block_encoder import BlockEncoder
from baton.worker.engine_thread import EngineHandle
from baton.worker.kv_layout import KvLayout
from baton.worker.limits import MAX_STORE_CALL_BYTES, MAX_UNPUBLISHED
from prefill_worker.computed_chains import ComputedChains
from prefill_worker.store_encoder import StoreEncoder

log = structlog.get_logger(__name__)


class StorePublisher:
    """Publishes one run of blocks (consecutive blocks of one chain) at a time. Blocks are pinned
    while the store reads them. If a block has already been evicted, it and the later blocks of its
    run are left out. A worker calls :meth:`publish_remaining` before it leaves the cluster."""

    def __init__(
        self,
        engine: EngineHandle,
        client: ClusterStoreClient,
        layout: KvLayout,
        model_tag: bytes,
        encoder: StoreEncoder | None = None,
        *,
        always_exact: bool = True,
    ) -> None:
        """``encoder`` encodes blocks before they are put. If ``always_exact`` is set, the store
        must not apply a lossy codec to any of them, otherwise to those of runs that are exact."""
        self._engine = engine
        self._client = client
        self._layout = layout
        self._model_tag = model_tag
        self._encoder = encoder or StoreEncoder(BlockEncoder(layout))
        self._always_exact = always_exact
        self._runs: asyncio.Queue[SealedRun] = asyncio.Queue(MAX_UNPUBLISHED)
        self._chains = ComputedChains()
        self._last_failure = ""

    def enqueue(self, run: SealedRun) -> None:
        self._chains.add(run)
        if not self._runs.full():
            self._runs.put_nowait(run)

    async def run(self) -> None:
        """Publish the runs of blocks that were enqueued, until cancelled."""
        while True:
            sealed = await self._runs.get()
            try:
                await self._publish(sealed)
            except BatonError as error:
                self._log_failure_once(str(error))
            except Exception:  # a bug: the run's blocks are not published
                log.exception("store_put_crashed")
            else:
                self._last_failure = ""
            finally:
                self._runs.task_done()

    async def publish_remaining(self) -> None:
        """Publish the blocks on this worker that the store does not have, newest first. Stop if the
        store can't be reached. Call this after the last :meth:`enqueue`, while the task of
        :meth:`run` is active."""
        await self._runs.join()
        num_blocks = 0
        for chain in self._chains.newest_first():
            try:
                num_blocks += await self._publish(chain, touch_stored=False)
            except BatonError as error:
                self._log_failure_once(str(error))
                break
        log.info("blocks_published", num_chains=len(self._chains), num_blocks=num_blocks)

    def _log_failure_once(self, failure: str) -> None:
        """Log a failure, unless the last failure was the same and no put has succeeded since
        then."""
        if failure != self._last_failure:
            log.warning("store_put_failed", error=failure)
        self._last_failure = failure

    async def _publish(self, run: SealedRun, *, touch_stored: bool = True) -> int:
        """Publish a run; return how many blocks the store accepted: none if the cluster has no
        store nodes. If ``touch_stored`` is set, a put with only the keys is sent for a run that is
        already stored, so that the store counts it as used."""
        if not self._client.has_nodes:
            return 0
        per_put = max(MAX_STORE_CALL_BYTES // self._layout.block_bytes, 1)
        first = max(run.first_new_block, await self._client.count_stored_at_put_target(run.keys))
        if first >= len(run.keys) and touch_stored:
            await self._put(run, len(run.keys), [])
        num_published = 0
        while first < len(run.keys):
            pin = partial(Engine.pin_cached_blocks, keys=run.keys[: first + per_put], first=first)
            block_ids = await self._engine.call(pin)
            if not block_ids:
                break
            try:
                num_put = await self._put(run, first, block_ids)
            finally:
                self._engine.send(partial(Engine.unpin_blocks, block_ids=block_ids))
            first += num_put
            num_published += num_put
        return num_published

    async def _put(self, run: SealedRun, first: int, block_ids: list[BlockId]) -> int:
        """Put the leading blocks, as many as can be encoded at a time. Return how many they are."""
        keys = run.keys[first : first + len(block_ids)]
        exact = self._always_exact or run.exact_kv
        staged = await self._encoder.stage(block_ids, keys, first, exact=exact)
        try:
            await self._client.put(
                staged.refs,
                self._layout.checksum_algorithm,
                preceding_keys=run.keys[:first],
                tenant=run.tenant_tag,
                model=self._model_tag,
                layout=self._layout.name,
                exact=exact,
            )
        finally:
            staged.release()
        return len(staged.refs)
