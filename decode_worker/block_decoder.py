"""Reads blocks of which some are encoded, and decodes them into the KV pool."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.clock import Clock
from baton.core.ids import BlockId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.errors import BatonError, Corrupt
from baton.kv_codec.base import BlockCodec
from baton.transport.base import Peer, Transfer, TransferRange, Transport
from baton.transport.link_time import busy_seconds
from baton.transport.reads import MAX_CONCURRENT_GROUPS, TransferFailed, read_and_verify
from baton.worker.kv_layout import KvLayout
from baton.worker.staging_area import StagingArea, StagingRange, align


@dataclass(frozen=True, slots=True)
class DecodedRead:
    """The result of a read. ``size_bytes`` were read, encoded or not. ``bad`` are the indexes of
    the blocks that must be read again: those whose checksum was wrong or whose encoding was
    invalid, and those after them in the same group. ``link_seconds`` is the part of ``seconds`` in
    which bytes were under way."""

    size_bytes: int
    seconds: float
    bad: tuple[int, ...]
    link_seconds: float


class UnfinishedStagedRead(TransferFailed):
    """A TransferFailed whose unfinished transfers may also still write to ``staged``, which must
    not be freed before they have ended."""

    def __init__(
        self, message: str, transfers: Sequence[Transfer], staged: Sequence[StagingRange]
    ) -> None:
        super().__init__(message, transfers)
        self.staged = tuple(staged)


class BlockDecoder:
    """Reads encoded blocks into the staging area and decodes them from there into the KV pool. Two
    groups of blocks are under way at once: one is decoded while the next is read. ``codecs`` are
    those that this worker has; ``timeout_seconds`` bounds the wait for space."""

    def __init__(
        self,
        layout: KvLayout,
        staging: StagingArea | None,
        codecs: Mapping[KvCodecName, BlockCodec],
        clock: Clock,
        timeout_seconds: float,
    ) -> None:
        self._layout = layout
        self._staging = staging
        self._codecs = {
            name: codec
            for name, codec in codecs.items()
            if staging is not None and staging.fits(codec.max_encoded_bytes)
        }
        self._clock = clock
        self._timeout_seconds = timeout_seconds

    def accepted(self, *, exact: bool) -> tuple[KvCodecName, ...]:
        """Return the names of the codecs that can be decoded, without the lossy ones if ``exact``
        is set."""
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
        self,
        transport: Transport,
        peer: Peer,
        blocks: Sequence[BlockRef],
        block_ids: Sequence[BlockId],
        read_seconds: float,
    ) -> DecodedRead:
        """Read and decode blocks that passed :meth:`check` into the blocks ``block_ids``.
        ``read_seconds`` applies to each group. Raises DeadlineExceeded if there is no space in
        time, UnfinishedStagedRead, TransferFailed, and Invalid for blocks outside the source's
        region.

        A cancelled call raises CancelledError once nothing is written any more. If a transfer can't
        be released, it raises UnfinishedStagedRead instead."""
        began = self._clock.monotonic()
        waiting = deque(self._groups(blocks, transport.capabilities().group_bytes))
        failures: list[BatonError] = []
        bad: list[int] = []
        on_link: list[tuple[float, float]] = []

        async def lane() -> None:
            while waiting and not failures:
                first, last = waiting.popleft()
                group = _Group(
                    self._layout, self._codecs, blocks[first:last], block_ids[first:last]
                )
                try:
                    num_good, times = await self._read_group(transport, peer, group, read_seconds)
                    on_link.append(times)
                    bad.extend(range(first + num_good, last))
                except BatonError as error:
                    failures.append(error)

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(MAX_CONCURRENT_GROUPS, len(waiting))):
                    tasks.create_task(lane())
        except BaseException:
            if any(isinstance(each, UnfinishedStagedRead) for each in failures):
                raise _combined(failures) from None
            raise
        if failures:
            raise _combined(failures)
        size = sum(block.size_bytes for block in blocks)
        seconds = self._clock.monotonic() - began
        return DecodedRead(size, seconds, tuple(sorted(bad)), busy_seconds(on_link))

    def _groups(self, blocks: Sequence[BlockRef], group_bytes: int) -> list[tuple[int, int]]:
        """Divide the blocks into groups that are read at once, so that two fit in the staging area.
        Return them as half-open ranges of indexes."""
        assert self._staging is not None
        limit = min(group_bytes, self._staging.local_bytes // MAX_CONCURRENT_GROUPS)
        groups: list[tuple[int, int]] = []
        first, size = 0, 0
        for index, block in enumerate(blocks):
            more = align(block.size_bytes)
            if size and size + more > limit:
                groups.append((first, index))
                first, size = index, 0
            size += more
        return [*groups, (first, len(blocks))]

    async def _read_group(
        self, transport: Transport, peer: Peer, group: "_Group", read_seconds: float
    ) -> tuple[int, tuple[float, float]]:
        """Read and decode a group; return how many of its first blocks are good, and when the read
        began and its last bytes had arrived."""
        assert self._staging is not None
        staged: list[StagingRange] = []
        size = group.staged_bytes
        if size:
            staged.append(await self._staging.allocate(size, self._timeout_seconds))
            group.place(staged[0].offset_bytes)
        began = arrived = self._clock.monotonic()

        def verify(first: int, last: int) -> list[bool]:
            nonlocal arrived
            arrived = self._clock.monotonic()
            return group.verify(first, last)

        try:
            result = await read_and_verify(
                transport, peer, group.ranges(), verify, read_seconds, self._clock
            )
        except TransferFailed as error:
            if error.unfinished_transfers:
                kept, staged = staged, []
                raise UnfinishedStagedRead(str(error), error.unfinished_transfers, kept) from error
            raise
        finally:
            for each in staged:
                self._staging.release(each)
        return result.num_verified, (began, arrived)


class _Group:
    """Blocks that are read at once: those that are encoded into the staging area, the others into
    the pool."""

    def __init__(
        self,
        layout: KvLayout,
        codecs: Mapping[KvCodecName, BlockCodec],
        blocks: Sequence[BlockRef],
        block_ids: Sequence[BlockId],
    ) -> None:
        self._layout = layout
        self._codecs = codecs
        self._blocks = blocks
        self._block_ids = block_ids
        self._places = [block_id * layout.block_bytes for block_id in block_ids]

    @property
    def staged_bytes(self) -> int:
        return sum(align(b.size_bytes) for b in self._blocks if b.codec is not KvCodecName.NONE)

    def place(self, offset_bytes: int) -> None:
        """Read the encoded blocks to ``offset_bytes`` in the region, one after the other."""
        for index, block in enumerate(self._blocks):
            if block.codec is not KvCodecName.NONE:
                self._places[index] = offset_bytes
                offset_bytes += align(block.size_bytes)

    def ranges(self) -> list[TransferRange]:
        return [
            TransferRange(block.offset_bytes, place, block.size_bytes)
            for block, place in zip(self._blocks, self._places, strict=True)
        ]

    def verify(self, first: int, last: int) -> list[bool]:
        """Verify the checksums of the blocks in [first, last) and decode those that are encoded.
        Return which of the blocks are good."""
        ranges = [(self._places[i], self._blocks[i].size_bytes) for i in range(first, last)]
        checksums = self._layout.compute_range_checksums(ranges)
        good = [
            checksum == block.checksum
            for checksum, block in zip(checksums, self._blocks[first:last], strict=True)
        ]
        for name in {block.codec for block in self._blocks} - {KvCodecName.NONE}:
            some = [i for i in range(first, last) if self._blocks[i].codec is name]
            some = [i for i in some if good[i - first]]
            valid = self._codecs[name].decode(
                [self._layout.address + self._places[i] for i in some],
                [self._blocks[i].size_bytes for i in some],
                [self._layout.block_address(self._block_ids[i]) for i in some],
            )
            for index, is_valid in zip(some, valid, strict=True):
                good[index - first] = is_valid
        return good


def _combined(failures: Sequence[BatonError]) -> BatonError:
    """Return the first failure, or one with what all of them left unfinished."""
    unfinished = [each for each in failures if isinstance(each, UnfinishedStagedRead)]
    if not unfinished:
        return failures[0]
    return UnfinishedStagedRead(
        str(unfinished[0]),
        [transfer for each in unfinished for transfer in each.unfinished_transfers],
        [staged for each in unfinished for staged in each.staged],
    )
