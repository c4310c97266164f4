"""Measure the conductor's placement time by number of workers and prompt length.

    python -m benchmarks.placement [--blocks 1000000] [--rounds 500] [--workers 8 64 1024]

Half of the workers are prefill and half decode workers, eight per host, and each host has a store;
the conductor knows of ``--blocks`` stored blocks. Prompts begin with a stored prefix, or have none.
Prints a table of wall times and of processor times, which matter beside other load, and JSON as the
last line.
"""

import argparse
import asyncio
import json
import statistics
import sys
from typing import Any

import numpy as np

from baton.clock import SystemClock
from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TenantId, WorkerId
from baton.core.member import Member
from baton.core.placement import PlacementQuery
from baton.core.states import Role, WorkerState
from baton.core.store import Tier, WatchEvent
from baton.core.worker_load import QueuedWork, WorkerLoad
from baton.registry.membership import Membership
from conductor.conductor import Conductor, ConductorConfig
from conductor.store_mirror import StoreMirror
from testkit.fakes.registry import MemoryRegistry
from testkit.machine import PROCESSOR_CLOCK, SYSTEM_CLOCK, describe

WORKERS = (8, 64, 1024)
PROMPTS = (1_000, 12_000, 128_000)
BLOCK_TOKENS = 16
PER_HOST = 8
CHAIN = 8192
CLOCK = SystemClock()


def chain(generator: np.random.Generator, num_blocks: int) -> tuple[BlockKey, ...]:
    raw = generator.integers(256, size=(num_blocks, 16), dtype=np.uint8).tobytes()
    return tuple(BlockKey(raw[start : start + 16]) for start in range(0, len(raw), 16))


def member(number: int, role: Role, host: str, generator: np.random.Generator) -> Member:
    waiting = generator.uniform(0.05, 1.0, size=4).tolist()
    load = WorkerLoad(
        queued_tokens=20_000,
        num_blocks=20_000,
        at_seconds=CLOCK.wall_nanoseconds() / 1e9,
        queue=tuple(QueuedWork(2.0 + seconds, seconds) for seconds in waiting),
        prefill_cost=PrefillCost(0.006, 3e-5, 1.2e-9),
        decode_requests=20,
        context_tokens=100_000,
        promised_tokens=int(generator.integers(60_000, 160_000)),
        decode_cost=DecodeCost(0.006, 3e-5, 6e-8),
        answer_tokens=340.0,
        short_answer_tokens=24.0,
        link_bytes_per_second=50e9,
    )
    return Member(
        WorkerId(f"{role.value}-{number}"),
        role,
        f"10.0.0.1:{number}",
        Incarnation(1),
        WorkerState.READY,
        host=host,
        block_tokens=BLOCK_TOKENS,
        load=load,
    )


async def conductor_with(
    num_workers: int, num_blocks: int
) -> tuple[Conductor, list[tuple[BlockKey, ...]]]:
    """Set up a conductor with a view of a cluster. Return the conductor, and some of the chains of
    block keys that stores have."""
    generator = np.random.default_rng(1)
    registry, mirror = MemoryRegistry(CLOCK), StoreMirror()
    membership = Membership(registry, CLOCK)
    hosts = max(num_workers // PER_HOST, 1)
    for number in range(num_workers):
        role = Role.PREFILL if number % 2 == 0 else Role.DECODE
        host = f"host-{number % hosts}"
        await registry.announce(member(number, role, host, generator), 1e6)
    kept = []
    for host_number in range(hosts):
        store = member(host_number, Role.KVSTORE, f"host-{host_number}", generator)
        await registry.announce(store, 1e6)
        for page in range(max(num_blocks // hosts // CHAIN, 1)):
            held = chain(generator, CHAIN)
            event = WatchEvent(Incarnation(1), page, Tier.DRAM, held, is_reset=page == 0)
            assert mirror.apply(store.id, event)
            kept.append(held)
    await membership.refresh()
    return Conductor(membership, mirror, CLOCK, ConductorConfig(admission=True)), kept


async def measure(num_workers: int, num_blocks: int, rounds: int) -> list[dict[str, Any]]:
    conductor, kept = await conductor_with(num_workers, num_blocks)
    generator = np.random.default_rng(2)
    rows = []
    for num_tokens in PROMPTS:
        num_keys = num_tokens // BLOCK_TOKENS
        times, processor_times = [], []
        for number in range(rounds + 20):
            head = kept[int(generator.integers(len(kept)))][: num_keys // 2]
            keys = (*(head if number % 2 else ()), *chain(generator, num_keys))[:num_keys]
            name = RequestId(f"{num_tokens}-{number}")
            epoch = Epoch(2)  # so that no request is rejected
            query = PlacementQuery(
                name, epoch, TenantId(""), num_tokens, 512, keys, frozenset(), model=""
            )
            began, processor_began = SYSTEM_CLOCK(), PROCESSOR_CLOCK()
            conductor.place(query)
            processor_times.append(PROCESSOR_CLOCK() - processor_began)
            times.append(SYSTEM_CLOCK() - began)
        times, processor_times = sorted(times[20:]), sorted(processor_times[20:])
        rows.append(
            {
                "workers": num_workers,
                "prompt_tokens": num_tokens,
                "p50_seconds": statistics.median(times),
                "p99_seconds": times[int(0.99 * (len(times) - 1))],
                "p50_processor_seconds": statistics.median(processor_times),
                "p99_processor_seconds": processor_times[int(0.99 * (len(times) - 1))],
                "decisions_per_second": 1 / statistics.fmean(times),
            }
        )
    return rows


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    rows = []
    for workers in options.workers:
        for row in asyncio.run(measure(workers, options.blocks, options.rounds)):
            rows.append(row)
            print(
                f"{row['workers']:5} workers, {row['prompt_tokens']:7,} tokens: "
                f"p50 {row['p50_seconds'] * 1e3:6.3f} ms, p99 {row['p99_seconds'] * 1e3:6.3f} ms, "
                f"processor time p50 {row['p50_processor_seconds'] * 1e3:6.3f} ms, "
                f"p99 {row['p99_processor_seconds'] * 1e3:6.3f} ms, "
                f"{row['decisions_per_second']:7.0f} decisions a second",
                flush=True,
            )
    print(json.dumps({"machine": machine, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
