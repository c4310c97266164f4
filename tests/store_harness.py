"""A KV store node and the memory of a worker whose blocks are put into it, connected by the
in-memory transport."""

from collections.abc import Sequence, Set
from pathlib import Path

import numpy as np
import xxhash

from baton.clock import Clock, ManualClock
from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef, Endpoint
from baton.core.store import ALL_CODECS, LeasedBlocks, LeaseRequest, PutRequest
from baton.kv.index import KvHolder
from baton.transport.host_memory import HostMemory
from kvstore.disk_encoder import DiskEncoder
from kvstore.disk_tier import DiskBlock, DiskTier
from kvstore.dram_tier import DramTier
from kvstore.index_publisher import IndexPublisher
from kvstore.node import StoreNode
from kvstore.segment import BlockRecord
from kvstore.stored_codecs import StoredCodecs
from testkit.fakes.kv_index import MemoryKvIndex
from testkit.fakes.transport import MemoryFabric, MemoryTransport

SIZE = 64
NUM_BLOCKS = 16


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(2, "little") * 8)


KEYS = [key_of(number) for number in range(NUM_BLOCKS)]
UNLIMITED_BYTES = 1 << 40


class StoreHarness:
    """A store node with space for ``dram_blocks`` blocks of ``size`` bytes in DRAM and for
    ``disk_bytes`` in ``folder``, if that is given. The worker's memory has
    ``num_blocks`` blocks; the key of block n is ``key_of(n)``."""

    def __init__(
        self,
        dram_blocks: int = 4,
        folder: Path | None = None,
        disk_bytes: int = 256 * 1024,
        policy: str = "lru",
        tenant_bytes: int | None = None,
        clock: Clock | None = None,
        size: int = SIZE,
        slab_blocks: int | None = None,
        disk_encoder: DiskEncoder | None = None,
        codecs: StoredCodecs | None = None,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.size = size
        self.fabric = MemoryFabric()
        self.clock = clock or ManualClock()
        self.pool = HostMemory("worker", num_blocks * size)
        self.bytes = np.frombuffer(self.pool.view, dtype=np.uint8)
        self.bytes[:] = np.random.default_rng(1).integers(256, size=len(self.bytes), dtype=np.uint8)
        worker = MemoryTransport(self.fabric, "worker", 1, self.clock)
        worker.register(self.pool.region)
        self.source: Endpoint = worker.export()
        self.arena = HostMemory("store", dram_blocks * size)
        transport = MemoryTransport(self.fabric, "store", 1, self.clock)
        transport.register(self.arena.region)
        self.index = MemoryKvIndex()
        self.holder = KvHolder(WorkerId("store"), Incarnation(1))
        slab_bytes = (slab_blocks or dram_blocks) * size
        self.dram = DramTier(dram_blocks * size, slab_bytes, policy, tenant_bytes)
        self.disk = DiskTier(folder, disk_bytes, policy, 64 * 1024) if folder else None
        self.node = StoreNode(
            self.holder.generation,
            self.arena,
            {"memory": transport},  # type: ignore[dict-item]
            "here",
            self.clock,
            self.dram,
            self.disk,
            disk_encoder,
            codecs,
        )
        self.publisher = IndexPublisher(self.holder, self.node, self.index, self.clock)

    def block(self, number: int) -> bytes:
        """Return the expected content of block ``number``."""
        return self.bytes[number * self.size : (number + 1) * self.size].tobytes()

    def ref(self, number: int, checksum_error: int = 0) -> BlockRef:
        checksum = xxhash.xxh3_64_intdigest(self.block(number)) + checksum_error
        return BlockRef(number * self.size, self.size, checksum, key_of(number))

    def request(
        self,
        numbers: Sequence[int],
        checksum_error: int = 0,
        tenant: bytes = b"",
        model: bytes = b"",
    ) -> PutRequest:
        blocks = tuple(self.ref(number, checksum_error) for number in numbers)
        return PutRequest(self.source, CHECKSUM_XXH3, blocks, tenant=tenant, model=model)

    async def put(self, *numbers: int, **options: bytes) -> tuple[int, int]:
        """Put the blocks ``numbers``; return how many were stored and how many were already
        present."""
        result = await self.node.put(self.request(numbers, **options))  # type: ignore[arg-type]
        return result.num_stored, result.num_already_present

    async def lease(
        self,
        *numbers: int,
        seconds: float = 5.0,
        max_bytes: int = UNLIMITED_BYTES,
        codecs: Set[KvCodecName] = ALL_CODECS,
    ) -> LeasedBlocks:
        keys = tuple(key_of(number) for number in numbers)
        return await self.node.lease(LeaseRequest(keys, seconds, max_bytes, frozenset(codecs)))

    async def read(self, *numbers: int) -> list[bytes]:
        """Return the bytes that a reader of the blocks ``numbers`` gets; checksums are not
        verified."""
        leased = await self.lease(*numbers)
        self.node.release(leased.lease_id)
        return [
            bytes(self.arena.view[b.offset_bytes : b.offset_bytes + b.size_bytes])
            for b in leased.blocks
        ]

    async def stored_numbers(self, *numbers: int) -> list[int]:
        """``numbers`` are numbers of blocks. Return those whose blocks the node has in any tier."""
        return [n for n in numbers if (await self.lease(n, max_bytes=0)).num_stored]

    def flip_bit(self, offset: int) -> None:
        """Flip one bit of the node's DRAM."""
        self.arena.view[offset] ^= 1

    def has_integrity(self) -> bool:
        return not self.node.stats().violation


def reserve(disk: DiskTier, record: BlockRecord) -> tuple[DiskBlock, list[BlockKey]] | None:
    """Call :meth:`DiskTier.reserve`, after creating a segment if the tier needs another one."""
    growth = disk.plan_segment(record.slot_bytes, 1)
    if growth is not None:
        growth.create_file()
        disk.add_segment(growth)
    return disk.reserve(record)
