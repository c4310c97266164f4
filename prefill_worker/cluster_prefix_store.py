"""Fetches prefixes from the cluster's store nodes, and publishes blocks to them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog

from baton.clock import Clock
from baton.core.ids import BlockId, BlockKey
from baton.core.member import Member
from baton.core.request import RequestSpec
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.prefill_cost_model import PrefillCostModel
from baton.engine.result import StepResult
from baton.errors import BatonError, Corrupt
from baton.kv.cluster_store_client import ClusterStoreClient, StoreLease
from baton.transport.link_meter import MAX_LINKS, LinkMeter
from baton.transport.reads import TransferFailed, raise_if_cancelled
from baton.transport.selection import LOCAL_ONLY
from baton.transport.unfinished_transfers import UnfinishedTransfers
from baton.worker.block_reader import BlockReader, BlockSource
from baton.worker.engine_thread import EngineHandle
from baton.worker.kv_layout import KvLayout
from baton.worker.limits import MAX_SPLIT_FETCHES, MAX_STORE_CALL_BYTES, MIN_FETCH_TIMEOUT_SECONDS
from prefill_worker.prefix_fetch import PrefixFetch
from prefill_worker.reload_policy import (
    ReloadDecision,
    ReloadMode,
    choose_reload_mode,
    fetch_timeout_seconds,
)
from prefill_worker.store_publisher import StorePublisher
from prefill_worker.wanted_blocks import WantedBlocks

FIRST_PIECE_BYTES = 4 * 1024 * 1024
PIECE_SECONDS = 0.05
"""Target duration of reading one piece, well below the timeout of a call."""

RELEASE_GRACE_SECONDS = 0.05
"""The part of a call's timeout that is reserved for cancelling a read safely."""

ALL_REMOTE_LINKS = "far"
"""The name under which the link meter counts all links to nodes on other hosts as one. The names of
links to single nodes contain a ``/``."""

MAX_LEASE_ATTEMPTS = 2
"""A shorter prefix needs other blocks of layers with a window, so leasing begins anew if blocks
were evicted."""

SWEEP_SECONDS = 1.0

log = structlog.get_logger(__name__)


