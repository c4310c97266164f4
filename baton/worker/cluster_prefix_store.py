"""Prefixes over the store nodes of the cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog

from baton.clock import Clock
from baton.core.ids import BlockId, BlockKey
from baton.core.member import Member
from baton.core.request import RequestSpec
from baton.engine.engine import Engine
from baton.engine.prefill_cost_model import PrefillCostModel
from baton.engine.result import StepResult
from baton.errors import BatonError
from baton.kv.cluster_store_client import ClusterStoreClient, StoreLease
from baton.transport.link_meter import LinkMeter
from baton.transport.reads import (
    TransferFailed,
    VerifiedReadResult,
    raise_if_cancelled,
    read_and_verify,
)
from baton.transport.selection import LOCAL_ONLY
from baton.transport.unfinished_transfers import UnfinishedTransfers
from baton.worker.engine_thread import EngineHandle
from baton.worker.kv_layout import KvLayout
from baton.worker.prefix_fetch import PrefixFetch
from baton.worker.reload_policy import ReloadDecision, ReloadMode, choose_way
from baton.worker.store_publisher import StorePublisher

FETCH_TIMEOUT_SECONDS = 10.0
"""For all of a prefix; each of its calls and reads is bounded by itself."""

FIRST_PIECE_BYTES = 4 * 1024 * 1024
MAX_PIECE_BYTES = 64 * 1024 * 1024
PIECE_SECONDS = 0.05
"""What a piece should take by what was measured, well below the bound of one call."""

RELEASE_GRACE_SECONDS = 0.05
"""Of a call: what an ended read may take to let go of its blocks."""

ALL_REMOTE_LINKS = "far"
"""The name of all links to other hosts' nodes together. Those of one node have a ``/``."""

MAX_USED_LINKS = 4096
"""Links that were used; beyond, all are new again."""

MAX_SPLIT_FETCHES = 8
SWEEP_SECONDS = 1.0

log = structlog.get_logger(__name__)


