"""One suite over the registry in Redis and its in-memory twin."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis

from baton.clock import ManualClock, SystemClock
from baton.core.ids import Generation, WorkerId
from baton.core.member import Load, Member
from baton.core.states import Role, WorkerState
from baton.errors import Invalid, Unavailable
from baton.registry.base import Registry
from baton.registry.codec import MAX_MEMBER_BYTES, member_from_json, member_to_json
from baton.registry.heartbeat import TTL_BEATS, Heartbeat
from baton.registry.membership import Membership
from baton.registry.memory import MemoryRegistry
from baton.registry.redis import RedisRegistry
from tests.contract.conftest import RunningValkey

LONG = 60.0


def member(name: str, generation: int = 1, state: WorkerState = WorkerState.READY) -> Member:
    return Member(
        WorkerId(name), Role.PREFILL, "127.0.0.1:1", Generation(generation), state,
        model_digest="ab", block_tokens=16, transports=("shm", "grpc"), load=Load(running=3),
    )  # fmt: skip


@pytest.fixture(params=["memory", "redis"])
async def registry(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[Registry]:
    if request.param == "memory":
        yield MemoryRegistry(SystemClock())
        return
    async with Redis.from_url(valkey_url) as client:
        await client.flushall()
    opened = RedisRegistry(valkey_url, "test")
    yield opened
    await opened.close()


async def test_members_come_back_as_announced_by_id(registry: Registry) -> None:
    await registry.ping()
    assert await registry.members() == []
    for name in ("b", "a"):
        assert await registry.announce(member(name), LONG)
    assert await registry.members() == [member("a"), member("b")]
    changed = replace(member("a"), state=WorkerState.DRAINING)
    assert await registry.announce(changed, LONG)
    assert await registry.members() == [changed, member("b")]


async def test_an_older_life_neither_announces_nor_withdraws(registry: Registry) -> None:
    assert await registry.announce(member("a", 1), LONG)
    assert await registry.announce(member("a", 2), LONG)
    assert not await registry.announce(member("a", 1), LONG)
    await registry.withdraw(WorkerId("a"), Generation(1))
    assert await registry.members() == [member("a", 2)]
    await registry.withdraw(WorkerId("a"), Generation(2))
    await registry.withdraw(WorkerId("a"), Generation(2))
    assert await registry.members() == []


async def test_a_lease_ends_by_itself(registry: Registry) -> None:
    assert await registry.announce(member("short"), 0.001)
    assert await registry.announce(member("long"), LONG)
    while len(found := await registry.members()) > 1:
        pass
    assert found == [member("long")]


async def test_leases_follow_the_clock() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    await registry.announce(member("a"), 3.0)
    clock.advance(2.9)
    assert await registry.members() == [member("a")]
    clock.advance(0.1)
    assert await registry.members() == []


async def test_what_redis_holds_is_not_trusted(valkey_url: str) -> None:
    registry = RedisRegistry(valkey_url, "garbage")
    with redis.Redis.from_url(valkey_url) as client:
        for name, value in {b"x": b"\xff\x00", b"y": b"{}", b"\xfe": b"[1, 2]"}.items():
            client.sadd("baton:garbage:members", name)
            client.set(b"baton:garbage:member:" + name, value)
    assert await registry.announce(member("x", 5), LONG)  # over what was no member
    assert await registry.members() == [member("x", 5)]
    await registry.close()


async def test_clusters_do_not_meet(valkey_url: str) -> None:
    one, other = RedisRegistry(valkey_url, "one"), RedisRegistry(valkey_url, "other")
    await one.announce(member("a"), LONG)
    assert await other.members() == []
    await one.close()
    await other.close()


async def test_redis_gone_and_back(tmp_path: Path) -> None:
    server = RunningValkey(tmp_path)
    registry = RedisRegistry(server.url, "test")
    with server:
        assert await registry.announce(member("a"), LONG)
    for call in (registry.ping, registry.members):
        with pytest.raises(Unavailable, match=r"Redis at 127\.0\.0\.1:\d+ can't be asked"):
            await call()
    with server:
        assert await registry.announce(member("a"), LONG)
        assert await registry.members() == [member("a")]
    await registry.close()


@pytest.mark.parametrize(
    "change",
    [{"generation": -1}, {"generation": "1"}, {"role": "cook"}, {"address": 7}, {"pid": True}],
)
def test_malformed_members_are_refused(change: dict[str, object]) -> None:
    import orjson

    raw = orjson.loads(member_to_json(member("a")))
    assert member_from_json(orjson.dumps(raw)) == member("a")
    with pytest.raises(Invalid, match="not a member"):
        member_from_json(orjson.dumps(raw | change))


def test_an_oversized_member_is_refused() -> None:
    with pytest.raises(Invalid, match="at most"):
        member_from_json(b" " * (MAX_MEMBER_BYTES + 1))


async def test_a_heartbeat_outlives_an_outage_and_yields_to_a_newer_life() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    heart = Heartbeat(registry, lambda: member("a", 1), clock, interval_seconds=1.0)
    await heart.beat()
    registry.reachable = False
    await heart.beat()
    registry.reachable = True
    clock.advance(TTL_BEATS - 0.5)
    assert await registry.members() == [member("a", 1)]
    clock.advance(0.5)
    assert await registry.members() == []
    await heart.beat()
    assert await registry.members() == [member("a", 1)]
    await registry.announce(member("a", 2), LONG)
    with pytest.raises(Unavailable, match="a newer a has taken over"):
        await heart.beat()


async def test_membership_keeps_what_it_knew_during_an_outage() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    mirror = Membership(registry, clock, grace_seconds=100.0)
    drains = replace(member("b"), state=WorkerState.DRAINING)
    await registry.announce(member("a"), LONG)
    await registry.announce(drains, LONG)
    await mirror.refresh()
    assert mirror.members == [member("a"), drains]
    assert mirror.ready(Role.PREFILL) == [member("a")]
    assert mirror.ready(Role.DECODE) == []
    registry.reachable = False
    clock.advance(99.0)
    await mirror.refresh()
    assert mirror.members == [member("a"), drains]
    clock.advance(2.0)
    await mirror.refresh()
    assert mirror.members == []
