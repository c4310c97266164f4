"""Tests two unmodified ``vllm serve`` that hand KV over by NixlConnector: equal answers, and what
comes of an engine that is frozen for longer than its KV is lent, or killed."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.local_cluster import LocalCluster, local_cluster
from tests.vllm.e2e.stock_server import (
    ARGUMENTS,
    LEASE_SECONDS,
    TRANSFER,
    Server,
    frozen,
    vllm_serve,
)

pytestmark = pytest.mark.timeout(600)
SEED = 12
LENGTHS = (1, 5, 127, 128, 129, 256, 300, 700)
TOKENS = 24
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
PENALIZED: dict[str, Any] = {"temperature": 0, "presence_penalty": 0.7, "ignore_eos": True}


@pytest.fixture(scope="module")
def servers(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One that computes prompts, one that generates answers, and one that hands nothing over."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        started = []
        for name in ("prefill", "decode", "alone"):
            arguments = ARGUMENTS if name == "alone" else (*ARGUMENTS, TRANSFER)
            serve = vllm_serve(models["llama"], folder / f"{name}.log", "0.32.0", 0, arguments)
            started.append(stack.enter_context(serve))
        yield started


@pytest.fixture(scope="module")
def cluster(models: dict[str, Path], servers: list[Server]) -> Iterator[LocalCluster]:
    prefill, decode, _ = servers
    settings: dict[str, object] = {
        "attach": f"prefill={prefill.url},decode={decode.url}",
        "admission": "off",
        "slo_itl_seconds": 0.001,  # no prompt is so short that the decode server computes it
    }
    with local_cluster(models["llama"], 1, 1, settings=settings, timeout_seconds=400.0) as running:
        yield running


def prompts() -> list[list[int]]:
    print(f"seed {SEED}")
    chance = np.random.default_rng(SEED)
    return [chance.integers(10, 400, size=length).tolist() for length in LENGTHS]


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"]
)
def test_answers_are_those_of_one_server(
    cluster: LocalCluster, servers: list[Server], sampling: dict[str, Any]
) -> None:
    _, decode, alone = servers
    for prompt in prompts():
        expected = alone.complete(prompt, max_tokens=TOKENS, **sampling)
        got = cluster.complete(prompt, TOKENS, **sampling)
        assert got == expected, len(prompt)
    failed = decode.metric("vllm:nixl_num_failed_transfers_total")
    assert (failed, decode.metric("vllm:nixl_bytes_transferred_count") > 0) == (0, True)


def test_formats_and_logprobs_come_through(cluster: LocalCluster) -> None:
    (prompt, *_) = [each for each in prompts() if len(each) == 300]
    body = {"prompt": prompt, "max_tokens": 4, "logprobs": 2, "temperature": 0}
    choice = cluster.post("/v1/completions", body)["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    guided = {"prompt": prompt, "max_tokens": 8, "guided_regex": "[ab]{3}"}
    assert cluster.post("/v1/completions", guided)["choices"][0]["text"][:3].strip("ab") == ""


def test_a_prefill_engine_that_is_frozen_before_its_kv_is_read(
    cluster: LocalCluster, servers: list[Server]
) -> None:
    prefill, decode, alone = servers
    expected = [alone.complete(each, max_tokens=8, **GREEDY) for each in prompts()]
    wait_for_hand_over(cluster, decode)
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        with frozen(prefill.engine_tree):
            answers = [pool.submit(cluster.complete, each, 8, **GREEDY) for each in prompts()]
            assert [each.result(200) for each in answers] == expected


def test_a_decode_engine_that_is_frozen_for_longer_than_kv_is_lent(
    cluster: LocalCluster, servers: list[Server]
) -> None:
    """Without a bound it reads what others wrote there, and keeps that for the next client."""
    prefill, decode, alone = servers
    expected = [alone.complete(each, max_tokens=8, **GREEDY) for each in prompts()]
    expired, before = "vllm:nixl_num_kv_expired_reqs_total", 0.0
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        while prefill.metric(expired) == before:  # the pair may not be at work again at once
            wait_for_hand_over(cluster, decode)
            with frozen(decode.engine_tree):
                answers = [pool.submit(cluster.complete, each, 8, **GREEDY) for each in prompts()]
                assert [each.result(200) for each in answers] == expected
                give_up_at = time.monotonic() + LEASE_SECONDS + 15
                while prefill.metric(expired) == before and time.monotonic() < give_up_at:
                    prefill.complete([9], max_tokens=1)  # metrics change with steps
        assert [cluster.complete(each, 8, **GREEDY) for each in prompts()] == expected
        assert [decode.complete(each, max_tokens=8, **GREEDY) for each in prompts()] == expected


def wait_for_hand_over(cluster: LocalCluster, decode: Server) -> None:
    """Send requests until the decode server reads the KV of one."""
    transfers = "vllm:nixl_bytes_transferred_count"
    before = decode.metric(transfers)
    while decode.metric(transfers) == before:
        cluster.complete(prompts()[-1], 2, **GREEDY)
