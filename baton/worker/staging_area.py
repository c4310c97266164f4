"""The staging area: memory behind the KV pool for encoded blocks (docs/kv-codecs.md)."""

import asyncio
from bisect import bisect
from collections import deque
from dataclasses import dataclass

from baton.core.kv_codec import ENCODED_ALIGNMENT_BYTES
from baton.errors import DeadlineExceeded, Invalid

LOCAL_SHARE = 4
"""One part in this many of the area is never allocated for readers."""


@dataclass(frozen=True, slots=True)
class StagingRange:
    """Allocated memory: ``size_bytes`` bytes at ``offset_bytes`` in the region that transports
    read."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@dataclass(slots=True)
class _Waiter:
    size_bytes: int
    granted: "asyncio.Future[StagingRange]"


class StagingArea:
    """Allocates ranges of the last ``size_bytes`` bytes of a region, from ``offset_bytes`` on.

    A range is allocated either *for a reader*, and is freed once another worker has read it, or
    for this worker's own use, such as decoding what it has read. Those who wait for either kind are
    served in their order. The last part of the area is only for own use: otherwise, two workers
    that read from each other could fill their areas with what the other has no space to read.

    All methods are called in the event loop. Whoever allocates a range frees it with
    :meth:`release`, once nothing reads or writes it any more.
    """

    def __init__(self, offset_bytes: int, size_bytes: int) -> None:
        assert offset_bytes % ENCODED_ALIGNMENT_BYTES == 0, offset_bytes
        self._begin = offset_bytes
        self._end = offset_bytes + size_bytes // ENCODED_ALIGNMENT_BYTES * ENCODED_ALIGNMENT_BYTES
        local = align(size_bytes // LOCAL_SHARE)
        self._readers_end = max(self._begin, self._end - local)
        whole = StagingRange(self._begin, self._end - self._begin)
        self._free = [whole] if whole.size_bytes else []
        self._allocated: dict[int, StagingRange] = {}
        self._waiting: dict[bool, deque[_Waiter]] = {False: deque(), True: deque()}

    @property
    def size_bytes(self) -> int:
        return self._end - self._begin

    @property
    def readers_bytes(self) -> int:
        """The size of the part in which ranges are allocated for readers."""
        return self._readers_end - self._begin

    @property
    def local_bytes(self) -> int:
        """The size of the part that is only for own use."""
        return self._end - self._readers_end

    @property
    def used_bytes(self) -> int:
        return sum(each.size_bytes for each in self._allocated.values())

    @property
    def num_waiting(self) -> int:
        return sum(len(waiters) for waiters in self._waiting.values())

    def fits(self, size_bytes: int, *, for_reader: bool = False) -> bool:
        """True if a range of this size can be allocated for sure, as soon as earlier ones are
        freed."""
        space = self.readers_bytes if for_reader else self.local_bytes
        return 0 < align(size_bytes) <= space

    def try_allocate(self, size_bytes: int, *, for_reader: bool = False) -> StagingRange | None:
        """Allocate a range of at least ``size_bytes``. Return None if there is no space, or if
        others wait for it."""
        if self._waiting[for_reader]:
            return None
        return self._take(align(size_bytes), for_reader)

    async def allocate(
        self, size_bytes: int, timeout_seconds: float, *, for_reader: bool = False
    ) -> StagingRange:
        """Allocate a range of at least ``size_bytes``; wait for it if necessary. Raises Invalid if
        the area is too small for it, and DeadlineExceeded if there is no space in time."""
        if not self.fits(size_bytes, for_reader=for_reader):
            raise Invalid(
                f"a range of {size_bytes:,} bytes does not fit in the staging area of "
                f"{self.size_bytes:,}: raise kv_staging_bytes",
                param="kv_staging_bytes",
            )
        found = self.try_allocate(size_bytes, for_reader=for_reader)
        if found is not None:
            return found
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._wait(align(size_bytes), for_reader)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the staging area had no space for {size_bytes:,} bytes within "
                f"{timeout_seconds:g} s"
            ) from error

    def release(self, freed: StagingRange) -> None:
        """Free a range, and serve those who wait."""
        assert self._allocated.pop(freed.offset_bytes, None) == freed, f"{freed} is not allocated"
        index = bisect(self._free, freed.offset_bytes, key=lambda each: each.offset_bytes)
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        begin, end = freed.offset_bytes, freed.end_bytes
        first, last = index, index
        if before is not None and before.end_bytes == begin:
            begin, first = before.offset_bytes, index - 1
        if after is not None and after.offset_bytes == end:
            end, last = after.end_bytes, index + 1
        self._free[first:last] = [StagingRange(begin, end - begin)]
        self._serve_waiters()

    def check_integrity(self) -> None:
        """Raise AssertionError if free and allocated ranges do not cover the area exactly once, or
        if someone waits for space that is free."""
        ranges = sorted([*self._free, *self._allocated.values()], key=lambda r: r.offset_bytes)
        position = self._begin
        for each in ranges:
            assert each.offset_bytes == position and each.size_bytes > 0, f"{each} at {position}"
            position = each.end_bytes
        assert position == self._end, f"the staging area ends at {self._end}, not {position}"
        for earlier, later in zip(self._free, self._free[1:], strict=False):
            assert earlier.end_bytes < later.offset_bytes, f"{earlier} and {later} are not joined"
        for for_reader, waiters in self._waiting.items():
            if waiters:
                found = self._find(waiters[0].size_bytes, for_reader)
                assert found is None, f"someone waits for {waiters[0].size_bytes}, free at {found}"

    def describe(self) -> str:
        return (
            f"staging: {self.used_bytes:,} of {self.size_bytes:,} bytes in "
            f"{len(self._allocated)} ranges, {self.num_waiting} waiting"
        )

    async def _wait(self, size_bytes: int, for_reader: bool) -> StagingRange:
        waiter = _Waiter(size_bytes, asyncio.get_running_loop().create_future())
        self._waiting[for_reader].append(waiter)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.release(waiter.granted.result())
            elif waiter in self._waiting[for_reader]:
                self._waiting[for_reader].remove(waiter)
                self._serve_waiters()
            raise

    def _serve_waiters(self) -> None:
        for for_reader, waiters in self._waiting.items():
            while waiters:
                if waiters[0].granted.cancelled():  # its task has not run since
                    waiters.popleft()
                    continue
                found = self._take(waiters[0].size_bytes, for_reader)
                if found is None:
                    break
                waiters.popleft().granted.set_result(found)

    def _take(self, size_bytes: int, for_reader: bool) -> StagingRange | None:
        offset = self._find(size_bytes, for_reader)
        if offset is None:
            return None
        taken = StagingRange(offset, size_bytes)
        index = bisect(self._free, offset, key=lambda each: each.offset_bytes) - 1
        free = self._free[index]
        parts = ((free.offset_bytes, offset), (taken.end_bytes, free.end_bytes))
        self._free[index : index + 1] = [
            StagingRange(begin, end - begin) for begin, end in parts if begin < end
        ]
        self._allocated[offset] = taken
        return taken

    def _find(self, size_bytes: int, for_reader: bool) -> int | None:
        """Return the offset of free space: the first for a reader, the last for own use, so that
        the two kinds do not lie between each other."""
        if for_reader:
            for free in self._free:
                if min(free.end_bytes, self._readers_end) - free.offset_bytes >= size_bytes:
                    return free.offset_bytes
            return None
        for free in reversed(self._free):
            if free.size_bytes >= size_bytes:
                return free.end_bytes - size_bytes
        return None


def align(size_bytes: int) -> int:
    """Round up to a multiple of ENCODED_ALIGNMENT_BYTES."""
    return -(-size_bytes // ENCODED_ALIGNMENT_BYTES) * ENCODED_ALIGNMENT_BYTES
