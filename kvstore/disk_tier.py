"""The SSD tier: blocks in preallocated segment files, whose tables outlive the process."""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from baton.core.ids import BlockKey
from baton.errors import Invalid, Unavailable
from kvstore.eviction import EvictionPolicy, new_eviction_policy
from kvstore.segment import BlockRecord, Segment, num_slots_in, round_up_to_page

SEGMENT_BYTES = 64 * 1024 * 1024
MIN_SEGMENT_BYTES = 64 * 1024

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class DiskBlock:
    """A record and its place. ``num_holds`` counts who reads or writes it; a block that is not
    ``sealed`` is being written, a ``doomed`` one is free once its last reader left."""

    record: BlockRecord
    segment: Segment
    slot: int
    num_holds: int = 0
    sealed: bool = False
    doomed: bool = False

    @property
    def key(self) -> BlockKey:
        return self.record.key

    @property
    def size_bytes(self) -> int:
        return self.record.size_bytes


@dataclass(slots=True)
class NewSegment:
    """One more segment, from :meth:`DiskTier.growth_for` until :meth:`DiskTier.adopt`. ``segment``
    is None until it is made, and when the disk has no room for it."""

    number: int
    path: Path
    segment_bytes: int
    slot_bytes: int
    segment: Segment | None = None
    error: str = ""

    def make(self) -> None:
        """Preallocates the file, which may take long: in a thread."""
        try:
            self.segment = Segment.create(self.path, self.segment_bytes, self.slot_bytes)
        except OSError as error:
            self.error = str(error)


