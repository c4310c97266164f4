"""The SSD tier, which keeps blocks in preallocated segment files. Each file contains a table of its
blocks, so the blocks survive a restart."""

import contextlib
import fcntl
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from baton.core.ids import BlockKey
from baton.errors import Invalid, Unavailable
from kvstore.eviction import EvictionPolicy, new_eviction_policy
from kvstore.limits import MIN_SEGMENT_BYTES
from kvstore.segment import BlockRecord, Segment, num_slots_in, round_up_to_page

SEGMENT_BYTES = 64 * 1024 * 1024

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class DiskBlock:
    """A block's record and its slot. ``num_references`` counts its readers and writers. A block
    that is not ``sealed`` is being written; a ``doomed`` block is freed when its last reference is
    released."""

    record: BlockRecord
    segment: Segment
    slot: int
    num_references: int = 0
    sealed: bool = False
    doomed: bool = False
    last_used: int = 0
    """The tier's clock when the block was last used, or its last reference was released."""

    @property
    def key(self) -> BlockKey:
        return self.record.key

    @property
    def size_bytes(self) -> int:
        return self.record.size_bytes

    @property
    def raw_bytes(self) -> int:
        return self.record.encoding.raw_bytes(self.size_bytes)


@dataclass(slots=True)
class NewSegment:
    """A segment that is to be created between the calls of :meth:`DiskTier.plan_segment` and
    :meth:`DiskTier.add_segment`. ``segment`` is None until it is created, and remains None if the
    disk has no space for it."""

    number: int
    path: Path
    segment_bytes: int
    slot_bytes: int
    segment: Segment | None = None
    error: str = ""

    def create_file(self) -> None:
        """Preallocate the file. This may take long, so run it in a thread."""
        try:
            self.segment = Segment.create(self.path, self.segment_bytes, self.slot_bytes)
        except OSError as error:
            self.error = str(error)


