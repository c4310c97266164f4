"""Tests the SSD tier's files: blocks that an earlier process stored are found again, and damaged
ones are rejected."""

import os
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from structlog.testing import capture_logs

from baton.core.ids import BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.errors import Corrupt, Invalid, Unavailable
from baton.kv_codec.block_format import BlockFormat
from kvstore.block_encoding import BlockEncoding
from kvstore.disk_tier import DiskTier
from kvstore.segment import PAGE_BYTES, RECORD_BYTES, BlockRecord, Segment, num_slots_in
from tests.store_harness import reserve

SEGMENT = 64 * 1024
LARGE = 16_000
"""A segment has three slots of four pages."""

BLOCK_RECORD_BYTES = 117
"""The bytes of the record of an encoded block that are used."""


def payload(number: int, size: int = LARGE) -> bytes:
    return bytes([number]) * size


def record(number: int, size: int = LARGE, depth: int = 0) -> BlockRecord:
    checksum = xxhash.xxh3_64_intdigest(payload(number, size))
    key = BlockKey(bytes([number]) * 16)
    return BlockRecord(key, size, checksum, CHECKSUM_XXH3, depth, b"t" * 16, b"", float(number))


def opened(folder: Path, segments: int = 2) -> DiskTier:
    return DiskTier(folder, segments * SEGMENT, "lru", SEGMENT)


def store(disk: DiskTier, number: int, size: int = LARGE) -> list[BlockKey]:
    """Store a block and return the keys evicted for it."""
    reserved = reserve(disk, record(number, size))
    assert reserved is not None
    block, evicted = reserved
    disk.write(block, memoryview(payload(number, size)))
    disk.seal(block)
    disk.check_integrity()
    return evicted


def load(disk: DiskTier, number: int) -> bytes:
    block = disk.get(record(number).key)
    assert block is not None
    into = bytearray(block.size_bytes)
    disk.read(block, memoryview(into))
    return bytes(into)


def numbers(disk: DiskTier) -> list[int]:
    return sorted(block.key[0] for block in disk.blocks())


