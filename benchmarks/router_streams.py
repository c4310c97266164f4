"""Measure how many streams a router sustains; 64 mock workers send 50 tokens a second per stream.

    python -m benchmarks.router_streams [--routers N] [--streams 64,128,…] [--answer-tokens N]

Runs a closed loop with more streams in each step; each stream requests one answer after the other.
A step is sustained if the clients get at least 95 % of the tokens that the workers would send, and
nine of ten inter-token latencies are at most 1.5 times the workers'. Client, routers and mock
workers share this machine. Prints a table, and JSON as the last line.
"""

import argparse
import asyncio
import json
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.http_load import StreamLoadResult, stream_all
from benchmarks.router import ChatPrompts, CpuUsage
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import describe

STEP_SECONDS = 0.02
NUM_WORKERS = 64
SUSTAINED_SHARE, SUSTAINED_GAPS = 0.95, 1.5
"""A step is sustained with at least this share of the tokens, and with inter-token latencies of at
most this multiple of the workers' own."""


@dataclass(frozen=True)
class SustainedStep:
    """The result of one step of the load. ``router_cores`` is the CPU seconds per second of all
    routers, ``mock_cores`` those of the mock workers."""

    streams: int
    tokens_per_second: float
    share: float
    first_p50_ms: float
    first_p99_ms: float
    gap_p50_ms: float
    gap_p90_ms: float
    gap_p99_ms: float
    router_cores: float
    mock_cores: float
    memory_mib: float
    sustained: bool


def measure(
    cluster: LocalCluster, requests: list[bytes], streams: int, tokens: int
) -> SustainedStep:
    routers = CpuUsage(*(entry["pid"] for entry in cluster.processes("router")))
    mocks = CpuUsage(*(entry["pid"] for entry in cluster.processes("mock")))
    port = int(cluster.url.rsplit(":", 1)[1])
    load = asyncio.run(stream_all("127.0.0.1", port, requests, streams, with_gaps=True))
    return _step(load, streams, tokens, routers, mocks)


def _step(
    load: StreamLoadResult, streams: int, tokens: int, routers: CpuUsage, mocks: CpuUsage
) -> SustainedStep:
    gaps = np.array(load.gaps_seconds) * 1000
    first = np.array(load.first_seconds) * 1000
    answers = len(load.whole_seconds)
    ideal_seconds = answers / streams * tokens * STEP_SECONDS
    share = min(ideal_seconds / load.seconds, 1.0)
    gap_p50, gap_p90, gap_p99 = (float(np.percentile(gaps, p)) for p in (50, 90, 99))
    return SustainedStep(
        streams=streams,
        tokens_per_second=answers * tokens / load.seconds,
        share=share,
        first_p50_ms=float(np.percentile(first, 50)),
        first_p99_ms=float(np.percentile(first, 99)),
        gap_p50_ms=gap_p50,
        gap_p90_ms=gap_p90,
        gap_p99_ms=gap_p99,
        router_cores=routers.seconds() / load.seconds,
        mock_cores=mocks.seconds() / load.seconds,
        memory_mib=routers.memory_mib(),
        sustained=share >= SUSTAINED_SHARE and gap_p90 <= SUSTAINED_GAPS * STEP_SECONDS * 1000,
    )


def main() -> None:
    options = _options()
    settings: dict[str, object] = {
        "mock": "true",
        "mock_step_seconds": STEP_SECONDS,
        "mock_prefill_tokens_per_second": 0,
        "max_concurrent_requests": 16_384,
        "admission": "false",
        "routers": options.routers,
    }
    prompts, half = ChatPrompts(options.seed, options.answer_tokens), NUM_WORKERS // 2
    rows: list[SustainedStep] = []
    with local_cluster(prefill=half, decode=half, settings=settings) as cluster:
        measure(cluster, prompts.requests(64), 64, options.answer_tokens)
        for streams in map(int, options.streams.split(",")):
            requests = prompts.requests(2 * streams)
            rows.append(measure(cluster, requests, streams, options.answer_tokens))
            print(_line(rows[-1]), flush=True)
    print(f"{describe()} seed {options.seed}, {options.routers} router processes")
    entries = [asdict(row) for row in rows]
    print(json.dumps({"machine": describe(), "routers": options.routers, "rows": entries}))


def _line(row: SustainedStep) -> str:
    return (
        f"{row.streams:6} streams {row.tokens_per_second:8.0f} tokens/s ({row.share:4.0%})"
        f"  first p50 {row.first_p50_ms:7.1f} p99 {row.first_p99_ms:7.1f} ms"
        f"  gap p50 {row.gap_p50_ms:5.1f} p90 {row.gap_p90_ms:5.1f} p99 {row.gap_p99_ms:6.1f} ms"
        f"  router {row.router_cores:4.2f} cores, mock {row.mock_cores:4.2f}"
        f"  {row.memory_mib:4.0f} MiB  {'sustained' if row.sustained else ''}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--streams", default="64,128,256,384,512,768")
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
