"""Tests two routers on one port: they share limits and usage accounting, and if one of them dies,
the other one keeps serving."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import yaml

from baton.core.api_key import hash_api_key
from baton.core.worker_kinds import WORKER_KINDS
from baton.registry.redis import RedisRegistry
from orchestrator.cluster_state import ClusterFolder
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import pause

pytestmark = pytest.mark.timeout(300)
LIMITED, FREE = "limited-tenant-key-00", "free-tenant-key-00000"
LIMIT = 40
SHORT: dict[str, Any] = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 1}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    tenants = {
        "limited": {"keys": [hash_api_key(LIMITED)], "limits": {"requests_per_minute": LIMIT}},
        "free": {"keys": [hash_api_key(FREE)], "limits": {"concurrent_requests": 2}},
    }
    path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": tenants}))
    settings = {"tenants_file": path, "routers": 2, "admin_key": "root"}
    with local_cluster(settings=settings) as running:
        yield running


def client(cluster: LocalCluster, key: str) -> openai.OpenAI:
    """Return a client that has its own connection."""
    return openai.OpenAI(base_url=cluster.url + "/v1", api_key=key, max_retries=0)


def at_each_router(cluster: LocalCluster, key: str) -> tuple[list[openai.OpenAI], int]:
    """Return a client for each router, and how many requests were needed to reach both: the kernel
    chooses a router for each new connection."""
    clients: dict[str, openai.OpenAI] = {}
    num_requests = 0
    while len(clients) < 2:
        num_requests += 1
        new = client(cluster, key)
        answer = new.completions.with_raw_response.create(**SHORT)
        router = str(answer.headers["x-request-id"]).split("-")[1]
        if clients.setdefault(router, new) is not new:
            new.close()
    return list(clients.values()), num_requests


def count_admitted(client: openai.OpenAI, attempts: int) -> int:
    count = 0
    for _ in range(attempts):
        try:
            client.completions.create(**SHORT)
        except openai.RateLimitError as error:
            assert error.code == "rate_limit_exceeded"
        else:
            count += 1
    return count


def usage(cluster: LocalCluster, tenant: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(cluster.baton("usage", "--json").stdout)
    return dict(report["tenants"].get(tenant, {"requests": 0, "refused_requests": 0}))


def test_one_connection_can_use_nearly_all_of_a_limit(pair: LocalCluster) -> None:
    began_at = time.monotonic()
    (first, second), num_requests = at_each_router(pair, LIMITED)
    counts = [count_admitted(first, LIMIT), count_admitted(second, LIMIT)]
    refilled = (time.monotonic() - began_at) * LIMIT / 60
    total = sum(counts) + num_requests
    assert LIMIT * 0.8 <= total <= LIMIT * 1.1 + refilled + 1
    assert counts[0] > LIMIT / 2 + 5, counts  # more than one router's equal share
    refused = 2 * LIMIT - sum(counts)
    spent = usage(pair, "limited")
    while spent["requests"] < total or spent["refused_requests"] < refused:
        pause(0.1)  # each router stores its counts a moment later
        spent = usage(pair, "limited")
    assert (spent["requests"], spent["refused_requests"]) == (total, refused)


def count_running(cluster: LocalCluster) -> int:
    """Return the total number of requests on all workers, from their heartbeats."""

    state = ClusterFolder(cluster.home, "default").read_running()

    async def ask() -> int:
        registry = RedisRegistry(state.redis_url, "default", state.cluster_secret)
        try:
            members = await registry.members()
        finally:
            await registry.close()
        workers = [member for member in members if member.role in WORKER_KINDS]
        return sum(member.load.running + member.load.waiting for member in workers)

    return asyncio.run(ask())


def test_the_requests_and_slots_of_a_killed_router_are_released(pair: LocalCluster) -> None:
    """Workers drop the killed router's requests, its concurrency slots are released, and the other
    router keeps serving."""
    killed = pair.processes("router")[0]
    clients, _ = at_each_router(pair, FREE)
    long = {**SHORT, "max_tokens": 1000, "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [each.completions.create(**long) for each in clients]
    for stream in streams:
        next(iter(stream))
    while count_running(pair) != 2:  # the next heartbeat reports them
        pause(0.1)
    with pytest.raises(openai.RateLimitError, match="concurrent requests: limit 2"):
        client(pair, FREE).completions.create(**SHORT)
    os.kill(killed["pid"], signal.SIGKILL)
    ends = [_finish_reason(stream) for stream in streams]
    assert sorted(ends) == ["broken", "length"]
    while count_running(pair):
        pause(0.1)
    with client(pair, FREE) as another:
        while not count_admitted(another, 1):  # the dead router keeps its slot for ten seconds
            pause(0.1)
    at_each_router(pair, FREE)  # the supervisor has started a new router


def _finish_reason(stream: Any) -> str:
    """Read a stream to its end; return its finish reason, or "broken"."""
    reason = ""
    try:
        for chunk in stream:
            reason = chunk.choices[0].finish_reason or reason
    except (openai.APIError, httpx.HTTPError):
        return "broken"
    return reason
