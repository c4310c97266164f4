"""Tests two servers of different versions of vLLM in one cluster, and their roll-out under
traffic."""

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testkit.local_cluster import LocalCluster, local_cluster
from tests.vllm.e2e.stock_server import Server, prompt, vllm_serve

pytestmark = pytest.mark.timeout(600)
TOKENS = 200
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPTS = [prompt(seed, length) for seed, length in enumerate((5, 128, 300))]


@pytest.fixture(scope="module")
def versions(pytestconfig: pytest.Config) -> tuple[str, str]:
    """Return the oldest and the newest version."""
    oldest, *_, newest = [*pytestconfig.getoption("stock").split()] * 2
    if oldest == newest:
        pytest.skip("needs two versions of vLLM: make test-vllm STOCK='0.28.0 0.32.0'")
    return oldest, newest


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[ExitStack]:
    """Ends the servers that a test starts."""
    with ExitStack() as stack:
        yield stack


def start_answers(
    pool: ThreadPoolExecutor, cluster: LocalCluster
) -> "list[Future[tuple[list[int], str]]]":
    """Start answers, which become token ids and how they were continued."""

    def answer(tokens: list[int]) -> tuple[list[int], str]:
        body = {"prompt": tokens, "max_tokens": TOKENS, "return_token_ids": True, **GREEDY}
        got, headers = cluster.post_with_headers("/v1/completions", body)
        return got["choices"][0]["token_ids"], headers.get("x-baton-continuation", "")

    return [pool.submit(answer, each) for each in PROMPTS]


def test_a_roll_out_under_traffic_loses_nothing(
    models: dict[str, Path], versions: tuple[str, str], starting: ExitStack, tmp_path: Path
) -> None:
    """The older of two servers is terminated while it generates answers, and the newer version is
    started at its port. Its worker comes back as another, and takes requests again."""
    older, newer = versions
    old, other = [
        starting.enter_context(vllm_serve(models["llama"], tmp_path / f"{each}.log", each))
        for each in versions
    ]
    settings = {
        "attach": f"mixed={old.url},mixed={other.url}", "admission": "off", "dtype": "float32",
    }  # fmt: skip
    with (
        local_cluster(
            models["llama"], 0, 0, mixed=2, settings=settings, timeout_seconds=400.0
        ) as cluster,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        engines = cluster.baton("status").stdout
        assert f"vllm {older}" in engines and f"vllm {newer}" in engines
        expected = [other.complete(each, max_tokens=TOKENS, **GREEDY) for each in PROMPTS]

        def wait_until_used(server: Server) -> None:
            """Check answers until ``server`` generates one of them, and all that have begun."""
            is_used = False
            while not is_used:
                answers = start_answers(pool, cluster)
                while wait(answers, timeout=0.2).not_done:
                    is_used = is_used or server.is_running
                assert [each.result()[0] for each in answers] == expected

        wait_until_used(old)
        wait_until_used(other)
        answers = start_answers(pool, cluster)
        while not old.is_running:
            if all(each.done() for each in answers):
                answers = start_answers(pool, cluster)
        old.process.send_signal(signal.SIGTERM)
        while old.process.poll() is None:
            assert [each.result()[0] for each in start_answers(pool, cluster)] == expected
        assert [each.result()[0] for each in answers] == expected
        port = int(old.url.rpartition(":")[2])
        new = starting.enter_context(vllm_serve(models["llama"], tmp_path / "new.log", newer, port))
        wait_until_used(new)
        assert f"vllm {older}" not in cluster.baton("status").stdout
