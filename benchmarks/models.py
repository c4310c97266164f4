"""Measure what one model's overload does to another model's TTFT in the same cluster.

    python -m benchmarks.models [--rounds N] [--requests N] [--streams N]

A cluster of mock workers serves two models, each with a prefill and a decode worker. Two streams
send chats of about 512 tokens to the model ``calm``: alone, and while ``--streams`` other streams,
from another process, send as many to the model ``busy``, whose prefill worker can answer about ten
a second. Refused requests of these are sent again when ``retry-after-ms`` says so, as OpenAI's
client does, or else ``retry-after``. Mock workers are used because the workers of two models would
compute on the same two cores here, which a real cluster avoids. Prints percentiles of the TTFT of
``calm``, the ratio of p99, and JSON as the last line.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import numpy as np

from baton.config import DEMO_MODEL
from benchmarks.http_load import post, stream_all
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import describe

PROMPT_BYTES, ANSWER_TOKENS = 2_048, 16
SETTINGS: dict[str, object] = {
    "mock": True,
    "mock_prefill_tokens_per_second": 5_000,
    "models": f"calm={DEMO_MODEL},busy={DEMO_MODEL}",
}
PATH = "/v1/chat/completions"
RETRY_SECONDS = 1.0
WARM_UP = 20
CALM_STREAMS = 2


def chats(model: str, count: int, seed: int) -> list[bytes]:
    """Return the bodies of chats that have no common prefix."""
    random = np.random.default_rng(seed)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", dtype=np.uint8)
    contents = (bytes(random.choice(letters, PROMPT_BYTES)).decode() for _ in range(count))
    return [
        json.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        for content in contents
    ]


def retry_seconds(headers: httpx.Headers) -> float:
    """Return the seconds after which the client of a refused request retries."""
    if "retry-after-ms" in headers:
        return float(headers["retry-after-ms"]) / 1000
    return float(headers.get("retry-after", RETRY_SECONDS))


async def overload(url: str, num_streams: int, seed: int) -> None:
    """Send requests to the model ``busy`` until the process is terminated."""
    bodies = chats("busy", num_streams, seed)
    limits = httpx.Limits(max_connections=num_streams)
    async with (
        httpx.AsyncClient(timeout=600, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):

        async def send(body: bytes) -> None:
            while True:
                answer = await client.post(url + PATH, content=body)
                if answer.status_code != 200:
                    await asyncio.sleep(retry_seconds(answer.headers))

        for body in bodies:
            tasks.create_task(send(body))


@contextmanager
def overloaded(cluster: LocalCluster, num_streams: int, seed: int) -> Iterator[None]:
    """Overload the model ``busy`` from another process, until the end of the block."""
    command = [sys.executable, "-m", "benchmarks.models", "--overload", cluster.url]
    options = ["--streams", str(num_streams), "--seed", str(seed)]
    process = subprocess.Popen([*command, *options])
    try:
        with httpx.Client() as client:
            while client.get(cluster.url + "/load").json()["server_load"] < min(num_streams, 500):
                assert process.poll() is None, "the process that sends the requests has ended"
        yield
    finally:
        process.terminate()
        process.wait()
        with httpx.Client() as client:
            while client.get(cluster.url + "/load").json()["server_load"]:
                pass


async def calm_ttfts(cluster: LocalCluster, count: int, seed: int) -> list[float]:
    """Return the TTFT of each request to the model ``calm``, in milliseconds."""
    address = urlsplit(cluster.url)
    assert address.hostname and address.port
    requests = [post(PATH, body) for body in chats("calm", count, seed)]
    load = await stream_all(address.hostname, address.port, requests, CALM_STREAMS)
    return [1_000 * seconds for seconds in load.first_seconds]


def percentiles(values: list[float]) -> dict[str, float]:
    return {
        name: round(float(np.percentile(values, q)), 1) for name, q in (("p50", 50), ("p99", 99))
    }


def measure(cluster: LocalCluster, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure in turn, round by round; return the medians of the rounds' percentiles."""
    asyncio.run(calm_ttfts(cluster, WARM_UP, options.seed))
    rounds: dict[str, list[dict[str, float]]] = {"alone": [], "beside": []}
    for number in range(1, options.rounds + 1):
        seed = options.seed + 10 * number
        alone = asyncio.run(calm_ttfts(cluster, options.requests, seed))
        with overloaded(cluster, options.streams, seed + 1):
            beside = asyncio.run(calm_ttfts(cluster, options.requests, seed + 2))
        for name, values in (("alone", alone), ("beside", beside)):
            rounds[name].append(percentiles(values))
        print(f"round {number}: {rounds['alone'][-1]} {rounds['beside'][-1]}", flush=True)
    return {
        name: {each: statistics.median(row[each] for row in rows) for each in rows[0]}
        for name, rows in rounds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--overload", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.overload:
        asyncio.run(overload(options.overload, options.streams, options.seed))
        return
    with local_cluster(settings=SETTINGS) as cluster:
        found = measure(cluster, options)
    ratio = found["beside"]["p99"] / found["alone"]["p99"]
    for name, row in found.items():
        print(f"calm, {name:<8} TTFT p50 {row['p50']:8.1f} ms   p99 {row['p99']:8.1f} ms")
    print(f"p99 beside / alone: {ratio:.2f}")
    print(json.dumps({"machine": describe(), "ttft_ms": found, "p99_ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
