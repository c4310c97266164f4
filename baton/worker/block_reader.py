"""Reads blocks of other workers and of the KV store into the KV pool. Encoded blocks are read into
the staging area, verified, and decoded from there."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.clock import Clock
from baton.core.ids import BlockId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.errors import BatonError, Corrupt
from baton.kv_codec.base import BlockCodec
from baton.transport.base import Peer, Transfer, Transport
from baton.transport.reads import (
    MAX_CONCURRENT_GROUPS,
    RELEASE_TIMEOUT_SECONDS,
    TransferFailed,
    read_and_verify,
)
from baton.transport.unfinished_transfers import UnfinishedTransfers
from baton.worker.block_group import BlockGroup, staged_bytes
from baton.worker.kv_layout import KvLayout
from baton.worker.read_times import ReadTimes, link_seconds
from baton.worker.staging_area import StagingArea


@dataclass(frozen=True, slots=True)
class BlockSource:
    """The memory of one other process, as the source of any number of reads.
    ``read_timeout_seconds`` and ``release_timeout_seconds`` apply to each group of blocks.

    Two groups are under way at once, whichever reads they belong to, so that one is decoded while
    the next is read. Reads that begin while others are under way start their groups after them."""

    transport: Transport
    peer: Peer
    read_timeout_seconds: float
    release_timeout_seconds: float = RELEASE_TIMEOUT_SECONDS
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    lanes: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_GROUPS)
    )


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """The result of a read of ``num_blocks`` blocks. ``bad`` are the indexes of the blocks that
    must be read again, in order: those whose checksum was wrong or whose encoding was invalid, and
    those after them in the same group. ``times`` has an entry per group."""

    num_blocks: int
    bad: tuple[int, ...]
    times: tuple[ReadTimes, ...]

    @property
    def num_good(self) -> int:
        """The number of leading good blocks."""
        return self.bad[0] if self.bad else self.num_blocks

    @property
    def link_seconds(self) -> float:
        """The time in which bytes were under way."""
        return link_seconds(self.times)


class BlockReader:
    """Reads blocks, raw ones and those in ``codecs``. Without a staging area, and in codecs whose
    blocks do not fit in it, it reads none. ``staging_timeout_seconds`` bounds the wait for space.

    The reader owns the ranges of the staging area that it allocates. A range is freed once its
    blocks are decoded or the read has failed; if transfers to it are unfinished then, by the first
    :meth:`sweep` after they have ended. The blocks of the pool belong to the caller, who must
    quarantine them as long."""

    def __init__(
        self,
        layout: KvLayout,
        staging: StagingArea | None,
        codecs: Mapping[KvCodecName, BlockCodec],
        clock: Clock,
        staging_timeout_seconds: float,
    ) -> None:
        self._layout = layout
        self._staging = staging
        self._codecs = {
            name: codec
            for name, codec in codecs.items()
            if staging is not None and staging.fits(codec.max_encoded_bytes)
        }
        self._clock = clock
        self._staging_timeout_seconds = staging_timeout_seconds
        self._unfinished = UnfinishedTransfers()
        self.num_blocks_read = 0

    @property
    def block_bytes(self) -> int:
        """The size of a block in the pool."""
        return self._layout.block_bytes

    def accepted(self, *, exact: bool) -> tuple[KvCodecName, ...]:
        """Return the codecs in which blocks can be read, without the lossy ones if ``exact`` is
        set."""
        return tuple(name for name in self._codecs if not (exact and name.is_lossy))

    def check(self, blocks: Sequence[BlockRef], accepted: Sequence[KvCodecName]) -> None:
        """Raise Corrupt if a block is in a codec that is not accepted, or can't have its size."""
        for block in blocks:
            if block.codec is KvCodecName.NONE:
                least = most = self._layout.block_bytes
            elif block.codec in accepted:
                least, most = 1, self._codecs[block.codec].max_encoded_bytes
            else:
                raise Corrupt(
                    f"the source announced a block in codec {block.codec}; this worker accepts "
                    f"{', '.join(accepted) or 'none'}"
                )
            if not least <= block.size_bytes <= most:
                raise Corrupt(
                    f"the source announced a block of {block.size_bytes} bytes in codec "
                    f"{block.codec}; such blocks have {least if least == most else f'1 to {most}'} "
                    "bytes"
                )

    async def read(
        self, source: BlockSource, blocks: Sequence[BlockRef], block_ids: Sequence[BlockId]
    ) -> BlocksRead:
        """Read blocks that passed :meth:`check` into the blocks ``block_ids`` of the pool, verify
        and decode them. Raises DeadlineExceeded if there is no space in time, TransferFailed, and
        Invalid for blocks outside the source's region.

        A cancelled call raises CancelledError once nothing writes to the pool any more. If a
        transfer can't be released, it raises TransferFailed with the unfinished transfers
        instead."""
        bad: list[int] = []
        times: list[ReadTimes] = []
        failures: list[BatonError] = []
        group_bytes = source.transport.capabilities().group_bytes

        async def read_group(first: int, last: int) -> None:
            if failures:
                return
            group = BlockGroup(
                self._layout, self._codecs, blocks[first:last], block_ids[first:last]
            )
            try:
                num_good = await self._read_group(source, group, times)
                bad.extend(range(first + num_good, last))
            except BatonError as error:  # the other group still ends by itself
                failures.append(error)

        try:
            async with asyncio.TaskGroup() as tasks, source.turn:
                for first, last in self._groups(blocks, group_bytes):
                    await source.lanes.acquire()
                    reading = tasks.create_task(read_group(first, last))
                    # A task that is cancelled before it has begun would not free the lane itself.
                    reading.add_done_callback(lambda _: source.lanes.release())
        except BaseException:
            if any(_unfinished(each) for each in failures):
                raise _combined(failures) from None
            raise
        if failures:
            raise _combined(failures)
        return BlocksRead(len(blocks), tuple(sorted(bad)), tuple(times))

    def sweep(self) -> None:
        """Free the ranges of unfinished transfers that have ended. Call this regularly."""
        self._unfinished.sweep()

    def _groups(self, blocks: Sequence[BlockRef], group_bytes: int) -> list[tuple[int, int]]:
        """Divide the blocks into groups of at most ``group_bytes`` that are read at once, so that
        two fit in the staging area. Return them as half-open ranges of indexes."""
        local_bytes = 0 if self._staging is None else self._staging.local_bytes
        most_staged = local_bytes // MAX_CONCURRENT_GROUPS
        groups: list[tuple[int, int]] = []
        first, size, staged = 0, 0, 0
        for index, block in enumerate(blocks):
            more = staged_bytes(block)
            is_full = size + block.size_bytes > group_bytes or staged + more > most_staged
            if index > first and is_full:
                groups.append((first, index))
                first, size, staged = index, 0, 0
            size += block.size_bytes
            staged += more
        return [*groups, (first, len(blocks))]

    async def _read_group(
        self, source: BlockSource, group: BlockGroup, times: list[ReadTimes]
    ) -> int:
        """Read and decode a group; append its times to ``times``. Return how many of its first
        blocks are good."""
        staging, size = self._staging, group.staged_bytes
        staged = None
        if staging is not None and size:
            staged = await staging.allocate(size, self._staging_timeout_seconds)
            group.place(staged.offset_bytes)
        began = arrived = self._clock.monotonic()

        def verify(first: int, last: int) -> list[bool]:
            nonlocal arrived
            arrived = self._clock.monotonic()
            return group.verify(first, last)

        try:
            result = await read_and_verify(
                source.transport, source.peer, group.ranges(), verify,
                source.read_timeout_seconds, self._clock, source.release_timeout_seconds,
            )  # fmt: skip
        except TransferFailed as error:
            if staging is not None and staged is not None and error.unfinished_transfers:
                release = partial(staging.release, staged)
                self._unfinished.add(source.transport, error.unfinished_transfers, release)
                staged = None
            raise
        finally:
            if staging is not None and staged is not None:
                staging.release(staged)
        self.num_blocks_read += result.num_verified
        times.append(ReadTimes(began, arrived, self._clock.monotonic()))
        return result.num_verified


def _unfinished(failure: BatonError) -> tuple[Transfer, ...]:
    return failure.unfinished_transfers if isinstance(failure, TransferFailed) else ()


def _combined(failures: Sequence[BatonError]) -> BatonError:
    """Return the first failure, or a TransferFailed with what all of them left unfinished."""
    unfinished = [each for each in failures if _unfinished(each)]
    if not unfinished:
        return failures[0]
    transfers = [transfer for each in unfinished for transfer in _unfinished(each)]
    return TransferFailed(str(unfinished[0]), transfers)
