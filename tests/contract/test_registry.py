"""Runs one test suite over the registry in Redis and over its in-memory implementation."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import redis
from redis.asyncio import Redis
from structlog.testing import capture_logs

from baton.clock import ManualClock, SystemClock
from baton.core.adapter import (
    MAX_ADAPTER_ERROR,
    MAX_ADAPTER_NAME,
    MAX_ADAPTERS,
    WorkerAdapter,
)
from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.pending_settings import PendingSettings
from baton.core.server_api import KNOWN_PATHS, ServerApi
from baton.core.states import Role, WorkerState
from baton.core.worker_load import MAX_QUEUED, QueuedWork, WorkerLoad
from baton.errors import Invalid, Unavailable
from baton.registry.base import Registry
from baton.registry.entry_scan import PAGE_ENTRIES
from baton.registry.limits import MAX_LOGGED_ENTRIES, MAX_MEMBER_BYTES, MAX_READ_ENTRIES
from baton.registry.member_codec import member_from_json, member_to_json
from baton.registry.redis import RedisRegistry
from baton.registry.redis_client import call_redis, connect_redis
from testkit.fakes.registry import MemoryRegistry
from tests.redis_servers import RunningValkey

LONG = 60.0
LOAD = WorkerLoad(
    running=3,
    at_seconds=1.5e9,
    queue=(QueuedWork(-0.5, 0.25), QueuedWork(None, 0.0)),
    prefill_cost=PrefillCost(1e-3, 2e-5, 3e-9),
    num_first_tokens=7,
    num_late_first_tokens=1,
    decode_requests=2,
    decode_cost=DecodeCost(1e-2, 1e-4, 1e-8),
    answer_tokens=100.5,
)


def member(name: str, generation: int = 1, state: WorkerState = WorkerState.READY) -> Member:
    return Member(
        WorkerId(name), Role.PREFILL, "127.0.0.1:1", Incarnation(generation), state,
        model_digest="ab", block_tokens=16, transports=("shm", "grpc"), load=LOAD,
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


async def test_members_are_returned_as_announced_sorted_by_id(registry: Registry) -> None:
    await registry.ping()
    assert await registry.members() == []
    for name in ("b", "a"):
        assert await registry.announce(member(name), LONG)
    assert await registry.members() == [member("a"), member("b")]
    changed = replace(member("a"), state=WorkerState.DRAINING)
    assert await registry.announce(changed, LONG)
    assert await registry.members() == [changed, member("b")]


async def test_a_flushed_registry_has_another_incarnation(valkey_url: str) -> None:
    """After a flush, all readers see the same new ``database_id``."""
    async with Redis.from_url(valkey_url) as client:
        await client.flushall()
        one, two = RedisRegistry(valkey_url, "test"), RedisRegistry(valkey_url, "test")
        assert await one.members() == await two.members() == []
        first = one.database_id
        assert first and two.database_id == first
        await one.announce(member("a"), LONG)
        assert await one.members() == [member("a")] and one.database_id == first
        await client.flushall()
        assert await two.members() == await one.members() == []
        assert one.database_id == two.database_id != first
    await one.close()
    await two.close()


async def test_an_older_incarnation_can_neither_announce_nor_withdraw(registry: Registry) -> None:
    assert await registry.announce(member("a", 1), LONG)
    assert await registry.announce(member("a", 2), LONG)
    assert not await registry.announce(member("a", 1), LONG)
    await registry.withdraw(WorkerId("a"), Incarnation(1))
    assert await registry.members() == [member("a", 2)]
    await registry.withdraw(WorkerId("a"), Incarnation(2))
    await registry.withdraw(WorkerId("a"), Incarnation(2))
    assert await registry.members() == []


async def test_a_lease_expires(registry: Registry) -> None:
    assert await registry.announce(member("short"), 0.001)
    assert await registry.announce(member("long"), LONG)
    while len(found := await registry.members()) > 1:
        pass
    assert found == [member("long")]


async def test_a_shorter_lease_replaces_a_longer_one(registry: Registry) -> None:
    assert await registry.announce(member("a"), LONG)
    assert await registry.announce(member("a"), 0.001)
    while await registry.members():
        pass
    # An older incarnation may be announced again once no newer one has a lease.
    assert await registry.announce(member("a", 2), LONG)
    await registry.withdraw(WorkerId("a"), Incarnation(2))
    assert await registry.announce(member("a", 1), LONG)
    assert await registry.members() == [member("a", 1)]


async def test_leases_follow_the_clock() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    await registry.announce(member("a"), 3.0)
    clock.advance(2.75)
    assert await registry.members() == [member("a")]
    await registry.announce(member("a"), 3.0)  # renews
    clock.advance(2.75)
    assert await registry.members() == [member("a")]
    clock.advance(0.25)
    assert await registry.members() == []


async def test_malformed_entries_in_redis_are_ignored(valkey_url: str) -> None:
    registry = RedisRegistry(valkey_url, "garbage")
    bad = {b"x": b"\xff\x00", b"y": b"{}", b"z": member_to_json(member("a")), b"\xfe": b"[1, 2]"}
    with redis.Redis.from_url(valkey_url) as client:
        for name, value in bad.items():
            client.sadd("baton:garbage:members", name)
            client.set(b"baton:garbage:member:" + name, value)
    assert await registry.announce(member("a", 5), LONG)
    with capture_logs() as lines:
        assert await registry.members() == [member("a", 5)]
    logged = [(line["event"], line["log_level"], line["member"]) for line in lines]
    assert logged == [("malformed_member", "warning", name) for name in "xyz"]
    assert await registry.announce(member("x", 5), LONG)  # replaces the malformed entry
    assert await registry.members() == [member("a", 5), member("x", 5)]
    await registry.close()


@pytest.mark.parametrize(
    "value",
    [b"\xff", b"7", b"{}", *(b'{"generation":%b}' % g for g in (b'"x"', b"null", b"1e300"))],
)
async def test_a_malformed_entry_does_not_block_an_announcement(
    valkey_url: str, value: bytes
) -> None:
    registry = RedisRegistry(valkey_url, "blocked")
    with redis.Redis.from_url(valkey_url) as client:
        client.delete("baton:blocked:member:a")
        client.set("baton:blocked:member:a", value)
        await registry.withdraw(WorkerId("a"), Incarnation(1))
        assert client.get("baton:blocked:member:a") is None
        client.set("baton:blocked:member:a", value)
        assert await registry.announce(member("a"), LONG)
        assert await registry.members() == [member("a")]
        client.delete("baton:blocked:member:a")
        client.lpush("baton:blocked:member:a", value)
    assert await registry.announce(member("a"), LONG)
    assert await registry.members() == [member("a")]
    await registry.close()


async def test_entries_that_are_not_signed_with_the_cluster_secret_are_ignored(
    valkey_url: str,
) -> None:
    """An unsigned entry, or one signed with another secret, is ignored and logged once."""
    registry = RedisRegistry(valkey_url, "sealed", "a secret")
    other = RedisRegistry(valkey_url, "sealed", "another secret")
    assert await registry.announce(member("a"), LONG)
    assert await other.announce(member("b"), LONG)
    with redis.Redis.from_url(valkey_url) as client:
        client.sadd("baton:sealed:members", "c")
        client.set("baton:sealed:member:c", member_to_json(member("c")))
        assert b"a secret" not in client.get("baton:sealed:member:a")  # type: ignore[operator]
    with capture_logs() as lines:
        for _ in range(3):
            assert await registry.members() == [member("a")]
    assert [(line["event"], line["member"]) for line in lines] == [
        ("untrusted_member", "b"), ("untrusted_member", "c"),
    ]  # fmt: skip
    assert "cluster_secret" in lines[0]["error"] and "the entry is not signed" in lines[1]["error"]
    await registry.close()
    await other.close()


async def test_a_forged_newer_incarnation_does_not_displace_a_member(valkey_url: str) -> None:
    """A member exits once a newer incarnation has replaced it, so an unsigned newer entry must be
    ignored."""
    registry = RedisRegistry(valkey_url, "coup", "a secret")
    forged = member_to_json(member("a", 9))
    with redis.Redis.from_url(valkey_url) as client:
        client.set("baton:coup:member:a", forged)
        assert await registry.announce(member("a", 5), LONG)
        assert await registry.members() == [member("a", 5)]
        assert await registry.announce(member("a", 6), LONG)
        taken_over = client.get("baton:coup:member:a")
        assert not await registry.announce(member("a", 5), LONG)
        assert client.get("baton:coup:member:a") == taken_over
    await registry.close()


async def test_forged_entries_written_in_a_race_make_the_registry_unavailable(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = RedisRegistry(valkey_url, "race", "a secret")
    with redis.Redis.from_url(valkey_url) as client:
        script, generations = registry._script, iter(range(100, 200))

        async def raced(*arguments: object) -> object:
            client.set("baton:race:member:a", member_to_json(member("a", next(generations))))
            return await script(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(registry, "_script", raced)
        with pytest.raises(Unavailable, match="a program that is not a member keeps writing"):
            await registry.announce(member("a"), LONG)
    await registry.close()


async def test_replies_have_a_size_limit(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that is too large is rejected before all of it is read; small replies still work."""
    monkeypatch.setattr("baton.registry.bounded_parser.MAX_REPLY_BYTES", 1 << 20)
    client = connect_redis(valkey_url)
    with redis.Redis.from_url(valkey_url) as other:
        other.set("huge", bytes(2 << 20))
        other.sadd("many", *range(20_000))
    for call in (client.get, client.smembers):
        with pytest.raises(Unavailable, match="Redis sent a reply of more than 1 MiB"):
            await call_redis(valkey_url, call("huge" if call == client.get else "many"))
        assert await call_redis(valkey_url, client.strlen("huge")) == 2 << 20
    await client.aclose()