class ClusterPrefixStore:
    """Implements :class:`prefill_worker.prefix_store.PrefixStore`. If ``preferred_mode`` is given,
    it overrides the choice between fetching and computing."""

    def __init__(
        self,
        engine: EngineHandle,
        client: ClusterStoreClient,
        publisher: StorePublisher,
        layout: KvLayout,
        config: EngineConfig,
        clock: Clock,
        call_seconds: float,
        preferred_mode: ReloadMode | None = None,
        reader: BlockReader | None = None,
    ) -> None:
        """``reader`` reads blocks; without one, only raw blocks are read."""
        self._engine = engine
        self._client = client
        self._publisher = publisher
        self._layout = layout
        self._reader = reader or BlockReader(layout, None, {}, clock, call_seconds)
        self._config = config
        self._chunk_blocks = config.num_blocks_for(config.max_chunk_tokens)
        self._clock = clock
        self._call_seconds = call_seconds
        self._preferred_mode = preferred_mode
        self._prefill_cost_model = PrefillCostModel()
        self._link_meter = LinkMeter()
        self._used_links: set[str] = set()
        self._unfinished_transfers = UnfinishedTransfers()
        self._split_queue: asyncio.Queue[PrefixFetch] = asyncio.Queue(MAX_SPLIT_FETCHES)

    # -- PrefixStore -----------------------------------------------------------------------

    async def find_prefix(self, spec: RequestSpec, keys: Sequence[BlockKey]) -> PrefixFetch:
        """Look up how many leading blocks of ``keys`` a store node has. The last token of the
        prompt is always computed, so a block that ends with it is not looked up."""
        fetch = PrefixFetch(spec.request_id)
        fetch.window = self._config.window_of(spec.attention_window)
        fetch.keys = keys = keys[: self._num_full_blocks(len(spec.token_ids) - 1)]
        if keys and self._client.has_usable_nodes:
            async with self._timed_store_call(fetch):
                node = await self._client.find_node(keys, spec.store_hint)
                if node is not None:
                    fetch.num_stored_blocks = await self._client.count_stored(node, keys)
                    fetch.node, fetch.stats.node = node, node.id
                    if not fetch.num_stored_blocks:
                        await self._client.remove_stale_hint(node, keys)
        return fetch

    async def fetch_prefix(self, fetch: PrefixFetch, num_cached: int) -> None:
        assert fetch.node is not None, "find_prefix() has set it"
        async with self._timed_store_call(fetch) as timeout:
            await self._lease_and_fetch(fetch, fetch.node, num_cached, timeout)

    @asynccontextmanager
    async def _timed_store_call(self, fetch: PrefixFetch) -> AsyncIterator[asyncio.Timeout]:
        """Add the time of the enclosed store calls to ``fetch.stats``. If they fail or take longer
        than the timeout, which is yielded, record and log the error, but do not raise it: blocks
        that were not fetched are computed. Each call and read also has its own timeout."""
        start = self._clock.monotonic()
        fetch.stats.started_at = fetch.stats.started_at or start
        try:
            async with asyncio.timeout(MIN_FETCH_TIMEOUT_SECONDS) as timeout:
                yield timeout
        except (BatonError, TimeoutError) as error:
            fetch.stats.error = str(error) or "timeout"
            log.warning("store_fetch_failed", placement=fetch.request_id, error=fetch.stats.error)
        except Exception as error:  # a bug: the prefix is recomputed, the request goes on
            fetch.stats.error = repr(error)
            log.exception("store_fetch_crashed", placement=fetch.request_id)
        fetch.stats.wait_seconds += self._clock.monotonic() - start

    def start_split_fetch(self, fetch: PrefixFetch) -> None:
        if fetch.split_range is not None and not self._split_queue.full():
            self._split_queue.put_nowait(fetch)

    def record_step(self, result: StepResult) -> None:
        if result.work is not None:
            self._prefill_cost_model.record(result.work)
        for run in result.sealed_runs:
            self._publisher.enqueue(run)

    async def publish_remaining(self) -> None:
        await self._publisher.publish_remaining()

    @property
    def bytes_per_second(self) -> float | None:
        return self._link_meter.bytes_per_second(ALL_REMOTE_LINKS)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publisher.run())
            tasks.create_task(self._sweep())
            for _ in range(MAX_SPLIT_FETCHES):
                tasks.create_task(self._run_split_fetches())

    def _num_full_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that ``num_tokens`` tokens fill."""
        return num_tokens // self._config.block_tokens * self._config.num_groups

    # -- fetching before the prefill -------------------------------------------------------

    async def _lease_and_fetch(
        self, fetch: PrefixFetch, node: Member, cached: int, timeout: asyncio.Timeout
    ) -> None:
        """Lease the first piece of the prefix; then choose the :class:`ReloadMode`, and if it is
        FETCH, set the ``timeout`` that the whole may take, and fetch all pieces."""
        leased = await self._lease_first_piece(fetch, node, cached)
        if leased is None:
            return
        lease, wanted = leased
        fetch_seconds = self._estimate_fetch(lease, node, wanted)
        decision = self._choose_mode(fetch_seconds, cached, wanted.end)
        fetch.stats.mode, fetch.stats.reason = decision.mode.value, decision.reason
        if decision.mode is ReloadMode.FETCH:
            if not timeout.expired():  # otherwise the next await is cancelled
                timeout.reschedule(
                    asyncio.get_running_loop().time() + fetch_timeout_seconds(fetch_seconds)
                )
            await self._fetch_pieces(fetch, lease, wanted)
            return
        await self._client.release(lease)
        if decision.mode is ReloadMode.SPLIT:
            fetch.split_range = (cached, wanted.end)

    async def _lease_first_piece(
        self, fetch: PrefixFetch, node: Member, cached: int
    ) -> tuple[StoreLease, WantedBlocks] | None:
        """Lease the first of the blocks to fetch. The answer says how many of them are stored; if
        some were evicted since they were counted, blocks of a shorter prefix are leased. Return the
        lease and the blocks to fetch; None if there are none."""
        num_stored, window = fetch.num_stored_blocks, fetch.window or self._config.window
        for _ in range(MAX_LEASE_ATTEMPTS):
            wanted = WantedBlocks.of(fetch.keys, cached, num_stored, self._config, window)
            if not wanted.keys:
                return None
            lease = await self._client.lease(node, wanted.keys, self._piece_bytes(node, False))
            if lease is None:
                await self._client.remove_stale_hint(node, wanted.keys)
                return None
            if lease.leased.num_stored >= len(wanted.keys) or window.tokens is None:
                return lease, wanted.first(lease.leased.num_stored)
            await self._client.release(lease)
            num_stored = wanted.indexes[lease.leased.num_stored]
        return None

    def _estimate_fetch(self, lease: StoreLease, node: Member, wanted: WantedBlocks) -> float:
        """Return the predicted time of reading all wanted blocks; the first ones are leased."""
        size = len(wanted.keys) * sum(b.size_bytes for b in lease.blocks) // len(lease.blocks)
        link = _link_name(node, lease.leased.num_promoted > 0)
        return self._link_meter.estimate_seconds(link, size)

    def _choose_mode(self, fetch_seconds: float, cached: int, end: int) -> ReloadDecision:
        compute_seconds = self._prefill_cost_model.predict_added_seconds(
            self._config.num_tokens_in(cached), self._config.num_tokens_in(end)
        )
        return choose_reload_mode(
            end - cached, fetch_seconds, compute_seconds, self._chunk_blocks, self._preferred_mode
        )

    async def _fetch_pieces(
        self, fetch: PrefixFetch, lease: StoreLease, wanted: WantedBlocks
    ) -> None:
        """Fetch the wanted blocks piece by piece, until a piece is incomplete."""
        assert fetch.node is not None
        piece: StoreLease | None = lease
        keys, done = wanted.keys, 0
        while piece is not None:
            part = keys[done : done + len(piece.blocks)]
            after = [*wanted.preceding, *keys[:done]]
            num_good = await self._import_piece(fetch, piece, part, after)
            done += num_good
            if num_good < len(piece.blocks) or done >= len(keys):
                return
            on_disk = piece.leased.num_promoted > 0
            size = self._piece_bytes(fetch.node, on_disk)
            piece = await self._client.lease(fetch.node, keys[done:], size)

    # -- fetching during the prefill -------------------------------------------------------

    async def _run_split_fetches(self) -> None:
        while True:
            fetch = await self._split_queue.get()
            try:
                await self._fetch_from_end(fetch)
            except BatonError as error:
                fetch.stats.error = str(error)
                placement = fetch.request_id
                log.warning("store_fetch_failed", placement=placement, error=fetch.stats.error)
            except Exception:  # a bug: the rest of the prompt is computed
                log.exception("store_fetch_crashed", placement=fetch.request_id)

    async def _fetch_from_end(self, fetch: PrefixFetch) -> None:
        """Fetch from the end of the stored prefix backwards until reaching the computed part. The
        engine adopts the fetched blocks when its prefill reaches them."""
        assert fetch.split_range is not None and fetch.node is not None
        node, (first, end) = fetch.node, fetch.split_range
        while True:
            computed = await self._engine.call(
                lambda engine: engine.num_computed_tokens(fetch.request_id)
            )
            if computed is None:
                return
            # The current step computes one more chunk.
            frontier = max(first, self._config.num_blocks_for(computed) + self._chunk_blocks)
            size = self._piece_bytes(node, False)
            start = max(frontier, end - max(size // self._layout.block_bytes, 1))
            if start >= end:
                return
            wanted = fetch.keys[start:end]
            lease = await self._client.lease(node, wanted, len(wanted) * self._layout.block_bytes)
            if lease is None:
                return
            part = wanted[: len(lease.blocks)]
            if await self._import_piece(fetch, lease, part, ()) < len(wanted):
                return
            end = start

    # -- one piece -------------------------------------------------------------------------

    async def _import_piece(
        self,
        fetch: PrefixFetch,
        lease: StoreLease,
        keys: Sequence[BlockKey],
        after: Sequence[BlockKey],
    ) -> int:
        """Read the first of the leased blocks, which have ``keys``, into the device's prefix cache,
        and end the lease. ``after`` are preceding keys of the chain, whose cached blocks are pinned
        meanwhile. Return how many leading blocks were read and verified."""
        start, num_good = self._clock.monotonic(), 0
        try:
            self._check(lease)
        except Corrupt as error:
            log.warning("store_blocks_unreadable", node=lease.node.id, error=str(error))
            await self._client.report_damaged(lease, keys)
        else:
            num_good = await self._read_into_cache(lease, keys, after)
        finally:
            await self._client.release(lease)
        num_promoted = min(lease.leased.num_promoted, num_good)
        disk_tokens = self._config.num_tokens_in(num_promoted)
        fetch.stats.disk_tokens += disk_tokens
        fetch.stats.dram_tokens += self._config.num_tokens_in(num_good) - disk_tokens
        if num_good:
            size = sum(block.size_bytes for block in lease.blocks[:num_good])
            seconds = self._clock.monotonic() - start
            self._record_piece(_link_name(lease.node, num_promoted > 0), size, seconds)
        return num_good

    def _check(self, lease: StoreLease) -> None:
        """Raise Corrupt if this worker can't read the leased blocks."""
        algorithm = lease.leased.checksum_algorithm
        if algorithm != self._layout.checksum_algorithm:
            raise Corrupt(
                f"the node's blocks have checksums of algorithm {algorithm!r}, but this worker "
                f"uses {self._layout.checksum_algorithm!r}"
            )
        self._reader.check(lease.blocks, self._reader.accepted(exact=False))

    async def _read_into_cache(
        self, lease: StoreLease, keys: Sequence[BlockKey], after: Sequence[BlockKey]
    ) -> int:
        block_ids = await self._begin_import(keys, after)
        if block_ids is None:
            return 0
        num_good, must_quarantine, start = 0, False, self._clock.monotonic()
        source = BlockSource(
            lease.transport,
            lease.peer,
            self._call_seconds - RELEASE_GRACE_SECONDS,
            RELEASE_GRACE_SECONDS,
        )
        try:
            read = await self._reader.read(source, lease.blocks[: len(keys)], block_ids)
            num_good = read.num_good
            self._record_remote_link(lease, len(keys), read.link_seconds)
        except TransferFailed as error:
            self._client.record_read_failure(lease)
            log.warning("store_read_failed", error=str(error))
            self._record_failed_piece(lease, len(keys), self._clock.monotonic() - start)
            must_quarantine = bool(error.unfinished_transfers)
            if must_quarantine:
                release = partial(Engine.release_quarantine, block_ids=block_ids)
                self._unfinished_transfers.add(
                    lease.transport,
                    error.unfinished_transfers,
                    partial(self._engine.send, release),
                )
        finally:
            self._engine.send(
                lambda engine: engine.finish_import(
                    keys, block_ids, num_good, quarantine=must_quarantine
                )
            )
        if must_quarantine:
            raise_if_cancelled()
        elif num_good < len(keys):
            await self._client.report_damaged(lease, keys[num_good:])
        return num_good

    def _record_failed_piece(self, lease: StoreLease, num_blocks: int, seconds: float) -> None:
        """Record a failed read as if it had completed just now. The recorded speed is low then, so
        the next piece is smaller."""
        link = _link_name(lease.node, lease.leased.num_promoted > 0)
        size = sum(block.size_bytes for block in lease.blocks[:num_blocks])
        self._record_piece(link, size, seconds)

    def _record_remote_link(self, lease: StoreLease, num_blocks: int, seconds: float) -> None:
        """Record how fast bytes came from another host, for the conductor. Decoding doesn't count:
        the conductor adds it, and it would make the link seem slow."""
        if lease.transport.name not in LOCAL_ONLY:
            size = sum(block.size_bytes for block in lease.blocks[:num_blocks])
            self._record_piece(ALL_REMOTE_LINKS, size, seconds)

    def _record_piece(self, link: str, size_bytes: int, seconds: float) -> None:
        """Record the link speed. The first piece over a link is ignored, since its time includes
        connecting."""
        if link in self._used_links:
            self._link_meter.record(link, size_bytes, seconds)
        if len(self._used_links) >= MAX_LINKS:
            self._used_links.clear()
        self._used_links.add(link)

    async def _begin_import(
        self, keys: Sequence[BlockKey], after: Sequence[BlockKey]
    ) -> list[BlockId] | None:
        """Allocate device blocks for an import. Return None if too few are free. If the caller is
        cancelled, the engine still executes the allocation, so a second engine command frees the
        blocks right after that."""
        allocated: list[BlockId] | None = None

        def begin(engine: Engine) -> list[BlockId] | None:
            nonlocal allocated
            allocated = engine.begin_import(keys, preceding_keys=after)
            return allocated

        def free(engine: Engine) -> None:
            if allocated is not None:
                engine.finish_import(keys, allocated, 0)

        try:
            return await self._engine.call(begin)
        except asyncio.CancelledError:
            self._engine.send(free)
            raise

    def _piece_bytes(self, node: Member, from_disk: bool) -> int:
        """Return a piece size that should take :data:`PIECE_SECONDS` to read."""
        rate = self._link_meter.bytes_per_second(_link_name(node, from_disk))
        piece = FIRST_PIECE_BYTES if rate is None else int(rate * PIECE_SECONDS)
        return max(min(piece, MAX_STORE_CALL_BYTES), self._layout.block_bytes)

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            self._unfinished_transfers.sweep()
            self._reader.sweep()


def _link_name(node: Member, from_disk: bool) -> str:
    return f"{node.id}/{'disk' if from_disk else 'dram'}"
