"""A store node with a worker's memory beside it, over the in-memory transport."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from baton.clock import Clock, ManualClock
from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef, Endpoint
from baton.core.store import LeasedBlocks, LeaseRequest, PutRequest
from baton.kv.index import KvHolder
from baton.kv.memory_index import MemoryKvIndex
from baton.transport.host_memory import HostMemory
from baton.transport.memory import MemoryFabric, MemoryTransport
from kvstore.disk_tier import DiskBlock, DiskTier
from kvstore.dram_tier import DramTier
from kvstore.index_publisher import IndexPublisher
from kvstore.node import StoreNode
from kvstore.segment import BlockRecord

SIZE = 64
NUM_BLOCKS = 16
KEYS = [BlockKey(bytes([number]) * 16) for number in range(NUM_BLOCKS)]
ALL = 1 << 40


class House:
    """``room`` blocks of SIZE bytes in the node's DRAM, and ``disk_bytes`` on its disk. Block n of
    the worker's memory goes by KEYS[n]."""

    def __init__(
        self,
        room: int = 4,
        folder: Path | None = None,
        disk_bytes: int = 256 * 1024,
        policy: str = "lru",
        tenant_bytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.fabric = MemoryFabric()
        self.clock = clock or ManualClock()
        self.pool = HostMemory("worker", NUM_BLOCKS * SIZE)
        self.bytes = np.frombuffer(self.pool.view, dtype=np.uint8)
        self.bytes[:] = np.random.default_rng(1).integers(256, size=len(self.bytes), dtype=np.uint8)
        worker = MemoryTransport(self.fabric, "worker", 1, self.clock)
        worker.register(self.pool.region)
        self.source: Endpoint = worker.export()
        self.arena = HostMemory("store", room * SIZE)
        transport = MemoryTransport(self.fabric, "store", 1, self.clock)
        transport.register(self.arena.region)
        self.index = MemoryKvIndex()
        self.holder = KvHolder(WorkerId("store"), Incarnation(1))
        self.shelf = DramTier(room * SIZE, room * SIZE, policy, tenant_bytes)
        self.disk = DiskTier(folder, disk_bytes, policy, 64 * 1024) if folder else None
        self.node = StoreNode(
            self.holder.generation,
            self.arena,
            {"memory": transport},  # type: ignore[dict-item]
            "here",
            self.clock,
            self.shelf,
            self.disk,
        )
        self.publisher = IndexPublisher(self.holder, self.node, self.index, self.clock)

    def block(self, number: int) -> bytes:
        """What block ``number`` must be."""
        return self.bytes[number * SIZE : (number + 1) * SIZE].tobytes()

    def ref(self, number: int, wrong: int = 0) -> BlockRef:
        checksum = xxhash.xxh3_64_intdigest(self.block(number)) + wrong
        return BlockRef(number * SIZE, SIZE, checksum, KEYS[number])

    def request(
        self, numbers: Sequence[int], wrong: int = 0, tenant: bytes = b"", model: bytes = b""
    ) -> PutRequest:
        blocks = tuple(self.ref(number, wrong) for number in numbers)
        return PutRequest(self.source, CHECKSUM_XXH3, blocks, tenant=tenant, model=model)

    async def put(self, *numbers: int, **options: bytes) -> tuple[int, int]:
        """(stored, already present)."""
        result = await self.node.put(self.request(numbers, **options))  # type: ignore[arg-type]
        return result.stored, result.already_present

    async def lease(
        self, *numbers: int, seconds: float = 5.0, max_bytes: int = ALL
    ) -> LeasedBlocks:
        keys = tuple(KEYS[number] for number in numbers)
        return await self.node.lease(LeaseRequest(keys, seconds, max_bytes))

    async def read(self, *numbers: int) -> list[bytes]:
        """What a reader of these gets, who checks nothing."""
        leased = await self.lease(*numbers)
        self.node.release(leased.lease_id)
        return [
            bytes(self.arena.view[b.offset_bytes : b.offset_bytes + b.size_bytes])
            for b in leased.blocks
        ]

    async def held(self, *numbers: int) -> list[int]:
        """Of these, the ones that the node has in whatever tier."""
        return [n for n in numbers if (await self.lease(n, max_bytes=0)).num_held]

    def flip(self, offset: int) -> None:
        """One bit of the arena."""
        self.arena.view[offset] ^= 1

    def sound(self) -> bool:
        return not self.node.stats().violation


def reserve(disk: DiskTier, record: BlockRecord) -> tuple[DiskBlock, list[BlockKey]] | None:
    """As :meth:`DiskTier.reserve`, after the segment that it lacks was made."""
    growth = disk.growth_for(record.size_bytes, 1)
    if growth is not None:
        growth.make()
        disk.adopt(growth)
    return disk.reserve(record)
