"""Measure the store's put and get between processes, against memcpy, NIXL, disk and Mooncake.

    python -m benchmarks.kvstore [--rounds N] [--peer-python PATH]

A value consists of blocks of up to 2 MiB each, which are put and got together; the times include
checksums, leases and verification. All pages are touched beforehand, and values are copied between
addresses that are in no CPU cache. This also holds for memcpy and bare NIXL, which are the upper
bounds. If ``--peer-python`` is given (an interpreter that has the package
mooncake-transfer-engine-non-cuda), Mooncake's store is measured in the same run. Prints tables, and
JSON as the last line.
"""

import argparse
import asyncio
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import xxhash

from baton.clock import SystemClock
from baton.core.ids import BlockId, BlockKey
from baton.core.kv_transfer import CHECKSUM_XXH3, Endpoint
from baton.core.store import LeaseRequest, PutRequest
from baton.rpc.kvstore_client import KvStoreClient
from baton.system.host import host_id
from baton.transport.base import Peer, Transport
from baton.transport.host_memory import HostMemory
from baton.transport.nixl import _HEADER, new_agent
from baton.transport.selection import open_transports
from baton.worker.block_reader import BlockReader, BlockSource
from baton.worker.kv_layout import KvLayout
from benchmarks.transport import peer as transport_peer
from testkit.machine import SYSTEM_CLOCK, describe

SIZES = (4 << 10, 1 << 20, 16 << 20, 256 << 20)
BLOCK = 2 << 20
POOL = 512 << 20
ARENA = 1 << 30
CLOCK = SystemClock()


