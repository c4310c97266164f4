"""Measure what 10,000 idle connections or streams cost a router, and how they affect a busy stream.

    python -m benchmarks.idle_streams [--streams N] [--seconds S] [--gap G]

There are three processes: the router (from its HTTP server to the generations, with in-memory
workers), the client of the idle connections, and the client of one busy stream, which gets a token
every ``gap`` seconds. An idle stream has received its first token and waits for the next one.
Memory is the router process's resident memory, including the in-memory workers, without the
kernel's socket buffers. The busy stream is measured alone, with idle connections, with idle
streams, and alone again.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import psutil
import uvloop

from baton.checkpoint import load_model_config
from baton.clock import SystemClock
from baton.config import DEMO_MODEL
from baton.core.ids import Incarnation, TokenId, WorkerId
from baton.core.member import Member
from baton.core.request import RequestSpec
from baton.core.states import Role, WorkerState
from baton.hub import resolve_model
from baton.text.tokenizer import Tokenizer
from benchmarks.machine import SYSTEM_CLOCK, describe
from router.app import build_app
from router.generation.attempt import TokenTimeouts
from router.generation.cluster import Cluster
from router.generation.fakes import FakeWorker, MemoryPlacer, MemoryWorkerConnections
from router.generation.generation_context import FailoverConfig, GenerationContext
from router.http.connection_limits import ConnectionLimits
from router.http.listeners import RESERVED_OPEN_FILES, raise_open_file_limit
from router.http.server import HttpServer, open_listener
from router.openai.context import RouterConfig, RouterContext
from router.openai.served_model import ServedModel
from router.program import tune_garbage_collector
from router.tenants.authentication import Authenticator

WARM_UP_TOKENS = 100
SETTLE_SECONDS = 2.0
BUSY, IDLE = "busy", "idle"
HOLD_SECONDS = 3600.0
AT_ONCE = 200


# -- the router -----------------------------------------------------------------------------


class StaticMembers:
    database_id = "1"

    async def members(self) -> list[Member]:
        return [
            Member(
                WorkerId("d0"), Role.DECODE, "d0:1", Incarnation(1), WorkerState.READY,
                model_digest="ab", block_tokens=16, kv_dtype="f32", max_model_tokens=32_768,
            )
        ]  # fmt: skip


def next_token(known: Sequence[TokenId], spec: RequestSpec) -> TokenId:
    return TokenId(100 + len(known) % 50)


async def serve(gap: float, num_streams: int) -> None:
    worker = FakeWorker("d0", next_token, automatic=False)
    service = build_service(worker, num_streams)
    await service.cluster.refresh()
    limits = ConnectionLimits(
        max_connections=num_streams + 100,
        keep_alive_timeout_seconds=HOLD_SECONDS,
        header_timeout_seconds=60.0,
    )
    server = HttpServer(build_app(service), SystemClock(), limits)
    listener = open_listener("127.0.0.1", 0)
    server.listen(listener)
    pauses = record_gc_pauses()
    tune_garbage_collector()
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    asyncio.get_running_loop().add_reader(sys.stdin, report_memory, worker, pauses)
    await step(worker, gap)


def report_memory(worker: FakeWorker, pauses: list[float]) -> None:
    if not sys.stdin.readline():
        sys.exit()
    longest = max(pauses, default=0.0)
    print(json.dumps({"jobs": len(worker.jobs), "longest_gc": longest}), flush=True)
    pauses.clear()


async def step(worker: FakeWorker, gap: float) -> None:
    """Every ``gap`` seconds, send a token to each stream that the busy client requested. Each other
    stream gets a single token."""
    loop = asyncio.get_running_loop()
    at = loop.time()
    while True:
        at = max(at + gap, loop.time())
        await asyncio.sleep(at - loop.time())
        fresh, worker.submitted = worker.submitted, []
        for job in fresh:
            if not job.spec.sampling.ignore_eos and not job.is_ended:
                worker._step(job)
        for job in [job for job in busy_jobs(worker, fresh) if not job.is_ended]:
            worker._step(job)


KNOWN_BUSY: list[Any] = []


def busy_jobs(worker: FakeWorker, fresh: Sequence[Any]) -> list[Any]:
    """Add the busy streams among ``fresh`` to KNOWN_BUSY, and return all busy streams that have not
    ended. Searching the worker's jobs instead would visit all idle streams for each token."""
    KNOWN_BUSY.extend(job for job in fresh if job.spec.sampling.ignore_eos)
    KNOWN_BUSY[:] = [job for job in KNOWN_BUSY if not job.is_ended]
    return list(KNOWN_BUSY)


def record_gc_pauses() -> list[float]:
    """Return a list to which the duration in seconds of each pause by the garbage collector is
    appended from now on."""
    pauses: list[float] = []
    began = [0.0]

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began[0] = SYSTEM_CLOCK()
        else:
            pauses.append(SYSTEM_CLOCK() - began[0])

    gc.callbacks.append(note)
    return pauses


def build_service(worker: FakeWorker, num_streams: int) -> RouterContext:
    folder = resolve_model(str(DEMO_MODEL))
    clock = SystemClock()
    deadlines = TokenTimeouts(HOLD_SECONDS, HOLD_SECONDS, HOLD_SECONDS)
    placer, links = MemoryPlacer([], [worker]), MemoryWorkerConnections(worker)
    placer.queries = DiscardingList()
    cluster = Cluster(StaticMembers(), clock)
    model = ServedModel.build(
        Tokenizer.load(folder, clock),
        cluster.workers_of("demo", 32_768),
        GenerationContext(placer, links, clock, FailoverConfig(timeouts=deadlines)),
        vocab_size=load_model_config(folder).vocab_size,
    )
    return RouterContext.build(
        config=RouterConfig(max_concurrent_requests=num_streams + 100),
        cluster=cluster,
        models=[model],
        authenticator=Authenticator({}, None),
        clock=clock,
    )


