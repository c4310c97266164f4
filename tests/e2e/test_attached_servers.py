"""Tests clusters whose workers use servers that run already: frozen, killed and restarted servers
under load, and resizing. The servers have vLLM's wire forms, and no model."""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from testkit.fakes.vllm_server import FakeVllm, FakeVllmThread, expected_answer, vllm_servers
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import pause

pytestmark = pytest.mark.timeout(240)
TOKENS = 150
PROMPTS = [[200 + number, 300, 400, 500] for number in range(8)]


@pytest.fixture
def servers() -> Iterator[FakeVllmThread]:
    with vllm_servers() as thread:
        yield thread


def attached_cluster(
    fakes: Sequence[FakeVllm], pools: Sequence[str] = ("mixed",)
) -> AbstractContextManager[LocalCluster]:
    """Start a cluster whose pools have the servers in turn."""
    roles = [pools[number % len(pools)] for number in range(len(fakes))]
    attach = ",".join(f"{role}={fake.url}" for role, fake in zip(roles, fakes, strict=True))
    settings: dict[str, object] = {"attach": attach, "admission": "off", "slo_itl_seconds": 10}
    sizes = {role: roles.count(role) for role in ("prefill", "decode", "mixed")}
    return local_cluster(**sizes, settings=settings)


def start_answers(
    pool: ThreadPoolExecutor, cluster: LocalCluster
) -> list[tuple[list[int], "Future[list[int]]"]]:
    return [
        (prompt, pool.submit(cluster.complete, prompt, TOKENS, temperature=0)) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_answers_survive_a_server(servers: FakeVllmThread, fault: str) -> None:
    fakes = [servers.start("hub/model", token_seconds=0.02) for _ in range(2)]
    with attached_cluster(fakes) as cluster, ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = start_answers(pool, cluster)
        servers.wait_until(lambda: all(fake.num_running for fake in fakes))
        port = fakes[0].port
        if fault == "freeze":
            servers.call(fakes[0].step.clear)
        else:
            servers.close(fakes[0])
        for prompt, running in answers:
            assert running.result(60) == expected_answer(prompt, TOKENS)
        if fault == "freeze":
            servers.call(fakes[0].step.set)
        else:
            fakes[0] = servers.start("hub/model", port, token_seconds=0.02)
        num_before = len(fakes[0].requests)
        while len(fakes[0].requests) == num_before:  # until it is given requests again
            for prompt, running in start_answers(pool, cluster):
                assert running.result(60) == expected_answer(prompt, TOKENS)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_split_answers_survive_a_server(servers: FakeVllmThread, pool: str, fault: str) -> None:
    fakes = [servers.start("hub/model", token_seconds=0.02, lends_kv=True) for _ in range(4)]
    victim = fakes[0 if pool == "prefill" else 1]
    cluster = attached_cluster(fakes, ["prefill", "decode"])
    with cluster as running, ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = start_answers(threads, running)
        servers.wait_until(lambda: bool(victim.requests))
        if fault == "freeze":
            servers.call(victim.step.clear)
        else:
            servers.close(victim)
        for prompt, answer in answers:
            assert answer.result(60) == expected_answer(prompt, TOKENS)
        if fault == "freeze":
            servers.call(victim.step.set)
    imports = [each for fake in fakes for each in fake.requests if is_import(each)]
    assert imports
    assert len({each["cache_salt"] for each in imports}) == len(imports)


def is_import(request: dict[str, Any]) -> bool:
    return bool((request.get("kv_transfer_params") or {}).get("do_remote_prefill"))


def test_resizing_uses_each_server_once(servers: FakeVllmThread, tmp_path: Path) -> None:
    fakes = [servers.start("hub/model") for _ in range(2)]
    with attached_cluster(fakes) as cluster:
        cluster.baton("scale", "mixed=1")
        cluster.baton("scale", "mixed=2")
        cluster.wait_until_ready()
        assert len(cluster.processes("mixed")) == 2
        refused = cluster.baton("scale", "mixed=3", check=False)
        assert refused.returncode == 1
        assert "3 mixed workers need as many attached servers; attach names 2" in refused.stderr
        answer = cluster.complete(PROMPTS[0], 5, temperature=0)
        assert answer == expected_answer(PROMPTS[0], 5)
        models = cluster.get("/v1/models")["data"]
        assert [model["max_model_len"] for model in models] == [4096]


def test_adapters_of_servers_are_named_like_models(servers: FakeVllmThread) -> None:
    """A request goes to a server that has its adapter, also if that was loaded later."""
    fakes = [servers.start("hub/model") for _ in range(2)]
    fakes[0].adapters["sql"] = "/adapters/sql"
    prompt = PROMPTS[0]
    with attached_cluster(fakes) as cluster:
        wait_for_models(cluster, "sql")
        models = {each["id"]: each.get("parent") for each in cluster.get("/v1/models")["data"]}
        (base,) = [each for each, parent in models.items() if parent is None]
        assert models == {base: None, "sql": base}
        answers = [cluster.complete(prompt, 5, temperature=0, model="sql") for _ in range(4)]
        assert answers == 4 * [answers[0]]
        assert answers[0] != expected_answer(prompt, 5)
        assert expected_answer(prompt, 5) == cluster.complete(prompt, 5, temperature=0)
        assert not any(each["model"] == "sql" for each in fakes[1].requests)
        servers.call(lambda: fakes[1].adapters.update(chat="/adapters/chat"))
        wait_for_models(cluster, "chat")
        cluster.complete(prompt, 5, model="chat")
        assert fakes[1].requests[-1]["model"] == "chat"
        with pytest.raises(RuntimeError, match="404"):
            cluster.complete(prompt, 5, model="other")


def wait_for_models(cluster: LocalCluster, name: str) -> None:
    while name not in [each["id"] for each in cluster.get("/v1/models")["data"]]:
        pause(0.1)


def test_a_server_that_cannot_be_used_is_told_before_anything_starts(
    servers: FakeVllmThread,
) -> None:
    fake = servers.start("hub/model", has_statistics=False)
    with pytest.raises(RuntimeError, match="must be started without --disable-log-stats"):
        with attached_cluster([fake]):
            pass


@pytest.mark.parametrize(
    ("attach", "problem"),
    [
        ("store=http://127.0.0.1:1", "or mixed=http://HOST:PORT"),
        ("http://127.0.0.1:1", "or mixed=http://HOST:PORT"),
        ("prefill=http://127.0.0.1:1", "1 mixed workers need as many attached servers"),
        ("mixed=http://127.0.0.1:1,mixed=http://127.0.0.1:1", "names a server twice"),
    ],
)
def test_wrong_servers_are_told_before_anything_starts(attach: str, problem: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(problem)):
        with local_cluster(prefill=0, decode=0, mixed=1, settings={"attach": attach}):
            pass