class DiskTier:
    """All but :meth:`write`, :meth:`read`, :meth:`settle` and :meth:`close` run in one thread, and
    never wait for the disk; these do, in whatever thread, the first two on a block that is held."""

    def __init__(
        self,
        folder: Path,
        size_bytes: int,
        policy: str = "baton",
        segment_bytes: int | None = None,
    ) -> None:
        """Takes the folder for itself, and finds what earlier lives left there. Raises Invalid
        when ``size_bytes`` is not one segment, Unavailable when the folder can't be had."""
        self.segment_bytes = segment_bytes or min(SEGMENT_BYTES, max(size_bytes // 4, 1))
        if size_bytes < self.segment_bytes or self.segment_bytes < MIN_SEGMENT_BYTES:
            raise Invalid(
                f"store_disk_bytes is {size_bytes}: the SSD tier needs at least "
                f"{4 * MIN_SEGMENT_BYTES}, or 0 for none",
                param="store_disk_bytes",
            )
        self.size_bytes = size_bytes
        self.evictions = 0
        self._folder = folder
        self._policy_name = policy
        self._limit = size_bytes // self.segment_bytes
        self._blocks: dict[BlockKey, DiskBlock] = {}
        self._segments: dict[int, Segment] = {}
        self._free: dict[int, dict[Segment, list[int]]] = {}  # per slot size
        self._used: dict[Segment, set[DiskBlock]] = {}
        self._used_at: dict[Segment, int] = {}  # when anything of it was last let go
        self._clock = 0
        self._policies: dict[int, EvictionPolicy] = {}
        new_eviction_policy(policy)  # a wrong name fails now
        self._growing: set[int] = set()
        self._lock = _lock(folder)
        try:
            self._recover()
        except OSError as error:
            self.close()
            raise Unavailable(f"store_folder {folder}: {error}") from error

    # -- questions -------------------------------------------------------------------------

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

    # -- a block's life --------------------------------------------------------------------

    def growth_for(self, size_bytes: int, num_blocks: int) -> NewSegment | None:
        """The segment that is missing for ``num_blocks`` free slots of that size; None when there
        are as many, or no more segments may be. Ends with :meth:`adopt`."""
        slot_bytes = round_up_to_page(size_bytes)
        free = sum(len(slots) for slots in self._free.get(slot_bytes, {}).values())
        taken = self._segments.keys() | self._growing
        if free >= num_blocks or len(taken) >= self._limit:
            return None
        if not num_slots_in(self.segment_bytes, slot_bytes):
            return None
        number = next(n for n in range(1, self._limit + 1) if n not in taken)
        self._growing.add(number)
        return NewSegment(number, self._path(number), self.segment_bytes, slot_bytes)

    def adopt(self, growth: NewSegment) -> None:
        """The segment is there; or the disk is full, and there will be no more."""
        self._growing.discard(growth.number)
        if growth.segment is not None:
            self._adopt(growth.number, growth.segment, {})
            return
        log.warning("store_disk_full", error=growth.error, num_segments=len(self._segments))
        self._limit = len(self._segments)

    def reserve(self, record: BlockRecord) -> tuple[DiskBlock, list[BlockKey]] | None:
        """A held slot to write to, and the keys that went for it; None when all is held, or the
        block is too large. It takes what there is: :meth:`growth_for` comes first."""
        assert record.key not in self._blocks, "ask `in` before"
        slot_bytes = round_up_to_page(record.size_bytes)
        if not num_slots_in(self.segment_bytes, slot_bytes):
            return None
        evicted: list[BlockKey] = []
        place = self._take(slot_bytes)
        while place is None:
            gone = self._make_room(slot_bytes)
            if gone is None:
                return None
            evicted += gone
            place = self._take(slot_bytes)
        segment, slot = place
        block = DiskBlock(record, segment, slot, num_holds=1)
        self._blocks[record.key] = block
        self._used[segment].add(block)
        self._policy(slot_bytes).admit(record.key, record.depth)
        return block, evicted

    def write(self, block: DiskBlock, data: memoryview) -> None:
        """Raises Unavailable."""
        block.segment.write(block.slot, block.record, data)

    def seal(self, block: DiskBlock) -> None:
        block.sealed = True
        self.release(block)

    def discard(self, block: DiskBlock) -> None:
        """It could not be written, or is not wanted any more."""
        block.num_holds = 0
        self._forget(block)
        self._free_slot(block)

    def read(self, block: DiskBlock, into: memoryview) -> None:
        """Raises Corrupt, Unavailable."""
        block.segment.read(block.slot, block.record, into)

    def hold(self, block: DiskBlock) -> None:
        if block.num_holds == 0:
            self._policy(block.segment.slot_bytes).hold(block.key)
        block.num_holds += 1

    def release(self, block: DiskBlock) -> None:
        block.num_holds -= 1
        if block.num_holds:
            return
        if block.doomed:
            self._free_slot(block)
        else:
            self._policy(block.segment.slot_bytes).release(block.key)
            self._note_use(block)

    def use(self, block: DiskBlock) -> None:
        policy = self._policy(block.segment.slot_bytes)
        policy.tick()
        policy.use(block.key)

    def drop(self, key: BlockKey) -> bool:
        """Damaged or purged: it can't be found from now on, nor in another life."""
        block = self.get(key)
        if block is None:
            return False
        self._forget(block)
        if block.num_holds:
            block.doomed = True
            block.segment.erase_later(block.slot)
        else:
            self._free_slot(block)
        return True

    @property
    def is_settled(self) -> bool:
        """Whether :meth:`settle` would do nothing."""
        return all(segment.is_settled for segment in self._segments.values())

    def settle(self) -> None:
        """Erases from the disk what was dropped or evicted: a later life won't find it. Where the
        disk refuses, that is tried again, at the latest before the slot is written."""
        for segment in list(self._segments.values()):
            with contextlib.suppress(OSError):
                segment.settle()

    def close(self) -> None:
        self.settle()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        # A process that is being started by another thread has the file for a moment, too.
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)

    # -- self-help -------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError when the books don't balance."""
        for segment, used in self._used.items():
            taken = {block.slot for block in used}
            free = self._free.get(segment.slot_bytes, {}).get(segment, [])
            assert len(taken) == len(used), f"{segment.path}: two blocks in a slot"
            assert taken.isdisjoint(free), f"{segment.path}: a used slot is free"
            assert len(taken) + len(free) == segment.num_slots, f"{segment.path}: a slot is lost"
        for key, block in self._blocks.items():
            assert block.key == key and block in self._used[block.segment], key.hex()
            assert not block.doomed and (block.sealed or block.num_holds), key.hex()
        for size, policy in self._policies.items():
            idle = [b for b in self._blocks.values() if b.segment.slot_bytes == size]
            assert len(policy) == sum(not b.num_holds for b in idle), f"slots of {size}"
        assert len(self._segments) <= self._limit, "more segments than may be"

    def describe(self) -> str:
        """One line per segment."""
        return "\n".join(
            f"{segment.path.name}: {len(self._used[segment])} of {segment.num_slots} slots of "
            f"{segment.slot_bytes} bytes"
            for segment in self._segments.values()
        )

    # -- parts -----------------------------------------------------------------------------

    def _take(self, slot_bytes: int) -> tuple[Segment, int] | None:
        free = self._free.setdefault(slot_bytes, {})
        for segment, slots in free.items():
            slot = slots.pop()
            if not slots:
                del free[segment]
            return segment, slot
        return None

    def _make_room(self, slot_bytes: int) -> list[BlockKey] | None:
        """Evicts the policy's choice of that size, or else a whole segment of another size, which
        may be empty. None when neither can be had."""
        key = self._policy(slot_bytes).victim()
        if key is not None:
            self._evict(self._blocks[key])
            return [key]
        segment = self._coldest_segment(slot_bytes)
        if segment is None:
            return None
        blocks = list(self._used[segment])
        for block in blocks:
            self._evict(block)
        self._reformat(segment, slot_bytes)
        return [block.key for block in blocks]

    def _coldest_segment(self, slot_bytes: int) -> Segment | None:
        """Of the other sizes' segments without a held block: an empty one, or else the one that
        was left alone longest."""
        idle = [
            segment
            for segment, used in self._used.items()
            if segment.slot_bytes != slot_bytes and not any(block.num_holds for block in used)
        ]
        return min(idle, key=lambda s: self._used_at[s] if self._used[s] else 0, default=None)

    def _reformat(self, segment: Segment, slot_bytes: int) -> None:
        self._free[segment.slot_bytes].pop(segment, None)
        segment.format_later(slot_bytes, num_slots_in(self.segment_bytes, slot_bytes))
        slots = list(range(segment.num_slots - 1, -1, -1))
        self._free.setdefault(slot_bytes, {})[segment] = slots

    def _evict(self, block: DiskBlock) -> None:
        self._forget(block)
        self._free_slot(block)
        self.evictions += 1

    def _forget(self, block: DiskBlock) -> None:
        del self._blocks[block.key]
        self._policy(block.segment.slot_bytes).forget(block.key)

    def _free_slot(self, block: DiskBlock) -> None:
        segment = block.segment
        segment.erase_later(block.slot)
        self._used[segment].discard(block)
        self._free.setdefault(segment.slot_bytes, {}).setdefault(segment, []).append(block.slot)

    def _note_use(self, block: DiskBlock) -> None:
        self._clock += 1
        self._used_at[block.segment] = self._clock

    def _policy(self, slot_bytes: int) -> EvictionPolicy:
        policy = self._policies.get(slot_bytes)
        if policy is None:
            policy = self._policies[slot_bytes] = new_eviction_policy(self._policy_name)
        return policy

    def _path(self, number: int) -> Path:
        return self._folder / _name(number)

    def _adopt(self, number: int, segment: Segment, found: dict[int, BlockRecord]) -> None:
        self._segments[number] = segment
        self._used[segment] = set()
        self._used_at[segment] = 0
        free = [slot for slot in range(segment.num_slots - 1, -1, -1) if slot not in found]
        if free:
            self._free.setdefault(segment.slot_bytes, {})[segment] = free

    def _recover(self) -> None:
        """Only tables are read. Of two blocks with one key the later one stays."""
        found: list[DiskBlock] = []
        for path in sorted(self._folder.glob("segment-*.kv")):
            number = _number(path)
            if number is None:
                continue
            segment = Segment.open(path, self.segment_bytes) if number <= self._limit else None
            if segment is None:
                log.warning("store_segment_dropped", path=str(path))
                path.unlink()
                continue
            records = dict(segment.records())
            self._adopt(number, segment, records)
            found += [DiskBlock(rec, segment, slot, sealed=True) for slot, rec in records.items()]
        for block in sorted(found, key=lambda b: (b.record.stored_at, -b.record.depth)):
            self._used[block.segment].add(block)
            policy = self._policy(block.segment.slot_bytes)
            policy.tick()
            older = self._blocks.get(block.key)
            if older is not None:
                self._forget(older)
                self._free_slot(older)
            self._blocks[block.key] = block
            policy.admit(block.key, block.record.depth)
            policy.release(block.key)
            self._note_use(block)


def _number(path: Path) -> int | None:
    """None for a name that we don't give: such a file is somebody else's."""
    match = re.fullmatch(r"segment-([0-9]{6,})", path.stem)
    number = int(match[1]) if match else 0
    return number if number and path.name == _name(number) else None


def _name(number: int) -> str:
    return f"segment-{number:06d}.kv"


def _lock(folder: Path) -> int:
    """Held as long as the process lives."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(f"store_folder {folder}: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise Unavailable(f"store_folder {folder} is another store node's") from error
    return file
