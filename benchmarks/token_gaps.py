"""Measure the inter-token latency of running answers while long prompts are prefilled.

    python -m benchmarks.token_gaps [--shape 50m|0.6b] [--layers N] [--dtype bfloat16|float32]
                                    [--budgets TOKENS …] [--gaps SECONDS …] [--streams N]
                                    [--prompts N] [--tokens N]

Eight answers are streamed over HTTP from a real cluster: first alone, then while prompts of 4,096
tokens arrive one after the other. In ``same worker``, one worker with two threads decodes the
answers and prefills the prompts, in chunks that share a step's budget (``max_batched_tokens``) with
the answers. The budget is a fixed number of tokens (``--budgets``), or as many as fit into an
inter-token latency (``--gaps``, which set ``slo_itl_seconds``; the default is 0.05). In
``disaggregated``, there are a prefill worker and a decode worker, with one thread and one core
each. So both cases use the same two cores, which router and client share. A gap is the time that a
client sees between two events of one stream. Prints a table, and JSON as the last line.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np

from baton.config import DEMO_MODEL
from baton.rpc.worker_client import drain_worker
from benchmarks.engine import SHAPES, shape_of, write_model
from benchmarks.http_load import END, post
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import SYSTEM_CLOCK, describe, pause

STREAM_PROMPT_TOKENS = 64
STREAM_TOKENS = 7000
"""The length of a streamed answer: longer than the measurement; the client disconnects at the
end."""
PROMPT_ANSWER_TOKENS = 4
WARM_TOKENS = 64
"""The number of tokens of each stream before the measurement begins."""
TIMEOUT_SECONDS = 240.0
UNLIMITED_SECONDS = 1000.0
SETTLE_SECONDS = 2.0
"""The time until all members of the cluster know of a change."""
EVENT = b"data: {"


class TimedStream(asyncio.Protocol):
    """One streamed completion. ``event_times`` are the arrival times of its events."""

    def __init__(self, body: dict[str, object]) -> None:
        self._body = body
        self._tail = b""
        self.event_times: list[float] = []
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.sent_at = SYSTEM_CLOCK()
        self._transport.write(post("/v1/completions", json.dumps(self._body).encode()))

    def data_received(self, data: bytes) -> None:
        now = SYSTEM_CLOCK()
        self.event_times += [now] * data.count(EVENT)
        self._tail = (self._tail + data)[-len(END) :]
        if not self.event_times and b"HTTP/1.1 200" not in data:
            self._fail(f"{data[:300]!r}")
        if self._tail == END:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def disconnect(self) -> None:
        self._transport.abort()

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the times between events that arrived in [begin, end)."""
        stamps = [stamp for stamp in self.event_times if begin <= stamp < end]
        return [after - before for before, after in pairwise(stamps)]

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(message))


@dataclass
class LatencySamples:
    """Latencies in seconds: the inter-token latencies of answers that run ``alone`` and ``beside``
    prefills, and the TTFTs of the prefilled prompts."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "alone": _percentiles(self.alone),
            "beside": _percentiles(self.beside),
            "ttft_seconds": float(np.median(self.ttfts)),
        }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99]).tolist()
    return {"p50": p50, "p99": p99, "max": max(seconds), "count": len(seconds)}


class StreamingClient:
    def __init__(self, url: str, options: argparse.Namespace) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, url
        self._place = parts.hostname, parts.port
        self._vocabulary = shape_of(options)[-1]
        self._chance = np.random.default_rng(options.seed)
        self._options = options

    async def measure(self) -> LatencySamples:
        options, samples = self._options, LatencySamples()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await self._prompt(options.tokens)  # warms up
            streams = [await self._open(STREAM_PROMPT_TOKENS, STREAM_TOKENS)]
            streams += [
                await self._open(STREAM_PROMPT_TOKENS, STREAM_TOKENS)
                for _ in range(options.streams - 1)
            ]
            await self._until_warm(streams)
            began = SYSTEM_CLOCK()
            await asyncio.sleep(options.seconds)
            between = SYSTEM_CLOCK()
            for _ in range(options.prompts):
                samples.ttfts.append(await self._prompt(options.tokens))
            ended = SYSTEM_CLOCK()
        for stream in streams:
            assert not stream.done.done(), "a stream ended before it was measured"
            samples.alone += stream.gaps(began, between)
            samples.beside += stream.gaps(between, ended)
            stream.disconnect()
        return samples

    async def _until_warm(self, streams: list[TimedStream]) -> None:
        while any(len(stream.event_times) < WARM_TOKENS for stream in streams):
            for stream in streams:
                if stream.done.done():
                    stream.done.result()
            await asyncio.sleep(0.05)

    async def _prompt(self, num_tokens: int) -> float:
        """Send a prompt; return its TTFT in seconds once its answer is complete."""
        stream = await self._open(num_tokens, PROMPT_ANSWER_TOKENS)
        await stream.done
        return stream.event_times[0] - stream.sent_at

    async def _open(self, num_tokens: int, max_tokens: int) -> TimedStream:
        body = {
            "prompt": self._chance.integers(1, self._vocabulary, num_tokens).tolist(),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        _, stream = await asyncio.get_running_loop().create_connection(
            lambda: TimedStream(body), *self._place
        )
        return stream


def pin(pid: int, core: int) -> None:
    """Pin all threads of a process to one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


