"""Measure the memory per mock worker, and the token rate of one process of mock workers.

    python -m benchmarks.mock [--workers 64] [--streams 32] [--seconds 5]

The readers of the streams only count the outputs, so that the mock process is the bottleneck.
"""

import argparse
import asyncio
import json
import sys
from typing import Any

import psutil

from baton.core.credentials import ClusterCredentials
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.states import Role
from baton.core.task import Task
from baton.registry.redis import RedisRegistry
from baton.rpc.framed.client import open_framed_connection
from baton.rpc.service import WORKER
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.worker_stream import SubmitEncoder
from orchestrator.cluster_state import ClusterFolder
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import SYSTEM_CLOCK, describe

PROMPT_TOKENS, ANSWER_TOKENS = 64, 8000


def spec(number: int) -> RequestSpec:
    prompt = tuple(TokenId(3 + (number + place) % 4000) for place in range(PROMPT_TOKENS))
    sampling = SamplingParams(ANSWER_TOKENS, temperature=0.0)
    return RequestSpec(RequestId(f"request-{number}"), Epoch(1), prompt, PROMPT_TOKENS, sampling)


def process_of(cluster: LocalCluster) -> psutil.Process:
    (mock,) = cluster.processes("mock")
    return psutil.Process(mock["pid"])


def idle_bytes(workers: int) -> int:
    settings: dict[str, object] = {"mock": True}
    with local_cluster(prefill=1, decode=workers - 1, settings=settings) as cluster:
        return int(process_of(cluster).memory_info().rss)


async def addresses(cluster: LocalCluster) -> list[str]:
    state = ClusterFolder(cluster.home, "default").read_running()
    registry = RedisRegistry(state.redis_url, state.cluster, state.cluster_secret)
    try:
        members = await registry.members()
    finally:
        await registry.close()
    return [member.framed_address for member in members if member.role is Role.DECODE]


async def listen(address: str, first: int, streams: int, counts: list[int]) -> None:
    """Request as many answers from one worker as ``streams`` says, and count their outputs in
    ``counts[0]`` until cancelled."""

    def count(payload: bytes) -> None:
        counts[0] += len(pb.WorkerMessage.FromString(payload).outputs)

    connection = await open_framed_connection(
        address, WORKER.name, ClusterCredentials(), count, 5.0
    )
    try:
        encoder = SubmitEncoder()
        for number in range(first, first + streams):
            message = encoder.encode(spec(number), Task.PREFILL_AND_DECODE, None)
            connection.send_message(message)
        raise await connection.wait_until_ended()
    finally:
        connection.close()


async def rate(cluster: LocalCluster, streams: int, seconds: float) -> dict[str, Any]:
    process, counts = process_of(cluster), [0]
    async with asyncio.TaskGroup() as tasks:
        reading = [
            tasks.create_task(listen(address, number * streams, streams, counts))
            for number, address in enumerate(await addresses(cluster))
        ]
        await asyncio.sleep(1.0)
        before, began, spent = counts[0], SYSTEM_CLOCK(), sum(process.cpu_times()[:2])
        await asyncio.sleep(seconds)
        tokens, wall = counts[0] - before, SYSTEM_CLOCK() - began
        spent = sum(process.cpu_times()[:2]) - spent
        for each in reading:
            each.cancel()
    return {
        "tokens_per_second": round(tokens / wall),
        "cpu_seconds_per_second": round(spent / wall, 2),
        "cpu_microseconds_per_token": round(spent / tokens * 1e6, 2),
        "rss_mb": round(process.memory_info().rss / 1e6),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--streams", type=int, default=32, help="answers of each worker")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args(arguments)
    few, many = idle_bytes(2), idle_bytes(options.workers)
    settings: dict[str, object] = {
        "mock": True,
        "mock_step_seconds": 0,
        "mock_prefill_tokens_per_second": 0,
    }
    with local_cluster(prefill=1, decode=options.workers - 1, settings=settings) as cluster:
        found = asyncio.run(rate(cluster, options.streams, options.seconds))
    print(json.dumps(describe() | {
        "workers": options.workers,
        "answers": options.streams * (options.workers - 1),
        "kb_per_idle_worker": round((many - few) / (options.workers - 2) / 1e3),
        "rss_mb_idle": round(many / 1e6),
        **found,
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