def test_written_blocks_are_read_back_also_after_a_restart(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for number in (1, 2, 3, 4):
        assert store(disk, number) == []
    assert disk.describe() == (
        "segment-000001.kv: 3 of 3 slots of 16384 bytes\n"
        "segment-000002.kv: 1 of 3 slots of 16384 bytes"
    )
    assert (disk.num_blocks, disk.used_bytes) == (4, 4 * 16384)
    disk.close()
    disk = opened(tmp_path)
    disk.check_integrity()
    assert [load(disk, number) for number in (1, 2, 3, 4)] == [payload(n) for n in (1, 2, 3, 4)]
    block = disk.get(record(3).key)
    assert block is not None and block.record == record(3)
    # The oldest block is evicted first, also after a restart.
    assert store(disk, 5) == [] and store(disk, 6) == []
    assert store(disk, 7) == [record(1).key]


def test_segment_has_room_for_its_record_table_and_slots() -> None:
    assert num_slots_in(SEGMENT, 16384) == 3
    assert num_slots_in(SEGMENT, 4096) == 14
    for slot_bytes in (4096, 8192, 16384):
        count = num_slots_in(SEGMENT, slot_bytes)
        table = -(-count * RECORD_BYTES // PAGE_BYTES) * PAGE_BYTES
        assert PAGE_BYTES + table + count * slot_bytes <= SEGMENT
    assert num_slots_in(SEGMENT, SEGMENT) == 0 and num_slots_in(SEGMENT, 0) == 0


def test_block_larger_than_a_segment_is_not_stored(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    assert reserve(disk, record(1, SEGMENT)) is None
    disk.check_integrity()


def test_referenced_blocks_stay_and_a_dropped_one_waits_for_its_reader(tmp_path: Path) -> None:
    disk = opened(tmp_path, segments=1)
    for number in (1, 2, 3):
        store(disk, number)
    blocks = [disk.get(record(number).key) for number in (1, 2, 3)]
    for block in blocks:
        assert block is not None
        disk.add_reference(block)
    assert reserve(disk, record(4)) is None
    assert disk.drop(record(1).key) and not disk.drop(record(1).key)
    assert record(1).key not in disk and reserve(disk, record(4)) is None
    disk.check_integrity()
    assert blocks[0] is not None
    disk.release_reference(blocks[0])
    assert store(disk, 4) == []
    assert numbers(disk) == [2, 3, 4]


def test_blocks_of_another_size_take_over_a_whole_segment(tmp_path: Path) -> None:
    disk = opened(tmp_path, segments=1)
    for number in (1, 2, 3):
        store(disk, number)
    assert sorted(store(disk, 9, size=100)) == [record(n).key for n in (1, 2, 3)]
    assert disk.describe() == "segment-000001.kv: 1 of 14 slots of 4096 bytes"
    disk.close()
    assert numbers(opened(tmp_path, segments=1)) == [9]


def test_crash_between_payload_and_record_loses_only_that_block(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 1)
    reserved = reserve(disk, record(2))
    assert reserved is not None
    block, _ = reserved
    os.pwrite(block.segment._file, payload(2), block.segment.slot_offset(block.slot))
    disk.close()
    assert numbers(opened(tmp_path)) == [1]


def test_overwritten_slot_has_no_record_before_its_payload(tmp_path: Path) -> None:
    disk = opened(tmp_path, segments=1)
    for number in (1, 2, 3):
        store(disk, number)
    reserved = reserve(disk, record(4))  # in place of block 1
    assert reserved is not None and reserved[1] == [record(1).key]
    disk.close()
    assert numbers(opened(tmp_path, segments=1)) == [2, 3]


def test_record_is_zeroed_before_its_slot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = opened(tmp_path, segments=1)
    for number in (1, 2, 3):
        store(disk, number)
    pwrite, written = os.pwrite, []

    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    def fail_from_the_second_on(file: int, data: bytes, offset: int) -> int:
        if written:
            fail()
        written.append((data, offset))
        return pwrite(file, data, offset)

    monkeypatch.setattr("os.pwrite", fail)
    reserved = reserve(disk, record(4))  # in place of block 1, whose record can't be erased now
    assert reserved is not None and reserved[1] == [record(1).key]
    monkeypatch.setattr("os.pwrite", fail_from_the_second_on)
    with pytest.raises(Unavailable, match="Input/output error"):
        disk.write(reserved[0], memoryview(payload(4)))
    assert written == [(bytes(RECORD_BYTES), PAGE_BYTES)]
    monkeypatch.undo()
    disk.close()  # the process dies
    assert numbers(opened(tmp_path, segments=1)) == [2, 3]


def spoil(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


def test_flipped_bit_in_a_payload_is_detected(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 1)
    block = disk.get(record(1).key)
    assert block is not None
    spoil(block.segment.path, block.segment.slot_offset(block.slot) + 15_999)
    with pytest.raises(Corrupt, match="does not match its checksum"):
        load(disk, 1)


def test_flipped_bit_in_a_record_or_header_drops_the_block_or_segment(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for number in (1, 2, 3, 4):
        store(disk, number)
    disk.close()
    spoil(tmp_path / "segment-000001.kv", PAGE_BYTES + RECORD_BYTES + 5)
    spoil(tmp_path / "segment-000002.kv", 9)
    disk = opened(tmp_path)
    assert numbers(disk) == [1, 3]
    disk.check_integrity()
    assert not (tmp_path / "segment-000002.kv").exists()
    assert store(disk, 5) == []


def test_truncated_segments_keep_their_complete_blocks(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for number in (1, 2, 3, 4):
        store(disk, number)
    segment = next(iter(disk._segments.values()))
    end = segment.slot_offset(2) + 1
    disk.close()
    os.truncate(tmp_path / "segment-000001.kv", end)
    os.truncate(tmp_path / "segment-000002.kv", 100)
    disk = opened(tmp_path)
    assert numbers(disk) == [1, 2]
    disk.check_integrity()
    assert store(disk, 5) == []
    assert load(disk, 5) == payload(5)


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "segment-mine.kv").write_text("mine")
    disk = opened(tmp_path)
    store(disk, 1)
    assert (tmp_path / "segment-mine.kv").read_text() == "mine"


def test_size_limit_may_change_between_restarts(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for number in (1, 2, 3, 4):
        store(disk, number)
    disk.close()
    with capture_logs() as lines:
        disk = opened(tmp_path, segments=1)
    assert [line["reason"] for line in lines] == ["above the maximum number of segments"]
    assert numbers(disk) == [1, 2, 3]
    disk.close()
    disk = opened(tmp_path, segments=3)
    for number in range(5, 11):
        assert store(disk, number) == []
    assert store(disk, 11) == [record(1).key]


def test_folder_is_locked_by_one_store(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    with pytest.raises(Unavailable, match="is in use by another store node"):
        opened(tmp_path)
    disk.close()
    opened(tmp_path)


def test_invalid_settings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="store_disk_bytes is 1000; it must be at least"):
        DiskTier(tmp_path, 1000)
    with pytest.raises(Invalid, match="the eviction policy is 'best'"):
        DiskTier(tmp_path, 4 * SEGMENT, "best")
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="store_folder"):
        DiskTier(tmp_path / "file", 4 * SEGMENT)


def test_full_disk_evicts_blocks_and_fails_single_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = opened(tmp_path)
    for number in (1, 2, 3):
        store(disk, number)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert store(disk, 4) == [record(1).key]  # it continues with the existing segments
    monkeypatch.setattr("os.pwrite", full)
    reserved = reserve(disk, record(5))
    assert reserved is not None
    with pytest.raises(Unavailable, match="No space left"):
        disk.write(reserved[0], memoryview(payload(5)))
    disk.discard(reserved[0])
    disk.check_integrity()
    monkeypatch.undo()
    assert numbers(disk) == [3, 4]


def test_newest_record_of_a_duplicate_block_wins(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 1)
    segment: Segment = next(iter(disk._segments.values()))
    newer = BlockRecord(
        **{**{f: getattr(record(1), f) for f in BlockRecord.__slots__}, "stored_at": 9.0}
    )
    segment.write(2, newer, memoryview(payload(1)))
    disk.close()
    disk = opened(tmp_path)
    disk.check_integrity()
    block = disk.get(record(1).key)
    assert block is not None and (block.slot, block.record.stored_at) == (2, 9.0)


def test_empty_segment_of_another_size_is_taken_over(tmp_path: Path) -> None:
    disk = opened(tmp_path, segments=1)
    store(disk, 1)
    assert disk.drop(record(1).key)
    assert store(disk, 2, size=100) == []
    assert disk.describe() == "segment-000001.kv: 1 of 14 slots of 4096 bytes"


def test_least_recently_used_segment_is_taken_over(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for number in range(1, 7):
        store(disk, number)
    first = disk.get(record(2).key)
    assert first is not None
    disk.add_reference(first)
    disk.release_reference(first)
    assert sorted(store(disk, 9, size=100)) == [record(n).key for n in (4, 5, 6)]
    assert (numbers(disk), disk.evictions) == ([1, 2, 3, 9], 3)


def test_segment_with_a_referenced_block_is_not_taken_over(tmp_path: Path) -> None:
    disk = opened(tmp_path, segments=1)
    for number in (1, 2, 3):
        store(disk, number)
    held = disk.get(record(2).key)
    assert held is not None
    disk.add_reference(held)
    assert reserve(disk, record(9, size=100)) is None
    assert numbers(disk) == [1, 2, 3]
    disk.check_integrity()


def test_block_is_not_found_before_it_is_sealed(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    reserved = reserve(disk, record(1))
    assert reserved is not None
    disk.write(reserved[0], memoryview(payload(1)))
    assert record(1).key not in disk and disk.get(record(1).key) is None and numbers(disk) == []
    disk.seal(reserved[0])
    assert record(1).key in disk and numbers(disk) == [1]


def test_block_purged_while_it_is_read_does_not_come_back(tmp_path: Path) -> None:
    disk = opened(tmp_path, segments=1)
    store(disk, 1)
    block = disk.get(record(1).key)
    assert block is not None
    disk.add_reference(block)
    assert disk.drop(record(1).key)
    into = bytearray(LARGE)
    disk.read(block, memoryview(into))
    assert into == payload(1)
    disk.close()  # the process dies before the reader has released the block
    assert numbers(opened(tmp_path, segments=1)) == []


def test_slot_with_another_blocks_record_is_corrupt(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 1)
    block = disk.get(record(1).key)
    assert block is not None
    other = replace(record(1), key=record(2).key)
    os.pwrite(block.segment._file, other.pack(), block.segment._record_offset(block.slot))
    with pytest.raises(Corrupt, match="slot 0 contains another block"):
        load(disk, 1)


def test_damaged_record_does_not_matter_while_the_process_lives(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 1)
    spoil(tmp_path / "segment-000001.kv", PAGE_BYTES + 5)
    assert load(disk, 1) == payload(1)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 3 * 4096 + 1])
def test_block_sizes_need_not_be_whole_pages(tmp_path: Path, size: int) -> None:
    disk = opened(tmp_path)
    for number in (1, 2):
        store(disk, number, size)
    disk.close()
    disk = opened(tmp_path)
    assert [load(disk, number) for number in (1, 2)] == [payload(n, size) for n in (1, 2)]
    assert disk.used_bytes == 2 * -(-size // 4096) * 4096


def test_read_into_a_buffer_of_another_size_fails(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 1)
    block = disk.get(record(1).key)
    assert block is not None
    for size in (LARGE - 1, LARGE + 1):
        with pytest.raises(Corrupt, match="is truncated"):
            disk.read(block, memoryview(bytearray(size)))


def test_read_error_is_reported_and_not_sticky(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = opened(tmp_path)
    store(disk, 1)

    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(Unavailable, match="Input/output error"):
        load(disk, 1)
    monkeypatch.undo()
    assert load(disk, 1) == payload(1)


def test_checksum_of_another_algorithm_is_left_to_the_reader(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    reserved = reserve(disk, replace(record(1), checksum=7, algorithm="wsum64"))
    assert reserved is not None
    disk.write(reserved[0], memoryview(payload(1)))
    disk.seal(reserved[0])
    disk.close()
    disk = opened(tmp_path)
    block = disk.get(record(1).key)
    assert block is not None and (block.record.checksum, block.record.algorithm) == (7, "wsum64")
    assert load(disk, 1) == payload(1)


def test_after_a_restart_deeper_blocks_of_equal_age_are_evicted_first(tmp_path: Path) -> None:
    disk = opened(tmp_path, segments=1)
    for number, depth in ((1, 5), (2, 7), (3, 6)):
        reserved = reserve(disk, replace(record(number, depth=depth), stored_at=1.0))
        assert reserved is not None
        disk.write(reserved[0], memoryview(payload(number)))
        disk.seal(reserved[0])
    disk.close()
    disk = opened(tmp_path, segments=1)
    assert [store(disk, number) for number in (4, 5, 6)] == [
        [record(2).key],
        [record(3).key],
        [record(1).key],
    ]


def test_segment_of_another_version_is_dropped(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 1)
    disk.close()
    path = tmp_path / "segment-000001.kv"
    head = struct.pack("<8sQI", b"batonkv3", 16384, 3)
    with path.open("r+b") as file:
        file.write(head + struct.pack("<I", zlib.crc32(head)))
    with capture_logs() as lines:
        disk = opened(tmp_path)
    assert [(line["event"], line["path"], line["reason"]) for line in lines] == [
        ("store_segment_dropped", str(path), "not a complete segment of the configured size")
    ]
    assert numbers(disk) == [] and not path.exists()


def test_raw_blocks_of_an_earlier_version_are_found(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 1)
    disk.close()
    path = tmp_path / "segment-000001.kv"
    head = struct.pack("<8sQI", b"batonkv1", 16384, 3)
    with path.open("r+b") as file:
        file.write(head + struct.pack("<I", zlib.crc32(head)))
    disk = opened(tmp_path)
    assert numbers(disk) == [1] and load(disk, 1) == payload(1)
    assert path.read_bytes()[:8] == b"batonkv2"


def test_encodings_survive_a_restart(tmp_path: Path) -> None:
    format_ = BlockFormat("bfloat16", 2, 32, 8, 16)
    encoding = BlockEncoding(KvCodecName.INT4, format_, exact=True)
    plain = record(1, 9000)
    encoded = replace(plain, encoding=encoding)
    assert (encoded.slot_bytes, plain.slot_bytes) == (3 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert BlockRecord.unpack(encoded.pack()) == encoded
    assert BlockRecord.unpack(plain.pack()) == plain
    raw = replace(plain, encoding=BlockEncoding(format=format_))
    assert BlockRecord.unpack(raw.pack()) == raw
    for position in range(BLOCK_RECORD_BYTES):
        damaged = bytearray(encoded.pack())
        damaged[position] ^= 1
        assert BlockRecord.unpack(bytes(damaged)) is None
    unknown = replace(plain, encoding=BlockEncoding("zip", format_))  # type: ignore[arg-type]
    assert BlockRecord.unpack(unknown.pack()) is None


def test_another_size_takes_over_a_segment_that_is_unused_for_longer(tmp_path: Path) -> None:
    """Otherwise, blocks of a new size would share one segment for ever, while older blocks of
    another size fill the disk."""
    disk = opened(tmp_path)
    for number in range(1, 7):
        store(disk, number)
    evicted = [key[0] for number in range(11, 25) for key in store(disk, number, 5000)]
    assert sorted(evicted) == [1, 2, 3, 4, 5, 6]
    assert numbers(disk) == list(range(11, 25))
    assert sorted(key[0] for key in store(disk, 25, 5000)) == [11]
    assert sorted(key[0] for key in store(disk, 1)) == list(range(18, 25))


def test_segment_with_a_truncated_table_is_dropped(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 1)
    disk.close()
    path = tmp_path / "segment-000001.kv"
    os.truncate(path, 2 * PAGE_BYTES - 1)
    disk = opened(tmp_path)
    assert numbers(disk) == [] and not path.exists()
    assert store(disk, 2) == [] and path.stat().st_size == SEGMENT


def test_truncated_block_does_not_come_back_when_the_file_grows(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for number in (1, 2, 3):
        store(disk, number)
    segment = next(iter(disk._segments.values()))
    end = segment.slot_offset(1)
    disk.close()
    os.truncate(segment.path, end)
    disk = opened(tmp_path)
    assert numbers(disk) == [1]
    disk.close()
    os.truncate(segment.path, SEGMENT)
    assert numbers(opened(tmp_path)) == [1]


@pytest.mark.parametrize("name", ["segment-1.kv", "segment-0000001.kv", "segment-²²²²²².kv"])
def test_files_with_similar_names_are_left_alone(tmp_path: Path, name: str) -> None:
    disk = opened(tmp_path)
    store(disk, 1)
    disk.close()
    ours = (tmp_path / "segment-000001.kv").read_bytes()
    for data in (ours, b"mine"):
        (tmp_path / name).write_bytes(data)
        disk = opened(tmp_path)
        disk.check_integrity()
        assert disk.describe() == "segment-000001.kv: 1 of 3 slots of 16384 bytes"
        assert load(disk, 1) == payload(1) and (tmp_path / name).read_bytes() == data
        disk.close()


def test_no_room_for_the_first_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    disk = opened(tmp_path)
    with capture_logs() as lines:
        assert reserve(disk, record(1)) is None and reserve(disk, record(2)) is None
    assert [line["event"] for line in lines] == ["store_disk_full"]
    assert not (tmp_path / "segment-000001.kv").exists()
    disk.check_integrity()


STORE_AND_DIE = """
import os, sys
from pathlib import Path
from tests.store_harness import reserve
from tests.unit.kvstore.test_disk import opened, payload, record, store
disk = opened(Path(sys.argv[1]))
store(disk, 1)
block, _ = reserve(disk, record(2))
os.pwrite(block.segment._file, payload(2), block.segment.slot_offset(block.slot))
os._exit(7)
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, str(folder)]
    root = Path(__file__).parents[3]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_sealed_blocks_of_a_killed_process_are_found(tmp_path: Path) -> None:
    assert run(STORE_AND_DIE, tmp_path).returncode == 7
    disk = opened(tmp_path)
    assert numbers(disk) == [1] and load(disk, 1) == payload(1)
    refused = run(STORE_AND_DIE, tmp_path)
    assert refused.returncode == 1
    assert f"Unavailable: store_folder {tmp_path} is in use by another store node" in refused.stderr


def test_folder_lock_is_released_on_close(tmp_path: Path) -> None:
    """Closing the tier releases the folder's lock, even if a process that another thread has just
    started still has the lock file open."""
    disk = opened(tmp_path)
    inherited = os.dup(disk._lock)
    disk.close()
    again = opened(tmp_path)
    assert again._lock != inherited and numbers(again) == []
    again.close()
    os.close(inherited)
