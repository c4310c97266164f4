"""Tests clusters of one prefill and one decode worker with vLLM: one that runs a mixture of experts
and transfers KV over shared memory, and one that runs Llama and transfers KV over gRPC while its
decode pool is scaled."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from testkit.local_cluster import LocalCluster
from tests.vllm.e2e.vllm_alone import ANSWER_TOKENS
from tests.vllm.e2e.vllm_cluster import GREEDY, VllmAnswers, vllm_cluster

pytestmark = pytest.mark.timeout(600)


def transport(cluster: LocalCluster, tokens: list[int]) -> str:
    body = {"prompt": tokens, "max_tokens": 2, **GREEDY}
    return cluster.post_with_headers("/v1/completions", body)[1]["x-baton-transport"]


def test_a_mixture_of_experts_over_shared_memory(
    models: dict[str, Path], references: dict[str, VllmAnswers]
) -> None:
    with vllm_cluster(models["qwen3-moe"], 1, 1, transports="shm") as cluster:
        references["qwen3-moe"].check(cluster)
        assert transport(cluster, [5] * 100) == "shm"
        sockets = cluster.baton("doctor", "--sockets", check=False)
        assert sockets.returncode == 0, sockets.stdout
        assert cluster.baton("check").returncode == 0


def test_llama_over_grpc_while_the_decode_pool_is_scaled(
    models: dict[str, Path], references: dict[str, VllmAnswers]
) -> None:
    expected = references["llama"]
    with vllm_cluster(models["llama"], 1, 1, transports="grpc") as cluster:
        expected.check(cluster)
        assert transport(cluster, [5] * 100) == "grpc"
        stop = Event()
        with ThreadPoolExecutor(2) as pool:
            clients = [pool.submit(ask_until, stop, cluster, expected) for _ in range(2)]
            try:
                for change in ("decode 1 → 2: done", "decode 2 → 1: done"):
                    size = change.split()[3].rstrip(":")
                    scaled = cluster.baton("scale", f"decode={size}")
                    assert scaled.stdout.splitlines()[-1] == change
            finally:
                stop.set()
            assert all(client.result() > len(expected.prompts) for client in clients)
        assert [each["state"] for each in cluster.processes("decode")] == ["serving"]
        assert cluster.baton("check").returncode == 0


def ask_until(stop: Event, cluster: LocalCluster, expected: VllmAnswers) -> int:
    """Send the prompts again and again until ``stop`` is set, and check each answer. Return the
    number of answers."""
    count = 0
    while not stop.is_set():
        for tokens, answer in zip(expected.prompts, expected.answers, strict=True):
            assert cluster.complete(tokens, ANSWER_TOKENS, **GREEDY) == answer
            count += 1
    return count
