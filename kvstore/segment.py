"""One file of the SSD tier, which consists of a header, a table of records, and slots of one size.

A record is zeroed before its slot is overwritten, and written after the payload. So if the process
crashes in between, the record is empty. After a power loss, a record's payload may not match its
checksum, which is detected on reading. We never call fsync, because this is a cache, and checksums
decide what is valid.
"""

import os
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import xxhash

from baton.core.ids import BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.errors import Corrupt, Unavailable
from baton.kv_codec.block_format import BYTES_PER_VALUE, BlockFormat
from baton.system.disk_file import read_into, reserve_space
from kvstore.block_encoding import RAW, BlockEncoding

PAGE_BYTES = 4096
MAGIC = b"batonkv2"
RAW_ONLY_MAGIC = b"batonkv1"
"""The magic of earlier segments, in which all blocks are raw. Apart from that, they are equal; the
magic is replaced when such a segment is opened."""

_HEADER = struct.Struct("<8sQII")
"""Magic, slot size, number of slots, CRC-32 of the fields before it."""

_RECORD = struct.Struct("<16sQQId8s16s16s")
"""Key, size, checksum, depth, wall time in seconds, algorithm, tenant, model; then a CRC-32."""

_ENCODING = struct.Struct("<8s8s4HB")
"""Codec, then the raw block's dtype, layers, tokens, heads, head size; whether it is exact. A
CRC-32 of these and the fields before follows. All are zero for a raw block of unknown format."""

_CRC = struct.Struct("<I")
RECORD_BYTES = 128


