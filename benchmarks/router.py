"""Measure a router's CPU time, added latency and memory, compared with other routers under the same
load.

    python -m benchmarks.router [--peers PYTHON] [--gap-seconds G] [--rounds N]

Sends chats of 512 uncached tokens, with 16 streamed tokens each, at concurrency 1, 32 and 128,
through each router in turn, round by round. Mock workers send a token every ``gap-seconds`` (0: all
tokens at once). The routers' CPU time is read from the kernel; ``+ beside`` adds other processes
that take part in routing (Baton's conductor). Baton and Dynamo apply the chat template and
tokenise; sglang-router forwards bytes. Prints a table, and JSON as the last line.
"""

import argparse
import asyncio
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from baton.config import DEMO_MODEL
from baton.text.tokenizer import Tokenizer
from benchmarks.http_load import StreamLoadResult, post, stream_all
from benchmarks.peers.routers import Running, baton, direct, dynamo, sglang_router
from testkit.machine import describe

PROMPT_TOKENS, ANSWER_TOKENS = 512, 16
REQUESTS = {1: 100, 32: 640, 128: 1280}
WARM_UP = 200
PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Figures:
    """The figures of one router at one concurrency, in one round. ``first_…`` are TTFTs, and
    ``cpu_…`` are CPU times; both are in milliseconds."""

    first_p50: float
    first_p99: float
    requests_per_second: float
    cpu_per_request: float
    cpu_beside_per_request: float
    memory_mib: float


class ChatPrompts:
    """Makes requests whose prompts have about ``PROMPT_TOKENS`` tokens each, and no common
    prefix."""

    def __init__(self, seed: int, answer_tokens: int = ANSWER_TOKENS) -> None:
        self._answer_tokens = answer_tokens
        self._tokenizer = Tokenizer.load(DEMO_MODEL)
        self._random = np.random.default_rng(seed)

    def requests(self, count: int) -> list[bytes]:
        return [post(PATH, self._body()) for _ in range(count)]

    def text(self) -> str:
        ids = self._random.integers(300, self._tokenizer.vocab_size, PROMPT_TOKENS - 10)
        return self._tokenizer.decode(ids.tolist())

    def _body(self) -> bytes:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": self.text()}],
            "max_tokens": self._answer_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        return json.dumps(body).encode()


class CpuUsage:
    """The CPU seconds that processes have used since this object was created."""

    def __init__(self, *pids: int) -> None:
        self._processes = [each for pid in pids for each in _family(pid)]
        self._before = self._total()

    def seconds(self) -> float:
        return self._total() - self._before

    def memory_mib(self) -> float:
        return sum(process.memory_info().rss for process in self._processes) / 2**20

    def _total(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def measure(router: Running, requests: list[bytes], concurrency: int) -> Figures:
    cpu, beside = CpuUsage(router.router), CpuUsage(*router.beside)
    load = asyncio.run(stream_all("127.0.0.1", router.port, requests, concurrency))
    check(load, router.name)
    first = np.array(load.first_seconds) * 1000
    count = len(requests)
    return Figures(
        first_p50=float(np.percentile(first, 50)),
        first_p99=float(np.percentile(first, 99)),
        requests_per_second=count / load.seconds,
        cpu_per_request=cpu.seconds() / count * 1000,
        cpu_beside_per_request=(cpu.seconds() + beside.seconds()) / count * 1000,
        memory_mib=cpu.memory_mib(),
    )


def check(load: StreamLoadResult, name: str) -> None:
    """Raise RuntimeError if there are fewer events than responses, since a router that drops tokens
    would seem faster."""
    if load.num_events < len(load.whole_seconds):
        raise RuntimeError(
            f"{name} streamed {load.num_events} events for {len(load.whole_seconds)} responses; "
            "each response must have at least one"
        )


def contenders(
    options: argparse.Namespace,
) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Running]]]]:
    gap, peers = options.gap_seconds, options.peers
    yield "no router", lambda: direct(gap)
    yield "baton", lambda: baton(gap)
    if peers is not None:
        yield "sglang-router", lambda: sglang_router(peers, gap)
        yield "dynamo", lambda: dynamo(peers, gap)


def main() -> None:
    options = _options()
    prompts = ChatPrompts(options.seed)
    figures: dict[tuple[str, int], list[Figures]] = defaultdict(list)
    with ExitStack() as stack:
        wanted = options.only.split(",") if options.only else None
        running = [
            stack.enter_context(start())
            for name, start in contenders(options)
            if wanted is None or name in wanted
        ]
        for router in running:
            measure(router, prompts.requests(WARM_UP), 32)
        for _ in range(options.rounds):
            for concurrency in map(int, options.concurrency.split(",")):
                count = REQUESTS[concurrency]
                for router in running:
                    measured = measure(router, prompts.requests(count), concurrency)
                    figures[router.name, concurrency].append(measured)
    print(f"{describe()} seed {options.seed}, a token every {options.gap_seconds:g} s")
    rows = {key: _medians(measured) for key, measured in figures.items()}
    _print_table(rows)
    entries = [{"router": n, "concurrency": c, **asdict(row)} for (n, c), row in rows.items()]
    print(json.dumps({"machine": describe(), "rounds": options.rounds, "rows": entries}))


def _medians(measured: list[Figures]) -> Figures:
    rows = [asdict(each) for each in measured]
    return Figures(**{name: statistics.median(row[name] for row in rows) for name in rows[0]})


def _print_table(rows: dict[tuple[str, int], Figures]) -> None:
    print(
        f"{'router':15} {'at once':>7} {'first p50':>10} {'p99, ms':>8} {'requests/s':>10}"
        f" {'CPU ms':>7} {'+ beside':>8} {'MiB':>6}"
    )
    for (name, concurrency), row in sorted(rows.items(), key=lambda item: item[0][1]):
        print(
            f"{name:15} {concurrency:7} {row.first_p50:10.2f} {row.first_p99:8.1f}"
            f" {row.requests_per_second:10.0f} {row.cpu_per_request:7.2f}"
            f" {row.cpu_beside_per_request:8.2f} {row.memory_mib:6.0f}"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, help="an interpreter that has the other routers")
    parser.add_argument("--gap-seconds", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", default="1,32,128", help="levels to measure")
    parser.add_argument("--only", help="names of routers, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
