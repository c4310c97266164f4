"""Compares the SSD tier with a dict. Whatever is stored, referenced, dropped, corrupted and
reopened, no reader gets wrong bytes, intact blocks are found again, and dropped blocks stay
dropped."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.ids import BlockKey
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.errors import Corrupt, Unavailable
from kvstore.disk_tier import DiskBlock, DiskTier
from kvstore.segment import PAGE_BYTES, RECORD_BYTES, BlockRecord, Segment, round_up_to_page
from tests.store_harness import reserve

SEGMENT = 64 * 1024
SIZES = (100, 16_000, 5000, 16_000)
"""Sizes of blocks, in bytes. A segment has 14, 3, 7 and 3 slots for them. No size is a multiple of
a page. Most evictions hit the large blocks."""

NUM_KEYS = 16
NUMBERS = st.integers(0, NUM_KEYS - 1)
FOREIGN_FILE = b"not ours"


def key_of(number: int) -> BlockKey:
    return BlockKey(bytes([number + 1]) * 16)


def bytes_of(key: BlockKey) -> bytes:
    """Return the content of the block ``key``, whose size and bytes depend only on the key."""
    seed = key[0]
    return (bytes((seed * 31 + i) % 251 for i in range(97)) * 200)[: SIZES[seed % len(SIZES)]]


def no_space(*args: object) -> int:
    raise OSError(28, "No space left on device")


class DiskMachine(RuleBasedStateMachine):
    """Runs the tier and its model. ``order`` holds the keys of sealed blocks; the first one is the
    next to be evicted. ``readers`` holds our references, including those to dropped blocks. Reading
    a block in ``damaged`` may succeed or raise Corrupt. After a restart, blocks in ``damaged`` and
    all blocks of segments in ``spoiled`` may be missing."""

    @initialize(num_segments=st.integers(1, 3))
    def start(self, num_segments: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "segment-mine.kv").write_bytes(FOREIGN_FILE)
        self.num_stored = 0
        self.evictions = 0
        self.order: list[BlockKey] = []
        self.damaged: set[BlockKey] = set()
        self.open_disk(num_segments)

    def open_disk(self, num_segments: int) -> None:
        self.disk = DiskTier(self.folder, num_segments * SEGMENT, "lru", SEGMENT)
        self.evictions = 0
        self.filling: dict[BlockKey, DiskBlock] = {}
        self.written: set[BlockKey] = set()
        self.readers: list[tuple[DiskBlock, bool]] = []  # (block, whether its bytes may be wrong)
        self.spoiled: set[Path] = set()

    def held(self) -> set[BlockKey]:
        """Return the keys of the referenced blocks. Dropped blocks don't count, because their keys
        may be stored again."""
        return {block.key for block, _ in self.readers if not block.doomed}

    def block(self, key: BlockKey) -> DiskBlock:
        block = self.disk.get(key)
        assert block is not None
        return block

    # -- storing ---------------------------------------------------------------------------

    @rule(number=NUMBERS, full=st.booleans())
    def reserve(self, number: int, full: bool) -> None:
        key = key_of(number)
        if key in self.order or key in self.filling:
            return
        self.num_stored += 1
        data = bytes_of(key)
        checksum = xxhash.xxh3_64_intdigest(data)
        at = float(self.num_stored)
        record = BlockRecord(key, len(data), checksum, CHECKSUM_XXH3, number, b"t" * 16, b"", at)
        victims = self.victims(round_up_to_page(len(data)))
        fallocate = no_space if full else os.posix_fallocate
        with mock.patch("os.posix_fallocate", fallocate):
            reserved = reserve(self.disk, record)
        if reserved is None:
            nothing_there = not self.disk.describe()
            assert not victims and (self.readers or self.filling or nothing_there)
            return
        block, evicted = reserved
        assert evicted == [] or set(evicted) in [*victims, *self.idle_segments(evicted, victims)]
        self.evictions += len(evicted)
        self.order = [k for k in self.order if k not in evicted]
        self.damaged -= {key, *evicted}
        self.filling[key] = block

    def victims(self, slot_bytes: int) -> list[set[BlockKey]]:
        """Return the sets of keys that the tier may evict to free a slot of ``slot_bytes`` in a
        segment that has such slots. The only such set has one key: the first in ``order`` whose
        block has a slot of this size and no reference. Return an empty list if there is no such
        key."""
        self.segment_of = {key: self.block(key).segment for key in self.order}
        idle = [key for key in self.order if key not in self.held()]
        same = [key for key in idle if self.segment_of[key].slot_bytes == slot_bytes]
        return [{key} for key in same[:1]]

    def idle_segments(
        self, evicted: list[BlockKey], victims: list[set[BlockKey]]
    ) -> list[set[BlockKey]]:
        """Return the sets of keys that the tier may evict to free the segment that held
        ``evicted``. The only such set has the keys of all sealed blocks in this segment. Return an
        empty list if a block in the segment is being read or written, or if a block was used later
        than the block in ``victims``, which could be evicted instead."""
        segment = self.segment_of[evicted[0]]
        there = {key for key in self.order if self.segment_of[key] is segment}
        busy = [block for block, _ in self.readers] + list(self.filling.values())
        is_busy = any(block.segment is segment for block in busy)
        later = {key for keys in victims for key in self.order[self.order.index(min(keys)) :]}
        return [] if is_busy or there & later else [there]

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), full=st.booleans())
    def write(self, data: st.DataObject, full: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.filling)))
        block = self.filling[key]
        if full:
            with mock.patch("os.pwrite", no_space), pytest.raises(Unavailable):
                self.disk.write(block, memoryview(bytes_of(key)))
            self.discard(key)
            return
        self.disk.write(block, memoryview(bytes_of(key)))
        self.damaged.discard(key)
        self.written.add(key)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), well=st.booleans())
    def finish(self, data: st.DataObject, well: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.filling)))
        if not well or key not in self.written:
            self.discard(key)
            return
        self.disk.seal(self.filling.pop(key))
        self.written.discard(key)
        self.order.append(key)

    def discard(self, key: BlockKey) -> None:
        self.disk.discard(self.filling.pop(key))
        self.written.discard(key)
        self.damaged.discard(key)

    @rule(first=NUMBERS, count=st.integers(1, 8))
    def store_some(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            key = key_of(number % NUM_KEYS)
            self.reserve(number % NUM_KEYS, False)
            if key in self.filling:
                self.disk.write(self.filling[key], memoryview(bytes_of(key)))
                self.disk.seal(self.filling.pop(key))
                self.written.discard(key)
                self.damaged.discard(key)
                self.order.append(key)

    # -- reading ---------------------------------------------------------------------------

    def read_block(self, block: DiskBlock, may_be_wrong: bool) -> bool:
        """Read a block and check its bytes; return whether it was intact."""
        buffer = bytearray(block.size_bytes)
        try:
            self.disk.read(block, memoryview(buffer))
        except Corrupt:
            assert may_be_wrong
            return False
        assert buffer == bytes_of(block.key)
        return True

    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        """Read a block, and drop the block if it is corrupt, as the store node does."""
        key = key_of(number)
        if key not in self.order:
            assert key not in self.disk
        elif not self.read_block(self.block(key), key in self.damaged):
            self.drop(number)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def add_reference(self, data: st.DataObject) -> None:
        block = self.block(data.draw(st.sampled_from(self.order)))
        self.disk.add_reference(block)
        self.readers.append((block, block.key in self.damaged))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def read_held(self, data: st.DataObject) -> None:
        """Read a referenced block, which may have been dropped since the reference was taken."""
        block, may_be_wrong = data.draw(st.sampled_from(self.readers))
        self.read_block(block, may_be_wrong)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        block, _ = self.readers.pop(index)
        self.disk.release_reference(block)
        if not block.doomed and all(other is not block for other, _ in self.readers):
            self.make_newest(block.key)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.order))
        self.disk.record_use(self.block(key))
        self.make_newest(key)

    def make_newest(self, key: BlockKey) -> None:
        if key not in self.held():
            self.order.remove(key)
            self.order.append(key)

    @rule(number=NUMBERS)
    def drop(self, number: int) -> None:
        key = key_of(number)
        assert self.disk.drop(key) == (key in self.order)
        if key in self.order:
            self.order.remove(key)
            self.damaged.discard(key)

    @precondition(lambda self: self.order)
    @rule(data=st.data(), dies=st.booleans())
    def drop_under_a_reader(self, data: st.DataObject, dies: bool) -> None:
        """Drop a block that has a reader. The block's slot may be reused only once the reader has
        released the block. The block's key can be stored again at once. Unless that happens, the
        block stays dropped, even after a restart."""
        key = data.draw(st.sampled_from(self.order))
        block = self.block(key)
        self.disk.add_reference(block)
        self.readers.append((block, key in self.damaged))
        self.drop(key[0] - 1)
        if dies:
            self.restart(3, False)

    # -- faults ----------------------------------------------------------------------------

    @precondition(lambda self: self.disk._segments)
    @rule(data=st.data(), part=st.sampled_from(["header", "table", "slots"]))
    def flip(self, data: st.DataObject, part: str) -> None:
        segment = self.draw_segment(data)
        low, high = {
            "header": (0, 24),
            "table": (PAGE_BYTES, segment._record_offset(segment.num_slots)),
            "slots": (segment.slot_offset(0), segment.slot_offset(segment.num_slots)),
        }[part]
        offset = data.draw(st.integers(low, high - 1))
        with segment.path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1) or b"\0"
            file.seek(offset)
            file.write(bytes([byte[0] ^ 16]))
        if part == "header":
            self.spoiled.add(segment.path)
        self.note_damage(segment, lambda start, end: start <= offset < end)

    @precondition(lambda self: self.disk._segments)
    @rule(data=st.data(), short=st.booleans())
    def truncate(self, data: st.DataObject, short: bool) -> None:
        segment = self.draw_segment(data)
        end = segment.slot_offset(0) if short else segment.slot_offset(segment.num_slots)
        length = data.draw(st.integers(0, end))
        if length >= segment.path.stat().st_size:
            return
        os.truncate(segment.path, length)
        if length < segment.slot_offset(0):
            self.spoiled.add(segment.path)
        self.note_damage(segment, lambda _, end: end > length)

    def draw_segment(self, data: st.DataObject) -> Segment:
        number = data.draw(st.sampled_from(sorted(self.disk._segments)))
        return self.disk._segments[number]

    def note_damage(self, segment: Segment, hit: Callable[[int, int], bool]) -> None:
        """Mark the damaged blocks of the segment. A block is damaged if ``hit(begin, end)`` is True
        for the byte range of its record or of its payload. Ranges are half-open."""

        def is_hit(block: DiskBlock) -> bool:
            record = segment._record_offset(block.slot)
            payload = segment.slot_offset(block.slot)
            hits_record = hit(record, record + RECORD_BYTES)
            hits_payload = hit(payload, payload + block.size_bytes)
            return block.segment is segment and (hits_record or hits_payload)

        found = [*map(self.block, self.order), *self.filling.values()]
        self.damaged |= {block.key for block in found if is_hit(block)}
        self.readers = [(block, bad or is_hit(block)) for block, bad in self.readers]

    # -- restarts --------------------------------------------------------------------------

    @rule(num_segments=st.integers(1, 3), torn=st.booleans())
    def restart(self, num_segments: int, torn: bool) -> None:
        """Kill the tier and reopen it. If ``torn`` is set, the tier dies while it writes all
        unsealed blocks: half of each block's payload is on the disk, but no record."""
        for key, block in self.filling.items():
            if torn:
                self.written.discard(key)
                block.segment.erase(block.slot)
                half = bytes_of(key)[: block.size_bytes // 2]
                os.pwrite(block.segment._file, half, block.segment.slot_offset(block.slot))
        blocks = {key: self.block(key) for key in self.order}
        blocks |= {key: self.filling[key] for key in self.written}
        kept = {
            key
            for key, block in blocks.items()
            if int(block.segment.path.stem[-6:]) <= num_segments
        }
        lost = {key for key in kept if blocks[key].segment.path in self.spoiled} | self.damaged
        stored_at = {key: block.record.stored_at for key, block in blocks.items()}
        self.disk.close()
        self.open_disk(num_segments)
        found = {block.key for block in self.disk.blocks()}
        assert kept - lost <= found <= kept
        self.order = sorted(found, key=stored_at.__getitem__)
        self.damaged &= found

    # -- invariants ------------------------------------------------------------------------

    @invariant()
    def has_integrity(self) -> None:
        if not hasattr(self, "disk"):
            return
        self.disk.check_integrity()
        assert {block.key for block in self.disk.blocks()} == set(self.order)
        assert self.disk.num_blocks == len(self.order) + len(self.filling)
        assert self.disk.evictions == self.evictions

    def teardown(self) -> None:
        if not hasattr(self, "disk"):
            return
        for number in range(NUM_KEYS):
            self.read(number)
        self.disk.close()
        assert (self.folder / "segment-mine.kv").read_bytes() == FOREIGN_FILE
        shutil.rmtree(self.folder)


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
