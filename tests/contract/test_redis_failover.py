"""Tests users of Redis over real servers that fail over, or refuse writes."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.errors import Unavailable
from baton.network.free_port import free_port
from baton.registry.membership import REJOIN_SECONDS, Membership
from baton.registry.redis import RedisRegistry
from baton.registry.redis_client import connect_redis
from baton.registry.redis_scripts import RedisScripts
from orchestrator.preflight import check_redis
from tests.redis_servers import RunningSentinel, RunningValkey, until_promotable, wait_for_link

LONG = 60.0


def member(name: str) -> Member:
    return Member(WorkerId(name), Role.PREFILL, "127.0.0.1:1", Incarnation(1), WorkerState.READY)


@dataclass
class Pair:
    """A primary and its replica, on one port of two addresses. ``url`` has a name, which leads to
    the server ``named``."""

    primary: RunningValkey
    replica: RunningValkey
    url: str
    named: RunningValkey

    def fail_over(self) -> None:
        """Promote the replica, make the primary its replica, and move the name."""
        self.replica.client().replicaof("NO", "ONE")
        self.primary.client().replicaof(self.replica.host, str(self.replica.port))
        self.named = self.replica


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with running_pair(tmp_path) as (primary, replica):
        found = Pair(primary, replica, f"redis://primary.test:{primary.port}/0", primary)
        resolve = socket.getaddrinfo

        def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
            host = found.named.host if host == "primary.test" else host
            return resolve(host, *arguments, **options)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        yield found


@contextmanager
def running_pair(folder: Path, **options: str) -> Iterator[tuple[RunningValkey, RunningValkey]]:
    primary = RunningValkey(folder / "primary", **options)
    source = f"{primary.host} {primary.port}"
    with primary:
        replica = RunningValkey(
            folder / "replica", host="127.0.0.2", port=primary.port, replicaof=source, **options
        )
        with replica:
            wait_for_link(replica, options.get("requirepass", ""))
            yield primary, replica


async def until_announced(registry: RedisRegistry, name: str) -> None:
    while True:
        try:
            assert await registry.announce(member(name), LONG)
            return
        except Unavailable:
            await asyncio.sleep(0.05)


async def test_a_member_follows_the_name_to_the_new_primary(pair: Pair) -> None:
    """The old primary lives on as a replica, and its connections stay open. Until the member has
    announced itself at the new one, it must not take the members of the old one for the truth."""
    registry = RedisRegistry(pair.url, "test")
    assert await registry.announce(member("a"), LONG)
    assert await registry.members() == [member("a")]
    pair.fail_over()
    with pytest.raises(Unavailable, match=r"primary\.test:\d+ failed: READONLY You can't write"):
        await registry.announce(member("b"), LONG)
    with pytest.raises(Unavailable, match=r"this member's lease can't be renewed: .*READONLY"):
        await registry.members()
    assert await registry.announce(member("b"), LONG)
    assert await registry.members() == [member("a"), member("b")]
    assert pair.replica.client().exists("baton:test:member:b")
    await registry.close()


async def test_other_calls_are_repeated_at_the_new_primary(pair: Pair) -> None:
    """A single call, a pipeline and a script, each over a connection to the old primary."""
    async with connect_redis(pair.url) as client:
        scripts = RedisScripts(pair.url, client)
        for name in "abc":
            await client.set(name, 0)
        pair.fail_over()
        await client.set("a", 1)
    async with connect_redis(pair.url) as client:
        scripts = RedisScripts(pair.url, client)
        pair.named = pair.primary
        await client.get("a")
        pair.named = pair.replica
        pipeline = client.pipeline(transaction=False)
        pipeline.set("b", 1)
        pipeline.eval("return redis.call('SET', KEYS[1], 1)", 1, "b")
        await pipeline.execute()
    async with connect_redis(pair.url) as client:
        scripts = RedisScripts(pair.url, client)
        pair.named = pair.primary
        await client.get("a")
        pair.named = pair.replica
        script = "redis.call('SET', KEYS[1], 1) return 1"
        assert await asyncio.gather(*(scripts.run(script, ("c",), ()) for _ in range(3))) == [1] * 3
    assert pair.replica.client().mget("a", "b", "c") == [b"1"] * 3


async def test_a_client_that_only_reads_follows_the_name(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old primary takes part no more, but answers on the connection that it has."""
    async with connect_redis(pair.url) as client:
        await client.set("a", "old")
        pair.replica.client().replicaof("NO", "ONE")
        pair.replica.client().set("a", "new")
        pair.named = pair.replica
        assert await client.get("a") == b"old"
        monkeypatch.setattr("baton.registry.redis_pools.MAX_CONNECTION_SECONDS", 0.0)
        assert await client.get("a") == b"new"


