"""Runs one test suite over the list of adapters in Redis and over its in-memory implementation."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis
from redis.asyncio import Redis

from baton.core.adapter import MAX_ADAPTERS, AdapterEntry
from baton.errors import Overloaded, Unavailable
from baton.registry.adapters import AdapterRegistry, RedisAdapterRegistry, entry_to_json
from testkit.fakes.adapter_registry import MemoryAdapterRegistry

ENTRY = AdapterEntry("acme/sql:v1", "/adapters/sql", bytes(range(16)), "demo")
KEY = "baton:test:adapters"


@pytest.fixture(params=["memory", "redis", "signed"])
async def registry(
    request: pytest.FixtureRequest, valkey_url: str
) -> AsyncIterator[AdapterRegistry]:
    if request.param == "memory":
        yield MemoryAdapterRegistry()
        return
    async with Redis.from_url(valkey_url) as client:
        await client.flushall()
    secret = "secret" if request.param == "signed" else None
    opened = RedisAdapterRegistry(valkey_url, "test", secret)
    yield opened
    await opened.close()


async def test_entries_are_returned_as_written_sorted_by_name(registry: AdapterRegistry) -> None:
    assert await registry.adapters() == []
    other = replace(ENTRY, name="Z")
    await registry.put_adapter(ENTRY)
    await registry.put_adapter(other)
    assert await registry.adapters() == [other, ENTRY]
    changed = replace(ENTRY, path="/elsewhere")
    await registry.put_adapter(changed)
    await registry.put_adapter(ENTRY, keep_existing=True)
    assert await registry.adapters() == [other, changed]
    assert await registry.remove_adapter("Z")
    assert not await registry.remove_adapter("Z")
    assert await registry.adapters() == [changed]


async def test_number_of_entries_is_bounded(registry: AdapterRegistry) -> None:
    for number in range(MAX_ADAPTERS):
        await registry.put_adapter(replace(ENTRY, name=str(number)))
    with pytest.raises(Overloaded, match="the maximum"):
        await registry.put_adapter(ENTRY)
    await registry.put_adapter(replace(ENTRY, name="0", path="/new"))
    assert len(await registry.adapters()) == MAX_ADAPTERS


async def test_entries_of_strangers_are_ignored(valkey_url: str) -> None:
    signed = RedisAdapterRegistry(valkey_url, "test", "secret")
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
        client.hset(KEY, ENTRY.name, entry_to_json(ENTRY))
        assert await signed.adapters() == []
        await signed.put_adapter(ENTRY)
        entry = client.hget(KEY, ENTRY.name)
        client.hset(KEY, "another-name", entry)
        client.hset(KEY, b"\xff", b"{")
    assert await signed.adapters() == [ENTRY]
    other = RedisAdapterRegistry(valkey_url, "test", "another secret")
    assert await other.adapters() == []
    for each in (signed, other):
        await each.close()


async def test_forged_entries_displace_no_adapter(valkey_url: str) -> None:
    """Neither from the list, nor from the number that may be added."""
    registry = RedisAdapterRegistry(valkey_url, "test", "secret")
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
        await registry.put_adapter(ENTRY)
        client.hset(KEY, mapping={f"A{number}": b"{}" for number in range(20_000)})
        client.hset(KEY, "Z", entry_to_json(replace(ENTRY, name="Z")))
        client.hset(KEY, "huge", bytes(40 << 20))
    for _ in range(6):  # more than one turn over all entries
        assert await registry.adapters() == [ENTRY]
    other = replace(ENTRY, name="Z")
    await registry.put_adapter(other, keep_existing=True)  # in place of the forged one
    await registry.put_adapter(replace(other, path="/new"), keep_existing=True)
    assert await registry.adapters() == [other, ENTRY]
    await registry.close()


async def test_a_lost_hash_is_another_list(valkey_url: str) -> None:
    """Routers and workers write their adapters again when the list's id has changed. When an admin
    removes the last adapter, it stays the same."""
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
    registry = RedisAdapterRegistry(valkey_url, "test", "secret")
    assert await registry.adapters() == []
    first = registry.database_id
    await registry.put_adapter(ENTRY)
    assert await registry.adapters() == [ENTRY]
    assert await registry.remove_adapter(ENTRY.name)
    assert (await registry.adapters(), registry.database_id) == ([], first)
    with redis.Redis.from_url(valkey_url) as client:
        client.delete(KEY)
    assert await registry.adapters() == []
    assert registry.database_id not in ("", first)
    await registry.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"name": 1}',
        entry_to_json(replace(ENTRY, path="")),
        entry_to_json(replace(ENTRY, digest=b"short")),
        entry_to_json(replace(ENTRY, name="-")),
    ],
)
async def test_malformed_entries_are_ignored(valkey_url: str, content: bytes) -> None:
    registry = RedisAdapterRegistry(valkey_url, "test")
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
        client.hset(KEY, ENTRY.name, content)
    assert await registry.adapters() == []
    await registry.close()


async def test_unreachable_redis_is_unavailable() -> None:
    registry = RedisAdapterRegistry("redis://127.0.0.1:1/0", "test")
    with pytest.raises(Unavailable):
        await registry.adapters()
    await registry.close()
