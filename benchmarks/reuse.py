"""Measure the TTFT with a cached prefix, by tier, against a cold run and the ideal.

    python -m benchmarks.reuse [--tokens N] [--rounds N]

Runs a worker's engine and store client with the demo model in this process, and a store node in
another. The prefix is in the worker's own pool (device), in the store of the host, read over shared
memory (DRAM), in the same store after a restart of the node (SSD), or in a store that is reached
over NIXL or gRPC as if it were on another host (peer). The ideal is the uncached share of the cold
time plus a plain copy of the cached bytes. Prints JSON as the last line.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

from baton.clock import SystemClock
from baton.config import DEMO_MODEL, set_thread_environment
from baton.core.block_key import block_keys
from baton.core.ids import Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.member import Member
from baton.core.request import RequestSpec, SamplingParams
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.kv.cluster_store_client import ClusterStoreClient
from baton.registry.membership import Membership
from baton.rpc.kvstore_client import KvStoreClient
from baton.system.host import host_id
from baton.transport.base import Region
from baton.transport.selection import TRANSPORT_PREFERENCE, open_transports
from benchmarks.kvstore import node, plain_copy
from testkit.fakes.kv_index import MemoryKvIndex
from testkit.fakes.registry import MemoryRegistry
from testkit.machine import SYSTEM_CLOCK, describe

set_thread_environment(0)

from baton.engine.checksum import block_checksums, checksum_algorithm  # noqa: E402
from baton.engine.config import EngineConfig  # noqa: E402
from baton.engine.engine import Engine  # noqa: E402
from baton.engine.result import StepResult  # noqa: E402
from baton.engine.runner import ModelRunner  # noqa: E402
from baton.engine.runner_options import RunnerOptions  # noqa: E402
from baton.worker.engine_thread import EngineThread  # noqa: E402
from baton.worker.kv_layout import KvLayout  # noqa: E402
from prefill_worker.cluster_prefix_store import ClusterPrefixStore  # noqa: E402
from prefill_worker.prefix_fetch import PrefixFetch  # noqa: E402
from prefill_worker.reload_policy import ReloadMode  # noqa: E402
from prefill_worker.store_publisher import StorePublisher  # noqa: E402

SHARES = (0.0, 0.5, 0.9, 1.0)
TIERS = ("device", "dram", "ssd", "peer nixl", "peer grpc")
CLOCK = SystemClock()
BLOCK_TOKENS = 16


class ReuseBench:
    """A model with its KV pool, and the transports with which blocks are moved between the pool and
    stores."""

    def __init__(self, num_tokens: int, model: Path = DEMO_MODEL, chunk: int = 512) -> None:
        self.num_tokens = num_tokens
        self.runner = ModelRunner.load(
            model,
            RunnerOptions(
                device="cpu",
                dtype="float32",
                num_blocks=4 * num_tokens // BLOCK_TOKENS,
                pool_bytes=None,
                block_tokens=BLOCK_TOKENS,
            ),
            progress=None,
        )
        pool = self.runner.pool
        region = Region(pool.address, pool.size_bytes, pool.device, pool.file_descriptor)
        self.transports = open_transports(
            (), owner="bench", generation=1, region=region, clock=CLOCK, listen_host="127.0.0.1",
            nixl_interfaces=("lo",),
        )  # fmt: skip
        self.layout = KvLayout(
            self.runner.kv_layout,
            pool.block_bytes,
            checksum_algorithm(pool),
            partial(block_checksums, pool),
        )
        self.config = EngineConfig(
            block_tokens=BLOCK_TOKENS,
            max_model_tokens=2 * num_tokens,
            max_batched_tokens=chunk,
            window_tokens=self.runner.limits.kv_window_tokens,
            num_full_groups=self.runner.limits.num_full_groups,
            num_windowed_groups=self.runner.limits.num_windowed_groups,
        )
        self.numbers = iter(range(1, 10**9))

    def spec(self, prefix: int, share: float) -> RequestSpec:
        """Return a request. Its prompt has ``num_tokens`` tokens; the first ``share`` (0 to 1) of
        them depend only on the number ``prefix``, the others are new."""
        vocabulary = self.runner.model_config.vocab_size
        number = next(self.numbers)
        head = np.random.default_rng(prefix).integers(vocabulary, size=self.num_tokens)
        shared = int(share * self.num_tokens)
        own = np.random.default_rng(10**6 + number).integers(vocabulary, size=self.num_tokens)
        ids = [*head[:shared].tolist(), *own[shared:].tolist()]
        tokens = tuple(TokenId(token) for token in ids)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        return RequestSpec(RequestId(f"r{number}"), Epoch(1), tokens, len(tokens), sampling)

    @asynccontextmanager
    async def worker(
        self, address: str, socket_path: str, over: str, prefer: ReloadMode | None = None
    ) -> AsyncIterator["ReuseWorker"]:
        """Start a worker with an empty device cache. It uses the store at ``address`` over the
        transport ``over``; an empty address means that it has no store."""
        registry = MemoryRegistry(CLOCK)
        store = Member(
            WorkerId("bench-store"), Role.KVSTORE, address, Incarnation(1), WorkerState.READY,
            host=host_id() if over == "shm" else "elsewhere", transports=TRANSPORT_PREFERENCE,
            local_socket=socket_path,
        )  # fmt: skip
        if address:
            await registry.announce(store, 3600.0)
        membership = Membership(registry, CLOCK)
        await membership.refresh()
        worker = ReuseWorker(self, membership, over, prefer)
        running = asyncio.create_task(worker.store.run())
        worker.thread.start()
        try:
            yield worker
        finally:
            running.cancel()
            await worker.thread.stop()
            await worker.client.close()


class ReuseWorker:
    def __init__(
        self, bench: ReuseBench, membership: Membership, over: str, prefer: ReloadMode | None = None
    ) -> None:
        runner = bench.runner
        self.engine = Engine(
            runner, bench.config, model_digest=runner.model_digest, kv_dtype=runner.kv_dtype,
            eos_token_ids=frozenset(), clock=CLOCK,
        )  # fmt: skip
        self.thread = EngineThread(self.engine, self.on_step, lambda error: None)
        transports = {over: bench.transports[over]}

        def connect(member: Member) -> KvStoreClient:
            return KvStoreClient(
                member.address, None, member.local_socket if over == "shm" else "", 5.0
            )

        host = host_id() if over == "shm" else "here"
        self.client = ClusterStoreClient(
            membership, MemoryKvIndex(), transports, connect, host, CLOCK, 5.0
        )
        self.store = ClusterPrefixStore(
            self.thread,
            self.client,
            StorePublisher(self.thread, self.client, bench.layout, b""),
            bench.layout,
            bench.config,
            CLOCK,
            5.0,
            prefer,
        )
        self.first_token = asyncio.Event()
        self.finished = asyncio.Event()
        self.tokens: list[int] = []
        self.cached = 0
        self.prefix_fetch = PrefixFetch(RequestId(""))

    def on_step(self, result: StepResult) -> None:
        self.store.record_step(result)
        for output in result.outputs:
            if not self.tokens:
                self.cached = output.cached_tokens
            self.tokens += output.token_ids
            self.first_token.set()
            if output.finish_reason is not None:
                self.finished.set()

    async def answer(self, spec: RequestSpec) -> list[int]:
        """Generate the whole answer to a request; return its tokens."""
        await self.ttft(spec)
        await self.finished.wait()
        return self.tokens

    async def ttft(self, spec: RequestSpec) -> float:
        self.first_token.clear()
        self.finished.clear()
        self.tokens = []
        began = SYSTEM_CLOCK()
        chain = self.engine.key_hasher.make_chain(spec)
        self.prefix_fetch = prefix_fetch = await self.store.find_prefix(spec, chain.keys)
        cached = await self.thread.call(lambda engine: engine.count_cached_blocks(chain.keys))
        if prefix_fetch.num_stored_blocks > cached:
            await self.store.fetch_prefix(prefix_fetch, cached)
        await self.thread.call(
            lambda engine: engine.add(spec, Task.PREFILL_AND_DECODE, chain=chain)
        )
        self.store.start_split_fetch(prefix_fetch)
        await self.first_token.wait()
        return SYSTEM_CLOCK() - began

    async def stored(self, token_ids: Sequence[TokenId]) -> None:
        """Wait until the store has all full blocks of these tokens."""
        keys = block_keys(self.engine.key_root(b""), token_ids, BLOCK_TOKENS)
        while await self.client.count_stored_at_put_target(keys) < len(keys):
            await CLOCK.sleep(0.01)


async def measure(bench: ReuseBench, tier: str, share: float, rounds: int) -> tuple[float, int]:
    """Return the median TTFT in seconds, and the cached tokens of the last request."""
    over = {"peer nixl": "nixl", "peer grpc": "grpc"}.get(tier, "shm")
    times, cached = [], 0
    with tempfile.TemporaryDirectory() as folder:
        disk = 1 << 30 if tier == "ssd" else 0
        prefix = 1 + int(share * 10)
        with node(disk, folder, 256 << 20) as (address, socket_path):
            async with bench.worker(address, socket_path, "shm") as worker:
                first = bench.spec(prefix, 1.0)
                await worker.ttft(first)
                await worker.stored(first.token_ids)
                for _ in range(rounds if tier == "device" else 0):
                    times.append(await worker.ttft(bench.spec(prefix, share)))
                    cached = worker.cached
            for _ in range(rounds if tier in ("dram", "peer nixl", "peer grpc") else 0):
                async with bench.worker(address, socket_path, over) as worker:
                    await worker.ttft(bench.spec(99, 0.0))  # connects, and warms up
                    times.append(await worker.ttft(bench.spec(prefix, share)))
                    cached = worker.cached
        for _ in range(rounds if tier == "ssd" else 0):
            with node(disk, folder, 256 << 20) as (address, socket_path):
                async with bench.worker(address, socket_path, over) as worker:
                    await worker.ttft(bench.spec(99, 0.0))
                    times.append(await worker.ttft(bench.spec(prefix, share)))
                    cached = worker.cached
    return statistics.median(times), cached


async def run(options: argparse.Namespace) -> None:
    machine = describe()
    print(machine)
    bench = ReuseBench(options.tokens)
    size = options.tokens // BLOCK_TOKENS * bench.runner.pool.block_bytes
    copy = plain_copy(size, 9)
    cold, _ = await measure(bench, "device", 0.0, options.rounds)
    print(f"{options.tokens} tokens, {size / 1e6:.1f} MB of KV; cold {cold * 1e3:.1f} ms")
    print(f"{'tier':12}{'share':>7}{'cached':>8}{'ms':>10}{'of cold':>9}{'ideal ms':>10}")
    rows = []
    for tier in TIERS:
        for share in SHARES[1:]:
            seconds, cached = await measure(bench, tier, share, options.rounds)
            part = cached / options.tokens
            ideal = (1 - part) * cold + (0 if tier == "device" else part * copy)
            row = {"tier": tier, "share": share, "cached": cached, "seconds": seconds}
            rows.append(row | {"ideal_seconds": ideal})
            print(
                f"{tier:12}{share:7.0%}{cached:8}{seconds * 1e3:10.1f}{seconds / cold:9.3f}"
                f"{ideal * 1e3:10.1f}",
                flush=True,
            )
    print(json.dumps({"machine": machine, "cold_seconds": cold, "rows": rows}))
    for transport in bench.transports.values():
        transport.close()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(parser.parse_args(arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