@contextmanager
def node(disk_bytes: int = 0, folder: str = "", arena: int = ARENA) -> Iterator[tuple[str, str]]:
    """Run a store node in its own process; yield its address and its Unix socket."""
    command = [sys.executable, "-m", "benchmarks.store_node", str(arena), str(disk_bytes)]
    with subprocess.Popen(
        [*command, *([folder] if folder else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            address, socket_path = process.stdout.readline().split()
            yield address, socket_path
        finally:
            process.stdin.close()


@dataclass
class StoreBenchClient:
    """The memory of one worker, and the client with which it uses the store."""

    memory: HostMemory
    transport: Transport
    peer: Peer
    calls: KvStoreClient
    numbers: "count[int]"

    def layout(self, size: int) -> KvLayout:
        """Return the KV layout of a worker whose blocks have ``size`` bytes."""
        block, view = min(size, BLOCK), self.memory.view

        def checksums(block_ids: Sequence[BlockId]) -> list[int]:
            windows = (view[b * block : (b + 1) * block] for b in block_ids)
            return [int(xxhash.xxh3_64_intdigest(window)) for window in windows]

        return KvLayout("bench", block, CHECKSUM_XXH3, checksums)

    def block_ids(self, offset: int, size: int) -> list[BlockId]:
        block = min(size, BLOCK)
        return [BlockId(start // block) for start in range(offset, offset + size, block)]

    def keys(self, number: int, size: int) -> tuple[BlockKey, ...]:
        num_blocks = max(size // BLOCK, 1)
        return tuple(
            BlockKey(number.to_bytes(8, "little") + index.to_bytes(8, "little"))
            for index in range(num_blocks)
        )

    async def put(self, number: int, offset: int, size: int) -> None:
        keys = self.keys(number, size)
        refs = await self.layout(size).block_refs(self.block_ids(offset, size), keys)
        request = PutRequest(self.transport.export(), CHECKSUM_XXH3, refs)
        result = await self.calls.put(request, 60.0)
        assert result.num_stored == len(refs), result

    async def get(self, number: int, offset: int, size: int) -> None:
        leased = await self.calls.lease(LeaseRequest(self.keys(number, size), 10.0, 1 << 40))
        layout, block_ids = self.layout(size), self.block_ids(offset, size)
        assert len(leased.blocks) == len(block_ids), (len(leased.blocks), len(block_ids))
        reader = BlockReader(layout, None, {}, CLOCK, 60.0)
        source = BlockSource(self.transport, self.peer, 60.0)
        got = await reader.read(source, leased.blocks, block_ids)
        assert not got.bad, got
        await self.calls.release(leased.lease_id)


@asynccontextmanager
async def client(name: str, address: str, socket_path: str) -> AsyncIterator[StoreBenchClient]:
    memory = HostMemory("bench", POOL)
    bytes_ = np.frombuffer(memory.view, dtype=np.uint8)
    bytes_[:] = np.random.default_rng(1).integers(256, size=POOL, dtype=np.uint8)
    opened = open_transports(
        [name],
        owner=f"bench-{name}",
        generation=1,
        region=memory.region,
        clock=CLOCK,
        listen_host="127.0.0.1",
    )
    (transport,) = opened.values()
    calls = KvStoreClient(address, None, "" if name == "grpc" else socket_path, 60.0)
    endpoint: Endpoint = await calls.open([transport.name], host_id())
    yield StoreBenchClient(memory, transport, transport.connect(endpoint), calls, count())
    await calls.close()
    transport.close()


async def put_and_get(who: StoreBenchClient, size: int, rounds: int) -> dict[str, list[float]]:
    """Time puts and gets. Each one has a different value, at different memory addresses."""
    times: dict[str, list[float]] = {"put": [], "get": []}
    places = POOL // size
    for turn in range(rounds + 2):
        number = next(who.numbers)
        began = SYSTEM_CLOCK()
        await who.put(number, (2 * turn) % places * size, size)
        middle = SYSTEM_CLOCK()
        await who.get(number, (2 * turn + 1) % places * size, size)
        ended = SYSTEM_CLOCK()
        if turn >= 2:
            times["put"].append(middle - began)
            times["get"].append(ended - middle)
    return times


def plain_copy(size: int, rounds: int) -> float:
    """Return the seconds of a memmove between addresses that are not in a cache."""
    one, two = HostMemory("one", POOL), HostMemory("two", POOL)
    one.view[:], two.view[:] = bytes(POOL), bytes(POOL)
    times = []
    for turn in range(rounds + 2):
        offset = turn % (POOL // size) * size
        began = SYSTEM_CLOCK()
        ctypes.memmove(two.region.address + offset, one.region.address + offset, size)
        times.append(SYSTEM_CLOCK() - began)
    one.close()
    two.close()
    return statistics.median(times[2:])


def bare_nixl(size: int, rounds: int) -> float:
    """Time a transfer of one descriptor with NIXL's own API, polled without a pause."""
    memory = HostMemory("bare", POOL)
    memory.view[:] = bytes(POOL)
    agent = new_agent("bare-store")
    agent.register_memory([(memory.region.address, POOL, 0, "")], "DRAM")
    times = []
    with transport_peer("nixl", POOL) as endpoint:
        address, _, _ = _HEADER.unpack_from(endpoint.metadata)
        remote = agent.add_remote_agent(endpoint.metadata[_HEADER.size :])
        for turn in range(rounds + 2):
            offset = turn % (POOL // size) * size
            began = SYSTEM_CLOCK()
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs([(memory.region.address + offset, size, 0)], "DRAM"),
                agent.get_xfer_descs([(address + offset, size, 0)], "DRAM"),
                remote,
            )
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            times.append(SYSTEM_CLOCK() - began)
            assert state == "DONE", state
            agent.release_xfer_handle(handle)
    return statistics.median(times[2:])


def disk_ceiling(folder: Path, size: int) -> dict[str, float]:
    """Time writing and reading ``size`` bytes as ``dd`` does, a MiB at a time, through the page
    cache, and reading them again after the file's pages were dropped."""
    path, block = folder / "ceiling", bytes(1 << 20)
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(file, 0, size)
    began = SYSTEM_CLOCK()
    for offset in range(0, size, len(block)):
        os.pwrite(file, block, offset)
    written = SYSTEM_CLOCK() - began
    into = bytearray(1 << 20)
    began = SYSTEM_CLOCK()
    for offset in range(0, size, len(block)):
        os.preadv(file, [into], offset)
    cached = SYSTEM_CLOCK() - began
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    began = SYSTEM_CLOCK()
    for offset in range(0, size, len(block)):
        os.preadv(file, [into], offset)
    cold = SYSTEM_CLOCK() - began
    os.close(file)
    path.unlink()
    return {"write": written, "read": cached, "read_cold": cold}


async def through_disk(size: int) -> dict[str, float]:
    """Time the demotion of a prefix of ``size`` bytes from DRAM to disk, and then a lease, which
    promotes it again. The store node's code runs in this process, so that it can be timed alone."""
    from baton.core.ids import Incarnation
    from kvstore.disk_tier import DiskTier
    from kvstore.dram_tier import DramTier
    from kvstore.node import StoreNode

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        arena = HostMemory("disk", size)
        arena.view[:] = bytes(size)
        clock = SystemClock()
        dram_tier, disk = DramTier(size), DiskTier(Path(name), 2 * size)
        store = StoreNode(Incarnation(1), arena, {}, "here", clock, dram_tier, disk)
        slots = []
        for index in range(size // BLOCK):
            slot = dram_tier.allocate(BlockKey(index.to_bytes(16, "little")), BLOCK, depth=index)
            assert slot is not None
            digest = xxhash.xxh3_64_intdigest(arena.view[slot.offset : slot.offset + BLOCK])
            dram_tier.seal(slot, digest, CHECKSUM_XXH3)
            slots.append(slot)
        dram_tier.release_references(slots)
        while (growth := disk.plan_segment(BLOCK, len(slots))) is not None:
            growth.create_file()  # preallocation is not part of a demotion
            disk.add_segment(growth)
        began = SYSTEM_CLOCK()
        assert await store.demoter.demote_all() == len(slots)
        written = SYSTEM_CLOCK() - began
        times = {"write": written}
        keys = tuple(slot.key for slot in slots)
        for name_ in ("read", "read_cold"):
            store._tiers.evict(slots)
            if name_ == "read_cold":
                for held in disk._segments.values():
                    os.fsync(held._file)
                    os.posix_fadvise(held._file, 0, 0, os.POSIX_FADV_DONTNEED)
            began = SYSTEM_CLOCK()
            leased = await store.lease(LeaseRequest(keys, 10.0, 1 << 40))
            times[name_] = SYSTEM_CLOCK() - began
            assert leased.num_promoted == len(keys), leased.num_promoted
            store.release(leased.lease_id)
            slots = [slot for key in keys if (slot := dram_tier.get(key)) is not None]
        disk.close()
        return times


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    rows = []
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)  # as the programs do
    with node() as (address, socket_path), runner as loop:

        async def run() -> None:
            async with client(name, address, socket_path) as who:
                half = POOL // 2
                for number in range(ARENA // half):  # touches every page through every mapping
                    await who.put(10**9 + number, number % 2 * half, half)
                    await who.get(10**9 + number, (number + 1) % 2 * half, half)
                for size in SIZES:
                    turns = max(rounds, 200 if size <= 1 << 20 else rounds)
                    times = await put_and_get(who, size, turns)
                    for op, seconds in times.items():
                        rows.append(
                            {
                                "way": name,
                                "op": op,
                                "size_bytes": size,
                                "seconds": statistics.median(seconds),
                                "p90_seconds": statistics.quantiles(seconds, n=10)[8],
                            }
                        )

        loop.run(run())
    return rows


def peer_rows(python: str, rounds: int) -> list[dict[str, Any]]:
    script = Path(__file__).parent / "peers" / "mooncake_store.py"
    sizes = ",".join(str(size) for size in SIZES[:3])
    stdout = subprocess.run(
        [python, str(script), "--rounds", str(rounds), "--sizes", sizes],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return [
        {
            "way": f"mooncake {row['mode']} ({row['api']})",
            "op": row["op"],
            "size_bytes": row["size_bytes"],
            "seconds": row["median_seconds"],
            "p90_seconds": row["p90_seconds"],
        }
        for row in json.loads(stdout.splitlines()[-1])["rows"]
    ]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peer-python")
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    ceilings = {
        size: (plain_copy(size, max(options.rounds, 20)), bare_nixl(size, max(options.rounds, 20)))
        for size in SIZES
    }
    rows: list[dict[str, Any]] = []
    for name in ("shm", "nixl", "grpc"):
        rows += measure(name, options.rounds)
        print(f"{name} measured", file=sys.stderr)
    if options.peer_python:
        rows += peer_rows(options.peer_python, max(options.rounds, 50))
    print(f"{'':34}{'op':5}{'bytes':>10}{'ms':>10}{'GB/s':>8}{'of copy':>9}{'of NIXL':>9}")
    for size, (copy, bare) in ceilings.items():
        for what, seconds in (("plain copy", copy), ("bare NIXL", bare)):
            _print(what, "", size, seconds, copy, bare)
        for row in rows:
            if row["size_bytes"] == size:
                row |= {"of_copy": copy / row["seconds"], "of_nixl": bare / row["seconds"]}
                _print(row["way"], row["op"], size, row["seconds"], copy, bare)
    size = 256 << 20
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        ceiling = disk_ceiling(Path(folder), size)
    disk = asyncio.run(through_disk(size))
    for op in ceiling:
        print(
            f"SSD {op:10} {size / disk[op] / 1e9:6.2f} GB/s, as dd "
            f"{size / ceiling[op] / 1e9:6.2f}, ratio {ceiling[op] / disk[op]:.2f}"
        )
    ceil = {str(size): {"copy": c, "nixl": n} for size, (c, n) in ceilings.items()}
    result = {"machine": machine, "ceilings": ceil, "rows": rows, "disk": disk, "dd": ceiling}
    print(json.dumps(result))


def _print(what: str, op: str, size: int, seconds: float, copy: float, bare: float) -> None:
    print(
        f"{what:34}{op:5}{size:10}{seconds * 1e3:10.3f}{size / seconds / 1e9:8.2f}"
        f"{copy / seconds:9.2f}{bare / seconds:9.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