async def test_a_large_entry_counts_as_malformed(valkey_url: str) -> None:
    registry = RedisRegistry(valkey_url, "large")
    assert await registry.announce(member("a"), LONG)
    with redis.Redis.from_url(valkey_url) as client:
        client.set("baton:large:member:b", bytes(40 << 20))
        client.sadd("baton:large:members", "b", bytes(40 << 20))
    with capture_logs() as lines:
        assert await registry.members() == [member("a")]
    assert [(line["event"], line["member"]) for line in lines] == [("malformed_member", "b")]
    await registry.close()


async def test_forged_entries_displace_no_member(valkey_url: str) -> None:
    """More unsigned entries than a cluster may have members, with ids before all of theirs."""
    registry = RedisRegistry(valkey_url, "flood", "a secret")
    others = [RedisRegistry(valkey_url, "flood", "a secret") for _ in range(2)]
    known, new = [member("x"), member("y")], member("z")
    for each in known:
        assert await registry.announce(each, LONG)
    assert await registry.members() == known
    forge_members(valkey_url, "flood", 3 * MAX_READ_ENTRIES)
    with capture_logs() as lines:
        for _ in range(8):  # more than one turn over all ids
            assert await registry.members() == known
    assert {line["event"] for line in lines} == {"untrusted_member"}
    assert len(lines) == MAX_LOGGED_ENTRIES
    assert await registry.announce(new, LONG)
    for reader in (registry, others[0]):  # the second one has known nobody
        found = [await reader.members() for _ in range(5)]
        assert found[-1] == [*known, new]
    for each in (registry, *others):
        await each.close()


