"""Two routers on one port: one limit over both, one account of both, and one that dies."""

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
from baton.core.states import Role
from baton.registry.redis import RedisRegistry
from benchmarks.machine import pause
from orchestrator.cluster_state import ClusterFolder
from tools.local_cluster import LocalCluster, local_cluster

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
    """On a connection of its own."""
    return openai.OpenAI(base_url=cluster.url + "/v1", api_key=key, max_retries=0)


def at_each_router(cluster: LocalCluster, key: str) -> tuple[list[openai.OpenAI], int]:
    """A client on a connection to either, and how many requests that took: new connections go to
    whichever the kernel likes."""
    found: dict[str, openai.OpenAI] = {}
    num_asked = 0
    while len(found) < 2:
        num_asked += 1
        asking = client(cluster, key)
        answer = asking.completions.with_raw_response.create(**SHORT)
        router = str(answer.headers["x-request-id"]).split("-")[1]
        if found.setdefault(router, asking) is not asking:
            asking.close()
    return list(found.values()), num_asked


def admitted(asking: openai.OpenAI, attempts: int) -> int:
    count = 0
    for _ in range(attempts):
        try:
            asking.completions.create(**SHORT)
        except openai.RateLimitError as error:
            assert error.code == "rate_limit_exceeded"
        else:
            count += 1
    return count


def usage(cluster: LocalCluster, tenant: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(cluster.baton("usage", "--json").stdout)
    return dict(told["tenants"].get(tenant, {"requests": 0, "refused_requests": 0}))


def test_all_of_a_limit_is_there_over_one_connection(pair: LocalCluster) -> None:
    begun = time.monotonic()
    (first, second), num_asked = at_each_router(pair, LIMITED)
    counts = [admitted(first, LIMIT), admitted(second, LIMIT)]
    drained = (time.monotonic() - begun) * LIMIT / 60
    total = sum(counts) + num_asked
    assert LIMIT * 0.8 <= total <= LIMIT * 1.1 + drained + 1
    assert counts[0] > LIMIT / 2 + 5, counts  # more than a part of it
    while (told := usage(pair, "limited"))["requests"] < total:
        pause(0.1)
    assert told["requests"] == total
    assert told["refused_requests"] == 2 * LIMIT - sum(counts)


def running(cluster: LocalCluster) -> int:
    """Requests at all workers, as they say themselves."""

    state = ClusterFolder(cluster.home, "default").running()

    async def ask() -> int:
        registry = RedisRegistry(state.redis_url, "default", state.cluster_secret)
        try:
            members = await registry.members()
        finally:
            await registry.close()
        workers = [member for member in members if member.role in (Role.PREFILL, Role.DECODE)]
        return sum(member.load.running + member.load.waiting for member in workers)

    return asyncio.run(ask())


def test_one_router_dies(pair: LocalCluster) -> None:
    """What it had begun is freed, its seats are given to others, and the other serves on."""
    killed = pair.processes("router")[0]
    clients, _ = at_each_router(pair, FREE)
    long = {**SHORT, "max_tokens": 1000, "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [asking.completions.create(**long) for asking in clients]
    for stream in streams:
        next(iter(stream))
    while running(pair) != 2:  # as told with the next heartbeat
        pause(0.1)
    with pytest.raises(openai.RateLimitError, match="concurrent requests: limit 2"):
        client(pair, FREE).completions.create(**SHORT)
    os.kill(killed["pid"], signal.SIGKILL)
    ends = [_end(stream) for stream in streams]
    assert sorted(ends) == ["broken", "length"]
    while running(pair):
        pause(0.1)
    with client(pair, FREE) as asking:
        while not admitted(asking, 1):  # for ten seconds the dead one's seat is its own
            pause(0.1)
    at_each_router(pair, FREE)  # the supervisor has started another


def _end(stream: Any) -> str:
    reason = ""
    try:
        for chunk in stream:
            reason = chunk.choices[0].finish_reason or reason
    except (openai.APIError, httpx.HTTPError):
        return "broken"
    return reason
