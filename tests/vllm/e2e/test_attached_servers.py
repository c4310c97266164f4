"""Tests two unmodified ``vllm serve`` of one version as the engines of mixed workers: answers,
seeds, formats, and an engine that is frozen (its server still says that it is healthy) or killed
under streams. Run for each version in ``--stock``."""

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.local_cluster import LocalCluster, local_cluster
from tests.vllm.e2e.stock_server import ARGUMENTS, Server, vllm_serve

pytestmark = pytest.mark.timeout(600)
SEED = 11
LENGTHS = (1, 5, 127, 128, 129, 300)
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def servers(stock_version: str, models: dict[str, Path], folder: Path) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        started = []
        for number in range(2):
            events = {
                "enable_kv_cache_events": True, "publisher": "zmq",
                "endpoint": f"ipc://{folder}/{number}.events",
                "replay_endpoint": f"ipc://{folder}/{number}.replay",
            }  # fmt: skip
            arguments = (*ARGUMENTS, f"--kv-events-config={json.dumps(events)}")
            log = folder / f"{number}.log"
            serve = vllm_serve(models["llama"], log, stock_version, 0, arguments)
            started.append(stack.enter_context(serve))
        yield started


@pytest.fixture(scope="module")
def cluster(models: dict[str, Path], servers: list[Server], folder: Path) -> Iterator[LocalCluster]:
    """The cluster waits for its servers."""
    urls = [
        f"{server.url}?kv_events=ipc://{folder}/{number}.events"
        f"&kv_replay=ipc://{folder}/{number}.replay"
        for number, server in enumerate(servers)
    ]
    settings: dict[str, object] = {
        "attach": ",".join(f"mixed={url}" for url in urls),
        "admission": "off",
        "dtype": "float32",
    }
    with local_cluster(
        models["llama"], 0, 0, mixed=2, settings=settings, timeout_seconds=400.0
    ) as running:
        yield running


def prompts() -> list[list[int]]:
    print(f"seed {SEED}")
    chance = np.random.default_rng(SEED)
    return [chance.integers(10, 400, size=length).tolist() for length in LENGTHS]


GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_the_servers(
    cluster: LocalCluster, servers: list[Server], stock_version: str, sampling: dict[str, Any]
) -> None:
    assert [server.version for server in servers] == [stock_version] * 2
    for prompt in prompts():
        expected = servers[0].complete(prompt, max_tokens=TOKENS, **sampling)
        got = cluster.complete(prompt, TOKENS, **sampling)
        assert got == expected


def test_formats_logprobs_and_counts_come_through(cluster: LocalCluster) -> None:
    (prompt, *_) = [each for each in prompts() if len(each) == 300]
    body = {"prompt": prompt, "max_tokens": 4, "logprobs": 2, "temperature": 0}
    first = cluster.post("/v1/completions", body)
    others = [cluster.post("/v1/completions", body) for _ in range(2)]
    for each in others:
        assert each["choices"][0]["logprobs"]["tokens"] == first["choices"][0]["logprobs"]["tokens"]
    assert len(first["choices"][0]["logprobs"]["token_logprobs"]) == 4
    # One of the two servers has had it before.
    assert 256 in [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in others]
    guided = {"prompt": prompt, "max_tokens": 8, "guided_regex": "[ab]{3}"}
    answer = cluster.post("/v1/completions", guided)["choices"][0]
    assert re.fullmatch("[ab]{3}", answer["text"]), answer


def test_placement_knows_what_the_servers_have_cached(cluster: LocalCluster) -> None:
    (prompt, *_) = [each for each in prompts() if len(each) == 300]
    body = {"prompt": [7, *prompt], "max_tokens": 1, "temperature": 0}
    first, headers = cluster.post_with_headers("/v1/completions", body)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    home, known = headers["x-baton-decode"], 0
    while known == 0:  # events come a moment after the answer
        answer, headers = cluster.post_with_headers("/v1/completions", body)
        placement = cluster.get(f"/admin/requests/{headers['x-baton-request-id']}")
        alternatives = placement["alternatives"]["mixed"]
        blocks = {each["worker"]: each["local_blocks"] for each in alternatives}
        known = blocks[home]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 128 * blocks[headers["x-baton-decode"]]
    assert known == 2
    for number in range(2):
        log = cluster.baton("logs", f"mixed-{number}").stdout
        assert "cached_blocks_known" in log and "kv_events" not in log, log


def answers_running_on(
    server: Server, cluster: LocalCluster, pool: ThreadPoolExecutor, expected: list[list[int]]
) -> "list[Future[list[int]]]":
    """Start answers until ``server`` generates one of them: it may be at work again later than
    its engine, and answers may end before it is looked at."""
    while True:
        answers = [pool.submit(cluster.complete, each, 200, **how) for each, how in streams()]
        while not all(each.done() for each in answers):
            if server.is_running:
                return answers
        assert [each.result() for each in answers] == expected


def streams() -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts, and how the answer to each is sampled."""
    return [(each, SAMPLED if index % 2 else GREEDY) for index, each in enumerate(prompts())]


def test_streams_leave_a_frozen_engine(cluster: LocalCluster, servers: list[Server]) -> None:
    expected = [servers[1].complete(each, max_tokens=200, **how) for each, how in streams()]
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        answers = answers_running_on(servers[0], cluster, pool, expected)
        engine = servers[0].engine
        engine.send_signal(signal.SIGSTOP)
        try:
            assert servers[0].ask("/health") == b""
            assert [each.result(200) for each in answers] == expected
        finally:
            engine.send_signal(signal.SIGCONT)


def test_streams_leave_a_killed_server(cluster: LocalCluster, servers: list[Server]) -> None:
    """The last test of this module: the server does not come back."""
    expected = [servers[1].complete(each, max_tokens=200, **how) for each, how in streams()]
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        answers = answers_running_on(servers[0], cluster, pool, expected)
        servers[0].engine.kill()
        assert [each.result(200) for each in answers] == expected
