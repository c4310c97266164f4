"""Tests that a prompt goes back to the worker that has its prefix: with and without a conductor,
for any number of equal workers, and through a worker's death and return."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from testkit.local_cluster import LocalCluster, local_cluster

SEED = 44


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    print(f"seed {SEED}")
    tokens: list[list[int]] = np.random.default_rng(SEED).integers(300, 3000, (60, 140)).tolist()
    return tokens


def run_pass(cluster: LocalCluster, prompts: list[list[int]], seed: int) -> list[str]:
    """Send all prompts one after the other, in an order of their own. Return the prefill worker of
    each."""
    workers = [""] * len(prompts)
    for number in np.random.default_rng(seed).permutation(len(prompts)):
        body = {"prompt": prompts[number], "max_tokens": 2}
        workers[number] = cluster.post_with_headers("/v1/completions", body)[1]["x-baton-prefill"]
    return workers


@contextmanager
def frozen_conductor(cluster: LocalCluster) -> Iterator[None]:
    (conductor,) = cluster.processes("conductor")
    os.kill(conductor["pid"], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(conductor["pid"], signal.SIGCONT)


@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_no_prefix_leaves_its_worker(num_workers: int, prompts: list[list[int]]) -> None:
    """Also while no conductor answers: the router then places on the same ring."""
    settings: dict[str, object] = {"mock": True, "local_prefill": False}
    with local_cluster(prefill=num_workers, settings=settings) as cluster:
        first = run_pass(cluster, prompts, 1)
        assert len(set(first)) == num_workers
        assert [run_pass(cluster, prompts, seed) for seed in (2, 3)] == [first, first]
        with frozen_conductor(cluster):
            assert run_pass(cluster, prompts, 4) == first
        assert run_pass(cluster, prompts, 5) == first


def test_only_the_prefixes_of_a_dead_worker_move(prompts: list[list[int]]) -> None:
    """Workers of the demo model have all prefixes in the store of their host; mock workers have
    none there."""
    with local_cluster(prefill=3) as cluster:
        first = run_pass(cluster, prompts, 1)
        assert len(set(first)) == 3
        assert run_pass(cluster, prompts, 2) == first
        dead = cluster.processes("prefill")[0]
        os.kill(dead["pid"], signal.SIGKILL)
        after = run_pass(cluster, prompts, 3)
        moved = {number for number, worker in enumerate(first) if after[number] != worker}
        own = {number for number, worker in enumerate(first) if worker == dead["id"]}
        assert moved and moved <= own  # prompts that come after its return may go there again
        cluster.wait_until_ready()
        assert run_pass(cluster, prompts, 4) == after


def test_answer_of_one_token_is_computed_by_a_prefill_worker(prompts: list[list[int]]) -> None:
    with local_cluster() as cluster:
        body = {"model": "demo", "prompt": prompts[0], "max_tokens": 1, "temperature": 0}
        fields: list[dict[str, object]] = [{}, {"n": 2}, {"logprobs": 1, "echo": True}]
        for more in fields:
            headers = cluster.post_with_headers("/v1/completions", body | more)[1]
            assert headers["x-baton-prefill"] == headers["x-baton-decode"] == "prefill-0"
            explained = cluster.get(f"/admin/requests/{headers['x-baton-request-id']}")
            for one in explained.get("choices", [explained]):
                assert (one["prefill"]["id"], one["decode"]["id"]) == ("prefill-0",) * 2
                assert one["reason"].startswith("the answer has one token")
                assert one["kv_transfer_bytes"] == 0
