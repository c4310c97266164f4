"""Measure KV transfers between two processes, compared with memcpy and bare NIXL.

    python -m benchmarks.transport [--rounds N]

Transfers the same bytes in blocks of 64 KiB and 2 MiB, scattered on both sides as in a fragmented
pool. Prints a table with GB/s and ratios for each transport, and JSON as the last line.
"""

import argparse
import asyncio
import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from baton.clock import SystemClock
from baton.core.kv_transfer import Endpoint
from baton.transport.base import TransferRange
from baton.transport.host_memory import HostMemory
from baton.transport.nixl import _HEADER, new_agent
from baton.transport.reads import read_ranges
from baton.transport.selection import open_transports
from testkit.machine import describe, median_seconds
from testkit.transport_peer import endpoint_from_json

SIZES = (16 << 20, 256 << 20)
BLOCKS = (64 << 10, 2 << 20)
NAMES = ("shm", "nixl", "grpc")


@contextmanager
def peer(name: str, size: int) -> Iterator[Endpoint]:
    command = [sys.executable, "-m", "testkit.transport_peer", name, str(size), "1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield endpoint_from_json(process.stdout.readline())
        finally:
            process.stdin.close()


def scattered(size: int, block: int) -> list[TransferRange]:
    chance = np.random.default_rng(1)
    count = size // block
    pairs = zip(chance.permutation(count).tolist(), chance.permutation(count).tolist(), strict=True)
    return [TransferRange(remote * block, local * block, block) for remote, local in pairs]


def plain_copy(memory: HostMemory, size: int, rounds: int) -> float:
    """Return how many seconds one memmove takes, from pages that are already mapped."""
    source = np.random.default_rng(1).integers(256, size=size, dtype=np.uint8)
    address = memory.region.address
    return median_seconds(lambda: ctypes.memmove(address, source.ctypes.data, size), rounds)


def ours(name: str, memory: HostMemory, size: int, block: int, rounds: int) -> float:
    clock = SystemClock()
    opened = open_transports(
        [name],
        owner="bench",
        generation=1,
        region=memory.region,
        clock=clock,
        listen_host="127.0.0.1",
    )
    (transport,) = opened.values()
    spans = scattered(size, block)
    with peer(name, size) as endpoint, asyncio.Runner() as loop:
        connected = transport.connect(endpoint)
        seconds = median_seconds(
            lambda: loop.run(read_ranges(transport, connected, spans, 60, clock)), rounds
        )
    transport.close()
    return seconds


def bare_nixl(memory: HostMemory, size: int, rounds: int) -> float:
    """Time a transfer of one descriptor with NIXL's own API, polled without a pause."""
    agent = new_agent("bare")
    agent.register_memory([(memory.region.address, size, 0, "")], "DRAM")
    with peer("nixl", size) as endpoint:
        address, _, _ = _HEADER.unpack_from(endpoint.metadata)
        remote = agent.add_remote_agent(endpoint.metadata[_HEADER.size :])

        def read() -> None:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs([(memory.region.address, size, 0)], "DRAM"),
                agent.get_xfer_descs([(address, size, 0)], "DRAM"),
                remote,
            )
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            assert state == "DONE", state
            agent.release_xfer_handle(handle)

        return median_seconds(read, rounds)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    print("   size     block  transport    GB/s   of a plain copy   of bare NIXL")
    rows = []
    for size in SIZES:
        memory = HostMemory("bench", size)
        copy, bare = (
            plain_copy(memory, size, options.rounds),
            bare_nixl(memory, size, options.rounds),
        )
        results = [("plain copy", size, copy), ("bare nixl", size, bare)]
        results += [
            (name, block, ours(name, memory, size, block, options.rounds))
            for name in NAMES
            for block in BLOCKS
        ]
        for name, block, seconds in results:
            row = {
                "size_bytes": size,
                "block_bytes": block,
                "transport": name,
                "gigabytes_per_second": size / seconds / 1e9,
                "of_plain_copy": copy / seconds,
                "of_bare_nixl": bare / seconds,
            }
            rows.append(row)
            print(
                f"{size >> 20:4} MiB {block >> 10:6} KiB  {name:10} {size / seconds / 1e9:6.2f} "
                f"{copy / seconds:12.2f} {bare / seconds:15.2f}",
                flush=True,
            )
    print(json.dumps({"machine": machine, "rows": rows, "rounds": options.rounds}))


if __name__ == "__main__":
    main(sys.argv[1:])
