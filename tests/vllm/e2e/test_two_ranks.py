"""Tests workers that consist of two ranks each: their answers, and what happens when a rank or a
worker is killed or frozen."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psutil
import pytest

from testkit.local_cluster import LocalCluster
from tests.vllm.e2e.streams import STREAM_TOKENS, start_streams, stream, wait_until_restarted
from tests.vllm.e2e.vllm_cluster import VllmAnswers, vllm_cluster

SHARED_MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.timeout(900)
STREAMS = 4
HANG_TIMEOUT_SECONDS = 20.0
SPARE_SECONDS = 4.0
"""Less than vLLM itself takes to end the ranks that wait for a dead one: five seconds."""


@pytest.fixture(scope="module")
def cluster(models: dict[str, Path]) -> Iterator[LocalCluster]:
    with vllm_cluster(
        models["qwen3"], 1, 1,
        engine_args="--enforce-eager --tensor-parallel-size 2",
        hang_timeout_seconds=HANG_TIMEOUT_SECONDS,
    ) as running:  # fmt: skip
        yield running


def worker(cluster: LocalCluster, role: str) -> psutil.Process:
    [process] = cluster.processes(role)
    return psutil.Process(process["pid"])


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    found = [each for each in process.children() if each.name().startswith("VLLM::Worker")]
    assert len(found) == 2
    return found


def test_greedy_answers_are_those_of_vllm_alone(
    cluster: LocalCluster, references: dict[str, VllmAnswers]
) -> None:
    for role in ("prefill", "decode"):
        ranks_of(worker(cluster, role))
    references["qwen3"].check(cluster)


@pytest.mark.parametrize(
    ("role", "rank", "number", "timeout_seconds"),
    [
        ("decode", 1, signal.SIGKILL, SPARE_SECONDS),
        ("prefill", 0, signal.SIGSTOP, HANG_TIMEOUT_SECONDS + SPARE_SECONDS),
    ],
)
def test_streams_survive_a_killed_or_frozen_rank(
    role: str, rank: int, number: signal.Signals, timeout_seconds: float, cluster: LocalCluster
) -> None:
    damaged = worker(cluster, role)
    ranks = ranks_of(damaged)
    with ThreadPoolExecutor(STREAMS) as pool:
        prompts, streams = start_streams(pool, cluster, STREAMS, 400)
        ranks[rank].send_signal(number)
        alive = psutil.wait_procs(ranks, timeout=timeout_seconds)[1]
        assert not alive
        answers = [each.result() for each in streams]
    damaged.wait()
    wait_until_restarted(cluster)
    with ThreadPoolExecutor(STREAMS) as pool:
        undisturbed = list(pool.map(lambda each: stream(cluster, each, Event()), prompts))
    assert [len(answer) for answer in answers] == [STREAM_TOKENS] * STREAMS
    assert answers == undisturbed
    assert cluster.baton("check").returncode == 0


def test_a_killed_worker_leaves_no_ranks(cluster: LocalCluster) -> None:
    killed = worker(cluster, "decode")
    ranks = ranks_of(killed)
    ranks[1].suspend()  # so that the rank can't exit by itself when the worker dies
    killed.kill()
    psutil.wait_procs(ranks)  # the test's timeout bounds this
    wait_until_restarted(cluster)
    assert cluster.baton("check").returncode == 0