class DiskTier:
    """The blocks on the SSD. :meth:`write`, :meth:`read`, :meth:`flush` and :meth:`close` wait for
    the disk and may run in any thread; :meth:`write` and :meth:`read` need a reference to the
    block. The other methods never wait for the disk, and must all run in one thread."""

    def __init__(
        self,
        folder: Path,
        size_bytes: int,
        policy: str = "baton",
        segment_bytes: int | None = None,
    ) -> None:
        """Lock the folder and recover the blocks of earlier runs. Raises Invalid if ``size_bytes``
        is less than one segment, and Unavailable if the folder can't be used."""
        self.segment_bytes = segment_bytes or min(SEGMENT_BYTES, max(size_bytes // 4, 1))
        if size_bytes < self.segment_bytes or self.segment_bytes < MIN_SEGMENT_BYTES:
            raise Invalid(
                f"store_disk_bytes is {size_bytes}; it must be at least {4 * MIN_SEGMENT_BYTES}, "
                "or 0 for no SSD tier",
                param="store_disk_bytes",
            )
        self.size_bytes = size_bytes
        self.evictions = 0
        self._folder = folder
        self._policy_name = policy
        self._max_segments = size_bytes // self.segment_bytes
        self._blocks: dict[BlockKey, DiskBlock] = {}
        self._segments: dict[int, Segment] = {}
        self._free: dict[int, dict[Segment, list[int]]] = {}  # per slot size
        self._used: dict[Segment, set[DiskBlock]] = {}
        self._last_used: dict[Segment, int] = {}  # the clock at the last use of a block
        self._num_referenced: Counter[Segment] = Counter()
        self._idle_segments: OrderedDict[Segment, None] = OrderedDict()
        """The segments without referenced blocks, in the order of their last use."""
        self.raw_bytes = 0
        self._clock = 0
        self._policies: dict[int, EvictionPolicy] = {}
        new_eviction_policy(policy)  # fail early for an unknown name
        self._planned_segments: set[int] = set()
        self._lock = _lock_folder(folder)
        try:
            self._recover()
        except OSError as error:
            self.close()
            raise Unavailable(f"store_folder {folder} can't be used: {error}") from error

    # -- lookup ----------------------------------------------------------------------------

    def __contains__(self, key: BlockKey) -> bool:
        return self.get(key) is not None

    def get(self, key: BlockKey) -> DiskBlock | None:
        block = self._blocks.get(key)
        return block if block is not None and block.sealed else None

    def blocks(self) -> Iterable[DiskBlock]:
        return [block for block in self._blocks.values() if block.sealed]

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def used_bytes(self) -> int:
        return sum(seg.slot_bytes * len(used) for seg, used in self._used.items())

    # -- block states ----------------------------------------------------------------------

    def plan_segment(self, slot_bytes: int, num_blocks: int) -> NewSegment | None:
        """Return a segment to be created if fewer than ``num_blocks`` slots of ``slot_bytes`` are
        free. The caller must then create the segment's file and call :meth:`add_segment`. Return
        None if enough slots are free, if the maximum number of segments is reached, or if such a
        slot is too large for a segment."""
        slot_bytes = round_up_to_page(slot_bytes)
        free = sum(len(slots) for slots in self._free.get(slot_bytes, {}).values())
        taken = self._segments.keys() | self._planned_segments
        if free >= num_blocks or len(taken) >= self._max_segments:
            return None
        if not num_slots_in(self.segment_bytes, slot_bytes):
            return None
        number = next(n for n in range(1, self._max_segments + 1) if n not in taken)
        self._planned_segments.add(number)
        return NewSegment(number, self._path(number), self.segment_bytes, slot_bytes)

    def add_segment(self, new_segment: NewSegment) -> None:
        """Add a segment after its file was created. If creating the file failed, the disk is
        considered full, and no more segments are created."""
        self._planned_segments.discard(new_segment.number)
        if new_segment.segment is not None:
            self._register_segment(new_segment.number, new_segment.segment, {})
            return
        log.warning("store_disk_full", error=new_segment.error, num_segments=len(self._segments))
        self._max_segments = len(self._segments)

    def reserve(self, record: BlockRecord) -> tuple[DiskBlock, list[BlockKey]] | None:
        """Reserve a slot for a block, with one reference for the caller, evicting other blocks if
        necessary. Return the block and the keys of the evicted blocks, or None if too many blocks
        are referenced or the block is too large. This never adds segments: call
        :meth:`plan_segment` beforehand."""
        assert record.key not in self._blocks, "check `in` before"
        slot_bytes = record.slot_bytes
        if not num_slots_in(self.segment_bytes, slot_bytes):
            return None
        evicted: list[BlockKey] = []
        place = self._pop_free_slot(slot_bytes)
        while place is None:
            victims = self._evict_for(slot_bytes)
            if victims is None:
                return None
            evicted += victims
            place = self._pop_free_slot(slot_bytes)
        segment, slot = place
        block = DiskBlock(record, segment, slot, num_references=1)
        self._blocks[record.key] = block
        self._used[segment].add(block)
        self.raw_bytes += block.raw_bytes
        self._count_reference(block)
        self._policy(slot_bytes).admit(record.key)
        return block, evicted

    def write(self, block: DiskBlock, data: memoryview) -> None:
        """Write a block's data to its slot. Raises Unavailable if the disk fails."""
        block.segment.write(block.slot, block.record, data)

    def seal(self, block: DiskBlock) -> None:
        block.sealed = True
        self.release_reference(block)

    def discard(self, block: DiskBlock) -> None:
        """Free the slot of a block that could not be written, or is no longer needed."""
        block.num_references = 0
        self._touch_segment(block)
        self._unlist(block)
        self._free_slot(block)

    def read(self, block: DiskBlock, into: memoryview) -> None:
        """Read and verify a block. Raises Corrupt if its data is damaged, and Unavailable if the
        disk fails."""
        block.segment.read(block.slot, block.record, into)

    def add_reference(self, block: DiskBlock) -> None:
        if block.num_references == 0:
            self._policy(block.segment.slot_bytes).mark_in_use(block.key)
            self._count_reference(block)
        block.num_references += 1

    def release_reference(self, block: DiskBlock) -> None:
        block.num_references -= 1
        if block.num_references:
            return
        self._touch_segment(block)
        if block.doomed:
            self._free_slot(block)
        else:
            self._policy(block.segment.slot_bytes).mark_evictable(block.key)

    def record_use(self, block: DiskBlock) -> None:
        policy = self._policy(block.segment.slot_bytes)
        policy.tick()
        policy.record_use(block.key)
        self._set_last_used(block)

    def drop(self, key: BlockKey) -> bool:
        """Remove a damaged or purged block. The next :meth:`flush` erases its record in the file,
        so that a restart does not recover the block. Return whether the block existed."""
        block = self.get(key)
        if block is None:
            return False
        self._unlist(block)
        if block.num_references:
            block.doomed = True
            block.segment.erase_later(block.slot)
        else:
            self._free_slot(block)
        return True

    @property
    def is_flushed(self) -> bool:
        """Whether no change is queued, so that :meth:`flush` would do nothing."""
        return all(segment.is_flushed for segment in self._segments.values())

    def flush(self) -> None:
        """Erase the records of dropped and evicted blocks, so that a restart does not recover them.
        If the disk fails, the erasure is retried later, at the latest before the slot is written
        again."""
        for segment in list(self._segments.values()):
            with contextlib.suppress(OSError):
                segment.flush()

    def close(self) -> None:
        self.flush()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        # Unlock explicitly, because a child process that another thread is just forking would keep
        # the file locked.
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)

    # -- debugging -------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, blocks, segments and eviction policies are
        inconsistent."""
        for segment, used in self._used.items():
            taken = {block.slot for block in used}
            free = self._free.get(segment.slot_bytes, {}).get(segment, [])
            assert len(taken) == len(used), f"{segment.path}: two blocks in a slot"
            assert taken.isdisjoint(free), f"{segment.path}: a used slot is free"
            assert len(taken) + len(free) == segment.num_slots, f"{segment.path}: a slot is lost"
        for key, block in self._blocks.items():
            assert block.key == key and block in self._used[block.segment], key.hex()
            assert not block.doomed and (block.sealed or block.num_references), key.hex()
        for size, policy in self._policies.items():
            idle = [b for b in self._blocks.values() if b.segment.slot_bytes == size]
            assert len(policy) == sum(not b.num_references for b in idle), f"slots of {size}"
        assert len(self._segments) <= self._max_segments, "more segments than the maximum"
        blocks = [block for used in self._used.values() for block in used]
        assert self.raw_bytes == sum(block.raw_bytes for block in blocks), "raw bytes"
        held = Counter(block.segment for block in blocks if block.num_references)
        assert +held == +self._num_referenced, "referenced blocks per segment"
        assert set(self._idle_segments) == set(self._segments.values()) - set(held), "idle segments"
        ages = [self._last_used[segment] for segment in self._idle_segments]
        assert ages == sorted(ages), "order of idle segments"

    def describe(self) -> str:
        """Return a text with one line per segment."""
        return "\n".join(
            f"{segment.path.name}: {len(self._used[segment])} of {segment.num_slots} slots of "
            f"{segment.slot_bytes} bytes"
            for segment in self._segments.values()
        )

    # -- parts -----------------------------------------------------------------------------

    def _pop_free_slot(self, slot_bytes: int) -> tuple[Segment, int] | None:
        free = self._free.setdefault(slot_bytes, {})
        for segment, slots in free.items():
            slot = slots.pop()
            if not slots:
                del free[segment]
            return segment, slot
        return None

    def _evict_for(self, slot_bytes: int) -> list[BlockKey] | None:
        """Evict the block that the policy chooses among the blocks in slots of ``slot_bytes``
        bytes. If there is none, or a segment with another slot size has been unused for longer,
        evict all blocks, if any, of that segment, and reformat it. Return the keys of the evicted
        blocks, or None if neither is possible."""
        key = self._policy(slot_bytes).next_victim()
        used_before = self._clock + 1 if key is None else self._blocks[key].last_used
        segment = self._coldest_segment(slot_bytes, used_before)
        if segment is None:
            if key is None:
                return None
            self._evict(self._blocks[key])
            return [key]
        blocks = list(self._used[segment])
        for block in blocks:
            self._evict(block)
        self._reformat(segment, slot_bytes)
        return [block.key for block in blocks]

    def _coldest_segment(self, slot_bytes: int, used_before: int) -> Segment | None:
        """Return the least recently used segment among those whose slot size is not ``slot_bytes``,
        that have no referenced block, and that were last used before ``used_before`` on the tier's
        clock; empty segments count as the least recently used. Return None if there is no such
        segment."""
        for segment in self._idle_segments:
            if self._last_used[segment] >= used_before:
                return None
            if segment.slot_bytes != slot_bytes:
                return segment
        return None

    def _reformat(self, segment: Segment, slot_bytes: int) -> None:
        self._free[segment.slot_bytes].pop(segment, None)
        segment.format_later(slot_bytes, num_slots_in(self.segment_bytes, slot_bytes))
        slots = list(range(segment.num_slots - 1, -1, -1))
        self._free.setdefault(slot_bytes, {})[segment] = slots

    def _evict(self, block: DiskBlock) -> None:
        self._unlist(block)
        self._free_slot(block)
        self.evictions += 1

    def _unlist(self, block: DiskBlock) -> None:
        del self._blocks[block.key]
        self._policy(block.segment.slot_bytes).remove(block.key)

    def _free_slot(self, block: DiskBlock) -> None:
        segment = block.segment
        segment.erase_later(block.slot)
        self._used[segment].discard(block)
        self.raw_bytes -= block.raw_bytes
        if not self._used[segment]:
            self._last_used[segment] = 0
            self._idle_segments.move_to_end(segment, last=False)
        self._free.setdefault(segment.slot_bytes, {}).setdefault(segment, []).append(block.slot)

    def _count_reference(self, block: DiskBlock) -> None:
        """Update the state of the block's segment after the block's first reference was taken."""
        self._num_referenced[block.segment] += 1
        self._idle_segments.pop(block.segment, None)

    def _touch_segment(self, block: DiskBlock) -> None:
        """Update the state of the block's segment after the block's last reference was released."""
        segment = block.segment
        self._num_referenced[segment] -= 1
        if not self._num_referenced[segment]:
            self._idle_segments[segment] = None
        self._set_last_used(block)

    def _set_last_used(self, block: DiskBlock) -> None:
        self._clock += 1
        block.last_used = self._last_used[block.segment] = self._clock
        if block.segment in self._idle_segments:
            self._idle_segments.move_to_end(block.segment)

    def _policy(self, slot_bytes: int) -> EvictionPolicy:
        policy = self._policies.get(slot_bytes)
        if policy is None:
            policy = self._policies[slot_bytes] = new_eviction_policy(self._policy_name)
        return policy

    def _path(self, number: int) -> Path:
        return self._folder / _segment_name(number)

    def _register_segment(
        self, number: int, segment: Segment, found: dict[int, BlockRecord]
    ) -> None:
        self._segments[number] = segment
        self._used[segment] = set()
        self._last_used[segment] = 0
        self._idle_segments[segment] = None
        self._idle_segments.move_to_end(segment, last=False)
        free = [slot for slot in range(segment.num_slots - 1, -1, -1) if slot not in found]
        if free:
            self._free.setdefault(segment.slot_bytes, {})[segment] = free

    def _recover(self) -> None:
        """Recover the blocks of earlier runs; only the segments' tables are read. Of two blocks
        with the same key, the block that was stored later is kept."""
        found: list[DiskBlock] = []
        for path in sorted(self._folder.glob("segment-*.kv")):
            number = _segment_number(path)
            if number is None:
                continue
            if number > self._max_segments:
                _drop_segment(path, "above the maximum number of segments")
                continue
            segment = Segment.open(path, self.segment_bytes)
            if segment is None:
                _drop_segment(path, "not a complete segment of the configured size")
                continue
            records = dict(segment.records())
            self._register_segment(number, segment, records)
            found += [DiskBlock(rec, segment, slot, sealed=True) for slot, rec in records.items()]
        for block in sorted(found, key=lambda b: (b.record.stored_at, -b.record.depth)):
            self._used[block.segment].add(block)
            self.raw_bytes += block.raw_bytes
            self._count_reference(block)
            policy = self._policy(block.segment.slot_bytes)
            policy.tick()
            older = self._blocks.get(block.key)
            if older is not None:
                self._unlist(older)
                self._free_slot(older)
            self._blocks[block.key] = block
            policy.admit(block.key)
            policy.mark_evictable(block.key)
            self._touch_segment(block)


def _segment_number(path: Path) -> int | None:
    """Return a segment file's number, or None if the file is not named like a segment."""
    match = re.fullmatch(r"segment-([0-9]{6,})", path.stem)
    number = int(match[1]) if match else 0
    return number if number and path.name == _segment_name(number) else None


def _drop_segment(path: Path, reason: str) -> None:
    log.warning("store_segment_dropped", path=str(path), reason=reason)
    path.unlink()


def _segment_name(number: int) -> str:
    return f"segment-{number:06d}.kv"


def _lock_folder(folder: Path) -> int:
    """Lock the folder, so that no other store node uses it. Return the lock's file descriptor."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(f"store_folder {folder} can't be used: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise Unavailable(f"store_folder {folder} is in use by another store node") from error
    return file