async def test_a_new_primary_that_lags_evicts_nobody(pair: Pair) -> None:
    """The new primary lacks the latest announcements, and the name of its database has not
    changed."""
    registry = RedisRegistry(pair.url, "test")
    clock = ManualClock()
    mirror = Membership(registry, clock)
    for name in "abc":
        await registry.announce(member(name), LONG)
    await mirror.refresh()
    pair.fail_over()
    pair.replica.client().delete("baton:test:member:c")
    with pytest.raises(Unavailable, match="READONLY"):
        await registry.announce(member("a"), LONG)
    await mirror.refresh()
    await registry.announce(member("a"), LONG)
    await mirror.refresh()
    assert mirror.members == [member("a"), member("b"), member("c")]
    clock.advance(REJOIN_SECONDS)
    await mirror.refresh()
    assert mirror.members == [member("a"), member("b")]
    await registry.close()


@pytest.mark.parametrize("how", ["demoted", "killed", "frozen"])
async def test_sentinels_lead_to_the_new_primary(tmp_path: Path, how: str) -> None:
    secret = {"requirepass": "pw", "primaryauth": "pw"}
    with running_pair(tmp_path, **secret) as (primary, replica):
        sentinel = RunningSentinel(
            tmp_path / "sentinel", "main", primary,
            "sentinel auth-pass main pw", "requirepass watch",
        )  # fmt: skip
        with sentinel:
            hosts = f"127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}"
            url = f"redis+sentinel://:pw@{hosts}/main/0?sentinel_password=watch"
            registry = RedisRegistry(url, "test")
            await registry.ping()
            await until_announced(registry, "a")
            with sentinel.client(password="watch") as client:
                until_promotable(client)
                if how == "demoted":
                    client.execute_command("SENTINEL", "FAILOVER", "main")
            if how == "killed":
                primary.kill()
            elif how == "frozen":
                primary.freeze()
            with replica.client(password="pw") as client:
                while not client.exists("baton:test:member:b"):
                    await until_announced(registry, "b")
            assert await registry.members() == [member("a"), member("b")]
            await registry.close()


async def test_members_stay_while_redis_is_full(tmp_path: Path) -> None:
    """Reads and deletions are answered, but no lease can be renewed."""
    server = RunningValkey(tmp_path)
    with server as url:
        registry = RedisRegistry(url, "test")
        clock = ManualClock()
        mirror = Membership(registry, clock)
        for name in "ab":
            await registry.announce(member(name), 0.05 if name == "b" else LONG)
        await mirror.refresh()
        server.client().config_set("maxmemory", 1)
        with pytest.raises(Unavailable, match="failed: OOM command not allowed"):
            await registry.announce(member("a"), LONG)
        while server.client().exists("baton:test:member:b"):
            pass
        for _ in range(3):
            clock.advance(REJOIN_SECONDS)
            await mirror.refresh()
            assert mirror.members == [member("a"), member("b")]
        server.client().config_set("maxmemory", 0)
        await registry.announce(member("a"), LONG)
        await mirror.refresh()
        assert mirror.members == [member("a"), member("b")]
        clock.advance(REJOIN_SECONDS)
        await mirror.refresh()
        assert mirror.members == [member("a")]
        await registry.close()


REFUSALS = {
    "full": ({"maxmemory": "1"}, "OOM command not allowed"),
    "replica": ({"replicaof": "127.0.0.1 1"}, "READONLY You can't write against a read only"),
    "stale replica": (
        {"replicaof": "127.0.0.1 1", "replica-serve-stale-data": "no"}, "MASTERDOWN Link with"
    ),
    "isolated": ({"min-replicas-to-write": "1"}, "NOREPLICAS Not enough good replicas"),
    "no scripts": ({}, "NOPERM .* 'eval' command"),
    "cluster": ({"cluster-enabled": "yes"}, "cluster-enabled no"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_a_redis_that_refuses_writes_is_refused_with_its_reason(tmp_path: Path, case: str) -> None:
    options, reason = REFUSALS[case]
    if case == "cluster":
        options = options | {"cluster-port": str(free_port())}
    server = RunningValkey(tmp_path, **options)
    with server as url:
        if case == "cluster":
            server.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while server.client().cluster("INFO")["cluster_state"] != "ok":  # type: ignore[index]
                pass
        if case == "no scripts":
            server.client().execute_command("ACL", "SETUSER", "default", "-@scripting")
        with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{server.port} failed: .*{reason}"):
            check_redis(url, "test")
