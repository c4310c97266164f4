"""Tests that answers continue, token for token, while Redis fails over to a replica, dies, and is
full, and that all members are then registered at the new primary."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from testkit.local_cluster import BATON, LocalCluster, local_cluster
from tests.redis_servers import (
    MovableAddress,
    RunningSentinel,
    RunningValkey,
    until_promotable,
    wait_for_link,
)

pytestmark = pytest.mark.timeout(300)
PROMPT = list(range(10, 90))
TOKENS = 100
FIELDS = {"temperature": 0, "ignore_eos": True}
FULL_SECONDS = 11.0
"""How long Redis stays full after all leases have ended: longer than members would stay."""


@contextmanager
def under_streams(cluster: LocalCluster) -> Iterator[None]:
    """In the ``with`` block, two clients ask without a pause; each answer must have exactly the
    tokens that it has before."""
    expected, stop = cluster.complete(PROMPT, TOKENS, **FIELDS), Event()

    def ask() -> int:
        answers = 0
        while not stop.is_set():
            assert cluster.complete(PROMPT, TOKENS, **FIELDS) == expected
            answers += 1
        return answers

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            yield
        finally:
            stop.set()
        assert all(each.result() > 0 for each in asking)


def members(cluster: LocalCluster) -> set[str]:
    return {each["id"] for each in cluster.status()["processes"]} - {"redis"}


def leases(server: RunningValkey) -> set[str]:
    with server.client() as client:
        keys: list[bytes] = client.keys("baton:default:member:*")  # type: ignore[assignment]
    return {key.decode().rpartition(":")[2] for key in keys}


def wait_for_leases(server: RunningValkey, ids: set[str]) -> None:
    """Wait until just the members ``ids`` have leases at ``server``, for 10 s at most."""
    until = time.monotonic() + 10.0
    while (found := leases(server)) != ids:
        assert time.monotonic() < until, (found, ids)
        time.sleep(0.05)  # noqa: TID251


@contextmanager
def running_pair(folder: Path) -> Iterator[tuple[RunningValkey, RunningValkey]]:
    primary = RunningValkey(folder / "primary")
    source = f"{primary.host} {primary.port}"
    replica = RunningValkey(folder / "replica", host="127.0.0.2", replicaof=source)
    with primary, replica:
        wait_for_link(replica)
        yield primary, replica


def test_members_follow_an_address_to_the_new_primary_and_stay_while_it_is_full(
    tmp_path: Path,
) -> None:
    """The old primary lives on as a replica, and keeps its connections. A new worker then evicts
    nobody, a router that restarts knows all workers, and a full Redis changes nothing."""
    with (
        running_pair(tmp_path) as (old, new),
        MovableAddress(old) as address,
        local_cluster(settings={"redis_url": address.url}) as cluster,
    ):
        wait_for_leases(old, members(cluster))
        with under_streams(cluster):
            new.client().replicaof("NO", "ONE")
            old.client().replicaof(new.host, str(new.port))
            address.target = new
            new.client().flushall()  # what is there from now on was announced there
            wait_for_leases(new, members(cluster))
            cluster.baton("scale", "decode=2")
            wait_for_leases(new, members(cluster))
        assert "decode-1" in members(cluster)
        check_that_programs_do_not_start(cluster, old, "READONLY You can't write")

        (router,) = cluster.processes("router")
        os.kill(router["pid"], signal.SIGKILL)
        while not cluster.processes("router")[0]["restarts"]:
            pass
        cluster.wait_until_ready()
        with under_streams(cluster):
            new.client().config_set("maxmemory", 1)
            wait_for_leases(new, set())
            until = time.monotonic() + FULL_SECONDS
            while time.monotonic() < until:
                status = json.loads(cluster.baton("status", "--json").stdout)
                assert status["ready"] and "failed: OOM command not allowed" in status["redis"]
            new.client().config_set("maxmemory", 0)
            wait_for_leases(new, members(cluster))
        assert json.loads(cluster.baton("status", "--json").stdout)["redis"] == ""


def check_that_programs_do_not_start(
    cluster: LocalCluster, server: RunningValkey, reason: str
) -> None:
    """``server`` answers a PING, but refuses writes: ``up`` and ``serve`` end by themselves."""
    home = str(cluster.home / "refused")
    environment = cluster.environment | {"BATON_REDIS_URL": server.url, "BATON_HOME": home}
    for command in (["up", "--port", "0"], ["serve", "conductor"]):
        ended = subprocess.run(
            [*BATON, *command], env=environment, capture_output=True, text=True, timeout=120.0
        )
        assert ended.returncode == 1 and reason in ended.stderr


def test_members_follow_sentinels_to_the_new_primary(tmp_path: Path) -> None:
    """First the primary is demoted; then the new one is killed, and the old one promoted."""
    with running_pair(tmp_path) as (one, two):
        sentinel = RunningSentinel(tmp_path / "sentinel", "main", one)
        settings = {"redis_url": f"redis+sentinel://127.0.0.1:{sentinel.port}/main"}
        with sentinel, local_cluster(prefill=0, decode=0, mixed=1, settings=settings) as cluster:
            wait_for_leases(one, members(cluster))
            with under_streams(cluster), sentinel.client() as client:
                until_promotable(client)
                client.execute_command("SENTINEL", "FAILOVER", "main")
                while leases(two) != members(cluster) or not is_primary(two):
                    pass
                until_promotable(client)
                two.kill()
                while not is_primary(one):
                    pass
                wait_for_leases(one, members(cluster))
            assert cluster.status()["ready"]


def is_primary(server: RunningValkey) -> bool:
    with server.client() as client:
        return bool(client.info("replication")["role"] == "master")  # type: ignore[index]
