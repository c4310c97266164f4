"""Put a million blocks into a small arena: resident memory must not grow, and no slab may get lost.

    python -m tools.store_soak [--puts N] [--disk]

The blocks have three sizes and belong to five tenants; some are leased for a moment. Prints the
resident memory from time to time. Exits with 1 if it grows after the first fifth of the puts, or if
the store's accounting is inconsistent.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import xxhash

from baton.clock import SystemClock
from baton.core.ids import BlockKey, Incarnation
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef
from baton.core.store import LeaseRequest, PutRequest
from baton.transport.host_memory import HostMemory
from baton.transport.memory import MemoryFabric, MemoryTransport
from kvstore.disk_tier import DiskTier
from kvstore.dram_tier import DramTier
from kvstore.node import StoreNode

ARENA, SLAB = 4 << 20, 256 << 10
SIZES = (4 << 10, 16 << 10, 48 << 10)
ALLOWED_GROWTH = 4 << 20
"""The growth in bytes that is attributed to the memory allocator."""


def build(folder: Path | None) -> tuple[StoreNode, HostMemory, MemoryTransport]:
    clock, fabric = SystemClock(), MemoryFabric()
    pool, arena = HostMemory("pool", 1 << 20), HostMemory("arena", ARENA)
    np.frombuffer(pool.view, dtype=np.uint8)[:] = np.random.default_rng(1).integers(
        256, size=1 << 20, dtype=np.uint8
    )
    worker = MemoryTransport(fabric, "worker", 1, clock)
    worker.register(pool.region)
    transport = MemoryTransport(fabric, "store", 1, clock)
    transport.register(arena.region)
    disk = DiskTier(folder, 16 << 20, segment_bytes=1 << 20) if folder else None
    dram_tier = DramTier(ARENA, SLAB, tenant_bytes=ARENA // 2)
    transports = {"memory": transport}
    node = StoreNode(Incarnation(1), arena, transports, "here", clock, dram_tier, disk)  # type: ignore[arg-type]
    return node, pool, worker


async def soak(num_puts: int, folder: Path | None) -> int:
    node, pool, worker = build(folder)
    random = np.random.default_rng(2)
    checksums = {size: xxhash.xxh3_64_intdigest(pool.view[:size]) for size in SIZES}
    source, process = worker.export(), psutil.Process()
    demoting = asyncio.create_task(node.demoter.run())
    base, grown = 0, 0
    for number in range(num_puts):
        key = BlockKey(number.to_bytes(16, "little"))
        size = SIZES[0] if number % 50 else SIZES[int(random.integers(3))]
        block = BlockRef(0, size, checksums[size], key)
        tenant = bytes([number % 5])
        await node.put(PutRequest(source, CHECKSUM_XXH3, (block,), tenant=tenant))
        if folder is not None:
            await asyncio.sleep(0)  # lets the demotion task run
        if number % 10 == 0:
            leased = await node.lease(LeaseRequest((key,), 5.0, 1 << 30))
            node.release(leased.lease_id)
        if (number + 1) % max(num_puts // 10, 1) == 0:
            resident = process.memory_info().rss
            base = base or (resident if number + 1 >= num_puts // 5 else 0)
            grown = resident - base if base else 0
            print(f"{number + 1:>9,} puts: {resident / 2**20:7.1f} MiB resident", flush=True)
    demoting.cancel()
    stats = node.stats()
    print(
        f"{stats.put_blocks:,} stored, {stats.evictions:,} evicted, "
        f"{stats.quota_evictions:,} by quota, {stats.demotions:,} demoted, "
        f"{stats.disk_evictions:,} evicted from the SSD; integrity: {stats.violation or 'sound'}; "
        f"grown by {grown / 2**20:.1f} MiB"
    )
    return int(bool(stats.violation) or grown > ALLOWED_GROWTH)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--puts", type=int, default=1_000_000)
    parser.add_argument("--disk", action="store_true", help="add an SSD tier of 16 MiB")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(soak(options.puts, Path(folder) if options.disk else None))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