def round_up_to_page(size_bytes: int) -> int:
    """Round a size up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """The metadata of the block in a slot, as stored in the segment's table."""

    key: BlockKey
    size_bytes: int
    checksum: int
    algorithm: str
    depth: int
    tenant: bytes
    model: bytes
    stored_at: float
    encoding: BlockEncoding = RAW

    @property
    def slot_bytes(self) -> int:
        """The size of the slots in which such blocks are stored."""
        return round_up_to_page(self.encoding.slot_bytes(self.size_bytes))

    def pack(self) -> bytes:
        body = _RECORD.pack(
            self.key,
            self.size_bytes,
            self.checksum,
            self.depth,
            self.stored_at,
            self.algorithm.encode(),
            self.tenant,
            self.model,
        )
        data = body + _CRC.pack(zlib.crc32(body))
        if self.encoding != RAW:
            data += _pack_encoding(self.encoding)
            data += _CRC.pack(zlib.crc32(data))
        return data.ljust(RECORD_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> "BlockRecord | None":
        """Unpack a record. Return None if it is empty or damaged."""
        body = data[: _RECORD.size]
        (crc,) = _CRC.unpack_from(data, _RECORD.size)
        if not any(body) or zlib.crc32(body) != crc:
            return None
        encoding = _unpack_encoding(data)
        if encoding is None:
            return None
        key, size, checksum, depth, stored_at, algorithm, tenant, model = _RECORD.unpack(body)
        name = algorithm.rstrip(b"\0").decode("ascii", "replace")
        return cls(
            BlockKey(key),
            size,
            checksum,
            name,
            depth,
            tenant if any(tenant) else b"",
            model if any(model) else b"",
            stored_at,
            encoding,
        )


def _pack_encoding(encoding: BlockEncoding) -> bytes:
    format_ = encoding.format
    sizes = (0, 0, 0, 0)
    if format_ is not None:
        sizes = format_.num_layers, format_.block_tokens, format_.kv_heads, format_.head_dim
    dtype = format_.dtype if format_ is not None else ""
    return _ENCODING.pack(encoding.codec.encode(), dtype.encode(), *sizes, encoding.exact)


def _unpack_encoding(record: bytes) -> BlockEncoding | None:
    """Return the encoding in a record; None if it is damaged or unknown to this version."""
    start = _RECORD.size + _CRC.size
    data = record[start : start + _ENCODING.size]
    (crc,) = _CRC.unpack_from(record, start + _ENCODING.size)
    if not any(data) and not crc:
        return RAW
    return _encoding_of(data) if zlib.crc32(record[: start + _ENCODING.size]) == crc else None


@lru_cache(maxsize=256)
def _encoding_of(data: bytes) -> BlockEncoding | None:
    """Blocks with equal encodings share one object."""
    codec, dtype, *sizes, exact = _ENCODING.unpack(data)
    name, kind = (text.rstrip(b"\0").decode("ascii", "replace") for text in (codec, dtype))
    if name not in set(KvCodecName) or (kind and kind not in BYTES_PER_VALUE):
        return None
    format_ = BlockFormat(kind, *sizes) if kind else None
    return BlockEncoding(KvCodecName(name), format_, bool(exact))


class Segment:
    """A segment file. Reads and writes of different slots may run concurrently, in threads.

    The event loop only queues changes (:meth:`format_later`, :meth:`erase_later`). The changes are
    applied by :meth:`flush`, in a thread, or before the next write, so a stalled disk does not
    stall the event loop. At most one erasure per slot is queued."""

    def __init__(self, path: Path, file: int, slot_bytes: int, num_slots: int) -> None:
        self.path = path
        self._file = file
        self._layout = slot_bytes, num_slots
        self._is_unformatted = False
        self._to_erase: set[int] = set()
        self._table_lock = threading.Lock()
        """The lock is taken only in other threads, so the event loop never waits for it."""

    @property
    def slot_bytes(self) -> int:
        return self._layout[0]

    @property
    def num_slots(self) -> int:
        return self._layout[1]

    @property
    def is_flushed(self) -> bool:
        """Whether no change is queued, so that :meth:`flush` would do nothing."""
        return not (self._is_unformatted or self._to_erase)

    @classmethod
    def create(cls, path: Path, segment_bytes: int, slot_bytes: int) -> "Segment":
        """Create a preallocated, empty segment. Raises OSError if the disk has no space for it."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            reserve_space(file, segment_bytes)
            segment = cls(path, file, slot_bytes, num_slots_in(segment_bytes, slot_bytes))
            segment._format()
        except BaseException:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def open(cls, path: Path, segment_bytes: int) -> "Segment | None":
        """Open a segment of an earlier run. Return None if the file is not a complete segment of
        ``segment_bytes`` bytes."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        header = os.pread(file, _HEADER.size, 0)
        if len(header) == _HEADER.size:
            magic, slot_bytes, num_slots, crc = _HEADER.unpack(header)
            is_valid = magic in (MAGIC, RAW_ONLY_MAGIC) and zlib.crc32(header[:-4]) == crc
            segment = cls(path, file, slot_bytes, num_slots)
            has_table = os.fstat(file).st_size >= segment.slot_offset(0)
            if is_valid and has_table and num_slots == num_slots_in(segment_bytes, slot_bytes):
                if magic != MAGIC:
                    segment._write_header()
                return segment
        os.close(file)
        return None

    def format_later(self, slot_bytes: int, num_slots: int) -> None:
        """Discard all blocks and change the slot size. No read or write may be in progress. The
        file keeps the old blocks until :meth:`flush` or the next write; a restart before that would
        recover them."""
        self._to_erase.clear()
        self._layout = slot_bytes, num_slots
        self._is_unformatted = True

    def erase_later(self, slot: int) -> None:
        """Queue the erasure of a slot's record. The erasure is cancelled if the slot is written
        again first."""
        self._to_erase.add(slot)

    def flush(self) -> None:
        """Apply the queued changes. Call this in a thread. After an OSError, it may be called
        again."""
        with self._table_lock:
            self._format_if_needed()
            while self._to_erase:
                try:
                    slot = self._to_erase.pop()
                except KeyError:  # it was formatted meanwhile
                    return
                try:
                    self.erase(slot)
                except OSError:
                    self._to_erase.add(slot)
                    raise

    def _format_if_needed(self) -> None:
        if self._is_unformatted:
            self._is_unformatted = False
            try:
                self._format()
            except OSError:
                self._is_unformatted = True
                raise

    def _format(self) -> None:
        self._write_header()
        table = bytes(round_up_to_page(self.num_slots * RECORD_BYTES))
        os.pwrite(self._file, table, PAGE_BYTES)

    def _write_header(self) -> None:
        head = struct.pack("<8sQI", MAGIC, *self._layout)
        os.pwrite(self._file, (head + _CRC.pack(zlib.crc32(head))).ljust(PAGE_BYTES, b"\0"), 0)

    def records(self) -> Iterator[tuple[int, BlockRecord]]:
        """Yield (slot, record) of each valid record whose slot lies within the file. Erase the
        other records: otherwise a later run could accept them once the file has grown again."""
        table = os.pread(self._file, self.num_slots * RECORD_BYTES, PAGE_BYTES)
        end = os.fstat(self._file).st_size
        for slot in range(len(table) // RECORD_BYTES):
            data = table[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]
            record = BlockRecord.unpack(data)
            if record is not None and self._fits(slot, record, end):
                yield slot, record
            elif any(data):
                self.erase(slot)

    def write(self, slot: int, record: BlockRecord, data: memoryview) -> None:
        """Write a block to a slot: first its data, then its record. Raises Unavailable if the disk
        fails."""
        assert len(data) == record.size_bytes <= self.slot_bytes, "would spill into the next slot"
        try:
            with self._table_lock:
                self._format_if_needed()
                self._to_erase.discard(slot)
                self.erase(slot)
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self.slot_offset(slot) + written)
            os.pwrite(self._file, record.pack(), self._record_offset(slot))
        except OSError as error:
            raise Unavailable(f"writing to {self.path} failed: {error}") from error

    def erase(self, slot: int) -> None:
        """Erase a slot's record. Raises OSError."""
        os.pwrite(self._file, bytes(RECORD_BYTES), self._record_offset(slot))

    def read(self, slot: int, record: BlockRecord, into: memoryview) -> None:
        """Read and verify a block. Raises Corrupt if the data is not what was written, and
        Unavailable if the disk fails."""
        try:
            count = read_into(self._file, into, self.slot_offset(slot))
            table = os.pread(self._file, RECORD_BYTES, self._record_offset(slot))
        except OSError as error:
            raise Unavailable(f"reading {self.path} failed: {error}") from error
        if count != record.size_bytes:
            raise Corrupt(f"{self.path}: slot {slot} is truncated")
        # A missing or damaged record does not matter here: the checksum decides.
        stored = BlockRecord.unpack(table) if len(table) == RECORD_BYTES else None
        if stored is not None and stored.key != record.key:
            raise Corrupt(f"{self.path}: slot {slot} contains another block")
        if record.algorithm != CHECKSUM_XXH3:
            return
        if xxhash.xxh3_64_intdigest(into) != record.checksum:
            raise Corrupt(f"{self.path}: slot {slot} does not match its checksum")

    def close(self) -> None:
        os.close(self._file)

    def _fits(self, slot: int, record: BlockRecord, end: int) -> bool:
        in_slot = record.size_bytes <= self.slot_bytes
        return in_slot and self.slot_offset(slot) + record.size_bytes <= end

    def _record_offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * RECORD_BYTES

    def slot_offset(self, slot: int) -> int:
        """Return where the slot begins in the file."""
        return PAGE_BYTES + round_up_to_page(self.num_slots * RECORD_BYTES) + slot * self.slot_bytes


def num_slots_in(segment_bytes: int, slot_bytes: int) -> int:
    """Return how many slots, together with their records and the header, fit into a segment. The
    result may be 0."""
    if slot_bytes <= 0:
        return 0
    count = max((segment_bytes - PAGE_BYTES) // (slot_bytes + RECORD_BYTES), 0)
    while (
        count
        and PAGE_BYTES + round_up_to_page(count * RECORD_BYTES) + count * slot_bytes > segment_bytes
    ):
        count -= 1
    return count