class DiscardingList(list[Any]):
    """A list that stays empty. Otherwise, the in-memory worker would record all requests, which
    would count as the router's memory."""

    def append(self, item: Any) -> None:
        return None


# -- idle connections -----------------------------------------------------------------------


def request(stream: str) -> bytes:
    body = json.dumps(
        {"prompt": [5] * 64, "max_tokens": 30_000, "stream": True, "ignore_eos": stream == BUSY}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


class IdleConnection(asyncio.Protocol):
    """A connection to the router. ``arrived`` is set when data is received."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if not self.arrived.done():
            self.arrived.set_result(None)

    async def ask(self, data: bytes) -> None:
        self.arrived = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        await self.arrived


async def run_idle_client(port: int, num: int) -> None:
    """Open ``num`` connections, then start a stream on each, then close them all. Before each of
    these three actions, wait for a line on stdin; after it, print a line."""
    loop = asyncio.get_running_loop()
    idlers: list[IdleConnection] = []

    async def connect() -> None:
        _, idler = await loop.create_connection(IdleConnection, "127.0.0.1", port)
        await idler.ask(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        idlers.append(idler)

    async def next_line() -> str:
        return await asyncio.to_thread(sys.stdin.readline)

    await next_line()
    for start in range(0, num, AT_ONCE):
        await asyncio.gather(*(connect() for _ in range(min(AT_ONCE, num - start))))
    print("connected", flush=True)
    await next_line()
    for start in range(0, num, AT_ONCE):
        batch = idlers[start : start + AT_ONCE]
        await asyncio.gather(*(idler.ask(request(IDLE)) for idler in batch))
    print("streaming", flush=True)
    await next_line()
    for idler in idlers:
        idler.transport.abort()
    print("gone", flush=True)


# -- the measurement ------------------------------------------------------------------------


async def busy_gaps(port: int, seconds: float, gap: float) -> list[float]:
    """Return the inter-token latencies of the busy stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(BUSY))
    times = []
    for _ in range(WARM_UP_TOKENS + int(seconds / gap)):
        await reader.readuntil(b"\n\n")
        times.append(SYSTEM_CLOCK())
    writer.close()
    times = times[WARM_UP_TOKENS:]
    return [later - earlier for earlier, later in pairwise(times)]


def summary(gaps: list[float]) -> dict[str, float]:
    gaps = sorted(gaps)
    at = {
        f"p{share:g}": gaps[min(int(len(gaps) * share / 100), len(gaps) - 1)] for share in (50, 99)
    }
    return {name: round(1000 * value, 3) for name, value in at.items()} | {
        "mean": round(1000 * fmean(gaps), 3),
        "max": round(1000 * gaps[-1], 3),
    }


class RoleProcess:
    """A process that runs this module and is controlled by lines on stdin and stdout."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, *arguments: str) -> "RoleProcess":
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.idle_streams", *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        return cls(process)

    async def next_line(self) -> str:
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode()

    async def ask(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return await self.next_line()

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


async def measure(num: int, seconds: float, gap: float) -> dict[str, Any]:
    router = await RoleProcess.start("--role", "router", "--gap", str(gap), "--streams", str(num))
    port = json.loads(await router.next_line())["port"]
    holder = await RoleProcess.start("--role", "holder", "--port", str(port), "--streams", str(num))
    results: dict[str, Any] = {}
    memory: dict[str, int] = {}

    async def look(name: str) -> None:
        await asyncio.sleep(SETTLE_SECONDS)
        memory[name] = router.resident_bytes()
        await router.ask()
        gaps = summary(await busy_gaps(port, seconds, gap))
        report = json.loads(await router.ask())
        results[name] = {
            "itl_ms": gaps,
            "resident_mb": round(memory[name] / 2**20, 1),
            "streams": report["jobs"],
            "longest_gc_ms": round(1000 * report["longest_gc"], 2),
        }
        print(f"{name:20} {json.dumps(results[name])}")

    try:
        await look("alone")
        assert await holder.ask() == "connected\n"
        await look("idle_connections")
        assert await holder.ask() == "streaming\n"
        await look("idle_streams")
        assert await holder.ask() == "gone\n"
        await look("alone_again")
    finally:
        for child in (holder, router):
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
            await child.process.wait()
    alone = min(results[name]["itl_ms"]["p99"] for name in ("alone", "alone_again"))
    return {
        "benchmark": "idle_streams",
        "streams": num,
        "gap_ms": 1000 * gap,
        "phases": results,
        "bytes_per_connection": (memory["idle_connections"] - memory["alone"]) // num,
        "bytes_per_stream": (memory["idle_streams"] - memory["alone"]) // num,
        "p99_beside_streams": round(results["idle_streams"]["itl_ms"]["p99"] / alone, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Idle connections and streams.")
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each busy stream")
    parser.add_argument("--gap", type=float, default=0.02, help="seconds between its tokens")
    parser.add_argument("--role", choices=("all", "router", "holder"), default="all")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    limit = raise_open_file_limit()
    num = min(options.streams, limit - RESERVED_OPEN_FILES)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.role == "router":
            runner.run(serve(options.gap, num))
        elif options.role == "holder":
            runner.run(run_idle_client(options.port, num))
        else:
            if num < options.streams:
                print(f"only {limit} files may be open: {num} streams")
            print(json.dumps(describe()))
            print(json.dumps(runner.run(measure(num, options.seconds, options.gap))))


if __name__ == "__main__":
    main()