@contextmanager
def same_worker(model: Path, settings: dict[str, object]) -> Iterator[LocalCluster]:
    """Run a cluster in which one worker does everything, since the other one is kept draining."""
    with local_cluster(model, settings=settings | {"threads": 2}) as cluster:
        for entry in cluster.processes("prefill"):
            asyncio.run(drain_worker(entry["address"]))
        pause(SETTLE_SECONDS)
        yield cluster


@contextmanager
def disaggregated(model: Path, settings: dict[str, object]) -> Iterator[LocalCluster]:
    cores = sorted(os.sched_getaffinity(0))
    with local_cluster(model, settings=settings | {"threads": 1}) as cluster:
        for core, role in zip(cores, ("prefill", "decode"), strict=False):
            for entry in cluster.processes(role):
                pin(entry["pid"], core)
        yield cluster


def write_servable_model(path: Path, options: argparse.Namespace) -> None:
    """Write a model with random weights and a tokenizer. Prompts are token ids, but each token of
    an answer needs a text: a router sends no event for a token without one."""
    write_model(path, options)
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"token{id}": id for id in range(len(vocabulary), shape_of(options)[-1])}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(DEMO_MODEL / "tokenizer_config.json", path)


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cases: list[tuple[str, Any, dict[str, object]]] = []
    for budget in options.budgets:
        chosen = {"max_batched_tokens": budget, "slo_itl_seconds": UNLIMITED_SECONDS}
        cases.append((f"same, {budget} tokens", same_worker, chosen))
    for gap in options.gaps:
        cases.append((f"same, {gap * 1e3:.0f} ms", same_worker, {"slo_itl_seconds": gap}))
    cases.append(("disaggregated", disaggregated, {}))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_servable_model(model, options)
        for name, started, chosen in cases:
            settings = {"dtype": options.dtype, **chosen}
            with started(model, settings) as cluster:
                samples = asyncio.run(StreamingClient(cluster.url, options).measure())
            yield {"case": name, **chosen, **samples.as_dict()}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="50m")
    parser.add_argument(
        "--layers", type=int, default=0, help="layers of the model; fewer take less time, 0: all"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--budgets", type=int, nargs="*", default=[512, 128, 32])
    parser.add_argument("--gaps", type=float, nargs="*", default=[0.05, 0.03])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt")
    parser.add_argument("--seconds", type=float, default=4.0, help="of the answers alone")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    report = {**describe(), **vars(options)}
    print(report)
    print("                    alone: p50, p99 ms   beside prompts: p50, p99, max   TTFT s")
    lines = []
    for line in run(options):
        lines.append(line)
        alone, beside = line["alone"], line["beside"]
        print(
            f"{line['case']:18} {alone['p50'] * 1e3:13.1f} {alone['p99'] * 1e3:6.1f} "
            f"{beside['p50'] * 1e3:18.1f} {beside['p99'] * 1e3:6.1f} {beside['max'] * 1e3:6.1f} "
            f"{line['ttft_seconds']:8.2f}",
            flush=True,
        )
    print(json.dumps({**report, "lines": lines}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