class ClusterPrefixStore:
    """Implements :class:`baton.worker.prefix_store.PrefixStore`. ``prefer`` overrides the choice
    between fetching and computing."""

    def __init__(
        self,
        engine: EngineHandle,
        client: ClusterStoreClient,
        publisher: StorePublisher,
        layout: KvLayout,
        block_tokens: int,
        chunk_tokens: int,
        clock: Clock,
        call_seconds: float,
        prefer: ReloadMode | None = None,
    ) -> None:
        self._engine = engine
        self._client = client
        self._publisher = publisher
        self._layout = layout
        self._block_tokens = block_tokens
        self._chunk_blocks = -(-chunk_tokens // block_tokens)
        self._clock = clock
        self._call_seconds = call_seconds
        self._prefer = prefer
        self._speed = PrefillCostModel()
        self._links = LinkMeter()
        self._met: set[str] = set()
        self._strays = UnfinishedTransfers()
        self._splits: asyncio.Queue[PrefixFetch] = asyncio.Queue(MAX_SPLIT_FETCHES)

    # -- PrefixStore -----------------------------------------------------------------------

    async def find(self, spec: RequestSpec, keys: Sequence[BlockKey]) -> PrefixFetch:
        """The last token is always computed, so a block that ends with it is no gain."""
        extension = PrefixFetch(spec.request_id)
        extension.keys = keys = keys[: (len(spec.token_ids) - 1) // self._block_tokens]
        if keys and self._client.has_nodes:
            async with self._asking(extension):
                node = await self._client.find(keys, spec.store_hint)
                if node is not None:
                    extension.num_stored = await self._client.num_held(node, keys)
                    extension.node = node
                    if not extension.num_stored:
                        await self._client.forget_hint(node, keys)
        return extension

    async def extend(self, extension: PrefixFetch, num_cached: int) -> None:
        assert extension.node is not None, "find() found it"
        async with self._asking(extension):
            await self._extend(extension, extension.node, num_cached)

    @asynccontextmanager
    async def _asking(self, extension: PrefixFetch) -> AsyncIterator[None]:
        """Counts the time, and notes what the store fails at."""
        began = self._clock.monotonic()
        extension.began_at = extension.began_at or began
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_SECONDS):
                yield
        except (BatonError, TimeoutError) as error:
            extension.error = str(error) or "timeout"
            log.warning("store_fetch_failed", placement=extension.request_id, error=extension.error)
        except Exception as error:  # a bug costs a recompute, and nobody's answer
            extension.error = repr(error)
            log.exception("store_fetch_crashed", placement=extension.request_id)
        extension.seconds += self._clock.monotonic() - began

    def follow(self, extension: PrefixFetch) -> None:
        if extension.split is not None and not self._splits.full():
            self._splits.put_nowait(extension)

    def note_step(self, result: StepResult) -> None:
        if result.work is not None:
            self._speed.record(result.work)
        for run in result.sealed:
            self._publisher.offer(run)

    async def hand_over(self) -> None:
        await self._publisher.hand_over()

    @property
    def bytes_per_second(self) -> float | None:
        return self._links.bytes_per_second(ALL_REMOTE_LINKS)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publisher.run())
            tasks.create_task(self._sweep())
            for _ in range(MAX_SPLIT_FETCHES):
                tasks.create_task(self._serve_splits())

    # -- from the front --------------------------------------------------------------------

    async def _extend(self, extension: PrefixFetch, node: Member, cached: int) -> None:
        """Takes the first piece, sees by it how much there is, and decides."""
        keys = extension.keys
        lease = await self._client.lease(node, keys[cached:], self._piece_bytes(node, False))
        if lease is None:
            await self._client.forget_hint(node, keys[cached:])
            return
        end = cached + lease.leased.num_held
        reload = self._choose(lease, node, cached, end)
        extension.way, extension.reason = reload.way.value, reload.reason
        if reload.way is ReloadMode.FETCH:
            await self._fetch(extension, lease, cached, end)
            return
        await self._client.release(lease)
        if reload.way is ReloadMode.SPLIT:
            extension.split = (cached, end)

    def _choose(self, lease: StoreLease, node: Member, cached: int, end: int) -> ReloadDecision:
        link = _link(node, lease.leased.num_promoted > 0)
        size = (end - cached) * self._layout.block_bytes
        fetch = self._links.estimate_seconds(link, size)
        compute = self._speed.seconds(cached * self._block_tokens, end * self._block_tokens)
        return choose_way(end - cached, fetch, compute, self._chunk_blocks, self._prefer)

    async def _fetch(self, extension: PrefixFetch, lease: StoreLease, first: int, end: int) -> None:
        """Blocks [first, end), piece by piece, until one does not come in whole."""
        assert extension.node is not None
        piece: StoreLease | None = lease
        while piece is not None:
            num_asked = len(piece.blocks)
            num_good = await self._take_piece(extension, piece, first, extension.keys[:first])
            first += num_good
            if num_good < num_asked or first >= end:
                return
            on_disk = piece.leased.num_promoted > 0
            size = self._piece_bytes(extension.node, on_disk)
            piece = await self._client.lease(extension.node, extension.keys[first:end], size)

    # -- from the back ---------------------------------------------------------------------

    async def _serve_splits(self) -> None:
        while True:
            extension = await self._splits.get()
            try:
                await self._fetch_back(extension)
            except BatonError as error:
                extension.error = str(error)
                placement = extension.request_id
                log.warning("store_fetch_failed", placement=placement, error=extension.error)
            except Exception:  # a bug: the rest of the prompt is computed
                log.exception("store_fetch_crashed", placement=extension.request_id)

    async def _fetch_back(self, extension: PrefixFetch) -> None:
        """From the end of the stored prefix towards what is computed, until they meet: the
        engine takes over what it finds (see ``Scheduler``)."""
        assert extension.split is not None and extension.node is not None
        node, (first, end) = extension.node, extension.split
        while True:
            computed = await self._engine.call(
                lambda engine: engine.num_computed_tokens(extension.request_id)
            )
            if computed is None:
                return
            # The step that runs now computes a chunk beyond that.
            frontier = max(first, -(-computed // self._block_tokens) + self._chunk_blocks)
            size = self._piece_bytes(node, False)
            start = max(frontier, end - max(size // self._layout.block_bytes, 1))
            if start >= end:
                return
            wanted = extension.keys[start:end]
            lease = await self._client.lease(node, wanted, len(wanted) * self._layout.block_bytes)
            if lease is None:
                return
            if await self._take_piece(extension, lease, start, ()) < len(wanted):
                return
            end = start

    # -- one piece -------------------------------------------------------------------------

    async def _take_piece(
        self, extension: PrefixFetch, lease: StoreLease, first: int, after: Sequence[BlockKey]
    ) -> int:
        """Reads leased blocks, block ``first`` of the chain and following, into the device's
        cache; how many are good. Ends the lease."""
        began = self._clock.monotonic()
        keys = extension.keys[first : first + len(lease.blocks)]
        num_good = 0
        try:
            if all(block.size_bytes == self._layout.block_bytes for block in lease.blocks):
                num_good = await self._import(lease, keys, after)
            else:
                log.warning("store_block_of_wrong_size", node=lease.node.id)
                await self._client.report(lease, keys)
        finally:
            await self._client.release(lease)
        num_promoted = min(lease.leased.num_promoted, num_good)
        extension.disk_tokens += num_promoted * self._block_tokens
        extension.dram_tokens += (num_good - num_promoted) * self._block_tokens
        if num_good:
            size = num_good * self._layout.block_bytes
            seconds = self._clock.monotonic() - began
            self._note_piece(_link(lease.node, num_promoted > 0), size, seconds)
            if lease.transport.name not in LOCAL_ONLY:
                self._note_piece(ALL_REMOTE_LINKS, size, seconds)
        return num_good

    async def _import(
        self, lease: StoreLease, keys: Sequence[BlockKey], after: Sequence[BlockKey]
    ) -> int:
        block_ids = await self._begin_import(keys, after)
        if block_ids is None:
            return 0
        num_good, unsafe, began = 0, False, self._clock.monotonic()
        try:
            num_good = (await self._read(lease, block_ids)).num_good
        except TransferFailed as error:
            self._client.blame(lease)
            log.warning("store_read_failed", error=str(error))
            self._note_late(lease, len(keys), self._clock.monotonic() - began)
            unsafe = bool(error.strays)
            if unsafe:
                clear = self._send_later(partial(Engine.release_quarantine, block_ids=block_ids))
                self._strays.keep(lease.transport, error.strays, clear)
        finally:
            self._engine.send(
                lambda engine: engine.finish_import(keys, block_ids, num_good, quarantine=unsafe)
            )
        if unsafe:
            raise_if_cancelled()
        elif num_good < len(keys):
            await self._client.report(lease, keys[num_good:])
        return num_good

    def _note_late(self, lease: StoreLease, num_blocks: int, seconds: float) -> None:
        """At least so long would it have taken, so the next piece is a smaller one."""
        link = _link(lease.node, lease.leased.num_promoted > 0)
        self._note_piece(link, num_blocks * self._layout.block_bytes, seconds)

    def _note_piece(self, link: str, size_bytes: int, seconds: float) -> None:
        """The first over a link says nothing of its speed: it makes a connection, too."""
        if link in self._met:
            self._links.record(link, size_bytes, seconds)
        if len(self._met) >= MAX_USED_LINKS:
            self._met.clear()
        self._met.add(link)

    async def _begin_import(
        self, keys: Sequence[BlockKey], after: Sequence[BlockKey]
    ) -> list[BlockId] | None:
        """Whoever is cancelled while the engine is busy gets the blocks all the same: they are
        given back as soon as they are there."""
        given: list[BlockId] | None = None

        def begin(engine: Engine) -> list[BlockId] | None:
            nonlocal given
            given = engine.begin_import(keys, after=after)
            return given

        def give_back(engine: Engine) -> None:
            if given is not None:
                engine.finish_import(keys, given, 0)

        try:
            return await self._engine.call(begin)
        except asyncio.CancelledError:
            self._engine.send(give_back)
            raise

    async def _read(self, lease: StoreLease, block_ids: list[BlockId]) -> VerifiedReadResult:
        spans = self._layout.spans(lease.blocks, block_ids)
        good = partial(self._layout.good, lease.leased.checksum_algorithm, lease.blocks, block_ids)
        return await read_and_verify(
            lease.transport,
            lease.peer,
            spans,
            good,
            self._call_seconds - RELEASE_GRACE_SECONDS,
            self._clock,
            settle_seconds=RELEASE_GRACE_SECONDS,
        )

    def _send_later(self, command: Callable[[Engine], object]) -> Callable[[], None]:
        return lambda: self._engine.send(command)

    def _piece_bytes(self, node: Member, from_disk: bool) -> int:
        """What should come in well within the bound of a call."""
        rate = self._links.bytes_per_second(_link(node, from_disk))
        piece = FIRST_PIECE_BYTES if rate is None else int(rate * PIECE_SECONDS)
        return max(min(piece, MAX_PIECE_BYTES), self._layout.block_bytes)

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            self._strays.sweep()


def _link(node: Member, from_disk: bool) -> str:
    return f"{node.id}/{'disk' if from_disk else 'dram'}"