async def test_a_call_reads_a_bounded_part_of_forged_entries(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = RedisRegistry(valkey_url, "burden", "a secret")
    parse, sizes = registry._signer.verify, list[int]()
    monkeypatch.setattr(registry._signer, "verify", lambda e: (sizes.append(len(e)), parse(e))[1])
    for count, size, most in ((20_000, 1, MAX_READ_ENTRIES), (1000, MAX_MEMBER_BYTES, 64)):
        with redis.Redis.from_url(valkey_url) as client:
            client.flushdb()
        forge_members(valkey_url, "burden", count, size)
        for _ in range(3):
            sizes.clear()
            assert await registry.members() == []
            assert 0 < len(sizes) <= most + 2 * PAGE_ENTRIES
    await registry.close()


def forge_members(url: str, cluster: str, count: int, size: int = 1) -> None:
    with redis.Redis.from_url(url) as client, client.pipeline(transaction=False) as pipe:
        for number in range(count):
            pipe.sadd(f"baton:{cluster}:members", f"a{number}")
            pipe.set(f"baton:{cluster}:member:a{number}", bytes(size))
        pipe.execute()


async def test_a_lost_list_of_members_is_written_again(registry: Registry) -> None:
    assert await registry.announce(member("a"), LONG)
    if isinstance(registry, RedisRegistry):
        await registry._redis.delete(registry._ids)
    assert await registry.announce(member("a"), LONG)
    assert await registry.members() == [member("a")]


async def test_the_number_of_members_is_bounded(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.registry.redis.MAX_MEMBERS", 2)
    registry = RedisRegistry(valkey_url, "crowd")
    for name in "cba":
        await registry.announce(member(name), LONG)
    assert await registry.members() == [member("a"), member("b")]
    await registry.close()


async def test_clusters_are_isolated(valkey_url: str) -> None:
    one, other = RedisRegistry(valkey_url, "one"), RedisRegistry(valkey_url, "other")
    await one.announce(member("a"), LONG)
    assert await other.members() == []
    await one.close()
    await other.close()


async def test_redis_may_be_gone_and_come_back(tmp_path: Path) -> None:
    server = RunningValkey(tmp_path)
    registry = RedisRegistry(server.url, "test")
    with server:
        assert await registry.announce(member("a"), LONG)
    for call in (
        registry.ping(),
        registry.members(),
        registry.announce(member("a"), LONG),
        registry.withdraw(WorkerId("a"), Incarnation(1)),
    ):
        with pytest.raises(Unavailable, match=r"Redis at 127\.0\.0\.1:\d+ failed"):
            await call
    with server:
        assert await registry.announce(member("a"), LONG)
        assert await registry.members() == [member("a")]
    await registry.close()


@pytest.mark.parametrize(
    "change",
    [
        {"generation": -1},
        {"generation": 2**63},
        {"block_tokens": 10**18},
        {"generation": "1"},
        {"role": "cook"},
        {"address": 7},
        {"pid": True},
        {"load": {"running": 1}},
        {"transports": 1},
        {"model_digest": "not hex"},
        {"server_api": {"model": 1, "paths": []}},
        {"server_api": {"model": ""}},
    ],
)
def test_malformed_members_are_refused(change: dict[str, object]) -> None:
    raw = orjson.loads(member_to_json(member("a")))
    assert member_from_json(orjson.dumps(raw)) == member("a")
    with pytest.raises(Invalid, match="not a valid member"):
        member_from_json(orjson.dumps(raw | change))


@pytest.mark.parametrize(
    "change",
    [
        {"at_seconds": "now"},
        {"at_seconds": -1},
        {"decode_requests": 0.5},
        {"queue": None},
        {"queue": [{"deadline_seconds": None}]},
        {"queue": [{"deadline_seconds": "soon", "work_seconds": 1}]},
        {"queue": [{"deadline_seconds": 0, "work_seconds": -1}]},
        {"queue": [{"deadline_seconds": 0, "work_seconds": 1}] * (MAX_QUEUED + 1)},
        {"prefill_cost": {"fixed_seconds": 1}},
        {"decode_cost": 7},
        {"answer_tokens": True},
        {"answer_tokens": 1e300},
        {"queued_tokens": 10**18},
        {"queue": [{"deadline_seconds": -1e300, "work_seconds": 1}]},
        {"link_bytes_per_second": 1e-300},
        {"link_bytes_per_second": 0},
    ],
)
def test_malformed_loads_are_refused(change: dict[str, object]) -> None:
    raw = orjson.loads(member_to_json(member("a")))
    with pytest.raises(Invalid, match="not a valid member"):
        member_from_json(orjson.dumps(raw | {"load": raw["load"] | change}))


def test_a_full_report_is_small() -> None:
    work = QueuedWork(-123.456789012345678, 0.123456789012345678)
    full = replace(member("a"), load=replace(LOAD, queue=(work,) * MAX_QUEUED))
    assert len(member_to_json(full)) < 5_000
    assert member_from_json(member_to_json(full)) == full


def test_members_of_the_version_before_have_no_pending_settings() -> None:
    pending = PendingSettings(("model", "port"), "port is 'x'")
    fields = orjson.loads(member_to_json(replace(member("a"), pending_settings=pending)))
    assert member_from_json(orjson.dumps(fields)).pending_settings == pending
    del fields["pending_settings"]
    assert member_from_json(orjson.dumps(fields)) == member("a")


def test_what_a_members_server_offers_round_trips() -> None:
    served = replace(member("a"), server_api=ServerApi("its-model", KNOWN_PATHS))
    fields = orjson.loads(member_to_json(served))
    assert member_from_json(orjson.dumps(fields)) == served
    fields["server_api"]["paths"].insert(0, "/sleep")  # of a version that forwards more
    assert member_from_json(orjson.dumps(fields)) == served
    del fields["server_api"]
    assert member_from_json(orjson.dumps(fields)) == member("a")


def test_adapters_of_a_member_round_trip_and_are_bounded() -> None:
    adapters = tuple(
        WorkerAdapter(f"{number:x<{MAX_ADAPTER_NAME}}", bytes(16), "e" * MAX_ADAPTER_ERROR)
        for number in range(MAX_ADAPTERS)
    )
    full = replace(member("a"), adapters=adapters)
    assert member_from_json(member_to_json(full)) == full
    assert len(member_to_json(full)) < MAX_MEMBER_BYTES / 2
    more = replace(full, adapters=(*adapters, WorkerAdapter("a", bytes(16))))
    with pytest.raises(Invalid, match="adapters must be a list of at most"):
        member_from_json(member_to_json(more))
    for wrong in ({"name": "-"}, {"digest": "ab"}, {"digest": "x"}, {"error": 1}):
        raw = orjson.loads(member_to_json(full))
        raw["adapters"][0] |= wrong
        with pytest.raises(Invalid, match="not a valid member"):
            member_from_json(orjson.dumps(raw))


def test_an_oversized_member_is_refused() -> None:
    with pytest.raises(Invalid, match="at most"):
        member_from_json(b" " * (MAX_MEMBER_BYTES + 1))


async def test_the_in_memory_registry_can_be_made_unreachable() -> None:
    registry = MemoryRegistry(ManualClock())
    registry.is_reachable = False
    for call in (registry.ping(), registry.members(), registry.announce(member("a"), LONG)):
        with pytest.raises(Unavailable):
            await call
